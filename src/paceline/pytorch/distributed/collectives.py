"""Collectives of small host values, each a single call. With one process nothing is sent."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.utils._pytree import tree_flatten, tree_map

from paceline.pytorch.distributed.world import World, host_device

Made = TypeVar("Made")


def sum_ints(world: World, values: Sequence[int]) -> list[int]:
    """Returns the sums over all processes."""
    if not world.is_distributed:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.int64, device=host_device(world))
    distributed.all_reduce(tensor)
    sums: list[int] = tensor.tolist()
    return sums


def sum_floats(world: World, values: Sequence[float]) -> list[float]:
    """Returns the sums over all processes, in double precision."""
    if not world.is_distributed:
        return list(values)
    device = host_device(world)
    dtype = torch.float64 if device.type != "mps" else torch.float32
    tensor = torch.tensor(values, dtype=dtype, device=device)
    distributed.all_reduce(tensor)
    sums: list[float] = tensor.tolist()
    return sums


def any_on_device(world: World, flag: Tensor) -> Tensor:
    """Returns a 0-dim flag on the device that is true if `flag` is set on any process; the host does not wait."""
    if not world.is_distributed:
        return flag
    number = flag.to(torch.float32)
    distributed.all_reduce(number, op=distributed.ReduceOp.MAX)
    return number > 0


def gather_objects(world: World, value: object) -> list[Any]:
    """Gathers an object from each process, ordered by rank. Objects are pickled, so all processes must be trusted."""
    if not world.is_distributed:
        return [value]
    gathered: list[Any] = [None] * world.world_size
    distributed.all_gather_object(gathered, value)
    return gathered


def share_object(world: World, value: object, source: int = 0) -> Any:
    """Broadcasts the object of one process to all."""
    if not world.is_distributed:
        return value
    holder = [value]
    distributed.broadcast_object_list(holder, src=source)
    return holder[0]


def pack(value: object) -> bytes:
    """Pickles an object for `dispatch_objects`.

    Raises: the pickling error.
    """
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def dispatch_objects(world: World, packed: list[bytes] | None) -> Any:
    """Scatters pickled objects from the first process; returns this process's object, None on the first.

    Args:
        world: the processes.
        packed: on the first process, one per rank; None on the others.
    """
    received: list[Any] = [None]
    distributed.scatter_object_list(received, packed, src=0)
    return None if world.is_first else pickle.loads(received[0])


def on_first(world: World, action: Callable[[], Made]) -> Made:
    """Runs `action` on the first process and returns its result on all processes, which wait for it.

    Raises: the error of `action` on all processes: unchanged on the first, as `portable` returns it on the others.
    """
    made, error = None, None
    if world.is_first:
        try:
            made = action()
        except Exception as raised:
            error = raised
    made, told = share_object(world, (made, None if error is None else portable(error)))
    if error is not None:
        raise error
    if told is not None:
        raise told
    return made  # type: ignore[no-any-return]


def portable(error: Exception) -> Exception:
    """Returns an error that can be pickled: an OSError unchanged, any other as text."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error), error.filename)
    return RuntimeError(f"{type(error).__name__}: {error}")


def gather_tensor(world: World, tensor: Tensor) -> list[Tensor]:
    """Gathers the tensor of each process, by rank. Sizes may differ; the number of dimensions and the dtype may not."""
    if not world.is_distributed:
        return [tensor]
    tensor = tensor.contiguous()
    shapes: list[tuple[int, ...]] = gather_objects(world, tuple(tensor.shape))
    if len(set(shapes)) == 1:
        whole = [torch.empty_like(tensor) for _ in shapes]
        distributed.all_gather(whole, tensor)
        return whole
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    flat = tensor.new_zeros(max(sizes))
    flat[: tensor.numel()] = tensor.flatten()
    rows = [torch.empty_like(flat) for _ in shapes]
    distributed.all_gather(rows, flat)
    return [row[:size].reshape(shape) for row, size, shape in zip(rows, sizes, shapes, strict=True)]


def gather_nest(world: World, nest: object, is_data_leader: Callable[[int], bool] | None = None) -> Any:
    """Gathers a nest of tensors from all processes, joined along the first dimension; 0-dim tensors become rows.

    Args:
        world: the processes.
        nest: the tensors of this process.
        is_data_leader: `(rank) -> bool`, True if that rank's tensors are included; None includes all.

    Raises:
        ValueError: shapes differ beyond the first dimension.
    """
    if not world.is_distributed:
        return nest

    def joined(value: object) -> Any:
        if not isinstance(value, Tensor):
            return value
        rows = gather_tensor(world, value[None] if value.dim() == 0 else value)
        rows = [row for rank, row in enumerate(rows) if is_data_leader is None or is_data_leader(rank)]
        widest = [max(sizes) for sizes in zip(*(row.shape[1:] for row in rows), strict=True)]
        if any(list(row.shape[1:]) != widest for row in rows):
            raise ValueError(
                f"The tensors of the processes have the shapes {[tuple(row.shape) for row in rows]}, which differ "
                "beyond the first dimension: call pad_across_processes first."
            )
        return torch.cat(rows)

    return tree_map(joined, nest)


def holds_tensor(nest: object) -> bool:
    """True if a nest contains a tensor."""
    return any(isinstance(leaf, Tensor) for leaf in tree_flatten(nest)[0])


def sum_tensor(tensor: Tensor) -> Tensor:
    """Returns the sum over all processes; the tensor itself is unchanged."""
    total = tensor.clone()
    distributed.all_reduce(total)
    return total
