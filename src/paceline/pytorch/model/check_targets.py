"""Checks that a language model's targets are the next tokens: shifted once, and not zero times or twice.

The gradient of a cross-entropy with respect to the logits of one output is its probabilities minus 1 at the target: it
is negative at the target only. One backward pass from the loss to the logits therefore shows the token that each output
is compared with, whether the collator, the model, both or neither shift it. Comparing these with the input tokens gives
the exact distance. A loss without logits (a fused linear cross-entropy) is tested in another way: all targets but one
are ignored, and the gradient then reaches the inputs up to the output that belongs to this target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.pytorch.data.batches import batch_size_of, cut_batch
from paceline.pytorch.data.columns import find_labels
from paceline.pytorch.data.prefetch import move_to_device
from paceline.pytorch.model.loss import IGNORE_INDEX, LossNormalizer
from paceline.pytorch.model.objective import Objective, compute_loss_with_outputs
from paceline.pytorch.model.outputs import candidate_logits
from paceline.pytorch.model.signature import innermost, read_signature

SHIFTS = range(-2, 5)
# minimum share of targets that match at one distance; packed texts do not match at their boundaries
AGREEMENT = 0.9

LossPath = Callable[[nn.Module, Any], tuple[Any, Any]]  # (model, inputs) -> (loss, outputs)


@dataclass(frozen=True)
class TargetCheck:
    """The result of `check_targets`; `str` returns its sentence.

    Attributes:
        verdict: `right`; `not shifted`; `shifted twice`; `shifted wrongly` by another distance; `visible`: the distance
            is right, but the model sees the token it should predict; `unrelated`: the targets are not the input tokens
            (a classifier, a masked language model); `unknown`: the batch is inconclusive.
        sentence: the finding and the remedy.
        shift: the target of output i is the input token i + shift; None if there is no such shift.
        by_batch: the shift of the labels in the batch; None: unknown.
        by_loss: the shift by the model or its loss; None: unknown.
    """

    verdict: str
    sentence: str
    shift: int | None = None
    by_batch: int | None = None
    by_loss: int | None = None

    @property
    def is_wrong(self) -> bool:
        """Returns True if training on these targets does not teach the model to predict the next token."""
        return self.verdict in ("not shifted", "shifted twice", "shifted wrongly", "visible")

    def __str__(self) -> str:
        return self.sentence


@dataclass
class Reading:
    """One pass of a batch through the loss."""

    loss: Tensor
    outputs: Any
    embedded: list[tuple[Tensor, Tensor]]  # (input indices, output) of each embedding


def check_targets(model: object, batch: object = None, *, samples: int = 2) -> TargetCheck:
    """Checks that a language model is trained on the next token.

    Args:
        model: a module that returns a loss, from transformers or not; or a Trainer, whose own loss is then used
            (collator, `compute_loss`, `compute_loss_func`, label smoothing).
        batch: a collated training batch; None: the first batch of the Trainer's training data.
        samples: number of samples to check; the pass takes twice the memory of their logits.

    Returns:
        The verdict, and a sentence that states it. The model is unchanged, and has no gradients from the check.

    Raises:
        ValueError: there is no batch to check, or it has no integer tokens.
        ModelOutputError: no loss can be read from the model's outputs.
    """
    network, read_loss, label_names = paths_of(model)
    batch = first_batch(model) if batch is None else batch
    inputs = cut_batch(batch, size := batch_size_of(batch), 0, min(samples, size))
    inputs = name_inputs(network, inputs)
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    inputs = move_to_device(dict(inputs), device)
    labels = find_by_name(inputs, ("shift_labels", *label_names))
    tokens = find_tokens(network, inputs, labels, label_names)
    with quiet(network):
        reading = read(network, read_loss, inputs)
        found = read_targets(reading, tokens)
        if found is None:
            by_loss = probe_loss(network, read_loss, inputs, tokens, labels)
            by_batch = None if labels is None else find_shift(labels, labels != IGNORE_INDEX, tokens)[0]
            shift = None if by_loss is None or by_batch is None else by_loss + by_batch
            return judge(shift, 0.0, by_batch, by_loss, is_visible=False)
        logits, targets, counted = found
        shift, share = find_shift(targets, counted, tokens)
        by_loss = None if labels is None else find_shift(targets, counted, labels)[0]
        is_visible = shift == 1 and sees_ahead(logits, reading.embedded, tokens)
    by_batch = None if shift is None or by_loss is None else shift - by_loss
    return judge(shift, share, by_batch, by_loss, is_visible)


# ---- inputs of the check


def paths_of(model: Any) -> tuple[nn.Module, LossPath, tuple[str, ...]]:
    """Returns (module, `(module, inputs) -> (loss, outputs)`, label names) of a module or a Trainer."""
    if isinstance(model, nn.Module):
        names = tuple(find_labels(innermost(model)) or ["labels"])
        objective = Objective(read_signature(model), names, LossNormalizer(names))
        return model, lambda module, inputs: objective(module, inputs), names

    def by_trainer(module: nn.Module, inputs: Any) -> tuple[Any, Any]:
        num_items = model._get_num_items_in_batch([inputs], next(iter(inputs.values())).device)
        with model.compute_loss_context_manager():
            return compute_loss_with_outputs(model.compute_loss, module, inputs, num_items)

    return model.model, by_trainer, tuple(model.label_names or ["labels"])


def first_batch(model: Any) -> Any:
    """Returns the first batch of a Trainer's training data."""
    if isinstance(model, nn.Module):
        raise ValueError("check_targets(model) needs a batch: pass one as the collator makes it, or pass the Trainer.")
    return next(iter(model.get_train_dataloader()))


def name_inputs(model: nn.Module, batch: object) -> Any:
    """Returns the values of a tuple batch under the names of forward's parameters."""
    if isinstance(batch, Mapping):
        return batch
    values = batch if isinstance(batch, list | tuple) else [batch]
    return dict(zip(read_signature(model).names, values, strict=False))


def find_by_name(inputs: Mapping[str, Any], names: tuple[str, ...]) -> Tensor | None:
    """Returns the first integer tensor of two dimensions under one of these names."""
    return next((inputs[name] for name in names if name in inputs and holds_tokens(inputs[name])), None)


def holds_tokens(value: object) -> bool:
    """Returns True for an integer tensor of shape (samples, length)."""
    return isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)


def find_tokens(model: nn.Module, inputs: Mapping[str, Any], labels: Tensor | None, names: tuple[str, ...]) -> Tensor:
    """Returns the input tokens, `(samples, length)`; for an encoder-decoder those of its decoder.

    Raises:
        ValueError: the inputs contain no integer tensor of two dimensions.
    """
    inner = innermost(model)
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        shift_right = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
        given = find_by_name(inputs, ("decoder_input_ids",))
        if given is None and callable(shift_right) and labels is not None:
            given = shift_right(labels=labels)
        if given is not None:
            return given
    tokens = find_by_name(inputs, (str(getattr(inner, "main_input_name", "input_ids")), "input_ids"))
    others = (value for name, value in inputs.items() if name not in (*names, "attention_mask", "position_ids"))
    tokens = tokens if tokens is not None else next(filter(holds_tokens, others), None)
    if tokens is None:
        raise ValueError(
            "The batch holds no integer tokens (samples, length) that a language model could read; it holds: "
            f"{', '.join(inputs)}."
        )
    return tokens


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Disables dropout and enables gradients; restores random generators and module modes afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def read(model: nn.Module, read_loss: LossPath, inputs: Mapping[str, Any]) -> Reading:
    """Runs one pass, and records every embedding's input and output."""
    embedded: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            if not output.requires_grad:
                output.requires_grad_()  # gives a frozen model gradients from here on
            embedded.append((args[0], output))

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                hooks.callback(module.register_forward_hook(note).remove)
        loss, outputs = read_loss(model, dict(inputs))
    return Reading(loss.float().mean(), outputs, embedded)


# ---- the token that each output is compared with


def read_targets(reading: Reading, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns (logits, targets, mask of outputs with a target), derived from the gradient of the loss.

    Returns None if the loss does not depend on logits.
    """
    candidates = [item for item in candidate_logits(reading.outputs) if item.requires_grad]
    if not candidates or not reading.loss.requires_grad:
        return None
    scale = torch.full_like(reading.loss, float(tokens.numel()))  # undoes the mean, against underflow in 16 bits
    gradients = torch.autograd.grad(reading.loss, candidates, scale, retain_graph=True, allow_unused=True)
    for logits, gradient in zip(candidates, gradients, strict=True):
        ordered = None if gradient is None else order_logits(gradient, tokens)
        if ordered is not None and bool((ordered != 0).any()):
            lowest, targets = ordered.min(-1)
            return logits, targets, lowest < 0
    return None


def order_logits(logits: Tensor, tokens: Tensor) -> Tensor | None:
    """Returns the logits as `(samples, length, classes)`; None if their shape does not match these tokens."""
    if logits.dim() == 2 and len(logits) == tokens.numel():
        return logits.reshape(*tokens.shape, -1)
    if logits.dim() != 3 or len(logits) != len(tokens):
        return None
    length = tokens.shape[1]
    return logits.movedim(1, -1) if logits.shape[1] != length and logits.shape[2] == length else logits


def find_shift(targets: Tensor, counted: Tensor, tokens: Tensor) -> tuple[int | None, float]:
    """Returns (the only distance at which nearly all targets match the tokens, the largest share of matches).

    The distance is None if no or several distances match.

    Args:
        targets: `(samples, outputs)`.
        counted: mask of the targets that count.
        tokens: `(samples, length)`.
    """
    shares = {shift: share_at(shift, targets, counted, tokens) for shift in SHIFTS}
    matches = [shift for shift, share in shares.items() if share >= AGREEMENT]
    best = max(shares.values())
    return (matches[0], best) if len(matches) == 1 else (None, best)


def share_at(shift: int, targets: Tensor, counted: Tensor, tokens: Tensor) -> float:
    """Returns the share of targets that equal the token `shift` positions later."""
    first, last = max(0, -shift), min(targets.shape[1], tokens.shape[1] - shift)
    if last <= first:
        return 0.0
    kept = counted[:, first:last]
    same = targets[:, first:last] == tokens[:, first + shift : last + shift]
    return float((same & kept).sum()) / max(1, int(kept.sum()))


def sees_ahead(logits: Tensor, embedded: list[tuple[Tensor, Tensor]], tokens: Tensor) -> bool:
    """Returns True if the middle output depends on the next token, which is its target."""
    ordered = order_logits(logits, tokens)
    read_here = [made for given, made in embedded if given.shape == tokens.shape and bool((given == tokens).all())]
    middle = tokens.shape[1] // 2
    if ordered is None or not read_here or middle + 1 >= tokens.shape[1]:
        return False
    output = ordered[:, middle].float()
    weights = torch.linspace(-1, 1, output.shape[-1], device=output.device)  # a plain sum may have zero gradient
    gradient = torch.autograd.grad((output * weights).sum(), read_here[-1], retain_graph=True, allow_unused=True)[0]
    return gradient is not None and bool((gradient[:, middle + 1] != 0).any())


def probe_loss(
    model: nn.Module,
    read_loss: LossPath,
    inputs: Mapping[str, Any],
    tokens: Tensor,
    labels: Tensor | None,
) -> int | None:
    """Returns the shift of a loss without logits: the distance from the last input it depends on to its only label.

    All labels but one are ignored. Valid for causal models only; None if the gradient reaches the end of the inputs, or
    no label can be kept.
    """
    if labels is None:
        return None
    places = (labels[0] != IGNORE_INDEX).nonzero().flatten()
    places = places[(places >= 2) & (places < labels.shape[1] - 3)]
    if len(places) == 0:
        return None
    place = int(places[len(places) // 2])
    alone = torch.full_like(labels, IGNORE_INDEX)
    alone[0, place] = labels[0, place]
    changed = {name: alone if value is labels else value for name, value in inputs.items()}
    reading = read(model, read_loss, changed)
    read_here = [made for given, made in reading.embedded if given.shape == tokens.shape]
    if not read_here or not reading.loss.requires_grad:
        return None
    gradient = torch.autograd.grad(reading.loss, read_here[0], allow_unused=True)[0]
    if gradient is None:
        return None
    reached = (gradient[0] != 0).any(-1).nonzero().flatten()
    if len(reached) == 0 or int(reached[-1]) == tokens.shape[1] - 1:
        return None
    return place - int(reached[-1])


# ---- the verdict


def judge(shift: int | None, share: float, by_batch: int | None, by_loss: int | None, is_visible: bool) -> TargetCheck:
    """Returns the verdict with the sentence that states it."""
    parts = ""
    if by_batch is not None and by_loss is not None:
        parts = f" (the labels in the batch are shifted by {by_batch}, the loss shifts them by {by_loss})"
    if shift is None:
        return unclear(share, by_batch, by_loss)
    if shift == 1 and is_visible:
        verdict = "visible"
        sentence = (
            f"The target of output i is token i + 1{parts}, as it should be, but the model sees that token: it is not "
            "causal, so it learns to look instead of to predict. Use a causal mask."
        )
    elif shift == 1:
        verdict, sentence = "right", f"Right: the target of output i is token i + 1{parts}."
    elif shift == 0:
        verdict = "not shifted"
        sentence = (
            f"Not shifted: the target of output i is token i itself{parts}, which the model has just read, so it "
            "learns to copy. Shift once: labels[:, 1:] against logits[:, :-1] in the loss, or in the collator."
        )
    elif shift == 2:
        verdict = "shifted twice"
        sentence = (
            f"Shifted twice: the target of output i is token i + 2{parts}, so the model learns to leave out a token. "
            "Shift once: where the loss shifts, let the labels be a copy of the inputs."
        )
    else:
        verdict = "shifted wrongly"
        sentence = f"Shifted wrongly: the target of output i is token i + {shift}{parts}; the next one is i + 1."
    return TargetCheck(verdict, sentence, shift, by_batch, by_loss)


def unclear(share: float, by_batch: int | None, by_loss: int | None) -> TargetCheck:
    """Returns the verdict if no single distance fits."""
    if 0 < share < 0.5:
        sentence = (
            f"The targets are not the tokens that the model reads, at any distance (at best {share:.0%} agree): this "
            "is no causal language model, and there is no shift to check."
        )
        return TargetCheck("unrelated", sentence, None, None, by_loss)
    sentence = (
        "The batch is inconclusive: its targets fit several distances, or too few fit one. Give a batch with longer "
        "texts of different tokens, and with targets in its first samples."
    )
    return TargetCheck("unknown", sentence, None, by_batch, by_loss)
