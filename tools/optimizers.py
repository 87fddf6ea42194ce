"""Writes the table of optimizers in docs/optimizers.md from the registry.

python tools/optimizers.py           write
python tools/optimizers.py --check   fail where the file is not what would be written
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from paceline.pytorch.optim.libraries import EXTRA_OF
from paceline.pytorch.optim.optimizers import OPTIMIZERS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "optimizers.md"
TABLE = re.compile(r"(<!-- optimizers: .*? -->\n).*?(<!-- end of optimizers -->)", re.DOTALL)


def main() -> int:
    """Write or check. Returns the exit status."""
    old = PAGE.read_text(encoding="utf-8")
    new = with_table(old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    PAGE.write_text(new, encoding="utf-8")
    return 0


def with_table(text: str) -> str:
    """`text` with the table as the registry has it now."""
    return TABLE.sub(lambda match: f"{match[1]}{table()}{match[2]}", text)


def table() -> str:
    """One row for each name."""
    lines = ["| `optim` | package | extra | runs on | notes |", "| --- | --- | --- | --- | --- |"]
    for name, entry in OPTIMIZERS.items():
        extra = f"`{EXTRA_OF[entry.package]}`" if entry.package in EXTRA_OF else ""
        devices = ", ".join(sorted(entry.devices)) or "any device"
        lines.append(f"| `{name}` | {entry.package} | {extra} | {devices} | {entry.note} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
