"""`paceline replay RUN --step N`: reruns one optimizer step of a run and shows its samples."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

import torch

from paceline.callbacks.printer import PrinterCallback
from paceline.cli.display import output_for, say, silent
from paceline.cli.errors import UsageError
from paceline.cli.jobs import Say, Show
from paceline.cli.replay_options import ReplayOptions
from paceline.cli.tables import draw_table
from paceline.core.journal import JOURNAL_FILE, NOT_COMPUTED, find_row, read_rows
from paceline.core.record import jsonable
from paceline.pytorch.data.sampling import has_length
from paceline.pytorch.replay.step import Replayed, replay
from paceline.pytorch.trainer import Trainer

WIDTH = 108
MOST_LINES = 8
MOST_IDS = 64
MOST_VALUES = 8
MOST_RANKED = 10


def run(options: ReplayOptions, say: Say = say) -> int:
    """Reruns the step and prints it; returns the exit code.

    Raises:
        UsageError: the run's journal does not hold the step, or the run cannot be reproduced.
    """
    job = options.job
    journal = job.folder / JOURNAL_FILE
    if find_row(journal, options.step) is None:
        steps = [row.step for row in read_rows(journal)]
        held = f"it holds steps {min(steps):,} to {max(steps):,}" if steps else "it is missing or empty"
        raise UsageError(f"step {options.step:,} is not in {journal}: {held}")
    overrides = {
        "output_dir": str(job.folder),
        "report_to": "none",
        "disable_tqdm": True,
        "push_to_hub": False,
        "resume_from_checkpoint": None,
    }
    try:
        with output_for(options.is_json):
            trainer, show = importlib.import_module(f"paceline.cli.{options.module}").rebuild(job, overrides)
            trainer.remove_callback(PrinterCallback)
            if not trainer.world.is_first:
                say = silent
            progress = say_aside if options.is_json else say
            replayed = replay(trainer, options.step, job.folder, say=progress, blame=options.is_blaming)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{job.folder} cannot be reproduced: {error}") from error
    if options.is_json:
        say(json.dumps(to_json(replayed), indent=2))
        return 0
    say(describe(replayed))
    if options.is_blaming:
        say(describe_blame(replayed))
    say(describe_samples(trainer, replayed, show, options.shown))
    return 0


def say_aside(text: str) -> None:
    """Prints to the standard error: the standard output holds JSON only."""
    print(text, file=sys.stderr, flush=True)


def to_json(replayed: Replayed) -> dict[str, Any]:
    """Converts a result to plain values: its fields, those of the recorded step by name, and `is_exact`."""
    fields = {field.name: getattr(replayed, field.name) for field in dataclasses.fields(replayed)}
    fields |= {
        "recorded": replayed.recorded._asdict(),
        "samples": [dataclasses.asdict(sample) for sample in replayed.samples],
        "is_exact": replayed.is_exact,
    }
    made: dict[str, Any] = jsonable(fields)
    return made


def describe(replayed: Replayed) -> str:
    """Describes the metrics of the step and their comparison with the recorded ones."""
    recorded = replayed.recorded
    lines = [f"step {replayed.step:,}, epoch {replayed.epoch + 1}"]
    for title, name in (("loss", "loss"), ("gradient norm", "grad_norm"), ("learning rate", "learning_rate")):
        now, then = getattr(replayed, name), getattr(recorded, name)
        differs = "" if now == then or (now != now and then != then) else f"   (recorded: {_shown(then)})"
        lines.append(f"  {title:<15}{_shown(now)}{differs}")
    if replayed.is_exact:
        lines.append("  bit-exact      yes: all three equal the recorded ones")
    else:
        lines.append("  bit-exact      no: code, data, arguments, libraries or the machine have changed since")
    return "\n".join(lines)


def describe_blame(replayed: Replayed) -> str:
    """Describes the ranked samples of the step, the most conspicuous first."""
    title = "sample" if replayed.is_indexed else "position"
    shown = replayed.samples[:MOST_RANKED]
    rows = [
        [str(place), str(sample.id), f"{sample.loss:.6g}", f"{sample.grad_norm:.6g}", f"{sample.score:.1f}"]
        for place, sample in enumerate(shown, 1)
    ]
    lines = ["", "  each sample alone, without dropout, at the weights that the step started from"]
    lines += [f"    {line}" for line in draw_table(["", title, "loss", "gradient norm", "deviations"], rows)]
    if len(shown) < len(replayed.samples):
        lines.append(f"    and {len(replayed.samples) - len(shown)} more")
    return "\n".join([*lines, ""])


def describe_samples(trainer: Trainer, replayed: Replayed, show: Show | None, shown: int) -> str:
    """Describes the ids of the samples, and the first samples."""
    ids = replayed.sample_ids
    dataset = trainer.train_dataset
    is_indexed = replayed.is_indexed and has_length(dataset) and hasattr(dataset, "__getitem__")
    kind = "indices in the training set" if is_indexed else "positions in the epoch: these samples have no index"
    named = " ".join(map(str, ids[:MOST_IDS])) + (f" ... and {len(ids) - MOST_IDS} more" if len(ids) > MOST_IDS else "")
    text = f"  samples        {len(ids)} ({kind})\n" + textwrap.indent(textwrap.fill(named, WIDTH - 4), "    ")
    if not is_indexed:
        return text
    ranked = [sample.id for sample in replayed.samples] or ids
    for index in ranked[:shown]:
        text += f"\n\n  sample {index}\n" + textwrap.indent(look(dataset[index], show), "  | ", lambda line: True)
    return text


def look(sample: object, show: Show | None) -> str:
    """Describes a sample in a few lines, with the job's formatter if it supports the sample, else field by field."""
    if show is not None:
        try:
            return _cut(show(sample))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            pass  # not a sample that this formatter supports
    if isinstance(sample, Mapping):
        return _cut("\n".join(f"{name}: {_value(value)}" for name, value in sample.items()))
    if isinstance(sample, tuple | list):
        return _cut("\n".join(_value(value) for value in sample))
    return _cut(_value(sample))


def _value(value: object) -> str:
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        first = ", ".join(f"{item:.4g}" for item in value.flatten()[:MOST_VALUES].tolist())
        more = ", ..." if value.numel() > MOST_VALUES else ""
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}: {first}{more}"
    text = str(value.item() if isinstance(value, torch.Tensor) else value)
    return text if len(text) <= 3 * WIDTH else text[: 3 * WIDTH] + " ..."


def _cut(text: str) -> str:
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, WIDTH, drop_whitespace=False) or [""]]
    more = [f"... and {len(lines) - MOST_LINES} lines more"] if len(lines) > MOST_LINES + 1 else []
    return "\n".join((lines[:MOST_LINES] if more else lines) + more)


def _shown(value: float) -> str:
    return "not computed" if value == NOT_COMPUTED else repr(value)
