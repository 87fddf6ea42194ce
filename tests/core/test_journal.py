"""The journal: rows go in and come out, and no crash or full disk costs those that were there."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import journal
from paceline.core.journal import FORMAT, UpdateRow, append_rows, find_row, read_rows, truncate


def rows(*steps: int) -> list[UpdateRow]:
    return [UpdateRow(step, 0, 4 * step, 4, 1 / (step + 1), 0.5, 1e-3, step % 3 != 0) for step in steps]


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, FORMAT.itemsize - 1))
def test_what_is_left_after_a_cut(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, step: int, half: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.bin"
    append_rows(path, rows(*range(1, num_rows + 1)))
    with path.open("ab") as file:
        file.write(bytes(half))  # of a row that a crash cut off
    truncate(path, step)
    kept = rows(*range(1, min(step, num_rows) + 1))
    assert read_rows(path) == kept
    append_rows(path, rows(step + 1))
    assert read_rows(path) == [*kept, *rows(step + 1)]
    assert find_row(path, step + 1) == rows(step + 1)[0]


def test_a_journal_that_is_not_there_needs_no_cut(tmp_path: Path) -> None:
    truncate(tmp_path / "journal.bin", 3)
    assert read_rows(tmp_path / "journal.bin") == []


def test_a_process_that_dies_in_the_cut_loses_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever call it dies in: all rows are there, or those that stay."""
    path = tmp_path / "journal.bin"

    def dies(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    for holder, name in ((os, "truncate"), (journal, "append_rows"), (Path, "unlink"), (os, "replace")):
        path.unlink(missing_ok=True)
        append_rows(path, rows(1, 2, 3, 4))
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, dies)
            try:
                truncate(path, 2)
            except KeyboardInterrupt:
                assert read_rows(path) == rows(1, 2, 3, 4)
            else:
                assert read_rows(path) == rows(1, 2)
