"""The time to make the report of a run, and its size, by the number of optimizer steps.

The journal has every step; `log.jsonl` has a row with the seconds of activities for each step (the worst case,
`logging_steps=1`) or for every 500th one. The time is that of reading the files and writing the page, with charts
as SVG or, with the extra `report`, of BokehJS.

    python benchmarks/report_page.py [--quick] [--rounds 7]
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from measure import (
    choose_contenders,
    make_parser,
    report_from_child,
    run_child,
    summarize,
    take_turns,
    target,
    write_result,
)

STEPS, QUICK_STEPS = 100_000, 2_000
INTERVALS = {"a row every 500 steps": 500, "a row every step": 1}
FORMS = {"": "svg", " (bokeh)": "bokeh"}
PAGES = {f"{name}{suffix}": (interval, form) for name, interval in INTERVALS.items() for suffix, form in FORMS.items()}
NEEDS = {name: "bokeh" if form == "bokeh" else "paceline" for name, (_, form) in PAGES.items()}
LIMIT_SECONDS, LIMIT_MB = 2.0, 5.0


def write_run(folder: Path, steps: int, interval: int) -> None:
    """Writes the files of a run."""
    from paceline.core.journal import FORMAT, JOURNAL_FILE

    random, step = np.random.default_rng(0), np.arange(1, steps + 1)
    rows = np.zeros(steps, FORMAT)
    rows["step"], rows["num_samples"], rows["is_counted"] = step, 8, 1
    rows["loss"] = 3 * np.exp(-step / steps * 3) + random.normal(0, 0.1, steps)
    rows["grad_norm"], rows["learning_rate"] = random.gamma(2, 1, steps), 1e-3 * (1 - step / steps)
    rows.tofile(folder / JOURNAL_FILE)
    names = ("data", "transfer", "forward", "backward", "optimizer", "log", "other")
    with (folder / "log.jsonl").open("w") as file:
        for at in range(interval, steps + 1, interval):
            row: dict[str, Any] = {"step": at, "epoch": at / 1000, "loss": float(rows["loss"][at - 1])}
            row |= {f"time/{name}": round(float(value), 6) for name, value in zip(names, random.random(7), strict=True)}
            file.write(json.dumps({**row, "resource/process_memory_gb": 1.5, "time": 1.7e9 + at}) + "\n")
    record = {"started": "2026-01-01T00:00:00+00:00", "run": {"id": "a"}, "plan": {"max_steps": steps}}
    (folder / "run.json").write_text(json.dumps(record))


def measure_page(interval: int, charts: str, steps: int) -> dict[str, float]:
    """Returns the seconds that a page took, its processor time, and its size in MB, in this fresh process."""
    from paceline.report.write import write_report

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder, steps, interval)
        wall, processor = time.perf_counter(), time.process_time()
        path = write_report([folder], charts=charts)
        passed, worked = time.perf_counter() - wall, time.process_time() - processor
        return {"seconds": passed, "cpu_seconds": worked, "mb": path.stat().st_size / 1e6}


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=7)
    arguments = parser.parse_args()
    steps = QUICK_STEPS if arguments.quick else STEPS
    if arguments.child:
        report_from_child(measure_page(*PAGES[arguments.child], steps))
        return
    if arguments.quick:
        arguments.rounds = 1
    contenders = choose_contenders(NEEDS, arguments.contenders)

    def measure(name: str) -> dict[str, Any]:
        return run_child(__file__, ["--child", name, *(["--quick"] if arguments.quick else [])], num_threads=1)

    measured = take_turns(contenders, arguments.rounds, measure)
    rows: dict[str, Any] = {
        name: {key: summarize([row[key] for row in measured[name]]) for key in ("seconds", "cpu_seconds", "mb")}
        for name in contenders
    }
    slowest = max((row["seconds"]["median"] for row in rows.values()), default=None)
    largest = max((row["mb"]["median"] for row in rows.values()), default=None)
    targets = [
        target(f"time to make the report of {steps:,} steps", slowest, LIMIT_SECONDS, "s"),
        target(f"size of the report of {steps:,} steps", largest, LIMIT_MB, "MB"),
    ]
    settings = {"steps": steps, "threads": 1}
    write_result(
        arguments, "report_page", {"settings": settings, "rows": rows, "measured": measured, "targets": targets}
    )


if __name__ == "__main__":
    main()
