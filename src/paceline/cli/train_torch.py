"""What `paceline train` does with torch alone: the Trainer, its model and its data."""

from __future__ import annotations

from paceline.args.errors import UnsupportedOption
from paceline.args.training import TrainingArguments
from paceline.cli.config import JobConfig
from paceline.cli.job_data import Splits, load_data, preprocess
from paceline.cli.job_model import build_model
from paceline.cli.job_text import tokenize
from paceline.cli.job_tokenizer import build_tokenizer
from paceline.cli.job_trainer import make_trainer
from paceline.data.collators import DefaultDataCollator
from paceline.distributed.random import set_seed
from paceline.model.outputs import ModelOutputError
from paceline.model.signature import innermost, read_signature
from paceline.trainer import Trainer

# what training raises where the configuration cannot be honoured
REFUSALS = (UnsupportedOption, ModelOutputError)


def build_trainer(config: JobConfig, args: TrainingArguments) -> tuple[Trainer, Splits]:
    """Model, data, functions and callbacks, put together. The seed is set before the model is made.

    Raises:
        UsageError: the configuration cannot be honoured.
    """
    set_seed(args.seed)
    tokenizer = build_tokenizer(config)
    model = build_model(config, tokenizer)
    splits = load_data(config, tokenizer, args.seed)
    if config.get("preprocess") is not None:
        preprocess(config, splits, tokenizer)
    is_blocks = tokenize(config, splits, innermost(model), tokenizer, read_signature(model).names)
    # blocks have nothing to pad, so no padding token is needed
    collator = DefaultDataCollator() if is_blocks else None
    trainer: Trainer = make_trainer(
        config, Trainer, model=model, args=args, splits=splits, tokenizer=tokenizer, data_collator=collator
    )
    return trainer, splits
