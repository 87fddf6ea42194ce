"""A process group whose other processes do not exist, to plan a run of many processes on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed

from paceline.args.errors import UnsupportedOption
from paceline.core.optional import LateModule
from paceline.pytorch.distributed.world import World, has_group, leave_group

fake_pg = LateModule("torch.testing._internal.distributed.fake_pg")  # registers the backend

BACKEND = "fake"


@contextmanager
def simulated_processes(number: int) -> Iterator[None]:
    """Makes this process the first of `number`, the others of which are not started.

    A Trainer made inside plans the memory, steps and disk of a run of that many processes: `Trainer.plan()`. Collective
    calls return at once and move nothing, so training and evaluation are refused.

    Args:
        number: the number of processes, at least 1.

    Raises:
        ValueError: `number` is below 1.
        RuntimeError: this process has a process group already.
    """
    if number < 1:
        raise ValueError(f"simulated_processes({number}): give the number of processes, at least 1.")
    if has_group():
        raise RuntimeError("simulated_processes: this process belongs to a process group already; plan outside of it.")
    distributed.init_process_group(BACKEND, rank=0, world_size=number, store=fake_pg.FakeStore())
    try:
        yield
    finally:
        leave_group()


def is_simulated() -> bool:
    """Returns True if the other processes of the group do not exist."""
    return has_group() and distributed.get_backend() == BACKEND


def check_real(method: str, world: World) -> None:
    """Checks that the other processes of a Trainer exist.

    Args:
        method: what was called.
        world: the Trainer's.

    Raises:
        UnsupportedOption: they do not.
    """
    if is_simulated():
        raise UnsupportedOption(
            f"{method} under simulated_processes is not supported: the other {distributed.get_world_size() - 1} "
            "processes do not exist, so sums over processes would be wrong. Only Trainer.plan() can be called there."
        )
    check_group(method, world)


def check_group(method: str, world: World) -> None:
    """Raises UnsupportedOption if a Trainer was made in a process group that is gone; `method` is what was called."""
    if world.is_distributed and not has_group():
        raise UnsupportedOption(
            f"{method}: this Trainer was made for {world.world_size} processes, and their process group is gone: it "
            "was made under simulated_processes, or the group was destroyed. Make another Trainer, outside of "
            "simulated_processes; for several processes, in a script that torchrun starts."
        )
