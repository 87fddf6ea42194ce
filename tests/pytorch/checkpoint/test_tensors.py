import collections
import enum
import functools
import io
import os
import pickle
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.pytorch.checkpoint import tensors
from paceline.pytorch.checkpoint.tensors import CheckpointError, load_json, load_tensors, save_json, save_tensors

torch.set_num_threads(1)


class Hostile:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def hostile_files(marker: Path) -> dict[str, bytes]:
    """The forms in which torch.load meets a pickle: its zip file, its older form, and a bare pickle."""
    zipped, legacy = io.BytesIO(), io.BytesIO()
    torch.save({"state": Hostile(marker)}, zipped)
    torch.save({"state": Hostile(marker)}, legacy, _use_new_zipfile_serialization=False)
    return {"zip": zipped.getvalue(), "legacy": legacy.getvalue(), "pickle": pickle.dumps(Hostile(marker))}


def test_round_trip(tmp_path: Path) -> None:
    state = {
        "tensor": torch.arange(6.0).reshape(2, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "nested": {0: [1, 2.5, None, True, "text", b"bytes", (1, "a")], "dtype": torch.float32},
        "ordered": collections.OrderedDict(a=1),
        "counter": collections.Counter([30, 30]),
        "array": np.arange(4, dtype=np.uint32),
        "complex": 1 + 2j,
    }
    save_tensors(state, tmp_path / "a.pt")
    loaded = load_tensors(tmp_path / "a.pt")
    assert loaded.keys() == state.keys()
    for name in ("tensor", "half", "scalar", "empty"):
        assert torch.equal(loaded[name], state[name])  # type: ignore[arg-type]
        assert loaded[name].dtype == state[name].dtype  # type: ignore[attr-defined]
    for name in ("nested", "ordered", "counter", "complex"):
        assert loaded[name] == state[name]
        assert type(loaded[name]) is type(state[name])
    assert np.array_equal(loaded["array"], state["array"])  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["a.pt"]


def test_values_of_classes_become_plain(tmp_path: Path) -> None:
    class Kind(enum.Enum):
        A = "a"

    class Level(enum.IntEnum):
        LOW = 1

    class Text(str):
        pass

    Point = collections.namedtuple("Point", "x y")
    default: collections.defaultdict[str, int] = collections.defaultdict(int, n=1)
    state = [np.float64(0.1), np.int32(3), np.bool_(True), Kind.A, Level.LOW, Text("t"), Point(1, 2), default]
    save_tensors(state, tmp_path / "a.pt")
    loaded = load_tensors(tmp_path / "a.pt")
    assert loaded == [0.1, 3, True, "a", 1, "t", (1, 2), {"n": 1}]
    assert [type(value) for value in loaded] == [float, int, bool, str, int, str, tuple, dict]


def test_keys_come_back_as_they_were(tmp_path: Path) -> None:
    seen = frozenset({1, 2})
    state = {"cache": {seen: 1, (1, seen): 2, (2, "a"): 3}, "frozen": seen, "sets": {seen, frozenset()}, "set": {1}}
    save_tensors(state, tmp_path / "a.pt")
    loaded = load_tensors(tmp_path / "a.pt")
    assert loaded == state
    assert [type(loaded[name]) for name in ("frozen", "sets", "set")] == [frozenset, set, set]


class Letter(enum.Enum):
    A = "a"


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    "value",
    [
        {Letter.A: 1, "a": 2},
        {Letter.A, "a"},
        {((1,) * 20, (2,) * 20): 1},
        nested(300),
        nested(5000),
        ITSELF,
        np.longdouble(1),
    ],
    ids=["one key of two", "one value of two", "a large key", "deep", "deeper", "itself", "long double"],
)
def test_what_would_be_lost_or_not_read_back_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"callbacks\.pt"):
        save_tensors({"cache": value}, tmp_path / "callbacks.pt")
    assert os.listdir(tmp_path) == []


def test_a_part_is_stored_without_the_rest(tmp_path: Path) -> None:
    large = torch.zeros(100_000)
    save_tensors({"part": large[5:10], "graph": torch.ones(2, requires_grad=True) * 2}, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").stat().st_size < 5_000
    assert not load_tensors(tmp_path / "a.pt")["graph"].requires_grad


@pytest.mark.parametrize("value", [lambda: 1, object(), Hostile(Path("x")), np.array([object()]), np.array(["a"])])
def test_what_could_not_be_read_back_is_refused_by_its_place(tmp_path: Path, value: Any) -> None:
    (tmp_path / "scheduler.pt").write_text("old")
    with pytest.raises(TypeError, match=r"scheduler\.pt\['groups'\]\[1\] is a .*state_dict\(\)"):
        save_tensors({"groups": [1, value]}, tmp_path / "scheduler.pt")
    assert (tmp_path / "scheduler.pt").read_text() == "old"


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_hostile_pickles_are_not_run(tmp_path: Path, form: str) -> None:
    marker = tmp_path / "executed"
    path = tmp_path / "optimizer.pt"
    path.write_bytes(hostile_files(marker)[form])
    with pytest.raises(CheckpointError, match=r"optimizer\.pt cannot be read safely: ") as caught:
        load_tensors(path)
    assert "trust" not in str(caught.value)  # torch's own text explains how to run it
    assert not marker.exists()


def test_hostile_pickles_are_not_run_when_the_environment_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    marker = tmp_path / "executed"
    (tmp_path / "a.pt").write_bytes(hostile_files(marker)["zip"])
    with pytest.raises(CheckpointError):
        load_tensors(tmp_path / "a.pt")
    assert not marker.exists()


@functools.cache
def saved(is_zip: bool) -> bytes:
    """Returns a file of torch.save, the same at each call: the length of the older form depends on an address."""
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(8), "b": [1, "x"]}, buffer, _use_new_zipfile_serialization=is_zip)
    return buffer.getvalue()


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_give_one_kind_of_error(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "a.pt"
    content = bytearray(saved(data.draw(st.booleans())))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    for _ in range(data.draw(st.integers(0, 4))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with suppress(CheckpointError):
        load_tensors(path)


def test_missing_file_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no\.pt"):
        load_tensors(tmp_path / "no.pt")


def test_random_states_of_transformers_load(tmp_path: Path) -> None:
    state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    torch.save(state, tmp_path / "rng_state.pth")
    loaded = load_tensors(tmp_path / "rng_state.pth")
    assert loaded["python"] == state["python"]
    assert np.array_equal(loaded["numpy"][1], state["numpy"][1])
    assert torch.equal(loaded["cpu"], state["cpu"])


class FullDisk(io.BytesIO):
    """A file that takes a number of bytes and then refuses more."""

    space = 300

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.space:
            raise OSError(28, "No space left on device")
        return super().write(data)


def test_full_disk_is_an_oserror_and_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "optimizer.pt"
    save_tensors({"a": 1}, path)
    old = path.read_bytes()

    def open_full(name: Any, mode: str) -> Any:
        if opened:
            return FullDisk()
        opened.append(name)
        return open(name, mode)

    opened: list[Any] = []  # the first one only makes the hidden file
    monkeypatch.setattr(tensors, "open", open_full, raising=False)
    with pytest.raises(OSError) as caught:
        save_tensors({"a": torch.zeros(1000)}, path)
    assert caught.value.errno == 28
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["optimizer.pt"]


def test_json_round_trip_and_errors(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    save_json({"a": [1, None, "é"]}, path)
    assert load_json(path) == {"a": [1, None, "é"]}
    with pytest.raises(ValueError):
        save_json({"a": float("nan")}, path)
    with pytest.raises(TypeError):
        save_json({"a": object()}, path)
    assert load_json(path) == {"a": [1, None, "é"]}
    for junk in (b"{", b"\xff", b"[" * 100_000):
        path.write_bytes(junk)
        with pytest.raises(CheckpointError, match=r"state\.json is not JSON"):
            load_json(path)
    with pytest.raises(FileNotFoundError):
        load_json(tmp_path / "no.json")
