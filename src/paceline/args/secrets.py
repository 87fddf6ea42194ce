"""Detection and masking of secrets in text. Everything written or printed passes through this module.

Values in memory are unchanged; output to files, trackers, logs and errors is masked. Standard library only.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "<MASKED>"

_WORDS = (
    r"password|passwd|passphrase|secret|connection[_-]?string|(?:access|auth|refresh)[_-]?token"
    r"|(?<![A-Za-z0-9])(?:hub|hf|huggingface|api|bot|csrf|deploy|github|gitlab|id|jwt|login|private|secret|security"
    r"|session|slack|user|wandb)[_-]token"
    r"|(?:api|access|account|secret|auth|private)[_-]?key(?:[_-]?id)?"
)
# `hub_token`, `--api-key`, `password`; not `include_num_input_tokens_seen` or `max_new_tokens`
_SECRET_NAME = re.compile(rf"(?:^|[_\-.])(?:credentials?|authorization|{_WORDS})$|(?:^|\.|^--?)token$", re.IGNORECASE)
# other tokens: those of a vocabulary are text, and those that let somebody in look as if a machine had made them
_TOKEN_NAME = re.compile(r"[_-]token$", re.IGNORECASE)
# Every repetition below has an end, so that no text makes the search quadratic.
_QUOTE = r"\\{0,3}['\"]"
_SIGN = r"(?:[^\s&'\",;)<>\]}\\]|\\(?!['\"]))"
_VALUE = rf"(?!none\b|null\b|true\b|false\b){_SIGN}+"
_MADE = rf"(?={_SIGN}{{0,64}}[0-9])(?={_SIGN}{{0,64}}[A-Za-z]){_SIGN}{{8}}{_SIGN}*"
_MADE_VALUE = re.compile(_MADE)
_ANY_TOKEN = r"(?<![\w-])(?:--?)?[A-Za-z0-9][\w-]{0,40}[_-]token"
_JOINT = rf"(?:{_QUOTE})?\s{{0,9}}[=:]\s{{0,9}}(?:{_QUOTE})?"
# name and value, however they are joined: a command line, JSON, YAML, a URL, an exception
_PAIR = re.compile(rf"((?:{_WORDS}){_JOINT}){_VALUE}", re.IGNORECASE)
_TOKEN_PAIR = re.compile(rf"({_ANY_TOKEN}{_JOINT}){_MADE}", re.IGNORECASE)
# an option and its value in a text; of a sentence about the option, the next word is no value
_PROSE = (
    r"(?!(?:an?|and|are|argument|as|at|by|can|does|environment|flag|for|from|given|has|if|in|instead|is|it|may|must|needs?"
    r"|not|of|on|only|option|or|set|that|the|to|too|value|was|which|will|with|you|your)\b)"
)
_SPACED = re.compile(
    rf"((?<![\w-])--(?:(?:[A-Za-z0-9][\w-]{{0,40}}[_-])?(?:{_WORDS})|token)\s{{1,3}}(?:{_QUOTE})?)(?!-){_PROSE}{_VALUE}",
    re.IGNORECASE,
)
# addresses that are a secret as a whole: of a hook, to which anybody who knows it may write
_HOOK = re.compile(
    r"(\b(?:hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks"
    r"|(?:webhook|outlook)\.office(?:365)?\.com/webhook(?:b2)?)/|\bapi\.telegram\.org/bot)[^\s'\"<>?#]{8,}",
    re.IGNORECASE,
)
# words that are common in texts are secrets only in `name=value` and with the value in quotes; `sig=0.5` also occurs
# in folder names
_COMMON_PAIR = re.compile(
    r"((?<![\w-])(?:--?)?(?:x-(?:amz|goog)-(?:signature|credential|security-token)|signature|credentials?|pwd|token"
    rf"|aws\w{{0,20}}key\w{{0,20}}|googleaccessid|(?<=[?&])(?:key|sig|sas|auth|jwt|code(?==[\w%./~+-]{{10}}))|(?:sig|sas)(?==[\w%+-]{{16}}))"
    rf"(?:=(?:{_QUOTE})?|(?:{_QUOTE})?\s{{0,9}}:\s{{0,9}}{_QUOTE}))"
    rf"{_VALUE}",
    re.IGNORECASE,
)
_HEADER = re.compile(
    rf"(\bBearer\s{{1,9}}|\bauthorization(?:{_QUOTE})?\s{{0,9}}[=:]\s{{0,9}}(?:{_QUOTE})?(?:(?:Basic|Token)\s{{1,9}})?)"
    r"(?!Bearer\b|Basic\b|Token\b)[^\s'\",;<>]{6,}",
    re.IGNORECASE,
)
# a command line as an exception shows it: `'--hub_token', 'x'`
_LISTED = r"['\"],\s{0,3}['\"])(?!--)"
_OPTION = re.compile(
    rf"(['\"]--?(?:(?:[A-Za-z0-9][\w-]{{0,40}}[_-])?(?:{_WORDS})|token){_LISTED}{_VALUE}", re.IGNORECASE
)
_TOKEN_OPTION = re.compile(rf"(['\"]{_ANY_TOKEN}{_LISTED}{_MADE}", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(?<=://)(?:[^/\s:@]{0,99}:[^/\s@]{1,999}|[^/\s:@]{16,999})(?=@)")
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|(?:npm|r8|dop_v1|[sr]k_live|[sr]k_test)_[A-Za-z0-9]{16,}|pypi-[\w-]{32,}|sk-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}"
    r"|eyJ[\w-]{8,2000}\.[\w-]{8,2000}\.[\w-]{8,2000})"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?:[^-]{0,9999}-----END [A-Z ]{0,40}PRIVATE KEY-----|[^-]{0,9999})"
)
_VARIABLE = re.compile(r"(?i)(?:^|_)(?:secret|token|password|passwd|credentials?|\w*key|key_id|sas|connection_string)$")
_LEAST_VALUE = 8  # characters of a variable's value; shorter ones may be ordinary words


def mask_text(text: str) -> str:
    """Returns the text with every secret replaced by `MASK`; masking is idempotent.

    Detected are passwords and signatures in URLs, `Bearer ...`, `api_key=...` and similar, the formats of well-known
    tokens, private keys, and the values of environment variables with a secret name.
    """
    return _mask(text, _secret_variables())


def masked(value: object, name: str = "") -> Any:
    """Masks the texts in a nest of mappings, lists and tuples; values of secret names are masked completely."""
    return _masked(value, name, _secret_variables())


def is_secret(name: str, value: str) -> bool:
    """True if a value of this name is a secret."""
    if _SECRET_NAME.search(name) is not None:
        return True
    return _TOKEN_NAME.search(name) is not None and _MADE_VALUE.match(value) is not None


def mask_command(command: Sequence[str]) -> list[str]:
    """Masks the values of secret options (`--hub_token X`, `--api-key=X`) in the words of a command line."""
    words = []
    option = ""  # the word before, where it is an option without a value
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
            last.handle(record)  # the fallback without handlers, which this one would disable
        return True


def has_handlers(name: str) -> bool:
    """True if a logger or one of its parents has a handler that emits records; that of `mask_logs` does not count."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(not isinstance(handler, _MaskingHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _secret_variables() -> list[str]:
    return [
        value
        for name, value in os.environ.items()
        if len(value) >= _LEAST_VALUE and _VARIABLE.search(name) and not os.path.exists(value)
    ]


def _mask(text: str, known: list[str]) -> str:
    for secret in known:
        text = text.replace(secret, MASK)
    text = _FORMS.sub(MASK, text)
    text = _URL_PASSWORD.sub(MASK, text)
    for pattern in (_HOOK, _HEADER, _OPTION, _TOKEN_OPTION, _COMMON_PAIR, _PAIR, _TOKEN_PAIR, _SPACED):
        text = pattern.sub(rf"\1{MASK}", text)
    return text


def _masked(value: object, name: str, known: list[str]) -> Any:
    if isinstance(value, str):
        is_placeholder = not value or (value.startswith("<") and value.endswith(">"))
        return MASK if not is_placeholder and is_secret(name, value) else _mask(value, known)
    if isinstance(value, Mapping):
        return {key: _masked(item, str(key), known) for key, item in value.items()}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_masked(item, name, known) for item in value)
    if isinstance(value, list):
        return [_masked(item, name, known) for item in value]
    return value
