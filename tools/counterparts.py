"""The examples as scripts for transformers: the same file, one import changed."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SUFFIX = "_transformers"


def examples() -> list[Path]:
    """The scripts that have a counterpart."""
    return [path for path in sorted(EXAMPLES.glob("*.py")) if is_example(path)]


def is_example(path: Path) -> bool:
    """True if a script imports paceline and is no counterpart itself."""
    return not path.stem.endswith(SUFFIX) and "\nfrom paceline import " in path.read_text(encoding="utf-8")


def counterpart(path: Path) -> str:
    """The script with transformers' names in the place of paceline's.

    Raises:
        ValueError: it imports paceline in other than one statement.
    """
    text = path.read_text(encoding="utf-8")
    if text.count("from paceline import ") != 1:
        raise ValueError(f"{path} needs exactly one `from paceline import`")
    return text.replace("from paceline import ", "from transformers import ")


def pages() -> dict[Path, str]:
    """Every counterpart's file and its content."""
    return {path.with_name(f"{path.stem}{SUFFIX}.py"): counterpart(path) for path in examples()}
