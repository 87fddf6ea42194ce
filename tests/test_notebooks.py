"""The notebooks of the documentation: their code runs, and their pages show the stored outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import notebooks

NOTEBOOKS = sorted(notebooks.FOLDER.glob("*.ipynb"))
JOB_SECONDS = 120


def code_of(path: Path) -> list[dict[str, object]]:
    return [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_there_are_a_tutorial_and_three_examples() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_run", "own_loss", "resume_exactly", "search"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_was_executed_in_order_and_its_page_is_written(path: Path) -> None:
    cells = code_of(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])  # type: ignore[attr-defined]
    assert notebooks.page_path(path).read_text("utf-8") == notebooks.page(path)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_code_runs_and_gives_the_stored_values(path: Path, tmp_path: Path) -> None:
    """Without Jupyter: the cells as one script, which prints the last value of each cell as the notebook shows it."""
    program = (
        "import ast, json, sys\n"
        "space, values = {}, []\n"
        "for source in json.load(sys.stdin):\n"
        "    body = ast.parse(source).body\n"
        "    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None\n"
        "    exec(compile(ast.Module(body, []), 'cell', 'exec'), space)\n"
        "    value = None if last is None else eval(compile(ast.Expression(last.value), 'cell', 'eval'), space)\n"
        "    values.append(None if value is None else repr(value))\n"
        "print('\\nVALUES' + json.dumps(values))\n"
    )
    cells = code_of(path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(["".join(cell["source"]) for cell in cells]),  # type: ignore[arg-type]
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=JOB_SECONDS,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    values = json.loads(done.stdout.rpartition("VALUES")[2])
    assert [plain(value) for value in values] == [plain(stored(cell)) for cell in cells]


def stored(cell: dict[str, object]) -> str | None:
    """Returns the value that a cell shows."""
    results = [output for output in cell["outputs"] if output["output_type"] == "execute_result"]  # type: ignore[attr-defined]
    return "".join(results[0]["data"]["text/plain"]) if results else None


def plain(text: str | None) -> str | None:
    """Returns a value without the line breaks of a notebook."""
    return None if text is None else "".join(text.split())
