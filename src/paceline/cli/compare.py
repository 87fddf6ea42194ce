"""`paceline compare`: shows what runs differ in, and the first step at which they do. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.args.secrets import mask_text
from paceline.cli.errors import UsageError
from paceline.cli.report import take_charts, take_value
from paceline.cli.tables import draw_table
from paceline.cli.verify import say
from paceline.core.record import jsonable
from paceline.report.differences import BrokenRun, Difference, find_differences, open_run
from paceline.report.divergence import Cause, Steps, compare_steps, find_causes
from paceline.report.run_data import RunData
from paceline.report.write import write_report

_MOST_SHOWN = 20  # differences of one section


@dataclass(frozen=True)
class Comparison:
    """The comparison of a run with the first one.

    Attributes:
        first, other: the runs.
        differences: what their records differ in.
        steps: their optimizer steps.
        causes: causes of the first step that differs, the likeliest first.
    """

    first: RunData
    other: RunData
    differences: list[Difference]
    steps: Steps
    causes: list[Cause]

    @property
    def is_same(self) -> bool:
        """True if nothing that is compared differs, and steps were compared."""
        return not self.differences and self.steps.are_same

    @property
    def verdict(self) -> str:
        """`same`, `different`, or `unknown` if nothing that is known differs and no steps were compared."""
        if self.is_same:
            return "same"
        return "different" if self.differences or self.steps.num_common else "unknown"


def run(words: Sequence[str]) -> int:
    """Compares each run with the first one, and prints the result.

    Returns:
        0 if they are the same, 1 if any differs or cannot be compared.

    Raises:
        UsageError: there are fewer than two folders, one holds no run, a file of a run is damaged, or the page cannot
            be written.
    """
    folders, page, charts, is_json = read_options(words)
    try:
        runs = [open_run(Path(folder)) for folder in folders]
    except (OSError, BrokenRun) as error:
        raise UsageError(str(error)) from error
    comparisons = [compare(runs[0], other) for other in runs[1:]]
    if page is not None:
        try:
            write_report([Path(folder) for folder in folders], page, charts=charts)
        except (OSError, ValueError, ImportError) as error:
            raise UsageError(str(error)) from error
    if is_json:
        print(json.dumps({"comparisons": [to_json(each) for each in comparisons]}, indent=2))
    else:
        for place, each in enumerate(comparisons):
            say(("\n" if place else "") + mask_text(describe(each)))
    return 0 if all(each.is_same for each in comparisons) else 1


def read_options(words: Sequence[str]) -> tuple[list[str], Path | None, str, bool]:
    """Returns the folders, the file of the page to write or None, the form of its charts, and True if JSON is wanted.

    Raises:
        UsageError: a word is unknown or missing.
    """
    folders = list(words)
    page = take_value(folders, ("--page",), "the file to write")
    has_charts = any(word.partition("=")[0] == "--charts" for word in folders)
    charts = take_charts(folders)
    is_json = "--json" in folders
    folders = [word for word in folders if word != "--json"]
    unknown = [word for word in folders if word.startswith("-")]
    if unknown or len(folders) < 2:
        other = f", not {unknown[0]}" if unknown else ""
        raise UsageError(f"compare takes two or more folders of runs, --page FILE, --charts FORM and --json{other}")
    if has_charts and page is None:
        raise UsageError(f"--charts {charts} is the form of the charts of a page: name its file with --page FILE")
    return folders, None if page is None else Path(page), charts, is_json


def compare(first: RunData, other: RunData) -> Comparison:
    """Compares two runs."""
    differences = find_differences(first, other)
    steps = compare_steps(first, other)
    return Comparison(first, other, differences, steps, find_causes(steps, differences, first, other))


def to_json(each: Comparison) -> dict[str, Any]:
    """Returns a comparison as JSON values; numbers that are not finite become text."""
    divergence = each.steps.divergence
    first_step = None
    if divergence is not None:
        first_step = {
            "step": divergence.step,
            "values": {name: list(pair) for name, pair in divergence.values.items()},
            "samples": None
            if each.steps.are_logged
            else dict(zip(("epoch", "first", "count"), divergence.place, strict=True)),
            "relative_difference": divergence.relative,
        }
    found: dict[str, Any] = jsonable(
        {
            "runs": [str(each.first.folder), str(each.other.folder)],
            "same": each.is_same,
            "differences": [
                {"section": item.section, "name": item.name, "values": list(item.values), "kind": item.kind}
                for item in each.differences
            ],
            "common_steps": each.steps.num_common,
            "last_steps": list(each.steps.last),
            "source": "logs" if each.steps.are_logged else "journal",
            "first_difference": first_step,
            "causes": [
                {"kind": cause.kind, "text": cause.text, "recorded": cause.is_recorded} for cause in each.causes
            ],
            "notes": [*notes_of(each.first), *notes_of(each.other)],
        }
    )
    return found


def describe(each: Comparison) -> str:
    """Describes a comparison for people."""
    lines = [f"{each.first.folder}  and  {each.other.folder}"]
    sections = dict.fromkeys(item.section for item in each.differences)
    for section in sections:
        items = [item for item in each.differences if item.section == section]
        shown = items[:_MOST_SHOWN]
        lines.append(f"\n{section}")
        rows = [[item.name, *_pair(item), "" if item.kind else "no effect on the steps"] for item in shown]
        lines += [f"  {line}" for line in draw_table(["", "first", "other", ""], rows)]
        if len(items) > len(shown):
            lines.append(f"  and {len(items) - len(shown)} more (--json lists all)")
    if not sections:
        lines.append("\nThe records are equal, but for names, places and times.")
    lines += ["", *_steps(each)]
    lines += [f"note: {note}" for note in (*notes_of(each.first), *notes_of(each.other))]
    lines.append(each.verdict)
    return "\n".join(lines)


def _pair(item: Difference) -> list[str]:
    if item.values[0] == item.values[1]:
        return [str(item.values[0]), ""]
    return ["absent" if value is None else str(value) for value in item.values]


def _steps(each: Comparison) -> list[str]:
    """Returns the lines about the optimizer steps."""
    steps, divergence = each.steps, each.steps.divergence
    source = "logged steps" if steps.are_logged else "optimizer steps"
    if not steps.num_common:
        return [f"The runs have no {source} in common (they end at {steps.last[0]:,} and {steps.last[1]:,})."]
    lines = []
    if divergence is None:
        lines.append(f"All {steps.num_common:,} common {source} are equal bit for bit.")
    else:
        lines.append(f"First difference: step {divergence.step:,}")
        rows = [[name, *map(repr, pair)] for name, pair in divergence.values.items()]
        lines += [f"  {line}" for line in draw_table(["", "first", "other"], rows)]
        if not steps.are_logged:
            epoch, first, count = divergence.place
            lines.append(f"  samples        {count} of epoch {epoch}, from position {first} on")
        for cause in each.causes:
            lines.append(f"  {'cause' if cause.is_recorded else 'likely'}  {cause.kind}: {cause.text}")
    if steps.are_logged:
        lines.append("A journal is missing, so only the losses, norms and learning rates of logged steps are compared.")
    if steps.last[0] != steps.last[1]:
        lines.append(f"The runs end at different steps: {steps.last[0]:,} and {steps.last[1]:,}.")
    return lines


def notes_of(run: RunData) -> list[str]:
    """Returns what limits the comparison of a run."""
    notes = [f"{run.folder}: {problem}" for problem in run.problems]
    data = run.record.get("data")
    if not isinstance(data, dict):
        notes.append(f"{run.folder}: the record holds no fingerprint of the data")
        return notes
    for name, found in data.items():
        if isinstance(found, dict) and found.get("note"):
            notes.append(f"{run.folder}: {name} data: {found['note']}")
    return notes
