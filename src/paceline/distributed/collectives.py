"""What processes tell each other: small values on the host, one call each. With one process nothing is sent."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.utils._pytree import tree_flatten, tree_map

from paceline.distributed.world import World, host_device

Made = TypeVar("Made")


def sum_ints(world: World, values: Sequence[int]) -> list[int]:
    """The sums over all processes."""
    if not world.is_shared:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.int64, device=host_device(world))
    distributed.all_reduce(tensor)
    sums: list[int] = tensor.tolist()
    return sums


def sum_floats(world: World, values: Sequence[float]) -> list[float]:
    """The sums over all processes, in double precision."""
    if not world.is_shared:
        return list(values)
    device = host_device(world)
    dtype = torch.float64 if device.type != "mps" else torch.float32
    tensor = torch.tensor(values, dtype=dtype, device=device)
    distributed.all_reduce(tensor)
    sums: list[float] = tensor.tolist()
    return sums


def any_on_device(world: World, flag: Tensor) -> Tensor:
    """Whether a 0-dim flag holds on any process, on the device; the host does not wait."""
    if not world.is_shared:
        return flag
    number = flag.to(torch.float32)
    distributed.all_reduce(number, op=distributed.ReduceOp.MAX)
    return number > 0


def gather_objects(world: World, value: Any) -> list[Any]:
    """The object of each process, by rank. Pickled: for what our own processes say to each other."""
    if not world.is_shared:
        return [value]
    gathered: list[Any] = [None] * world.world_size
    distributed.all_gather_object(gathered, value)
    return gathered


def share_object(world: World, value: Any, source: int = 0) -> Any:
    """The object of one process, for all."""
    if not world.is_shared:
        return value
    holder = [value]
    distributed.broadcast_object_list(holder, src=source)
    return holder[0]


def pack(value: Any) -> bytes:
    """An object as what `deal_out` sends.

    Raises: whatever keeps it from being pickled.
    """
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def deal_out(world: World, packed: list[bytes] | None) -> Any:
    """For each process an object of its own, from the first one, which gets None.

    Args:
        world: the processes.
        packed: one for each, by rank; None on the others.
    """
    received: list[Any] = [None]
    distributed.scatter_object_list(received, packed, src=0)
    return None if world.is_first else pickle.loads(received[0])


def on_first(world: World, action: Callable[[], Made]) -> Made:
    """What `action` returned on the first process, for all, which wait for it.

    Raises: on all processes, what it raised there: on the first as it was, on the others as `portable` has it.
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
    """An error that can be sent: a disk's as it is, all else as text."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error), error.filename)
    return RuntimeError(f"{type(error).__name__}: {error}")


def gather_tensor(world: World, tensor: Tensor) -> list[Tensor]:
    """The tensor of each process, by rank; their sizes may differ, their number of dimensions and type may not."""
    if not world.is_shared:
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


def gather_nest(world: World, nest: Any, speaks: Callable[[int], bool] | None = None) -> Any:
    """A nest of tensors with those of all processes joined along the first dimension; numbers (0-dim) become rows.

    Args:
        world: the processes.
        nest: of this one.
        speaks: `(rank) -> whether its tensors are taken`; None: all are.
    """
    if not world.is_shared:
        return nest

    def joined(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        rows = gather_tensor(world, value[None] if value.dim() == 0 else value)
        rows = [row for rank, row in enumerate(rows) if speaks is None or speaks(rank)]
        widest = [max(sizes) for sizes in zip(*(row.shape[1:] for row in rows), strict=True)]
        if any(list(row.shape[1:]) != widest for row in rows):
            raise ValueError(
                f"The tensors of the processes have the shapes {[tuple(row.shape) for row in rows]}, which differ "
                "beyond the first dimension: call pad_across_processes first."
            )
        return torch.cat(rows)

    return tree_map(joined, nest)


def holds_tensor(nest: Any) -> bool:
    """Whether there is a tensor anywhere in a nest."""
    return any(isinstance(leaf, Tensor) for leaf in tree_flatten(nest)[0])


def sum_tensor(tensor: Tensor) -> Tensor:
    """The sum over all processes; the tensor itself is left as it is."""
    total = tensor.clone()
    distributed.all_reduce(total)
    return total
