"""How a model is sharded: `fsdp` and `fsdp_config` under the names of transformers, read into one set of decisions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.args.errors import UnsupportedOption

WORDS = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap")
# settings of FSDP 1, or of the launchers' plugin, that torch's fully_shard has no counterpart of
GONE = {
    "activation_checkpointing": "set activation_checkpointing=True beside fsdp",
    "backward_prefetch": "fully_shard prefetches by itself",
    "forward_prefetch": "fully_shard prefetches by itself",
    "limit_all_gathers": "fully_shard always does",
    "use_orig_params": "fully_shard always does",
    "xla_fsdp_settings": "XLA's first FSDP read them, and here is its second (xla_fsdp_v2)",
    "mixed_precision_policy": "set bf16=True",
}

# how XLA's partitioner is asked for, as in transformers; the second and third mean nothing without the first
XLA = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt")
# what the partitioner decides by itself
NOT_XLA = ("reshard_after_forward", "offload_params", "cpu_offload", "replicate")
FROM_FIRST = ("cpu_ram_efficient_loading", "sync_module_states")  # either sends the first process's values to all


FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


@dataclass(frozen=True)
class Sharding:
    """What `fsdp` and `fsdp_config` ask for.

    Attributes:
        reshard: parameters are freed after the forward pass and gathered again for the backward pass.
        offload: parameters, gradients and optimizer state are kept in host memory.
        replicas: groups of processes that each hold the whole model in shards; 0: one for each machine.
        layer_classes: names of the classes of layers that are sharded one by one.
        least_parameters: modules of at least so many parameters are; 0: not chosen by size.
        is_whole: nothing is chosen: the model is one unit.
        is_xla: over the XLA devices of one process, by XLA's own partitioner.
        checkpoints_units: with XLA: activations of the units are made again in the backward pass.
        from_first: the first process's values become those of all, which may have been without any.
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


def is_xla_asked(parallel: Any, fsdp: Any, config: Any) -> bool:
    """Whether these values of `parallel`, `fsdp` and `fsdp_config` ask for XLA devices."""
    return parallel == "xla" or (bool(config) and bool(strip(read_config(config)).get("xla")))


def strip(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `fsdp_config` by their names without the prefix `fsdp_`."""
    return {str(key).removeprefix("fsdp_"): value for key, value in settings.items()}


def is_asked(fsdp: Any) -> bool:
    """Whether a value of `fsdp` asks for sharding."""
    return bool(fsdp) and str(fsdp).lower() not in ("false", "no", "none", "[]")


def read_sharding(fsdp: Any, config: Any) -> Sharding:
    """The decisions.

    Args:
        fsdp: True, or words separated by spaces.
        config: a mapping, JSON, or the path of a JSON file; keys with or without the prefix `fsdp_`.

    Raises:
        ValueError: an unknown word or key, or two that contradict each other.
        UnsupportedOption: a setting that fully_shard has no counterpart of.
    """
    words = [] if fsdp is True or not is_asked(fsdp) else [str(word).lower() for word in split_words(fsdp)]
    unknown = [word for word in words if word not in (*WORDS, "true")]
    if unknown:
        raise ValueError(f"fsdp={fsdp!r}: {unknown[0]!r} is unknown; use True, or words of {', '.join(WORDS)}.")
    settings = strip(read_config(config))
    for name, value in settings.items():
        if name in GONE and value not in (None, False, "", {}):
            raise UnsupportedOption(f"fsdp_config[{name!r}]={value!r} is not supported: {GONE[name]}; leave it out.")
    known = {
        "version", "reshard_after_forward", "offload_params", "cpu_offload", "replicate", "auto_wrap_policy",
        "transformer_layer_cls_to_wrap", "min_num_params", "state_dict_type",
        *FROM_FIRST, *XLA, *GONE,
    }  # fmt: skip
    for name in settings.keys() - known:
        raise ValueError(f"fsdp_config has no setting {name!r}: use {', '.join(sorted(known - GONE.keys()))}.")
    check_values(settings)
    check_xla(settings, words)
    policy = str(settings.get("auto_wrap_policy") or "").upper()
    hybrid = any(word.startswith("hybrid") for word in words)
    reshard = settings.get("reshard_after_forward", not {"shard_grad_op", "hybrid_shard_zero2"}.intersection(words))
    classes = settings.get("transformer_layer_cls_to_wrap") or ()
    return Sharding(
        reshard=str(reshard).lower() not in ("false", "no", "shard_grad_op"),
        offload=bool("offload" in words or settings.get("offload_params") or settings.get("cpu_offload")),
        replicas=int(settings.get("replicate", 0 if hybrid else 1)),
        layer_classes=tuple(classes.split(",")) if isinstance(classes, str) else tuple(classes),
        least_parameters=int(settings.get("min_num_params") or 0),
        is_whole=policy == "NO_WRAP",
        is_xla=bool(settings.get("xla")),
        checkpoints_units=bool(settings.get("xla_fsdp_grad_ckpt")),
        from_first=any(is_true(settings, name) for name in FROM_FIRST),
    )


def is_true(settings: Mapping[str, Any], name: str) -> bool:
    """A setting that is on or off, given as a bool or as text.

    Raises:
        ValueError: it is neither.
    """
    text = str(settings.get(name) or False).lower()
    if text not in ("true", "1", "yes", "false", "0", "no"):
        raise ValueError(f"fsdp_config[{name!r}]={settings[name]!r} is not possible: use True or False.")
    return text in ("true", "1", "yes")


def check_values(settings: Mapping[str, Any]) -> None:
    """Refuse values that cannot be had, and pairs that contradict each other."""
    if str(settings.get("version", 2)) != "2":
        version = settings["version"]
        raise UnsupportedOption(f"fsdp_config['version']={version!r} is not supported: use 2, or leave it out.")
    if str(settings.get("state_dict_type") or FULL) not in (FULL, SHARDED):
        raise UnsupportedOption(
            f"fsdp_config['state_dict_type']={settings['state_dict_type']!r} is not supported: such files fit the "
            f"number of processes that wrote them and no other; use {SHARDED!r}, or leave it out."
        )
    if settings.get("transformer_layer_cls_to_wrap") and settings.get("min_num_params"):
        raise ValueError(
            "fsdp_config: transformer_layer_cls_to_wrap and min_num_params are two ways to choose what is sharded as a "
            "unit: keep one."
        )
    is_told_not = settings.get("sync_module_states") is not None and not is_true(settings, "sync_module_states")
    if is_true(settings, "cpu_ram_efficient_loading") and is_told_not:
        raise ValueError(
            "fsdp_config['cpu_ram_efficient_loading']=True contradicts fsdp_config['sync_module_states']="
            f"{settings['sync_module_states']!r}: a model that is loaded by the first process only must be sent to the "
            "others. Leave sync_module_states out."
        )


def check_xla(settings: Mapping[str, Any], words: Sequence[str]) -> None:
    """Refuse settings of XLA that do not fit together, or that its partitioner cannot be told."""
    if not settings.get("xla"):
        for name in XLA[1:]:
            if settings.get(name):
                raise ValueError(
                    f"fsdp_config[{name!r}]={settings[name]!r} is read with XLA only: set fsdp_config['xla']=True "
                    "too, or leave it out."
                )
        return
    if not settings.get("xla_fsdp_v2"):
        raise UnsupportedOption(
            "fsdp_config['xla']=True without 'xla_fsdp_v2' is XLA's first FSDP, which is not supported: set "
            "fsdp_config={'xla': True, 'xla_fsdp_v2': True}."
        )
    told = [f"fsdp_config[{name!r}]={settings[name]!r}" for name in NOT_XLA if settings.get(name) not in (None, "")]
    told += [f"fsdp_config[{name!r}]={settings[name]!r}" for name in FROM_FIRST if is_true(settings, name)]
    told += [f"fsdp={word!r}" for word in words if word not in ("full_shard", "auto_wrap", "true")]
    if told:
        raise UnsupportedOption(
            f"{told[0]} is not supported on XLA, whose compiler decides when shards are gathered and where they lie: "
            "leave it out (fsdp='full_shard')."
        )


def wants_shards(args: Any) -> bool:
    """Whether checkpoints are to be written in shards: `checkpoint_format`, or what `fsdp_config` says.

    Raises:
        ValueError: the two contradict each other.
        UnsupportedOption: beside DeepSpeed.
    """
    settings = {str(key).removeprefix("fsdp_"): value for key, value in read_config(args.fsdp_config).items()}
    kind = settings.get("state_dict_type") or None
    wanted = args.checkpoint_format
    if wanted is None:
        return kind == SHARDED
    if wanted == "sharded" and getattr(args, "deepspeed", None) is not None:
        raise UnsupportedOption(
            "checkpoint_format='sharded' with deepspeed is not supported: its engine writes shards of its own; leave "
            "checkpoint_format out."
        )
    if kind is not None and (kind == SHARDED) != (wanted == "sharded"):
        raise ValueError(
            f"checkpoint_format={wanted!r} contradicts fsdp_config['state_dict_type']={kind!r}: keep one of them."
        )
    return bool(wanted == "sharded")


def split_words(fsdp: Any) -> list[Any]:
    """The words of `fsdp`, text or a list."""
    return list(fsdp) if isinstance(fsdp, list | tuple) else str(fsdp).replace(",", " ").split()


def read_config(config: Any) -> Mapping[str, Any]:
    """`fsdp_config` as a mapping."""
    if isinstance(config, str):
        text = config if config.lstrip().startswith("{") else Path(config).read_text(encoding="utf-8")
        config = json.loads(text)
    if not isinstance(config, Mapping | None):
        raise ValueError(f"fsdp_config={config!r} is not possible: give a dict, JSON, or the path of a JSON file.")
    return config or {}
