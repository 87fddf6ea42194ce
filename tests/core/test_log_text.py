import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import log_text
from paceline.core.log_text import CHUNK_ROWS, LogText
from paceline.core.state import TrainerState

Rows = list[dict[str, Any]]


def some_rows(number: int, first: int = 0) -> Rows:
    return [
        {"loss": 1 / (step + 1), "grad_norm": step / 7, "learning_rate": 1e-3, "epoch": step / 100, "step": step}
        for step in range(first, first + number)
    ]


def written(state: TrainerState, kept: LogText | None, folder: Path) -> bytes:
    state.text(kept).write(folder / "state.json")
    return (folder / "state.json").read_bytes()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each call that formats rows."""
    calls: list[int] = []
    plain = log_text.encode_rows

    def count(rows: Any) -> bytes:
        calls.append(len(rows))
        return plain(rows)

    monkeypatch.setattr(log_text, "encode_rows", count)
    return calls


@pytest.mark.parametrize("number", [0, 1, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1, 3 * CHUNK_ROWS])
def test_the_file_is_that_of_the_whole_state_in_one_piece(tmp_path: Path, number: int) -> None:
    state = TrainerState(global_step=number, log_history=some_rows(number), trial_params={"log_history": []})
    whole = json.dumps(vars(state), indent=2, sort_keys=True) + "\n"
    assert written(state, LogText(), tmp_path).decode() == whole
    assert written(state, None, tmp_path).decode() == whole


@pytest.mark.slow
def test_a_save_formats_only_new_rows(tmp_path: Path, encoded: list[int]) -> None:
    state, kept = TrainerState(), LogText()
    for save in range(40):
        state.log_history += some_rows(CHUNK_ROWS, save * CHUNK_ROWS)
        written(state, kept, tmp_path)
    assert sum(encoded) == len(state.log_history)
    assert TrainerState.load_from_json(tmp_path / "state.json") == state


@pytest.mark.slow
@given(
    changes=st.lists(st.tuples(st.sampled_from(["set", "drop", "insert", "clear", "append"]), st.integers(0, 40))),
    data=st.data(),
)
@settings(max_examples=40)
def test_rows_that_changed_since_are_written_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, int]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("state")
    state, kept = TrainerState(log_history=some_rows(20)), LogText()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_text, "CHUNK_ROWS", 4)
        for change, place in changes:
            rows = state.log_history
            if change == "set" and rows:
                rows[place % len(rows)]["loss"] = data.draw(st.sampled_from([-1, -2, True, 1.0, float("inf"), "x"]))
            elif change == "drop" and rows:
                del rows[place % len(rows)]
            elif change == "insert":
                rows.insert(place, {"note": place})
            elif change == "clear":
                state.log_history = []
            else:
                rows.append({"eval_loss": np.float32(place), "per_class": [1.0, place]})
            assert written(state, kept, folder) == written(state, None, folder)


def test_values_that_are_not_plain_are_formatted_each_time(tmp_path: Path) -> None:
    class Score:
        name = "before"

        def __str__(self) -> str:
            return self.name

    state, kept, score = TrainerState(log_history=some_rows(CHUNK_ROWS)), LogText(), Score()
    state.log_history[3]["score"] = score  # type: ignore[assignment]
    assert b'"before"' in written(state, kept, tmp_path)
    score.name = "after"
    assert b'"after"' in written(state, kept, tmp_path)


def test_a_text_holds_the_rows_of_its_moment(tmp_path: Path) -> None:
    """It is written behind the training, which logs on meanwhile."""
    state, kept = TrainerState(log_history=some_rows(CHUNK_ROWS + 5)), LogText()
    before = TrainerState(log_history=some_rows(CHUNK_ROWS + 5))
    text = state.text(kept)
    state.log_history += some_rows(CHUNK_ROWS, CHUNK_ROWS + 5)
    state.log_history[CHUNK_ROWS + 1]["loss"] = 17.0
    state.text(kept)
    text.write(tmp_path / "state.json")
    assert TrainerState.load_from_json(tmp_path / "state.json") == before


def test_secrets_in_rows_are_masked(tmp_path: Path) -> None:
    state = TrainerState(log_history=[{"note": "password=correct-horse-1"} for _ in range(CHUNK_ROWS + 1)])
    assert b"horse" not in written(state, LogText(), tmp_path)


@pytest.mark.slow
def test_the_kept_text_takes_a_fraction_of_the_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state, kept = TrainerState(), LogText()
    for step in range(40 * CHUNK_ROWS):
        values = rng.random(4).tolist()
        state.log_history.append(dict(zip(("loss", "grad_norm", "learning_rate", "epoch"), values, strict=True)))
        state.log_history[-1]["step"] = step
    tracemalloc.start()
    state.text(kept)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size / len(state.log_history) < 70  # bytes


def test_a_copy_has_rows_of_its_own_list_and_fields_of_its_own(tmp_path: Path) -> None:
    state = TrainerState(global_step=4, log_history=some_rows(3), stateful_callbacks={"a": {"args": [1]}})
    copied = state.copied()
    assert copied == state
    state.log_history.append({"step": 9})
    state.stateful_callbacks["a"]["args"].append(2)
    state.global_step = 5
    assert copied == TrainerState(global_step=4, log_history=some_rows(3), stateful_callbacks={"a": {"args": [1]}})
    state.take_back(copied)
    assert state == copied
    assert state.log_history is not copied.log_history
