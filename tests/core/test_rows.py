"""Rows of any shape, in memory and in files: the same, whatever the batches."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.disk_buffer import DiskBuffer, choose_folder, is_in_memory
from paceline.core.rows import RowCollector

DTYPES = ("float32", "float64", "float16", "int64", "bool", "<U3")


def collect(batches: list[Any], sizes: list[int], *, limit: int | None, concatenate: bool = True) -> Any:
    with DiskBuffer(limit) as disk_buffer:
        collector = RowCollector(concatenate, disk_buffer=disk_buffer)
        for batch, size in zip(batches, sizes, strict=True):
            collector.add(batch, size)
        return collector.result()


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right) or {type(left), type(right)} == {np.ndarray, np.memmap}
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif left is None:
        assert right is None
    else:
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


@st.composite
def batched(draw: st.DrawFn) -> tuple[list[Any], list[int]]:
    """Batches of one nest: rows of one length, ragged ones, ragged in two dimensions, scalars, no rows at all."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    kind_names = st.sampled_from(["even", "ragged", "twice", "scalar", "samples", "none", "mixed"])
    kinds = draw(st.lists(kind_names, min_size=1, max_size=3))
    dtypes = [draw(st.sampled_from(DTYPES)) for _ in kinds]
    as_dict = draw(st.booleans())
    batches = []
    for index, size in enumerate(sizes):
        leaves = []
        for kind, dtype in zip(kinds, dtypes, strict=True):
            if kind == "none":
                leaves.append(None)
                continue
            shape = {
                "even": (size, 3),
                "ragged": (size, draw(st.integers(0, 4))),
                "twice": (size, draw(st.integers(1, 3)), draw(st.integers(1, 3))),
                "scalar": (),
                "samples": (),
                "mixed": (size if index != 1 else size + 1, 2),
            }[kind]
            if kind == "samples":  # a list with an entry of its own length for each sample
                numbers = [draw(st.integers(0, 3)) for _ in range(size)]
                leaves.append([{"boxes": np.full((n, 2), n).astype(dtype)} for n in numbers])
                continue
            leaves.append(np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype))
        batches.append({f"k{i}": leaf for i, leaf in enumerate(leaves)} if as_dict else tuple(leaves))
    return batches, sizes


@given(batched(), st.integers(0, 200), st.booleans())
def test_spilled_is_in_memory(data: tuple[list[Any], list[int]], limit: int, concatenate: bool) -> None:
    batches, sizes = data
    held = collect(batches, sizes, limit=None, concatenate=concatenate)
    assert_same(held, collect(batches, sizes, limit=limit, concatenate=concatenate))
    assert_same(held, collect(batches, sizes, limit=0, concatenate=concatenate))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.sampled_from([None, 0, 50]))
def test_any_batches_give_the_same_rows(sizes: list[int], limit: int | None) -> None:
    """Padding depends on the longest row of all, not on the batches."""
    total = sum(sizes)
    rows = np.arange(total * 2, dtype=np.float32).reshape(total, 2)
    cuts = np.cumsum(sizes)[:-1]
    assert_same(collect(np.split(rows, cuts), sizes, limit=limit), rows)


@given(st.data(), st.sampled_from([None, 0]), st.sampled_from([1, 40, 2**24]))
def test_rows_are_put_at_their_places(data: Any, limit: int | None, chunk: int) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    places = data.draw(st.permutations(range(sum(sizes))))
    cuts = np.cumsum(sizes)[:-1]
    order = np.asarray(places)
    batches = [
        {"even": part * 2, "ragged": np.stack([part] * (1 + len(part)), 1), "samples": [{"id": i[None]} for i in part]}
        for part in np.split(order, cuts)
    ]
    with DiskBuffer(limit) as disk_buffer, pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.core.rows.CHUNK_BYTES", chunk)
        collector = RowCollector(disk_buffer=disk_buffer)
        for batch, size in zip(batches, sizes, strict=True):
            collector.add(batch, size)
        joined = collector.result(places)
    assert joined["even"].tolist() == [2 * index for index in range(sum(sizes))]
    assert joined["ragged"][:, 0].tolist() == list(range(sum(sizes)))
    if len(joined["samples"]) == sum(sizes) and len(set(sizes)) > 1:
        assert [int(row["id"][0]) for row in joined["samples"]] == list(range(sum(sizes)))
    if limit == 0:
        assert isinstance(joined["even"], np.memmap)


def test_ragged_rows_are_padded_to_the_longest() -> None:
    batches = [np.ones((2, 1)), np.ones((1, 3)), np.ones((1, 2))]
    for limit in (None, 0):
        joined = collect(batches, [2, 1, 1], limit=limit)
        assert joined.tolist() == [[1, -100, -100], [1, -100, -100], [1, 1, 1], [1, 1, -100]]


def test_what_is_in_a_file_is_mapped_and_can_be_written() -> None:
    joined = collect([np.zeros((2, 3)), np.ones((1, 3))], [2, 1], limit=0)
    assert isinstance(joined, np.memmap)
    joined[joined == 0] = 7
    assert joined.sum() == 2 * 3 * 7 + 3


def test_python_objects_stay_in_memory() -> None:
    batch = np.array([{"a": 1}, None], dtype=object)
    joined = collect([batch, batch], [2, 2], limit=0)
    assert joined.tolist() == [{"a": 1}, None, {"a": 1}, None]


def boxes(numbers: list[int]) -> list[dict[str, Any]]:
    return [{"boxes": np.full((number, 4), number), "id": np.asarray(number)} for number in numbers]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1), st.sampled_from([None, 0]))
def test_a_list_with_an_entry_per_sample_is_extended(batches: list[list[int]], limit: int | None) -> None:
    """However many samples a batch holds, and however many boxes a sample."""
    joined = collect([{"labels": boxes(numbers)} for numbers in batches], list(map(len, batches)), limit=limit)
    assert_same(joined, {"labels": boxes([number for numbers in batches for number in numbers])})


@pytest.mark.parametrize("limit", [None, 0])
def test_a_list_that_is_as_long_as_its_batches_by_chance(limit: int | None) -> None:
    """Two hidden states and two batches of two samples: every array has the batch in front, so these are no samples."""
    first, second = np.arange(6.0).reshape(2, 3), np.arange(8.0).reshape(2, 4)
    joined = collect([[first, second], [-first, -second]], [2, 2], limit=limit)
    assert_same(joined, [np.concatenate([first, -first]), np.concatenate([second, -second])])
    assert isinstance(joined[0], np.memmap) == (limit == 0)
    joined = collect([[first, second], [first[:1], second[:1]]], [2, 1], limit=limit)
    assert [values.shape for values in joined] == [(3, 3), (3, 4)]


@pytest.mark.parametrize("limit", [None, 0])
def test_batches_of_another_shape_are_kept_as_they_are(limit: int | None) -> None:
    batches: list[Any] = [(np.ones(2), boxes([1, 2])), (np.ones(1), boxes([3])), (np.float32(0.5), None)]
    kept = collect(batches, [2, 1, 1], limit=limit, concatenate=False)
    assert_same(kept[:2], batches[:2])
    assert kept[2][0].shape == ()
    texts = [{"text": np.array(["a", None], dtype=object), "x": np.ones(2)}] * 2
    assert_same(collect(texts, [2, 2], limit=limit, concatenate=False), texts)


def test_empty_rows() -> None:
    joined = collect([np.zeros((2, 0)), np.zeros((1, 0))], [2, 1], limit=-1)
    assert joined.shape == (3, 0)


def test_nothing() -> None:
    assert RowCollector().result() is None
    collector = RowCollector()
    collector.add(None, 3)
    assert collector.result() is None


def test_the_limit_is_on_the_sum_of_all_collectors() -> None:
    with DiskBuffer(limit=100) as disk_buffer:
        first, second = RowCollector(disk_buffer=disk_buffer), RowCollector(disk_buffer=disk_buffer)
        first.add(np.zeros(10), 10)
        assert disk_buffer.held == 80
        second.add(np.zeros(10), 10)
        assert disk_buffer.held == 80  # the second moved to a file, which was enough
        second.add(np.zeros(10), 10)
        assert (first.num_bytes, second.num_bytes, disk_buffer.held) == (80, 160, 80)
        assert isinstance(second.result(), np.memmap)
        assert not isinstance(first.result(), np.memmap)


def test_entries_of_samples_go_to_the_file_too() -> None:
    with DiskBuffer(limit=0) as disk_buffer:
        collector = RowCollector(disk_buffer=disk_buffer)
        for numbers in ([1, 2], [3]):
            collector.add(boxes(numbers), len(numbers))
            assert disk_buffer.held == 0
        assert_same(collector.result(), boxes([1, 2, 3]))


def test_another_shape_of_output_is_an_error() -> None:
    collector = RowCollector()
    collector.add({"a": np.zeros(2)}, 2)
    with pytest.raises(ValueError, match="a dict of a, b and a dict of a"):
        collector.add({"a": np.zeros(2), "b": np.zeros(2)}, 2)


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_is_gone_with_the_last_array_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gc.collect()
    before = num_open_files()
    joined = collect([np.ones((2, 3)), np.ones((1, 3))], [2, 1], limit=0)
    view = joined[1:, :2]
    assert list(tmp_path.iterdir()) == []  # no name: nothing is left behind by a killed process either
    del joined
    gc.collect()
    assert num_open_files() == before + 1
    assert view.sum() == 4
    del view
    gc.collect()
    assert num_open_files() == before


def test_an_error_closes_the_files() -> None:
    disk_buffer = DiskBuffer(0)

    def fail() -> None:
        with disk_buffer:
            RowCollector(disk_buffer=disk_buffer).add(np.ones(3), 3)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert disk_buffer._files == []


def test_a_full_disk_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskBuffer(0) as disk_buffer:
        file = disk_buffer.open()

        class Full:
            def write(self, data: Any) -> None:
                raise OSError(28, "No space left on device")

        file._file = Full()  # type: ignore[assignment]
        with pytest.raises(OSError, match=r"the disk is full.*TMPDIR") as caught:
            file.append(np.ones(3))
        assert caught.value.errno == 28


def test_the_folder_is_not_in_memory_where_there_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    memory, disk = tmp_path / "memory", tmp_path / "my disk"
    for folder in (memory, disk):
        folder.mkdir()
    spaced = str(disk.resolve()).replace(" ", "\\040")
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nnone {memory.resolve()} tmpfs rw 0 0\n/dev/b {spaced} ext4 rw 0 0\nbad\n")
    monkeypatch.setattr("tempfile.tempdir", str(memory))
    monkeypatch.setattr("paceline.core.disk_buffer.is_in_memory", lambda folder: is_in_memory(folder, mounts))
    assert is_in_memory(memory / "deeper", mounts)
    assert not is_in_memory(disk, mounts)
    assert not is_in_memory(memory, tmp_path / "absent")
    assert choose_folder(disk) == disk
    assert choose_folder(None) == choose_folder(memory) == choose_folder(tmp_path / "absent") == memory
