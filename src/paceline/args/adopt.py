"""Arguments as a Trainer takes them: of this package, or of transformers; and the log level they ask for."""

from __future__ import annotations

import logging
from dataclasses import fields, is_dataclass
from typing import Any

from paceline.args.seq2seq import Seq2SeqTrainingArguments
from paceline.args.training import TrainingArguments


def adopt(args: Any) -> TrainingArguments:
    """The arguments themselves, or those of transformers as ours.

    Options that a user's subclass added are carried over as attributes.

    Raises:
        TypeError: `args` is neither.
        ValueError, UnsupportedOption: as when arguments are made.
    """
    if isinstance(args, TrainingArguments):
        return args
    if not is_dataclass(args) or isinstance(args, type) or not callable(getattr(args, "to_dict", None)):
        raise TypeError(
            f"`args` is {type(args).__name__}; a TrainingArguments is needed, of paceline or of transformers."
        )
    cls = Seq2SeqTrainingArguments if hasattr(args, "predict_with_generate") else TrainingArguments
    known = {item.name for item in fields(cls)}
    values = args.to_dict()  # type: ignore[attr-defined]
    adopted = cls.from_dict({name: value for name, value in values.items() if name in known})
    for item in fields(args):
        if item.name.endswith("_token") and item.name in known:
            setattr(adopted, item.name, getattr(args, item.name))  # written as a placeholder
        elif item.name == "generation_config" and item.name in known:
            setattr(adopted, item.name, getattr(args, item.name))  # the object, which says what was set on purpose
        elif item.name not in known and item.init:
            setattr(adopted, item.name, getattr(args, item.name))
    return adopted


def apply_log_level(args: TrainingArguments) -> None:
    """Set the level of this package's loggers, as `log_level` asks; `passive` leaves it to the application.

    Where the application set up no logging at all, the lines go to standard error: a level asked for is not in vain.
    """
    level = args.log_level if args.should_log else args.log_level_replica
    if level == "passive":
        return
    ours = logging.getLogger("paceline")
    ours.setLevel(args.get_process_log_level())
    if not ours.hasHandlers():
        ours.addHandler(logging.StreamHandler())
