"""Fully sharded data parallelism: each process holds a shard of every parameter, its gradient and its optimizer state.

Uses torch's `fully_shard` (FSDP 2): parameters become DTensors, which are gathered layer by layer while needed.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from paceline.args.errors import UnsupportedOption
from paceline.args.mesh import resolve_mesh
from paceline.args.sections import Options
from paceline.args.sharding import Sharding, read_sharding
from paceline.pytorch.distributed import memory_gate
from paceline.pytorch.distributed.broadcast_init import FirstWeights, spread, spread_saved_buffers
from paceline.pytorch.distributed.device_mesh import build_device_mesh, sharding_mesh
from paceline.pytorch.distributed.precision import ApexPrecision
from paceline.pytorch.distributed.shard_precision import (
    cast_at_root,
    cast_gathered,
    precision_under,
    torch_policy,
    warn_of_short_weights,
)
from paceline.pytorch.distributed.strategy import NOTHING, Prepared, SingleDevice
from paceline.pytorch.model.tensor_parts import map_tensors, placed_like, whole

logger = logging.getLogger(__name__)


class FullyShardedData(SingleDevice):
    """Shards one model over all processes (Zhao et al., 2023, arXiv:2304.11277), or several replicas of it with
    `hybrid_shard`.

    Args:
        world, precision: as for `SingleDevice`.
        args: `fsdp` and `fsdp_config` are read.

    Raises:
        UnsupportedOption: half_precision_backend='apex', whose master weights are whole tensors; or evaluation in 16
            bits together with a compiled model or generation.
    """

    delays_grad_sync = True
    in_step = True
    is_sharded = True

    def __init__(self, world: Any, precision: Any, args: Any) -> None:
        self.sharding = read_sharding(args.fsdp or True, args.fsdp_config)
        policy = self.sharding.precision
        mesh = resolve_mesh(args, world.world_size, world.local_size)
        super().__init__(world, precision_under(policy, precision), mesh)
        if isinstance(precision, ApexPrecision):
            raise UnsupportedOption(
                "half_precision_backend='apex' with a sharded model is not supported: leave it out (fp16=True runs by "
                "torch's autocast), or set bf16=True."
            )
        check_full_eval(args)
        self.accepts_full_model = not self.sharding.from_first
        self._label_names = args.label_names
        # summing several micro-batches in 16 bits would lose precision: each is reduced, and summed in the shards
        self._exchanges_each = policy is not None and policy.exchanges_short
        self._model: nn.Module | None = None
        self._timeout = float(args.ddp_timeout)
        self._retries_memory = bool(args.auto_find_batch_size)
        if self._retries_memory:
            memory_gate.check_recovery()

    def prepare(self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer] | None) -> Prepared:
        """Shards the model in place, then makes its optimizer over the shards."""
        self.shard(model)
        if self._retries_memory:
            self.memory_gate = memory_gate.MemoryGate(self._timeout, watches_operators=self.mesh.tp > 1)
            self.memory_gate.attach(model)
        return super().prepare(model, make_optimizer)

    def recover(self) -> None:
        """Returns the units to their shards, and drops what the failed passes left."""
        if self._model is not None:
            memory_gate.recover(self._model)

    def follow_trainable(self, model: nn.Module) -> None:
        """Gives the gathered parameters, which torch keeps from step to step, the `requires_grad` of the shards."""
        flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        for prefix, unit in model.named_modules():
            if not isinstance(unit, FSDPModule):
                continue
            unit.unshard()
            for name, parameter in model.get_submodule(prefix).named_parameters(prefix):
                parameter.requires_grad_(flags[name])
            unit.reshard()

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        """Returns the model itself, sharded first if its values or dtypes depend on sharding, with the buffers of the
        first process.
        """
        if self.sharding.from_first or self.sharding.precision is not None:
            self.shard(model)
        spread_saved_buffers(model, self.device)
        return model

    def run_within(self, model: nn.Module, function: Callable[[], Any]) -> Any:
        """Runs `function` like the model's forward: with the parameters outside all units gathered, and the units
        initialized.
        """
        if not isinstance(model, FSDPModule):
            return function()
        model.paceline_call = function  # type: ignore[assignment]
        register_fsdp_forward_method(model, "paceline_call")
        try:
            return model.paceline_call()  # type: ignore[operator]
        finally:
            del model.paceline_call

    def cast_model(self, model: nn.Module, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Returns a context in which a model computes in `dtype`; for a sharded model, gathered parameters are cast."""
        if not self.holds_part_of(model):
            return super().cast_model(model, dtype)
        return cast_gathered(model, dtype, by_module=self.mesh.tp > 1)

    def awaits_weights(self, model: nn.Module) -> bool:
        """True if the first process will still send this process its values, so that it need not load them."""
        return self.sharding.from_first and not self.world.is_first and not self.holds_part_of(model)

    def shard(self, model: nn.Module) -> None:
        """Shards a model in place, unless it is sharded."""
        if not self.holds_part_of(model):
            if not self.sharding.from_first:
                spread(model, self.device)
            self._shard(model, build_device_mesh(self.mesh, self.device.type))

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        options: dict[str, Any] = {
            "mesh": sharding_mesh(mesh),
            "reshard_after_forward": self.sharding.reshard,
        }
        if self.sharding.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type != "cpu")
        units = without_tied(model, find_units(model, self.sharding))
        first = FirstWeights(self.world, model, self.device) if self.sharding.from_first else None
        policy = self.sharding.precision
        for unit in (*units, model):
            if first is not None:  # at most one unit is whole at a time
                first.fill(unit)
            if policy is not None:
                options["mp_policy"] = torch_policy(policy, unit is model)
            fully_shard(unit, **options)
        if policy is not None:
            warn_of_short_weights(model)
            cast_at_root(model, policy, self._label_names)
        num_own = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
        logger.info(
            "Sharded in %d units and what is left, over the mesh %s: %s of %s parameters here.",
            len(units),
            options["mesh"],
            f"{num_own:,}",
            f"{sum(p.numel() for p in model.parameters()):,}",
        )

    def micro_step(self, last: bool, silent: bool = False) -> AbstractContextManager[Any]:
        """Reduces gradients after the last micro-batch only, or after each with a 16-bit reduction.

        A micro-batch without weight has a loss factor of 0.
        """
        if isinstance(self._model, FSDPModule):
            last = last or self._exchanges_each
            self._model.set_requires_gradient_sync(last)
            self._model.set_is_last_backward(last)
        return NOTHING

    def clip(self, max_norm: float) -> Tensor | None:
        """Clips as on one device; the returned norm is that of all shards."""
        norm = super().clip(max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def holds_part_of(self, model: nn.Module) -> bool:
        """True if a model is sharded."""
        return any(isinstance(parameter, DTensor) for parameter in model.parameters())

    def whole_tensor(self, name: str, value: Tensor) -> Tensor:
        """Returns a value of the model on the host, gathered from its shards. Collective."""
        tensor: Tensor = whole(value.detach())
        return tensor

    def full_state(self, state: object) -> Any:
        """Returns the same nest with every sharded tensor gathered, on the host. Collective."""
        return map_tensors(whole, state)

    def load_full(self, model: nn.Module, weights: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Loads whole weights into the shards; returns the missing names, and the unexpected ones."""
        own = model.state_dict()
        placed = {name: placed_like(value, own.get(name)) for name, value in weights.items()}
        result = set_model_state_dict(model, placed, options=StateDictOptions(strict=False))
        return list(result.missing_keys), list(result.unexpected_keys)

    def shard_state(self, optimizer: Optimizer) -> None:
        """Shards state that was loaded whole like its parameters."""
        for parameter, state in optimizer.state.items():
            shards: Any = parameter
            for name, value in state.items() if isinstance(shards, DTensor) else ():
                is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
                if is_whole and value.shape == shards.shape:
                    state[name] = placed_like(value, shards)


def check_full_eval(args: Options) -> None:
    """Refuses options for which a sharded model cannot be cast for evaluation.

    Raises:
        UnsupportedOption: a compiled model, or `generate`, which calls parts of the model.
    """
    for full_eval in ("bf16_full_eval", "fp16_full_eval"):
        for name in ("torch_compile", "predict_with_generate"):
            if getattr(args, full_eval) and getattr(args, name, False):
                raise UnsupportedOption(
                    f"{full_eval}=True and {name}=True are not supported together with a sharded model: leave one of "
                    "them out."
                )


def find_units(model: nn.Module, sharding: Sharding) -> list[nn.Module]:
    """Returns the modules to shard as units, inner ones first: by class, by size, or by the model's own plan.

    Raises:
        ValueError: the model has no layer of a named class.
    """
    if sharding.is_whole:
        return []
    modules = [module for module in model.modules() if module is not model]
    if sharding.least_parameters:
        return list(by_size(model, sharding.least_parameters))
    hint = getattr(model, "_no_split_modules", None) or ()
    names = sharding.layer_classes or tuple(hint)
    units = [module for module in modules if type(module).__name__ in names]
    missing = [name for name in sharding.layer_classes if name not in {type(unit).__name__ for unit in units}]
    if missing:
        there = sorted({type(module).__name__ for module in modules})
        raise ValueError(
            f"fsdp_config['transformer_layer_cls_to_wrap']: {type(model).__name__} has no layer {missing[0]!r}, but "
            f"{', '.join(there)}."
        )
    if not names:
        units = [each for module in modules if isinstance(module, nn.ModuleList) for each in module]
    return list(reversed(units))


def without_tied(model: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the units without those that share a parameter with a module outside of them, which torch refuses.

    The embedding that a head is tied to, a unit by the plan of BERT and others, becomes part of what is left.
    """
    owners: dict[int, set[int]] = defaultdict(set)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].add(id(module))
    kept = []
    for unit in units:
        inside = {id(module) for module in unit.modules()}
        if all(owners[id(parameter)] <= inside for parameter in unit.parameters()):
            kept.append(unit)
    return kept


def by_size(model: nn.Module, least: int) -> Iterator[nn.Module]:
    """Yields modules, inner ones first, with at least `least` parameters that do not belong to an inner unit."""

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        taken = 0
        for child in module.children():
            units = list(visit(child))
            yield from units
            taken += sum(p.numel() for unit in units for p in unit.parameters())
        if module is not model and sum(p.numel() for p in module.parameters()) - taken >= least:
            yield module

    found: list[nn.Module] = []
    for unit in visit(model):
        if not any(unit is other for other in found) and not isinstance(unit, nn.ModuleList | nn.ModuleDict):
            found.append(unit)
    yield from found
