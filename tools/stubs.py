"""The type stubs of the options, `sections.pyi` and `seq2seq.pyi`: editors show the text of an option from them.

They read docstrings of attributes, and no metadata of dataclass fields. A stub repeats the declarations of its module
with each text as a docstring, and is made by `python tools/docs.py`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "src" / "paceline" / "args"
MODULES = ("sections", "seq2seq")  # which declare options and do nothing else
WIDTH = 110  # characters of a line of text
MARK = "TEXT_OF_"


def pages() -> dict[Path, str]:
    """The stubs, with their content."""
    return {FOLDER / f"{name}.pyi": make_stub(name) for name in MODULES}


def make_stub(name: str) -> str:
    """Returns the stub of a module."""
    module = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    texts: dict[str, str] = {}
    kept = [declaration_of(node, texts) for node in module.body]
    module.body = [node for node in kept if node is not None]
    keep_used_imports(module)
    source = re.sub(rf"^    {MARK}(\w+)$", lambda match: docstring(texts[match[1]]), ast.unparse(module), flags=re.M)
    header = f"# Generated from {name}.py by tools/docs.py; do not edit.\n\n"
    return formatted(header + source, FOLDER / f"{name}.pyi")


def declaration_of(node: ast.stmt, texts: dict[str, str]) -> ast.stmt | None:
    """Returns what the stub says of a statement of the module; None: nothing.

    Args:
        texts: receives the text of each option.
    """
    if isinstance(node, ast.ClassDef):
        node.body = [part for entry in node.body for part in option_of(entry, texts)]
    elif isinstance(node, ast.FunctionDef):
        node.body = [ast.Expr(ast.Constant(...))]
    elif isinstance(node, ast.If):  # of TYPE_CHECKING
        return node.body[0]
    elif isinstance(node, ast.Expr):  # the docstring
        return None
    return node


def option_of(node: ast.stmt, texts: dict[str, str]) -> list[ast.stmt]:
    """Returns an entry of a class: an option is followed by a mark in place of its text."""
    if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Call):
        return [node]
    assert isinstance(node.target, ast.Name)
    name = node.target.id
    texts[name] = ast.literal_eval(node.value.args[1])
    node.value = ast.Constant(...)
    return [node, ast.Expr(ast.Name(f"{MARK}{name}"))]


def docstring(text: str) -> str:
    """Returns a text as an indented docstring."""
    assert "\\" not in text, text
    assert not text.endswith('"'), text
    lines = textwrap.wrap(text, WIDTH, break_on_hyphens=False, break_long_words=False)
    return textwrap.indent('"""' + "\n".join(lines) + '"""', "    ")


def keep_used_imports(module: ast.Module) -> None:
    """Removes the imported names that the stub does not use."""
    used = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    for node in list(module.body):
        if isinstance(node, ast.ImportFrom):
            node.names = [name for name in node.names if (name.asname or name.name) in used]
            if not node.names:
                module.body.remove(node)


def formatted(source: str, path: Path) -> str:
    """Returns a stub as ruff sorts and formats it."""
    for command in (["check", "--fix-only", "--quiet"], ["format"]):
        words = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(path), "-"]
        source = subprocess.run(words, input=source, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return source
