"""Logits that are computed only when they are read.

`LazyLogits` represents the output of a linear layer. It has a shape and a dtype. Views by rows, casts and a few
elementwise operations return other `LazyLogits`, and `cross_entropy` computes the loss in chunks from the layer's
inputs. Every other operation computes the logits as the layer would. From then on, all tensors derived from the same
output use the computed logits, so that views alias and in-place writes are visible as usual.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from paceline.pytorch.model.lazy_scopes import as_outside_of_dispatch, is_checkpointed, without_saved_tensor_hooks
from paceline.pytorch.model.linear_cross_entropy import CrossEntropy, Kernel, linear_cross_entropy
from paceline.pytorch.model.linear_head import Cast, Head, Scale, Shift, Squash, Step
from paceline.pytorch.model.token_sums import TokenSums
from paceline.pytorch.model.vocabulary_shard import Readers


class Family:
    """All tensors derived from one output of a linear layer.

    Args:
        permits: `(rows, targets, head, loss) -> bool`, called with each loss that could be computed in chunks.
        readers: if processes share the classes, lets all of them compute what one reads; None: all have to read.
        kernel: computes the losses in the place of chunks; None: none.

    Attributes:
        num_chunked: losses of this output that were computed in chunks.
        z_weight: weight of the z-loss that is added to them.
        sums: the targets of these losses are added to them; None: to none.
        read_by: the operation that first needed the logits themselves; None if there was none.
        stored_by: the operation that first computed logits to be stored, which the loss does not need; None if there
            was none.
        is_gone: logits that are not computed yet can no longer be computed, since the weights or the other processes
            are unavailable.
    """

    def __init__(
        self,
        permits: Callable[[Tensor, Tensor, Head, CrossEntropy], bool],
        readers: Readers | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        self.permits, self.readers, self.kernel = permits, readers, kernel
        self.num_chunked = 0
        self.z_weight = 0.0
        self.sums: TokenSums | None = None
        self.read_by: str | None = None
        self.stored_by: str | None = None
        self.is_gone = False
        self._derived: list[weakref.ref[LazyLogits]] = []

    def add(self, made: LazyLogits) -> None:
        """Adds logits that are derived from others of the family."""
        self._derived.append(weakref.ref(made))

    def read(self, recipe: Recipe, name: str) -> Tensor:
        """Returns the logits of a recipe for the operation of this name, which may write to them.

        Copies that were made before are computed too, since they do not have what is written.

        Raises:
            RuntimeError: the operation needs the gradient of logits that the loss did without.
        """
        if self.num_chunked and name in ("register_hook", "retain_grad"):
            raise RuntimeError(
                f"{name} is called on logits after their loss, which was computed without them, so that they have no "
                "gradient. Call it before the loss, or set linear_cross_entropy=False."
            )
        is_first, self.read_by = self.read_by is None, self.read_by or name
        found = recipe.compute()
        for reference in self._derived if is_first else ():
            made = reference()
            if made is not None:
                made.recipe.compute()
        return found

    def note_stored(self, name: str) -> None:
        """Notes that the operation of this name computed logits to be stored."""
        self.stored_by = self.stored_by or name


class Computed:
    """The computed logits of one tensor; shared by its recipe and its node of the graph."""

    def __init__(self) -> None:
        self.logits: Tensor | None = None
        self._version = 0

    def set(self, logits: Tensor) -> None:
        """Sets the logits, which no code has seen yet."""
        self.logits, self._version = logits, logits._version

    @property
    def is_changed(self) -> bool:
        """Returns True if code has written to the logits, or set a hook on their gradient."""
        return self.logits is not None and (self.logits._version != self._version or bool(self.logits._backward_hooks))


@dataclass(eq=False)
class Recipe:
    """The computation of a tensor of logits.

    Attributes:
        rows: the inputs of the linear layer, `(..., num_features)`.
        head: the linear layer, and the elementwise operations so far.
        family: the family of the layer's output.
        parent: the lazy logits from which the tensor was derived; None for the layer's output itself.
        derive: computes the tensor from the parent's logits.
        versions: versions of the rows and the weights when the layer was called.
        with_gradients: gradients were enabled when the operation was called.
        computed: holds the result.
        node: the node of the graph; None: it has no gradient.
    """

    rows: Tensor
    head: Head
    family: Family
    parent: LazyLogits | None
    derive: Callable[[Tensor], Tensor] | None
    versions: tuple[int, ...]
    with_gradients: bool
    computed: Computed = field(default_factory=Computed)
    node: Any = None

    @property
    def logits(self) -> Tensor | None:
        """Returns the result, once it is computed."""
        return self.computed.logits

    def compute(self) -> Tensor:
        """Returns the logits as a node of the graph, computed once.

        Raises:
            RuntimeError: the weights have changed since the layer was called.
        """
        if self.logits is None and self.parent is None and self.family.readers is not None:
            self.check_versions()
            self.family.readers.meet(self.family, reads=True)
        if self.logits is None:
            with torch.set_grad_enabled(self.with_gradients):
                if self.parent is not None and self.derive is not None:
                    self.computed.set(self.derive(self.parent.recipe.compute()))
                else:
                    self.computed.set(self.fresh())
        return self.logits  # type: ignore[return-value]

    def fresh(self) -> Tensor:
        """Returns the logits, recomputed from the inputs of the linear layer."""
        self.check_versions()
        return self.head.logits(self.rows)

    def gather(self) -> None:
        """Computes the output of a head whose classes are split over processes. A collective."""
        with torch.set_grad_enabled(self.with_gradients):
            self.computed.set(self.head.logits(self.rows))

    def keep(self) -> None:
        """Computes the logits without gradients, for code that reads them after the weights have changed."""
        if self.logits is None:
            with torch.no_grad():
                self.computed.set(self.fresh())
        self.family.read_by = self.family.read_by or "code that keeps them"

    def check_versions(self) -> None:
        """Checks that logits computed now equal those of the forward pass.

        Raises:
            RuntimeError: the weights have changed since the layer was called, or the forward of a model that is shared
                by processes has ended.
        """
        if self.family.is_gone:
            raise RuntimeError(
                "The logits of a model that processes share are read after its forward, when FSDP has taken back the "
                "weights that make them, or the processes of tensor parallelism are not together, and were not "
                "computed before, since the loss did without them. Set linear_cross_entropy=False."
            )
        if versions_of(self.rows, self.head) != self.versions:
            raise RuntimeError(
                "The logits of an earlier forward pass are read after the weights have changed, and were not computed "
                "before, since the loss did without them. Read them before the optimizer step, or set "
                "linear_cross_entropy=False."
            )
        if self.parent is not None:  # the parent may be from an earlier pass
            self.parent.recipe.check_versions()


def versions_of(rows: Tensor, head: Head) -> tuple[int, ...]:
    """Returns the version counters of the inputs and the parameters of a linear layer."""
    tensors = [each for each in (rows, *head.tensors) if each is not None]
    return tuple(0 if each.is_inference() else each._version for each in tensors)


class LazyLogits(Tensor):
    """A tensor of logits without storage.

    Attributes:
        recipe: the computation of the logits.
    """

    recipe: Recipe

    @staticmethod
    def of(rows: Tensor, head: Head, family: Family) -> Tensor:
        """Returns the output of a linear layer for `rows`, `(..., num_features)`."""
        return attach(rows, head, family, head.autocast or head.weight.dtype, None, None)

    def derived(
        self,
        rows: Tensor,
        derive: Callable[[Tensor], Tensor],
        step: Step | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Returns the lazy result of an operation on these logits."""
        head = self.recipe.head
        if step is not None:
            head = replace(head, steps=(*head.steps, step))
        found: Any = attach(rows, head, self.recipe.family, dtype or self.dtype, self, derive)
        self.recipe.family.add(found)
        return found  # type: ignore[no-any-return]

    @property
    def is_elsewhere(self) -> bool:
        """Returns True if an autograd function made another node of these logits without Python's dispatch."""
        return self.grad_fn is not self.recipe.node

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA or any(isinstance(each, LazyLogits) and each.is_elsewhere for each in args):
                return func(*args, **kwargs)
            first = args[0] if args else kwargs.get("input")
            handler = None if is_checkpointed() else HANDLERS.get(func)
            if handler is not None and isinstance(first, LazyLogits) and first.recipe.family.read_by is None:
                found = handler(first, func, args, kwargs)
                if found is not NotImplemented:
                    return found
            return func(
                *[read(each, func) for each in args], **{name: read(each, func) for name, each in kwargs.items()}
            )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operation that bypassed `__torch_function__`, for instance one called by an autograd hook.

        It computes on detached logits: the gradient flows through the node of the layer's output.
        """
        with as_outside_of_dispatch():  # the logits are kept for readers that need their gradients
            tree_map(lambda each: read(each, func), (args, dict(kwargs or {})))
        values = tree_map(lambda each: read(each, func).detach() if isinstance(each, LazyLogits) else each, args)
        return func(*values, **tree_map(lambda each: read(each, func), dict(kwargs or {})))


def read(value: Any, func: object) -> Any:
    """Returns a value in which lazy logits are replaced by computed ones."""
    if isinstance(value, LazyLogits):
        with without_saved_tensor_hooks():  # a checkpoint compares what is saved with that of the second pass
            return value.recipe.family.read(value.recipe, getattr(func, "__name__", str(func)))
    if isinstance(value, list | tuple) and any(isinstance(each, LazyLogits) for each in value):
        return type(value)([read(each, func) for each in value])
    return value


def attach(
    rows: Tensor,
    head: Head,
    family: Family,
    dtype: torch.dtype,
    parent: LazyLogits | None,
    derive: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Returns lazy logits as a node of the graph; if gradients are disabled, they are detached from it."""
    if not torch.is_grad_enabled():
        rows, head = rows.detach(), head.detached()
    recipe = Recipe(rows, head, family, parent, derive, versions_of(rows, head), torch.is_grad_enabled())
    shape = (*rows.shape[:-1], head.num_classes)
    made: Any = _Attach.apply(rows, shape, dtype, recipe, *head.tensors)  # type: ignore[no-untyped-call]
    recipe.node = made.grad_fn
    found: Tensor = made
    return found


class _Attach(torch.autograd.Function):
    """The node of lazy logits in the graph; it computes gradients if an operation read the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        recipe: Recipe,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, *tensors)
        empty = [None if each is None else torch.empty(0) for each in tensors]
        ctx.head = recipe.head.with_tensors(empty)  # does not hold the parameters
        ctx.computed = recipe.computed
        made: Any = Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=dtype, device=rows.device)  # type: ignore[attr-defined]
        made.recipe = recipe
        return made  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, slope: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        if slope is None:
            return (None,) * (3 + len(saved))
        if ctx.computed.is_changed:  # a change that this node of the graph does not have
            raise RuntimeError(
                "The logits were written to, or a hook was set on their gradient, and then they were given to a "
                "torch.autograd.Function. Set linear_cross_entropy=False."
            )
        needs = ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():  # create_graph=True
            rows, *tensors = saved
            found = ctx.head.with_tensors(tensors).gradients(rows, lambda x, head: head.logits(x), slope, needs)
            return found[0], None, None, None, *found[1:]
        with torch.enable_grad():
            rows, *tensors = [None if each is None else each.detach().requires_grad_() for each in saved]
            logits = ctx.head.with_tensors(tensors).logits(rows)
        leaves = [each for each, need in zip((rows, *tensors), needs, strict=True) if each is not None and need]
        gradients = iter(torch.autograd.grad(logits, leaves, slope.to(logits.dtype)))
        found = [
            next(gradients) if each is not None and need else None
            for each, need in zip((rows, *tensors), needs, strict=True)
        ]
        return found[0], None, None, None, *found[1:]


# ---- operations that do not need the logits

Handler = Callable[[LazyLogits, Any, Sequence[Any], Mapping[str, Any]], Any]


def reshape(logits: LazyLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns lazy logits for a view that keeps the classes as the last dimension."""
    like = torch.empty(logits.shape, dtype=logits.dtype, device="meta")
    shape = func(like, *args[1:], **kwargs)
    if shape.dtype != logits.dtype or not shape.dim() or shape.shape[-1] != logits.shape[-1]:
        return NotImplemented
    rows = logits.recipe.rows.reshape(*shape.shape[:-1], logits.recipe.rows.shape[-1])
    return logits.derived(rows, lambda parent: func(parent, *args[1:], **kwargs))


def select(logits: LazyLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns lazy logits for an index of rows that selects all classes."""
    index = args[1]
    entries = index if isinstance(index, tuple) else (index,)
    used = sum(dimensions_of(each) for each in entries)
    if any(isinstance(each, list) for each in entries) or any(isinstance(each, LazyLogits) for each in entries):
        return NotImplemented
    if any(each is Ellipsis for each in entries) or used == logits.dim():
        *_, last = entries
        is_full = isinstance(last, slice) and last == slice(None)
        if last is not Ellipsis and not is_full:
            return NotImplemented
        if last is Ellipsis and used >= logits.dim():
            return NotImplemented
    elif used > logits.dim():
        return NotImplemented
    rows = logits.recipe.rows[index]
    return logits.derived(rows, lambda parent: parent[index])


def dimensions_of(entry: object) -> int:
    """Returns the number of dimensions that an entry of an index consumes."""
    if entry is None or entry is Ellipsis:
        return 0
    if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8):
        return entry.dim()
    return 1


def keep(logits: LazyLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns lazy logits with the same values."""
    if func is Tensor.contiguous and logits.requires_grad and not torch.is_grad_enabled():
        return NotImplemented  # the strides decide if torch returns a copy without gradients or the same tensor
    return logits.derived(logits.recipe.rows, lambda parent: func(parent, *args[1:], **kwargs))


CASTS = {
    Tensor.float: torch.float32,
    Tensor.double: torch.float64,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}


def cast(logits: LazyLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns lazy logits of another dtype."""
    dtype = CASTS.get(func)
    if dtype is None:
        values = [*args[1:], *kwargs.values()]
        others = [each for each in values if isinstance(each, Tensor)]
        dtypes = [each for each in values if isinstance(each, torch.dtype)] + [each.dtype for each in others]
        devices = [torch.device(each) for each in values if isinstance(each, str | torch.device)]
        devices += [each.device for each in others]
        if any(each != logits.device and each.index is not None for each in devices):
            return NotImplemented
        if any(each.type != logits.device.type for each in devices):
            return NotImplemented
        dtype = dtypes[0] if dtypes else logits.dtype
    if not dtype.is_floating_point:
        return NotImplemented
    if dtype == logits.dtype:
        return NotImplemented if True in args[1:] or kwargs.get("copy") else logits  # the same tensor, as in torch
    step = Cast(dtype)
    return logits.derived(logits.recipe.rows, lambda parent: func(parent, *args[1:], **kwargs), step, dtype)


def scale(logits: LazyLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns lazy logits multiplied or divided by a number."""
    factor = number_of(args[1]) if len(args) == 2 and not kwargs else None
    if factor is None:
        return NotImplemented
    is_quotient = func in QUOTIENTS
    if is_quotient and factor == 0:
        return NotImplemented
    step = Scale(1 / factor if is_quotient else factor)
    return logits.derived(logits.recipe.rows, lambda parent: func(parent, *args[1:]), step, logits.dtype)


def number_of(value: object) -> float | None:
    """Returns a finite Python number as a float; None for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def shift(logits: LazyLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns lazy logits plus a constant with one number per class."""
    offset = args[1] if len(args) == 2 and not kwargs else None
    if not isinstance(offset, Tensor) or isinstance(offset, LazyLogits) or offset.requires_grad:
        return NotImplemented
    if offset.numel() != logits.shape[-1] or offset.shape[-1:] != logits.shape[-1:] or offset.dim() > logits.dim():
        return NotImplemented
    if not offset.is_floating_point() or offset.device != logits.device:
        return NotImplemented
    step = Shift(offset.detach().reshape(-1).clone())
    dtype = torch.promote_types(logits.dtype, offset.dtype)
    return logits.derived(logits.recipe.rows, lambda parent: func(parent, offset), step, dtype)


def squash(logits: LazyLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the hyperbolic tangent of lazy logits."""
    if len(args) != 1 or kwargs:
        return NotImplemented
    return logits.derived(logits.recipe.rows, lambda parent: func(parent), Squash(), logits.dtype)


def detach(logits: LazyLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns computed, detached logits for a caller that stores them; the loss still does not need them."""
    if logits.recipe.family.readers is not None:
        return NotImplemented
    logits.recipe.family.note_stored("detach")
    with torch.no_grad():
        return logits.recipe.fresh()


def hook(logits: LazyLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Leaves out the hook by which FSDP gathers weights for a backward pass: it is set on what the forward returns."""
    if len(args) == 2 and str(getattr(args[1], "__module__", "")).startswith("torch.distributed.fsdp"):
        return None
    return NotImplemented


def find_best(logits: LazyLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the class of the largest logit in each row, computed in chunks."""
    named = dict(kwargs)
    dim = args[1] if len(args) > 1 else named.pop("dim", None)
    if dim not in (-1, logits.dim() - 1) or len(args) > 2 or named or logits.recipe.family.readers is not None:
        return NotImplemented
    recipe = logits.recipe
    recipe.check_versions()
    with torch.no_grad():
        flat = recipe.rows.reshape(-1, recipe.rows.shape[-1])
        size = max(1, 2**23 // logits.shape[-1])
        starts = range(0, len(flat), size)
        found = [recipe.head.logits(flat[start : start + size]).argmax(-1) for start in starts]
    return torch.cat(found).reshape(logits.shape[:-1]) if found else NotImplemented


def cross_entropy(logits: LazyLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the loss computed in chunks, if it is a cross-entropy over classes and the family permits it."""
    return _cross_entropy(logits, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})


def _cross_entropy(
    logits: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    recipe = logits.recipe
    is_plain = logits.dim() == 2 and target.shape == logits.shape[:1] and target.dtype == torch.int64
    is_own_device = target.device == logits.device and type(target) is Tensor
    if not is_plain or not is_own_device or size_average is not None or reduce is not None or not len(target):
        return NotImplemented
    if weight is not None and weight.requires_grad:
        return NotImplemented
    recipe.check_versions()
    if recipe.family.readers is not None:
        recipe.family.readers.meet(recipe.family)
        if recipe.family.read_by is not None:
            return NotImplemented
    loss = CrossEntropy(ignore_index, reduction, label_smoothing, weight, recipe.family.z_weight)
    if not recipe.family.permits(recipe.rows, target, recipe.head, loss):
        return NotImplemented
    recipe.family.num_chunked += 1
    family = recipe.family
    found = linear_cross_entropy(recipe.rows, target, recipe.head, loss, None, family.sums, family.kernel)
    autocasts = torch.is_autocast_enabled(logits.device.type)  # autocast returns this loss in float32
    return found if autocasts or found.dtype == logits.dtype else found.to(logits.dtype)


QUOTIENTS = {torch.div, torch.true_divide, Tensor.div, Tensor.true_divide, Tensor.__truediv__}
HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys([Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten], reshape),
    Tensor.__getitem__: select,
    **dict.fromkeys([Tensor.contiguous, Tensor.clone, torch.clone], keep),
    **dict.fromkeys([*CASTS, Tensor.to, Tensor.type_as], cast),
    **dict.fromkeys([torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, *QUOTIENTS], scale),
    **dict.fromkeys([torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__], shift),
    **dict.fromkeys([torch.tanh, Tensor.tanh], squash),
    **dict.fromkeys([torch.argmax, Tensor.argmax], find_best),
    Tensor.detach: detach,
    Tensor.register_hook: hook,
    functional.cross_entropy: cross_entropy,
}
# attributes and methods that do not need the logits
METADATA = {
    getattr(getattr(Tensor, name, None), "__get__", None)
    for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_leaf", "is_sparse",
                 "is_quantized", "is_meta", "is_mps", "is_xpu", "is_nested", "grad_fn", "itemsize", "_base")
} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.ndimension, Tensor.__len__, Tensor.is_contiguous, Tensor.get_device, torch.numel,
    torch.is_floating_point, torch.is_complex, Tensor.is_inference, Tensor.is_signed,
}  # fmt: skip
