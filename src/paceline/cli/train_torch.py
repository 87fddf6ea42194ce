"""Builds Trainer, model and data for `paceline train` with torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from paceline.args.errors import UnsupportedOption
from paceline.args.training import TrainingArguments
from paceline.cli.config import JobConfig
from paceline.cli.errors import UsageError
from paceline.cli.job_data import Splits, load_data, preprocess
from paceline.cli.job_model import build_model
from paceline.cli.job_text import tokenize
from paceline.cli.job_tokenizer import build_tokenizer
from paceline.cli.job_trainer import make_trainer
from paceline.core.optional import LateModule
from paceline.pytorch.data.collate_language import DataCollatorForLanguageModeling
from paceline.pytorch.data.collators import DefaultDataCollator
from paceline.pytorch.distributed.launchers import read_launch
from paceline.pytorch.distributed.random import set_seed
from paceline.pytorch.distributed.world import current_world, wait_for_all
from paceline.pytorch.model.outputs import ModelOutputError
from paceline.pytorch.model.signature import has_targets_beside_text, innermost, read_signature, shifts_labels
from paceline.pytorch.trainer import Trainer

members_trainer = LateModule("paceline.pytorch.members.trainer")

# errors of training that an invalid configuration causes
REFUSALS = (UnsupportedOption, ModelOutputError)


@contextmanager
def in_turn(args: TrainingArguments) -> Iterator[bool]:
    """Runs the block on the first process before the others; all of them go on together. Yields if this is the first.

    The block renames a folder that the processes share, and clears what a crash has left in it.
    """
    if read_launch(os.environ) is None:
        yield True
        return
    with args.main_process_first(local=False, desc="opening the folder"):
        yield args.process_index == 0
    wait_for_all(current_world(args))


def build_trainer(
    config: JobConfig, args: TrainingArguments, model_init: Callable[[Any, Any], nn.Module] | None = None
) -> tuple[Trainer, Splits]:
    """Builds the Trainer from model, data, functions and callbacks. The seed is set before the model is created.

    Args:
        model_init: `(tokenizer, trial) -> model` of the trials of a search; None: the job's model is trained.

    Raises:
        UsageError: the configuration is invalid.
    """
    set_seed(args.seed)
    tokenizer = build_tokenizer(config)
    model = build_model(config, tokenizer)
    splits = load_data(config, tokenizer, args.seed)
    if config.get("preprocess") is not None:
        preprocess(config, splits, tokenizer)
    reads_text = not has_targets_beside_text(model)
    is_blocks = tokenize(config, splits, innermost(model), tokenizer, read_signature(model).names, reads_text)
    collator = collator_of_blocks(config, innermost(model), tokenizer) if is_blocks else None
    base: type[Trainer] = Trainer
    if config.get("members") is not None:
        if model_init is not None:
            raise UsageError(
                "members: `paceline search` trains one model at a time: leave them out, or draw members in Python, by "
                'Trainer.hyperparameter_search(backend="members")'
            )
        base = members_trainer.MembersTrainer
        if any("seed" in settings for settings in config.get("members")):  # each has an initialization of its own
            model_init = partial(model_of_member, config)
    trainer: Trainer = make_trainer(
        config,
        base,
        model=model if model_init is None else None,
        args=args,
        splits=splits,
        tokenizer=tokenizer,
        data_collator=collator,
        shifts=shifts_labels(model),
        model_init=None if model_init is None else partial(model_init, tokenizer),
    )
    return trainer, splits


def model_of_member(config: JobConfig, tokenizer: Any, trial: Any = None) -> nn.Module:
    """Returns the model of one of several members, after its seed was set."""
    return build_model(config, tokenizer)


def collator_of_blocks(config: JobConfig, model: nn.Module, tokenizer: Any) -> Any:
    """Returns the collator of blocks of tokens, which masks tokens for a masked language model.

    Raises:
        UsageError: the tokenizer of a masked language model has no mask token.
    """
    # blocks need no padding, so no padding token is required
    if not type(model).__name__.endswith("MaskedLM") or config.get("data_collator") is not None:
        return DefaultDataCollator()
    try:
        return DataCollatorForLanguageModeling(tokenizer)
    except ValueError as error:
        raise UsageError(f"tokenizer: {error}") from error
