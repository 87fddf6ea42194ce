"""The largest and the fastest micro-batch size, found by short runs whose effects are undone."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.args.errors import UnsupportedOption
from paceline.args.plan import Plan, check_memory_retries
from paceline.args.training import TrainingArguments
from paceline.core.events import TrainerCallback
from paceline.core.optional import LateModule, is_installed
from paceline.core.state import TrainerControl, TrainerState
from paceline.pytorch.checkpoint.background import available_host_memory
from paceline.pytorch.data.batches import batch_size_of
from paceline.pytorch.distributed.collectives import gather_objects
from paceline.pytorch.distributed.strategy import DistributedOutOfMemory, empty_device_cache, is_out_of_memory
from paceline.pytorch.distributed.world import World

logger = logging.getLogger(__name__)

resource: Any = LateModule("resource")

AS_FAST = 0.95  # of the highest rate: the fastest size is the smallest that reaches this share


@dataclass(frozen=True)
class Trial:
    """The run of one micro-batch size.

    Attributes:
        size: samples of a micro-batch.
        samples_per_second: of all processes, over the optimizer steps after the first; None if memory ran out.
        peak_bytes: the peak of allocated device memory; on a CPU, the process's peak so far. The largest of all
            processes; None if unknown.
    """

    size: int
    samples_per_second: float | None
    peak_bytes: int | None


@dataclass(frozen=True)
class BatchSearch:
    """The result of a search for a micro-batch size.

    Attributes:
        trials: one for each size that was tried, in ascending order.
        largest: the largest size that fits in memory; None if none does.
        fastest: the smallest size whose rate is at least 0.95 of the highest; None if none fits.
    """

    trials: tuple[Trial, ...]
    largest: int | None
    fastest: int | None

    def __str__(self) -> str:
        rows = ["micro-batch   samples/s   peak memory"]
        for trial in self.trials:
            rate = "out of memory" if trial.samples_per_second is None else f"{trial.samples_per_second:,.1f}"
            peak = "-" if trial.peak_bytes is None else f"{trial.peak_bytes / 2**30:.2f} GiB"
            rows.append(f"{trial.size:11,}   {rate:>9}   {peak:>11}")
        return "\n".join([*rows, f"fastest: {self.fastest}; largest: {self.largest}"])


class StepClock(TrainerCallback):
    """Takes the time of each optimizer step, and waits for the device. Steps without a target do not count.

    Args:
        device: the device of the model.
        size: samples of a micro-batch; the run is stopped if it continues with fewer. 0: any.

    Attributes:
        steps: seconds and samples of each step.
        is_out: memory ran out on a process.
    """

    wants = frozenset({"loss", "inputs"})

    def __init__(self, device: torch.device, size: int = 0) -> None:
        self.device = device
        self.size = size
        self.steps: list[tuple[float, int]] = []
        self.is_out = False
        self._since = 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._since = self._now()

    def on_step_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        loss: Any = None,
        inputs: Any = (),
        **kwargs: Any,
    ) -> None:
        now = self._now()
        if (state.train_batch_size or 0) < self.size:
            self.is_out = control.should_training_stop = True
        elif loss is not None:
            self.steps.append((now - self._since, sum(batch_size_of(batch) for batch in inputs)))
        self._since = self._now()

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


@dataclass(frozen=True)
class Taken:
    """The run of one micro-batch size on one process.

    Attributes:
        steps: seconds and samples of each optimizer step.
        is_out: memory ran out on a process.
        peak: as in `Trial`, on this process.
        has_room: a larger size may be tried.
        is_leader: this process is the one that is counted among those that read the same data.
    """

    steps: list[tuple[float, int]]
    is_out: bool
    peak: int | None
    has_room: bool
    is_leader: bool


def samples_per_second(runs: Sequence[Taken]) -> float:
    """Returns the rate of all processes over the steps after the first, which allocates and compiles.

    A step takes as long as on its slowest process.
    """
    timed = slice(1, None) if len(runs[0].steps) > 1 else slice(None)
    num_samples = sum(samples for run in runs if run.is_leader for _, samples in run.steps[timed])
    times = [[seconds for seconds, _ in run.steps[timed]] for run in runs]
    total: float = sum(max(step) for step in zip(*times, strict=False))
    return num_samples / max(total, 1e-9)


def check_support(args: TrainingArguments, plan: Plan) -> None:
    """Checks that micro-batches have a fixed number of samples, and that several processes can agree on the largest.

    Raises:
        UnsupportedOption: micro-batches are not made by a number of samples; or the strategy or an option cannot report
            an out-of-memory to the other processes.
    """
    for name in ("per_device_train_tokens", "packing"):
        value = getattr(args, name)
        if value is not None:
            raise UnsupportedOption(f"find_batch_size: {name}={value!r} decides how large micro-batches are; unset it.")
    if plan.world_size == 1:
        return
    check_memory_retries("find_batch_size", plan.parallel, plan.mesh)
    for name in ("optimizer_in_backward", "ddp_static_graph"):
        if getattr(args, name):
            raise UnsupportedOption(
                f"find_batch_size: {name}=True is not supported on {plan.world_size} processes, which could not "
                "abandon a step together. Unset it, or run the search on one process."
            )


def check_arguments(lowest: int, highest: int, num_steps: int) -> None:
    """Raises ValueError if the sizes do not rise, or there are fewer than 2 steps."""
    are_whole = all(isinstance(number, int) for number in (lowest, highest, num_steps))
    if not are_whole or not 1 <= lowest <= highest or num_steps < 2:
        raise ValueError(
            f"find_batch_size: lowest={lowest}, highest={highest}, num_steps={num_steps}: give "
            "whole numbers, 1 <= lowest <= highest, and num_steps of 2 or more."
        )


def sizes_between(lowest: int, highest: int) -> Iterator[int]:
    """Yields sizes that double, and the highest one."""
    size = lowest
    while size < highest:
        yield size
        size *= 2
    yield highest


def trial_runs(
    train: Callable[[dict[str, Any], StepClock], None], num_steps: int, plan: Plan
) -> Callable[[int, StepClock], None]:
    """Returns the function that `search` calls.

    Args:
        train: `(options, clock)`: trains with other options, and undoes the effects.
        num_steps: optimizer steps with each size.
        plan: the plan of the Trainer.
    """

    def run(size: int, clock: StepClock) -> None:
        options = {
            "max_steps": num_steps,
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": 1,
            "dataloader_drop_last": True,  # a smaller batch at the end of an epoch would take less time
            "auto_find_batch_size": plan.world_size > 1,  # an out-of-memory is reported to all processes
        }
        train(options, clock)

    return run


def search(
    run: Callable[[int, StepClock], None], world: World, lowest: int, highest: int, is_leader: bool = True
) -> BatchSearch:
    """Tries sizes that double until memory runs out; with the same result on all processes.

    On a CPU, where a process that runs out of memory is killed, the search stops before the next size might exceed the
    free memory of the host.

    Args:
        run: `(size, clock)`: trains a few optimizer steps with micro-batches of this size, and undoes their effects.
            With several processes, an out-of-memory on one of them makes all of them continue with a smaller size.
        world: the processes.
        lowest, highest: the first and the last size.
        is_leader: this process is the one that is counted among those that read the same data.
    """
    device = world.device
    trials: list[Trial] = []
    before = peak_of_process()
    for size in sizes_between(lowest, highest):
        gc.collect()  # the parts of the last run refer to each other; they hold memory until they are collected
        empty_device_cache(device)
        reset_peak_memory(device)
        clock = StepClock(device, size)
        try:
            run(size, clock)
        except Exception as error:
            if not is_out_of_memory(error) or not is_agreed(error, world):
                error.add_note(f"find_batch_size: with micro-batches of {size}.")
                if size == 1 and isinstance(error, ValueError):  # torch's own error of a normalization
                    error.add_note("lowest=2 leaves this size out: BatchNorm, for one, needs two samples.")
                raise
            clock.is_out = True
        own = Taken(clock.steps, clock.is_out, peak_memory(device), has_room(world, before), is_leader)
        runs: list[Taken] = gather_objects(world, own)
        if any(each.is_out for each in runs):
            trials.append(Trial(size, None, None))
            break
        if not all(each.steps for each in runs):
            check_trials(trials, size)
            break
        sizes = {samples for each in runs for _, samples in each.steps}
        if sizes != {size}:
            raise UnsupportedOption(
                f"find_batch_size: the loader gave micro-batches of {sorted(sizes)} samples instead of {size}: "
                "it does not follow per_device_train_batch_size."
            )
        peaks = [each.peak for each in runs if each.peak is not None]
        trials.append(Trial(size, samples_per_second(runs), max(peaks, default=None)))
        if not all(each.has_room for each in runs):
            break
    gc.collect()
    empty_device_cache(device)
    return result_of(trials)


def is_agreed(error: BaseException, world: World) -> bool:
    """Returns True if all processes know of the out-of-memory; else the caller raises it, which ends the others."""
    return not world.is_distributed or isinstance(error.__cause__, DistributedOutOfMemory)


def check_trials(trials: list[Trial], size: int) -> None:
    """Warns that no optimizer step was run with a size.

    Raises:
        ValueError: it was the first size.
    """
    message = f"find_batch_size: no optimizer step was run with micro-batches of {size}: too few samples have a target."
    if not trials:
        raise ValueError(message)
    logger.warning(message)


def result_of(trials: list[Trial]) -> BatchSearch:
    """Returns the largest size that fits and the fastest one."""
    rates = {trial.size: trial.samples_per_second for trial in trials if trial.samples_per_second is not None}
    if not rates:
        return BatchSearch(tuple(trials), None, None)
    highest = max(rates.values())
    fastest = min(size for size, rate in rates.items() if rate >= AS_FAST * highest)
    return BatchSearch(tuple(trials), max(rates), fastest)


def has_room(world: World, before: int | None) -> bool:
    """Returns False if, on a CPU, twice the memory that the last run took may exceed what is free.

    Args:
        world: the processes; those of one machine share its memory.
        before: peak memory of the process before the first run, in bytes; None if unknown.
    """
    if world.device.type != "cpu":
        return True
    peak, free = peak_of_process(), available_host_memory()
    if peak is None or before is None or free is None or 2 * (peak - before) * world.local_size < free:
        return True
    logger.warning("find_batch_size: a larger micro-batch may exceed the free memory of %.1f GiB.", free / 2**30)
    return False


def peak_memory(device: torch.device) -> int | None:
    """Returns the peak of a device's allocated memory, or of the process on a CPU, in bytes; None if unknown."""
    if device.type == "cpu":
        return peak_of_process()
    read = getattr(torch.get_device_module(device), "max_memory_allocated", None)  # mps has none
    return None if read is None else int(read(device))


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new measurement of `peak_memory`, on devices that can."""
    reset = getattr(torch.get_device_module(device), "reset_peak_memory_stats", None)
    if reset is not None:
        reset(device)


def peak_of_process() -> int | None:
    """Returns the peak resident memory of this process in bytes; None if the system does not report it."""
    if not is_installed("resource"):  # Windows
        return None
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
