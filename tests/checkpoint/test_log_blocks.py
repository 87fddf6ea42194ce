"""The log in checkpoints: each full block of rows is written once, and no checkpoint ever lacks or changes a row."""

import errno
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import folders
from paceline.checkpoint.log_blocks import STATE_FILE, StateFile
from paceline.checkpoint.manifest import KnownFile, verify
from paceline.core import log_text
from paceline.core.log_text import BLOCK_FOLDER, LogText
from paceline.core.state import TrainerState

BLOCK = 6  # rows of a block here


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_text, "CHUNK_ROWS", 2)
    monkeypatch.setattr(log_text, "CHUNKS_PER_BLOCK", BLOCK // 2)


def rows_of(first: int, last: int) -> list[dict[str, Any]]:
    return [{"loss": 1 / step, "step": step} for step in range(first, last + 1)]


def save(state: TrainerState, log: LogText, folder: Path, *, is_whole: bool = False) -> Path:
    known: dict[str, KnownFile] = {}
    final = folder / folders.checkpoint_name(state.global_step)
    with folders.staged(final, known) as temporary:
        StateFile(state.text(log), log, final, is_whole=is_whole).write(temporary, known)
    assert verify(final) == []
    return final


def loaded(checkpoint: Path) -> TrainerState:
    return TrainerState.load_from_json(checkpoint / STATE_FILE)


def blocks_in(checkpoint: Path) -> list[Path]:
    return sorted((checkpoint / BLOCK_FOLDER).glob("rows-*"), key=lambda path: int(path.name.split("-")[1]))


def trained(num_rows: int) -> TrainerState:
    return TrainerState(global_step=num_rows, max_steps=1000, log_history=rows_of(1, num_rows))


@pytest.mark.parametrize("number", [0, 1, BLOCK, 2 * BLOCK - 1])
def test_a_log_of_less_than_two_blocks_is_one_file(tmp_path: Path, number: int) -> None:
    checkpoint = save(trained(number), LogText(), tmp_path)
    assert {path.name for path in checkpoint.iterdir()} == {STATE_FILE, folders.MANIFEST_NAME}
    assert json.loads((checkpoint / STATE_FILE).read_text())["log_history"] == rows_of(1, number)


@pytest.mark.parametrize("number", [2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 5 * BLOCK + 5])
def test_the_file_of_a_longer_log_holds_at_least_a_block_of_the_newest_rows(tmp_path: Path, number: int) -> None:
    checkpoint = save(trained(number), LogText(), tmp_path)
    newest = json.loads((checkpoint / STATE_FILE).read_text())["log_history"]
    assert BLOCK <= len(newest) < 2 * BLOCK
    parts = [json.loads(path.read_text()) for path in blocks_in(checkpoint)]
    assert all(len(part) == BLOCK for part in parts)
    assert [row for part in [*parts, newest] for row in part] == rows_of(1, number)
    assert loaded(checkpoint) == trained(number)


def test_a_block_is_written_once_for_all_checkpoints(tmp_path: Path) -> None:
    state, log, written = trained(0), LogText(), 0
    for step in range(1, 101):
        state.log_history += rows_of(step, step)
        state.global_step = step
        checkpoint = save(state, log, tmp_path)
        assert loaded(checkpoint) == state
        new = [path for path in blocks_in(checkpoint) if path.stat().st_nlink == 1]
        written += len(new)
        if step > 1:
            shutil.rmtree(tmp_path / f"checkpoint-{step - 1}")  # as rotation does
            assert loaded(checkpoint) == state
    assert written == len(blocks_in(checkpoint)) == 100 // BLOCK - 1


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_each_checkpoint_holds_the_rows_of_its_moment(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever user code does to the rows, and whatever happens to earlier checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    state, log = trained(20), LogText()
    expected: dict[Path, str] = {}
    for step in range(1, data.draw(st.integers(1, 8))):
        rows = state.log_history
        for _ in range(data.draw(st.integers(0, 3))):
            place = data.draw(st.integers(0, max(len(rows) - 1, 0)))
            match data.draw(st.sampled_from(["set", "drop", "insert", "clear", "append", "delete a checkpoint"])):
                case "set" if rows:
                    rows[place]["loss"] = data.draw(st.sampled_from([-1, True, float("nan"), "x"]))
                case "drop" if rows:
                    del rows[place]
                case "insert":
                    rows.insert(place, {"note": step, "step": place})
                case "clear":
                    rows.clear()
                case "delete a checkpoint" if expected:
                    gone = data.draw(st.sampled_from(sorted(expected)))
                    shutil.rmtree(gone)
                    del expected[gone]
                case _:
                    rows.extend(rows_of(len(rows) + 1, len(rows) + 9))
        state.global_step = step
        checkpoint = save(state, log, folder, is_whole=data.draw(st.booleans()))
        expected[checkpoint] = json.dumps(rows, sort_keys=True)
        for one, text in expected.items():
            assert json.dumps(loaded(one).log_history, sort_keys=True) == text
            assert verify(one) == []


def test_a_changed_row_is_written_anew_and_leaves_earlier_checkpoints_as_they_are(tmp_path: Path) -> None:
    state, log = trained(20), LogText()
    first = save(state, log, tmp_path)
    state.log_history[2]["loss"] = 17.0
    state.global_step += 1
    second = save(state, log, tmp_path)
    assert loaded(first).log_history == rows_of(1, 20)
    assert loaded(second) == state
    assert [path.stat().st_nlink for path in blocks_in(second)] == [1, 2]


def test_a_second_attempt_leaves_the_blocks_of_earlier_checkpoints_as_they_are(tmp_path: Path) -> None:
    """The hidden folder of a failed attempt holds links to them."""
    state, log = trained(20), LogText()
    first = save(state, log, tmp_path)
    state.log_history += rows_of(21, 40)
    state.global_step = 40
    hidden, final = tmp_path / "hidden", tmp_path / "checkpoint-40"
    hidden.mkdir()
    file = StateFile(state.text(log), log, final, is_whole=False)
    file.write(hidden, {})
    assert blocks_in(hidden)[0].samefile(blocks_in(first)[0])
    state.log_history[0]["loss"] = 17.0
    file = StateFile(state.text(log), log, final, is_whole=False)
    file.write(hidden, {})
    assert loaded(first).log_history == rows_of(1, 20)
    assert loaded(hidden) == state
    assert verify(first) == []


def test_a_disk_without_hard_links_holds_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    state, log = trained(20), LogText()
    save(state, log, tmp_path)
    state.global_step += 1
    checkpoint = save(state, log, tmp_path)
    assert loaded(checkpoint) == state
    assert {path.stat().st_nlink for path in blocks_in(checkpoint)} == {1}


def test_an_overwritten_checkpoint_has_no_blocks_of_the_earlier_one(tmp_path: Path) -> None:
    state = trained(30)
    save(state, LogText(), tmp_path)
    state.log_history = rows_of(1, 7)
    assert loaded(save(state, LogText(), tmp_path)) == state


def test_all_rows_are_written_into_one_file_on_request(tmp_path: Path) -> None:
    state = trained(30)
    checkpoint = save(state, LogText(), tmp_path, is_whole=True)
    assert json.loads((checkpoint / STATE_FILE).read_text())["log_history"] == rows_of(1, 30)
    assert not (checkpoint / BLOCK_FOLDER).exists()


def test_a_whole_file_beside_the_blocks_of_a_copied_checkpoint_is_read_alone(tmp_path: Path) -> None:
    state = trained(30)
    state.log_history[0]["loss"] = float("nan")
    checkpoint = save(state, LogText(), tmp_path)
    state.log_history += rows_of(31, 32)
    state.save_to_json(checkpoint / STATE_FILE)
    assert json.dumps(loaded(checkpoint).log_history) == json.dumps(state.log_history)


@pytest.mark.parametrize("rows", [[], rows_of(9, 30), rows_of(29, 30)])
def test_a_file_of_other_rows_beside_blocks_is_read_alone(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    checkpoint = save(trained(30), LogText(), tmp_path)
    state = trained(30)
    state.log_history = rows
    state.save_to_json(checkpoint / STATE_FILE)
    assert loaded(checkpoint) == state


def test_rows_that_are_all_alike_are_all_read(tmp_path: Path) -> None:
    state = trained(30)
    state.log_history = [{"loss": 1.0, "step": 0} for _ in range(30)]
    assert loaded(save(state, LogText(), tmp_path)) == state


def test_values_that_are_not_plain_do_not_end_the_sharing(tmp_path: Path) -> None:
    state, log = trained(30), LogText()
    state.log_history[3]["path"] = Path("a")
    first = save(state, log, tmp_path)
    state.global_step += 1
    second = save(state, log, tmp_path)
    assert all(one.samefile(other) for one, other in zip(blocks_in(first), blocks_in(second), strict=True))


def test_the_first_block_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline")
    state, log = trained(11), LogText()
    save(state, log, tmp_path)
    assert caplog.messages == []
    for step in (20, 21):
        state.log_history, state.global_step = rows_of(1, step), step
        save(state, log, tmp_path)
    assert [message for message in caplog.messages if "save_full_log_history=True" in message] == caplog.messages
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda block: block.unlink(), "lacks the file of rows 1 and following"),
        (lambda block: block.with_name("rows-13-18.json").unlink(), "lacks the file of rows 13 and following, of 24"),
        (lambda block: block.with_name("rows-19-24.json").unlink(), "lacks the file of rows 19 and following, of 24"),
        (lambda block: block.rename(block.with_name("rows-1-0.json")), "lacks the file of rows 1 and following"),
        (lambda block: block.with_name("index.json").write_text("["), "index.json is not readable as JSON"),
        (lambda block: block.with_name("index.json").write_text("[]"), "index.json should hold a number"),
        (lambda block: block.with_name("index.json").write_text('{"num_rows": -1}'), "index.json should hold a number"),
        (lambda block: block.write_text("["), "not readable as JSON"),
        (lambda block: block.write_text("[" * 100_000), "not readable as JSON"),
        (lambda block: block.write_text("{}"), "should hold a list of log rows"),
        (lambda block: block.write_text("[1, 2, 3, 4, 5, 6]"), "should hold a list of log rows"),
        (lambda block: block.write_text("[{}]"), "holds 1 rows"),
        (lambda block: block.write_bytes(b"\xff"), "not readable as JSON"),
        (lambda block: (block.unlink(), block.mkdir()), "is no file of log rows"),
        (lambda block: (block.unlink(), os.mkfifo(block)), "is no file of log rows"),
        (lambda block: os.truncate(block, 1 << 31), "is no file of log rows"),
    ],
)
def test_missing_and_damaged_blocks_are_errors(tmp_path: Path, harm: Any, message: str) -> None:
    checkpoint = save(trained(30), LogText(), tmp_path)
    harm(blocks_in(checkpoint)[0])
    assert verify(checkpoint) != []
    with pytest.raises(ValueError, match=message) as caught:
        loaded(checkpoint)
    assert BLOCK_FOLDER in str(caught.value)


def test_files_of_other_names_are_not_read(tmp_path: Path) -> None:
    checkpoint = save(trained(30), LogText(), tmp_path)
    for name in ("notes.json", "rows-1-6.json.bak", ".rows-1-6.json", "rows-x-y.json"):
        (checkpoint / BLOCK_FOLDER / name).write_text("?")
    assert loaded(checkpoint) == trained(30)
