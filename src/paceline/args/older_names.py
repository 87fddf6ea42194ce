"""Tables of renamed and retired options."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.args.coercion import to_bool, to_float, to_list, to_str
from paceline.args.errors import UnsupportedOption, wrong_value
from paceline.args.secrets import masked

logger = logging.getLogger(__name__)


def same(value: object) -> Any:
    """Returns the value unchanged."""
    return value


@dataclass(frozen=True)
class Renamed:
    """A renamed option.

    Attributes:
        new: the current option.
        convert: converts an old value to a new one; None if the old value has no effect.
        read: converts a new value to an old one, for code that reads the old attribute.
        defaults_then: values of the new option that counted as "not set" when the old name was in use.
        is_overruled: an explicit value of the new option overrides the old one without an error (as in the release
            that renamed it).
        merge: merges the old option's value with an explicit new one.
    """

    new: str
    convert: Callable[[Any], Any] = same
    read: Callable[[Any], Any] = same
    defaults_then: tuple[Any, ...] = ()
    is_overruled: bool = False
    merge: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True)
class Retired:
    """A retired option.

    Attributes:
        remedy: the replacement.
        accepted: values without an effect, which are accepted silently.
        unset: the value of the attribute if the option was not given, for scripts that read it.
        expected: what a True value is often expected to do, and what is done instead; logged. Empty: nothing is said.
    """

    remedy: str
    accepted: tuple[Any, ...]
    unset: Any
    expected: str = ""


def ratio_to_steps(value: object) -> float | None:
    """Converts a ratio of all optimizer steps to `warmup_steps`. 1.0 becomes slightly less: 1 would mean one step."""
    ratio = to_float("warmup_ratio", value)
    if not 0 <= ratio <= 1:
        raise wrong_value("warmup_ratio", value, "expected a ratio of all steps, from 0 to 1; or use warmup_steps")
    return min(ratio, math.nextafter(1.0, 0.0)) or None


def when_true(name: str, new_value: object) -> Callable[[Any], Any]:
    """Returns a converter for a boolean option that is now one value of another option."""
    return lambda value: new_value if value is not None and to_bool(name, value) else None


def add_inputs(old: list[str], given: object) -> list[str]:
    """Adds `inputs` to include_for_metrics."""
    asked = [] if given is None else to_list("include_for_metrics", given)
    return [*asked, *(item for item in old if item not in asked)]


def add_diagnosis(old: str, given: object) -> str:
    """Adds a diagnostic to debug."""
    asked = [str(word) for word in given] if isinstance(given, list | tuple) else [given or ""]
    return " ".join([*asked, old])


def one_setting(name: str) -> Callable[[Any], Any]:
    """Returns a converter for an option that is now one key of a dict."""
    return lambda value: None if value is None else {name: value}


def join_settings(old: dict[str, Any], given: object) -> Any:
    """Merges settings under their older names into a dict of settings."""
    given = given.to_dict() if hasattr(given, "to_dict") else given
    return {**given, **old} if isinstance(given, dict) else old


OLDER_NAMES: Mapping[str, Renamed | Retired] = {
    # Renamed.
    "_n_gpu": Retired("paceline drives one device per process; start one process per device", (-1, 0, 1), -1),
    "adafactor": Renamed(
        "optim",
        when_true("adafactor", "adafactor"),
        lambda optim: optim == "adafactor",
        ("adamw_hf", "adamw_torch", "adamw_torch_fused"),
    ),
    "dispatch_batches": Renamed(
        "accelerator_config",
        one_setting("dispatch_batches"),
        lambda config: config.dispatch_batches,
        (),
        False,
        join_settings,
    ),
    "evaluate_during_training": Renamed(
        "eval_strategy", when_true("evaluate_during_training", "steps"), lambda strategy: strategy == "steps", ("no",)
    ),
    "evaluation_strategy": Renamed("eval_strategy", defaults_then=("no",)),
    "fp16_backend": Renamed("half_precision_backend", lambda value: None if value == "auto" else value),
    "group_by_length": Renamed(
        "train_sampling_strategy",
        when_true("group_by_length", "group_by_length"),
        lambda strategy: strategy == "group_by_length",
    ),
    "include_inputs_for_metrics": Renamed(
        "include_for_metrics",
        when_true("include_inputs_for_metrics", ["inputs"]),
        lambda names: "inputs" in names,
        merge=add_inputs,
    ),
    "include_tokens_per_second": Renamed(
        "include_num_input_tokens_seen",
        when_true("include_tokens_per_second", "all"),
        lambda count: count != "no",
        is_overruled=True,
    ),
    "label_smoothing": Renamed("label_smoothing_factor"),
    "no_cuda": Renamed("use_cpu", when_true("no_cuda", True)),
    "per_gpu_eval_batch_size": Renamed("per_device_eval_batch_size"),
    "per_gpu_train_batch_size": Renamed("per_device_train_batch_size"),
    "push_to_hub_model_id": Renamed("hub_model_id"),
    "push_to_hub_token": Renamed("hub_token", lambda value: None if value in (None, "<PUSH_TO_HUB_TOKEN>") else value),
    "split_batches": Renamed(
        "accelerator_config",
        one_setting("split_batches"),
        lambda config: config.split_batches,
        (),
        False,
        join_settings,
    ),
    "tpu_metrics_debug": Renamed(
        "debug",
        when_true("tpu_metrics_debug", "tpu_metrics_debug"),
        lambda words: "tpu_metrics_debug" in words,
        merge=add_diagnosis,
    ),
    "torchdynamo": Renamed("torch_compile_backend"),
    "warmup_ratio": Renamed(
        "warmup_steps",
        lambda value: None if value is None else ratio_to_steps(value),
        lambda steps: steps if steps < 1 else 0.0,
        is_overruled=True,
    ),
    "xpu_backend": Renamed("ddp_backend"),
    # Retired.
    "fsdp_min_num_params": Retired("set fsdp_config={'min_num_params': ...}", (None, 0), 0),
    "fsdp_transformer_layer_cls_to_wrap": Retired(
        "set fsdp_config={'transformer_layer_cls_to_wrap': [...]}",
        (None, ""),
        None,
    ),
    "jit_mode_eval": Retired("set torch_compile=True", (None, False), False),
    "mp_parameters": Retired("SageMaker's model parallelism is not supported; use torchrun", (None, ""), ""),
    "overwrite_output_dir": Retired(
        "leave it out",
        (None, False, True),
        False,
        "no file is deleted, and a Trainer starts over unless resume_from_checkpoint is given; a TFTrainer "
        "resumes unless resume_from_checkpoint=False, and paceline train unless --fresh is given",
    ),
    "past_index": Retired("keep such a state in the model's forward", (None, -1), -1),
    "push_to_hub_organization": Retired("set hub_model_id='organization/name'", (None, ""), None),
    "ray_scope": Retired(
        "leave it out, and set the environment variable RAY_SCOPE for hyperparameter_search", (None, "last"), "last"
    ),
    "save_safetensors": Retired(
        "weights are always written as safetensors; for another file call torch.save(model.state_dict(), path)",
        (None, True),
        True,
    ),
    "sharded_ddp": Retired("set fsdp", (None, "", [], False), ""),
    "use_ipex": Retired("set torch_compile=True", (None, False), False),
    "use_legacy_prediction_loop": Retired("leave it out; there is one prediction loop", (None, False), False),
    "use_mps_device": Retired(
        "the device is found without it; set use_cpu=True to stay on the CPU",
        (None, False, True),
        False,
    ),
}


def translate(given: dict[str, Any], known: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Returns the keyword arguments `given` under their current names.

    Args:
        given: keyword arguments as the caller wrote them.
        known: the fields of the class with their defaults. A class with a field under an older name keeps it.
        owner: name of the class, for messages.

    Raises:
        ValueError: an option is given under both names, with different values.
    """
    result = {name: value for name, value in given.items() if name in known or name not in OLDER_NAMES}
    for name, value in given.items():
        if name in result:
            continue
        entry = OLDER_NAMES[name]
        if isinstance(entry, Retired):
            continue  # see `retired_values`
        new_value = None if value is None else entry.convert(value)
        if new_value is None:
            continue
        logger.warning("%s(%s=%r) is now %s=%r", owner, name, masked(value, name), entry.new, masked(new_value, name))
        result[entry.new] = settle(name, new_value, entry, result, known)
    return result


def act_on_fields(
    values: Mapping[str, Any],
    known: Mapping[str, Any],
    owner: str,
    given: Collection[str] = (),
    is_copy: bool = False,
) -> dict[str, Any]:
    """Returns the changes that a class's own fields under older names cause, by present option name.

    Args:
        values: the values of all fields.
        known: all fields, with their defaults.
        owner: name of the class, for messages.
        given: names of the options that the caller wrote.
        is_copy: the values are those of another object but for `given`: what they warn of has been said.

    Raises:
        ValueError: an option was given under both names, with different values.
    """
    found = dict(values)
    for name in OLDER_NAMES.keys() & known.keys():
        entry, value = OLDER_NAMES[name], values[name]
        if isinstance(entry, Retired):
            if not is_copy or name in given:
                tell_of_retired(name, value, entry, owner)
            continue
        new_value = None if value is None else entry.convert(value)
        if new_value is None:
            continue
        is_changed = value == known[name] and found[entry.new] != known[entry.new]
        if not is_changed and (name in given or entry.new not in given):  # else the caller set the current option
            found[entry.new] = settle(name, new_value, entry, found, known)
    return {name: value for name, value in found.items() if value is not values[name]}


def tell_of_retired(name: str, value: object, entry: Retired, owner: str) -> None:
    """Warns if a class's own field under the name of a retired option has a value with an effect."""
    try:
        check_retired(name, value, entry)
    except UnsupportedOption as error:
        logger.warning("%s has its own field %s: only its own code acts on it. %s", owner, name, error)


def check_retired(name: str, value: object, entry: Retired) -> Any:
    """Accepts a retired option whose value has no effect. Returns that value in its own type.

    Raises:
        UnsupportedOption: the value has an effect.
    """
    # As text, because a command line passes text.
    for accepted in entry.accepted:
        if str(accepted).lower() == str(value).lower():
            return accepted
    raise UnsupportedOption(f"{name}={value!r} is not supported any more: {entry.remedy}.")


def retired_values(given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the retired options among the keyword arguments `given`, for scripts that read them back.

    Args:
        given: keyword arguments as the caller wrote them.
        known: names of the class's own fields.

    Raises:
        UnsupportedOption: one of them has a value with an effect.
    """
    values = {}
    for name, value in given.items():
        entry = OLDER_NAMES.get(name)
        if isinstance(entry, Retired) and name not in known:
            taken = check_retired(name, value, entry)
            if taken is True and entry.expected:
                logger.warning("%s=True has no effect: %s.", name, entry.expected)
            values[name] = entry.unset if taken is None else taken
    return values


def settle(name: str, new_value: object, entry: Renamed, result: dict[str, Any], known: Mapping[str, Any]) -> Any:
    """Returns the value of the new option from the old one, or from both."""
    if entry.new not in result:
        return new_value
    given = result[entry.new]
    if entry.merge is not None:
        return entry.merge(new_value, given)
    is_unset = given in (None, known.get(entry.new), *entry.defaults_then)
    if is_unset or to_text(given) == to_text(new_value):
        return new_value
    if entry.is_overruled:
        logger.info("%s is overridden by %s=%r", name, entry.new, given)
        return given
    raise ValueError(f"{name}={new_value!r} and {entry.new}={given!r} are the same option: give {entry.new} only.")


def to_text(value: object) -> str:
    """Converts a value from a script or a command line to text for comparison."""
    return to_str("value", value) if isinstance(value, str) else str(value)
