"""DeepSpeed on tensors without data, as one process of many that do not exist.

DeepSpeed's own optimizer of ZeRO's stages 1 and 2 reduces, partitions and steps. Its engine is replaced by the calls
that the engine makes, and its communication by torch's fake process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.optional import require
from paceline.pytorch.distributed.deepspeed import DeepSpeed
from paceline.pytorch.forecast.rehearsal import NotTraced, fake_tensor
from paceline.pytorch.forecast.replaced import replaced

REDUCED_AT_ONCE = 500_000_000  # elements that the engine reduces in one call without ZeRO
# settings of ZeRO that the optimizer takes by the same name
OF_OPTIMIZER = (
    "contiguous_gradients", "reduce_bucket_size", "use_multi_rank_bucket_allreduce", "allgather_bucket_size",
    "reduce_scatter", "overlap_comm", "ignore_unused_parameters", "round_robin_gradients", "parameter_alignment",
    "compute_grad_norm",
)  # fmt: skip
# settings that change the dtype or the place of gradients and state, which are not traced
UNTRACED = ("data_types", "communication_data_type", "prescale_gradients", "gradient_predivide_factor")
TRACED_OF_BF16 = ("enabled", "check_grad_overflow")


class ZeroAlone(DeepSpeed):
    """Prepares a model without data as DeepSpeed's engine does, with ZeRO's stage 0, 1 or 2."""

    def _initialize(self, model: nn.Module, optimizer: Optimizer) -> Any:
        check_traced(self.stage, self.settings.config)
        if self.stage == 0:
            return ReplicatedEngine(model, optimizer, self.device)
        mode = next(model.parameters()).fake_mode  # type: ignore[attr-defined]
        with mode, without_processes():
            for parameter in model.parameters() if self.settings.config["bf16"]["enabled"] else ():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.bfloat16)
            return EngineAlone(model, make_zero(model, optimizer, self.settings.config, self.stage), self.device)


class EngineAlone(nn.Module):
    """Makes the calls of DeepSpeed's engine to its ZeRO optimizer.

    Args:
        model: without data.
        zero: DeepSpeed's ZeRO optimizer.
        device: of the model.
    """

    def __init__(self, model: nn.Module, zero: Any, device: torch.device) -> None:
        super().__init__()
        self.module, self.optimizer, self.device = model, zero, device
        self._is_boundary = True

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Sets whether the next backward pass is the last one of the step."""
        self._is_boundary = is_boundary

    def backward(self, loss: Tensor, scale_wrt_gas: bool = False) -> None:
        """Runs the backward pass, in which gradients are reduced."""
        zero = self.optimizer
        with without_processes():
            zero.clear_backward_seen_flag()
            zero.enter_backward()
            zero.set_gradient_accumulation_boundary(self._is_boundary)
            loss.backward()  # type: ignore[no-untyped-call]
            if zero.partition_gradients:
                zero.overlapping_partition_gradients_reduce_epilogue()
            elif self._is_boundary:
                zero.reduce_gradients()
            zero.backward_epilogue()
            zero.exit_backward()

    def step(self) -> None:
        """Clips the gradients and steps the optimizer."""
        with without_processes(), ReadAsZero():  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()

    def get_global_grad_norm(self) -> None:
        """Returns None: the norm has no value."""

    def was_step_applied(self) -> bool:
        """Returns True."""
        return True

    def masters(self) -> list[Tensor]:
        """Returns the weights that this process steps, one flat tensor per parameter group."""
        flats: list[Tensor] = self.optimizer.single_partition_of_fp32_groups
        return flats

    def kept_tensors(self) -> list[Tensor]:
        """Returns the master weights, and the gradients between the backward pass and the step."""
        groups = [group for group in self.optimizer.averaged_gradients.values() if group is not None]
        return [*self.masters(), *(tensor for group in groups for tensor in group)]

    def gradients_by_process(self, number: int) -> list[int]:
        """Returns the elements of the parameters of which each process holds a part."""
        zero = self.optimizer
        groups = zip(zero.round_robin_bit16_groups, zero.partition_size, zero.round_robin_bit16_padding, strict=True)
        counts = [0] * number
        for parameters, size, padding in groups:
            for rank in range(number):
                own, _, _ = zero.get_partition_info(parameters, size, rank, padding)
                counts[rank] += sum(parameter.numel() for parameter in own)
        return counts

    def give_gradients(self) -> None:
        """Gives each partition a gradient, as a backward pass leaves it."""
        zero = self.optimizer
        for index, flat in enumerate(zero.single_partition_of_fp32_groups):
            zero.averaged_gradients[index] = [torch.empty_like(flat, dtype=zero.gradient_accumulation_dtype)]


class ReplicatedEngine(EngineAlone):
    """Makes the calls of DeepSpeed's engine without ZeRO: whole gradients are reduced after the last backward pass."""

    def backward(self, loss: Tensor, scale_wrt_gas: bool = False) -> None:
        """Runs the backward pass, and reduces the gradients after the last one."""
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._is_boundary:
            return
        bucket: list[Tensor] = []
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        for index, gradient in enumerate(gradients):
            bucket.append(gradient)
            if sum(each.numel() for each in bucket) > REDUCED_AT_ONCE or index == len(gradients) - 1:
                flat = torch._utils._flatten_dense_tensors(bucket)  # type: ignore[no-untyped-call]
                distributed.all_reduce(flat)
                bucket.clear()
                del flat

    def step(self) -> None:
        """Steps the optimizer."""
        self.optimizer.step()

    def masters(self) -> list[Tensor]:
        """Returns no tensors: the optimizer steps the parameters themselves."""
        return []

    def kept_tensors(self) -> list[Tensor]:
        """Returns no tensors."""
        return []


class ReadAsZero(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns 0 where a value of a tensor without data is read: flags of non-finite gradients, and their norm."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], fake_tensor.FakeTensor):
            return False if args[0].dtype == torch.bool else 0
        return func(*args, **(kwargs or {}))


class Calls:
    """Takes the place of DeepSpeed's backend: its calls go to torch's process group."""

    using_mpi = False

    def is_initialized(self) -> bool:
        """Returns True."""
        return True

    def has_all_gather_into_tensor(self) -> bool:
        """Returns True."""
        return True

    def all_reduce(self, tensor: Tensor, op: object, group: distributed.ProcessGroup | None, async_op: bool) -> Any:
        """Reduces nothing."""
        return distributed.all_reduce(tensor, group=group, async_op=async_op)

    def __getattr__(self, name: str) -> Any:
        return getattr(distributed, name)


@contextmanager
def without_processes() -> Iterator[None]:
    """Replaces DeepSpeed's communication, and the addresses of tensors, whose alignment it checks."""
    comm: Any = require("deepspeed.comm.comm", "deepspeed")
    with replaced(comm, "cdb", Calls()), replaced(fake_tensor.FakeTensor, "data_ptr", lambda tensor: 0):
        yield


def check_traced(stage: int, config: Mapping[str, Any]) -> None:
    """Refuses the settings that are not traced.

    Raises:
        NotTraced: one of them is set.
    """
    if stage > 2:
        raise NotTraced(f"stage {stage} of DeepSpeed's ZeRO is not traced; stages 0 to 2 are.")
    zero = config["zero_optimization"]
    found = [name for name in ("offload_optimizer", "offload_param") if zero.get(name)]
    found += [name for name in UNTRACED if config.get(name)]
    found += [name for name, value in config["bf16"].items() if value and name not in TRACED_OF_BF16]
    if found:
        raise NotTraced(f"a run with DeepSpeed's {found[0]} is not traced: leave it out to plan the run without it.")


def make_zero(model: nn.Module, optimizer: Optimizer, config: Mapping[str, Any], stage: int) -> Any:
    """Returns DeepSpeed's ZeRO optimizer with the settings of a run."""
    kind = require("deepspeed.runtime.zero.stage_1_and_2", "deepspeed").DeepSpeedZeroOptimizer
    settings = require("deepspeed.runtime.zero.config", "deepspeed").DeepSpeedZeroConfig(**config["zero_optimization"])
    is_half = bool(config["bf16"]["enabled"])
    dtype = torch.bfloat16 if is_half else torch.float32
    return kind(
        optimizer,
        {parameter: name for name, parameter in model.named_parameters()},
        timers=require("deepspeed.utils.timer", "deepspeed").NoopTimer(),
        optimizer_params={},
        clip_grad=config["gradient_clipping"],
        dp_process_group=distributed.group.WORLD,
        gradient_accumulation_steps=config["gradient_accumulation_steps"],
        partition_grads=stage == 2,
        gradient_accumulation_dtype=dtype,
        communication_data_type=dtype,
        check_grad_overflow=is_half and config["bf16"].get("check_grad_overflow", True),
        **{name: getattr(settings, name) for name in OF_OPTIMIZER},
    )
