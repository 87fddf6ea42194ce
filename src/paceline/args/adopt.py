"""Converts transformers' arguments to this package's, and applies their log level."""

from __future__ import annotations

import importlib
import logging
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Any

from paceline.args.redeclared import OWN
from paceline.args.secrets import has_handlers
from paceline.args.training import TrainingArguments


def adopt(args: Any) -> TrainingArguments:
    """Returns this package's arguments unchanged, and transformers' arguments converted to them.

    Options that a user's subclass added are copied as attributes.

    Raises:
        TypeError: `args` is neither of these.
        ValueError, UnsupportedOption: as on construction of arguments.
    """
    if isinstance(args, TrainingArguments):
        return args
    if not is_dataclass(args) or isinstance(args, type) or not callable(getattr(args, "to_dict", None)):
        raise TypeError(
            f"`args` is {type(args).__name__}; expected a TrainingArguments of paceline or of transformers."
        )
    cls: type[TrainingArguments] = TrainingArguments
    if hasattr(args, "predict_with_generate"):
        cls = importlib.import_module("paceline.args.seq2seq").Seq2SeqTrainingArguments
    own = [item.name for item in fields(args) if item.name in OWN]
    if own:  # the user's class defines their meaning: see `paceline.args.redeclared`
        replaced = [(name, Any, field(default=None)) for name in own]
        cls = make_dataclass(type(args).__name__, replaced, bases=(cls,), repr=False, eq=False)
    known = {item.name for item in fields(cls)}
    values = args.to_dict()  # type: ignore[attr-defined]
    adopted = cls.from_dict({name: value for name, value in values.items() if name in known})
    for item in fields(args):
        if item.name.endswith("_token") and item.name in known:
            setattr(adopted, item.name, getattr(args, item.name))  # `to_dict` returns a placeholder
        elif item.name == "generation_config" and item.name in known:
            setattr(adopted, item.name, getattr(args, item.name))  # the object knows which values were set explicitly
        elif item.name not in known and item.init:
            setattr(adopted, item.name, getattr(args, item.name))
    return adopted


def apply_log_level(args: TrainingArguments) -> None:
    """Sets the level of this package's loggers to `log_level`; `passive` leaves it to the application.

    A verbosity that the application set for transformers, but not for this package, applies here too. If the
    application configured no logging, the lines go to standard error.
    """
    level = args.log_level if args.should_log else args.log_level_replica
    ours, wanted = logging.getLogger("paceline"), args.get_process_log_level()
    if level == "passive" and wanted >= ours.getEffectiveLevel():
        return
    ours.setLevel(wanted)
    if not has_handlers(ours.name):
        ours.addHandler(logging.StreamHandler())
