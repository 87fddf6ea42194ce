"""Converts the position of a stream that several processes read to another number of processes, within an epoch.

If the stream shards itself (by `get_worker_info()`), the epoch is finished in its original shards, one for each worker
of each process; the new readers take them over. Of any other stream, the processes together have read one prefix: the
new readers continue after it, and shard the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Position = Mapping[str, Any]


class CannotContinue(ValueError):
    """Raised if another number of processes cannot continue a stream; the message is a clause for a longer message."""


def place_for_others(
    positions: Sequence[Position],
    size: int,
    num_workers: int,
    consumed: int,
    batch_size: int,
) -> dict[str, Any]:
    """Returns the position that each of `size` processes resumes from.

    Args:
        positions: `StreamReader.position` of each previous process, by rank.
        size, num_workers: the new number of processes, and of workers in each.
        consumed: samples that all previous processes had taken from the stream.
        batch_size: samples per batch of each previous process, consecutive in the stream.

    Raises:
        CannotContinue: the samples read are neither the stream's own shards nor a prefix of the stream.
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
    if [delivered(place) for place in places] != dispatched(consumed - begun, len(places), batch_size):
        raise CannotContinue("its workers had read different numbers of batches")
    return stretch(places, size, num_workers, consumed)


def parts(places: list[Any]) -> dict[str, Any]:
    """Returns a position made of all previous readers' shards, valid for any number of processes."""
    return {"num_workers": len(places), "last": -1, "workers": places, "of_all": True}


def stretch(places: Sequence[Any], size: int, num_workers: int, consumed: int) -> dict[str, Any]:
    """Returns the position after the first `consumed` samples.

    It contains the stream's own state if a reader had reached exactly this position.
    """
    states = [of_the_stream(place)["dataset"] for place in places if place is not None and reached(place) == consumed]
    state = next((state for state in states if state is not None), None)
    if size == 1:
        place = {"num_read": consumed, "is_shared": True, "is_ended": False, "dataset": state}
        return {"num_workers": 0, "last": -1, "workers": [place]}
    begun = {"num_read": consumed, "dataset": state}
    return {"num_workers": num_workers, "last": -1, "workers": [None] * max(num_workers, 1), "begun": begun}


def is_shared_out(place: Position, is_alone: bool) -> bool | None:
    """Returns True if the stream gave this reader its own shard; None if unknown."""
    found: bool | None = place["is_shared"] if is_alone else place.get("is_shared_out")
    return found


def of_the_stream(place: Any) -> Any:
    """Returns a reader's position in the stream itself, without the state that `StreamPart` adds."""
    state = place["dataset"] if place is not None else None
    if isinstance(state, Mapping) and state.get("kind") == "part":
        return {**place, "dataset": state["dataset"]}
    return place


def reached(place: Position) -> int:
    """Returns a reader's position in the whole stream, in samples."""
    state = place["dataset"]
    if isinstance(state, Mapping) and state.get("kind") == "part":
        return int(state["num_read"]) + int(state["begun"])
    return int(place["num_read"])


def delivered(place: Any) -> int:
    """Returns the number of samples that a reader yielded."""
    return 0 if place is None else int(place["num_read"])


def dispatched(num_samples: int, num_readers: int, batch_size: int) -> list[int]:
    """Returns the share of each reader in the first samples, if batches go to the readers in turn."""
    turns, rest = divmod(num_samples, num_readers * batch_size)
    return [turns * batch_size + min(max(rest - reader * batch_size, 0), batch_size) for reader in range(num_readers)]
