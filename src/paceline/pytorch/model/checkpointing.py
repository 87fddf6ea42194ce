"""Activation checkpointing: activations are recomputed in the backward pass instead of being stored (arXiv:1604.06174).

If the model has its own method for it (transformers), that is used; otherwise its repeated blocks are wrapped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from paceline.core.spelling import nearest
from paceline.pytorch.data.prefetch import has_pinned_memory
from paceline.pytorch.model.blocks import repeated_blocks

Undo = Callable[[], None]

_OWN_METHODS = ("activation_checkpointing", "gradient_checkpointing")  # in transformers 5, and in older versions


@dataclass(frozen=True)
class CheckpointOptions:
    """The validated `activation_checkpointing_kwargs`.

    Fields:
        every_n_layers: checkpoint only every n-th block.
        offload: store the blocks' inputs in host memory.
        checkpoint: keyword arguments of `torch.utils.checkpoint.checkpoint`.
    """

    every_n_layers: int
    offload: bool
    checkpoint: dict[str, Any]

    @classmethod
    def read(cls, kwargs: Mapping[str, Any] | None) -> CheckpointOptions:
        """Returns the options; raises TypeError for an unknown key, ValueError for a value out of range."""
        options = {"use_reentrant": False, **(kwargs or {})}
        every_n_layers, offload = options.pop("every_n_layers", 1), options.pop("offload", False)
        if not isinstance(every_n_layers, int) or every_n_layers < 1:
            raise ValueError(f"activation_checkpointing_kwargs: every_n_layers={every_n_layers!r} must be 1 or more")
        known = {*inspect.signature(checkpoint).parameters, "preserve_rng_state"} - {"function", "args", "kwargs"}
        for key in options:
            if key not in known:
                hint = nearest(key, {*known, "every_n_layers", "offload"})
                raise TypeError(f"activation_checkpointing_kwargs has no key {key!r}; {hint}")
        return cls(every_n_layers, bool(offload), options)


def enable_checkpointing(model: nn.Module, kwargs: Mapping[str, Any] | None = None) -> tuple[str, Undo]:
    """Enables activation checkpointing.

    Args:
        kwargs: `activation_checkpointing_kwargs`.

    Returns:
        A note on the checkpointed parts, and a function that disables only what was enabled here.

    Raises:
        ValueError: the model has neither a method for it nor repeated blocks, or does not support an option.
        TypeError: an option is unknown.
    """
    options = CheckpointOptions.read(kwargs)
    if getattr(model, "supports_gradient_checkpointing", True):
        for method in _OWN_METHODS:
            if callable(getattr(model, f"{method}_enable", None)):
                return _ask_model(model, method, options)
    return _wrap_blocks(model, options)


def _ask_model(model: nn.Module, name: str, options: CheckpointOptions) -> tuple[str, Undo]:
    enable, argument = f"{name}_enable", f"{name}_kwargs"
    method = getattr(model, enable)
    wanted = {
        argument: options.checkpoint,
        **({"every_n_layers": options.every_n_layers} if options.every_n_layers != 1 else {}),
        **({"offload": True} if options.offload else {}),
    }
    parameters = inspect.signature(method).parameters
    takes_anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    refused = [key for key in wanted if key not in parameters and not takes_anything]
    if refused == [argument] and options.checkpoint == {"use_reentrant": False}:
        del wanted[argument]  # the model implements its own checkpointing, and no option was given
    elif refused:
        raise ValueError(
            f"activation_checkpointing_kwargs={dict(wanted)!r}: {type(model).__name__}.{enable} takes no "
            f"{' and no '.join(refused)}; leave it out, or take a newer version of the model's library"
        )
    was_on = bool(getattr(model, f"is_{name}", False))
    had_hooks = bool(getattr(model, "_require_grads_hooks", None) or getattr(model, "_require_grads_hook", None))
    method(**wanted)

    def undo() -> None:
        if was_on:
            return
        if callable(getattr(model, f"{name}_disable", None)):
            getattr(model, f"{name}_disable")()
        if not had_hooks and getattr(model, "_require_grads_hook", None) is not None:
            model.disable_input_require_grads()  # type: ignore[operator]

    return f"Activation checkpointing by {type(model).__name__}.{enable}{_details(options)}.", undo


def _wrap_blocks(model: nn.Module, options: CheckpointOptions) -> tuple[str, Undo]:
    every = repeated_blocks(model)
    if not every:
        raise ValueError(
            f"activation_checkpointing=True: {type(model).__name__} has no repeated blocks (modules in an "
            "nn.ModuleList, or of one class in an nn.Sequential); arrange them so, give the model a method "
            "activation_checkpointing_enable(activation_checkpointing_kwargs), or leave the option out"
        )
    blocks = every[:: options.every_n_layers]
    wrapped = [
        CheckpointedForward(block, options)
        for _, block in blocks
        if not isinstance(block.forward, CheckpointedForward)  # already checkpointed
    ]
    for forward in wrapped:
        forward.attach()

    def undo() -> None:
        for forward in wrapped:
            forward.detach()

    classes = ", ".join(sorted({type(block).__name__ for _, block in blocks}))
    counted = f"{len(blocks)} of {len(every)} repeated blocks ({classes})"
    return f"Activation checkpointing of {counted}{_details(options)}.", undo


def _details(options: CheckpointOptions) -> str:
    details = [f"every {options.every_n_layers} layers"] if options.every_n_layers != 1 else []
    details += ["inputs in host memory"] if options.offload else []
    return f", {', '.join(details)}" if details else ""


class CheckpointedForward:
    """Replaces `block.forward`. Hooks run outside of it, parameter names stay the same, copies and pickles work."""

    def __init__(self, block: nn.Module, options: CheckpointOptions) -> None:
        self.block = block
        self.offload = options.offload
        self.options = dict(options.checkpoint)
        self.overridden = vars(block).get("forward")  # other libraries may have set it on the instance
        self.counting = [
            module for module in block.modules() if isinstance(module, _NormBase) and module.running_mean is not None
        ]
        if not self.counting:
            return
        if self.options["use_reentrant"]:
            raise ValueError(
                "activation_checkpointing_kwargs use_reentrant=True would count each batch twice in "
                f"{type(self.counting[0]).__name__}'s running statistics: leave it at False"
            )
        self.options["context_fn"] = partial(_contexts, self.counting, self.options.get("context_fn"))

    def attach(self) -> None:
        self.block.forward = self

    def detach(self) -> None:
        if vars(self.block).get("forward") is not self:
            return
        if self.overridden is None:
            del self.block.forward
        else:
            self.block.forward = self.overridden

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.overridden or partial(type(self.block).forward, self.block)
        if not (self.block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if self.options["use_reentrant"]:
            _refuse_lost_gradients(self.block, kwargs)
        if kwargs:  # bound here, because `checkpoint` has parameters of its own
            forward = partial(forward, **kwargs)
        with save_on_cpu(pin_memory=has_pinned_memory()) if self.offload else nullcontext():
            return checkpoint(forward, *args, **self.options)


def _refuse_lost_gradients(block: nn.Module, kwargs: Mapping[str, Any]) -> None:
    lost = [key for key, value in kwargs.items() if isinstance(value, torch.Tensor) and value.requires_grad]
    if lost:
        raise ValueError(
            f"activation_checkpointing_kwargs use_reentrant=True loses the gradient of keyword arguments: "
            f"{type(block).__name__} is called with {', '.join(lost)}. Leave use_reentrant at False."
        )


def _contexts(
    counting: Sequence[_NormBase], asked: Callable[[], tuple[Any, Any]] | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of the forward pass and of its recomputation."""
    first, again = asked() if asked is not None else (nullcontext(), nullcontext())
    return first, _second_time(counting, again)


@contextmanager
def _second_time(counting: Sequence[_NormBase], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Freezes running statistics in the recomputation, because the first pass has already counted this batch."""
    with ExitStack() as stack:
        for module in counting:
            batches = module.num_batches_tracked
            saved = None if batches is None else batches.clone()
            stack.callback(_restore, module, module.momentum, saved)
            module.momentum = 0.0
        stack.enter_context(inner)
        yield


def _restore(module: _NormBase, momentum: float | None, batches: torch.Tensor | None) -> None:
    module.momentum = momentum
    if batches is not None and module.num_batches_tracked is not None:
        module.num_batches_tracked.copy_(batches)
