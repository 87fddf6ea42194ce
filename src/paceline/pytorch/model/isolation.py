"""Isolates the documents of packed rows in a model: the possible methods, and a probe that shows which one works.

Each method is tried on rows of random tokens, without gradients. A method works if a change of one document changes no
output of the others, also in training mode; if each document has the same outputs as when it is run alone; and if the
loss is the mean over the targets of all documents, without each document's first label if the loss shifts labels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption
from paceline.core.optional import require
from paceline.pytorch.model.attention_windows import configs_in, has_windows, narrowed, windows_of
from paceline.pytorch.model.document_attention import document_starts, layout_mask, register
from paceline.pytorch.model.outputs import find_loss
from paceline.pytorch.model.signature import ForwardSignature, innermost, read_signature

Change = Callable[[dict[str, Any]], dict[str, Any]]  # keyword arguments of forward with packed positions -> new ones
LossOf = Callable[[nn.Module, dict[str, Any]], Any]

LENGTHS = (5, 9, 7)  # tokens of the probe's documents; with attention windows, the second one is made longer than them
LARGEST_WINDOW = 512  # tokens; a larger window would make the probe as slow and large as a training step
NARROW_WINDOW = 32  # tokens of a larger window in the probe
BLOCK_MASK = "block_mask"
MASKS = ("attention_mask", "mask", "attn_mask", BLOCK_MASK)
BOUNDS = ("cu_seqlens", "cu_seq_lens")
FLASH_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")
FLASH_LENGTHS = ("max_length_q", "max_length_k")
MAX_DIFFERENCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative to the largest output; other dtypes: 0.05
IGNORED = -100


@dataclass(frozen=True)
class Way:
    """A method to isolate documents.

    Attributes:
        name: description for messages.
        change: changes the keyword arguments of each forward pass over packed rows.
        attention: the attention implementation that a model of transformers uses meanwhile; None: unchanged.
    """

    name: str
    change: Change
    attention: str | None = None


@dataclass(frozen=True)
class Isolation:
    """The method that isolates documents in a model.

    Attributes:
        way: the method that passed the probe.
        first_position: the position of a document's first token.
        shifts: the loss compares the output at i with the label at i + 1.
    """

    way: Way
    first_position: int
    shifts: bool


# ---- the methods


def positions_alone(keywords: dict[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments unchanged: the model derives the documents from the positions."""
    return keywords


def with_layout(keywords: dict[str, Any]) -> dict[str, Any]:
    """Adds a mask of one element, from which the attention reads the layout of the documents."""
    return {**keywords, "attention_mask": layout_mask(keywords["position_ids"])}


def with_mask(keywords: dict[str, Any], *, name: str, is_causal: bool, is_additive: bool) -> dict[str, Any]:
    """Adds a mask over pairs of tokens, (rows, 1, tokens, tokens)."""
    positions = keywords["position_ids"]
    document = document_starts(positions).cumsum(1)
    seen = (document[:, None, :, None] == document[:, None, None, :]).contiguous()
    if is_causal:
        seen &= torch.ones(seen.shape[-2:], dtype=torch.bool, device=seen.device).tril()
    if is_additive:
        mask = torch.zeros(seen.shape, device=seen.device)
        return {**keywords, name: mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)}
    return {**keywords, name: seen}


def with_bounds(keywords: dict[str, Any], *, name: str) -> dict[str, Any]:
    """Adds the start index of each document and the number of all tokens, int32 of shape (documents + 1,)."""
    starts = document_starts(keywords["position_ids"]).flatten().nonzero()[:, 0]
    end = starts.new_tensor([keywords["position_ids"].numel()])
    return {**keywords, name: torch.cat([starts, end]).to(torch.int32)}


def with_flash_bounds(keywords: dict[str, Any]) -> dict[str, Any]:
    """Adds the bounds of the documents of all rows, as the flash attention of transformers takes them.

    From positions alone it finds the documents of a batch of one row; of several rows, it attends to each as a whole.
    """
    bounds = with_bounds(keywords, name=FLASH_BOUNDS[0])[FLASH_BOUNDS[0]]
    longest = int(torch.diff(bounds).max())
    return {**keywords, **dict.fromkeys(FLASH_BOUNDS, bounds), **dict.fromkeys(FLASH_LENGTHS, longest)}


def with_block_mask(keywords: dict[str, Any], *, is_causal: bool) -> dict[str, Any]:
    """Adds the mask of the documents for torch's `flex_attention`, for all heads."""
    flex_attention = require("torch.nn.attention.flex_attention", "torch")
    positions = keywords["position_ids"]
    document = document_starts(positions).cumsum(1)

    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = document[row, query] == document[row, key]
        return seen & (query >= key) if is_causal else seen

    rows, tokens = positions.shape
    mask = flex_attention.create_block_mask(is_seen, rows, None, tokens, tokens, device=positions.device)
    return {**keywords, BLOCK_MASK: mask}


def ways_of(model: nn.Module, is_compiled: bool, in_parts: bool = False) -> Iterator[Way]:
    """Yields the methods that a model may support, the fastest first.

    Args:
        model: any model, from transformers or not.
        is_compiled: passes are compiled, so other document boundaries must not cause a recompilation.
        in_parts: see `find_isolation`.
    """
    inner = innermost(model)
    config, names = getattr(inner, "config", None), read_signature(model)
    if any(each.is_meta for each in model.parameters()):
        raise not_isolated(model, ["its weights are not here to try it with: leave cpu_ram_efficient_loading out"])
    is_plain = not hasattr(inner, "set_attn_implementation")
    attention = getattr(config, "_attn_implementation", None)
    is_flash = "flash" in str(attention)
    if in_parts:
        yield from ways_in_parts(names, is_plain, is_flash)
        return
    if is_plain:
        yield from plain_ways(names)
        return
    is_windowed = has_windows(config)
    if is_flash:
        yield Way(f"the bounds of documents for {attention}", with_flash_bounds)
    if attention == "sdpa" and not is_compiled and not is_windowed:
        yield Way("attention by document", with_layout, register())
    yield Way(f"the model's own masks for {attention}", positions_alone)
    # models of transformers use a given mask over pairs of tokens unchanged: it would replace their attention windows
    for is_causal in (True, False) if attention in ("sdpa", "eager") and not is_windowed else ():
        mask = partial(with_mask, name=MASKS[0], is_causal=is_causal, is_additive=attention == "eager")
        yield Way(f"a mask over pairs of tokens for {attention}", mask)


def plain_ways(signature: ForwardSignature) -> Iterator[Way]:
    """Yields the methods that the parameters of a module's forward allow."""
    for name in BOUNDS:
        if name in signature.names:
            yield Way(name, partial(with_bounds, name=name))
    for is_causal in (False, True) if BLOCK_MASK in signature.names else ():
        yield Way(f"a mask of flex_attention as {BLOCK_MASK}", partial(with_block_mask, is_causal=is_causal))
    for name, is_causal in itertools.product(MASKS, (False, True)):
        if name in signature.names:
            yield Way(f"a mask over pairs of tokens as {name}", partial(with_mask, name=name, is_causal=is_causal,
                                                                        is_additive=False))  # fmt: skip
    if "position_ids" in signature.names:
        yield Way("position_ids", positions_alone)


def ways_in_parts(signature: ForwardSignature, is_plain: bool, is_flash: bool) -> Iterator[Way]:
    """Yields the methods for sequences in parts, tried on whole sequences.

    Context and sequence parallelism make the masks of a part from positions that restart, and hand them to attention
    functions of transformers, and to a plain module as `attention_mask`.
    """
    if not is_plain:
        yield Way("masks for the parts of a sequence", with_flash_bounds if is_flash else positions_alone)
    elif MASKS[0] in signature.names:
        mask = partial(with_mask, name=MASKS[0], is_causal=True, is_additive=False)
        yield Way("masks for the parts of a sequence", mask)


@contextmanager
def isolated(model: nn.Module, way: Way) -> Iterator[None]:
    """Isolates the documents of packed rows in a model while entered.

    Rows are packed if the batch has `position_ids` and no attention mask.
    """
    undo = install(model, way)
    try:
        yield
    finally:
        undo()


def install(model: nn.Module, way: Way) -> Callable[[], None]:
    """Makes a model isolate documents, and returns a function that undoes this."""
    inner: Any = innermost(model)
    accepted = read_signature(model)
    before = getattr(getattr(inner, "config", None), "_attn_implementation", None)
    if way.attention is not None:
        inner.set_attn_implementation(way.attention)

    def undo_attention() -> None:
        if way.attention is not None:
            inner.set_attn_implementation(before)

    if way.change is positions_alone:
        return undo_attention

    def change(module: nn.Module, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if keywords.get("position_ids") is None or keywords.get(MASKS[0]) is not None:
            return args, keywords
        changed = way.change(keywords)
        if "position_ids" not in accepted.names and not accepted.takes_keywords:
            changed = {name: value for name, value in changed.items() if name != "position_ids"}
        return args, changed

    handle = inner.register_forward_pre_hook(change, with_kwargs=True)

    def undo() -> None:
        handle.remove()
        undo_attention()

    return undo


# ---- the probe


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Disables the key-value cache of a model of transformers while entered, as in training."""
    config = getattr(innermost(model), "config", None)
    both: list[Any] = [config, getattr(config, "text_config", None)]
    configs = [each for each in both if getattr(each, "use_cache", False)]
    for each in configs:
        each.use_cache = False
    try:
        yield
    finally:
        for each in configs:
            each.use_cache = True


class Refused(Exception):
    """Raised if a method does not isolate the documents; the message says why."""


def reason_of(error: Exception) -> str:
    """Returns the reason of an error in a pass of the probe."""
    return str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {str(error)[:200]}"


def find_isolation(
    model: nn.Module,
    loss_of: LossOf,
    *,
    is_compiled: bool,
    is_half: bool = False,
    in_parts: bool = False,
    num_rows: int = 2,
    surroundings: Callable[[], Any] = nullcontext,
) -> Isolation:
    """Returns the first method that isolates documents in a model, tested by a few forward passes.

    The rows of the passes have 21 tokens, or slightly more than the model's largest attention window. A window above
    `LARGEST_WINDOW` is made `NARROW_WINDOW` meanwhile.

    Args:
        model: the model on its device, with all its weights.
        loss_of: `(model, batch) -> loss`, a mean over targets.
        is_compiled: training passes are compiled.
        is_half: passes run in a 16-bit type.
        in_parts: training passes are split over processes by tokens, with masks of their own; these are whole.
        num_rows: 1 if all batches have one row, else 2.
        surroundings: returns a context that undoes side effects of the passes on modules and random generators.

    Raises:
        UnsupportedOption: no method works; the message names what was tried, and the remedy.
    """
    config = getattr(innermost(model), "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise not_isolated(model, ["it has an encoder and a decoder, whose rows would have to match"])
    large = {name: size for name, size in windows_of(config).items() if size > LARGEST_WINDOW}
    lengths = probe_lengths(model)
    pad = getattr(config, "pad_token_id", None)
    firsts = [0, *([pad + 1] if isinstance(pad, int) and pad >= 0 else [])]
    told = []
    with ExitStack() as stack:
        for context in (surroundings(), without_cache(model), torch.no_grad()):
            stack.enter_context(context)
        model.eval()
        probe = Probe(model, loss_of, is_half, lengths, num_rows)
        try:
            stack.enter_context(probe.narrowed(config, large) if large else nullcontext())
        except Exception as error:
            raise not_isolated(model, [reason_of(error)], in_parts) from error
        for way, first in itertools.product(ways_of(model, is_compiled, in_parts), firsts):
            try:
                with isolated(model, way):
                    shifts = probe.check(first)
                used = replace(way, change=positions_alone) if in_parts else way
                return Isolation(used, first, shifts)
            except Exception as error:  # of the model's code, which may demand any other input
                told.append(f"{way.name}: {reason_of(error)}")
    raise not_isolated(model, told or [missing_inputs(in_parts)], in_parts)


def missing_inputs(in_parts: bool) -> str:
    """Returns the reason why a module cannot be informed of documents: the inputs that its forward lacks."""
    if in_parts:
        return "its forward takes no attention_mask, which informs a process with a part of a sequence of them"
    return "its forward takes none of position_ids, cu_seqlens and attention_mask"


def not_isolated(model: nn.Module, reasons: list[str], in_parts: bool = False) -> UnsupportedOption:
    """Returns the error for a model that cannot isolate documents."""
    inputs = "cu_seqlens or an attention_mask of shape (rows, 1, tokens, tokens)"
    if in_parts:
        inputs = "an attention_mask of shape (rows, 1, own tokens, all tokens)"
    return UnsupportedOption(
        f"packing: {type(innermost(model)).__name__} cannot isolate the documents of a row "
        f"({'; '.join(dict.fromkeys(reasons))}). Use packing='group', which keeps one row for each sample, or a "
        f"forward that takes position_ids and {inputs}."
    )


def probe_lengths(model: nn.Module) -> tuple[int, ...]:
    """Returns the lengths in tokens of the probe's documents; the second one is longer than all attention windows.

    Windows above `LARGEST_WINDOW` count as `NARROW_WINDOW`, to which they are changed in the probe.
    """
    config = getattr(innermost(model), "config", None)
    windows = windows_of(config)
    if not windows:
        return LENGTHS
    window = max(NARROW_WINDOW if size > LARGEST_WINDOW else size for size in windows.values())
    length = window + window // 4 + LENGTHS[1]
    positions = [getattr(each, "max_position_embeddings", None) for each in configs_in(config)]
    sizes = [each for each in positions if isinstance(each, int) and each > window]
    # positions of models like RoBERTa begin at 2, so a document has two positions fewer than the table
    return (LENGTHS[0], max(min([length, *(each - 2 for each in sizes)]), window + 1), LENGTHS[2])


class Probe:
    """Runs forward passes over three documents in one row, over two such rows, and over each document alone.

    Args:
        model: the model, in evaluation mode.
        loss_of, is_half, num_rows: see `find_isolation`.
        lengths: tokens of the documents.
    """

    def __init__(
        self, model: nn.Module, loss_of: LossOf, is_half: bool, lengths: tuple[int, ...] = LENGTHS, num_rows: int = 2
    ) -> None:
        self.model = model
        self.loss_of = loss_of
        self.lengths = lengths
        self.num_rows = num_rows
        parameter = next(model.parameters())
        self.device = parameter.device
        self.tolerance = 0.05 if is_half else MAX_DIFFERENCE.get(parameter.dtype, 0.05)
        generator = torch.Generator().manual_seed(0)
        low, high = token_range(model)
        self.documents = [torch.randint(low, high, (1, each), generator=generator) for each in self.lengths]
        self.others = [low + (each - low + (high - low) // 2) % (high - low) for each in self.documents]
        self._alone: list[Tensor] | None = None

    @contextmanager
    def narrowed(self, config: Any, windows: Mapping[str, int]) -> Iterator[None]:
        """Shrinks large attention windows while entered.

        Args:
            config: the config of the model.
            windows: the options that hold them, with their tokens.

        Raises:
            Refused: the outputs do not depend on the options, so the windows are elsewhere.
        """
        before = self._alone_outputs(self.documents[1])
        with narrowed(self.model, config, windows, LARGEST_WINDOW, NARROW_WINDOW):
            if torch.equal(before, self._alone_outputs(self.documents[1])):
                name = max(windows, key=lambda each: windows[each])
                raise Refused(f"its attention window, {name}={windows[name]}, could not be made smaller to be tried")
            yield

    def check(self, first: int) -> bool:
        """Returns True if the loss shifts its labels.

        Args:
            first: the position of a document's first token.

        Raises:
            Refused: the documents are not isolated.
        """
        packed = self._outputs(self.documents, first)[:1]
        num_classes = packed.shape[-1] if packed.dim() > 2 else None
        if self._alone is None:
            self._alone = [self._alone_outputs(each) for each in self.documents]
        starts = itertools.accumulate(self.lengths, initial=0)
        for own, start, length in zip(self._alone, starts, self.lengths, strict=False):
            if not self._is_close(packed[:, start : start + length], own):
                raise Refused("outputs are not those of each document alone")
        for is_training in (False, True):
            self.model.train(is_training)
            try:
                self._check_changes(first)
            finally:
                self.model.eval()
        return self._find_shift(first, num_classes)

    def _check_changes(self, first: int) -> None:
        """Checks that a change of each document leaves the outputs of the others unchanged, up to rounding."""
        before = self._outputs(self.documents, first)
        start = 0
        for place, length in enumerate(self.lengths):
            changed = [*self.documents[:place], self.others[place], *self.documents[place + 1 :]]
            after = self._outputs(changed, first)
            kept = torch.ones(after.shape[:2], dtype=torch.bool, device=after.device)
            kept[0, start : start + length] = False
            start += length
            if not torch.allclose(before[kept], after[kept], rtol=1e-6, atol=1e-6):
                raise Refused("a change of one document changed the outputs of another")

    def _outputs(self, documents: list[Tensor], first: int) -> Tensor:
        """Returns the outputs of the documents in one row, computed with the same random numbers at each call.

        If batches may have several rows, a second one holds the original documents in another order.
        """
        torch.manual_seed(0)
        batch = self._packed(documents, first)
        if self.num_rows > 1:
            other = self._packed(self.documents[::-1], first)
            batch = {name: torch.cat([value, other[name]]) for name, value in batch.items()}
        return outputs_of(self.model(**batch), sum(self.lengths), self.num_rows)

    def _alone_outputs(self, document: Tensor) -> Tensor:
        return outputs_of(self.model(input_ids=document.to(self.device)), document.shape[1])

    def _packed(self, documents: list[Tensor], first: int, **labels: Tensor) -> dict[str, Tensor]:
        positions = torch.cat([torch.arange(each.shape[1]) + first for each in documents])[None]
        batch = {"input_ids": torch.cat(documents, 1), "position_ids": positions, **labels}
        return {name: value.to(self.device) for name, value in batch.items()}

    def _is_close(self, one: Tensor, other: Tensor) -> bool:
        scale = float(other.abs().max())
        return bool(((one - other).abs().max() <= self.tolerance * max(scale, 1e-6)).item())

    def _find_shift(self, first: int, num_classes: int | None) -> bool:
        """Returns True if the loss shifts labels, determined from the losses of the documents and of the row.

        Args:
            num_classes: width of the outputs, which may be that of a few classes of tokens; None: unknown.
        """
        labels = [each.clone() for each in self.others]  # differ from the inputs
        if num_classes is not None:  # a label outside of the classes would end the work with a CUDA device
            labels = [each % num_classes for each in labels]
        alone = [
            self._loss({"input_ids": ids.to(self.device), "labels": own.to(self.device)})
            for ids, own in zip(self.documents, labels, strict=True)
        ]
        for shifts in (True, False):
            own = [each.clone() for each in labels]
            for each in own if shifts else ():
                each[:, 0] = IGNORED
            weights = [length - shifts for length in self.lengths]
            expected = sum(w * loss for w, loss in zip(weights, alone, strict=True)) / sum(weights)
            loss = self._loss(self._packed(self.documents, first, labels=torch.cat(own, 1)))
            # at least 1e-5, because models of transformers compute their losses in float32
            if abs(loss - expected) <= max(self.tolerance, 1e-5) * max(abs(expected), 1e-6):
                return shifts
        raise Refused("the loss of a row is not the mean over the targets of its documents")

    def _loss(self, batch: dict[str, Tensor]) -> float:
        result = self.loss_of(self.model, batch)
        loss = result if isinstance(result, Tensor) else find_loss(result)
        if loss is None:
            raise Refused("it returns no loss")
        return float(loss.detach().float().mean())


def token_range(model: nn.Module) -> tuple[int, int]:
    """Returns (first, end) of a range of token ids that excludes the known special tokens."""
    ask = getattr(innermost(model), "get_input_embeddings", None)
    try:
        embedding = ask() if callable(ask) else None
    except NotImplementedError:  # of a model of transformers without one table for its tokens
        embedding = None
    sizes = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)]
    size = getattr(embedding, "num_embeddings", None) or max(sizes, default=4)
    config = getattr(innermost(model), "config", None)
    size = int(getattr(config, "vocab_size", None) or size)
    found = [getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")]
    special = [each for each in found if isinstance(each, int) and 0 <= each < size]
    low = max([each + 1 for each in special if each < size // 2], default=0)
    high = min([each for each in special if each >= size // 2], default=size)
    return (low, high) if high - low > 1 else (0, size)


def outputs_of(outputs: Any, num_tokens: int, num_rows: int = 1) -> Tensor:
    """Returns the first floating-point output with one value or vector per token.

    Raises:
        Refused: there is no such output.
    """
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    for value in [values] if isinstance(values, Tensor) else values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape[:2] == (num_rows, num_tokens):
            return value.float() if value.dtype != torch.float64 else value
    raise Refused("its outputs have not one row for each token")
