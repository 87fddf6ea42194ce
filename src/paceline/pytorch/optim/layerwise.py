"""Optimizers that step one parameter at a time: inside the backward pass, or with moments in 16 bits.

An optimizer that steps inside the backward pass has a method `fused_backward(loss, lr)`, which the strategy calls
instead of `loss.backward()`, so that gradients are never all in memory.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.args.sections import Options
from paceline.core.optional import LateModule
from paceline.pytorch.optim.states import ExactState

if TYPE_CHECKING:
    from paceline.pytorch.optim import short_moments
else:
    short_moments = LateModule("paceline.pytorch.optim.short_moments")

logger = logging.getLogger(__name__)

DEFAULT_MAX_NORM = 1.0  # default of TrainingArguments, which cannot be distinguished from an explicit value


def steps_in_backward(optimizer: object) -> bool:
    """Returns True if `optimizer` consumes its gradients inside the backward pass."""
    return callable(getattr(optimizer, "fused_backward", None))


def check_run(optimizer: object, name: str, plan: Any) -> None:
    """Checks that an optimizer which steps inside the backward pass supports the options of a run.

    Args:
        optimizer: any optimizer; others are not checked.
        name: its name, for the message.
        plan: accumulation_steps, precision, nonfinite_policy, max_grad_norm, world_size, parallel.

    Raises:
        ValueError: an option requires all gradients at once; the message names it.
    """
    if not steps_in_backward(optimizer):
        return
    who = f"optim={name!r} ({type(optimizer).__name__})"
    why = f"{who} updates each parameter inside the backward pass and never holds all gradients"
    if plan.accumulation_steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps={plan.accumulation_steps}: {why}; set gradient_accumulation_steps=1."
        )
    if plan.precision not in ("full", "bf16"):
        raise ValueError(f"fp16=True: {why}, so none can be left out when one overflows; set bf16=True instead.")
    if plan.nonfinite_policy == "skip":
        raise ValueError(f"nonfinite_policy='skip': {why}, so a step cannot be skipped; set 'raise' or 'rollback'.")
    takes_shards = isinstance(optimizer, LayerwiseOptimizer) and optimizer.takes_shards
    if plan.world_size > 1 and not (takes_shards and plan.parallel == "fsdp"):
        remedy = "set parallel='fsdp', which averages each gradient first" if takes_shards else "start one process"
        raise ValueError(f"{why}, so they cannot be averaged over {plan.world_size} processes; {remedy}.")
    if plan.max_grad_norm not in (0, DEFAULT_MAX_NORM):
        raise ValueError(f"max_grad_norm={plan.max_grad_norm}: {why}, so their norm is not known; set max_grad_norm=0.")
    if plan.max_grad_norm:
        logger.warning("%s: they are not clipped. Set max_grad_norm=0 to say that this is meant.", why)


class PerParameterOptimizer(ExactState, Optimizer):
    """A separate optimizer per parameter, behind the groups and the state of a single optimizer of the inner class.

    Schedules set the rates of the groups, and a checkpoint contains the state of all parameters, in the format of the
    inner class.

    Args:
        params: parameter groups.
        optimizer_class: the class of each parameter's optimizer.
        moments: holds the moments in 16 bits between steps; None: in the dtype of the inner class.
        settings: keyword arguments of that class.

    Attributes:
        inner_class: the class of each parameter's optimizer.

    Raises:
        ValueError: the class takes steps that are not independent for each parameter.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        moments: short_moments.ShortMoments | None = None,
        **settings: Any,
    ) -> None:
        self.parts = getattr(optimizer_class, "parts", {})
        self.moments = moments
        self.inner_class = optimizer_class
        self._make: Callable[[dict[str, Any]], Optimizer] = lambda group: optimizer_class([group], **settings)
        self._inside: dict[nn.Parameter, tuple[Optimizer, int, int]] = {}  # its optimizer, group and position
        groups = list(params)
        filled = next(group for group in groups if group["params"])
        check_independent(one := self._make({**filled, "params": filled["params"][:1]}))
        super().__init__(groups, dict(one.defaults))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, and makes an optimizer for each of its parameters."""
        super().add_param_group(param_group)
        index, group = len(self.param_groups) - 1, self.param_groups[-1]
        for parameter in group["params"]:
            own = self._make({**group, "params": [parameter]})
            self._inside[parameter] = own, index, len(self._inside)
            self.state.update(own.state)
            self._begin(parameter)
        if group["params"]:
            made = self._inside[group["params"][0]][0].param_groups[0]
            group.update({key: value for key, value in made.items() if key != "params"})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Steps every parameter that has a gradient.

        Raises:
            ValueError: the optimizer has no moments to hold in 16 bits.
        """
        for parameter in self._inside:
            if parameter.grad is not None:
                self._step_one(parameter)
        if self.moments is not None:
            self.moments.check(self.state)

    def _begin(self, parameter: nn.Parameter) -> None:
        """Does nothing; called for each parameter that is added."""

    def _step_one(self, parameter: nn.Parameter) -> None:
        own, index, place = self._inside[parameter]
        options = own.param_groups[0]
        options.update({key: value for key, value in self.param_groups[index].items() if key != "params"})
        own.state.pop(parameter, None)
        if parameter in self.state:  # changed in place: an optimizer of several shares its dict with its parts
            own.state[parameter] = self.state[parameter]
        if self.moments is not None:
            self.moments.expand(own.state.get(parameter, {}))
        before = fingerprint(options)
        own.step()
        if fingerprint(options) != before:
            raise ValueError(
                f"{type(own).__name__} changes the values of a group in its step, so that its parameters cannot be "
                "stepped one at a time: leave optimizer_in_backward and optimizer_state_dtype out, or choose another "
                "optimizer."
            )
        if parameter in own.state:
            self.state[parameter] = own.state[parameter]
            if self.moments is not None:
                self.moments.shorten(self.state[parameter], parameter, place)


class LayerwiseOptimizer(PerParameterOptimizer):
    """A separate optimizer per parameter, stepped as soon as the parameter's gradient is computed.

    `fused_backward` steps inside the backward pass and drops each gradient. `step` steps the parameters that still have
    one: after a plain `backward`, and those that did not require a gradient when they were added.

    Args:
        params, optimizer_class, moments, settings: as for `PerParameterOptimizer`.
        takes_shards: the steps of the class are the same on shards of a parameter as with one optimizer of the class.
    """

    steps_rest = True

    def __init__(
        self, params: Any, optimizer_class: Callable[..., Optimizer], takes_shards: bool = False, **settings: Any
    ) -> None:
        self.takes_shards = takes_shards
        self._is_stepping = False
        self._stepped: set[nn.Parameter] = set()  # of the backward pass in progress
        self._this = weakref.ref(self)  # so that a parameter's hook does not keep the optimizer of an earlier run alive
        super().__init__(params, optimizer_class, **settings)

    def fused_backward(self, loss: Tensor, lr: float) -> None:
        """Runs the backward pass and steps inside it; `lr` is ignored, because the groups have their own rates."""
        self._is_stepping = True
        self._stepped.clear()
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._is_stepping = False

    def _begin(self, parameter: nn.Parameter) -> None:
        if parameter.requires_grad:
            this = self._this
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda given: step_parameter(this(), given)
            )

    def _step_parameter(self, parameter: nn.Parameter) -> None:
        if not self._is_stepping:
            return
        if parameter in self._stepped:
            raise RuntimeError(
                f"The gradient of a parameter of shape {tuple(parameter.shape)} came in several parts in one backward "
                "pass, of which the first was applied: the step is wrong. Reentrant activation checkpointing of a "
                "shared layer does this: set use_reentrant=False, or optimizer_in_backward=False."
            )
        self._stepped.add(parameter)
        self._step_one(parameter)
        parameter.grad = None


def step_parameter(optimizer: LayerwiseOptimizer | None, parameter: nn.Parameter) -> None:
    """Steps a parameter after its gradient is computed, unless the optimizer no longer exists."""
    if optimizer is not None:
        optimizer._step_parameter(parameter)


def fingerprint(options: Mapping[str, Any]) -> list[tuple[str, Any, int]]:
    """Returns values that differ after the options of a group have changed, also in place."""
    return [
        (key, id(value) if isinstance(value, Tensor) else value, value._version if isinstance(value, Tensor) else 0)
        for key, value in options.items()
        if key != "params"
    ]


def check_independent(optimizer: Optimizer) -> None:
    """Checks that an optimizer may be made for each parameter.

    Raises:
        ValueError: it needs a closure, has two sets of weights, or keeps state in its groups; the message says which.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    reason = None
    if closure is not None and closure.default is inspect.Parameter.empty:
        reason = "its step needs a closure over all parameters"
    elif callable(getattr(optimizer, "train", None)):
        reason = "it switches between two sets of all weights"
    elif any(isinstance(value, Mapping) for value in optimizer.param_groups[0].values()):
        reason = "it keeps state in its parameter groups"
    if reason is not None:
        raise ValueError(
            f"{type(optimizer).__name__} cannot step one parameter at a time, because {reason}: leave "
            "optimizer_in_backward and optimizer_state_dtype out, or choose another optimizer, such as "
            "'adamw_torch_fused'."
        )


def by_parameter(optimizer_class: Any, kwargs: dict[str, Any], args: Options) -> tuple[Any, dict[str, Any]]:
    """Returns the class and the arguments of an optimizer with `optimizer_in_backward` and `optimizer_state_dtype`.

    Args:
        optimizer_class, kwargs: a torch optimizer class and its arguments; a class that steps inside the backward pass
            already, and a factory, are returned unchanged.
        args: the two options and the seed.

    Raises:
        ValueError: the class is configured over the whole model.
    """
    # other libraries' arguments, which `create_optimizer` takes too, lack the options
    is_inside, dtype = getattr(args, "optimizer_in_backward", False), getattr(args, "optimizer_state_dtype", None)
    moments = short_moments.ShortMoments(args.seed) if dtype == "bfloat16" else None
    is_class = isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)
    if not is_class or steps_in_backward(optimizer_class) or not (is_inside or moments is not None):
        if moments is not None and is_class and issubclass(optimizer_class, LayerwiseOptimizer):
            kwargs = {**kwargs, "moments": moments}
        return optimizer_class, kwargs
    if kwargs.get("optim_bits") == 8:
        raise ValueError(
            f"{asked(args)}: {optimizer_class.__name__} with a state in 8 bits is configured over the whole model; "
            "leave the option out, or choose another optimizer, such as 'adamw_torch_fused'."
        )
    kwargs = {**kwargs, "optimizer_class": optimizer_class, "moments": moments}
    if is_inside:
        return LayerwiseOptimizer, {**kwargs, "takes_shards": True}
    return PerParameterOptimizer, kwargs


def asked(args: Options) -> str:
    """Returns the option of the two that is set, with its value."""
    return "optimizer_in_backward=True" if args.optimizer_in_backward else "optimizer_state_dtype='bfloat16'"


def check_options(optimizer: object, args: Options, plan: Any) -> None:
    """Checks that `optimizer_in_backward` and `optimizer_state_dtype` have their effect.

    Args:
        optimizer: the optimizer of the run.
        args: the two options.
        plan: parallel.

    Raises:
        ValueError: the optimizer was not made from a class by the Trainer, or the strategy steps it in another way.
    """
    has_moments = isinstance(optimizer, PerParameterOptimizer) and optimizer.moments is not None
    is_short = args.optimizer_state_dtype == "bfloat16"
    if (args.optimizer_in_backward and not steps_in_backward(optimizer)) or (is_short and not has_moments):
        raise ValueError(
            f"{asked(args)} has no effect on a {type(optimizer).__name__} that is given to the Trainer or made by its "
            "create_optimizer: pass optimizer_cls_and_kwargs=(class, arguments), or choose one by its name in `optim`."
        )
    supported = (None, "fsdp") if args.optimizer_in_backward else (None, "ddp", "fsdp")
    if (args.optimizer_in_backward or is_short) and plan.parallel not in supported:
        raise ValueError(
            f"{asked(args)} with parallel={plan.parallel!r} is not supported: use "
            f"{' or '.join(map(repr, supported[1:]))}, or leave the option out."
        )
