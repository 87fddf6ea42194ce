"""Shared by all benchmarks: contenders in fresh processes that take turns, medians of paired ratios, result files.

A machine that other people use is slower at one minute than at the next. So contenders run one after the other, A B C
A B C ..., a ratio is taken between neighbours of one round, and the median over the rounds is reported with its range.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from history import find_commit

RESULTS = Path(__file__).resolve().parent / "results"
LIBRARIES = ("torch", "transformers", "accelerate", "lightning", "tensorflow", "keras", "numpy")
CHILD_MINUTES = 20

Measured = dict[str, Any]


class Failed(RuntimeError):
    """A contender's process ended with an error; the message holds the end of what it said."""


def make_parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="how often each contender runs")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it works, proves nothing")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder that the result is written to")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def choose_contenders(needs: Mapping[str, str], asked: Sequence[str] | None) -> list[str]:
    """The contenders that were asked for and whose library is installed, in the order of `needs` (name -> module).

    Raises:
        SystemExit: one that was asked for does not exist.
    """
    unknown = sorted(set(asked or ()) - set(needs))
    if unknown:
        raise SystemExit(f"--contenders {' '.join(unknown)}: there are {', '.join(needs)}.")
    chosen = [name for name in needs if asked is None or name in asked]
    for name in [name for name in chosen if not is_installed(needs[name])]:
        print(f"{name}: left out, {needs[name]} is not installed", file=sys.stderr)
        chosen.remove(name)
    return chosen


def run_child(script: str, arguments: Sequence[str], *, num_threads: int | None = None) -> Measured:
    """Run `script` in a fresh process and return what it reported with `report_from_child`.

    Args:
        script: path of a Python file.
        arguments: its command line.
        num_threads: of torch and the mathematical libraries; None: theirs to choose.

    Raises:
        Failed: it ended with an error, or without a report.
    """
    environment = dict(os.environ, TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else a source tree is compiled anew each time, a wheel is not
    if num_threads is not None:
        environment.update(OMP_NUM_THREADS=str(num_threads), MKL_NUM_THREADS=str(num_threads))
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60 * CHILD_MINUTES)
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise Failed(f"{shlex.join(arguments)} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    report: Measured = json.loads(lines[-1])
    return report


def report_from_child(report: Measured) -> None:
    """Hand a child's numbers to its parent: one line of JSON, the last one on standard output."""
    sys.stdout.flush()
    print("\n" + json.dumps(report), flush=True)


def take_turns(contenders: Sequence[str], rounds: int, measure: Callable[[str], Measured]) -> dict[str, list[Measured]]:
    """Measure every contender once per round, in the same order each time."""
    measured: dict[str, list[Measured]] = {name: [] for name in contenders}
    for number in range(1, rounds + 1):
        for name in contenders:
            measured[name].append(measure(name))
            numbers = {key: value for key, value in measured[name][-1].items() if isinstance(value, int | float)}
            told = ", ".join(f"{key} {value:,.4g}" for key, value in numbers.items())
            print(f"round {number}/{rounds}  {name:<22} {told}", file=sys.stderr, flush=True)
    return measured


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(measured: Mapping[str, Sequence[Measured]], key: str, base: str) -> dict[str, dict[str, float]]:
    """Each contender's `key` over that of `base` in the same round: median and range."""
    if base not in measured:
        return {}
    bases = [row[key] for row in measured[base]]
    return {
        name: summarize([row[key] / other for row, other in zip(rows, bases, strict=True)])
        for name, rows in measured.items()
    }


def target(name: str, value: float | None, limit: float, unit: str) -> dict[str, Any]:
    """A number that must not be above its limit."""
    return {"name": name, "value": value, "limit": limit, "unit": unit, "met": value is not None and value <= limit}


# ---- what the numbers were taken on


def describe_machine() -> dict[str, Any]:
    """Processor, memory, accelerator, system: no names of machines or people."""
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "memory_gib": memory_gib(),
        "accelerator": accelerator_name(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def processor_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_gib() -> int | None:
    if not hasattr(os, "sysconf"):
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def accelerator_name() -> str | None:
    if not is_installed("torch"):
        return None
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def library_versions() -> dict[str, str]:
    """Versions of paceline and of everything it is compared with."""
    found = {"paceline": importlib.import_module("paceline").__version__}
    for name in LIBRARIES:
        if is_installed(name):
            found[name] = importlib.metadata.version(name)
    return found


def write_result(arguments: argparse.Namespace, name: str, content: Mapping[str, Any]) -> Path:
    """Write `<output>/<name>.json`: the numbers, where they were taken, of which commit, and by which command."""
    words = [word for word in sys.argv[1:] if word != str(arguments.output) and word != "--output"]
    result = {
        "benchmark": name,
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "quick": arguments.quick,
        "rounds": arguments.rounds,
        **find_commit(),
        "machine": describe_machine(),
        "versions": library_versions(),
        **content,
    }
    path: Path = arguments.output / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in result.get("targets", []):
        value = "not measured" if row["value"] is None else f"{row['value']:.3g}"
        print(f"{'met ' if row['met'] else 'OPEN'}  {row['name']}: {value} (limit {row['limit']:.4g} {row['unit']})")
    print(f"written to {path}")
    return path
