"""Loads the tokenizer or processor of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.cli.config import JobConfig
from paceline.cli.errors import UsageError, check_keys, first_line, need
from paceline.cli.references import read_reference

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "vocab.json", "vocab.txt", "spiece.model")


def build_tokenizer(config: JobConfig) -> Any:
    """Returns the tokenizer (or processor) of the section, else the one saved with the model, else None.

    Raises:
        UsageError: the tokenizer cannot be loaded.
    """
    section = config.get("tokenizer")
    reference = read_reference("tokenizer", section)
    if reference is not None:
        return reference.call()
    if section is not None:
        if isinstance(section, Mapping):
            check_keys("tokenizer", section, ("path",))
            section = section.get("path")
        return load_tokenizer(config, "tokenizer", str(section))
    model = config.get("model")
    name = model.get("path") if isinstance(model, Mapping) else model
    if not isinstance(name, str) or read_reference("model", model) is not None:
        return None
    folder = config.find_file(name)
    if folder is not None and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return None
    return load_tokenizer(config, "model", name)


def load_tokenizer(config: JobConfig, where: str, name: str) -> Any:
    """Loads a tokenizer of transformers, by folder or name."""
    transformers = need("transformers", "transformers", where)
    try:
        return transformers.AutoTokenizer.from_pretrained(str(config.find_file(name) or name))
    except (OSError, ValueError) as error:
        raise UsageError(f"{where}: no tokenizer can be loaded from {name!r}: {first_line(error)}") from error
