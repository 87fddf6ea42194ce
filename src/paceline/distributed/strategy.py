"""Where tensors live. The Strategy contract is in `core.contracts`; here is the strategy of one process.

A strategy of several processes has a file of its own beside this one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
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
from paceline.args.plan import resolve_parallel
from paceline.data.prefetch import DevicePrefetcher, move_to_device
from paceline.distributed.precision import Precision, cast_in_place
from paceline.distributed.world import World

PARAMETERS_OF = itemgetter("params")
GRADIENT_OF = attrgetter("grad")
IS_THERE = partial(is_not, None)
NOTHING = nullcontext()

# how the work is shared -> where its strategy is, loaded by runs that need it
STRATEGIES = {
    "ddp": "paceline.distributed.ddp:DistributedData",
    "fsdp": "paceline.distributed.fsdp:FullyShardedData",
    "pipeline": "paceline.distributed.pipeline:Pipelined",
    "mesh": "paceline.distributed.mesh:MeshParallel",
    "deepspeed": "paceline.distributed.deepspeed:DeepSpeed",
    "xla": "paceline.distributed.xla:XlaDevices",
}


@dataclass
class Prepared:
    """What a strategy made of a model: the module to call, and the optimizer over its parameters.

    Attributes:
        model: the module to call.
        optimizer: over its parameters; None: none was asked for.
        make_schedule: (updates of the run, of these warmup) -> the schedule that the strategy's own settings ask for,
            or None where they ask for none.
    """

    model: nn.Module
    optimizer: Optimizer | None
    make_schedule: Callable[[int, int], Any] | None = None


class SingleDevice:
    """One process, one device: nothing is sharded, nothing is reduced."""

    holds_back = False
    in_step = False
    is_sharded = False
    runs_windows = False
    reduces_late = False
    is_opaque = False
    defers = False
    takes_whole_models = True

    def __init__(self, world: World, precision: Precision, mesh: Mesh | None = None) -> None:
        self.world = world
        self.mesh = mesh if mesh is not None else Mesh()
        self.device = world.device
        self.precision = precision
        self.optimizer: Optimizer | None = None
        self.parameters: list[nn.Parameter] = []  # of the model, and what the optimizer holds beside them
        self._model: nn.Module | None = None
        self._held: list[Tensor] = []  # by the optimizer, when that list was made
        self._num_alike = -1  # gradients that were found to be alike; -1: none were
        # of an optimizer that steps inside it, or of a precision that does it itself
        self._fused_backward: Callable[[Tensor, Any], None] | None = None
        self._is_stepped = False  # by the backward pass
        # the batch, its tensors on the device; on a CPU one call, since this is on the path of every step
        self.place: Callable[[Any], Any] = partial(move_to_device, device=self.device, non_blocking=True)
        if self.device.type != "cpu":
            self.place = DevicePrefetcher(self.device)

    def prepare(self, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer] | None) -> Prepared:
        """Put the model on the device and make its optimizer there."""
        self._model = model
        self.parameters = list(model.parameters())
        optimizer = make_optimizer(model) if make_optimizer is not None else None
        model, self.optimizer = self.precision.prepare(model, optimizer)
        if self.optimizer is not None:
            self._follow(self.optimizer)
            own = getattr(self.optimizer, "fused_backward", None)
            self._is_stepped = own is not None
            self._fused_backward = own if own is not None else self.precision.backward
        return Prepared(model, self.optimizer)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast, or nothing."""
        return self.precision.context()

    def micro_step(self, last: bool, silent: bool = False) -> AbstractContextManager[Any]:
        """The context of one forward and backward: nothing to hold back, there is nobody to reduce with."""
        return NOTHING

    def reduce_gradients(self) -> None:
        """Nothing to average: there is nobody else."""

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        """What to call in evaluation, of what `prepare` made."""
        return model

    def run_within(self, model: nn.Module, function: Callable[[], Any]) -> Any:
        """Call a function that uses parts of a model otherwise than through its forward: one that generates."""
        return function()

    def cast_model(self, model: nn.Module, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """A context in which a model computes in `dtype`, without gradients; afterwards it is as before, to the bit."""
        return cast_in_place(model, dtype)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of `loss`. What the optimizer was given since the last time starts without one."""
        if self.optimizer is not None:
            self._follow(self.optimizer, clears=True)
            if self._fused_backward is not None:
                self._fused_backward(loss, self.optimizer.param_groups[0]["lr"])
                return
        if self.precision.scales:
            loss = self.precision.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, max_norm: float) -> Tensor | None:
        """Unscale the gradients and clip them to a total 2-norm of `max_norm` (0: leave them).

        Returns:
            The norm before clipping, a 0-dim tensor on the device; None when nothing was asked.
        """
        assert self.optimizer is not None
        if self.precision.scales:
            self.precision.unscale(self.optimizer)
        if max_norm <= 0:
            return None
        parameters = self._held if self.precision.has_masters else self.parameters
        gradients = list(filter(IS_THERE, map(GRADIENT_OF, parameters)))  # no Python call for it, on every step
        if len(gradients) != self._num_alike:
            self._num_alike = len(gradients) if are_alike(gradients) else -1
        if self._num_alike < 0:
            return nn.utils.clip_grad_norm_(parameters, max_norm)
        # the same numbers, bit for bit, without sorting the gradients by device and dtype, which takes most of the time
        with torch.no_grad():
            norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)))
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp_(max=1.0))
        return norm

    def clear_gradients(self) -> None:
        """Drop the gradients of every parameter of the model, and of what the optimizer holds beside them."""
        for parameter in self.parameters:
            parameter.grad = None

    def _follow(self, optimizer: Optimizer, clears: bool = False) -> None:
        """List the parameters anew where the optimizer holds others than before: a callback added a head, say.

        Comparing what it holds takes microseconds, where a walk through the model at each step would be dear.

        Args:
            optimizer: the one that is stepped.
            clears: drop the gradients of those that are new: they are of updates before.
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
        """Update the parameters, unless `is_bad` (0-dim, on the device). Returns whether that is known to be done."""
        assert self.optimizer is not None
        if self._is_stepped:
            return True
        return self.precision.step(self.optimizer, is_bad)

    def run_deferred(self) -> None:
        """Nothing is put off."""

    def upload(self, number: float) -> Any:
        """A number that changes from step to step, as what is put off takes it."""
        return number

    def data_coordinates(self) -> tuple[int, int]:
        """(part, parts): which part of the data this process reads, and into how many it is cut."""
        return self.mesh.data_coordinates(self.world.process_index)

    def stateful(self) -> dict[str, Any]:
        """What a checkpoint must hold beside model and optimizer."""
        return {"precision": self.precision}

    def holds_part_of(self, model: nn.Module) -> bool:
        """Whether some of a model's values are on other processes."""
        return False

    def awaits_weights(self, model: nn.Module) -> bool:
        """Whether a model's values will come from another process, so that loading them here is of no use."""
        return False

    def full_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The whole model's state; where processes hold parts of it, all take part. Tied tensors stay one."""
        state: dict[str, Any] = model.state_dict(keep_vars=True)
        seen: dict[int, tuple[Any, Any]] = {}  # each with what it was made of, whose number is no other's meanwhile
        for name, value in state.items():
            if id(value) not in seen:
                seen[id(value)] = value, self.whole_tensor(name, value) if isinstance(value, Tensor) else value
            state[name] = seen[id(value)][1]
        return state

    def whole_tensor(self, name: str, value: Tensor) -> Tensor:
        """A value of the model's state, on the device it lives on."""
        return value.detach()

    def full_state(self, state: Any) -> Any:
        """The same nest, whole."""
        return state

    def load_full(self, model: nn.Module, weights: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Put whole weights into the model; returns the names that were missing, and those not known."""
        result = model.load_state_dict(weights, strict=False)
        return list(result.missing_keys), list(result.unexpected_keys)

    def shard_state(self, optimizer: Optimizer) -> None:
        """Nothing is sharded."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module as the user gave it: what torch.compile and parallel wrappers put around it is taken off."""
        inner = getattr(model, "_orig_mod", model)
        assert isinstance(inner, nn.Module)
        return inner


def are_alike(tensors: list[Tensor]) -> bool:
    """Whether they are dense, of no subclass, and of one device and dtype; False for none."""
    kinds = {(type(tensor), tensor.layout, tensor.device, tensor.dtype) for tensor in tensors}
    return len(kinds) == 1 and next(iter(kinds))[:2] == (Tensor, torch.strided)


def choose_strategy(world: World, precision: Precision, args: Any) -> SingleDevice:
    """The strategy that `parallel` names, or that the device needs; else, every process holds the whole model.

    Args:
        world: one process needs none of the others, but on devices that have a strategy of their own.
        precision: held by it.
        args: read by the other strategies.
    """
    kind = "xla" if world.device.type == "xla" else resolve_parallel(args, world.world_size, world.local_size)
    check_device_options(args, kind, world.device)
    if kind is None:
        return SingleDevice(world, precision)
    if kind not in STRATEGIES:
        sizes = resolve_mesh(args, world.world_size, world.local_size).describe()
        raise UnsupportedOption(f"parallel: a mesh of {sizes} is not supported: use the other axes only.")
    module, name = STRATEGIES[kind].split(":")
    strategy: SingleDevice = getattr(importlib.import_module(module), name)(world, precision, args)
    return strategy


def check_device_options(args: Any, kind: str | None, device: torch.device) -> None:
    """Refuse options of XLA devices where there are none.

    Raises:
        UnsupportedOption: one of them was given.
    """
    if kind == "xla":
        return
    asked = [f"tpu_num_cores={args.tpu_num_cores}"] if args.tpu_num_cores is not None else []
    asked += ["debug='tpu_metrics_debug'"] if "tpu_metrics_debug" in args.debug else []
    if asked:
        raise UnsupportedOption(
            f"{asked[0]} is for XLA devices, and this run is on {device}: leave it out, or set parallel='xla'."
        )


def put_on_device(model: nn.Module, device: torch.device) -> None:
    """Move a model, and keep its tied parameters one.

    Between some kinds of device a parameter cannot be moved in place: `model.to` then makes another, and one for each
    name that it had.

    Raises:
        ValueError: some of it is on the device "meta", and has no values.
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
    """Give cached device memory back to the driver; nothing to do on the CPU, or where torch does not know of any."""
    if device.type != "cpu" and torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is an accelerator's out-of-memory error: by its type or, for backends without one, by its words."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = ("out of memory", "CUDNN_STATUS_NOT_SUPPORTED", "can't allocate memory")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
