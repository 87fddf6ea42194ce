"""Device placement for one process. The Strategy contract is in `core.contracts`.

Each strategy of several processes has its own file in this folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, is_, is_not, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.args.errors import UnsupportedOption
from paceline.args.mesh import Mesh, resolve_mesh
from paceline.args.registry import STRATEGIES
from paceline.args.sections import Options
from paceline.core.optional import load
from paceline.pytorch.data.prefetch import DevicePrefetcher, move_to_device
from paceline.pytorch.distributed.precision import Precision, cast_in_place
from paceline.pytorch.distributed.window import Pass, PassRunner
from paceline.pytorch.distributed.world import World

PARAMETERS_OF = itemgetter("params")
GRADIENT_OF = attrgetter("grad")
IS_THERE = partial(is_not, None)
NOTHING = nullcontext()


@dataclass
class Prepared:
    """The result of `Strategy.prepare`: the module to call, and the optimizer over its parameters.

    Attributes:
        model: the module to call.
        optimizer: steps the module's parameters; None if no optimizer was requested.
        make_schedule: (optimizer steps of the run, warmup steps) -> the learning-rate schedule that the strategy's own
            settings request, or None.
    """

    model: nn.Module
    optimizer: Optimizer | None
    make_schedule: Callable[[int, int], Any] | None = None


class SingleDevice:
    """One process, one device: nothing is sharded, nothing is reduced."""

    delays_grad_sync = False
    in_step = False
    is_sharded = False
    runs_windows = False
    reduces_late = False
    memory_gate: Any = None
    is_spmd = False
    is_lazy = False
    accepts_full_model = True
    clips_itself = False
    min_micro_batches = 1

    def __init__(self, world: World, precision: Precision, mesh: Mesh | None = None) -> None:
        self.world = world
        self.mesh = mesh if mesh is not None else Mesh()
        self.device = world.device
        self.precision = precision
        self.optimizer: Optimizer | None = None
        self.parameters: list[nn.Parameter] = []  # parameters of the model, and others that the optimizer holds
        self._model: nn.Module | None = None
        self._held: list[Tensor] = []  # the optimizer's parameters when `self.parameters` was last listed
        self._num_alike = -1  # number of gradients when all had the same device, dtype and layout; else -1
        # set by an optimizer that steps inside the backward pass, or by a precision that runs the backward pass itself
        self._fused_backward: Callable[[Tensor, Any], None] | None = None
        self._is_stepped = False  # the backward pass has stepped the optimizer, whose `step` must not be called
        # moves a batch to the device; a direct call on the CPU, since this runs in every step
        self.place: Callable[[Any], Any] = partial(move_to_device, device=self.device, non_blocking=True)
        if self.device.type != "cpu":
            self.place = DevicePrefetcher(self.device)

    def prepare(self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer] | None) -> Prepared:
        """Puts the model on the device and makes its optimizer there."""
        self._model = model
        self.parameters = list(model.parameters())
        optimizer = make_optimizer(model) if make_optimizer is not None else None
        model, self.optimizer = self.precision.prepare(model, optimizer)
        if self.optimizer is not None:
            self._follow(self.optimizer)
            own = getattr(self.optimizer, "fused_backward", None)
            self._is_stepped = own is not None and not getattr(self.optimizer, "steps_rest", False)
            self._fused_backward = own if own is not None else self.precision.backward
        return Prepared(model, self.optimizer)

    def shard(self, model: nn.Module) -> None:
        """Shards a model in place before it is prepared; does nothing if this process holds all of it."""

    def follow_trainable(self, model: nn.Module) -> None:
        """Adapts to parameters whose `requires_grad` has changed between two optimizer steps; nothing to do here."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """Returns the autocast context, or an empty one."""
        return self.precision.context()

    def micro_step(self, last: bool, silent: bool = False) -> AbstractContextManager[Any]:
        """Returns an empty context: there is no gradient synchronization to delay."""
        return NOTHING

    def check_training_step(self, training_step: Callable[..., Tensor]) -> None:
        """Does nothing: this strategy can call any `training_step`."""

    def divide(self, batches: Sequence[Any], split: Callable[[Sequence[Any], int], list[Any]]) -> list[Any]:
        """Returns the micro-batches of a window unchanged; other strategies split them for `run_window`."""
        return list(batches)

    def run_window(self, engine: PassRunner, passes: list[Pass]) -> list[Tensor]:
        """Runs the forward and backward passes of an accumulation window, in order.

        Args:
            engine: runs each pass.
            passes: at least one.

        Returns:
            The contribution of each pass to the window's loss, 0-dim, detached.
        """
        losses = []
        for current in passes:
            # the weight is read inside the loop: a probe in the first pass may have changed it
            if current.is_required or current.counts.weight > 0:
                is_closing = current.syncs_gradients
                with self.micro_step(is_closing, current.is_dummy) if self.delays_grad_sync else NOTHING:
                    losses.append(engine.run_pass(current))
            else:
                engine.skip_pass(current)
            if not current.is_last:
                engine.end_pass(current)
        return losses

    def reduce_gradients(self) -> None:
        """Does nothing: there are no other processes."""

    def recover(self) -> None:
        """Makes the model ready for another pass after one that ran out of memory; nothing is left to do here."""

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        """Returns the module to call in evaluation, given a prepared one."""
        return model

    def run_within(self, model: nn.Module, function: Callable[[], Any]) -> Any:
        """Calls a function that uses parts of a model without its forward, such as `generate`."""
        return function()

    def cast_model(self, model: nn.Module, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Returns a context in which a model computes in `dtype`, without gradients; afterwards its values are restored
        bit for bit.
        """
        return cast_in_place(model, dtype)

    def backward(self, loss: Tensor) -> None:
        """Accumulates the gradients of `loss`. Parameters newly added to the optimizer start without a gradient."""
        if self.optimizer is not None:
            held = list(chain.from_iterable(map(PARAMETERS_OF, self.optimizer.param_groups)))
            if len(held) != len(self._held) or not all(map(is_, held, self._held)):  # without a call in each step
                self._follow(self.optimizer, clears=True)
            if self._fused_backward is not None:
                self._fused_backward(loss, self.optimizer.param_groups[0]["lr"])
                return
        if self.precision.scales:
            loss = self.precision.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, max_norm: float) -> Tensor | None:
        """Unscales the gradients and clips them to a total 2-norm of `max_norm`; infinity only computes it, 0 disables
        it.

        Returns:
            The norm before clipping, a 0-dim tensor on the device; None if disabled.
        """
        assert self.optimizer is not None
        if self.precision.scales:
            self.precision.unscale(self.optimizer)
        if max_norm <= 0:
            return None
        parameters = self._held if self.precision.has_masters else self.parameters
        gradients = list(filter(IS_THERE, map(GRADIENT_OF, parameters)))  # no Python call per parameter and step
        if len(gradients) != self._num_alike:
            self._num_alike = len(gradients) if are_alike(gradients) else -1
        is_clipped = max_norm < math.inf  # else gradients are untouched: a non-finite norm would make the factor NaN
        if self._num_alike < 0:
            return nn.utils.clip_grad_norm_(parameters, max_norm) if is_clipped else total_norm(gradients)
        # bit-identical to clip_grad_norm_, without grouping the gradients by device and dtype, its largest cost
        with torch.no_grad():
            norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)))
            if is_clipped:
                torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp_(max=1.0))
        return norm

    def clear_gradients(self) -> None:
        """Drops the gradients of every parameter of the model, and of the optimizer's other parameters."""
        for parameter in self.parameters:
            parameter.grad = None

    def _follow(self, optimizer: Optimizer, clears: bool = False) -> None:
        """Lists the parameters again if the optimizer's parameters have changed, e.g. if a callback added a head.

        Comparing the optimizer's parameters takes microseconds; walking through the model at each step would be slow.

        Args:
            optimizer: the optimizer that is stepped.
            clears: drop the gradients of new parameters, which stem from earlier optimizer steps.
        """
        held = list(chain.from_iterable(map(PARAMETERS_OF, optimizer.param_groups)))
        if len(held) == len(self._held) and all(map(is_, held, self._held)):
            return
        before = set(map(id, self.parameters))
        self.parameters = list(dict.fromkeys(chain(self._model.parameters() if self._model is not None else (), held)))
        self._held, self._num_alike = held, -1
        for parameter in self.parameters if clears else ():
            if id(parameter) not in before:
                parameter.grad = None

    def step(self, is_bad: Tensor | None = None) -> bool:
        """Steps the optimizer unless `is_bad` (0-dim, on the device) is true.

        Returns:
            False if the step is known to have been skipped.
        """
        assert self.optimizer is not None
        if self._is_stepped:
            return True
        return self.precision.step(self.optimizer, is_bad)

    def run_deferred(self) -> None:
        """Does nothing: no operation is deferred."""

    def upload(self, number: float) -> Any:
        """Returns a number that changes from step to step, in the form that deferred operations take."""
        return number

    def data_coordinates(self) -> tuple[int, int]:
        """Returns (shard, number of shards) of the data for this process."""
        return self.mesh.data_coordinates(self.world.process_index)

    def stateful(self) -> dict[str, Any]:
        """Returns the objects whose state a checkpoint stores in addition to the model and the optimizer."""
        return {"precision": self.precision}

    def holds_part_of(self, model: nn.Module) -> bool:
        """True if some of a model's values are held by other processes."""
        return False

    def awaits_weights(self, model: nn.Module) -> bool:
        """True if another process will send the model's values, so that loading them here is unnecessary."""
        return False

    def full_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Returns the whole model's state. Tied tensors stay tied. Collective if the model is sharded."""
        state: dict[str, Any] = model.state_dict(keep_vars=True)
        seen: dict[int, tuple[Any, Any]] = {}  # keeps each source alive, so that no id is reused
        for name, value in state.items():
            if id(value) not in seen:
                seen[id(value)] = value, self.whole_tensor(name, value) if isinstance(value, Tensor) else value
            state[name] = seen[id(value)][1]
        return state

    def whole_tensor(self, name: str, value: Tensor) -> Tensor:
        """Returns a value of the model's state, detached, on its own device."""
        return value.detach()

    def full_state(self, state: object) -> Any:
        """Returns the nest unchanged: nothing is sharded."""
        return state

    def load_full(self, model: nn.Module, weights: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Loads whole weights into the model; returns the missing names, and the unexpected ones."""
        result = model.load_state_dict(weights, strict=False)
        return list(result.missing_keys), list(result.unexpected_keys)

    def shard_state(self, optimizer: Optimizer) -> None:
        """Does nothing: there are no shards."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Returns the module as the user gave it, without the wrappers of torch.compile and parallelism."""
        inner = getattr(model, "_orig_mod", model)
        assert isinstance(inner, nn.Module)
        return inner


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Returns the total 2-norm of the gradients; a sparse gradient counts with its stored values."""
    return nn.utils.get_total_norm([each.coalesce().values() if each.is_sparse else each for each in gradients])


def are_alike(tensors: list[Tensor]) -> bool:
    """True if all tensors are dense plain tensors of one device and dtype; False for an empty list."""
    kinds = {(type(tensor), tensor.layout, tensor.device, tensor.dtype) for tensor in tensors}
    return len(kinds) == 1 and next(iter(kinds))[:2] == (Tensor, torch.strided)


def choose_strategy(world: World, precision: Precision, args: Options, parallel: str | None) -> SingleDevice:
    """Returns the strategy that the plan names or the device requires.

    Args:
        world: a single process uses SingleDevice, except on devices with their own strategy.
        precision: passed to the strategy.
        args: read by the other strategies.
        parallel: the plan's strategy name; None for a single process without a separate engine.

    Raises:
        UnsupportedOption: no strategy implements this combination of mesh axes.
    """
    kind = "xla" if world.device.type == "xla" else parallel
    check_device_options(args, kind, world.device)
    if kind is None:
        return SingleDevice(world, precision)
    if kind not in STRATEGIES:
        sizes = resolve_mesh(args, world.world_size, world.local_size).describe()
        raise UnsupportedOption(f"parallel: a mesh of {sizes} is not supported: use the other axes only.")
    strategy: SingleDevice = load(STRATEGIES[kind].strategy)(world, precision, args)
    return strategy


def check_device_options(args: Options, kind: str | None, device: torch.device) -> None:
    """Refuses options that the device does not support.

    Raises:
        UnsupportedOption: an option of XLA on another device, activations in host memory on the host, or fp8 on a
            device without it.
    """
    if args.activation_offload and device.type in ("cpu", "mps", "xla"):
        raise UnsupportedOption(
            f"activation_offload=True on {device} is not supported: it moves activations from a device with memory of "
            "its own to that of the host. Leave it out; activation_checkpointing=True saves memory everywhere."
        )
    if args.fp8:
        load("paceline.pytorch.model.fp8:check_device")(device)
    if kind == "xla":
        return
    asked = [f"tpu_num_cores={args.tpu_num_cores}"] if args.tpu_num_cores is not None else []
    asked += ["debug='tpu_metrics_debug'"] if "tpu_metrics_debug" in args.debug else []
    if asked:
        raise UnsupportedOption(
            f"{asked[0]} is for XLA devices, and this run is on {device}: leave it out, or set parallel='xla'."
        )


def put_on_device(model: nn.Module, device: torch.device) -> None:
    """Moves a model to a device and keeps tied parameters tied.

    Between some device types a parameter cannot be moved in place: `model.to` then creates a new parameter for each of
    its names.

    Raises:
        ValueError: a parameter is on the device "meta" and has no values.
    """
    empty = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if empty is not None:
        raise ValueError(
            f"The model's {empty!r} is on the device 'meta' and has no values: load the model, or, where it is sharded "
            "over several processes and the first one has the values, set "
            "fsdp_config={'cpu_ram_efficient_loading': True}."
        )
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model.to(device)
    for first, *others in names.values():
        for name in others:
            owner, _, leaf = name.rpartition(".")
            kept = model.get_parameter(first)
            if model.get_parameter(name) is not kept:
                setattr(model.get_submodule(owner), leaf, kept)


def empty_device_cache(device: torch.device) -> None:
    """Frees cached device memory; does nothing on the CPU, or if torch has no function for it."""
    if device.type != "cpu" and torch.accelerator.is_available():
        torch.accelerator.empty_cache()


class DistributedOutOfMemory(MemoryError):
    """A process ran out of memory in this window. Raised on all processes."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if this is an accelerator's out-of-memory error: by its type or, for backends without one, its message."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = ("out of memory", "CUDNN_STATUS_NOT_SUPPORTED", "can't allocate memory")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
