"""Finds the origin of inf and NaN by the extremes of the values in every module of a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

HEADER = f"{'abs min':8} {'abs max':8} metadata"
MAX_UNREAD = 50_000  # maximum number of extremes kept on the device; a forward with more is read in several parts


@dataclass
class Frame:
    """One call of one module.

    Fields:
        title: name and class of the module.
        entries: for each weight, input and output its name, and its row of extremes or the reason why it has none.
    """

    title: str
    entries: list[tuple[str, int | str]] = field(default_factory=list)


class DebugUnderflowOverflow:
    """Checks the weights, inputs and outputs of every module in each forward, and raises at the first inf or NaN.

    The error shows the last calls up to the faulty one, with the smallest and largest absolute value of each tensor:
    values that grow from call to call are more informative than the overflow itself. The extremes are computed on the
    device and read once per forward of the model, not per module. This is still slow, so turn it off once the fault is
    found. An input of -inf is ignored, because attention masks contain it.

    Args:
        model: the module to watch, with its submodules.
        max_frames_to_save: number of calls that the report shows.
        trace_batch_nums: indices of forwards whose calls are printed; no error is raised for them.
        abort_after_batch_num: index of the forward after which an error is raised.

    Raises (in the model's forward):
        ValueError: an inf or NaN occurred, or `abort_after_batch_num` was reached.
    """

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int = 21,
        trace_batch_nums: Sequence[int] | None = None,
        abort_after_batch_num: int | None = None,
    ) -> None:
        self.model = model
        self.max_frames_to_save = max_frames_to_save
        self.trace_batch_nums = list(trace_batch_nums or ())
        self.abort_after_batch_num = abort_after_batch_num
        self.batch_number = 0
        self._names = {module: name for name, module in model.named_modules()}
        self._frames: list[Frame] = []
        self._rows: list[Tensor] = []  # (abs min, abs max, 1 if it is bad), on the device
        self._before: deque[str] = deque(maxlen=max_frames_to_save)  # earlier calls, as text
        self._depth = 0
        self._handles: list[Any] = []
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, inputs: object) -> None:
        if module is self.model:
            self._depth = 0
        self._depth += 1

    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        """Records a call. If the call raised an error, `output` is None."""
        self._depth -= 1
        frame = Frame(f"{self._names[module]} {type(module).__name__}".strip())
        with torch.no_grad():
            for name, weight in module.named_parameters(recurse=False):
                self._add(frame, name, weight)
            for name, value in named("input", inputs):
                self._add(frame, name, value, is_input=True)
            for name, value in named("output", output):
                self._add(frame, name, value)
        self._frames.append(frame)
        is_over = module is self.model
        if is_over or self._depth <= 0 or len(self._rows) > MAX_UNREAD:
            self._read()
        if is_over:
            self.batch_number += 1
            limit = self.abort_after_batch_num
            if limit is not None and self.batch_number > limit:
                raise ValueError(f"DebugUnderflowOverflow: abort_after_batch_num={limit} is reached.")

    def _add(self, frame: Frame, name: str, value: object, is_input: bool = False) -> None:
        row = extremes(value, is_input) if isinstance(value, Tensor) else None
        if row is not None:
            frame.entries.append((name, len(self._rows)))
            self._rows.append(row)
        else:
            what = "empty" if isinstance(value, Tensor) else "not a tensor"
            frame.entries.append((name, "None" if value is None else what))

    def _read(self) -> None:
        """Reads the extremes of the calls since the last read in one transfer, and raises at the first inf or NaN."""
        frames, rows = self._frames, [row.tolist() for row in stacked(self._rows)]
        self._frames, self._rows = [], []
        texts = [described(frame, rows) for frame in frames]
        if self.batch_number in self.trace_batch_nums:
            print(f"Batch {self.batch_number}:\n{HEADER}\n" + "\n".join(texts))
            return
        bad = next((i for i, frame in enumerate(frames) if any(is_bad(entry, rows) for entry in frame.entries)), None)
        if bad is None:
            self._before.extend(texts)
            return
        found = [entry[0] for entry in frames[bad].entries if is_bad(entry, rows)]
        self._before.extend(texts[: bad + 1])
        shown = list(self._before)
        self._before.clear()
        raise ValueError(
            f"DebugUnderflowOverflow: inf or NaN in {', '.join(found)} of {frames[bad].title}, in batch "
            f"{self.batch_number}. The last {len(shown)} calls up to it:\n{HEADER}\n" + "\n".join(shown)
        )


def named(name: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested tuples, lists and mappings, each with its path."""
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (tuple, list)):
        parts = enumerate(value)
    else:
        yield name, value
        return
    for place, part in parts:
        yield from named(f"{name}[{place}]", part)


def extremes(value: Tensor, is_input: bool) -> Tensor | None:
    """Returns (smallest absolute value, largest, 1 if it has inf or NaN) on its device; None for an empty tensor."""
    local = getattr(value, "to_local", None)  # a sharded tensor is checked by its local shard
    plain = (local() if callable(local) else value).detach()
    if plain.numel() == 0 or plain.is_meta or plain.layout is not torch.strided:
        return None
    if not (plain.is_floating_point() or plain.is_complex()):
        plain = plain.float()
    elif plain.element_size() == 1:  # 8-bit floating-point types have no arithmetic
        plain = plain.to(torch.bfloat16)
    size = plain.abs()
    smallest, largest = torch.aminmax(size)  # both are NaN if the tensor contains NaN
    if is_input and not plain.is_complex():
        is_fine = (torch.isfinite(plain) | (plain == -torch.inf)).all()
    else:
        is_fine = torch.isfinite(largest)
    dtype = torch.float32 if plain.device.type == "mps" else torch.float64  # mps has no float64
    return torch.stack([smallest.to(dtype), largest.to(dtype), (~is_fine).to(dtype)])


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Returns all rows on the host, with one transfer per device."""
    if not rows:
        return torch.empty(0, 3)
    result = torch.empty(len(rows), 3, dtype=torch.float64)
    for device in {row.device for row in rows}:
        places = [index for index, row in enumerate(rows) if row.device == device]
        result[places] = torch.stack([rows[index] for index in places]).cpu().double()
    return result


def is_bad(entry: tuple[str, int | str], rows: Sequence[Sequence[float]]) -> bool:
    """Returns True if the recorded value is not finite."""
    return isinstance(entry[1], int) and rows[entry[1]][2] > 0


def described(frame: Frame, rows: Sequence[Sequence[float]]) -> str:
    """Returns the text that describes a call."""
    lines = [f"{'':18}{frame.title}"]
    for name, place in frame.entries:
        lines.append(f"{place:>17} {name}" if isinstance(place, str) else f"{numbers(rows[place])} {name}")
    return "\n".join(lines)


def numbers(row: Sequence[float]) -> str:
    """Returns the text of the two columns with the extremes."""
    return f"{row[0]:8.2e} {row[1]:8.2e}"
