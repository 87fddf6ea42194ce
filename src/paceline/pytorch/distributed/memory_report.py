"""The report added to an out-of-memory error in training: what used the memory, and which options would help.

Parameters, gradients and optimizer state are counted. Activations are found by a second forward pass of a copy of the
model on FakeTensors, so the report itself takes no device memory. Savings are estimates.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.byte_sizes import format_mib
from paceline.core.optional import LateModule
from paceline.core.training_memory import Memory
from paceline.pytorch.data.batches import batch_size_of
from paceline.pytorch.distributed.memory import count_memory
from paceline.pytorch.distributed.strategy import is_out_of_memory

logger = logging.getLogger(__name__)

fake_tensor: Any = LateModule("torch._subclasses.fake_tensor")

NUM_ROWS = 5  # modules and tensors that are listed
LEAST_SHARE = 0.02  # options that save a smaller share of the memory are not listed


@dataclass
class Activations:
    """Tensors that a forward pass keeps for the backward pass, in bytes.

    Attributes:
        by_module: bytes by the name of the innermost module.
        tensors: (bytes, name of the module, shape, dtype) of each tensor.
    """

    by_module: Counter[str] = field(default_factory=Counter)
    tensors: list[tuple[int, str, tuple[int, ...], torch.dtype]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Returns the bytes of all activations."""
        return self.by_module.total()

    def grouped(self) -> Counter[str]:
        """Returns the bytes of each module summed over the layers, under names such as `layers.*.mlp.act`."""
        groups: Counter[str] = Counter()
        for name, size in self.by_module.items():
            groups[re.sub(r"\.\d+(?=\.|$)", ".*", name, count=1) or "(the model itself)"] += size
        return groups

    def in_blocks(self) -> tuple[int, int]:
        """Returns (bytes, number) of the layers in the module list that holds the most."""
        sizes: Counter[str] = Counter()
        indices: dict[str, set[str]] = defaultdict(set)
        for name, size in self.by_module.items():
            found = re.match(r"(.*?)\.(\d+)(?:\.|$)", name)
            if found is not None:
                sizes[found[1]] += size
                indices[found[1]].add(found[2])
        if not sizes:
            return 0, 0
        name, size = sizes.most_common(1)[0]
        return size, len(indices[name])

    def of_width(self, width: int) -> int:
        """Returns the bytes of tensors whose last dimension is `width`."""
        return sum(size for size, _, shape, _ in self.tensors if shape and shape[-1] == width)

    def without_width(self, width: int) -> Activations:
        """Returns the activations except the tensors whose last dimension is `width`."""
        found = Activations()
        for size, name, shape, dtype in self.tensors:
            if not (shape and shape[-1] == width):
                found.by_module[name] += size
                found.tensors.append((size, name, shape, dtype))
        return found


@dataclass(frozen=True)
class Situation:
    """A run that is out of memory.

    Attributes:
        memory: the memory of the process besides activations.
        batch_size: samples in a micro-batch; 0 if unknown.
        options: the options in force.
        world_size: processes that each hold all of the model; 1 if it is sharded.
        vocabulary: width of the logits; 0 if unknown.
        on_accelerator: the model is not on the CPU.
        by_adamw: the optimizer is torch's AdamW or Adam.
        in_single: the weights are float32.
        activations: the activations of a micro-batch; None if no copy of the model could run.
        half_activations: the activations under bfloat16; None if unknown, or if mixed precision is on.
    """

    memory: Memory
    batch_size: int
    options: Any
    world_size: int
    vocabulary: int
    on_accelerator: bool
    by_adamw: bool
    in_single: bool
    activations: Activations | None = None
    half_activations: Activations | None = None


def describe(situation: Situation) -> str:
    """Returns the report."""
    memory, activations = situation.memory, situation.activations
    rows = [("parameters", memory.parameters), ("gradients", memory.gradients)]
    if memory.optimizer is not None:
        rows.append(("optimizer state", memory.optimizer))
    if activations is not None:
        rows.append((f"activations of {situation.batch_size} samples, estimated", activations.total))
        rows += [(f"    {name}", size) for name, size in activations.grouped().most_common(NUM_ROWS)]
    lines = ["Memory that an optimizer step of this process needs:", *table(rows)]
    if activations is not None and activations.tensors:
        largest = sorted(activations.tensors, key=lambda entry: -entry[0])[:NUM_ROWS]
        names = [
            (f"{tuple(shape)} {str(dtype).removeprefix('torch.')} of {name or 'the model itself'}", size)
            for size, name, shape, dtype in largest
        ]
        lines += ["Largest activations:", *table(names)]
    if activations is None:
        lines.append("Activations come on top: the model could not be run on tensors without data.")
    least = LEAST_SHARE * sum(size for name, size in rows if not name.startswith(" "))
    savings = [(option, size) for option, size in estimates(situation) if size >= least]
    if savings:
        lines += ["Options that would help, with what each would save by itself (estimated):"]
        lines += table(sorted(savings, key=lambda entry: -entry[1]))
    return "\n".join(lines)


def table(rows: Sequence[tuple[str, int]]) -> list[str]:
    """Returns aligned lines of names and sizes."""
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {format_mib(size):>14}" for name, size in rows]


def estimates(situation: Situation) -> Iterator[tuple[str, int]]:
    """Yields (option, bytes saved) for each option that is not in use."""
    options, memory, activations = situation.options, situation.memory, situation.activations
    state = memory.optimizer or 0
    if situation.by_adamw:
        yield 'optim="adafactor"', state
        if situation.on_accelerator:
            yield 'optim="adamw_bnb_8bit"', state * 3 // 4
        if situation.in_single:
            yield 'optimizer_state_dtype="bfloat16"', state // 2
        if can_step_inside(options):
            saved = memory.gradients - memory.largest_gradient
            yield "optimizer_in_backward=True, max_grad_norm=0", saved
    if situation.world_size > 1:
        share = memory.parameters + memory.gradients + state
        yield "fsdp=True", share - share // situation.world_size
    if activations is None:
        return
    if situation.batch_size > 1:
        half = situation.batch_size // 2
        accumulation = options.gradient_accumulation_steps * 2
        yield (
            f"per_device_train_batch_size={half}, gradient_accumulation_steps={accumulation} "
            "(auto_find_batch_size=True does it)",
            activations.total - activations.total * half // situation.batch_size,
        )
    in_blocks, num_blocks = activations.in_blocks()
    if num_blocks > 1 and not (options.gradient_checkpointing or options.activation_checkpointing):
        yield "gradient_checkpointing=True", in_blocks - in_blocks // num_blocks
    if situation.half_activations is not None:
        yield "bf16=True", activations.total - situation.half_activations.total
    if situation.vocabulary and options.linear_cross_entropy is False:  # "auto": it is in use, or not possible
        yield "linear_cross_entropy=True", activations.of_width(situation.vocabulary)


def can_step_inside(options: Any) -> bool:
    """Returns True if the other options of a run allow `optimizer_in_backward`."""
    is_alone = options.parallel in (None, "fsdp") and (
        options.world_size == 1 or bool(options.fsdp or options.parallel)
    )
    return is_alone and not (
        options.gradient_accumulation_steps > 1
        or options.fp16
        or options.deepspeed
        or options.auto_find_batch_size
        or options.nonfinite_policy == "skip"
    )


def find_activations(model: nn.Module, inputs: Mapping[str, Any], context: Any) -> Activations | None:
    """Returns the tensors that a forward pass keeps for the backward pass; None if the model fails on FakeTensors.

    Args:
        model: the model; only a copy of FakeTensors is run.
        inputs: the batch.
        context: the precision context of the pass.
    """
    try:
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode, context:
            twin = copy.deepcopy(model, {id(tensor): mode.from_tensor(tensor) for tensor in tensors_of(model)}).train()
            device = next(twin.parameters()).device
            fakes = {
                name: mode.from_tensor(value).to(device) if isinstance(value, Tensor) else value
                for name, value in inputs.items()
            }
            with recording(twin) as found:
                twin(**fakes)
    except Exception:  # kernels, and modules that cannot be copied, may raise any error
        return None
    return found


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Yields parameters, buffers, and tensors in other attributes of modules, such as cached masks."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


@contextmanager
def recording(model: nn.Module) -> Iterator[Activations]:
    """Records the tensors that a forward pass keeps, each storage once, without parameters and buffers."""
    found, names = Activations(), [""]
    seen = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    held = []  # keeps the tensors alive, so that the address of a freed storage is not reused

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            held.append(tensor)
            found.by_module[names[-1]] += storage.nbytes()
            found.tensors.append((storage.nbytes(), names[-1], tuple(tensor.shape), tensor.dtype))
        return tensor

    def leave(*_: object) -> None:
        names.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: names.append(name))
        module.register_forward_hook(leave, always_call=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def report_out_of_memory(
    error: BaseException,
    model: nn.Module,
    optimizer: object,
    options: Any,
    *,
    batches: Sequence[Any],
    precision: Any,
    world_size: int,
    without_logits: bool,
) -> None:
    """Adds the report as a note to an out-of-memory error in training, so that the traceback ends with it.

    Args:
        error: any error; others are left unchanged.
        model: the model without the strategy's wrapper.
        optimizer: the optimizer of its parameters.
        options: the options in force.
        batches: micro-batches of the optimizer step that failed; empty if the error was raised outside of a step.
        precision: the precision of the strategy.
        world_size: processes that each hold all of the model; 1 if it is sharded.
        without_logits: the loss was computed without logits.
    """
    if not is_out_of_memory(error):
        return
    try:
        error.add_note(make_report(model, optimizer, options, batches, precision, world_size, without_logits))
    except Exception as failure:  # a failing report must not replace the original error
        logger.warning("The memory of the run could not be reported: %s: %s", type(failure).__name__, failure)


def make_report(
    model: nn.Module,
    optimizer: object,
    options: Any,
    batches: Sequence[Any],
    precision: Any,
    world_size: int,
    without_logits: bool,
) -> str:
    """Returns the report on a run; the arguments are those of `report_out_of_memory`."""
    device = next(model.parameters()).device
    largest = max(batches, key=batch_size_of, default=None)
    activations = half = None
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None) or 0
    if isinstance(largest, Mapping):
        activations = find_activations(model, largest, precision.context())
        is_single = not precision.autocasts and next(model.parameters()).dtype == torch.float32
        if activations is not None and is_single and not precision.scales:
            half = find_activations(model, largest, torch.autocast(device.type, torch.bfloat16))
    if without_logits and vocabulary:  # the copy of the model computed them
        activations = activations and activations.without_width(vocabulary)
        half = half and half.without_width(vocabulary)
    situation = Situation(
        memory=count_memory(model, optimizer),
        batch_size=0 if largest is None else batch_size_of(largest),
        options=options,
        world_size=world_size,
        vocabulary=vocabulary,
        on_accelerator=device.type != "cpu",
        by_adamw=isinstance(optimizer, torch.optim.Adam),  # AdamW is a subclass
        in_single=all(parameter.dtype == torch.float32 for parameter in model.parameters()),
        activations=activations,
        half_activations=half,
    )
    return describe(situation)
