"""Models whose compiled code is replayed as CUDA graphs, which write their outputs to the same memory each time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle


def mark_steps(model: nn.Module) -> RemovableHandle:
    """Marks each call of a model with compiled blocks as the beginning of a step, until the returned hook is removed.

    Without gradients torch would take every block for a step by itself, and reuse the memory of the block before.
    """
    return model.register_forward_pre_hook(_mark_step)


def _mark_step(module: nn.Module, inputs: Any) -> None:
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def keep_outputs(model: nn.Module) -> None:
    """Copies the outputs of a model that is compiled as a whole, as long as it is compiled.

    A loss is read at the next log, and predictions at the end of an evaluation: until then the next call would have
    overwritten them. In training only scalars are copied, since a copy of the logits may take gigabytes.
    """
    compiled: Any = model._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        outputs = compiled(*args, **kwargs)
        copies_all = not torch.is_grad_enabled()
        return tree_map_only(Tensor, lambda value: value.clone() if copies_all or value.dim() == 0 else value, outputs)

    model._compiled_call_impl = call
