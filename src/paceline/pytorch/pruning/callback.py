"""Pruning while a model trains: magnitude and movement, single weights and structures, by a schedule.

Pruned weights are zeros in the model itself, set again after each optimizer step, so that a checkpoint, an export and
the model after training have them without this package. Sources: Zhu & Gupta, 2017 (arXiv:1710.01878) for the cubic
schedule; Sanh et al., 2020 (arXiv:2005.07683) for movement; Frankle & Carbin, 2019 (arXiv:1803.03635) for masks that a
new run starts with.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption, wrong_value
from paceline.core.events import TrainerCallback
from paceline.core.optional import require
from paceline.pytorch.model.tensor_parts import is_dtensor, local_part, placed_like, whole
from paceline.pytorch.optim.layerwise import steps_in_backward
from paceline.pytorch.pruning.masks import CHANNEL, HEAD, TWO_OF_FOUR, UNITS, WEIGHT, Target, find_targets, masks_of

__all__ = ["Pruning"]

logger = logging.getLogger(__name__)

MAGNITUDE, MOVEMENT = "magnitude", "movement"
ONE_SHOT, LINEAR, CUBIC = "one_shot", "linear", "cubic"
CHOICES = {
    "method": (MAGNITUDE, MOVEMENT),
    "unit": UNITS,
    "scope": ("global", "layer"),
    "schedule": (ONE_SHOT, LINEAR, CUBIC),
}


class Pruning(TrainerCallback):
    """Prunes the weights of linear and convolutional layers during training.

    The log has `sparsity`, the share of zeros that the masks make in all weights that can be pruned, and
    `sparsity/NAME` for each of them. The masks are part of a checkpoint. Gradients of pruned weights are dropped after
    the norm of all gradients was clipped.

    Args:
        sparsity: share of the units that is pruned at the end of the schedule, above 0 and below 1.
        method: "magnitude": the smallest weights; "movement": those that training moved towards zero, by the sum of
            -weight * gradient over the optimizer steps.
        unit: what is pruned at once: "weight", "channel" (of outputs, with its bias), "head", or "2:4" (two of four
            neighbouring inputs, sparsity 0.5).
        scope: "global": one threshold for all layers; "layer": the same share of each.
        schedule: "one_shot" at `start`; "linear" or "cubic" from there to `end`.
        start, end: optimizer steps; below 1: a fraction of the run.
        every: optimizer steps from one update of the masks to the next.
        modules, exclude: patterns of names of modules that are pruned, and that are not (`*` stands for any text).
        heads: for unit="head": patterns of names of the attention's output projections, and their numbers of heads.
        masks: fixed masks by the name of the weight (True: kept), such as `masks` of another run; nothing else is
            pruned then, and `sparsity` is not given.

    Attributes:
        masks: the masks by the name of the weight; bool, True for a weight that stays.

    Raises:
        ValueError: an argument is wrong, or contradicts another.
    """

    is_meter = True

    def __init__(
        self,
        sparsity: float | None = None,
        *,
        method: str = MAGNITUDE,
        unit: str = WEIGHT,
        scope: str = "global",
        schedule: str = CUBIC,
        start: float = 0,
        end: float = 0.75,
        every: int = 1,
        modules: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        heads: Mapping[str, int] | None = None,
        masks: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.sparsity = 0.5 if sparsity is None and unit == TWO_OF_FOUR else sparsity
        self.method, self.unit, self.scope = method, unit, scope
        self.schedule = schedule
        self.start, self.end, self.every = start, end, every
        self.modules, self.exclude, self.heads = modules, exclude, dict(heads or {})
        self.fixed = None if masks is None else {name: mask.bool().clone() for name, mask in masks.items()}
        self.check()
        self.masks: dict[str, Tensor] = {}
        self._scores: dict[str, Tensor] = {}
        self._targets: list[Target] = []
        self._pruned: dict[str, Tensor] = {}  # this process's part: True where a weight is pruned
        self._shares: dict[str, float] = {}
        self._is_restored = False
        self._first = self._last = 0

    def check(self) -> None:
        """Raises ValueError if an argument is wrong, or contradicts another."""
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise wrong_value(f"Pruning({name})", getattr(self, name), f"choose one of {', '.join(choices)}")
        for name in ("modules", "exclude"):
            if isinstance(getattr(self, name), str):
                raise wrong_value(f"Pruning({name})", getattr(self, name), "give a list of patterns")
        if self.fixed is not None:
            if self.sparsity is not None:
                raise wrong_value("Pruning(sparsity)", self.sparsity, "masks are fixed: leave one of them out")
            return
        if self.sparsity is None or not 0 < self.sparsity < 1:
            raise wrong_value("Pruning(sparsity)", self.sparsity, "expected a share above 0 and below 1")
        self.check_schedule()
        if (self.unit == HEAD) != bool(self.heads) or any(count < 1 for count in self.heads.values()):
            raise wrong_value("Pruning(heads)", self.heads, "unit='head' and heads={pattern: number} need each other")

    def check_schedule(self) -> None:
        """Raises ValueError if the schedule is wrong, or contradicts unit or method."""
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise wrong_value("Pruning(every)", self.every, "expected a whole number of at least 1")
        if self.start < 0 or self.end < 0:
            raise wrong_value("Pruning(start, end)", (self.start, self.end), "expected steps, or fractions of the run")
        if self.unit == TWO_OF_FOUR and (self.sparsity != 0.5 or self.schedule != ONE_SHOT or self.method != MAGNITUDE):
            raise wrong_value(
                "Pruning(unit)", TWO_OF_FOUR, "it prunes half of the weights by magnitude at once: schedule='one_shot'"
            )
        if self.method == MOVEMENT and self.schedule == ONE_SHOT and self.start == 0:
            raise wrong_value("Pruning(start)", 0, "movement needs steps before the first pruning")

    # ---- the run

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Finds the weights, and prunes those that are due before the first optimizer step."""
        for module in model.modules():
            if hasattr(module, "_get_fsdp_state"):  # parameters gathered by an evaluation hide the shards
                module.reshard()
        self._targets = find_targets(model, self.unit, self.modules, self.exclude, self.heads)
        self.check_run(args, kwargs.get("optimizer"))
        self._plan(state.max_steps)
        is_restored = self._is_restored and state.global_step > 0
        if not is_restored:
            self.masks, self._scores = {}, {}
            if self.fixed is not None:
                self.masks = self._checked(self.fixed)
            elif self.method == MOVEMENT:
                self._scores = {each.name: torch.zeros_like(each.weight.detach()) for each in self._targets}
        self._is_restored = False
        if self.fixed is None and args.load_best_model_at_end and self._last > 0:
            logger.warning(
                "Pruning with load_best_model_at_end: the best checkpoint may be one from before optimizer step %d, at "
                "which the model reaches its sparsity. Set eval_delay to compare pruned models only.",
                self._last,
            )
        self._bind()
        self.hold()
        if not is_restored:
            self._begin(state.global_step)

    def _begin(self, step: int) -> None:
        """Prunes as far as the schedule is, if no masks were restored."""
        if self.fixed is not None or step < self._first or self.sparsity_at(step) <= 0:
            return
        if self.method == MOVEMENT:
            raise UnsupportedOption(
                f"Pruning(method='movement') is resumed at step {step} from a checkpoint without movement scores: "
                "resume from one that was written with it, or use 'magnitude'."
            )
        self.prune(self.sparsity_at(step))

    def _plan(self, max_steps: int) -> None:
        first, last = (round(each * max_steps) if 0 < each < 1 else int(each) for each in (self.start, self.end))
        self._first, self._last = first, first if self.schedule == ONE_SHOT else last
        if self.fixed is None and (self._last < first or self._last > max_steps):
            raise wrong_value(
                "Pruning(start, end)",
                (self.start, self.end),
                f"they are the optimizer steps {first} and {self._last} of {max_steps}; expected start <= end <= steps",
            )

    def check_run(self, args: Any, optimizer: Any) -> None:
        """Refuses runs in which a mask could not be held.

        Raises:
            UnsupportedOption: the optimizer steps other tensors than the model's, or the weights are not all here.
        """
        inner = getattr(optimizer, "optimizer", optimizer)
        remedy = "Use parallel='ddp' or 'fsdp', or leave it out."
        if args.deepspeed or args.half_precision_backend == "apex":
            raise UnsupportedOption(f"Pruning with DeepSpeed or Apex, which step copies of weights. {remedy}")
        check_phases(args.phases or ())
        for target in self._targets:
            weight: Any = target.weight
            is_odd = is_dtensor(weight) and sum(not each.is_replicate() for each in weight.placements) > 1
            if is_odd or weight.device.type in ("xla", "meta") or isinstance(args.parallel, Mapping | list):
                raise UnsupportedOption(f"Pruning with parallel={args.parallel!r} is not supported. {remedy}")
            if is_dtensor(weight) and self.method == MOVEMENT:
                raise UnsupportedOption("Pruning(method='movement') of sharded weights: use 'magnitude', or DDP.")
        if callable(getattr(inner, "eval", None)):
            raise UnsupportedOption(
                f"Pruning with {type(inner).__name__}, which keeps two sets of weights: choose another optim."
            )
        if self.method == MOVEMENT and steps_in_backward(inner):
            raise UnsupportedOption(
                "Pruning(method='movement') with optimizer_in_backward, which frees gradients: use 'magnitude'."
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adds to the movement scores, and drops the gradients of pruned weights."""
        self._score()
        for target in self._targets:
            gradient, pruned = target.weight.grad, self._pruned.get(target.name)
            if gradient is not None and pruned is not None:
                local_part(gradient).masked_fill_(pruned, 0)

    @torch.no_grad()
    def _score(self) -> None:
        """Subtracts weight * gradient from the scores; a step whose gradients are not finite adds nothing."""
        pairs = [(each, each.weight.grad) for each in self._targets] if self._scores else []
        live = [(each, gradient) for each, gradient in pairs if gradient is not None]
        if not live:
            return
        moves = [each.weight.detach() * gradient for each, gradient in live]
        is_finite = torch.stack([move.sum().isfinite().to(moves[0].device) for move in moves]).all()
        for (target, _), move in zip(live, moves, strict=True):
            self._scores[target.name].sub_(torch.where(is_finite.to(move.device), move, torch.zeros_like(move)))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sets pruned weights to zero again."""
        self.hold()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Updates the masks if this step is due."""
        self._prune_if_due(state.global_step)

    @torch.no_grad()
    def hold(self) -> None:
        """Sets pruned weights to zero: +0.0, whatever the optimizer left there."""
        for target in self._targets:
            pruned = self._pruned.get(target.name)
            if pruned is None:
                continue
            local_part(target.weight).masked_fill_(pruned, 0)
            if self.unit == CHANNEL and target.bias is not None:
                local_part(target.bias).masked_fill_(self._pruned[f"{target.name}/bias"], 0)

    # ---- the masks

    def sparsity_at(self, step: int) -> float:
        """Returns the sparsity that the schedule prescribes after an optimizer step."""
        assert self.sparsity is not None
        if step >= self._last or self.schedule == ONE_SHOT:
            return self.sparsity if step >= self._last else 0.0
        if step <= self._first:
            return 0.0
        share = (step - self._first) / (self._last - self._first)
        return self.sparsity * (share if self.schedule == LINEAR else 1 - (1 - share) ** 3)

    def _prune_if_due(self, step: int) -> None:
        is_due = self._first <= step <= self._last and ((step - self._first) % self.every == 0 or step == self._last)
        if self.fixed is not None or not is_due:
            return
        sparsity = self.sparsity_at(step)
        if sparsity <= 0:
            return
        self.prune(sparsity)

    @torch.no_grad()
    def prune(self, sparsity: float) -> None:
        """Prunes to a sparsity now; collective with sharded weights, each of which is gathered."""
        values = self._scores or {each.name: _gathered(each.weight) for each in self._targets}
        self.masks = masks_of(
            self._targets,
            values,
            self.masks,
            unit=self.unit,
            sparsity=sparsity,
            is_global=self.scope == "global",
            by_magnitude=self.method == MAGNITUDE,
        )
        self._bind()
        self.hold()

    def _bind(self) -> None:
        """Makes this process's parts of the masks, and counts what they prune."""
        self._pruned, self._shares = {}, {}
        for target in self._targets:
            mask = self.masks.get(target.name)
            if mask is None:
                continue
            self._pruned[target.name] = _part(~mask, target.weight)
            self._shares[target.name] = 1.0 - mask.count_nonzero().item() / mask.numel()
            if self.unit == CHANNEL and target.bias is not None:
                rows = ~mask.movedim(target.outputs, 0).flatten(1).any(1)
                self._pruned[f"{target.name}/bias"] = _part(rows, target.bias)
        emptied = [name for name, share in self._shares.items() if share == 1.0]
        if emptied:
            logger.warning("All weights of %s are pruned: use scope='layer', or exclude them.", ", ".join(emptied))

    def _checked(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns masks for the weights. Raises ValueError if a name or a shape is not the model's."""
        shapes = {each.name: tuple(each.weight.shape) for each in self._targets}
        for name, mask in masks.items():
            if shapes.get(name) != tuple(mask.shape):
                raise ValueError(
                    f"Pruning: the mask of {name!r} has the shape {tuple(mask.shape)}; the model has "
                    f"{shapes.get(name, 'no such weight that can be pruned')}."
                )
        return dict(masks)

    def project_average(self, tensors: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Prunes an average of the weights, too.

        Args:
            tensors: pairs of a tensor of the model, and this process's part of its average.
        """
        held: dict[int, Tensor] = {}
        for target in self._targets:
            if target.name in self._pruned:
                held[id(target.weight)] = self._pruned[target.name]
            if f"{target.name}/bias" in self._pruned:
                held[id(target.bias)] = self._pruned[f"{target.name}/bias"]
        for tensor, average in tensors:
            if id(tensor) in held:
                average.masked_fill_(held[id(tensor)].to(average.device), 0)

    # ---- a meter and a checkpoint item

    def row(self, times: Mapping[str, float]) -> dict[str, float]:
        """Returns the sparsity of all weights that can be pruned, and of each."""
        sizes = {each.name: each.weight.numel() for each in self._targets}
        if not sizes:
            return {}
        shares = {name: self._shares.get(name, 0.0) for name in sizes}
        total = sum(shares[name] * size for name, size in sizes.items()) / sum(sizes.values())
        return {"sparsity": total, **{f"sparsity/{name}": share for name, share in shares.items()}}

    def describe(self) -> str:
        """Returns the sparsity in words."""
        shares = self.row({})
        return f"sparsity {shares['sparsity']:.1%}" if shares else ""

    def state_dict(self) -> dict[str, Any]:
        """Returns the masks, and the movement scores."""
        # a copy: they change while a checkpoint is written
        scores = {name: score.clone() for name, score in self._scores.items()}
        return {"unit": self.unit, "method": self.method, "masks": dict(self.masks), "scores": scores}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores masks and scores.

        Raises:
            ValueError: they belong to another unit or method.
        """
        for name in ("unit", "method"):
            if state[name] != getattr(self, name):
                raise ValueError(f"the checkpoint was pruned with {name}={state[name]!r}, not {getattr(self, name)!r}")
        self.masks = {name: mask.bool() for name, mask in state["masks"].items()}
        self._scores = {name: score.clone() for name, score in state["scores"].items()}
        self._is_restored = True
        if self._targets:  # a rollback in a run; else the weights are not known yet
            self._bind()


def check_phases(phases: Iterable[Any]) -> None:
    """Refuses phases that train some of the weights, because only weights that are trained from the start are pruned.

    Raises:
        UnsupportedOption: a phase freezes parameters.
    """
    name = next((phase.name for phase in phases if phase.freeze), None)
    if name is not None:
        raise UnsupportedOption(
            f"Pruning with phases that freeze parameters, as the phase {name!r} does, is not supported: a weight that "
            "is frozen at the start would not be pruned later. Leave freeze out, or prune in a run of its own."
        )


def _gathered(weight: Tensor) -> Tensor:
    """Returns a weight, whole; of a sharded one a copy on the host."""
    gathered: Tensor = whole(weight.detach())
    return gathered


def _part(mask: Tensor, tensor: Any) -> Tensor:
    """Returns this process's part of a mask, on the device of the tensor that it belongs to."""
    return local_part(placed_like(mask, tensor)) if is_dtensor(tensor) else mask.to(tensor.device)


def check_semi_structured(device: torch.device) -> None:
    """Raises UnsupportedOption if a device has no kernels for 2:4 sparse weights."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        raise UnsupportedOption(f"2:4 sparse kernels need an NVIDIA GPU from compute capability 8.0 on, not {device}.")


def to_semi_structured(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Converts linear layers that are pruned 2:4 to torchao's sparse kernels, for inference, in place.

    Args:
        model: on its GPU, in float16 or bfloat16.
        names: names of the pruned weights, such as those of `Pruning.masks`.

    Raises:
        UnsupportedOption: the device has no such kernels.
    """
    check_semi_structured(next(model.parameters()).device)
    sparsity = require("torchao.sparsity", "torchao")
    layers = {name.removesuffix(".weight") for name in names}
    sparsity.sparsify_(model, sparsity.semi_sparse_weight(), filter_fn=lambda _, name: name in layers)
    return model


def pruning_of(settings: Mapping[str, Any]) -> Pruning:
    """Returns the callback of the option `pruning`, from the callback's arguments."""
    return Pruning(**settings)
