"""Where a stream stands that several processes read, told to another number of them in the middle of an epoch.

A stream that shared itself out (by `get_worker_info()`) is finished in the parts that it was begun in, one for each
worker of each process; its new readers take them over. Of any other, the processes have read one stretch from its
start together: the new ones go on behind it, and deal out what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Position = Mapping[str, Any]


class CannotContinue(ValueError):
    """What keeps a stream from being read on by another number of processes; the message is half a sentence."""


def place_for_others(
    positions: Sequence[Position], size: int, num_workers: int, consumed: int, batch_size: int
) -> dict[str, Any]:
    """The position that each of `size` processes goes on from.

    Args:
        positions: what `StreamReader.position` gave on each process of before, by rank.
        size: processes now, of `num_workers` workers each.
        consumed: samples that all of them had taken from the stream.
        batch_size: of each of those, in a row of the stream's order.

    Raises:
        CannotContinue: what was read is neither parts of the stream's own nor a stretch from its start.
    """
    if positions[0].get("of_all"):
        owners = [positions[part % len(positions)] for part in range(len(positions[0]["workers"]))]
        return parts([owner["workers"][part] for part, owner in enumerate(owners)])
    num_places, is_alone = len(positions[0]["workers"]), len(positions) == 1
    places = [position["workers"][worker] for worker in range(num_places) for position in positions]
    if is_alone and not positions[0]["num_workers"]:
        return stretch(places, size, num_workers, consumed)
    shared = {is_shared_out(place, is_alone) for place in places if place is not None}
    if shared == {True}:
        return parts(list(map(of_the_stream, places)))
    if shared != {False} or (is_alone and num_places > 1):
        raise CannotContinue("each of its workers read the whole stream and kept its part")
    begun = (positions[0].get("begun") or {}).get("num_read", 0)
    if [delivered(place) for place in places] != dealt(consumed - begun, len(places), batch_size):
        raise CannotContinue("its workers had read different numbers of batches")
    return stretch(places, size, num_workers, consumed)


def parts(places: list[Any]) -> dict[str, Any]:
    """The position of all readers' own parts, for any number of processes."""
    return {"num_workers": len(places), "last": -1, "workers": places, "of_all": True}


def stretch(places: Sequence[Any], size: int, num_workers: int, consumed: int) -> dict[str, Any]:
    """The position behind the first `consumed` samples; with the stream's own state where one reader stood there."""
    states = [of_the_stream(place)["dataset"] for place in places if place is not None and reached(place) == consumed]
    state = next((state for state in states if state is not None), None)
    if size == 1:
        place = {"num_read": consumed, "is_shared": True, "is_ended": False, "dataset": state}
        return {"num_workers": 0, "last": -1, "workers": [place]}
    begun = {"num_read": consumed, "dataset": state}
    return {"num_workers": num_workers, "last": -1, "workers": [None] * max(num_workers, 1), "begun": begun}


def is_shared_out(place: Position, is_alone: bool) -> bool | None:
    """Whether the stream gave this reader a part of its own; None where the place does not say."""
    found: bool | None = place["is_shared"] if is_alone else place.get("is_shared_out")
    return found


def of_the_stream(place: Any) -> Any:
    """A reader's place in the stream itself, without what its process kept beside it."""
    state = place["dataset"] if place is not None else None
    if isinstance(state, Mapping) and state.get("kind") == "part":
        return {**place, "dataset": state["dataset"]}
    return place


def reached(place: Position) -> int:
    """How far into the whole stream a reader stood."""
    state = place["dataset"]
    if isinstance(state, Mapping) and state.get("kind") == "part":
        return int(state["num_read"]) + int(state["begun"])
    return int(place["num_read"])


def delivered(place: Any) -> int:
    """Samples that a reader handed out."""
    return 0 if place is None else int(place["num_read"])


def dealt(num_samples: int, num_readers: int, batch_size: int) -> list[int]:
    """How many of the first samples each reader has been dealt, batch by batch in turn."""
    turns, rest = divmod(num_samples, num_readers * batch_size)
    return [
        turns * batch_size + min(max(rest - reader * batch_size, 0), batch_size) for reader in range(num_readers)
    ]
