"""Counts the model's floating-point operations once per batch shape, and computes the MFU."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from paceline.args.errors import UnsupportedOption
from paceline.args.plan import Plan
from paceline.core.ledger import training_seconds
from paceline.core.optional import LateModule
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.model.objective import adapted
from paceline.pytorch.model.operations import uses_tf32

if TYPE_CHECKING:
    from torch.utils import flop_counter

    from paceline.pytorch.engine import Engine
else:
    flop_counter = LateModule("torch.utils.flop_counter")

logger = logging.getLogger(__name__)

MOST_SHAPES = 1000  # cached shapes: ragged data has one shape per length
IS_TRAINED = attrgetter("requires_grad")

# (part of a device's name, dense TFLOP/s in (16 bits, TF32, float32)), from the vendors' data sheets. The first match
# applies. None: the device predates TF32 and bfloat16.
PEAKS: tuple[tuple[str, tuple[float, float | None, float]], ...] = (
    ("B200", (2250.0, 1125.0, 75.0)),
    ("H200", (989.4, 494.7, 66.9)),
    ("H100 PCIe", (756.0, 378.0, 51.2)),
    ("H100 NVL", (835.0, 417.5, 60.0)),
    ("H100", (989.4, 494.7, 66.9)),
    ("GH200", (989.4, 494.7, 66.9)),
    ("H800 PCIe", (756.0, 378.0, 51.2)),
    ("H800", (989.4, 494.7, 66.9)),
    ("A100", (312.0, 156.0, 19.5)),
    ("A800", (312.0, 156.0, 19.5)),
    ("L40S", (362.0, 183.0, 91.6)),
    ("L40", (181.0, 90.5, 90.5)),
    ("L4", (121.0, 60.0, 30.3)),
    ("A10G", (70.0, 35.0, 31.5)),
    ("A10", (125.0, 62.5, 31.2)),
    ("V100-SXM2", (125.0, None, 15.7)),
    ("V100-PCIE", (112.0, None, 14.0)),
    ("T4", (65.0, None, 8.1)),
    ("RTX 4090", (165.2, 82.6, 82.6)),
    ("RTX 3090", (71.0, 35.6, 35.6)),
    ("MI300X", (1307.4, 653.7, 163.4)),
)
WORD_ENDS = frozenset(" -/")
VARIANTS = frozenset({"MIG", "Laptop", "Ti", "D", "NVL"})  # devices with these in their name have another peak


def peak_of(name: str, precision: str, tf32: bool) -> float | None:
    """Returns the dense peak of a device in FLOP/s; None if it is unknown.

    Args:
        name: the device name reported by its driver.
        precision: the precision of the forward pass: "bf16", "fp16", or else float32.
        tf32: float32 matrix products use TF32.
    """
    for part, peaks in PEAKS:
        start = name.find(part)
        before, after = name[:start], name[start + len(part) :]
        if start < 0 or (before[-1:] or " ") not in WORD_ENDS or (after[:1] or " ") not in WORD_ENDS:
            continue
        if VARIANTS & {*before.split(), *after.split()}:
            return None
        halves, with_tf32, singles = peaks
        found: float | None = with_tf32 if tf32 and with_tf32 is not None else singles
        if precision in ("bf16", "fp16"):
            # bf16 was introduced together with TF32
            found = halves if precision == "fp16" or with_tf32 is not None else None
        return None if found is None else found * 1e12
    return None


def precision_of(precision: str, shard_precision: str | None, model: nn.Module) -> str:
    """Returns the precision of a model's matrix products: "bf16", "fp16", or "full" (fp32).

    Args:
        precision, shard_precision: the fields of the plan.
        model: the dtype of its weights decides if neither field does.
    """
    if precision.startswith("apex"):
        return "fp16"
    if precision != "full":
        return precision
    described = shard_precision or next((str(each.dtype) for each in model.parameters()), "")
    for name, words in (("bf16", ("bf16", "bfloat16")), ("fp16", ("fp16", "float16"))):
        if any(word in described for word in words):
            return name
    return "full"


def device_peak(device: torch.device, precision: str) -> float | None:
    """Returns the dense peak of a device in FLOP/s; None for a CPU and for devices that are not in the table."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), precision, uses_tf32())


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts floating-point operations with torch's formulas, while the same kernels run as without it.

    torch's own `FlopCounterMode` splits some kernels into others, such as the gradient of SiLU, and so changes the
    last bits of a pass.

    Attributes:
        operations: the sum so far.
    """

    supports_higher_order_operators = True  # higher-order operators within compiled code have no formulas

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self._is_paused = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):  # DTensors: the operators on their shards come next
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = None if self._is_paused else formula_of(func)
        if formula is not None and not is_recomputed():
            self.operations += int(formula(*args, **kwargs, out_val=result))
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Returns a context whose operators are not counted."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False


def is_recomputed() -> bool:
    """Returns True in the second forward pass of an activation checkpoint, which runs within the backward pass."""
    # a function of torch that is not documented: -1 outside of a backward pass
    if torch._C._current_graph_task_id() == -1 or not torch.is_grad_enabled():
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    return frame is not None  # else a backward pass that is differentiated again


def formula_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Returns torch's formula for the operations of an operator; None if it has none.

    Operators in place (`addmm_`), for which torch has no formulas, have those of their functional forms.
    """
    packet = getattr(function, "overloadpacket", None)
    formula = flop_counter.flop_registry.get(packet)
    if formula is None and packet is not None and packet.__name__.endswith("_"):
        formula = flop_counter.flop_registry.get(getattr(torch.ops.aten, packet.__name__.rstrip("_"), None))
    return formula


class FlopMeter:
    """Counts the operations of this process's passes, and computes the model FLOP/s and the MFU.

    The first pass over a batch of new shapes is counted, which does not change its results; later passes with these
    shapes reuse the count, as long as the same parameters are trained. Not counted are kernels for which torch has no
    formula (those of other packages), and what activation checkpoints compute again. A compiled model is estimated
    instead, because the counter would break its graph.

    Args:
        training_step: the Trainer's, bound: forward and backward of one micro-batch.
        estimate: `(batch) -> operations`, 0 if unknown; used if nothing can be counted.
        peak: the peak of the device in FLOP/s; None: unknown.
        is_compiled: the model is compiled.
        verdict: returns the result of the check of the chunked loss (`LinearLoss.is_right`). A pass that changes it
            has run the check too, so its count is not reused.
        parameters: returns the parameters of the model: frozen ones have no gradient to compute.

    Attributes:
        operations: operations of all passes so far.
    """

    def __init__(
        self,
        training_step: Callable[[nn.Module, Any, Any], Tensor],
        estimate: Callable[[Any], int],
        peak: float | None,
        is_compiled: bool = False,
        verdict: Callable[[], bool | None] = lambda: None,
        parameters: Callable[[], Sequence[nn.Parameter]] = tuple,
    ) -> None:
        self._training_step, self._estimate = training_step, estimate
        self.peak = peak
        self._is_compiled, self._verdict, self._parameters = is_compiled, verdict, parameters
        self._known: dict[Any, int] = {}
        self._counter: OperationCounter | None = None  # of the pass in progress
        self._has_warned = False
        self.operations = 0
        self._in_rows = 0
        self._seconds = 0.0

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs the Trainer's `training_step` and counts its operations."""
        key = shapes_of(inputs), tuple(map(IS_TRAINED, self._parameters()))
        known = self._known.get(key)
        if known is not None:
            self.operations += known
            return self._training_step(model, inputs, num_items_in_batch)
        estimated = int(self._estimate(inputs))  # before user code takes anything out of the batch
        if self._is_compiled:
            loss, counted = self._training_step(model, inputs, num_items_in_batch), 0
        else:
            verdict = self._verdict()
            loss, counted = self._counted(model, inputs, num_items_in_batch)
            if self._verdict() is not verdict:
                self.operations += counted
                return loss
        self._know(key, counted or estimated)
        return loss

    def _counted(self, model: nn.Module, inputs: object, num_items_in_batch: object) -> tuple[Tensor, int]:
        """Returns the loss of a pass, and its operations."""
        with OperationCounter() as counter:
            self._counter = counter
            try:
                loss = self._training_step(model, inputs, num_items_in_batch)
            finally:
                self._counter = None
        return loss, counter.operations

    def join(self, engine: Engine) -> None:
        """Leaves the extra passes of an engine, which infer the reduction of the loss, out of the count."""
        engine.around_probe.append(self._paused)

    def _paused(self) -> AbstractContextManager[None]:
        return nullcontext() if self._counter is None else self._counter.paused()

    def _know(self, key: object, operations: int) -> None:
        if not operations and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "log_flops=True: the operations of this model cannot be counted (it is compiled, or torch has no "
                "formula for its kernels), nor estimated: override floating_point_ops(inputs) of the Trainer."
            )
        if len(self._known) >= MOST_SHAPES:
            self._known.clear()
        self._known[key] = operations
        self.operations += operations

    def row(self, times: Mapping[str, float]) -> dict[str, float]:
        """Returns the entries of a log row: `model_flops_per_second` and, if the peak is known, `mfu`.

        Args:
            times: seconds by activity since the last row.
        """
        done, self._in_rows = self.operations - self._in_rows, self.operations
        seconds = training_seconds(times)
        self._seconds += seconds
        return self._rates(done, seconds)

    def _rates(self, operations: int, seconds: float) -> dict[str, float]:
        if not operations or seconds <= 0:
            return {}
        rates = {"model_flops_per_second": operations / seconds}
        if self.peak is not None:
            rates["mfu"] = round(operations / seconds / self.peak, 4)
        return rates

    def describe(self) -> str:
        """Returns the rates of the whole run as a sentence; empty if nothing was counted."""
        rates = self._rates(self.operations, self._seconds)
        if not rates:
            return ""
        share = f", {100 * rates['mfu']:.1f} % of the peak of the device (MFU)" if "mfu" in rates else ""
        per_second = rates["model_flops_per_second"]
        rate = f"{per_second / 1e12:.3g} TFLOP/s" if per_second >= 1e12 else f"{per_second / 1e9:.3g} GFLOP/s"
        return f"Model {rate}{share}"


def shapes_of(batch: object) -> Any:
    """Returns the shapes of a batch's tensors as a hashable value."""
    if isinstance(batch, Tensor | np.ndarray):
        return tuple(batch.shape)
    if isinstance(batch, Mapping):
        return tuple((name, shapes_of(value)) for name, value in batch.items())
    if isinstance(batch, list | tuple):
        return tuple(map(shapes_of, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return shapes_of(vars(batch))
    return None


def check_countable(runs_windows: bool, is_lazy: bool) -> None:
    """Raises if this process does not run whole micro-batches eagerly.

    Raises:
        UnsupportedOption: the strategy is a pipeline, or the device an XLA device.
    """
    if runs_windows or is_lazy:
        kind = "a pipeline, whose processes hold a part of the model each" if runs_windows else "an XLA device"
        raise UnsupportedOption(f"log_flops=True is not supported with {kind}: leave it out.")


def meter_of(facade: Any, strategy: SingleDevice, plan: Plan, model: nn.Module) -> FlopMeter:
    """Returns the FLOP meter of a run.

    Args:
        facade: its `training_step` and `floating_point_ops` are called.
        strategy: the strategy that prepared the model.
        plan: the plan of the run.
        model: as the user gave it; compiled submodules are detected.

    Raises:
        UnsupportedOption: see `check_countable`.
    """
    check_countable(strategy.runs_windows, strategy.is_lazy)
    precision = precision_of(plan.precision, plan.shard_precision, model)
    return FlopMeter(
        adapted(facade.training_step, 3),
        facade.floating_point_ops,
        device_peak(strategy.device, precision),
        is_compiled=any(is_compiled(module) for module in model.modules()),
        verdict=lambda: facade.objective.chunks_verdict,
        parameters=lambda: strategy.parameters,
    )


def is_compiled(module: nn.Module) -> bool:
    """Returns True if a module was compiled, in place or by a wrapper."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
