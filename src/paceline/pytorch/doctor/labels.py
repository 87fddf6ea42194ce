"""Checks of the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

import torch

from paceline.pytorch.doctor.findings import ERROR, IGNORED, NOTE, WARNING, Case, Finding

MOST_OF_ONE = 0.95  # share of one class above which a warning is given
LEAST_SAMPLES = 16
MOST_TEXT = 200  # characters of a sample that are shown


def find_wrong_classes(case: Case) -> Iterator[Finding]:
    """Targets below 0, all ignored, constant, imbalanced, or sorted by class."""
    found = case.classes()
    if found is None:
        values = case.labels()
        if values is not None and len(values) > 1 and float(values.float().std()) == 0:
            yield Finding(
                WARNING, f"all {values.numel()} targets are {float(values.flatten()[0]):g}", "Check the data."
            )
        return
    if not len(found):
        yield Finding(
            ERROR, f"all targets of {len(case.batches)} micro-batches are {IGNORED}", "Check how labels are masked."
        )
        return
    if int(found.min()) < 0:
        yield Finding(ERROR, f"a target is {int(found.min())}", f"Classes count from 0; {IGNORED} is ignored.")
    is_wide = (labels := case.labels()) is not None and labels.dim() > 1
    values, counts = torch.unique(found, return_counts=True)
    share = float(counts.max()) / len(found)
    if len(found) < LEAST_SAMPLES:
        return
    if len(values) == 1:
        remedy = "The data has one class only, or is sorted: shuffle it."
        yield Finding(ERROR, f"all {len(found)} targets are {int(values[0])}", remedy)
    elif share > MOST_OF_ONE:
        most = int(values[counts.argmax()])
        yield Finding(WARNING, f"{share:.0%} of the targets are class {most}", "Weigh or sample the classes.")
    elif not is_wide and are_sorted(case, counts / len(found)):
        yield Finding(WARNING, f"most of {len(case.batches)} micro-batches have one class", "Shuffle the data.")


def are_sorted(case: Case, shares: torch.Tensor) -> bool:
    """Returns True if most micro-batches have one class, which is unlikely for the shares of the classes."""
    batches = [labels for labels in map(case.labels, case.batches) if labels is not None and len(labels) > 1]
    single = sum(1 for labels in batches if len(torch.unique(labels)) == 1)
    return bool(batches) and single >= 0.75 * len(batches) and float((shares ** len(batches[0])).sum()) < 0.5


def find_labels_out_of_range(case: Case) -> Iterator[Finding]:
    """Targets beyond the number of classes that the model declares."""
    found, config = case.classes(), getattr(case.copy_model(), "config", None)
    logits = case.logits()
    labels = case.labels()
    if found is None or not len(found) or labels is None:
        return
    width = logits.shape[-1] if logits is not None else None
    if width is None and config is not None:
        width = getattr(config, "num_labels", None) if labels.dim() == 1 else getattr(config, "vocab_size", None)
    if width is not None and width > 1 and int(found.max()) >= width:
        yield Finding(
            ERROR,
            f"a target is {int(found.max())}, and the model has {width} classes",
            f"Classes count from 0 to {width - 1}: set num_labels to the number of classes, or renumber the labels.",
        )


def find_leaks(case: Case) -> Iterator[Finding]:
    """Targets among the inputs."""
    labels = case.labels()
    if labels is None or len(labels) < 2 or (labels.dim() > 1 and labels.shape[-1] > 1):
        return
    wanted = labels.reshape(len(labels)).double()
    if len(torch.unique(wanted)) < 2:
        return
    for name, value in case.batch.items():
        if name in case.label_names or not isinstance(value, torch.Tensor) or len(value) != len(labels):
            continue
        rows = value.reshape(len(value), -1).double()
        for place in range(min(rows.shape[1], 4096)):
            if torch.equal(rows[:, place], wanted) and is_equal_everywhere(case, name, place):
                yield Finding(ERROR, f"input {name!r} holds the targets, at position {place}", "Leave that column out.")
                return


def is_equal_everywhere(case: Case, name: str, place: int) -> bool:
    """Returns True if an input equals the targets in all examined batches."""
    for batch in case.batches:
        labels = case.labels(batch)
        value = batch.get(name)
        if labels is None or not isinstance(value, torch.Tensor):
            return False
        rows = value.reshape(len(value), -1)
        if place >= rows.shape[1] or not torch.equal(rows[:, place].double(), labels.reshape(len(labels)).double()):
            return False
    return True


def find_padding_in_loss(case: Case) -> Iterator[Finding]:
    """Padding that counts as a target."""
    labels, mask, ids = case.labels(), case.batch.get("attention_mask"), case.batch.get("input_ids")
    if labels is None or ids is None or labels.shape != ids.shape:
        return
    pad = getattr(case.tokenizer, "pad_token_id", None)
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        padding = mask == 0
        if bool(padding.all()):
            yield Finding(ERROR, "attention_mask is 0 everywhere", "Check the tokenizer and the collator.")
    elif pad is not None:
        padding = ids == pad
        if bool((padding[:, -1]).any()) and pad != getattr(case.tokenizer, "eos_token_id", None):
            yield Finding(WARNING, "the inputs are padded and have no attention_mask", "Return it from the collator.")
    else:
        return
    counted = int((padding & (labels != IGNORED)).sum())
    if counted:
        yield Finding(ERROR, f"{counted} of {labels.numel()} targets are padding", f"Set their labels to {IGNORED}.")


def find_wrong_shift(case: Case) -> Iterator[Finding]:
    """Targets of a language model that are not the next tokens, and how they are shifted and masked, as text."""
    labels, ids = case.labels(), case.batch.get("input_ids")
    if labels is None or ids is None or labels.dim() < 2 or labels.is_floating_point():
        return
    decode = getattr(case.tokenizer, "decode", None)
    if callable(decode) and are_tokens(case):
        mask = case.batch.get("attention_mask")
        if isinstance(ids, torch.Tensor) and ids.dim() == 2:
            is_padding = mask[0] == 0 if isinstance(mask, torch.Tensor) and mask.shape == ids.shape else ids[0] < 0
            yield Finding(NOTE, f"inputs of the first sample: {as_text(ids[0], is_padding, 'padding', decode)}")
        yield Finding(NOTE, f"targets of the first sample: {as_text(labels[0], labels[0] < 0, 'ignored', decode)}")
    found = case.targets()
    if found is not None and found.verdict == "right":
        yield Finding(NOTE, str(found))
    if found is not None and found.is_wrong:
        yield Finding(ERROR, str(found), "Shift the targets once, in the model or in the collator.")


def are_tokens(case: Case) -> bool:
    """Returns False if the targets are classes other than the tokens of the tokenizer, as those of names in a text."""
    logits = case.logits()
    return logits is None or not hasattr(case.tokenizer, "__len__") or logits.shape[-1] >= len(case.tokenizer)


def as_text(ids: torch.Tensor, is_masked: torch.Tensor, word: str, decode: Callable[[list[int]], object]) -> str:
    """Returns the text of tokens; those that are masked are counted, as in `<3 ignored> 'an answer'`."""
    pieces, room = [], MOST_TEXT
    for is_hidden, run in groupby(zip(ids.tolist(), is_masked.tolist(), strict=True), key=lambda pair: pair[1]):
        tokens = [token for token, _ in run]
        text = f"<{len(tokens)} {word}>" if is_hidden else repr(str(decode(tokens))[:room])
        pieces.append(text)
        room -= len(text)
        if room <= 0:
            return " ".join([*pieces, "..."])
    return " ".join(pieces)
