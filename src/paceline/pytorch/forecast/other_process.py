"""Takes the place of another one of the processes that `simulated_processes` simulates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed

from paceline.pytorch.distributed.simulated import BACKEND, fake_pg
from paceline.pytorch.distributed.world import leave_group


@contextmanager
def as_process(rank: int) -> Iterator[None]:
    """Makes this process the one of a rank, and the first one again on exit."""
    if rank == distributed.get_rank():
        yield
        return
    number = distributed.get_world_size()
    join(rank, number)
    try:
        yield
    finally:
        join(0, number)


def join(rank: int, number: int) -> None:
    """Replaces the process group by one in which this process has another rank, and the others do not exist."""
    leave_group()
    distributed.init_process_group(BACKEND, rank=rank, world_size=number, store=fake_pg.FakeStore())
