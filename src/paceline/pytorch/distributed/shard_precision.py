"""Precision of a sharded model: torch's policy for its units, and the casts that this policy does not cover.

Shards, their gradients and the optimizer's state stay in the dtype of the parameters. The policy sets the dtypes of the
copies that are gathered for a forward pass, and of the gradient reduction.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from paceline.args.shard_precision import ShardPrecision
from paceline.pytorch.data.batches import recast
from paceline.pytorch.data.columns import find_labels
from paceline.pytorch.distributed.precision import CastWeights, Precision, cast_tensors, narrow
from paceline.pytorch.model.signature import innermost

logger = logging.getLogger(__name__)


def precision_under(policy: ShardPrecision | None, precision: Precision) -> Precision:
    """Returns the precision of the forward pass: under a 16-bit policy, outputs are widened before the loss."""
    if policy is None or not policy.is_short or precision.autocasts:
        return precision
    return CastWeights(precision.device)


def torch_policy(policy: ShardPrecision, is_root: bool) -> MixedPrecisionPolicy:
    """Returns the policy in the form of fully_shard, for a unit or the whole model.

    The whole model's inputs and outputs are cast by `cast_at_root`: torch would cast labels and losses too. Outputs of
    units keep their dtype, which is that of the parameters of modules between them.
    """
    return MixedPrecisionPolicy(
        param_dtype=dtype_of(policy.parameters),
        reduce_dtype=dtype_of(policy.gradients),
        cast_forward_inputs=policy.casts_inputs and not is_root,
    )


def warn_of_short_weights(model: nn.Module) -> None:
    """Warns if trained parameters are in 16 bits: their optimizer steps are too, which a policy does not change."""
    short = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad and p.itemsize < 4}
    if short:
        logger.warning(
            "Parameters are in %s, and so are their updates and the optimizer state: mixed_precision_policy is "
            "for weights in float32. Load the model with dtype=torch.float32.",
            ", ".join(sorted(short)),
        )


def cast_at_root(model: nn.Module, policy: ShardPrecision, label_names: Sequence[str] | None) -> None:
    """Casts the model's inputs and outputs, except labels and losses (0-dim outputs).

    Args:
        model: the sharded model.
        policy: sets the dtypes.
        label_names: as in the arguments; None takes the names from the model's forward.
    """
    inputs, outputs = dtype_of(policy.parameters), dtype_of(policy.outputs)
    if inputs is not None and policy.casts_inputs:
        kept = list(label_names or find_labels(innermost(model)) or ["labels"])
        model.register_forward_pre_hook(partial(cast_inputs, dtype=inputs, kept=kept), with_kwargs=True)
    if outputs is not None:
        model.register_forward_hook(partial(cast_outputs, dtype=outputs))


def cast_inputs(module: nn.Module, args: Any, named: object, dtype: torch.dtype, kept: Sequence[str]) -> Any:
    """Returns the arguments of a forward pass in another dtype."""
    return narrow(args, dtype, kept), narrow(named, dtype, kept)


def cast_outputs(module: nn.Module, args: Any, outputs: object, dtype: torch.dtype) -> Any:
    """Returns the outputs of a forward pass in another dtype; a loss keeps its own dtype and so its precision."""
    return recast(outputs, lambda t: t.to(dtype) if t.dim() and t.is_floating_point() and t.dtype != dtype else t)


@contextmanager
def cast_gathered(model: nn.Module, dtype: torch.dtype, by_module: bool) -> Iterator[None]:
    """Returns a context in which a sharded model computes in `dtype`; its shards are unchanged.

    The gathered parameters of a unit are cast while the unit runs, which costs the memory of one unit in `dtype` and
    the time of the casts in each pass. Buffers are cast on entry, and their values are restored afterwards.

    Args:
        model: run without gradients, which would not reach the shards.
        dtype: a 16-bit dtype.
        by_module: cast for each module, rather than for each unit: with tensor parallelism, modules get their local
            tensors one module at a time.
    """
    casts = [UnitCast(owner, places, dtype) for owner, places in owners_of(model, by_module)]
    try:
        with cast_tensors(list(model.buffers()), dtype):
            yield
    finally:
        for cast in casts:
            cast.remove()


def owners_of(model: nn.Module, by_module: bool) -> list[tuple[nn.Module, list[nn.Module]]]:
    """Returns (module whose forward gathers the parameters, modules that hold them) pairs, outer modules first."""
    if by_module:
        return [(module, [module]) for module in model.modules()]
    found: dict[nn.Module, list[nn.Module]] = {}

    def visit(module: nn.Module, owner: nn.Module) -> None:
        owner = module if isinstance(module, FSDPModule) else owner
        places = found.setdefault(owner, [])
        if module not in places:
            places.append(module)
            for child in module.children():
                visit(child, owner)

    visit(model, model)
    return list(found.items())


class UnitCast:
    """Replaces the parameters of modules by copies in another dtype while their unit runs."""

    def __init__(self, owner: nn.Module, places: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self.places = places
        self.dtype = dtype
        # after the hooks that gather the parameters, and those that set tensor-parallel local tensors
        self.handles: list[Any] = [
            owner.register_forward_pre_hook(self.show),
            owner.register_forward_hook(self.hide, always_call=True),
        ]

    def show(self, module: nn.Module, args: Any) -> None:
        """Sets the copies; a parameter that several modules share has a single copy."""
        copies: dict[int, Any] = {}
        for place in self.places:
            for name, parameter in place._parameters.items():
                shown = vars(place).get(name, parameter)
                if shown is not None and shown.is_floating_point():
                    vars(place)[name] = copies.setdefault(id(shown), shown.to(self.dtype))

    def hide(self, module: nn.Module, args: Any, output: object) -> None:
        """Restores the parameters."""
        for place in self.places:
            for name in place._parameters:
                vars(place).pop(name, None)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def dtype_of(name: str | None) -> torch.dtype | None:
    """Returns torch's dtype of that name."""
    return None if name is None else getattr(torch, name)
