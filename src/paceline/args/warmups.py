"""Warm-ups of the batch size and of the sequence length: validation, and their values at each optimizer step.

Steps are counted from 0 here: the value at step n is that of the optimizer step made after n others.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.args.errors import UnsupportedOption, did_you_mean, parse_json, wrong_value
from paceline.args.packing import JOINING, packing_of, tokens_of
from paceline.args.redeclared import own_options
from paceline.args.sections import Options

BATCH_SETTINGS = ("start", "steps")
LENGTH_SETTINGS = ("start", "end", "steps", "multiple")
MOST_STAGES = 1_000_000
MULTIPLE = 8  # lengths differ by this number of tokens by default, so that few shapes occur


@dataclass(frozen=True)
class BatchWarmup:
    """The micro-batches of each optimizer step, while the global batch size grows.

    Attributes:
        first_steps: the first step of each stage, ascending from 0.
        counts: micro-batches per step and process of each stage.
        unit: samples in a micro-batch of all processes.
    """

    first_steps: tuple[int, ...]
    counts: tuple[int, ...]
    unit: int

    def count_at(self, step: int) -> int:
        """Returns the micro-batches of an optimizer step."""
        return self.counts[bisect.bisect_right(self.first_steps, step) - 1]

    def size_at(self, step: int) -> int:
        """Returns the global batch size of an optimizer step, in samples."""
        return self.count_at(step) * self.unit

    def total(self, num_steps: int) -> int:
        """Returns the micro-batches of the first `num_steps` optimizer steps, if no epoch ends among them."""
        ends = (*self.first_steps[1:], num_steps)
        stages = zip(self.first_steps, ends, self.counts, strict=True)
        return sum(max(min(end, num_steps) - first, 0) * count for first, end, count in stages)

    def step_after(self, step: int, passes: Iterable[int]) -> int:
        """Returns the optimizer steps made after passes over the data that begin at a step.

        Args:
            step: the number of optimizer steps before the first pass.
            passes: micro-batches of each pass. The last step of a pass takes the micro-batches that are left.
        """
        for left in passes:
            step = self._step_after_one(step, left)
        return step

    def _step_after_one(self, step: int, left: int) -> int:
        stage = bisect.bisect_right(self.first_steps, step) - 1
        for count, end in zip(self.counts[stage:], self.first_steps[stage + 1 :], strict=False):
            if left <= (end - step) * count:
                return step + math.ceil(left / count)
            left -= (end - step) * count
            step = end
        return step + math.ceil(left / self.counts[-1])

    def epochs_in(self, num_steps: int, micro_batches: int) -> float:
        """Returns the number of epochs of `micro_batches` in `num_steps` optimizer steps."""
        step = num_epochs = 0
        while step < self.first_steps[-1]:
            end = self._step_after_one(step, micro_batches)
            if end > num_steps:
                return num_epochs + (num_steps - step) / (end - step)
            step, num_epochs = end, num_epochs + 1
        return num_epochs + (num_steps - step) / math.ceil(micro_batches / self.counts[-1])


def passes_of(num_epochs: float, micro_batches: int, epoch: int = 0, left: int | None = None) -> Iterator[int]:
    """Yields the micro-batches of each pass over the data that is left in a run.

    Args:
        num_epochs: epochs of the run; the last one may be a fraction.
        micro_batches: micro-batches of one process in an epoch.
        epoch: the epoch in progress.
        left: micro-batches left in it; None: all.
    """
    left = micro_batches if left is None else left
    for number in range(epoch, math.ceil(num_epochs)):
        share = min(num_epochs - number, 1.0)
        dropped = micro_batches - math.ceil(round(share * micro_batches, 6))
        yield max(left - dropped, 0)
        left = micro_batches


@dataclass(frozen=True)
class LengthWarmup:
    """The maximum sequence length of each optimizer step.

    Attributes:
        first_steps: the first step of each stage, ascending from 0.
        lengths: maximum tokens per sample in each stage; None: samples are not cut.
    """

    first_steps: tuple[int, ...]
    lengths: tuple[int | None, ...]

    def length_at(self, step: int) -> int | None:
        """Returns the maximum tokens per sample at an optimizer step; None: samples are not cut."""
        return self.lengths[bisect.bisect_right(self.first_steps, step) - 1]


# ---- reading the options


def keep_warmup(name: str, value: object) -> dict[str, Any] | list[list[int | None]] | None:
    """Converts a warm-up (a dict, pairs of a step and a value, or the JSON of either) to plain values.

    Raises:
        ValueError: an unknown setting or an invalid value.
    """
    parsed = parse_json(name, value) if isinstance(value, str) and value.strip()[:1] in ("{", "[") else value
    if parsed is None or (isinstance(parsed, str) and parsed.strip().lower() in ("", "none")):
        return None
    if isinstance(parsed, Mapping):
        return check_settings(name, {str(key): setting for key, setting in parsed.items()})
    if isinstance(parsed, list | tuple) and parsed and all(is_pair(name, item) for item in parsed):
        pairs = [list(item) for item in parsed]
        steps = [step for step, _ in pairs]
        if steps[0] == 0 and all(first < second for first, second in itertools.pairwise(steps)):
            return pairs
    raise wrong_value(
        name, value, "expected a dict such as {'start': 8, 'steps': 1000}, or a list of [step, value], from step 0 on"
    )


def check_settings(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a warm-up along a line. Raises: ValueError, if one is unknown, missing or invalid."""
    known = BATCH_SETTINGS if name == "batch_size_warmup" else LENGTH_SETTINGS
    for key in settings:
        if key not in known:
            hint = did_you_mean(key, list(known))
            raise wrong_value(name, settings, f"there is no setting {key!r}; there are {', '.join(known)}", hint)
    needed = [key for key in known if key != "multiple"]
    if any(key not in settings for key in needed):
        raise wrong_value(name, settings, f"it needs {', '.join(needed)}")
    if not all(map(is_positive, settings.values())):
        raise wrong_value(name, settings, "each setting is a whole number of at least 1")
    if settings.get("end", settings["start"]) < settings["start"]:
        raise wrong_value(name, settings, "end is below start")
    return settings


def is_positive(value: object) -> bool:
    """Returns True for a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_pair(name: str, item: object) -> bool:
    """Returns True for (step, value); a sequence length may be None."""
    if not isinstance(item, list | tuple) or len(item) != 2:
        return False
    step, value = item
    is_step = isinstance(step, int) and not isinstance(step, bool) and step >= 0
    return is_step and (is_positive(value) or (value is None and name == "sequence_length_warmup"))


def given(options: Options, name: str) -> Any:
    """Returns the value of a warm-up; None if it is unset, or the arguments' class replaces the option."""
    return getattr(own_options(options), name)


def resolve_batch_warmup(options: Options, accumulation_steps: int, update_size: int) -> BatchWarmup | None:
    """Returns the warm-up of the batch size; None if the batch size is constant.

    Args:
        options: the options.
        accumulation_steps: micro-batches per optimizer step and process after the warm-up.
        update_size: samples per optimizer step after the warm-up, over all processes.

    Raises:
        ValueError: a size is not made of whole micro-batches, or the last one is not the global batch size.
    """
    value = given(options, "batch_size_warmup")
    if value is None:
        return None
    shown = f"batch_size_warmup={value!r}"
    unit, rest = divmod(update_size, accumulation_steps)
    if rest:
        raise ValueError(
            f"{shown}: {update_size} samples per optimizer step are not {accumulation_steps} equal micro-batches on "
            "this number of processes. Resume on the former number, or set another per_device_train_batch_size."
        )
    pairs = [[0, value["start"]]] if isinstance(value, dict) else value
    for _, size in pairs:
        if size % unit or size > update_size:
            raise ValueError(
                f"{shown}: {size} samples per optimizer step are not possible: expected a multiple of {unit}, the "
                f"samples in a micro-batch of all processes, up to {update_size}. Change it, "
                "per_device_train_batch_size or gradient_accumulation_steps."
            )
    if not isinstance(value, dict) and pairs[-1][1] != update_size:
        raise ValueError(
            f"{shown} ends at {pairs[-1][1]} samples per optimizer step, and per_device_train_batch_size, "
            f"gradient_accumulation_steps and the processes make {update_size}: end the warm-up there."
        )
    if isinstance(value, dict):
        stages = rising_stages(value["start"] // unit, accumulation_steps, value["steps"])
    else:
        stages = [(step, size // unit) for step, size in pairs]
    first_steps, counts = zip(*stages, strict=True)
    return BatchWarmup(first_steps, counts, unit)


def rising_stages(start: int, end: int, num_steps: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Returns (first step, value) of each stage of a line from `start` at step 0 to `end` at step `num_steps`.

    Values are rounded down to multiples, but not below `start`.

    Raises:
        ValueError: there are more than `MOST_STAGES`.
    """
    num_values = max(end // multiple - start // multiple, 0)
    if min(num_values, num_steps) > MOST_STAGES:
        raise ValueError(
            f"A warm-up from {start} to {end} in {num_steps} steps has more than {MOST_STAGES:,} stages: "
            "give fewer steps, or pairs of [step, value]."
        )
    firsts = {0: start}
    if num_values <= num_steps:
        for value in range((start // multiple + 1) * multiple, end + 1, multiple):
            firsts[-(-(value - start) * num_steps // (end - start))] = value
        return sorted(firsts.items())
    for step in range(1, num_steps + 1):
        value = (start + step * (end - start) // num_steps) // multiple * multiple
        if value > max(start, next(reversed(firsts.values()))):
            firsts[step] = value
    return sorted(firsts.items())


def resolve_length_warmup(options: Options) -> LengthWarmup | None:
    """Returns the warm-up of the sequence length; None if samples are never cut."""
    value = given(options, "sequence_length_warmup")
    if value is None:
        return None
    if not isinstance(value, dict):
        first_steps, lengths = zip(*value, strict=True)
        return LengthWarmup(first_steps, lengths)
    stages = rising_stages(value["start"], value["end"], value["steps"], value.get("multiple", MULTIPLE))
    first_steps, lengths = zip(*(stage for stage in stages if stage[0] < value["steps"]), strict=True)
    return LengthWarmup((*first_steps, value["steps"]), (*lengths, None))


# ---- rules


def check_warmups(options: Options) -> None:
    """Checks the warm-ups in combination with other options.

    Raises:
        ValueError: they contradict each other.
        UnsupportedOption: a combination that is not supported.
    """
    batch, length = given(options, "batch_size_warmup"), given(options, "sequence_length_warmup")
    if batch is not None:
        check_batch_warmup(options, f"batch_size_warmup={batch!r}")
    packing = packing_of(options)
    if length is not None and packing in JOINING:
        raise UnsupportedOption(
            f"sequence_length_warmup={length!r} with packing={packing!r} is not supported: a row holds several "
            "samples, and a cut would drop whole ones. Use packing='group', or leave sequence_length_warmup out."
        )


def check_batch_warmup(options: Options, shown: str) -> None:
    """Checks the warm-up of the batch size in combination with other options; `shown` is its name and value.

    Raises:
        ValueError, UnsupportedOption: see `check_warmups`.
    """
    if options.gradient_accumulation_steps == 1:
        raise ValueError(
            f"{shown} lets the number of micro-batches per optimizer step grow to gradient_accumulation_steps, which "
            "is 1: set it to 2 or more, with a smaller per_device_train_batch_size."
        )
    strategy = str(options.train_sampling_strategy)
    refused = {
        f"per_device_train_tokens={tokens_of(options)}": (
            tokens_of(options) is not None,
            "its sizes are in samples; set per_device_train_batch_size",
        ),
        f"train_sampling_strategy={strategy!r}": (
            strategy == "batch_rebalance",
            "it plans micro-batches for a constant number of samples per step; use 'group_by_length'",
        ),
        "deepspeed": (bool(options.deepspeed), "its engine counts micro-batches itself; use parallel='fsdp'"),
        "nonfinite_policy='rollback'": (
            options.nonfinite_policy == "rollback",
            "a skipped step would change the size of later ones; use nonfinite_policy='skip'",
        ),
    }
    for name, (is_asked, remedy) in refused.items():
        if is_asked:
            raise UnsupportedOption(f"{shown} with {name} is not supported: {remedy}.")


def describe_warmups(batch: BatchWarmup | None, length: LengthWarmup | None) -> list[str]:
    """Returns a note for each warm-up of a run."""
    notes = []
    if batch is not None:
        first, last = batch.size_at(0), batch.size_at(batch.first_steps[-1])
        notes.append(
            f"batch_size_warmup: {first:,} samples per step at first, {last:,} after {batch.first_steps[-1]:,} steps."
        )
    if length is not None:
        last_length = length.lengths[-1]
        shown = "all" if last_length is None else f"{last_length:,}"
        notes.append(
            f"sequence_length_warmup: {length.lengths[0] or 'all'} tokens of each sample at first, {shown} after "
            f"{length.first_steps[-1]:,} steps."
        )
    return notes
