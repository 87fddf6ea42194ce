"""Positions in a stream that several processes read, told to another number of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.pytorch.data.data_shard import DataShard
from paceline.pytorch.data.stream_places import CannotContinue, dispatched, place_for_others


def place(num_read: int, is_shared_out: bool | None, is_shared: bool = True) -> dict[str, Any]:
    return {
        "num_read": num_read, "is_shared": is_shared, "is_ended": False, "dataset": None,
        "is_shared_out": is_shared_out,
    }  # fmt: skip


def position(*places: Any, num_workers: int = 0) -> dict[str, Any]:
    return {"num_workers": num_workers, "last": -1, "workers": list(places)}


@given(st.integers(0, 200), st.integers(1, 5), st.integers(1, 7))
def test_samples_are_dealt_batch_by_batch(num_samples: int, num_readers: int, batch_size: int) -> None:
    owners = [index // batch_size % num_readers for index in range(num_samples)]
    assert dispatched(num_samples, num_readers, batch_size) == [owners.count(reader) for reader in range(num_readers)]


def test_a_stretch_is_gone_on_behind() -> None:
    before = [position(place(6, False)), position(place(3, False))]
    found = place_for_others(before, 3, 2, consumed=9, batch_size=3)
    assert found == {
        "num_workers": 2, "last": -1, "workers": [None, None], "begun": {"num_read": 9, "dataset": None},
    }  # fmt: skip
    alone = place_for_others(before, 1, 0, consumed=9, batch_size=3)
    assert alone["workers"][0]["num_read"] == 9


def test_parts_are_kept() -> None:
    before = [position(place(6, True), place(4, True), num_workers=2), position(place(5, True), None, num_workers=2)]
    found = place_for_others(before, 1, 0, consumed=15, batch_size=3)
    assert found["of_all"]
    assert [each and each["num_read"] for each in found["workers"]] == [6, 5, 4, None]
    again = place_for_others([found, found], 3, 0, consumed=15, batch_size=3)
    assert again["workers"] == found["workers"]


@pytest.mark.parametrize(
    "before",
    [
        [position(place(6, False)), position(place(6, False))],  # of 9 samples
        [position(place(6, None)), position(place(3, None))],  # written by a version that did not note it
        [position(place(6, None, is_shared=False), place(3, None, is_shared=False), num_workers=2)],
    ],
)
def test_what_cannot_be_continued_is_refused(before: list[dict[str, Any]]) -> None:
    with pytest.raises(CannotContinue):
        place_for_others(before, 3, 0, consumed=9, batch_size=3)


def test_alike_shares() -> None:
    assert DataShard.of_update(0, 3, 3, 12).each == 2
    assert DataShard.of_update(0, 3, 4, 16).each is None
    assert DataShard.of_update(0, 1, 3, 12).each == 3
