"""Training without logits: computes the loss of a language model's head in chunks, if that equals the model's own loss.

While a loss is computed, the head returns `LazyLogits`. The model's own code shifts, scales and divides them; only its
call of `cross_entropy` is computed in chunks. Support does not depend on the model's class: the value and the gradient
of the first loss are computed both ways for a few rows. A model whose code reads its logits in another way is left
unchanged.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.args.errors import UnsupportedOption
from paceline.core.optional import LateModule
from paceline.pytorch.model.heads import casts_of, find_reader, has_hook, output_embeddings
from paceline.pytorch.model.lazy_logits import Family, LazyLogits
from paceline.pytorch.model.lazy_scopes import is_checkpointed
from paceline.pytorch.model.linear_cross_entropy import (
    CHUNK_BYTES,
    CHUNK_BYTES_ON_DEVICE,
    CrossEntropy,
    Kernel,
)
from paceline.pytorch.model.linear_head import Head
from paceline.pytorch.model.linear_loss_check import CHECKED_ROWS, compare
from paceline.pytorch.model.lora_head import (
    adapt,
    copy_in_use,
    find_adapter_obstacle,
    is_lora,
    is_trained_copy,
    layers_of,
    linear_of,
)
from paceline.pytorch.model.sharded_head import (
    are_at_hand,
    find_sharding_obstacle,
    gathers_before_backward,
    is_linear,
    is_sharded,
    kept_whole,
    run_to_end,
)
from paceline.pytorch.model.vocabulary_shard import (
    Readers,
    SplitOutput,
    find_split_obstacle,
    group_of,
    is_split,
    local_part_of,
    local_rows,
)

logger = logging.getLogger(__name__)

# loaded with the option that names a kernel
kernels: Any = LateModule("paceline.pytorch.model.linear_kernels")

OPTION = "linear_cross_entropy"
KERNEL = "liger"
DEVICES = ("cpu", "cuda", "xpu", "mps")
MIN_CHUNKS = 2  # "auto" applies to more than this number of chunks: fewer would save no memory


class Verdict(Protocol):
    """Holds the result of the check, so that checkpoints contain it: a `LossNormalizer`."""

    by_chunks: bool | None


class LinearLoss:
    """Computes cross-entropies over a linear head in chunks, after checking that they equal the model's own.

    Args:
        option: `auto`, True, the name of the head among the model's modules, or that of a kernel, `liger`.
        verdict: holds the result of the check; None: a new one.

    Attributes:
        asked_by: with `auto`, the option or the code that reads the logits of each step; None: none is known.

    Raises:
        ImportError: the package of the kernel is missing, or too old.
        UnsupportedOption: there is no device for the kernel.
    """

    def __init__(self, option: str | bool, verdict: Verdict | None = None) -> None:
        self.option = option
        self._kernel: Kernel | None = kernels.kernel_of(option) if option == KERNEL else None
        self._is_kernel_checked = False
        self.asked_by: str | None = None
        self.is_entered = False
        self._verdict: Verdict = SimpleNamespace(by_chunks=None) if verdict is None else verdict
        self._is_suspended = self._is_unread = False
        self._shards = False  # FSDP shards the model that is called
        self._readers: Readers | None = None  # of the pass in progress, if its processes read logits together
        self._loss_of: Callable[[Any], Tensor] | None = None  # computes the loss from the outputs of the call
        self._loss: Tensor | None = None  # its result, if it was called in the forward
        self._model: weakref.ref[nn.Module] | None = None
        self._name: str | None = None  # name of the head; None: the model has none
        self._families: list[Family] = []
        self._earlier: list[Family] = []  # of passes with gradients, whose logits may be read after the pass
        self._given: list[weakref.ref[Tensor]] = []  # lazy logits of these passes
        self._said: set[str] = set()
        self._obstacle: str | None = None  # why required chunks are not possible, once an error has said so

    def __reduce__(self) -> Any:
        """Makes copies start without results of the check."""
        return LinearLoss, (self.option,)

    @property
    def is_right(self) -> bool | None:
        """Returns True if the chunked loss equals the model's own, False if it is not used, None before the check."""
        return self._verdict.by_chunks

    @is_right.setter
    def is_right(self, value: bool | None) -> None:
        self._verdict.by_chunks = value

    @property
    def is_required(self) -> bool:
        """Returns True if chunks are required, so that an unsupported model is an error."""
        return self.option != "auto"

    @contextmanager
    def entered(self, model: nn.Module) -> Iterator[None]:
        """Enters `applied` and sets `is_entered`."""
        self.is_entered = True
        try:
            with self.applied(model):
                yield
        finally:
            self.is_entered = False

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Makes the head return lazy logits while entered.

        Raises:
            UnsupportedOption: chunks are required, and the model does not support them.
        """
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        self.bind(inner)
        self._insist()
        if self._earlier:
            self._review()
        if self._name is None or self.is_right is False:
            yield
            return
        path = modules_to(inner, self._name)
        head, self._families = path[-1], []
        self._shards = is_sharded(inner)
        group = None if self.is_required else group_of(linear_of(head))
        self._readers = None if group is None else Readers(group, linear_of(head).weight.device)
        takes_logits = self._takes_logits(model, path, self._name)
        if self._readers is not None:
            takes_logits = bool(self._readers.ask(int(takes_logits)))  # one that needs logits decides for all
        if takes_logits:
            yield
            return
        settles = self._shards or self._readers is not None
        with replaced_forward(head, functools.partial(self._forward, head)), ExitStack() as stack:
            if settles:
                forward = functools.partial(self._run_to_end, inner, head, inner.forward)
                stack.enter_context(replaced_forward(inner, forward))
            yield
        families, self._families, self._readers = self._families, [], None
        self._judge(families)
        if torch.is_grad_enabled() and not self.is_required and not settles:
            self._earlier += families

    def _insist(self) -> None:
        """Drops a result that was found for another option.

        Raises:
            UnsupportedOption: chunks are required and not possible. A pass that tries the loss has ended with this
                error, which ended the pass alone.
        """
        if self._kernel is not None and not self._is_kernel_checked:
            self.is_right = None  # a checkpoint may hold the result of another check
        if self.is_required and self.is_right is False:
            if self._obstacle is not None:
                self._refuse(self._obstacle)
            self.is_right = None

    def _takes_logits(self, model: nn.Module, path: list[nn.Module], name: str) -> bool:
        """Returns True if this process needs the logits of a pass, and logs the reason."""
        if self._is_suspended or self._is_asked():
            return True
        obstacle = find_obstacle(model, path, name)
        if obstacle is None and (self._shards or not self.is_required):
            obstacle = find_reader(path) or (find_reader([model]) if model is not path[0] else None)
        if obstacle is not None:
            self._refuse(obstacle)
        return obstacle is not None

    def call(self, run: Callable[[], Any], loss_of: Callable[[Any], Tensor]) -> tuple[Tensor, Any]:
        """Returns the loss that a function computes from the outputs of a model, and these.

        Args:
            run: calls the model.
            loss_of: computes the loss. It is called before the forward ends where FSDP then takes the weights back.
        """
        self._loss_of, self._loss = loss_of, None
        try:
            outputs = run()
        finally:
            self._loss_of = None
        loss, self._loss = self._loss, None
        return (loss_of(outputs) if loss is None else loss), outputs

    def _run_to_end(self, model: Any, head: Any, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Runs the forward of a model whose processes share its weights, and settles the logits."""
        units = [module for module in (model, head) if is_sharded(module)]
        casts = casts_of(model) if self._loss_of is not None else []

        def run() -> Any:
            outputs = forward(*args, **named)
            if self._loss_of is not None and casts is not None:
                cast = outputs
                for hook in casts:
                    cast = hook(model, (), cast)
                self._loss = gathers_before_backward(units, self._loss_of(cast))
            return outputs

        is_outside = casts is None  # a hook changes the outputs before the loss is computed
        earlier, self._families, self._given = self._families, [], []
        with kept_whole(head) if is_sharded(head) else nullcontext():
            computes_kept = not self.is_required
            outputs = run_to_end(units, run, self._families, self._given, computes_kept, is_outside, self._readers)
        is_late = is_outside or any(not each.num_chunked and each.read_by is None for each in self._families)
        self._families, self._given = earlier + self._families, []
        if is_late and torch.is_grad_enabled():
            self.is_right = False
            self._refuse("the loss is computed after the forward of a model whose processes share its weights")
        return outputs

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Makes the head compute its logits while entered, for callers that read all of them."""
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False

    def for_reader(self) -> AbstractContextManager[None]:
        """Returns the context of a pass whose outputs are given to a caller, who may read the logits."""
        return nullcontext() if self.is_required or self._is_unread else self.suspended()

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Declares that no caller reads the logits of the passes made while entered."""
        self._is_unread = True
        try:
            yield
        finally:
            self._is_unread = False

    def report_to(self, verdict: Verdict) -> None:
        """Sets what holds the result of the check."""
        self._verdict = verdict

    def settle(self) -> None:
        """Computes logits that code still keeps, before the weights change. Called before each optimizer step."""
        if not self._earlier:
            return
        for reference in self._given:
            logits: Any = reference()
            if logits is not None:
                logits.recipe.keep()
        self._review()

    def _review(self) -> None:
        """Judges the reads of logits after the passes that made them."""
        families, self._earlier = self._earlier, []
        self._given = []
        self._judge(families)

    def _is_asked(self) -> bool:
        """Returns True, and says so once, if the logits of each step are read."""
        if self.asked_by is None or self.is_required:
            return False
        self._refuse(f"{self.asked_by} reads the logits")
        return True

    def bind(self, model: nn.Module) -> None:
        """Finds the head of a model, if that is another one than before.

        Raises:
            UnsupportedOption: chunks are required, and the model has no head that permits them.
        """
        if self._model is not None:
            if self._model() is model:
                return
            self.is_right = self._obstacle = None
        self._model, self._name = weakref.ref(model), None
        self._families, self._earlier, self._readers = [], [], None
        try:
            self._name = find_head(model, True if self._kernel is not None else self.option)
        except LookupError as error:
            self._refuse(str(error))

    def _forward(self, module: nn.Module, rows: Any, *rest: Any, **named: Any) -> Any:
        """Runs the head: returns lazy logits if possible, else the logits."""
        head = linear_of(module)
        if (self._shards or is_split(head)) and not are_at_hand(layers_of(module)):
            return type(module).forward(module, rows, *rest, **named)
        inputs = local_rows(rows) if is_split(head) and not rest and not named else rows
        dtype = autocast_of(head.weight)
        is_possible = inputs is not None and is_lazy(head, inputs) and not rest and not named
        is_possible = is_possible and (dtype is not None or rows.dtype == head.weight.dtype)
        if not is_possible or (self.option == "auto" and is_small(head, rows)):
            return type(module).forward(module, rows, *rest, **named)
        if is_split(head):
            weight, bias, shard = local_part_of(head)
            local = Head(weight, bias, dtype, shard=shard)
            return SplitOutput(lambda: self._make(inputs, local), lambda: type(module).forward(module, rows))
        rows, bias, adapters = adapt(module, rows)
        return self._make(rows, Head(head.weight, bias, dtype, (), adapters))

    def _make(self, rows: Any, head: Head) -> Tensor:
        """Returns the lazy logits of a head."""
        readers = None if head.shard is None else self._readers
        family = Family(self._permits, readers, self._kernel)
        self._families.append(family)
        made = LazyLogits.of(rows, head, family)
        if readers is not None:
            readers.add(made)
        if torch.is_grad_enabled() or self._shards or self._readers is not None:
            self._given.append(weakref.ref(made))
        return made

    def _permits(self, rows: Tensor, targets: Tensor, head: Head, loss: CrossEntropy) -> bool:
        """Returns True if a loss may be computed in chunks; the first loss is checked on some of its rows."""
        if self._kernel is not None:
            if self._shards:
                self._refuse("the kernel was not tested with FSDP, which linear_cross_entropy=True supports")
            self._kernel.check(rows, head, loss)
        if self.is_right is None:
            difference = compare(rows, targets, head, loss, self._kernel)
            if difference is None:
                return True  # nothing to compare: every target is ignored
            self._is_kernel_checked = self._kernel is not None
            where = "in chunks" if self._kernel is None else f"by the kernel {self.option!r}"
            self.is_right = difference <= 1
            if not self.is_right:
                self._refuse(
                    f"computed {where}, the loss of {CHECKED_ROWS} rows differs from the model's own by "
                    f"{difference:.3g} times what rounding explains",
                    logging.WARNING,
                )
            else:
                self._say(f"The loss is computed from the inputs of {self._name} {where}; its logits only where read.")
        return self.is_right

    def _judge(self, families: list[Family]) -> None:
        """Disables chunks, or raises if they are required, if the model's code read the logits or called no head."""
        readers = [family.read_by for family in families if family.read_by is not None]
        if not self.is_required:
            readers += [family.stored_by for family in families if family.stored_by is not None]
        if readers and self.is_right is not False:
            self.is_right = False
            self._refuse(f"the loss is not only a cross-entropy of the head's outputs: {readers[0]} reads them")
        elif self.is_required and not families and self.is_right is None and torch.is_grad_enabled():
            self._refuse("the model's loss does not call its head on inputs that chunks can be made of")

    def _refuse(self, reason: str, level: int = logging.INFO) -> None:
        if self.is_required:
            self._obstacle = reason
            without = "" if self._kernel is None else f"{OPTION}=True, which needs no kernel, or "
            raise UnsupportedOption(
                f"{OPTION}={self.option!r} is not possible: {reason}. Set {without}{OPTION}='auto', which then takes "
                "the model's own loss, or False."
            )
        self._say(f"{OPTION}='auto': the model's own loss is used, since {reason}.", level)

    def _say(self, sentence: str, level: int = logging.INFO) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            logger.log(level, sentence)


def modules_to(model: nn.Module, name: str) -> list[nn.Module]:
    """Returns the modules on the path from the model down to the module of this name, or to its trained copy."""
    path = [model]
    for part in name.split("."):
        path.append(getattr(path[-1], part))
    if is_trained_copy(path[-1]):
        path.append(copy_in_use(path[-1]))
    return path


@contextmanager
def replaced_forward(module: nn.Module, forward: Any) -> Iterator[None]:
    """Replaces a module's forward while entered only, so that copies made outside have the original one."""
    attributes = vars(module)
    attributes["forward"] = forward
    try:
        yield
    finally:
        attributes.pop("forward", None)


def find_obstacle(model: nn.Module, path: list[nn.Module], name: str) -> str | None:
    """Returns the reason why a model, as currently wrapped, needs its logits; None if it does not.

    Args:
        model: the model as it is called.
        path: the modules from the innermost model down to the head.
        name: the name of the head.
    """
    head = path[-1]
    if isinstance(model, DistributedDataParallel) and model.static_graph:
        return "ddp_static_graph requires gradients through every output"
    if is_wrapper(model) or (model is not path[0] and type(model) is not DistributedDataParallel):
        return f"the model is wrapped in {type(model).__name__}"
    if is_lora(head):
        obstacle = find_adapter_obstacle(head, name)
        if obstacle is not None:
            return obstacle
    shards, layers = is_sharded(path[0]), layers_of(head)
    obstacle = find_sharding_obstacle(path, layers, name) or next(
        filter(None, (find_layer_obstacle(layer, name, shards) for layer in layers)), None
    )
    if obstacle is not None:
        return obstacle
    if has_hook(head) or "forward" in vars(head):
        return f"a hook on {name} is given its outputs"
    if any(module._compiled_call_impl is not None or is_wrapper(module) for module in path):
        return "the whole model is compiled"
    return None


def find_layer_obstacle(layer: Any, name: str, shards: bool) -> str | None:
    """Returns the reason why the product of a linear layer of the head cannot be computed in chunks; None: it can."""
    if not is_linear(layer) or "forward" in vars(layer):
        return f"the head {name} is no plain nn.Linear ({type(layer).__name__})"
    weight = layer.weight
    if is_split(layer) and not shards:
        return find_split_obstacle(layer, name) or (
            f"a hook on {name} is given its outputs" if has_hook(layer) else None
        )
    if not shards and (type(weight) is not nn.Parameter or type(weight.data) is not Tensor):
        return f"the weight of {name} is sharded or quantized ({type(weight.data).__name__})"
    if weight.shape != (layer.out_features, layer.in_features) or weight.device.type not in DEVICES:
        return f"the weight of {name} is not whole on one device"
    return f"a hook on {name} is given its outputs" if has_hook(layer) else None


def is_wrapper(model: nn.Module) -> bool:
    """Returns True for wrappers that shard, replicate or compile a module; `fully_shard` makes none."""
    return type(model).__module__.split(".")[0] == "deepspeed" or any(
        kind.__name__ in ("FullyShardedDataParallel", "OptimizedModule", "DataParallel") for kind in type(model).__mro__
    )


def find_head(model: nn.Module, option: str | bool) -> str | None:
    """Returns the name of the linear layer that makes the logits; None if the model has none.

    Raises:
        LookupError: there is no module of that name, or the head is no plain linear layer; the message says which.
    """
    named = dict(model.named_modules())
    if isinstance(option, str) and option != "auto":
        head: Any = named.get(option)
        if head is None:
            linear = [name for name, module in named.items() if type(module) is nn.Linear]
            raise LookupError(f"{type(model).__name__} has no module of this name; its linear layers are {linear[-5:]}")
    else:
        head = output_embeddings(model)
    if head is None:
        if option == "auto":
            return None
        raise LookupError(
            f"{type(model).__name__} names no head: give it a method get_output_embeddings, or the option the name of "
            "the head among its modules"
        )
    name = next((name for name, module in named.items() if module is head), "")
    if not name or not (is_linear(head) or is_lora(head) or is_trained_copy(head)):
        raise LookupError(
            f"the head {name or '(of no name)'} is a {type(head).__name__}, and no nn.Linear, plain or with LoRA"
        )
    return name


def is_lazy(head: nn.Linear, rows: object) -> bool:
    """Returns True if the head's inputs are plain tensors, outside of tracing, compiling and checkpoints."""
    return (
        type(rows) is Tensor
        and rows.is_floating_point()
        and rows.dim() >= 2
        and rows.numel() > 0
        and head.out_features > 1
        and not is_checkpointed()
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None  # not inside of torch.func
        and not torch._C._get_tracing_state()
    )


def autocast_of(weight: Tensor) -> torch.dtype | None:
    """Returns the dtype in which autocast computes a product with a weight; None: that of the weight."""
    device = weight.device.type
    casts = torch.is_autocast_enabled(device) and weight.dtype != torch.float64
    return torch.get_autocast_dtype(device) if casts else None


def is_small(head: nn.Linear, rows: Tensor) -> bool:
    """Returns True if all logits together take no more memory than `MIN_CHUNKS` chunks."""
    limit = CHUNK_BYTES if rows.device.type == "cpu" else CHUNK_BYTES_ON_DEVICE
    return 4 * rows.numel() // rows.shape[-1] * head.out_features <= MIN_CHUNKS * limit
