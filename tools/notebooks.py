"""Executes the notebooks of docs/notebooks, stores their outputs, and writes each as a page of the site.

python tools/notebooks.py           execute and write; needs nbclient and ipykernel
python tools/notebooks.py --pages   write the pages from the stored outputs
python tools/notebooks.py --check   fail where a page is not what would be written
"""

from __future__ import annotations

import base64
import importlib
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "notebooks"
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
CELL_SECONDS = 120


def main() -> int:
    """Execute, write or check. Returns the exit status."""
    words = sys.argv[1:]
    paths = sorted(FOLDER.glob("*.ipynb"))
    if not words:
        for path in paths:
            execute(path)
    stale = [path for path in paths if not page_path(path).exists() or page_path(path).read_text("utf-8") != page(path)]
    if "--check" in words:
        return int(bool(stale))
    for path in stale:
        page_path(path).write_text(page(path), encoding="utf-8")
    return 0


def execute(path: Path) -> None:
    """Runs a notebook in an empty folder, and stores its outputs in it.

    Raises:
        CellExecutionError: a cell has failed.
    """
    nbclient: Any = importlib.import_module("nbclient")
    nbformat: Any = importlib.import_module("nbformat")
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(notebook, timeout=CELL_SECONDS, resources={"metadata": {"path": folder}})
        client.execute()
        text = json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False)
        stored = json.loads(text.replace(str(Path(folder).resolve()), "/home/me"))
    for cell in stored["cells"]:
        cell["metadata"] = {}  # times of execution
        if cell["cell_type"] == "code":
            cell["outputs"] = cleaned(cell["outputs"])
    stored["metadata"]["language_info"] = {"name": "python"}
    path.write_text(json.dumps(stored, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def cleaned(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the outputs of a cell with what was printed in one piece, without messages of other packages."""
    kept: list[dict[str, Any]] = []
    for output in outputs:
        if output.get("name") == "stderr" or output.get("data", {}).get("text/html") == [""]:
            continue
        if output["output_type"] == "stream" and kept and kept[-1]["output_type"] == "stream":
            kept[-1]["text"] = "".join(kept[-1]["text"]) + "".join(output["text"])
            continue
        kept.append(output)
    for output in kept:
        if output["output_type"] == "stream":
            output["text"] = "".join(output["text"]).splitlines(keepends=True)
    return kept


def page_path(path: Path) -> Path:
    """Returns the page of a notebook."""
    return path.with_suffix(".md")


def page(path: Path) -> str:
    """Returns the page of a notebook: its text, its code, and its stored outputs."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [text for text in map(shown, cell["outputs"]) if text]
    link = f"This page is an executed notebook: [{path.name}]({path.name})."
    return "\n\n".join([parts[0], link, *parts[1:]]) + "\n"


def shown(output: dict[str, Any]) -> str:
    """Returns an output in Markdown; an empty text for one that shows nothing."""
    if output["output_type"] == "stream":
        return literal("".join(output["text"]))
    data = output.get("data", {})
    if "image/png" in data:
        content = "".join(data["image/png"]).strip()
        base64.b64decode(content, validate=True)
        return f'<img alt="output" src="data:image/png;base64,{content}">'
    if "text/html" in data:
        markup = " ".join("".join(data["text/html"]).split())  # a blank line would end the block
        return f"<div>{markup}</div>" if markup else ""
    return literal("".join(data.get("text/plain", "")))


def literal(text: str) -> str:
    """Returns text as a block; of a line that was drawn over itself, the last state."""
    lines = [ANSI.sub("", line).rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]
    plain = "\n".join(lines).strip("\n")
    return f"```text\n{plain}\n```" if plain.strip() else ""


if __name__ == "__main__":
    sys.exit(main())
