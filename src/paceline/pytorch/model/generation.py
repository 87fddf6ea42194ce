"""Generation in evaluation: validates settings early, selects the inputs of `generate`, and pads its rows."""

from __future__ import annotations

import copy
import difflib
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption, did_you_mean, wrong_value
from paceline.core.optional import require
from paceline.pytorch.model.objective import accepts
from paceline.pytorch.model.signature import innermost

logger = logging.getLogger(__name__)

CONFIG_FILE = "generation_config.json"
LENGTHS = ("max_length", "max_new_tokens")  # two forms of one setting
DEFAULT_LENGTH = 20  # tokens, if no setting names a length; the documented default of transformers
# minimum values of integer options, because generation itself detects wrong values late
LEAST = {
    "max_length": 1,
    "max_new_tokens": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "min_length": 0,
    "min_new_tokens": 0,
}


# ---- settings


def find_generator(model: nn.Module) -> Any:
    """Returns the module whose `generate` is called: the model, or the model that it wraps.

    Raises:
        UnsupportedOption: neither can generate.
    """
    for module in (model, innermost(model)):
        can_generate = getattr(module, "can_generate", None)
        if callable(getattr(module, "generate", None)) and (not callable(can_generate) or can_generate()):
            return module
    raise UnsupportedOption(
        f"predict_with_generate=True: {type(innermost(model)).__name__} cannot generate; give a model with a method "
        "`generate` (of transformers: one made by AutoModelForSeq2SeqLM), or set predict_with_generate=False."
    )


def load_config(value: Any) -> Any:
    """Returns a `GenerationConfig` of transformers from any of its forms, validated as strictly as saving does.

    Args:
        value: a `GenerationConfig` (copied), a dict of options, the path of a folder or file, or a model's name.

    Raises:
        OSError: there is no such file or model.
        ValueError: an option is misspelt, or its value is invalid.
    """
    config_class = require("transformers", "transformers").GenerationConfig
    if isinstance(value, Mapping):
        return config_of(value)
    with naming_the_option(value):
        is_config = isinstance(value, config_class)
        config = copy.deepcopy(value) if is_config else load_from_place(config_class, value)
        check_config(config, strict=True)
    return config


def config_of(options: Mapping[str, Any], base: Any = None) -> Any:
    """Returns a `GenerationConfig` of options over those of `base` (None: the defaults), checked like `load_config`."""
    config_class = require("transformers", "transformers").GenerationConfig
    with naming_the_option(options):
        check_names(options, [*vars(config_class()), *vars(base or config_class())])
        config = config_class.from_dict({**(base.to_dict() if base is not None else {}), **options})
        check_config(config, strict=True)
    return config


@contextmanager
def naming_the_option(value: object) -> Iterator[None]:
    """Converts errors to a ValueError that names the option with the generation settings."""
    try:
        yield
    except (ValueError, TypeError) as error:
        shown = value if isinstance(value, str | os.PathLike) else type(value).__name__
        raise ValueError(f"generation_config ({shown}) cannot be used: {error}") from error


def check_names(values: Iterable[str], known: Iterable[str]) -> None:
    """Checks the names of generation options.

    Some models have options of their own (such as a language), so other unknown names only cause a warning.

    Raises:
        ValueError: a name is a misspelling of a known name.
    """
    known = set(known)
    for name in values:
        if name in known or name == "transformers_version" or name.startswith("_"):
            continue
        if difflib.get_close_matches(name, known, n=1, cutoff=0.7):
            raise ValueError(f"there is no option {name!r}{did_you_mean(name, known)}")
        logger.warning("generation_config has %r, which is read only by a model that knows it.", name)


def load_from_place(config_class: Any, place: str | os.PathLike[str]) -> Any:
    """Returns the generation config in a folder or file, else that of the model of this name."""
    text = os.fspath(place)
    path = Path(text).expanduser()
    if path.is_file():
        return config_class.from_pretrained(str(path.parent), path.name)
    is_path = path.is_dir() or isinstance(place, os.PathLike) or text.startswith((".", "/", "~"))
    if is_path and not (path / CONFIG_FILE).is_file():
        raise FileNotFoundError(
            f"generation_config={text!r}: there is no such file, or no {CONFIG_FILE} in that folder."
        )
    try:
        return config_class.from_pretrained(str(path) if is_path else text)
    except OSError as error:
        raise OSError(
            f"generation_config={text!r} is no file or folder here, and no model of that name was found: {error}"
        ) from error


def read_settings(value: object) -> dict[str, Any]:
    """Returns the options in a generation config as keyword arguments for a `generate` without a config.

    Raises:
        OSError: there is no such file.
        ValueError: the file does not contain a JSON object.
    """
    if isinstance(value, str | os.PathLike):
        path = Path(value).expanduser()
        path = path / CONFIG_FILE if path.is_dir() else path
        value = json.loads(path.read_text(encoding="utf-8"))
    elif hasattr(value, "to_diff_dict"):
        value = value.to_diff_dict()
    if not isinstance(value, Mapping):
        raise wrong_value("generation_config", value, "expected a dict, or the path of a JSON file with an object")
    return {name: item for name, item in value.items() if name != "transformers_version" and not name.startswith("_")}


def apply_config(model: nn.Module, value: object, load: Callable[[Any], Any] = load_config) -> dict[str, Any]:
    """Sets a model's generation settings.

    A model of transformers stores the settings, and they are saved with it. The options of a dict override the model's
    own options, such as the decoder's start token; every other form replaces all of them.

    Args:
        model: a model of transformers, or any model with a method `generate`.
        value: the option `generation_config`.
        load: makes a config from every form but a dict.

    Returns:
        Keyword arguments for each call of `generate`; empty for a model of transformers.

    Raises:
        UnsupportedOption: the model cannot generate.
        ValueError, OSError: see `load_config`.
    """
    if value is None:
        return {}
    if hasattr(model, "generation_config"):
        own = innermost(model).generation_config
        config = load(config_of(value, own) if isinstance(value, Mapping) else value)
        for holder in (model, innermost(model)):  # an adapter's wrapper has its own reference to the config
            holder.generation_config = config
        return {}
    if not callable(getattr(model, "generate", None)):
        raise UnsupportedOption(
            f"generation_config is set, and {type(innermost(model)).__name__} cannot generate: leave it out."
        )
    return read_settings(value)


def check_config(config: Any, settings: Mapping[str, Any] | None = None, strict: bool = False) -> None:
    """Checks that generation accepts a config with overriding settings.

    Args:
        config: a `GenerationConfig`; not modified.
        settings: options that override it in `generate`.
        strict: also raise an error where generation only warns, as saving does.

    Raises:
        ValueError: generation does not accept it.
    """
    trial = copy.deepcopy(config)
    for name, value in (settings or {}).items():
        setattr(trial, name, value)
    for name, least in LEAST.items():
        value = getattr(trial, name, None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise wrong_value(name, value, f"expected a whole number of at least {least}")
    trial.validate(strict=strict)


def check_generation(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Checks that a model can generate with these settings, as far as possible before the first batch.

    Raises:
        UnsupportedOption: the model cannot generate, or its `generate` does not take these settings.
        ValueError: the generation config with these settings is invalid.
    """
    generator = find_generator(model)
    config = getattr(generator, "generation_config", None)
    if hasattr(config, "validate"):
        try:
            check_config(config, settings)
        except ValueError as error:
            raise ValueError(f"The model's generation config cannot be used: {error}") from error
        return
    for name in settings:
        if not accepts(generator.generate, name):
            raise UnsupportedOption(
                f"{type(generator).__name__}.generate has no parameter {name!r}: leave out generation_{name}, or the "
                f"{name} of generation_config."
            )


def check_start(model: nn.Module) -> None:
    """Checks that an encoder-decoder of transformers has a start token for its decoder.

    Raises:
        ValueError: it has none.
    """
    generator = find_generator(model)
    config = getattr(generator, "generation_config", None)
    if config is None or not getattr(getattr(generator, "config", None), "is_encoder_decoder", False):
        return
    if getattr(config, "decoder_start_token_id", None) is None and getattr(config, "bos_token_id", None) is None:
        raise ValueError(
            "The generation config has neither decoder_start_token_id nor bos_token_id, and the decoder cannot start: "
            "set one of them in it, or give generation_config as a dict, whose options go over the model's own."
        )


def check_saving(model: nn.Module) -> None:
    """Checks that transformers will save the model's generation config, which must be valid if it was changed.

    Raises:
        ValueError: transformers would refuse to save it.
    """
    config: Any = getattr(innermost(model), "generation_config", None)
    if hasattr(config, "validate") and getattr(config, "_original_object_hash", None) != hash(config):
        try:
            config.validate(strict=True)
        except ValueError as error:
            raise ValueError(f"The model's generation config cannot be saved in a checkpoint: {error}") from error


# ---- one batch


def go_on_together(model: nn.Module, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings for processes that shard one model: all of them generate until the longest text ends."""
    together = {"synced_gpus": True} if accepts(find_generator(model).generate, "synced_gpus") else {}
    return {**together, **settings}


def call_generate(model: nn.Module, inputs: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """Returns the result of `model.generate` for a batch.

    Args:
        model: a model with `generate`, or a wrapper of one.
        inputs: the batch without labels; entries that `generate` does not take are dropped.
        settings: other keyword arguments of `generate`.

    Raises:
        TypeError: `generate` cannot be called with these arguments.
    """
    generator = find_generator(model)
    signature = inspect.signature(generator.generate)
    takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    taken = {name: value for name, value in inputs.items() if takes_all or name in signature.parameters}
    try:
        signature.bind(**{**taken, **settings})
    except TypeError as error:
        raise TypeError(
            f"{type(generator).__name__}.generate{signature} cannot be called with a batch of {', '.join(inputs)} and "
            f"the options {', '.join(settings) or 'none'}: {error}. Give the dataset's columns the names of its "
            "parameters, or override Trainer.prediction_step."
        ) from error
    return generator.generate(**{**taken, **settings})


def select_inputs(inputs: Mapping[str, Any], label_names: Iterable[str]) -> dict[str, Any]:
    """Returns a batch for `generate`, without labels and without decoder inputs that were made from them.

    With the shifted labels as its prompt, the decoder would continue after the answer. Decoder inputs of another shape
    are a real prompt, and are kept.
    """
    names = set(label_names)
    shapes = [getattr(inputs.get(name), "shape", None) for name in names]
    decoder_ids = inputs.get("decoder_input_ids")
    if decoder_ids is not None and decoder_ids.shape in shapes:
        names |= {"decoder_input_ids", "decoder_attention_mask"}
    return {name: value for name, value in inputs.items() if name not in names}


def read_rows(generated: object, num_samples: int) -> Any:
    """Returns the token ids from `generate`: (samples, length), or (samples, sequences, length) for several each."""
    rows = getattr(generated, "sequences", generated)
    if not isinstance(rows, Tensor) or rows.ndim != 2 or num_samples == 0 or len(rows) == num_samples:
        return rows
    return rows.view(num_samples, -1, rows.shape[-1]) if len(rows) % num_samples == 0 else rows


def with_one_length(model: nn.Module, base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with those of a call in place of the base settings.

    A length replaces those that come after it, in whichever of the two forms they are: given both, generation takes
    `max_new_tokens`. The order is: the settings of the call, a `generation_config` among them, the base settings, the
    model's config.

    Args:
        model: the model.
        base: settings for each call.
        given: the settings of a call.
    """
    config = getattr(find_generator(model), "generation_config", None)
    sources = [vars_of(source) for source in (given, given.get("generation_config"), base, config)]
    lengths = [[name for name in LENGTHS if source.get(name)] for source in sources]
    in_call = lengths[0] or lengths[1]
    settings = {**{name: value for name, value in base.items() if not in_call or name not in LENGTHS}, **given}
    if config is not None and in_call == ["max_length"] and any("max_new_tokens" in names for names in lengths):
        settings["max_new_tokens"] = None
    return settings


def with_default_length(model: nn.Module, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings; an encoder-decoder of transformers gets the default length if no setting names a length.

    Without it, transformers generates one token more than its documented default.
    """
    generator = find_generator(model)
    config = getattr(generator, "generation_config", None)
    is_encoder_decoder = getattr(getattr(generator, "config", None), "is_encoder_decoder", False)
    sources = [config, settings.get("generation_config"), settings]
    if config is None or not is_encoder_decoder or any(lengths_of(source) for source in sources):
        return dict(settings)
    return {**settings, "max_length": DEFAULT_LENGTH}


def vars_of(source: object) -> Mapping[str, Any]:
    """Returns the settings in a config or a dict; none of None."""
    return source if isinstance(source, Mapping) else getattr(source, "__dict__", {})


def lengths_of(source: object) -> list[int]:
    """Returns the row lengths in tokens, including the start token, that a config or a dict of settings names."""
    values = vars_of(source)
    longest, new = values.get("max_length"), values.get("max_new_tokens")
    return [length for length in (longest, new and new + 1) if length]


def padded_length(model: nn.Module, settings: Mapping[str, Any]) -> int:
    """Returns the padded row length in tokens: the longest in the settings and the model's config, or 0."""
    config = getattr(find_generator(model), "generation_config", None)
    own = lengths_of(config)
    if config is not None and getattr(config, "max_length", None) is None:
        own.append(DEFAULT_LENGTH)  # keeps the width of transformers, on which scripts may rely
    return max([*own, *lengths_of(settings.get("generation_config")), *lengths_of(settings)], default=0)


def find_pad_token(processing_class: object, model: nn.Module) -> int | None:
    """Returns the token that pads short rows: the tokenizer's padding or end token, else the model's, else None."""
    generator = find_generator(model)
    config, generation = getattr(generator, "config", None), getattr(generator, "generation_config", None)
    inner = getattr(processing_class, "tokenizer", None)  # the tokenizer of a processor
    places = [
        (processing_class, "pad_token_id"),
        (processing_class, "eos_token_id"),
        (config, "pad_token_id"),
        (generation, "pad_token_id"),
        (inner, "pad_token_id"),
        (generation, "eos_token_id"),
        (inner, "eos_token_id"),
    ]
    for owner, name in places:
        token = getattr(owner, name, None)
        token = token[0] if isinstance(token, list | tuple) and token else token
        if isinstance(token, int):
            return token
    return None


def pad_rows(rows: object, length: int, token: int | None) -> Any:
    """Pads rows of token ids (..., length) on the right; unchanged without a padding token."""
    if token is None or not isinstance(rows, Tensor) or rows.ndim < 2 or rows.is_floating_point():
        return rows
    missing = length - rows.shape[-1]
    return nn.functional.pad(rows, (0, missing), value=token) if missing > 0 else rows
