import tracemalloc

import numpy as np
import pytest

from paceline.core.lengths import find_lengths, length_grouped_order


def test_a_sample_takes_a_few_bytes() -> None:
    """A list of integers takes 40 bytes a sample; four arrays are at work here at most, of 8 bytes each."""
    size = 100_000
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 500, size)
    permutation = rng.permutation(size)
    tracemalloc.start()
    order = length_grouped_order(lengths, 8, permutation)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / size < 9
    assert peak / size < 25
    assert np.array_equal(np.sort(order), np.arange(size))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint64, np.int32, np.float32])
def test_the_type_of_the_lengths_makes_no_difference(dtype: type) -> None:
    lengths = np.random.default_rng(1).integers(0, 100, 300)
    permutation = np.random.default_rng(2).permutation(300)
    expected = length_grouped_order(lengths.tolist(), 4, permutation)
    assert np.array_equal(length_grouped_order(lengths.astype(dtype), 4, permutation), expected)
    assert np.array_equal(permutation, np.random.default_rng(2).permutation(300))  # the caller's is as it was


def test_lengths_are_gathered_without_a_list() -> None:
    data = [{"input_ids": range(index % 7)} for index in range(50_000)]
    tracemalloc.start()
    lengths = find_lengths(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lengths.dtype == np.int64
    assert lengths[:8].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    assert peak / len(data) < 9
