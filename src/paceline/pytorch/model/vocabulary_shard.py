"""Heads whose classes are split over the processes of a tensor-parallel group (arXiv:1909.08053, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from paceline.args.errors import UnsupportedOption
from paceline.core.optional import LateModule
from paceline.pytorch.model.tensor_parts import is_dtensor

tensors: Any = LateModule("torch.distributed.tensor")


@dataclass(frozen=True, eq=False)
class Shard:
    """The classes of one process, of which all have the same rows.

    Attributes:
        group: the processes that share the classes, in their order.
        start: the first class of this process.
        num_classes: number of classes of all processes.
    """

    group: Any
    start: int
    num_classes: int

    def largest(self, values: Tensor) -> Tensor:
        """Returns the largest of the processes' values, elementwise. A collective; overwrites them."""
        distributed.all_reduce(values, distributed.ReduceOp.MAX, self.group)
        return values

    def first(self, values: Tensor) -> Tensor:
        """Returns the smallest of the processes' values, elementwise. A collective; overwrites them."""
        distributed.all_reduce(values, distributed.ReduceOp.MIN, self.group)
        return values

    def summed(self, values: Tensor) -> Tensor:
        """Returns the sums of the processes' values, elementwise. A collective; overwrites them."""
        distributed.all_reduce(values, distributed.ReduceOp.SUM, self.group)
        return values

    def own(self, values: Tensor, number: int) -> Tensor:
        """Returns the entries of this process's `number` classes, of a tensor with one entry per class."""
        return values[self.start : self.start + number]

    def gather(self, logits: Tensor) -> Tensor:
        """Returns the logits of all classes, `(..., num_classes)`, given those of this process. A collective."""
        found: Tensor = _Gather.apply(logits, self)  # type: ignore[no-untyped-call]
        return found


class _Gather(torch.autograd.Function):
    """Joins the logits of all processes. Each has the whole gradient, and takes the part of its own classes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: Shard) -> Tensor:
        ctx.shard, ctx.number = shard, logits.shape[-1]
        parts = [torch.empty_like(logits) for _ in range(distributed.get_world_size(shard.group))]
        distributed.all_gather(parts, logits.contiguous(), group=shard.group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return slope[..., ctx.shard.start : ctx.shard.start + ctx.number].contiguous(), None


def is_split(head: nn.Module) -> bool:
    """Returns True if the weight of a head is a DTensor."""
    return is_dtensor(getattr(head, "weight", None))


def group_of(head: nn.Module) -> Any:
    """Returns the group of processes over which tensor parallelism has split the weight of a head; None: it has not."""
    weight: Any = head.weight
    names = (weight.device_mesh.mesh_dim_names or ()) if is_split(head) else ()
    if "tp" not in names or weight.placements[names.index("tp")].is_replicate():
        return None
    return weight.device_mesh.get_group("tp")


def is_by_classes(head: Any) -> bool:
    """Returns True if the weight of a split head is split evenly over one group, by classes."""
    weight, mesh = head.weight, head.weight.device_mesh
    is_even = mesh.ndim == 1 and not weight.shape[0] % mesh.size()
    return is_even and tuple(weight.placements) == (tensors.Shard(0),) and type(weight.to_local()) is Tensor


def find_split_obstacle(head: Any, name: str) -> str | None:
    """Returns the reason why tensor parallelism leaves a head neither whole nor split by classes; None: it does not."""
    if is_by_classes(head) or all(placement.is_replicate() for placement in head.weight.placements):
        return None
    return f"the weight of {name} is sharded otherwise than by classes"


def local_part_of(head: Any) -> tuple[Tensor, Tensor | None, Shard]:
    """Returns the weight, the bias and the classes of this process; gradients reach the head's parameters."""
    mesh, num_classes = head.weight.device_mesh, head.weight.shape[0]
    shard = Shard(mesh.get_group(), mesh.get_local_rank() * (num_classes // mesh.size()), num_classes)
    return head.weight.to_local(), None if head.bias is None else head.bias.to_local(), shard


def local_rows(rows: Any) -> Tensor | None:
    """Returns the inputs of a head as a tensor, whose gradient is a part of a sum over the processes.

    Returns None if they are not whole on each process.
    """
    if not is_dtensor(rows) or any(not placement.is_replicate() for placement in rows.placements):
        return None
    found: Tensor = rows.to_local(grad_placements=[tensors.Partial()] * len(rows.placements))
    return found


class SplitOutput:
    """Stands for the output of a split head in the hooks of torch's tensor parallelism.

    Args:
        make: makes the logits of all classes, which need not be computed.
        compute: computes the output itself, a DTensor.
    """

    def __init__(self, make: Callable[[], Tensor], compute: Callable[[], Any]) -> None:
        self._make, self._compute = make, compute
        self.placements = (tensors.Replicate(),)

    def to_local(self) -> Tensor:
        """Returns the logits of all classes."""
        return self._make()

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedOption(
            "linear_cross_entropy is not possible: tp_plan leaves the output of the head a DTensor "
            f"(use_local_output=False), whose {name!r} is read. Cut the head by 'colwise_gather_output', or set "
            "linear_cross_entropy=False."
        )

    def redistribute(self, *args: Any, **options: Any) -> Any:
        """Returns the output itself in another placement, where the model's plan asks for one."""
        return self._compute().redistribute(*args, **options)


class Readers:
    """Lets all processes of a group compute the logits of split heads that one of them reads.

    One process may read alone. So all processes exchange, before each loss of an output, at each first read of one, and
    at the end of the forward, whether they wait for logits. The messages are small, and the host waits for them.

    Args:
        group: the processes that share the classes.
        device: the device of the head.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = torch.device("cpu") if "cpu" in distributed.get_backend_config(group) else device
        self._outputs: list[Any] = []  # recipes of the outputs of heads, in the order of the calls

    def add(self, logits: Any) -> None:
        """Adds the output of a head."""
        self._outputs.append(logits.recipe)

    def ask(self, number: int) -> int:
        """Returns the largest of the processes' numbers. A collective."""
        told = torch.tensor(number, device=self._device)
        distributed.all_reduce(told, distributed.ReduceOp.MAX, self._group)
        return int(told)

    def meet(self, family: object = None, reads: bool = False) -> None:
        """Computes the outputs that any process reads, until that of this family is computed or no process waits.

        Args:
            family: the family of an output that is used next; None: the forward ends.
            reads: this process reads that output.
        """
        own = next((place for place, each in enumerate(self._outputs, 1) if each.family is family), 0)
        while place := self.ask(own if reads else 0):
            output = self._outputs[place - 1]
            output.family.read_by = output.family.read_by or "code of another process"
            output.gather()
            if place == own:
                return
