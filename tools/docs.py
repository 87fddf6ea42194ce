"""Writes what is made from the code: the table of modules in docs/architecture.md, the table of names beside the
reference's (docs/api_table.md), the pages of the API reference and of the options, the examples as scripts for
transformers, and the type stubs of the options.

python tools/docs.py           write
python tools/docs.py --check   fail where a file is not what would be written, and name it
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import api_table
import counterparts
import reference
import stubs

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "paceline"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
TABLE = re.compile(r"(<!-- modules: .*? -->\n).*?(<!-- end of modules -->)", re.DOTALL)


def main() -> int:
    """Write or check. Returns the exit status."""
    wanted = pages()
    behind = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    extra = [path for path in generated_files() if path not in wanted]
    for path in [*behind, *extra]:
        print(path.relative_to(ROOT).as_posix())
    if "--check" in sys.argv[1:]:
        return int(bool(behind or extra))
    for path in behind:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")
    for path in extra:
        path.unlink()
    return 0


def pages() -> dict[Path, str]:
    """Every file that is made, with its content."""
    architecture = with_modules(ARCHITECTURE.read_text(encoding="utf-8"))
    references = {**api_table.pages(), **reference.pages()}
    return {ARCHITECTURE: architecture, **references, **counterparts.pages(), **stubs.pages()}


def generated_files() -> list[Path]:
    """The files that lie where all files are made; one that is not wanted any more goes."""
    return [*reference.FOLDER.glob("*.md"), *counterparts.EXAMPLES.glob(f"*{counterparts.SUFFIX}.py")]


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
