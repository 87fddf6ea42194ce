"""The masks of pruning: which weights can be pruned, the importance of their units, and the least important ones.

A unit is what is pruned at once: a weight, an output channel, an attention head, or two of four weights in a row.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption

WEIGHT, CHANNEL, HEAD, TWO_OF_FOUR = "weight", "channel", "head", "2:4"
UNITS = (WEIGHT, CHANNEL, HEAD, TWO_OF_FOUR)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Target:
    """A weight that can be pruned.

    Attributes:
        name: its name among the model's parameters.
        module: the module that holds it, as `weight`; looked up each time, because sharding may replace it.
        outputs: its dimension of output channels.
        num_heads: attention heads whose outputs the module projects; 0 if it is no such projection.
    """

    name: str
    module: nn.Module
    outputs: int = 0
    num_heads: int = 0

    @property
    def weight(self) -> Tensor:
        """Returns the weight as the module holds it now."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        return weight

    @property
    def bias(self) -> Tensor | None:
        """Returns the bias of the output channels; None without one."""
        bias: Tensor | None = getattr(self.module, "bias", None)
        return bias

    def units(self, values: Tensor, unit: str) -> Tensor:
        """Returns the values of a tensor in the weight's shape, by units: shape (units, values of a unit)."""
        if unit == WEIGHT:
            return values.reshape(-1, 1)
        if unit == CHANNEL:
            return values.movedim(self.outputs, 0).flatten(1)
        rows = values.movedim(self.outputs, -1)  # inputs first
        return rows.reshape(self.num_heads, -1)

    def spread(self, kept: Tensor, unit: str) -> Tensor:
        """Returns a mask in the weight's shape from one value for each unit."""
        shape = list(self.weight.shape)
        if unit == WEIGHT:
            return kept.reshape(shape)
        if unit == CHANNEL:
            ones = [1] * len(shape)
            ones[self.outputs] = -1
            return kept.reshape(ones).expand(shape).contiguous()
        inputs = 1 - self.outputs
        columns = kept.repeat_interleave(shape[inputs] // self.num_heads)
        return columns.unsqueeze(self.outputs).expand(shape).contiguous()


def matches(name: str, patterns: Sequence[str]) -> bool:
    """True if a name equals one of the patterns, in which `*` stands for any text."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def find_targets(
    model: nn.Module, unit: str, modules: Sequence[str], exclude: Sequence[str], heads: Mapping[str, int]
) -> list[Target]:
    """Returns the trained weights of linear and convolutional layers that are pruned, in the model's order.

    Weights that an embedding shares, frozen and quantized ones, and those that `torch.nn.utils.prune` or another
    parametrization computes are not among them.

    Raises:
        UnsupportedOption: nothing is left to prune, or a shape does not fit the unit.
    """
    embedded = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)}
    seen: set[int] = set()
    found = []
    for name, module in model.named_modules():
        is_transposed = type(module).__name__ == "Conv1D"  # of transformers: (inputs, outputs)
        weight = module._parameters.get("weight")
        if weight is None or not (is_transposed or isinstance(module, LAYERS)):
            continue
        if not (weight.requires_grad and weight.is_floating_point()) or id(weight) in embedded | seen:
            continue
        if not matches(name, modules) or matches(name, exclude):
            continue
        number = next((count for pattern, count in heads.items() if matches(name, [pattern])), 0)
        if unit == HEAD and not number:
            continue
        seen.add(id(weight))
        target = Target(f"{name}.weight" if name else "weight", module, int(is_transposed), number)
        check_shape(target, unit)
        found.append(target)
    if not found:
        raise UnsupportedOption(
            f"Pruning(unit={unit!r}, modules={list(modules)}, exclude={list(exclude)}, heads={dict(heads)}) finds no "
            "trained weight of a linear or convolutional layer: compare the patterns with model.named_modules()."
        )
    return found


def check_shape(target: Target, unit: str) -> None:
    """Raises UnsupportedOption if a weight cannot be divided into units."""
    shape = tuple(target.weight.shape)
    if unit in (HEAD, TWO_OF_FOUR):
        inputs = shape[1 - target.outputs]
        parts = target.num_heads if unit == HEAD else 4
        if len(shape) != 2 or inputs % parts:
            raise UnsupportedOption(
                f"Pruning(unit={unit!r}): {target.name} of shape {shape} cannot be divided into units: its inputs must "
                f"be a multiple of {parts}. Name it in exclude."
            )


def importance_of(target: Target, values: Tensor, unit: str, by_magnitude: bool) -> Tensor:
    """Returns the importance of each unit: the root of its mean square, or the mean of its scores."""
    grouped = target.units(values.float(), unit)
    if not by_magnitude:
        return grouped.mean(1)
    return grouped.abs().squeeze(1) if unit == WEIGHT else grouped.square().mean(1).sqrt()


def keep_most(importance: Tensor, sparsity: float) -> Tensor:
    """Returns a mask of the most important values; exactly `round(sparsity * n)` of n are dropped, of equal ones the
    first. Values of minus infinity are dropped, if there are more of them.
    """
    number = max(round(sparsity * importance.numel()), int(importance.isneginf().sum()))
    if number <= 0:
        return torch.ones_like(importance, dtype=torch.bool)
    values = torch.nan_to_num(importance, nan=math.inf)  # what is not a number is not pruned before the rest
    threshold = values.kthvalue(number).values
    dropped = values < threshold
    equal = (values == threshold).nonzero().flatten()
    dropped[equal[: number - int(dropped.sum())]] = True
    return ~dropped


def masks_of(
    targets: Sequence[Target],
    values: Mapping[str, Tensor],
    earlier: Mapping[str, Tensor],
    *,
    unit: str,
    sparsity: float,
    is_global: bool,
    by_magnitude: bool,
) -> dict[str, Tensor]:
    """Returns the masks at a sparsity, by name: bool, True for a weight that stays. What was pruned stays pruned.

    Args:
        targets: the weights.
        values: weights or movement scores, whole, by the weight's name.
        earlier: the masks until now.
        unit: what is pruned at once.
        sparsity: share of the units to prune, of all layers or of each.
        is_global: one threshold for all layers.
        by_magnitude: the values are weights.
    """
    if unit == TWO_OF_FOUR:
        return {target.name: two_of_four(target, values[target.name]) for target in targets}
    found: dict[str, Tensor] = {}
    for target in targets:
        found[target.name] = importance_of(target, values[target.name], unit, by_magnitude)
        if target.name in earlier:
            stays = target.units(earlier[target.name].to(found[target.name].device), unit).all(1)
            found[target.name] = found[target.name].masked_fill(~stays, -math.inf)
    if is_global:
        sizes = [each.numel() for each in found.values()]
        kept = torch.split(keep_most(torch.cat(list(found.values())), sparsity), sizes)
    else:
        kept = tuple(keep_most(each, sparsity) for each in found.values())
    return {target.name: target.spread(each, unit) for target, each in zip(targets, kept, strict=True)}


def two_of_four(target: Target, values: Tensor) -> Tensor:
    """Returns the mask that keeps the two largest of each four weights along the inputs."""
    rows = values.abs().float().movedim(target.outputs, 0)
    fours = rows.reshape(-1, 4)
    order = fours.argsort(dim=1, stable=True)
    mask = torch.ones_like(fours, dtype=torch.bool).scatter_(1, order[:, :2], False)
    return mask.reshape(rows.shape).movedim(0, target.outputs).contiguous()
