"""Checks DeepSpeed's configuration against the arguments and fills it in. Imports neither torch nor DeepSpeed.

The keys are those of https://www.deepspeed.ai/docs/config-json/. A setting that duplicates an argument must be equal to
it, or "auto". Settings for tasks that paceline does itself are refused.
"""

from __future__ import annotations

import base64
import binascii
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.args.accelerator_config import is_on
from paceline.args.errors import UnsupportedOption, did_you_mean
from paceline.args.option_files import parse_json, read_mapping

# the engine's own settings, passed on unchanged
HANDED_ON = frozenset({
    "zero_optimization", "bf16", "fp16", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps", "optimizer", "scheduler", "data_types", "communication_data_type",
    "prescale_gradients", "gradient_predivide_factor", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "flops_profiler",
    "comms_logger", "timers", "aio", "disable_python_gc", "activation_checkpointing",
})  # fmt: skip
# settings that another component covers, or that are not supported -> the remedy
REFUSED = {
    "amp": "set bf16=True",
    "torch_autocast": "set bf16=True",
    "pipeline": "use ZeRO (zero_optimization)",
    "tensor_parallel": "use ZeRO (zero_optimization)",
    "expert_parallel": "use ZeRO (zero_optimization)",
    "sequence_parallel_size": "use ZeRO (zero_optimization)",
    "autotuning": "set the batch size and the ZeRO stage yourself",
    "elasticity": "a resumed run keeps its global batch size on another number of processes without it",
    "checkpoint": "paceline writes the checkpoints, for any number of processes",
    "data_efficiency": "set train_sampling_strategy",
    "curriculum_learning": "set train_sampling_strategy",
    "progressive_layer_drop": "use the model's own dropout",
    "sparse_attention": "choose it in the model",
    "sparse_gradients": "use dense gradients",
    "compression_training": "compress the model outside of training",
    "quantize_training": "quantize the model before training",
    "weight_quantization": "quantize the model before training",
    "hybrid_engine": "generate by the model itself",
    "compile": "set torch_compile=True",
    "tensorboard": "set report_to='tensorboard'",
    "wandb": "set report_to='wandb'",
    "comet": "use a callback",
    "csv_monitor": "set report_to='csv'",
    "dataloader_drop_last": "set dataloader_drop_last=True among the arguments",
    "managed_gradient_accumulation": "set gradient_accumulation_steps",
    "gradient_allreduce_op": "losses are weighted for a mean over the processes",
}
REFUSED_OF_ZERO = {
    "zenflow": "use offload_optimizer",
    "elastic_checkpoint": "checkpoints load on any number of processes without it",
    "zero_quantized_gradients": "use communication_data_type",
    "zero_quantized_weights": "use bf16=True",
    "zero_quantized_nontrainable_weights": "use bf16=True",
    "legacy_stage1": "use stage 1",
    "zero_hpz_partition_size": "use stage 2, or fsdp='hybrid_shard'",
    "mics_shard_size": "use fsdp='hybrid_shard'",
}
# further settings of the ZeRO section, passed on unchanged
OF_ZERO = frozenset({
    "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
    "allgather_partitions", "allgather_bucket_size", "overlap_comm", "compute_grad_norm", "load_from_fp32_weights",
    "offload_param", "offload_optimizer", "sub_group_size", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold", "stage3_model_persistence_threshold", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save", "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "ignore_unused_parameters",
    "round_robin_gradients", "parameter_alignment", "memory_efficient_linear", "pipeline_loading_checkpoint",
    "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks",
    "save_muon_momentum_buffer_in_memory", "leaf_module",
})  # fmt: skip
# former offload settings -> present ones
OLD_OFFLOADS = {
    "cpu_offload": "offload_optimizer={'device': 'cpu'}",
    "cpu_offload_params": "offload_param={'device': 'cpu'}",
    "cpu_offload_param": "offload_param={'device': 'cpu'}",
    "cpu_offload_use_pin_memory": "offload_optimizer={'device': 'cpu', 'pin_memory': True}",
}
# settings of the optimizer section -> the equivalent argument
OPTIMIZER_NAMES = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
# supported DeepSpeed schedules -> their settings
SCHEDULES: dict[str, tuple[str, ...]] = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps"),
    "WarmupCosineLR": ("warmup_min_ratio", "cos_min_ratio", "warmup_num_steps", "warmup_type", "total_num_steps"),
}


@dataclass(frozen=True)
class EngineConfig:
    """The resolved configuration of `deepspeed`.

    Attributes:
        config: the config for `deepspeed.initialize`, without optimizer and schedule, which paceline creates.
        stage: the ZeRO stage: 0 shards nothing; 1 optimizer state; 2 gradients too; 3 parameters too.
        wants_adam: True if the config has an optimizer section: Adam with decoupled weight decay.
        schedule: name and settings of DeepSpeed's schedule; settings that depend on the length of the run are "auto".
            None uses the schedule of the arguments.
    """

    config: dict[str, Any]
    stage: int
    wants_adam: bool = False
    schedule: tuple[str, dict[str, Any]] | None = None


def read_config(value: object) -> dict[str, Any]:
    """Returns `deepspeed` as a new dict.

    Args:
        value: a dict, JSON, the path of a JSON file, or JSON in base64, as launchers pass it.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, Mapping):
        return copy.deepcopy(dict(value))
    expected = "expected a dict, JSON, or the path of a JSON file"
    text = str(value)
    if not text.lstrip().startswith("{"):
        if Path(text).expanduser().is_file():
            try:
                return read_mapping(Path(text).expanduser(), is_json=True)
            except (OSError, ValueError) as error:
                raise ValueError(f"deepspeed: {error}") from None
        try:
            text = base64.urlsafe_b64decode(text).decode("utf-8")
        except (binascii.Error, ValueError):
            raise ValueError(f"deepspeed={value!r} is invalid: there is no such file; {expected}.") from None
    try:
        config = parse_json(text)
    except ValueError as error:
        raise ValueError(f"deepspeed={value!r} is invalid: it is not valid JSON ({error}); {expected}.") from None
    if not isinstance(config, dict):
        raise ValueError(f"deepspeed={value!r} is invalid: {expected}.")
    return config


def fill_config(args: Any, world_size: int | None = None, hidden_size: int | None = None) -> EngineConfig:
    """Checks `args.deepspeed` and fills it in from the other arguments.

    Args:
        args: the arguments.
        world_size: the number of ranks; None if unknown. train_batch_size is then not checked.
        hidden_size: the model's hidden size, for ZeRO's bucket sizes; None uses DeepSpeed's defaults.

    Raises:
        ValueError: the config contradicts an argument; the message names both values.
        UnsupportedOption: a setting that is not supported; the message names the remedy.
    """
    config = read_config(args.deepspeed)
    check_keys(config)
    match_batches(config, args, world_size)
    match(config, "gradient_clipping", float(args.max_grad_norm), "max_grad_norm")
    fill_precision(config, args)
    stage = fill_zero(config, hidden_size)
    if stage == 0 and config["bf16"]["enabled"]:
        raise UnsupportedOption(
            "deepspeed['zero_optimization']['stage']=0 with bf16=True is not supported: use stage 1, or leave "
            "deepspeed out."
        )
    wants_adam = check_optimizer(config.pop("optimizer", None), args)
    schedule = fill_schedule(config.pop("scheduler", None), args)
    config["zero_allow_untested_optimizer"] = True  # paceline checks the optimizer itself
    if config.setdefault("zero_force_ds_cpu_optimizer", False) not in (False, "auto"):
        raise UnsupportedOption(
            "deepspeed['zero_force_ds_cpu_optimizer']=True is not supported: the optimizer is torch's, which updates "
            "state in host memory too; leave it out."
        )
    config["zero_force_ds_cpu_optimizer"] = False
    for name in find_auto(config, "deepspeed"):
        raise ValueError(f"{name}='auto' is invalid: there is no such argument; give a value, or leave it out.")
    return EngineConfig(config, stage, wants_adam, schedule)


def check_keys(config: Mapping[str, Any]) -> None:
    """Refuses unknown settings, and settings that another component covers."""
    for name, value in config.items():
        if name in REFUSED:
            if is_set(value):
                raise UnsupportedOption(f"deepspeed[{name!r}]={value!r} is not supported: {REFUSED[name]}, instead.")
        elif name not in HANDED_ON:
            hint = did_you_mean(name, HANDED_ON) or ": leave it out."
            raise UnsupportedOption(f"deepspeed[{name!r}]={value!r} is not supported here{hint}")


def is_set(value: object) -> bool:
    """True if a setting has an effect: it is not off, and not a disabled section."""
    return bool(value) and value != "auto" and not (isinstance(value, Mapping) and value.get("enabled") is False)


def match(config: dict[str, Any], path: str, expected: object, argument: str) -> None:
    """Sets `expected` where the config has "auto" or nothing.

    Raises:
        ValueError: the config has another value.
    """
    *sections, name = path.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    found = config.get(name, "auto")
    if isinstance(found, list) and isinstance(expected, list):
        is_same = [float(item) for item in found] == [float(item) for item in expected]
    else:
        is_same = found in ("auto", None) or found == expected
    if not is_same:
        where = "".join(f"[{part!r}]" for part in path.split("."))
        raise ValueError(
            f"deepspeed{where}={found!r} contradicts {argument}={expected!r}: make them equal, or write 'auto' there."
        )
    config[name] = expected


def match_batches(config: dict[str, Any], args: Any, world_size: int | None) -> None:
    """Fills in the three batch sizes. DeepSpeed uses them for its counters only; paceline ends accumulation windows."""
    size, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    argument = "per_device_train_batch_size"
    if is_on(args.accelerator_config, "split_batches"):
        size, argument = -(-size // (world_size or 1)), f"{argument} split over {world_size} processes"
    if world_size is not None or argument == "per_device_train_batch_size":
        match(config, "train_micro_batch_size_per_gpu", size, argument)
    match(config, "gradient_accumulation_steps", steps, "gradient_accumulation_steps")
    if world_size is None:
        config.pop("train_batch_size", None)
        return
    several = f"{argument} x gradient_accumulation_steps x {world_size} processes"
    match(config, "train_batch_size", size * steps * world_size, several)
    if (config.get("zero_optimization") or {}).get("offload_optimizer"):
        # with 1 step DeepSpeed does not accumulate on the host, but a resumed run may have more micro-batches per step
        config["gradient_accumulation_steps"] = max(steps, 2)
        config["train_batch_size"] = size * max(steps, 2) * world_size


def fill_precision(config: dict[str, Any], args: Any) -> None:
    """Fills in `bf16.enabled` and `fp16.enabled`."""
    for name in ("bf16", "fp16"):
        if not isinstance(config.setdefault(name, {}), dict):
            raise ValueError(f"deepspeed[{name!r}]={config[name]!r} is invalid: expected {{'enabled': 'auto'}}.")
        match(config, f"{name}.enabled", bool(getattr(args, name)), name)
    if args.fp16:
        raise UnsupportedOption("fp16=True with deepspeed is not supported: set bf16=True.")
    config["fp16"] = {"enabled": False}


def fill_zero(config: dict[str, Any], hidden_size: int | None) -> int:
    """Fills in the ZeRO section. Returns the stage.

    Raises:
        ValueError: an invalid stage.
        UnsupportedOption: a setting that is not supported.
    """
    zero = config.setdefault("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ValueError(f"deepspeed['zero_optimization']={zero!r} is invalid: expected a dict such as {{'stage': 2}}.")
    stage = zero.setdefault("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(f"deepspeed['zero_optimization']['stage']={stage!r} is invalid: expected 0, 1, 2 or 3.")
    check_keys_of_zero(zero)
    for name, least in (("offload_optimizer", 1), ("offload_param", 3)):
        device = check_offload(zero, name)
        if device is not None and stage < least:
            raise ValueError(
                f"deepspeed['zero_optimization'][{name!r}] with stage={stage} is invalid: use stage {least}"
                f"{' or more' if least < 3 else ''}, or leave it out."
            )
    sizes = {} if hidden_size is None else {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": hidden_size * hidden_size * 9 // 10,
        "stage3_param_persistence_threshold": hidden_size * 10,
    }  # fmt: skip
    for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
        if zero.get(name) == "auto":
            del zero[name]
            zero.update({name: sizes[name]} if name in sizes else {})
    return int(stage)


def check_keys_of_zero(zero: dict[str, Any]) -> None:
    """Refuses unknown and unsupported ZeRO settings; removes former settings that are off."""
    for name, value in list(zero.items()):
        shown = f"deepspeed['zero_optimization'][{name!r}]={value!r}"
        if name in OLD_OFFLOADS:
            if is_set(value):
                raise UnsupportedOption(f"{shown} is not supported: write {OLD_OFFLOADS[name]} there, instead.")
            del zero[name]
        elif name in REFUSED_OF_ZERO:
            if is_set(value) and (value is True or value not in (1, -1)):  # a group of one process has no effect
                raise UnsupportedOption(f"{shown} is not supported: {REFUSED_OF_ZERO[name]}, instead.")
        elif name not in OF_ZERO:
            hint = did_you_mean(name, OF_ZERO) or ": leave it out."
            raise UnsupportedOption(f"{shown} is not supported here{hint}")


def check_offload(zero: dict[str, Any], name: str) -> str | None:
    """Returns the offload device of a section; None for the accelerator itself."""
    section = zero.get(name)
    device = section.get("device", "none") if isinstance(section, Mapping) else section
    if device in (None, False, "none"):
        zero.pop(name, None)
        return None
    if not isinstance(section, dict) or device != "cpu":
        raise UnsupportedOption(
            f"deepspeed['zero_optimization'][{name!r}]={section!r} is not supported: use {{'device': 'cpu'}}."
        )
    return "cpu"


def check_optimizer(section: Any, args: Any) -> bool:
    """True if the config has an optimizer section, which must agree with the arguments.

    Raises:
        ValueError: the section contradicts the arguments.
        UnsupportedOption: an optimizer other than Adam with decoupled weight decay.
    """
    if not section:
        return False
    kind, settings = section.get("type"), dict(section.get("params") or {})
    if str(kind).lower() not in ("adam", "adamw"):
        raise UnsupportedOption(
            f"deepspeed['optimizer']['type']={kind!r} is not supported: leave the section out, and set optim."
        )
    if not str(args.optim).startswith("adamw_torch"):
        raise ValueError(
            f"deepspeed['optimizer']['type']={kind!r} contradicts optim='{args.optim}': leave the section out, or set "
            "optim='adamw_torch'."
        )
    for name, argument in OPTIMIZER_NAMES.items():
        if name in settings:
            match(section, f"params.{name}", getattr(args, argument), argument)
    if "betas" in settings:
        match(section, "params.betas", [args.adam_beta1, args.adam_beta2], "adam_beta1, adam_beta2")
    possible = {"torch_adam": (True, False), "adam_w_mode": (True,), "bias_correction": (True,), "amsgrad": (False,)}
    for name in settings.keys() - {"betas", *OPTIMIZER_NAMES}:
        if settings[name] not in possible.get(name, ()):
            raise UnsupportedOption(
                f"deepspeed['optimizer']['params'][{name!r}]={settings[name]!r} is not supported: leave the section "
                "out, and set optim and optim_args."
            )
    return True


def fill_schedule(section: Any, args: Any) -> tuple[str, dict[str, Any]] | None:
    """Returns (name, settings) of the schedule in the config, or None.

    Raises:
        ValueError: the schedule contradicts the arguments.
        UnsupportedOption: an unknown schedule.
    """
    if not section:
        return None
    kind, settings = section.get("type"), dict(section.get("params") or {})
    if kind not in SCHEDULES:
        raise UnsupportedOption(
            f"deepspeed['scheduler']['type']={kind!r} is not supported: use {', '.join(SCHEDULES)}, or leave the "
            "section out and set lr_scheduler_type."
        )
    check_schedule(kind, settings, args)
    if settings.get("warmup_min_lr") == "auto":
        settings["warmup_min_lr"] = 0.0
    if "warmup_max_lr" in settings or kind == "WarmupDecayLR":  # other schedules use each group's learning rate
        config = {"scheduler": {"params": settings}}
        match(config, "scheduler.params.warmup_max_lr", args.learning_rate, "learning_rate")
    settings.setdefault("warmup_num_steps", "auto")
    if kind != "WarmupLR":
        settings.setdefault("total_num_steps", "auto")
    return kind, settings


def check_schedule(kind: str, settings: Mapping[str, Any], args: Any) -> None:
    """Refuses a second schedule in the arguments, and unknown settings of DeepSpeed's schedule.

    Raises:
        ValueError: there is one of these.
    """
    shown = f"deepspeed['scheduler']['type']={kind!r}"
    for name, default in (("lr_scheduler_type", "linear"), ("lr_scheduler_kwargs", None)):
        value = getattr(args, name)
        if value and value != default:
            value = str(value) if name == "lr_scheduler_type" else value
            raise ValueError(f"{shown} and {name}={value!r} are two schedules: leave one of them out.")
    for name in settings:
        if name not in SCHEDULES[kind]:
            hint = did_you_mean(name, SCHEDULES[kind]) or ": leave it out."
            raise ValueError(f"{shown} has no setting {name!r}{hint}")


def finish_schedule(settings: Mapping[str, Any], num_updates: int, num_warmup: int) -> dict[str, Any]:
    """Returns the settings of a schedule for a run of known length.

    Raises:
        ValueError: the config gives another length; the message names both.
    """
    config: dict[str, Any] = {"scheduler": {"params": dict(settings)}}
    if "total_num_steps" in settings:
        match(config, "scheduler.params.total_num_steps", num_updates, "the optimizer steps of the run")
    if "warmup_num_steps" in settings:
        match(config, "scheduler.params.warmup_num_steps", max(num_warmup, 1), "warmup_steps")
    params: dict[str, Any] = config["scheduler"]["params"]
    return params


def find_auto(value: object, where: str) -> Iterator[str]:
    """Yields the paths of "auto" in a nest of dicts."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from find_auto(item, f"{where}[{name!r}]")
    elif value == "auto":
        yield where
