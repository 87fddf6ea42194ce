"""Compilation under a budget for the activations that are kept between forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config
from torch._inductor.compile_fx import compile_fx


@dataclass(frozen=True)
class Budgeted:
    """A backend of torch.compile: another one, which keeps a share of the activations and recomputes the others.

    The partitioner chooses which, so that recomputation costs least. Torch's setting is changed while this backend
    compiles, and not beyond. Instances with equal fields are equal, so that modules share compiled code.

    Args:
        backend: the name of the other backend, one that partitions a joint graph.
        mode, dynamic: arguments of torch.compile.
        budget: 0 keeps only the inputs of the compiled code, 1 what the backend keeps by itself.
    """

    backend: str
    mode: str | None
    dynamic: bool | None
    budget: float

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        """Compiles a graph."""
        with config.patch(activation_memory_budget=self.budget):
            if self.backend != "inductor":
                return torch._dynamo.lookup_backend(self.backend)(graph, list(inputs))
            options: dict[str, Any] = {}
            if self.mode not in (None, "default"):
                options = torch._inductor.list_mode_options(self.mode, self.dynamic)
            return compile_fx(graph, list(inputs), config_patches=options)
