"""Broadcasts the first process's initial values to all; other ranks may start without values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn

from paceline.pytorch.distributed.collectives import gather_objects
from paceline.pytorch.distributed.world import World

ALIGNMENT = 64  # bytes, as in torch's host allocators
Place = tuple[nn.Module, str]  # a module, and the name that a tensor has in it


class FirstWeights:
    """Sends the parameters and buffers of the first process to the others, one tensor at a time.

    On other processes the model may be wholly or partly on the device "meta"; its values are replaced. A tensor that
    several modules share stays shared. Non-persistent buffers are sent like the others.

    Args:
        world: the processes; all of them create this object and make the same calls of `fill`.
        model: the same on every process, except for values and devices.
        device: tensors are moved to it.

    Raises:
        ValueError: on all processes, if the first process lacks values or the models differ.
    """

    def __init__(self, world: World, model: nn.Module, device: torch.device) -> None:
        self._world = world
        self._device = device
        self._room = torch.empty(0, dtype=torch.uint8, device=device)  # holds parameters until they are sharded
        self._taken = 0  # bytes used in `_room`
        self._places: dict[int, list[Place]] = {}  # keyed by the id of the tensor, which the model keeps alive
        for module, leaf, tensor in tensors_of(model):
            self._places.setdefault(id(tensor), []).append((module, leaf))
        check_alike(world, model)

    def fill(self, unit: nn.Module) -> None:
        """Gives a module and its submodules the values of the first process; tensors filled before are skipped.

        Parameters that were on "meta" point into a buffer that the next call reuses. The module must be sharded before
        then, which copies them. Costs the memory of the largest module on each process.
        """
        given = [tensor for _, _, tensor in tensors_of(unit)]
        given = [tensor for tensor in {id(tensor): tensor for tensor in given}.values() if id(tensor) in self._places]
        needed = sum(spaced(tensor.nbytes) for tensor in given if tensor.is_meta and is_parameter(tensor))
        if needed > len(self._room):  # reused: a new buffer per module would fragment the host allocator's memory
            self._room = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._room = torch.empty(needed, dtype=torch.uint8, device=self._device)
        self._taken = 0
        for tensor in given:
            self._send(tensor, self._places.pop(id(tensor)))

    @torch.no_grad()
    def _send(self, tensor: Tensor, places: list[Place]) -> None:
        if tensor.is_meta and is_parameter(tensor):
            place = self._room[self._taken : self._taken + tensor.nbytes]
            value = place.view(tensor.dtype).view(tensor.shape)
            self._taken += spaced(tensor.nbytes)
        elif tensor.is_meta:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        else:
            value = tensor.detach().to(self._device).contiguous()
        if value.numel():  # sent as bytes, because backends differ in the dtypes they support
            distributed.broadcast(value.view(-1).view(torch.uint8), src=0)
        if not tensor.is_meta:
            tensor.data = value
            return
        filled = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter(tensor) else value
        filled.__dict__.update(tensor.__dict__)  # attributes that libraries set on a parameter
        for module, leaf in places:
            table: dict[str, Any] = module._parameters if is_parameter(tensor) else module._buffers
            table[leaf] = filled


@torch.no_grad()
def spread(model: nn.Module, device: torch.device) -> None:
    """Broadcasts the first process's values into a model that is whole on every process, as DistributedDataParallel
    does.

    Costs one broadcast per tensor. Tensor subclasses (quantized weights) and tensors without values are skipped.
    """
    plain = (tensor for _, _, tensor in tensors_of(model) if type(tensor) in (nn.Parameter, Tensor))
    for tensor in {id(tensor): tensor for tensor in plain if not tensor.is_meta}.values():
        replace_by_first(tensor, device)


@torch.no_grad()
def spread_saved_buffers(model: nn.Module, device: torch.device, first: int = 0, group: Any = None) -> None:
    """Broadcasts the buffers that checkpoints store, such as the statistics of batch norm, to all replicas.

    Each replica follows its own batches in training, and checkpoints store the buffers of the first one. So this makes
    an evaluation that of the model which is saved.

    Args:
        model: the model, or a stage of it.
        device: the buffers are sent on it.
        first: the global rank of the first replica.
        group: the processes with the same part of the model; None: all.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if type(buffer) is Tensor and not buffer.is_meta and name not in module._non_persistent_buffers_set:
                replace_by_first(buffer, device, first, group)


def replace_by_first(tensor: Tensor, device: torch.device, first: int = 0, group: Any = None) -> None:
    """Replaces the values of a tensor by those that another process has, whose global rank is `first`."""
    value = tensor.detach().to(device).contiguous()
    if value.numel():  # sent as bytes, because backends differ in the dtypes they support
        distributed.broadcast(value.view(-1).view(torch.uint8), src=first, group=group)
    tensor.copy_(value)


def spaced(num_bytes: int) -> int:
    """Returns `num_bytes` rounded up to the alignment of the next tensor."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def is_parameter(tensor: Tensor) -> bool:
    """True if the tensor is a parameter, not a buffer."""
    return isinstance(tensor, nn.Parameter)


def tensors_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yields (module, name in the module, tensor) for each use of each parameter and buffer."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for leaf, tensor in table.items():
                if tensor is not None:
                    yield module, leaf, tensor


def without_values(model: nn.Module) -> str | None:
    """Returns the name of the first parameter or buffer on the device "meta"; None if there is none."""
    for named in (model.named_parameters(), model.named_buffers()):
        for name, tensor in named:
            if tensor.is_meta:
                return name
    return None


def check_alike(world: World, model: nn.Module) -> None:
    """Compares the processes' models before anything is sent: a difference would hang or mix up tensors.

    Raises:
        ValueError: on all processes alike, if the models differ or cannot be sent.
    """
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    odd = next((name for name, tensor in named if type(tensor) not in (nn.Parameter, Tensor)), None)
    first: dict[int, str] = {}
    forms = [
        (name, first.setdefault(id(tensor), name), tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in (named if odd is None else [])
    ]
    digest = hashlib.sha256(repr(forms).encode()).hexdigest()
    reports = gather_objects(world, (odd, without_values(model), digest))
    what = "fsdp_config['cpu_ram_efficient_loading'] or ['sync_module_states']"
    for rank, (strange, _, other) in enumerate(reports):
        if strange is not None:
            raise ValueError(
                f"{what}: {strange!r} on process {rank} is no plain tensor (quantised weights, or a lazy layer before "
                "its first call), and cannot be sent: load the model on every process, and leave these settings out."
            )
        if other != reports[0][2]:
            raise ValueError(
                f"{what}: the model of process {rank} has other names, shapes, types (dtype, requires_grad) or tied "
                "weights than that of process 0: make it alike on all, without values but on the first."
            )
    if reports[0][1] is not None:
        raise ValueError(
            f"{what}: {reports[0][1]!r} has no values on process 0 either (device 'meta'): load the model there, and "
            "on the other processes only make it on the device 'meta'."
        )
