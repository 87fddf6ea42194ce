"""Contexts in which logits are computed: outside of the count of tensors of a checkpoint, and with gradients.

The functions of torch that these use are not documented; its own activation checkpoints and tensor subclasses use them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

CHECKPOINTS = "torch.utils.checkpoint"
# of the dispatcher: gradients and autocast
KEYS = ("AutogradFunctionality", "ADInplaceOrView", "AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS")


def is_checkpointed() -> bool:
    """Returns True inside of an activation checkpoint that is not reentrant.

    What is computed there is computed again in the backward pass, and has to save as many tensors as before.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    return hooks is not None and getattr(hooks[0], "__module__", None) == CHECKPOINTS


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Suspends the hooks that are given the tensors saved for the backward pass."""
    autograd = torch._C._autograd
    suspended = []
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:  # type: ignore[attr-defined]
        autograd._pop_saved_tensors_default_hooks()  # type: ignore[attr-defined]
        suspended.append(hooks)
    try:
        yield
    finally:
        for hooks in reversed(suspended):
            autograd._push_saved_tensors_default_hooks(*hooks)  # type: ignore[attr-defined]


def as_outside_of_dispatch() -> AbstractContextManager[None]:
    """Returns a context within `__torch_dispatch__` in which operations have gradients and autocast, as outside."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in KEYS:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), excluded
    )
    return guard
