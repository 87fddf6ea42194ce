"""Writes that fail are kept in order, and written completely once the disk accepts them."""

import logging
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.retry_writer import RetryWriter, append_whole


@given(st.lists(st.booleans(), max_size=12))
def test_everything_is_written_once_and_in_order(tmp_path_factory: pytest.TempPathFactory, works: list[bool]) -> None:
    folder = tmp_path_factory.mktemp("outbox")
    path, other = folder / "lines", folder / "other"
    retry_writer, is_working = RetryWriter(), False

    def write(number: int) -> None:
        if not is_working:
            raise OSError(28, "full")
        append_whole(path, b"%d\n" % number)

    for number, is_working in enumerate(works):
        retry_writer.retry()
        retry_writer.put(path, partial(write, number))
        retry_writer.put(other, partial(append_whole, other, b"x"))  # is not held up
        expected = number + 1 if is_working else max((i + 1 for i in range(number) if works[i]), default=0)
        assert (path.read_text().split() if path.exists() else []) == list(map(str, range(expected)))
    is_working = True
    retry_writer.close()
    assert (path.read_text().split() if path.exists() else []) == list(map(str, range(len(works))))
    assert len(other.read_bytes() if works else b"") == len(works)


def test_it_warns_once_for_each_outage_and_says_what_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    retry_writer, path = RetryWriter(), tmp_path / "notes"
    for _ in range(2):
        path.mkdir()
        for _ in range(3):
            retry_writer.retry()
            retry_writer.put(path, partial(append_whole, path, b"x"))
        path.rmdir()
        retry_writer.retry()
        assert path.read_bytes() == b"xxx"
        path.unlink()
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "Free space" in caplog.text
    path.mkdir()
    retry_writer.put(path, partial(append_whole, path, b"x"))
    retry_writer.close()
    assert f"incomplete files: {path}" in caplog.text


def test_other_errors_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        RetryWriter().put(tmp_path / "notes", lambda: 1 // 0)


def test_what_a_full_disk_took_of_it_goes_again(tmp_path: Path) -> None:
    """The system writes what fits, and refuses the rest."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "rows"
    append_whole(path, b"a" * 100)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            append_whole(path, b"b" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"a" * 100
