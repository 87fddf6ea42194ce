import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from paceline.core.fingerprint import fingerprint, fingerprints, hash_value, spread


class Counted:
    """Counts its reads, and draws augmentations from generators of its own and of the process."""

    def __init__(self, is_random: bool = False, seconds: float = 0.0) -> None:
        self.reads, self.seconds, self.is_random = 0, seconds, is_random
        self.generators = {"numpy": np.random.default_rng(0), "torch": torch.Generator().manual_seed(0)}
        self.python = random.Random(0)

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        time.sleep(self.seconds)
        drawn = [self.generators["numpy"].random(), torch.rand(1, generator=self.generators["torch"]).item()]
        drawn += [self.python.random(), random.random(), np.random.rand(), torch.rand(1).item()]
        return {"index": index, "noise": drawn if self.is_random else 0}

    def draws(self) -> list[float]:
        mine = [self.generators["numpy"].random(), torch.rand(1, generator=self.generators["torch"]).item()]
        return [*mine, self.python.random(), random.random(), np.random.rand(), torch.rand(1).item()]


def test_rows_are_spread_and_every_prefix_of_the_order_is() -> None:
    assert spread(0) == []
    assert spread(1) == [0]
    assert sorted(spread(40)) == list(range(40))
    order = spread(1_000_001)
    assert len(set(order)) == 64
    assert {min(order), max(order)} == {0, 1_000_000}
    gaps = np.diff(sorted(order[:8]))
    assert gaps.max() < 2 * 1_000_001 / 8


@pytest.mark.parametrize("is_random", [False, True])
def test_reading_leaves_no_trace(is_random: bool) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    untouched = Counted().draws()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    dataset = Counted(is_random)
    found = fingerprint(dataset)
    assert dataset.draws() == untouched
    assert dataset.reads == 0
    assert ("rows" in found) is not is_random
    if is_random:
        assert "rows are random" in found["note"]


def test_a_slow_dataset_is_stopped_and_marked() -> None:
    begun = time.perf_counter()
    found = fingerprints({"train": Counted(seconds=0.01), "eval": Counted(seconds=0.01)})
    assert time.perf_counter() - begun < 0.4
    assert "reading was stopped" in found["train"]["note"]
    assert 0 < len(found["train"]["rows"]) < 64
    whole = fingerprint(Counted(), seconds=60)
    assert found["train"]["rows"].items() <= whole["rows"].items()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("nothing is read")


class Broken:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        raise KeyError("no such row")


class Closing(Broken):
    def __del__(self) -> None: ...


@pytest.mark.parametrize(
    ("dataset", "note"),
    [
        (Stream(), "a stream"),
        ((number for number in range(3)), "a stream"),
        (Broken(), "KeyError"),
        (Closing(), "__del__"),
        ([object(), object()], "class object"),
        ({"a", "b"}, "no index"),
    ],
)
def test_what_cannot_be_read_is_said(dataset: Any, note: str) -> None:
    found = fingerprint(dataset)
    assert note in found["note"]
    assert "rows" not in found


def test_the_fingerprint_of_datasets_is_kept_beside_the_rows() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": list(range(100))})
    found = fingerprint(data)
    assert found["fingerprint"] == data._fingerprint
    assert found["length"] == 100
    assert len(found["rows"]) == 64
    other = fingerprint(datasets.Dataset.from_dict({"x": [*range(99), 7]}))
    assert [row for row in found["rows"] if found["rows"][row] != other["rows"][row]] == ["99"]
    assert "note" not in found
    assert "a stream" in fingerprint(data.to_iterable_dataset())["note"]


def test_arrays_are_read_by_their_rows() -> None:
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10)
    found = fingerprint((x, y))
    assert found["length"] == 10
    assert found["rows"] == fingerprint({"x": x, "y": y})["rows"]
    y[3] = 9
    other = fingerprint((x, y))["rows"]
    assert [row for row in other if other[row] != found["rows"][row]] == ["3"]
    tensors = fingerprint(TensorDataset(torch.arange(4), torch.ones(4, 3, dtype=torch.bfloat16)))
    assert len(tensors["rows"]) == 4


def test_no_code_of_the_user_runs_where_workers_load_the_data() -> None:
    """A row may open files that only a worker may hold, or end its process."""
    datasets = pytest.importorskip("datasets")
    own = Counted()
    found = fingerprint(own, runs_code=False)
    assert found["length"] == 1000
    assert own.reads == 0
    assert "rows" not in found
    assert "worker processes" in found["note"]
    data = datasets.Dataset.from_dict({"x": list(range(9))})
    transformed = data.with_transform(lambda rows: {"x": [own[0] for _ in rows["x"]]})
    assert "worker processes" in fingerprint(transformed, runs_code=False)["note"]
    assert own.reads == 0
    for passive in ([1, 2], (np.arange(3),), TensorDataset(torch.arange(3)), data):
        assert fingerprint(passive, runs_code=False) == fingerprint(passive)


VALUES: list[Callable[[], Any]] = [
    lambda: None,
    lambda: 1,
    lambda: 1.0,
    lambda: True,
    lambda: "1",
    lambda: b"1",
    lambda: [1],
    lambda: {"a": 1},
    lambda: {"a": "1"},
    lambda: np.array([1.0]),
    lambda: np.array([1], dtype=np.int32),
    lambda: np.array([[1.0]]),
    lambda: np.array(["a", None], dtype=object),
    lambda: torch.tensor([2.0]),
    lambda: torch.tensor([2.0], dtype=torch.bfloat16),
    lambda: [[1], [2, 3]],
    lambda: [[1, 2], [3]],
]


def test_hashes_tell_contents_and_types() -> None:
    hashes = [hash_value(make()) for make in VALUES]
    assert hashes == [hash_value(make()) for make in VALUES]
    assert len(set(hashes)) == len(VALUES) - 1  # a bfloat16 equals the float32 that holds it
    nested: Any = []
    nested.append(nested)
    with pytest.raises(TypeError, match="too deeply"):
        hash_value(nested)
