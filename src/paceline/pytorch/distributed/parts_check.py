"""A sample of a batch's tokens that runs through a model whole and sharded, and the comparison of the outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_leaves

from paceline.pytorch.model.operations import uses_tf32

IGNORED = -100
NUM_ROWS, NUM_TOKENS = 2, 8  # tokens of the sample, per shard
TOLERANCE = 2e-3  # error of one token's values, relative to the mean norm: far above rounding, far below a real error
TOLERANCE_16_BIT = 0.1  # 16-bit values that are rounded at different places differ by 1e-2 after some layers
TOLERANCE_TF32 = 0.02


@dataclass
class Sample:
    """The start of two rows of a batch, as inputs of the model.

    Attributes:
        inputs: the model's inputs. With an attention_mask the second row is padded on the left.
        main: token ids or embeddings: (2, tokens) or (2, tokens, features).
        present: (2, tokens), True for tokens that are not padding.
    """

    inputs: dict[str, Any]
    main: Tensor
    present: Tensor

    @classmethod
    def of(cls, inputs: Mapping[str, Any], main: Tensor, size: int) -> Sample:
        """Returns the sample of a batch for `size` shards: `NUM_TOKENS * size - 1` tokens, or fewer if the batch is
        shorter.

        A single row is repeated. All tokens except some of the second row have a target, so that shards have different
        numbers of targets.
        """
        number, length = main.shape[:2]
        taken = min(length, NUM_TOKENS * size - 1)  # not divisible by `size`, to test padding too
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
        # the last padded position would predict the first real token, so that target is ignored too
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
    """Collects the floating-point dtypes that the modules of a model return inside the context.

    The model's own outputs are not enough: they may have been widened.
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
    """Returns the kind of outputs that differ between the whole and the sharded run on any process; "" for none.

    It compares losses and all outputs that have an entry for each token, except entries of padding. `formats` are the
    dtypes in which the outputs were computed, in addition to their own. Collective.
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
    """True if (entries, ...) are equal within rounding, entry by entry; non-finite expected entries are ignored."""
    left, right = expected.flatten(1).float(), found.flatten(1).float()
    known = left.isfinite().all(1)
    if not bool(known.any()):
        return True  # a mean over no targets
    size = left[known].norm(dim=1).mean()
    worst = (left - right)[known].norm(dim=1).nan_to_num(nan=torch.inf).max()
    return bool(worst <= tolerance_of(expected, formats) * size + 1e-9)


def tolerance_of(tensor: Tensor, formats: Collection[torch.dtype]) -> float:
    """Returns the tolerance for one token's values, relative to their mean norm."""
    kind, used = tensor.device.type, {tensor.dtype, *formats}
    if torch.is_autocast_enabled(kind):
        used.add(torch.get_autocast_dtype(kind))
    if min(dtype.itemsize for dtype in used) < 4:
        return TOLERANCE_16_BIT
    is_rounded = kind == "cuda" and uses_tf32()
    return TOLERANCE_TF32 if is_rounded else TOLERANCE
