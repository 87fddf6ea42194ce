"""Detection and masking of secrets in text. Everything written or printed passes through this module.

Values in memory are unchanged; output to files, trackers, logs and errors is masked. Standard library only.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "<MASKED>"

_LEAST_VALUE = 8  # characters of a variable's value; shorter ones may be ordinary words
_LONGEST_KEPT = 200  # characters of a text whose masked form is kept: options and the keys of rows, which repeat


def mask_text(text: str) -> str:
    """Returns the text with every secret replaced by `MASK`; masking is idempotent.

    Detected are passwords and signatures in URLs, `Bearer ...`, `api_key=...` and similar, the formats of well-known
    tokens, private keys, and the values of environment variables with a secret name.
    """
    return _mask(text, _secret_variables())


def describe_error(error: BaseException) -> str:
    """Returns the type and the first line of an error in at most 300 characters, with secrets masked."""
    lines = [line.strip() for line in mask_text(str(error)).splitlines() if line.strip()]
    name = type(error).__name__
    return f"{name}: {lines[0]}"[:300] if lines else name


def masked(value: object, name: str = "") -> Any:
    """Masks the strings in nested mappings, lists and tuples; values of secret names are masked completely."""
    return _masked(value, name, _secret_variables())


def is_secret(name: str, value: str) -> bool:
    """True if a value of this name is a secret."""
    if _names_secret(name):
        return True
    return _names_token(name) and _patterns().MADE_VALUE.match(value) is not None


def mask_command(command: Sequence[str]) -> list[str]:
    """Masks the values of secret options (`--hub_token X`, `--api-key=X`) in the words of a command line."""
    words = []
    option = ""  # the previous word, if it is an option without a value
    for word in command:
        name, equals, value = word.partition("=")
        if option and not word.startswith("--") and is_secret(option, word):
            words.append(MASK)
        elif equals and is_secret(name, value):
            words.append(f"{name}={MASK}")
        else:
            words.append(mask_text(word))
        option = word if word.startswith("-") and not equals else ""
    return words


def mask_logs(package: str) -> None:
    """Masks the log records of a package before any handler sees them."""
    logger = logging.getLogger(package)
    if not any(isinstance(handler, _MaskingHandler) for handler in logger.handlers):
        logger.handlers.insert(0, _MaskingHandler())


class _MaskingHandler(logging.Handler):
    """Masks records, which then propagate to the handlers of the application; writes nothing.

    A filter of a logger would not see the records of its child loggers; a handler does.
    """

    emits_nothing = True

    def handle(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
        except Exception:  # invalid arguments: the handler that emits the record reports them
            return True
        hidden = mask_text(text)
        if hidden != text:
            record.msg, record.args = hidden, ()
        if record.exc_info and not record.exc_text:
            record.exc_text = mask_text(logging.Formatter().formatException(record.exc_info))
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and not has_handlers(record.name):
            last.handle(record)  # logging's fallback for loggers without handlers, which this handler would disable
        return True


def has_handlers(name: str) -> bool:
    """True if a logger or one of its parents has a handler that emits records: one without `emits_nothing`."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if not all(getattr(handler, "emits_nothing", False) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _patterns() -> Any:
    return importlib.import_module("paceline.args.secret_patterns")


@functools.lru_cache(maxsize=1024)
def _names_secret(name: str) -> bool:
    return _patterns().SECRET_NAME.search(name) is not None


@functools.lru_cache(maxsize=1024)
def _names_token(name: str) -> bool:
    return _patterns().TOKEN_NAME.search(name) is not None


@functools.lru_cache(maxsize=1024)
def _is_secret_variable(name: str) -> bool:
    return _patterns().VARIABLE.search(name) is not None


def _secret_variables() -> tuple[str, ...]:
    # not decoded, which would take as long as masking the arguments of a run, at each call
    return _secrets_in(tuple(getattr(os.environ, "_data", os.environ).items()))


@functools.lru_cache(maxsize=4)
def _secrets_in(variables: tuple[tuple[Any, Any], ...]) -> tuple[str, ...]:
    """Returns the values of secret variables of the environment, of which `variables` is the raw form."""
    return tuple(
        value
        for name, value in os.environ.items()
        if len(value) >= _LEAST_VALUE and _is_secret_variable(name) and not os.path.exists(value)
    )


def _mask(text: str, known: tuple[str, ...]) -> str:
    return _mask_short(text, known) if len(text) <= _LONGEST_KEPT else _mask_any(text, known)


# A save masks all options three times; the patterns would cost half of its time on the training's thread.
@functools.lru_cache(maxsize=4096)
def _mask_short(text: str, known: tuple[str, ...]) -> str:
    return _mask_any(text, known)


def _mask_any(text: str, known: tuple[str, ...]) -> str:
    for secret in known:
        text = text.replace(secret, MASK)
    patterns = _patterns()
    text = patterns.FORMS.sub(MASK, text)
    text = patterns.URL_PASSWORD.sub(MASK, text)
    for pattern in patterns.WITH_VALUES:
        text = pattern.sub(rf"\1{MASK}", text)
    return text


def _masked(value: object, name: str, known: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        is_placeholder = not value or (value.startswith("<") and value.endswith(">"))
        return MASK if not is_placeholder and is_secret(name, value) else _mask(value, known)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {key: _masked(item, str(key), known) for key, item in value.items()}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_masked(item, name, known) for item in value)
    if isinstance(value, list):
        return [_masked(item, name, known) for item in value]
    return value
