"""Writes the parts of the documentation that are made from the code: the table of modules in docs/architecture.md.

python tools/docs.py           write
python tools/docs.py --check   fail where the file is not what would be written
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "paceline"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
TABLE = re.compile(r"(<!-- modules: .*? -->\n).*?(<!-- end of modules -->)", re.DOTALL)


def main() -> int:
    """Write or check. Returns the exit status."""
    old = ARCHITECTURE.read_text(encoding="utf-8")
    new = with_modules(old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    ARCHITECTURE.write_text(new, encoding="utf-8")
    return 0


def with_modules(text: str) -> str:
    """`text` with the table of modules as the code has it now."""
    return TABLE.sub(lambda match: f"{match[1]}{module_table()}{match[2]}", text)


def module_table() -> str:
    """Every module with the first sentence of its docstring, in a fixed-width block."""
    paths = [path for path in PACKAGE.rglob("*.py") if not any(part.startswith(".") for part in path.parts)]
    names = {path.relative_to(PACKAGE).as_posix(): path for path in paths if path.name != "__init__.py"}
    folders = sorted({path.relative_to(PACKAGE).parent.as_posix() for path in names.values()})
    lines = ["```text"]
    for folder in folders:
        if folder != ".":
            lines.append(f"{folder}/")
        for name in sorted(name for name in names if Path(name).parent.as_posix() == folder):
            indent = "" if folder == "." else "    "
            lines.append(f"{indent + Path(name).name:<26}{summary(names[name])}")
    return "\n".join([*lines, "```", ""])


def summary(path: Path) -> str:
    """The first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.])\s|:$", paragraph)[0].rstrip(".")


if __name__ == "__main__":
    sys.exit(main())
