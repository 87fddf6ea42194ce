"""Data parallelism: every process holds the whole model; gradients are averaged in buckets during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.args.errors import UnsupportedOption
from paceline.args.mesh import resolve_mesh
from paceline.pytorch.distributed.collectives import sum_ints
from paceline.pytorch.distributed.strategy import NOTHING, Prepared, SingleDevice
from paceline.pytorch.distributed.window import Pass, PassRunner

IS_TRAINED = attrgetter("requires_grad")
SENT_AS = {"fp16": torch.float16, "bf16": torch.bfloat16}
BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default


class DistributedData(SingleDevice):
    """One model per process, wrapped in torch's DistributedDataParallel (Li et al., 2020, arXiv:2006.15704).

    Args:
        world, precision: as for `SingleDevice`.
        args: `ddp_*`, `activation_checkpointing` and `gradient_accumulation_steps` are read.

    Raises:
        UnsupportedOption: a static graph with accumulation or `auto_find_batch_size`.
    """

    delays_grad_sync = True

    def __init__(self, world: Any, precision: Any, args: Any) -> None:
        super().__init__(world, precision, resolve_mesh(args, world.world_size))
        if args.ddp_static_graph and args.gradient_accumulation_steps > 1:
            raise UnsupportedOption(
                f"ddp_static_graph=True with gradient_accumulation_steps={args.gradient_accumulation_steps} is not "
                "supported: torch's static graph fails where gradients are not reduced in every backward pass. Leave "
                "ddp_static_graph out."
            )
        if args.ddp_static_graph and args.auto_find_batch_size:
            raise UnsupportedOption(
                "ddp_static_graph=True with auto_find_batch_size=True is not supported: gradients are then reduced "
                "after the backward passes, and torch's static graph wants it within. Leave one of them out."
            )
        self.args = args
        self.reduces_late = bool(args.auto_find_batch_size)
        self._wrapped: DistributedDataParallel | None = None
        self._trained: list[bool] = []  # of the parameters, when the buckets were made
        self._beside: list[nn.Parameter] = []  # those that the optimizer holds and the model does not

    def prepare(self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer] | None) -> Prepared:
        """Puts the model on the device, makes its optimizer, and wraps it."""
        prepared = super().prepare(model, make_optimizer)
        model = prepared.model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return prepared
        device = self.device
        self._wrapped = DistributedDataParallel(
            model,
            device_ids=[device] if device.type != "cpu" and is_on(model, device) else None,
            **ddp_options(self.args),
        )
        register_comm_hook(self._wrapped, self.args.ddp_comm_hook)
        self._note_parameters(self._wrapped)
        return Prepared(self._wrapped, prepared.optimizer)

    def follow_trainable(self, model: nn.Module) -> None:
        """Makes the buckets of gradients again, for the parameters that are trained now.

        The wrapper stays the same object, which others hold; it drops its hooks on the parameters with its reducer.
        """
        if self._wrapped is not None:
            self._wrap_again(self._wrapped)

    def _wrap_again(self, wrapped: DistributedDataParallel) -> None:
        is_training, hooks = wrapped.training, (wrapped._forward_hooks, wrapped._forward_pre_hooks)
        type(wrapped).__init__(wrapped, wrapped.module, device_ids=wrapped.device_ids, **ddp_options(self.args))
        wrapped._forward_hooks, wrapped._forward_pre_hooks = hooks
        wrapped.training = is_training
        register_comm_hook(wrapped, self.args.ddp_comm_hook)
        self._note_parameters(wrapped)

    def _note_parameters(self, wrapped: DistributedDataParallel) -> None:
        """Notes which parameters are in the buckets, and gives those beside the model the first process's values."""
        own = set(map(id, wrapped.module.parameters()))
        held = [] if self.precision.has_masters else self.parameters
        self._beside = [parameter for parameter in held if id(parameter) not in own]
        for parameter in self._beside:
            distributed.broadcast(parameter.data, src=0)
        self._trained = list(map(IS_TRAINED, self.parameters))

    def run_window(self, engine: PassRunner, passes: list[Pass]) -> list[Tensor]:
        """Runs the passes of a window; afterwards all gradients are averages over the processes.

        The buckets are made again if a callback has thawed, frozen or added parameters.
        """
        if self.optimizer is not None:
            self._follow(self.optimizer, clears=True)
        if self._wrapped is not None and list(map(IS_TRAINED, self.parameters)) != self._trained:
            self._wrap_again(self._wrapped)
        losses = super().run_window(engine, passes)
        if self._beside and not self.reduces_late:
            self._average(self._beside)
        return losses

    def micro_step(self, last: bool, silent: bool = False) -> AbstractContextManager[Any]:
        """Delays gradient synchronization until the last micro-batch of an optimizer step.

        Args:
            last: True for the last micro-batch.
            silent: the micro-batch only takes part in the collective: its gradients are zero, whatever its loss.
        """
        is_held = not last or self.reduces_late
        if not is_held and not silent:
            return NOTHING
        stack = ExitStack()
        if is_held and self._wrapped is not None:
            stack.enter_context(self._wrapped.no_sync())
        if silent:
            stack.enter_context(silenced(self.parameters))
        return stack

    def reduce_gradients(self) -> None:
        """Averages the gradients over the processes; called if the backward passes did not."""
        if self._wrapped is not None:
            self._average([*self._wrapped.module.parameters(), *self._beside])
            share_buffers(self._wrapped)

    def _average(self, parameters: list[nn.Parameter]) -> None:
        """Averages the gradients of parameters over the processes."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        used = sum_ints(self.world, [int(parameter.grad is not None) for parameter in trained])
        for parameter, number in zip(trained, used, strict=True):
            if number and parameter.grad is None:  # used by other ranks only
                parameter.grad = torch.zeros_like(parameter)
        name = self.args.ddp_comm_hook
        for bucket in in_buckets([parameter.grad for parameter in trained if parameter.grad is not None]):
            whole = torch.cat([gradient.flatten() for gradient in bucket])
            sent = whole.to(SENT_AS[name]) if name is not None else whole
            distributed.all_reduce(sent.div_(self.world.world_size))
            parts = torch.split(sent, [gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        """Returns the unwrapped module, whose forward needs no collectives, with the buffers of the first process."""
        if model is not self._wrapped or self._wrapped is None:
            return model
        share_buffers(self._wrapped)
        inner: nn.Module = self._wrapped.module
        return inner

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Returns the module as the user gave it."""
        return super().unwrap(model.module if isinstance(model, DistributedDataParallel) else model)


def share_buffers(wrapped: DistributedDataParallel) -> None:
    """Broadcasts the buffers of the first process, unless `ddp_broadcast_buffers` is off."""
    if wrapped.broadcast_buffers:
        for buffer in wrapped.module.buffers():
            distributed.broadcast(buffer, src=0)


def in_buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yields buckets of at most `BUCKET_BYTES` of consecutive gradients of one dtype and device."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        is_alike = not bucket or (gradient.dtype, gradient.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not is_alike or sum(each.nbytes for each in bucket) + gradient.nbytes > BUCKET_BYTES):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def ddp_options(args: Any) -> dict[str, Any]:
    """Returns DistributedDataParallel's options from the arguments.

    Unused parameters are searched for unless this is turned off, or impossible: a static graph finds them itself, and
    reentrant activation checkpointing does not allow it.
    """
    options: dict[str, Any] = {"find_unused_parameters": args.ddp_find_unused_parameters}
    if options["find_unused_parameters"] is None:
        settings = args.activation_checkpointing_kwargs or {}
        is_reentrant = bool(args.activation_checkpointing and settings.get("use_reentrant"))
        options["find_unused_parameters"] = not (is_reentrant or args.ddp_static_graph)
    if args.ddp_bucket_cap_mb is not None:
        options["bucket_cap_mb"] = args.ddp_bucket_cap_mb
    if args.ddp_broadcast_buffers is not None:
        options["broadcast_buffers"] = args.ddp_broadcast_buffers
    if args.ddp_static_graph is not None:
        options["static_graph"] = args.ddp_static_graph
    return options


def register_comm_hook(wrapped: DistributedDataParallel, name: str | None) -> None:
    """Registers the hook that sends and sums gradients in 16 bits, if `ddp_comm_hook` requests it."""
    if name is not None:
        dtype = SENT_AS[name]
        hook: Any = lambda state, bucket: send_as(state, bucket, dtype)  # noqa: E731  (torch checks annotations)
        wrapped.register_comm_hook(distributed.group.WORLD, hook)  # type: ignore[no-untyped-call]


def send_as(state: Any, bucket: Any, dtype: torch.dtype) -> Any:
    """Averages one bucket over the processes, sent in `dtype`; a communication hook.

    torch's own bfloat16 hook requires NCCL; its float16 hook is used as it is.
    """
    if dtype == torch.float16:
        return default_hooks.fp16_compress_hook(state, bucket)
    buffer = bucket.buffer()
    sent = buffer.to(dtype).div_(distributed.get_world_size())

    def put_back(future: Any) -> Tensor:
        whole: Tensor = future.value()[0]
        buffer.copy_(whole)
        return buffer  # type: ignore[no-any-return]

    return distributed.all_reduce(sent, async_op=True).get_future().then(put_back)


@contextmanager
def silenced(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Returns a context in which the backward pass adds zeros to the gradients, whatever the loss (even NaN)."""
    hooked: list[Any] = [parameter for parameter in parameters if parameter.requires_grad]
    handles = [parameter.register_hook(torch.zeros_like) for parameter in hooked]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_on(model: nn.Module, device: torch.device) -> bool:
    """True if all parameters of a model are on `device`."""
    return all(parameter.device == device for parameter in model.parameters())
