"""An optimizer over stacked parameters that steps each member as its own optimizer would."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.args.errors import UnsupportedOption

# their update is the learning rate times a function of the gradients, element by element
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.RMSprop,
)


class MemberOptimizer(Optimizer):
    """Clips and steps the members of stacked parameters, each with its own learning rate and weight decay.

    The optimizer itself runs once for all members, with the learning rate 1 and without weight decay, on parameters set
    to zero; its result, the update, is then applied to each member with the member's own settings. `param_groups` has
    the groups of the first member, then those of the second, and so on, so that a schedule sets the learning rate of
    each.

    Args:
        inner: an optimizer over the stacked parameters.
        settings: for each member, the (learning rate, weight decay) of each group.
        max_grad_norm: the norm to which each member's gradients are clipped; 0 disables it.

    Attributes:
        stopped: members that are not stepped any more.
        norms: `(members,)`, the norms of the members' gradients before clipping in the last step; None before it.
        rates: the learning rate of each member in the last step.
        num_steps: steps since `take_steps` was last called.

    Raises:
        UnsupportedOption: the optimizer's update depends on more than the gradients of an element.
    """

    def __init__(
        self, inner: Optimizer, settings: Sequence[Sequence[tuple[float, float]]], max_grad_norm: float
    ) -> None:
        check_inner(inner)
        self.inner, self.max_grad_norm = inner, max_grad_norm
        self.num_members = len(settings)
        self.stopped: list[int] = []
        self.norms: Tensor | None = None
        self.rates: list[float] = []
        self.num_steps = 0
        groups = [
            {**group, "lr": rate, "weight_decay": decay}
            for own in settings
            for group, (rate, decay) in zip(inner.param_groups, own, strict=True)
        ]
        # the groups of several members hold the same parameters, which the constructor would refuse
        super().__init__(inner.param_groups, dict(inner.defaults))
        self.param_groups: list[dict[str, Any]] = groups
        self.state = inner.state
        self._decoupled = [is_decoupled(inner, group) for group in inner.param_groups]
        for group in inner.param_groups:
            group.update(lr=1.0, weight_decay=0.0)

    @property
    def inner_class(self) -> type[Optimizer]:
        """The class of the optimizer."""
        return type(self.inner)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of all members."""
        super().load_state_dict(state_dict)
        self.inner.state = self.state

    def limit_norm(self, max_norm: float) -> None:
        """Sets the norm to which each member's gradients are clipped in later steps; infinity disables clipping."""
        self.max_grad_norm = 0.0 if math.isinf(max_norm) else max_norm

    def take_steps(self) -> int:
        """Returns the steps since the last call."""
        number, self.num_steps = self.num_steps, 0
        return number

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Clips the gradients of each member and steps it.

        Args:
            closure: not supported.
        """
        self.num_steps += 1
        held = [[p for p in group["params"] if p.grad is not None] for group in self.inner.param_groups]
        every = [parameter for parameters in held for parameter in parameters]
        if not every:
            return
        self._clip(every)
        before = [[p.clone() for p in parameters] for parameters in held]
        self.rates = [float(group["lr"]) for group in self.param_groups[:: len(self.inner.param_groups)]]
        rates = self._settings("lr", every[0])
        decays = self._settings("weight_decay", every[0]) if self._has_decay() else None
        used = [number for number, parameters in enumerate(held) if parameters]
        for number in used:
            parameters = held[number]
            if decays is not None and not self._decoupled[number]:
                sign = -1.0 if self.inner.param_groups[number].get("maximize") else 1.0
                added = torch._foreach_mul(parameters, columns(sign * decays[number], parameters))
                torch._foreach_add_([p.grad for p in parameters], added)
            torch._foreach_zero_(parameters)
        self.inner.step()
        for number in used:
            parameters = held[number]
            kept = before[number]
            if decays is not None and self._decoupled[number]:
                kept = list(torch._foreach_mul(kept, columns(1 - rates[number] * decays[number], parameters)))
            torch._foreach_mul_(parameters, columns(rates[number], parameters))
            torch._foreach_add_(parameters, kept)
            if self.stopped:
                for parameter, old in zip(parameters, before[number], strict=True):
                    parameter[self.stopped] = old[self.stopped]

    def _clip(self, parameters: list[Tensor]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        # a parameter without dimensions is stacked to (members,)
        each = [torch.linalg.vector_norm(gradient.reshape(len(gradient), -1), dim=1) for gradient in gradients]
        self.norms = torch.linalg.vector_norm(torch.stack(each), dim=0)
        if self.max_grad_norm > 0:
            factors = (self.max_grad_norm / (self.norms + 1e-6)).clamp_(max=1.0)
            torch._foreach_mul_(gradients, columns(factors, gradients))

    def _has_decay(self) -> bool:
        return any([group["weight_decay"] for group in self.param_groups])  # a list: half the calls of a generator

    def _settings(self, name: str, like: Tensor) -> Tensor:
        """Returns a setting of each group and member, `(groups, members)`, on a parameter's device."""
        values = [float(group[name]) for group in self.param_groups]
        return torch.tensor(values, device=like.device).view(self.num_members, -1).T


def columns(values: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Returns `(members,)` in the shapes `(members, 1, ...)` and dtypes that broadcast over stacked tensors."""
    known: dict[tuple[int, torch.dtype], Tensor] = {}
    for like in likes:
        key = like.ndim, like.dtype
        if key not in known:
            known[key] = values.to(like.dtype).view(-1, *[1] * (like.ndim - 1))
    return [known[like.ndim, like.dtype] for like in likes]


def is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """True if weight decay shrinks the weights instead of being added to the gradients."""
    return isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay", False))


def check_inner(optimizer: Optimizer) -> None:
    """Checks that an optimizer can step stacked parameters.

    Raises:
        UnsupportedOption: its update depends on more than the gradients of an element.
    """
    kind = type(optimizer)
    if kind not in ELEMENTWISE:
        names = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise UnsupportedOption(
            f"{kind.__name__} does not update element by element, so members cannot be stepped at once: use one of "
            f"{names} of torch.optim, or train the members one by one."
        )
