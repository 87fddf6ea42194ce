"""XLA devices (TPU) through torch_xla: operations are recorded, and compiled and run together once per optimizer step.

With several devices a single process drives all of them: tensors are annotated with the dimension along which they are
sharded, and XLA's compiler distributes the work (GSPMD, Xu et al., 2021, arXiv:2105.04663). To Python code the model's
tensors are whole, as on one device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.args.errors import UnsupportedOption
from paceline.args.sections import Options
from paceline.args.sharding import Sharding, read_sharding, wants_shards
from paceline.core.optional import require
from paceline.pytorch.data.prefetch import move_to_device, tensors_in
from paceline.pytorch.distributed.fsdp import find_units
from paceline.pytorch.distributed.strategy import Prepared, SingleDevice
from paceline.pytorch.distributed.xla_runtime import EXTRA, is_distributed
from paceline.pytorch.model.tensor_parts import map_tensors

logger = logging.getLogger(__name__)

Spec = tuple[str | None, ...]


class XlaDevices(SingleDevice):
    """One XLA device, or all XLA devices of this machine.

    Args:
        world, precision: as for `SingleDevice`.
        args: `fsdp`, `fsdp_config` and `tpu_num_cores` are read; options that XLA does not support are refused.

    Raises:
        UnsupportedOption: fp16, evaluation in 16 bits, torch's activation checkpointing or compiler, or sharded
            checkpoints.
    """

    is_lazy = True
    is_spmd = True

    def __init__(self, world: Any, precision: Any, args: Options) -> None:
        super().__init__(world, precision)
        check_options(args, precision)
        self._core: Any = require("torch_xla", EXTRA)
        self._spmd: Any = require("torch_xla.distributed.spmd", EXTRA)
        runtime: Any = require("torch_xla.runtime", EXTRA)
        self.num_devices = int(runtime.global_runtime_device_count())
        self.grid: Any = None  # of devices
        self.sharding: Sharding | None = None
        if is_distributed(args):
            self.grid = self._spmd.Mesh(list(range(self.num_devices)), (self.num_devices,), ("fsdp",))
            self.place = self._place
        if is_distributed(args) and args.fsdp:
            self.sharding = read_sharding(args.fsdp, args.fsdp_config)
            self.is_sharded = True
        self._handles: list[Any] = []

    def prepare(self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer] | None) -> Prepared:
        """Shards the model's parameters if requested, then makes its optimizer over them."""
        kind, share = require("torch_xla.runtime", EXTRA).device_type(), "1"
        if self.grid is not None:
            share = f"{self.num_devices} that share {'the model and ' if self.is_sharded else ''}each batch"
        logger.info("XLA device %s (%s), %s of %d.", self.device, kind, share, self.num_devices)
        if self.sharding is not None:
            self._shard(model, self.sharding)
        self.run_deferred()  # moves the weights now, rather than with the first optimizer step
        return super().prepare(model, make_optimizer)

    def _shard(self, model: nn.Module, sharding: Sharding) -> None:
        for parameter in model.parameters():
            self._mark(parameter, self._spec_of(parameter))
        for handle in self._handles:
            handle.remove()
        units = find_units(model, sharding)
        self._handles = [unit.register_forward_hook(self._mark_outputs) for unit in (*units, model)]
        if sharding.checkpoints_units:
            self._handles += [CheckpointedUnit(unit) for unit in units]

    def _spec_of(self, tensor: Tensor) -> Spec:
        """Returns the sharding of a parameter: along its longest evenly divisible dimension, else along its longest."""
        sizes = list(tensor.shape)
        if not sizes or max(sizes) < self.num_devices:
            return (None,) * len(sizes)
        even = [size if size % self.num_devices == 0 else 0 for size in sizes]
        index = even.index(max(even)) if max(even) else sizes.index(max(sizes))
        return tuple("fsdp" if place == index else None for place in range(len(sizes)))

    def _mark(self, tensor: Tensor, spec: Spec) -> None:
        """Marks the dimension that a tensor on the device is sharded along."""
        self._spmd.mark_sharding(tensor, self.grid, spec)

    def _mark_samples(self, tensor: Tensor) -> None:
        if tensor.device.type == self.device.type and tensor.dim() > 0:
            self._mark(tensor, ("fsdp",) + (None,) * (tensor.dim() - 1))

    def _mark_outputs(self, module: nn.Module, inputs: object, outputs: object) -> None:
        """Keeps the outputs of a unit sharded by samples, so that the compiler gathers weights, not activations."""
        for tensor in tensors_in(outputs):
            self._mark_samples(tensor)

    def _place(self, batch: object) -> Any:
        """Returns the batch on the devices, sharded by samples."""
        moved = move_to_device(batch, self.device)
        for tensor in tensors_in(moved):
            self._mark_samples(tensor)
        return moved

    def run_deferred(self) -> None:
        """Compiles the recorded operations, unless cached, and starts them. The host does not wait."""
        self._core.sync()

    def upload(self, number: float) -> Tensor:
        """Returns the number as a separate 0-dim input.

        torch_xla merges equal scalars, so it would recompile for each pattern of micro-batches with equal weights. It
        does not inspect tensors with a dimension.
        """
        return torch.tensor([number], dtype=torch.float32).to(self.device)[0]

    def step(self, is_bad: Tensor | None = None) -> bool:
        """Steps the optimizer. The host reads the flag here, and waits for the gradients."""
        if is_bad is not None:
            self.run_deferred()
        return super().step(is_bad)

    def whole_tensor(self, name: str, value: Tensor) -> Tensor:
        """Returns a value of the model copied to the host."""
        return value.detach().cpu()

    def full_state(self, state: object) -> Any:
        """Returns the same nest with every tensor copied to the host."""
        return map_tensors(lambda tensor: tensor.detach().cpu(), state)

    def load_full(self, model: nn.Module, weights: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Loads whole weights into the model; returns the missing names, and the unexpected ones."""
        found = super().load_full(model, weights)
        self.run_deferred()
        return found

    def shard_state(self, optimizer: Optimizer) -> None:
        """Shards the loaded state like its parameters."""
        for parameter, state in optimizer.state.items() if self.sharding is not None else ():
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.device == parameter.device:
                    self._mark(value, self._spec_of(parameter))
        self.run_deferred()


class CheckpointedUnit:
    """Applies activation checkpointing to a module, in a form that XLA does not optimize away.

    torch's own checkpointing has no effect: the compiler sees the same computation twice and keeps only the first.
    """

    def __init__(self, unit: nn.Module) -> None:
        self.unit = unit
        self._checkpoint: Any = require("torch_xla.utils.checkpoint", EXTRA).checkpoint
        self._forward = unit.forward
        unit.forward = self._call

    def _call(self, *args: Any, **named: Any) -> Any:
        has_gradient = any(isinstance(value, Tensor) and value.requires_grad for value in args)
        if not (torch.is_grad_enabled() and has_gradient):
            return self._forward(*args, **named)
        return self._checkpoint(partial(self._forward, **named), *args)

    def remove(self) -> None:
        """Restores the module."""
        del self.unit.forward


def check_options(args: Any, precision: Any) -> None:
    """Refuses options that XLA devices do not support.

    Raises:
        UnsupportedOption: names the option, its value and a replacement.
    """
    refused = {
        "fp16": (args.fp16 or precision.scales, "set bf16=True"),
        "fp16_full_eval": (args.fp16_full_eval, "set bf16=True"),
        "bf16_full_eval": (args.bf16_full_eval, "set bf16=True"),
        "torch_compile": (args.torch_compile, "XLA compiles each step by itself; leave it out"),
        "activation_checkpointing": (
            args.activation_checkpointing,
            "XLA's compiler undoes it; set fsdp_config={'xla_fsdp_grad_ckpt': True, ...} with a sharded model",
        ),
    }
    for name, (is_asked, remedy) in refused.items():
        if is_asked:
            raise UnsupportedOption(f"{name}=True is not supported on XLA devices: {remedy}.")
    if wants_shards(args):
        raise UnsupportedOption(
            "Checkpoints in shards (checkpoint_format='sharded', or fsdp_config['state_dict_type']) are not supported "
            "on XLA devices: leave it out; one process writes the whole model."
        )
