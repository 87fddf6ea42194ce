"""Sharding of a model: validation of `fsdp` and `fsdp_config` under the names of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.args.errors import UnsupportedOption
from paceline.args.option_files import parse_json, read_mapping
from paceline.args.shard_precision import NAME as PRECISION
from paceline.args.shard_precision import ShardPrecision, check_policy_fits, read_policy

WORDS = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap")
WITHOUT_SHARDS = "is not supported: set parallel='ddp', and leave fsdp out."
# settings of FSDP 1 or accelerate's plugin that fully_shard does not have -> (the fixed value, remedy)
GONE: dict[str, tuple[str, str]] = {
    "activation_checkpointing": ("false", "set activation_checkpointing=True in addition to fsdp"),
    "activation_checkpointing_offload": ("false", "set activation_checkpointing=True in addition to fsdp"),
    "backward_prefetch": ("backward_pre", "fully_shard prefetches the next unit by itself"),
    "forward_prefetch": ("false", "fully_shard prefetches by itself"),
    "limit_all_gathers": ("true", "fully_shard always does"),
    "use_orig_params": ("true", "fully_shard always does"),
    "ignored_modules": ("none", "every module is sharded"),
    "xla_fsdp_settings": ("none", "they belong to XLA's first FSDP; the second (xla_fsdp_v2) is used"),
}
KNOWN = {
    "version", "reshard_after_forward", "sharding_strategy", "offload_params", "cpu_offload", "replicate",
    "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "state_dict_type",
    PRECISION,
}  # fmt: skip
# wrap policy -> (its setting, True if required)
POLICIES: dict[str, tuple[str, bool]] = {
    "TRANSFORMER_BASED_WRAP": ("transformer_layer_cls_to_wrap", False),
    "SIZE_BASED_WRAP": ("min_num_params", True),
    "NO_WRAP": ("", False),
}
# FSDP 1's strategies, also by number -> (reshard after forward, a single replica)
STRATEGIES: dict[str, tuple[bool, bool]] = {
    "FULL_SHARD": (True, True), "1": (True, True), "SHARD_GRAD_OP": (False, True), "2": (False, True),
    "HYBRID_SHARD": (True, False), "4": (True, False), "HYBRID_SHARD_ZERO2": (False, False), "5": (False, False),
}  # fmt: skip

# settings of XLA's partitioner, as in transformers; the second and third require the first
XLA = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt")
# settings that XLA's partitioner determines itself
NOT_XLA = ("reshard_after_forward", "sharding_strategy", "offload_params", "cpu_offload", "replicate", PRECISION)
FROM_FIRST = ("cpu_ram_efficient_loading", "sync_module_states")  # either one broadcasts the values of rank 0


FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


@dataclass(frozen=True)
class Sharding:
    """The resolved `fsdp` and `fsdp_config`.

    Attributes:
        reshard: parameters are freed after the forward pass and gathered again for the backward pass.
        offload: parameters, gradients and optimizer state are kept in host memory.
        replicas: number of process groups that each hold the sharded model; 0 for one group per machine.
        layer_classes: class names of the layers that become units.
        least_parameters: minimum number of parameters of modules that become units; 0 disables this criterion.
        is_whole: the model is a single unit.
        is_xla: the model is sharded over the XLA devices of one process, by XLA's partitioner.
        checkpoints_units: with XLA, activations of the units are recomputed in the backward pass.
        from_first: rank 0 broadcasts its values; other ranks need not have loaded any.
        precision: dtypes of gathered parameters, reduced gradients and outputs; None for the parameters' dtypes.
    """

    reshard: bool = True
    offload: bool = False
    replicas: int = 1
    layer_classes: tuple[str, ...] = ()
    least_parameters: int = 0
    is_whole: bool = False
    is_xla: bool = False
    checkpoints_units: bool = False
    from_first: bool = False
    precision: ShardPrecision | None = None


def is_xla_asked(parallel: object, fsdp: object, config: object) -> bool:
    """True if these values of `parallel`, `fsdp` and `fsdp_config` request XLA devices."""
    return parallel == "xla" or (bool(config) and is_true(strip(read_config(config)), "xla"))


def strip(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of `fsdp_config` without the prefix `fsdp_` of their names."""
    return {str(key).removeprefix("fsdp_"): value for key, value in settings.items()}


def is_asked(fsdp: object) -> bool:
    """True if a value of `fsdp` enables sharding."""
    return bool(fsdp) and str(fsdp).lower() not in ("false", "no", "none", "[]")


def read_sharding(fsdp: object, config: object) -> Sharding:
    """Resolves the options.

    Args:
        fsdp: True, or words separated by spaces.
        config: a mapping, JSON, or the path of a JSON file; keys with or without the prefix `fsdp_`.

    Raises:
        ValueError: an unknown word or key, or two that contradict each other.
        UnsupportedOption: a setting that fully_shard does not have.
    """
    words = [] if fsdp is True or not is_asked(fsdp) else [str(word).lower() for word in split_words(fsdp)]
    if "no_shard" in words:
        raise UnsupportedOption(f"fsdp={fsdp!r} {WITHOUT_SHARDS}")
    unknown = [word for word in words if word not in (*WORDS, "true")]
    if unknown:
        raise ValueError(f"fsdp={fsdp!r}: {unknown[0]!r} is unknown; use True, or words of {', '.join(WORDS)}.")
    settings = strip(read_config(config))
    check_names(settings)
    check_values(settings)
    check_xla(settings, words)
    reshard, is_hybrid = read_strategy(settings, words)
    classes = settings.get("transformer_layer_cls_to_wrap") or ()
    names = classes.split(",") if isinstance(classes, str) else [str(name) for name in classes]
    return Sharding(
        reshard=reshard,
        offload="offload" in words or is_true(settings, "offload_params") or is_true(settings, "cpu_offload"),
        replicas=int(settings.get("replicate", 0 if is_hybrid else 1)),
        layer_classes=tuple(name.strip() for name in names if name.strip()),
        least_parameters=int(settings.get("min_num_params") or 0),
        is_whole=str(settings.get("auto_wrap_policy")).upper() == "NO_WRAP",
        is_xla=is_true(settings, "xla"),
        checkpoints_units=is_true(settings, "xla_fsdp_grad_ckpt"),
        from_first=any(is_true(settings, name) for name in FROM_FIRST),
        precision=read_policy(settings.get(PRECISION)),
    )


def shard_precision_of(options: Any) -> ShardPrecision | None:
    """Returns the dtypes of `fsdp_config` after a check against the precision options.

    Raises:
        ValueError: they contradict each other.
    """
    if not options.fsdp_config:
        return None
    value = strip(read_config(options.fsdp_config)).get(PRECISION)
    policy = read_policy(value)
    check_policy_fits(policy, value, options)
    return policy


def read_strategy(settings: Mapping[str, Any], words: Sequence[str]) -> tuple[bool, bool]:
    """Returns (parameters are resharded after the forward pass, each machine holds a replica).

    Raises:
        ValueError: an unknown strategy, or two that contradict each other.
        UnsupportedOption: the strategy is one without sharding.
    """
    said: dict[str, bool] = {}
    hybrid = [f"fsdp={word!r}" for word in words if word.startswith("hybrid")]
    for word in words:
        if word.upper() in STRATEGIES and settings.get("reshard_after_forward") in (None, ""):
            said[f"fsdp={word!r}"] = STRATEGIES[word.upper()][0]
    for name in ("sharding_strategy", "reshard_after_forward"):
        value = settings.get(name)
        text, shown = str(value).upper(), f"fsdp_config[{name!r}]={value!r}"
        if value is None or value == "":
            continue
        if text in ("NO_SHARD", "3") and name == "sharding_strategy":
            raise UnsupportedOption(f"{shown} {WITHOUT_SHARDS}")
        if text in STRATEGIES and (name == "sharding_strategy" or not text.isdigit()):
            said[shown], is_one = STRATEGIES[text]
            hybrid += [] if is_one else [shown]
        elif name == "sharding_strategy":
            choices = ", ".join(key for key in STRATEGIES if not key.isdigit())
            raise ValueError(f"{shown} is invalid: expected one of {choices}.")
        else:
            said[shown] = is_true(settings, name)
    if len(set(said.values())) > 1:
        raise ValueError(f"{' and '.join(said)} contradict each other: keep one.")
    return all(said.values()), bool(hybrid)


def check_names(settings: Mapping[str, Any]) -> None:
    """Refuses unknown settings, and values that fully_shard does not support.

    Raises:
        ValueError: an unknown setting.
        UnsupportedOption: a value other than the fixed one.
    """
    for name, value in settings.items():
        if name not in {*KNOWN, *FROM_FIRST, *XLA, *GONE}:
            known = ", ".join(sorted({*KNOWN, *FROM_FIRST, *XLA}))
            raise ValueError(f"fsdp_config has no setting {name!r}: use {known}.")
        is_happening = name not in GONE or value in (None, "", {}) or read_word(value) == GONE[name][0]
        if not is_happening and not (value is False and GONE[name][0] == "none"):
            raise UnsupportedOption(f"fsdp_config[{name!r}]={value!r} is not supported: {GONE[name][1]}; leave it out.")


def read_word(value: object) -> str:
    """Converts a value to a word in lower case; numbers and words for on or off become "true" or "false"."""
    text = str(value).lower()
    return {"1": "true", "yes": "true", "0": "false", "no": "false"}.get(text, text)


def is_true(settings: Mapping[str, Any], name: str) -> bool:
    """Reads a boolean setting, given as a bool or as text.

    Raises:
        ValueError: it is neither true nor false.
    """
    text = read_word(settings.get(name) or False)
    if text not in ("true", "false"):
        raise ValueError(f"fsdp_config[{name!r}]={settings[name]!r} is invalid: expected True or False.")
    return text == "true"


def check_values(settings: Mapping[str, Any]) -> None:
    """Refuses unsupported values, and pairs that contradict each other."""
    if str(settings.get("version", 2)) != "2":
        version = settings["version"]
        raise UnsupportedOption(f"fsdp_config['version']={version!r} is not supported: use 2, or leave it out.")
    if str(settings.get("state_dict_type") or FULL) not in (FULL, SHARDED):
        raise UnsupportedOption(
            f"fsdp_config['state_dict_type']={settings['state_dict_type']!r} is not supported: such files fit the "
            f"number of processes that wrote them and no other; use {SHARDED!r}, or leave it out."
        )
    check_policy(settings)
    if settings.get("transformer_layer_cls_to_wrap") and settings.get("min_num_params"):
        raise ValueError(
            "fsdp_config: transformer_layer_cls_to_wrap and min_num_params are two ways to choose the units: keep one."
        )
    is_told_not = settings.get("sync_module_states") is not None and not is_true(settings, "sync_module_states")
    if is_true(settings, "cpu_ram_efficient_loading") and is_told_not:
        raise ValueError(
            "fsdp_config['cpu_ram_efficient_loading']=True contradicts fsdp_config['sync_module_states']="
            f"{settings['sync_module_states']!r}: a model that only rank 0 loads must be broadcast to the others. "
            "Leave sync_module_states out."
        )


def check_policy(settings: Mapping[str, Any]) -> None:
    """Refuses a wrap policy that is unknown, lacks its setting, or comes with the setting of another one.

    Raises:
        ValueError: the policy is one of these.
    """
    policy = settings.get("auto_wrap_policy")
    if policy in (None, ""):
        return
    shown = f"fsdp_config['auto_wrap_policy']={policy!r}"
    if str(policy).upper() not in POLICIES:
        raise ValueError(f"{shown} is invalid: expected one of {', '.join(POLICIES)}.")
    own, is_needed = POLICIES[str(policy).upper()]
    if is_needed and not settings.get(own):
        raise ValueError(f"{shown} needs fsdp_config[{own!r}]: give it, or another policy.")
    for name in ("transformer_layer_cls_to_wrap", "min_num_params"):
        if name != own and settings.get(name):
            raise ValueError(
                f"{shown} and fsdp_config[{name!r}]={settings[name]!r} contradict each other: keep one of them."
            )


def check_xla(settings: Mapping[str, Any], words: Sequence[str]) -> None:
    """Refuses inconsistent XLA settings, and settings that XLA's partitioner does not support."""
    if not is_true(settings, "xla"):
        for name in XLA[1:]:
            if is_true(settings, name):
                raise ValueError(
                    f"fsdp_config[{name!r}]={settings[name]!r} is read with XLA only: set fsdp_config['xla']=True "
                    "too, or leave it out."
                )
        return
    if not is_true(settings, "xla_fsdp_v2"):
        raise UnsupportedOption(
            "fsdp_config['xla']=True without 'xla_fsdp_v2' is XLA's first FSDP, which is not supported: set "
            "fsdp_config={'xla': True, 'xla_fsdp_v2': True}."
        )
    told = [f"fsdp_config[{name!r}]={settings[name]!r}" for name in NOT_XLA if settings.get(name) not in (None, "")]
    told += [f"fsdp_config[{name!r}]={settings[name]!r}" for name in FROM_FIRST if is_true(settings, name)]
    told += [f"fsdp={word!r}" for word in words if word not in ("full_shard", "auto_wrap", "true")]
    if told:
        raise UnsupportedOption(
            f"{told[0]} is not supported on XLA, whose compiler decides when shards are gathered and placed: leave it "
            "out (fsdp='full_shard')."
        )


def wants_shards(args: Any) -> bool:
    """True if checkpoints are sharded, by `checkpoint_format` or `fsdp_config`.

    Raises:
        ValueError: the two contradict each other.
    """
    kind = strip(read_config(args.fsdp_config)).get("state_dict_type") or None
    wanted = args.checkpoint_format
    if wanted is None:
        return kind == SHARDED
    if kind is not None and (kind == SHARDED) != (wanted == "sharded"):
        raise ValueError(
            f"checkpoint_format={wanted!r} contradicts fsdp_config['state_dict_type']={kind!r}: keep one of them."
        )
    return bool(wanted == "sharded")


def split_words(fsdp: object) -> list[Any]:
    """Splits `fsdp`, a text or a list, into words."""
    return list(fsdp) if isinstance(fsdp, list | tuple) else str(fsdp).replace(",", " ").split()


def read_config(config: object) -> Mapping[str, Any]:
    """Returns `fsdp_config` as a mapping."""
    if isinstance(config, str):
        config = parse_json(config) if config.lstrip().startswith("{") else read_mapping(config, is_json=True)
    if not isinstance(config, Mapping | None):
        raise ValueError(f"fsdp_config={config!r} is invalid: expected a dict, JSON, or the path of a JSON file.")
    return config or {}
