"""Peak memory of an optimizer step by kind and by module, measured in a short run whose effects are undone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.args.errors import UnsupportedOption
from paceline.args.training import TrainingArguments
from paceline.core.events import TrainerCallback
from paceline.core.optional import LateModule
from paceline.core.state import TrainerControl, TrainerState
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.short_runs.trial_run import check_one_process

logger = logging.getLogger(__name__)

mem_tracker: Any = LateModule("torch.distributed._tools.mem_tracker")

METHOD = "measure_memory"
OPTIONS: dict[str, Any] = {"max_steps": 2, "gradient_accumulation_steps": 1}  # options of the run that is measured
# torch's kinds of memory -> the names in the result
KINDS = {
    "Parameter": "parameters",
    "Buffer": "buffers",
    "Gradient": "gradients",
    "Activation": "activations",
    "Temp": "temporary",
    "Optstate": "optimizer",
    "Other": "other",
}
TOTAL = "Total"


@dataclass(frozen=True)
class ModuleMemory:
    """The memory of one module, in bytes.

    Attributes:
        name: its name in the model; empty for the model itself.
        parameters: the parameters of the module and those in it.
        outputs: the outputs of its last forward pass.
        forward_peak: the largest total of all tensors of the process during its forward pass.
        backward_peak: the same during its backward pass; 0 if it has none.
    """

    name: str
    parameters: int
    outputs: int
    forward_peak: int
    backward_peak: int


@dataclass(frozen=True)
class StepMemory:
    """The memory that the tensors of an optimizer step of one micro-batch take on the device, in bytes.

    Attributes:
        peak: the largest total.
        by_kind: what it consists of at that moment: parameters, buffers, gradients, activations, temporary tensors,
            optimizer state, and other tensors.
        modules: one for each module that ran, in the order of the forward pass.
    """

    peak: int
    by_kind: Mapping[str, int]
    modules: tuple[ModuleMemory, ...]

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {mebibytes(size)}" for name, size in self.by_kind.items() if size)
        width = max([len("module"), *(len(shown_name(module)) for module in self.modules)])
        rows = [
            f"Peak of a step: {mebibytes(self.peak)} MiB ({kinds})",
            f"{'module':{width}}  parameters    outputs    forward   backward",
        ]
        for module in self.modules:
            sizes = (module.parameters, module.outputs, module.forward_peak, module.backward_peak)
            rows.append(f"{shown_name(module):{width}}  " + " ".join(f"{mebibytes(size):>10}" for size in sizes))
        return "\n".join(rows)


def mebibytes(size: int) -> str:
    """Returns bytes in MiB with one decimal."""
    return f"{size / 2**20:,.1f}"


def shown_name(module: ModuleMemory) -> str:
    """Returns the name for a table."""
    return module.name or "(the model)"


class MemoryWatch(TrainerCallback):
    """Tracks the tensors of the second optimizer step; the first creates the optimizer's state.

    Args:
        device: the device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.found: StepMemory | None = None
        self._tracker: Any = None

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if state.global_step != 1 or self.found is not None:
            return
        self._tracker = make_tracker(model)
        self._tracker.track_external(model, *([optimizer] if isinstance(optimizer, Optimizer) else []))
        self._tracker.__enter__()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        tracker = self.stop()
        if tracker is not None:
            self.found = describe(tracker, self.device)

    def stop(self) -> Any:
        """Ends the tracking. Returns the tracker, or None if there is none."""
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.__exit__(None, None, None)
        return tracker


def make_tracker(model: nn.Module) -> Any:
    """Returns torch's tracker. With frozen parameters, on which it fails, gradients count as temporary tensors."""
    tracker = mem_tracker.MemTracker()
    if not all(parameter.requires_grad for parameter in model.parameters()):
        track = tracker._track_module_params_and_buffers
        tracker._track_module_params_and_buffers = lambda module, *_, **__: track(module, install_grad_hooks=False)
    return tracker


def describe(tracker: Any, device: torch.device) -> StepMemory:
    """Returns what a tracker has seen on a device."""
    peak = on_device(tracker.get_tracker_snapshot("peak"), device)
    stages = mem_tracker._ModState
    modules = []
    for stats in tracker.memory_tracking.values():
        _, _, name = stats.mod_fqn.partition(".")
        modules.append(
            ModuleMemory(
                name=name,
                parameters=stats.parameter_mem,
                outputs=getattr(stats, "output_mem", 0),
                forward_peak=largest(stats.snapshots.get(stages.PEAK_FW, []), device),
                backward_peak=largest(stats.snapshots.get(stages.PEAK_BW, []), device),
            )
        )
    by_kind = {KINDS[kind.value]: size for kind, size in peak.items() if kind != TOTAL}
    return StepMemory(peak.get(TOTAL, 0), by_kind, tuple(modules))


def on_device(snapshot: Mapping[torch.device, Mapping[Any, int]], device: torch.device) -> Mapping[Any, int]:
    """Returns the entry of a device, whose index may be missing."""
    for each, sizes in snapshot.items():
        if each.type == device.type and device.index in (None, each.index):
            return sizes
    return {}


def largest(snapshots: list[Any], device: torch.device) -> int:
    """Returns the largest total of several snapshots; 0 for none."""
    return max((on_device(snapshot, device).get(TOTAL, 0) for snapshot in snapshots), default=0)


def check_support(
    strategy: SingleDevice, torch_compile: bool, linear_cross_entropy: object, regularizers: Sequence[Any] | None = None
) -> None:
    """Raises UnsupportedOption where tensors cannot be followed: several processes, compiled modules, SAM, XLA.

    Losses without logits are refused too, since a tracker that reads the outputs of the head makes them whole.
    """
    check_one_process(METHOD, strategy)
    if torch_compile:
        raise UnsupportedOption(
            f"{METHOD}: torch_compile=True: compiled modules choose which tensors they keep; measure without it."
        )
    if linear_cross_entropy not in (False, "auto"):
        raise UnsupportedOption(
            f"{METHOD}: linear_cross_entropy={linear_cross_entropy!r}: to be followed, the outputs of the head "
            "have to be computed whole; measure without it."
        )
    if any(each.name == "sam" for each in regularizers or ()):
        raise UnsupportedOption(
            f"{METHOD}: regularizers: sam runs each module twice in a step, and once can be followed: measure without "
            "it, and add a copy of the trained weights."
        )
    if strategy.device.type == "xla":
        raise UnsupportedOption(
            f"{METHOD}: an XLA device allocates when it runs a whole step; measure on a CPU or GPU."
        )


def measure(run: Callable[[MemoryWatch], None], device: torch.device) -> StepMemory:
    """Measures an optimizer step.

    Args:
        run: trains two optimizer steps with a callback, and undoes their effects.
        device: the device of the model.

    Raises:
        ValueError: the data has too few samples for two optimizer steps.
    """
    watch = MemoryWatch(device)
    try:
        run(watch)
    finally:
        watch.stop()
    if watch.found is None:
        raise ValueError(f"{METHOD}: two optimizer steps are needed, and the data has too few samples for them.")
    return watch.found
