"""find_executable_batch_size: smaller batches until one has room; other errors pass."""

from __future__ import annotations

import pytest
import torch

from paceline import find_executable_batch_size


def test_shrinks_until_there_is_room() -> None:
    seen: list[int] = []

    @find_executable_batch_size(starting_batch_size=32, auto_find_batch_size=True)
    def train(batch_size: int, text: str) -> str:
        seen.append(batch_size)
        if batch_size > 24:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return f"{text} {batch_size}"

    assert train("with") == "with 22"
    assert seen == [32, 28, 25, 22]
    assert train.__name__ == "train"


def test_calls_once_where_it_is_not_asked_to_search() -> None:
    @find_executable_batch_size
    def train(batch_size: int, *, extra: int = 0) -> int:
        return batch_size + extra

    assert train() == 128
    assert train(extra=1) == 129
    assert find_executable_batch_size(train.func, starting_batch_size=4)() == 4  # type: ignore[attr-defined]


def test_refusals() -> None:
    @find_executable_batch_size(starting_batch_size=2, auto_find_batch_size=True)
    def never(batch_size: int) -> None:
        raise MemoryError

    with pytest.raises(RuntimeError, match="out of memory with a batch size of 1"):
        never()

    @find_executable_batch_size(auto_find_batch_size=True)
    def wrong(batch_size: int) -> None:
        raise KeyError("other")

    with pytest.raises(KeyError, match="other"):
        wrong()
    with pytest.raises(TypeError, match="first parameter of <lambda> must be `batch_size`"):
        find_executable_batch_size(lambda size: size)


@pytest.mark.slow
def test_the_sizes_are_those_of_the_reference() -> None:
    theirs = pytest.importorskip("transformers").trainer_utils.find_executable_batch_size
    pytest.importorskip("accelerate")
    found = []
    for decorator in (find_executable_batch_size, theirs):
        seen: list[int] = []

        @decorator(starting_batch_size=20, auto_find_batch_size=True)  # each failure collects all garbage
        def train(batch_size: int, seen: list[int] = seen) -> None:
            seen.append(batch_size)
            if batch_size > 13:
                raise RuntimeError("CUDA out of memory.")

        train()
        found.append(seen)
    assert found[0] == found[1]
