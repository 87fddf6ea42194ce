"""A sample of a batch's tokens, run through a model whole and sharded, and the comparison of the outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_leaves

IGNORED = -100
NUM_ROWS, NUM_TOKENS = 2, 8  # tokens of the sample, per shard
TOLERANCE = 2e-3  # of one token's values, relative to other tokens': far above rounding, far below an error
TOLERANCE_16_BIT = 0.1  # rounded at other places, such values differ by 1e-2 after some layers
TOLERANCE_TF32 = 0.02


@dataclass
class Sample:
    """Two rows from the start of a batch, in the model's input form.

    Attributes:
        inputs: for the model. With an attention_mask the second row is padded on the left.
        main: token ids or embeddings: (2, tokens) or (2, tokens, features).
        present: (2, tokens), True for tokens that are not padding.
    """

    inputs: dict[str, Any]
    main: Tensor
    present: Tensor

    @classmethod
    def of(cls, inputs: Mapping[str, Any], main: Tensor, size: int) -> Sample:
        """Returns the sample of a batch, for `size` shards; as long as these need, at most as long as the batch.

        A single row is repeated. All tokens but some of the second row have a target, so that shards have different
        numbers of them.
        """
        number, length = main.shape[:2]
        taken = min(length, NUM_TOKENS * size - 1)  # sequences of indivisible length are padded, which is tested too
        rows = torch.arange(NUM_ROWS, device=main.device) % number

        def cut(value: object) -> Any:
            if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != number:
                return value
            value = value[rows.to(value.device)]
            return value[:, :taken] if value.dim() > 1 and value.shape[1] == length else value

        chosen = {name: cut(value) for name, value in inputs.items()}
        present = torch.ones(NUM_ROWS, taken, dtype=torch.bool, device=main.device)
        padded, mask = taken // 3, chosen.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            present[1, :padded] = False
            chosen["attention_mask"] = present.to(mask.dtype)
        # a position before the first real token has that one as its target, and is padding itself
        for name, first in (("labels", padded + 1), ("shift_labels", padded)):
            given = inputs.get(name)
            if isinstance(given, Tensor) and given.shape == main.shape[:2]:
                target = chosen[name]
                target = torch.where(target == IGNORED, given.max(), target)
                target[1, :first] = IGNORED
                chosen[name] = target
        return cls(chosen, cut(main), present)


@contextmanager
def formats_within(model: nn.Module) -> Iterator[set[torch.dtype]]:
    """Collects the floating-point dtypes that the modules of a model return while this is entered.

    The model's own outputs may have been widened since.
    """
    seen: set[torch.dtype] = set()

    def note(module: nn.Module, args: Any, outputs: object) -> None:
        seen.update(tensor.dtype for tensor in values_of(outputs))

    hooks = [module.register_forward_hook(note) for module in model.modules() if module is not model]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def difference(expected: object, found: object, present: Tensor, formats: Collection[torch.dtype] = ()) -> str:
    """Returns the difference between the whole and the sharded outputs, on any process: "" for none.

    Compared are losses and all outputs that have an entry for each token; those of padding are left out. `formats` are
    those in which the outputs were computed, beside their own.
    """
    wrong = ""
    left, right = values_of(expected), values_of(found)
    if len(left) != len(right):
        wrong = "outputs"
    for one, other in zip(left, right, strict=False):
        if one.dim() == 0 and not is_close(one[None, None], other.reshape(1, 1), formats):
            wrong = wrong or "losses"
        if one.dim() > 1 and one.shape[:2] == present.shape:
            here = one.shape == other.shape and is_close(one[present], other[present], formats)
            wrong = wrong if here else "outputs"
    flag = torch.tensor(float(bool(wrong)), device=present.device)
    distributed.all_reduce(flag, distributed.ReduceOp.MAX)
    return wrong or ("numbers on another process" if bool(flag) else "")


def values_of(outputs: object) -> list[Tensor]:
    """Returns the floating-point tensors in a model's outputs."""
    nest = dict(outputs) if isinstance(outputs, Mapping) else outputs
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def is_close(expected: Tensor, found: Tensor, formats: Collection[torch.dtype]) -> bool:
    """True if (entries, ...) are equal, entry by entry, within rounding. Entries that are not numbers are ignored."""
    left, right = expected.flatten(1).float(), found.flatten(1).float()
    known = left.isfinite().all(1)
    if not bool(known.any()):
        return True  # a mean over no targets
    size = left[known].norm(dim=1).mean()
    worst = (left - right)[known].norm(dim=1).nan_to_num(nan=torch.inf).max()
    return bool(worst <= tolerance_of(expected, formats) * size + 1e-9)


def tolerance_of(tensor: Tensor, formats: Collection[torch.dtype]) -> float:
    """Returns the rounding tolerance of one token's values, relative to their size."""
    kind, used = tensor.device.type, {tensor.dtype, *formats}
    if torch.is_autocast_enabled(kind):
        used.add(torch.get_autocast_dtype(kind))
    if min(dtype.itemsize for dtype in used) < 4:
        return TOLERANCE_16_BIT
    is_rounded = kind == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return TOLERANCE_TF32 if is_rounded else TOLERANCE
