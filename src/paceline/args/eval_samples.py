"""Samples at evaluation: validation of `eval_samples`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.args.errors import UnsupportedOption, did_you_mean, parse_object, wrong_value
from paceline.args.mesh import asked_sizes

if TYPE_CHECKING:
    from paceline.args.sections import Options

SETTINGS = ("num", "seed", "max_new_tokens", "prompt_tokens", "generation", "picture_shape")
MOST = 1000  # rows, which are kept in memory
REMEDY = f"expected a number of rows up to {MOST}, or a dict with some of {', '.join(SETTINGS)}"


def keep_samples(name: str, value: object) -> int | dict[str, Any]:
    """Converts `eval_samples` (a number, JSON or a mapping) to a number of rows or a plain dict; unset: 0.

    Raises:
        ValueError: an unknown setting, or an invalid value.
    """
    if value is None or value is False or value == "":
        return 0
    text = value.strip() if isinstance(value, str) else ""
    if text.isdecimal():
        value = int(text)
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= MOST:
            raise wrong_value(name, value, REMEDY)
        return value
    parsed = parse_object(name, value) if isinstance(value, str) else value
    if not isinstance(parsed, Mapping):
        raise wrong_value(name, value, REMEDY)
    plain = {str(key): setting for key, setting in parsed.items()}
    for key in plain:
        if key not in SETTINGS:
            raise wrong_value(name, value, REMEDY, did_you_mean(key, list(SETTINGS)))
    check_settings(name, plain)
    return plain


def check_settings(name: str, settings: Mapping[str, Any]) -> None:
    """Checks the settings of samples.

    Args:
        name: the option or the callback, for messages.
        settings: values by the names in `SETTINGS`.

    Raises:
        ValueError: a value is invalid.
    """
    for key, least, most in (("num", 1, MOST), ("seed", 0, 2**32 - 1), ("max_new_tokens", 1, 10**6)):
        check_number(name, key, settings.get(key, least), least, most)
    if settings.get("prompt_tokens") is not None:
        check_number(name, "prompt_tokens", settings["prompt_tokens"], 1, 10**6)
    generation = settings.get("generation")
    if generation is not None and not isinstance(generation, Mapping):
        raise wrong_value(f"{name}(generation)", generation, "expected a dict of options of `generate`")
    shape = settings.get("picture_shape")
    if shape is not None:
        is_shape = isinstance(shape, list | tuple) and len(shape) in (2, 3)
        if not is_shape or not all(isinstance(size, int) and size > 0 for size in shape):
            raise wrong_value(
                f"{name}(picture_shape)", shape, "expected (height, width) or (channels, height, width) in pixels"
            )


def check_number(name: str, key: str, value: object, least: int, most: int) -> None:
    """Raises ValueError if a setting is no whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise wrong_value(f"{name}({key})", value, f"expected a whole number from {least} to {most}")


def check_pipeline(options: Options, name: str) -> None:
    """Checks an option that calls the whole model at evaluations.

    Raises:
        UnsupportedOption: the model is split into pipeline stages.
    """
    sizes = asked_sizes(options)
    if sizes is not None and sizes[1].get("pp", 1) != 1:
        raise UnsupportedOption(
            f"{name}={getattr(options, name)!r} with pipeline parallelism is not supported: leave one of them out."
        )
