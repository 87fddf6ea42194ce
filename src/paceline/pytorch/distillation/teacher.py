"""Loads the teacher of a distillation, and checks that it reads the same inputs and names the same classes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from paceline.core.optional import require
from paceline.pytorch.model.signature import innermost

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model", "vocab.json")


def find_teacher(given: object, option: str | None) -> nn.Module | None:
    """Returns the teacher of a Trainer; None without one.

    Args:
        given: the argument `teacher`: a module, a folder, or None.
        option: the option `teacher`.

    Raises:
        ValueError: both are given, or the folder holds no model.
        TypeError: the argument is something else.
    """
    if given is not None and option is not None:
        raise ValueError(f"Trainer(teacher=...) and the option teacher={option!r} are two teachers: give one of them.")
    if isinstance(given, nn.Module):
        return given
    chosen = option if given is None else given
    if chosen is None:
        return None
    if not isinstance(chosen, str | Path):
        raise TypeError(
            f"teacher={type(chosen).__name__}: expected a module, or the folder of a model of transformers."
        )
    return load_teacher(Path(chosen))


def load_teacher(folder: Path) -> nn.Module:
    """Returns the model that `save_pretrained` of transformers wrote into a folder.

    Raises:
        ValueError: it is no such folder.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"teacher={str(folder)!r} is not a folder with a config.json, as save_pretrained writes it: name one, or "
            "load the model and pass it, as in Trainer(teacher=model)."
        )
    transformers: Any = require("transformers", "transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    names = list(getattr(config, "architectures", None) or [])
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise ValueError(
            f"teacher={str(folder)!r}: its config.json names no class of transformers ({names}): load the model and "
            "pass it, as in Trainer(teacher=model)."
        )
    model: nn.Module = kind.from_pretrained(folder)
    return model


def check_teacher(teacher: nn.Module, student: nn.Module, tokenizer: object, folder: object) -> None:
    """Checks that a teacher can teach a student.

    Args:
        teacher, student: the models.
        tokenizer: the Trainer's `processing_class`, or None.
        folder: the folder that the teacher was loaded from, or None.

    Raises:
        ValueError: they share weights, or have other vocabularies or classes.
    """
    own = {id(parameter) for parameter in student.parameters()}
    if any(id(parameter) in own for parameter in teacher.parameters()):
        raise ValueError("The teacher shares parameters with the model that is trained: pass a copy of it.")
    one, other = (getattr(innermost(model), "config", None) for model in (student, teacher))
    for name in ("vocab_size", "num_labels"):
        sizes = (getattr(one, name, None), getattr(other, name, None))
        if None not in sizes and sizes[0] != sizes[1]:
            raise ValueError(
                f"The teacher has {name}={sizes[1]} and the model {name}={sizes[0]}: a teacher needs the tokenizer and "
                "the classes of its student."
            )
    check_labels(getattr(one, "id2label", None), getattr(other, "id2label", None))
    check_tokenizer(tokenizer, folder or getattr(other, "_name_or_path", None))


def check_labels(one: object, other: object) -> None:
    """Raises ValueError if two models have the same names of classes in another order."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)) or dict(one) == dict(other):
        return
    names = [{str(name) for name in each.values()} for each in (one, other)]
    if names[0] == names[1]:
        raise ValueError(
            f"The teacher has the classes {dict(other)} and the model {dict(one)}: the same names in another order. "
            "Set id2label of the model to that of the teacher, and number the labels in this order."
        )


def check_tokenizer(tokenizer: Any, folder: object) -> None:
    """Raises ValueError if the tokenizer in a teacher's folder has other tokens than the Trainer's."""
    if not callable(getattr(tokenizer, "get_vocab", None)) or not isinstance(folder, str | Path) or not str(folder):
        return
    if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
        return
    transformers: Any = require("transformers", "transformers")
    try:
        vocabulary = transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
    except (ValueError, OSError, KeyError) as error:
        logger.warning("The tokenizer of the teacher in %s could not be read, and is not compared: %s", folder, error)
        return
    own = tokenizer.get_vocab()
    if vocabulary == own:
        return
    differing = next((token for token in own if vocabulary.get(token) != own[token]), next(iter(vocabulary), ""))
    raise ValueError(
        f"The teacher in {folder} has another tokenizer than the model: the token {differing!r} is "
        f"{vocabulary.get(differing, 'missing')} there and {own.get(differing, 'missing')} here. The teacher reads the "
        "tokens of the model: train both with one tokenizer."
    )
