"""Writes docs/parity.md: the runs that the tests make in both libraries, and what differs between the two.

python tools/parity_page.py           write
python tools/parity_page.py --check   fail where the file is not what would be written
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "parity.md"
TABLE = ROOT / "tests" / "support" / "parity_table.py"
INTRODUCTION = """\
# The same run in both

Made by `make docs` from [parity_table.py](../tests/support/parity_table.py); do not edit it by hand.

[test_same_run.py](../tests/parity/test_same_run.py) makes each run of this page twice, in `transformers.Trainer` and
in paceline, and compares every row of the log (keys, and values to 1e-5; times left out), the order of the events, the
state, the trained weights, the names of the checkpoints' files and what is in them. A difference that this page does
not list fails the tests, and so does one that it lists and that is gone.
"""


def page() -> str:
    """The page as the tables have it now."""
    table = runpy.run_path(str(TABLE), run_name="parity_table")
    runs, defects, added = table["CONFIGURATIONS"], table["DEFECTS"], table["ADDED_FILES"]
    same = sum(not run.differences for run in runs.values())
    lines = [
        INTRODUCTION,
        f"## {len(runs)} runs, {same} of them the same\n",
        "| run | model | options | what differs, and why |",
        "|---|---|---|---|",
        *(f"| {name} | {run.model} | {options(run)} | {reasons(run)} |" for name, run in runs.items()),
        "\n## Defects that are not repeated\n",
        "| name | in transformers 5.23 | here | tested in |",
        "|---|---|---|---|",
        *(f"| {name} | {one.theirs} | {one.ours} | {proof(one)} |" for name, one in defects.items()),
        "\n## Files that only a folder of paceline has\n",
        "| file | what it holds |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in added.items()),
    ]
    return "\n".join(lines) + "\n"


def proof(defect: Any) -> str:
    """A link to the file of the test that shows what happens here, and the test's name."""
    file, _, test = defect.proof.partition("::")
    return f"[{Path(file).name}](../{file})" + (f" `{test}`" if test else "")


def options(run: Any) -> str:
    """Arguments and parts of a run, in one cell."""
    parts = [f"`{name}={value!r}`" for name, value in run.options.items()]
    if run.written_by:
        before = "".join(f", `{name}={value!r}`" for name, value in run.options_before.items())
        parts.append(f"goes on from a checkpoint of {run.written_by} at step {run.stop}{before}")
    return ", ".join([run.data, *run.extras, *parts])


def reasons(run: Any) -> str:
    """Returns the differences by the defect that explains each; "nothing" if there are none."""
    by_defect: dict[str, list[str]] = {}
    for place, defect in run.differences.items():
        by_defect.setdefault(defect, []).append(place)
    return "; ".join(f"{', '.join(places)} ({defect})" for defect, places in by_defect.items()) or "nothing"


def main() -> int:
    """Write or check. Returns the exit status."""
    text = page()
    if "--check" in sys.argv[1:]:
        return int(not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
