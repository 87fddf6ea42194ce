"""Checks of the inputs and of the data."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from paceline.pytorch.doctor.findings import ERROR, NOTE, WARNING, Case, Finding

LARGE = 20.0  # standard deviation or mean of an input above which a warning is given
MOST_DUPLICATES = 0.05
MOST_SHARED, FEW_SHARED = 0.05, 0.01  # shares of the evaluation rows that are an error, and no more than a note


def find_bad_inputs(case: Case) -> Iterator[Finding]:
    """Inputs that are not finite, or not normalized."""
    for name, value in case.batch.items():
        if name in case.label_names or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        is_mask = "mask" in str(name) or "bias" in str(name)  # what is added to attention scores may be -inf
        bad = int((value.isnan() if is_mask else ~torch.isfinite(value)).sum())
        if bad:
            yield Finding(ERROR, f"{bad} of {value.numel()} values of {name!r} are not finite", "Clean the data.")
            continue
        if is_mask:
            continue
        mean, spread = float(value.float().mean()), float(value.float().std()) if value.numel() > 1 else 0.0
        if max(abs(mean), spread) > LARGE:
            yield Finding(
                WARNING, f"{name!r} has mean {mean:.3g} and standard deviation {spread:.3g}", "Normalize the inputs."
            )


def find_bad_rows(case: Case) -> Iterator[Finding]:
    """Duplicated rows, and rows in both the training and the evaluation set."""
    rows = case.train_rows
    if rows:
        copies = len(rows) - len(set(rows))
        if copies > max(1, MOST_DUPLICATES * len(rows)):
            yield Finding(WARNING, f"{copies} of {len(rows)} examined training rows are copies", "Remove duplicates.")
    evaluated = set(case.eval_rows)
    shared = set(rows) & evaluated
    if not shared:
        return
    share = len(shared) / len(evaluated)
    severity = NOTE if share <= FEW_SHARED else WARNING  # short texts and small numbers coincide by chance
    yield Finding(
        ERROR if share > MOST_SHARED else severity,
        f"{len(shared)} of {len(evaluated)} examined evaluation rows are training rows",
        "Split the data before it is shuffled or repeated.",
    )


def find_wrong_vocabulary(case: Case) -> Iterator[Finding]:
    """A tokenizer that does not fit the model."""
    model = case.copy_model()
    ask = getattr(model, "get_input_embeddings", None)
    try:
        embedding = ask() if callable(ask) else None
    except NotImplementedError:  # of models that read no tokens
        return
    ids = case.batch.get("input_ids")
    if not isinstance(embedding, nn.Embedding):
        return
    size = embedding.num_embeddings
    if isinstance(ids, torch.Tensor) and ids.numel() and int(ids.max()) >= size:
        yield Finding(
            ERROR,
            f"an input id is {int(ids.max())}, and the model embeds {size} tokens",
            "Use the model's tokenizer, or model.resize_token_embeddings(len(tokenizer)).",
        )
    if case.tokenizer is None or not hasattr(case.tokenizer, "__len__"):
        return
    if len(case.tokenizer) > size:
        yield Finding(
            ERROR,
            f"the tokenizer has {len(case.tokenizer)} tokens, and the model embeds {size}",
            "Call model.resize_token_embeddings(len(tokenizer)).",
        )
    config = getattr(model, "config", None)
    own, other = getattr(config, "pad_token_id", None), getattr(case.tokenizer, "pad_token_id", None)
    if own is not None and other is not None and own != other:
        yield Finding(
            WARNING,
            f"pad_token_id is {own} for the model and {other} for the tokenizer",
            "Set model.config.pad_token_id.",
        )


def find_long_inputs(case: Case) -> Iterator[Finding]:
    """Inputs that are longer than the model's positions."""
    config, ids = getattr(case.copy_model(), "config", None), case.batch.get("input_ids")
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and most > 0 and isinstance(ids, torch.Tensor) and ids.shape[-1] > most:
        yield Finding(ERROR, f"inputs have {ids.shape[-1]} tokens, and the model {most} positions", "Truncate them.")
