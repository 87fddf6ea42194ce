"""Stops all processes of a sharded model before their next collective if one of them has run out of memory.

The passes of a sharded model run collectives. A process that runs out of memory between two of them would leave the
others waiting in the next one. So the processes agree before every collective, over gloo on the host: all of them start
it, or all of them abandon the accumulation window. Memory for the collective is allocated before the agreement.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.args.errors import UnsupportedOption
from paceline.pytorch.distributed.strategy import DistributedOutOfMemory
from paceline.pytorch.distributed.watchdog import Watchdog

COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"})  # operator namespaces
# their names up to torch 2.12 are deprecated
gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
scatter: Any = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
STAGE = "waiting for the others before a collective of a pass"


class MemoryGate:
    """The agreement of all processes before each collective of an accumulation window.

    Args:
        timeout: seconds after which the agreement fails (`ddp_timeout`).
        watches_operators: collectives are recognized among all operators, which adds microseconds to each; False if
            those of FSDP are the only ones, which call the gate themselves.

    Attributes:
        is_open: a window is running, so that collectives are preceded by an agreement.
    """

    def __init__(self, timeout: float, watches_operators: bool) -> None:
        # a separate group: a collective of user code on the default group would be matched with an agreement
        self._group: Any = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        weakref.finalize(self, leave, self._group)
        self._watches_operators = watches_operators
        self._watchdog: Watchdog | None = None

    @property
    def is_open(self) -> bool:
        return self._watchdog is not None

    @contextmanager
    def opened(self, watchdog: Watchdog) -> Iterator[None]:
        """Puts an agreement before each collective while entered.

        Args:
            watchdog: is notified when this process waits.
        """
        self._watchdog = watchdog
        watching: AbstractContextManager[Any] = OperatorWatch(self) if self._watches_operators else nullcontext()
        try:
            with watching:
                yield
        finally:
            self._watchdog = None

    def pass_through(self) -> None:
        """Waits for the other processes, if a window is running.

        Raises:
            DistributedOutOfMemory: one of them has run out of memory.
        """
        if self._watchdog is None:
            return
        with self._watchdog.waiting(STAGE):
            number = self.num_out_of_memory(False)
        if number:
            raise DistributedOutOfMemory(f"{number} of the other processes ran out of memory")

    def num_out_of_memory(self, is_out: bool) -> int:
        """Returns the number of processes that have run out of memory. A collective."""
        number = torch.tensor(int(is_out))
        distributed.all_reduce(number, group=self._group)
        return int(number)

    def all_reduce_max(self, number: int) -> int:
        """Returns the largest of the processes' numbers. A collective."""
        largest = torch.tensor(number)
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=self._group)
        return int(largest)

    def attach(self, model: nn.Module) -> None:
        """Puts the gate before the collectives of the units of a sharded model."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(GatedGather(self))  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(GatedScatter(self))  # type: ignore[arg-type]


class Gated:
    """A collective of FSDP behind a gate. FSDP allocates its tensors before the call."""

    def __init__(self, gate: MemoryGate) -> None:
        self.gate = gate

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns an empty tensor for the input or the output."""
        return torch.empty(*size, dtype=dtype, device=device)


class GatedGather(Gated):
    """The all-gather of a unit's parameters."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.gate.pass_through()
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class GatedScatter(Gated):
    """The reduce-scatter of a unit's gradients."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.gate.pass_through()
        return scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes the gate before each operator that is a collective, those of DTensors included.

    Args:
        gate: the gate.
    """

    def __init__(self, gate: MemoryGate) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate = gate

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: it calls the collectives
        if getattr(func, "namespace", None) in COLLECTIVES and "wait" not in func.__name__:
            self.gate.pass_through()
        return func(*args, **(kwargs or {}))


def check_recovery() -> None:
    """Checks that torch can reset a sharded model after a pass that failed.

    Raises:
        UnsupportedOption: this release cannot.
    """
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise UnsupportedOption(
            f"auto_find_batch_size=True with a sharded model is not supported by torch {torch.__version__}, which "
            "cannot go on after a failed pass: use torch 2.13 or later, or set per_device_train_batch_size and "
            "gradient_accumulation_steps."
        )


def recover(model: nn.Module) -> None:
    """Makes a sharded model ready for another pass after one that failed; its gradients are dropped."""
    if not isinstance(model, FSDPModule):
        return
    model.reset_iter_state()  # type: ignore[operator, unused-ignore]
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    for parameter in (parameter for group in groups for parameter in group.fsdp_params):
        # gradients of earlier micro-batches that were not reduced yet; torch leaves them in place
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def leave(group: Any) -> None:
    """Destroys a group, unless all groups have been destroyed already."""
    if distributed.is_initialized():
        distributed.destroy_process_group(group)
