"""Reads the environment variables of `accelerate launch` for options that the arguments leave unset.

The names are those of accelerate's `utils/launch.py`. A variable with the launcher's default value has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.args import deepspeed_config, sharding
from paceline.args.errors import UnsupportedOption

Environment = Mapping[str, str]
# variable of FSDP -> (key of fsdp_config, the launcher's default)
FSDP: dict[str, tuple[str, str]] = {
    "FSDP_OFFLOAD_PARAMS": ("offload_params", "false"),
    "FSDP_AUTO_WRAP_POLICY": ("auto_wrap_policy", ""),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("transformer_layer_cls_to_wrap", ""),
    "FSDP_BACKWARD_PREFETCH": ("backward_prefetch", ""),
    "FSDP_STATE_DICT_TYPE": ("state_dict_type", ""),
    "FSDP_FORWARD_PREFETCH": ("forward_prefetch", "false"),
    "FSDP_USE_ORIG_PARAMS": ("use_orig_params", "true"),
    "FSDP_SYNC_MODULE_STATES": ("sync_module_states", "true"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("activation_checkpointing_offload", "false"),
    "FSDP_IGNORED_MODULES": ("ignored_modules", ""),
}
# the two versions of FSDP use different variables for resharding
FSDP_STRATEGY: dict[str, tuple[str, str, str]] = {
    "1": ("FSDP_SHARDING_STRATEGY", "sharding_strategy", "full_shard"),
    "2": ("FSDP_RESHARD_AFTER_FORWARD", "reshard_after_forward", "true"),
}
# variable of DeepSpeed -> (section of its config, key)
DEEPSPEED: dict[str, tuple[str, str]] = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("", "stage"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("offload_optimizer", "device"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("offload_param", "device"),
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": ("", "stage3_gather_16bit_weights_on_model_save"),
}
DEEPSPEED_STAGE = 2  # the ZeRO stage if none is given
# variable of the mesh -> key of parallelism_config
MESH = {f"PARALLELISM_CONFIG_{axis.upper()}_SIZE": f"{axis}_size" for axis in (
    "dp_replicate", "dp_shard", "tp", "cp", "sp"
)}  # fmt: skip
LAUNCHER = "accelerate launch"


@dataclass
class LauncherConfig:
    """The launcher's configuration.

    Attributes:
        values: option -> (value, variable).
        fsdp_config: key of `fsdp_config` -> (value, variable).
        remarks: remarks on settings that differ or have no effect in this run.
    """

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    fsdp_config: dict[str, tuple[Any, str]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def is_on(environment: Environment, name: str) -> bool:
    """Returns the value of a boolean variable. Raises: ValueError, if it is neither true nor false."""
    text = environment.get(name, "").strip().lower()
    if text not in ("", "true", "1", "yes", "on", "y", "t", "false", "0", "no", "off", "n", "f", "none"):
        raise ValueError(f"{name}={environment[name]!r} is invalid: expected true or false; or unset it.")
    return text in ("true", "1", "yes", "on", "y", "t")


def read_launcher_config(environment: Environment) -> LauncherConfig:
    """Reads all variables of the launcher.

    Raises:
        ValueError: an invalid value.
        UnsupportedOption: a setting without an equivalent option.
    """
    if is_on(environment, "ACCELERATE_USE_MEGATRON_LM"):
        raise UnsupportedOption(
            f"ACCELERATE_USE_MEGATRON_LM={environment['ACCELERATE_USE_MEGATRON_LM']} of {LAUNCHER} is not supported: "
            "use parallelism_config or fsdp."
        )
    config = LauncherConfig()
    if is_on(environment, "ACCELERATE_USE_CPU"):
        config.values["use_cpu"] = (True, "ACCELERATE_USE_CPU")
    read_precision(environment, config)
    read_compilation(environment, config)
    if is_on(environment, "ACCELERATE_USE_FSDP"):
        read_fsdp(environment, config)
    if is_on(environment, "ACCELERATE_USE_DEEPSPEED"):
        read_deepspeed(environment, config)
    if is_on(environment, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        read_mesh(environment, config)
    return config


def read_precision(environment: Environment, config: LauncherConfig) -> None:
    """Reads `bf16` or `fp16`; "no" is the launcher's default."""
    name = "ACCELERATE_MIXED_PRECISION"
    precision = environment.get(name, "no").lower()
    if precision in ("bf16", "fp16"):
        config.values[precision] = (True, name)
    elif precision not in ("no", ""):
        raise UnsupportedOption(f"{name}={precision} of {LAUNCHER} is not supported: use bf16, fp16 or no.")


def read_compilation(environment: Environment, config: LauncherConfig) -> None:
    """Reads `torch_compile_backend` and related settings."""
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend in ("no", ""):
        return
    name = "ACCELERATE_DYNAMO_USE_FULLGRAPH"
    if is_on(environment, name):
        raise UnsupportedOption(
            f"{name}={environment[name]} of {LAUNCHER} is not supported: compile the model in the script, or leave it "
            "out."
        )
    config.values["torch_compile_backend"] = (backend, "ACCELERATE_DYNAMO_BACKEND")
    mode = environment.get("ACCELERATE_DYNAMO_MODE", "default")
    if mode not in ("default", "None", ""):
        config.values["torch_compile_mode"] = (mode, "ACCELERATE_DYNAMO_MODE")
    if is_on(environment, "ACCELERATE_DYNAMO_USE_DYNAMIC"):
        config.values["torch_compile"] = (True, "ACCELERATE_DYNAMO_BACKEND")
        config.values["torch_compile_dynamic"] = (True, "ACCELERATE_DYNAMO_USE_DYNAMIC")
    if is_on(environment, "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"):
        config.values["torch_compile"] = (True, "ACCELERATE_DYNAMO_BACKEND")
        config.values["compile_regions"] = (True, "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")


def read_fsdp(environment: Environment, config: LauncherConfig) -> None:
    """Reads `fsdp`, `fsdp_config` and `activation_checkpointing`."""
    version = environment.get("FSDP_VERSION", "1")
    if version not in FSDP_STRATEGY:
        raise UnsupportedOption(f"FSDP_VERSION={version} of {LAUNCHER} is not supported: use 1 or 2.")
    table = dict(FSDP)
    variable, key, default = FSDP_STRATEGY[version]
    table[variable] = (key, default)
    if environment.get("FSDP_AUTO_WRAP_POLICY", "").upper() == "SIZE_BASED_WRAP":
        table["FSDP_MIN_NUM_PARAMS"] = ("min_num_params", "")
    for variable, (key, default) in table.items():
        text = environment.get(variable, "")
        if text and text != "None" and text.lower() != default:
            config.fsdp_config[key] = (text, variable)
    if version == "1":
        config.remarks.append("FSDP 1 is run as torch's fully_shard")
    if is_on(environment, "FSDP_ACTIVATION_CHECKPOINTING"):
        config.values["activation_checkpointing"] = (True, "FSDP_ACTIVATION_CHECKPOINTING")
    if is_on(environment, "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        # transformers reads this variable too: from_pretrained then loads no weights on ranks other than 0
        config.fsdp_config["cpu_ram_efficient_loading"] = (True, "FSDP_CPU_RAM_EFFICIENT_LOADING")
    if int(environment.get("WORLD_SIZE", "1")) == 1 and "offload_params" not in config.fsdp_config:
        config.remarks[:] = ["FSDP is not used, as there is one process"]
        config.fsdp_config.clear()
        return
    config.values["fsdp"] = (True, "ACCELERATE_USE_FSDP")


def read_deepspeed(environment: Environment, config: LauncherConfig) -> None:
    """Reads `deepspeed`, and the two options that a DeepSpeed config duplicates."""
    if environment.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"):
        name = "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"
        raise UnsupportedOption(f"{name}={environment[name]} of {LAUNCHER} is not supported: leave it out.")
    path = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path not in ("", "none", "None"):
        config.values["deepspeed"] = (path, "ACCELERATE_DEEPSPEED_CONFIG_FILE")
        return
    zero: dict[str, Any] = {}
    for variable, (section, key) in DEEPSPEED.items():
        text = environment.get(variable, "none").lower()
        if text in ("", "none"):
            continue
        value: Any = {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)
        if section:
            zero[section] = {key: value}
        else:
            zero[key] = value
    config.values["deepspeed"] = ({"zero_optimization": zero}, "ACCELERATE_USE_DEEPSPEED")
    for variable, option, kind in (
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "gradient_accumulation_steps", int),
        ("ACCELERATE_GRADIENT_CLIPPING", "max_grad_norm", float),
    ):
        text = environment.get(variable, "auto")
        if text not in ("auto", "none", ""):
            config.values[option] = (kind(text), variable)


def read_mesh(environment: Environment, config: LauncherConfig) -> None:
    """Reads `parallelism_config`."""
    sizes: dict[str, Any] = {
        key: int(environment[variable]) for variable, key in MESH.items() if environment.get(variable, "1") != "1"
    }
    strategy = environment.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "None")
    if sizes.get("cp_size") and strategy != "None":
        sizes["cp_handler"] = {"cp_comm_strategy": strategy}
    if sizes:
        config.values["parallelism_config"] = (sizes, "ACCELERATE_USE_PARALLELISM_CONFIG")


def take(options: object, environment: Environment) -> tuple[dict[str, Any], str]:
    """Returns the launcher's values for options that the arguments leave unset.

    Args:
        options: the arguments as given.
        environment: the variables of this process.

    Returns:
        The values by option, and one sentence that lists them; empty if there are none.

    Raises:
        ValueError: the launcher and an argument contradict each other; the message names both values.
        UnsupportedOption: a launcher setting without an equivalent option.
    """
    config = read_launcher_config(environment)
    check_ways(options, config)
    taken: dict[str, Any] = {}
    for name, (value, variable) in config.values.items():
        current = getattr(options, name)
        if name == "fsdp" and sharding.is_asked(current):
            continue
        if name == "deepspeed" and current:
            check_same_engine(current, value, variable)
        elif current in (None, "", {}, []) or current == getattr(type(options), name, None):
            taken[name] = value
        elif current != value:
            raise contradiction(f"{name}={current!r}", value, variable)
    if isinstance(taken.get("deepspeed"), dict):
        taken["deepspeed"]["zero_optimization"].setdefault("stage", DEEPSPEED_STAGE)
    if config.fsdp_config:
        taken["fsdp_config"] = fill_fsdp(options, config)
    said = [f"{name}={value!r}" for name, value in taken.items()] + config.remarks
    return taken, f"From the environment of {LAUNCHER}: {', '.join(said)}." if said else ""


def contradiction(argument: str, value: object, variable: str) -> ValueError:
    """Builds the error for an argument and a variable that differ."""
    shown = f"{variable} of {LAUNCHER}, which is {value!r}"
    return ValueError(f"{argument} contradicts {shown}: make them equal, or leave one of them out.")


def check_ways(options: Any, config: LauncherConfig) -> None:
    """Checks that launcher and arguments agree on the precision and the parallelism.

    Raises:
        ValueError: they differ.
    """
    for name, other in (("bf16", "fp16"), ("fp16", "bf16")):
        if name in config.values and getattr(options, other):
            raise contradiction(f"{other}=True", name, config.values[name][1])
    for way, others in (("fsdp", ("deepspeed",)), ("deepspeed", ("fsdp", "parallel", "parallelism_config"))):
        for other in others:
            if way in config.values and getattr(options, other):
                raise contradiction(f"{other}={getattr(options, other)!r}", *config.values[way])
    if "fsdp" in config.values and isinstance(options.parallel, str) and options.parallel != "fsdp":
        raise contradiction(f"parallel={options.parallel!r}", True, "ACCELERATE_USE_FSDP")
    if "parallelism_config" in config.values and options.parallel:
        raise contradiction(f"parallel={options.parallel!r}", *config.values["parallelism_config"])


def check_same_engine(current: object, value: Any, variable: str) -> None:
    """Checks that `deepspeed` and the launcher's DeepSpeed settings agree.

    Raises:
        ValueError: a ZeRO setting differs.
    """
    mine = deepspeed_config.read_config(current)
    if variable == "ACCELERATE_DEEPSPEED_CONFIG_FILE":
        if mine != deepspeed_config.read_config(value):
            raise contradiction(f"deepspeed={current!r}", value, variable)
        return
    zero = mine.get("zero_optimization") or {}
    for name, (section, key) in DEEPSPEED.items():
        other = value["zero_optimization"].get(section or key)
        other = other.get(key) if section and other else other
        found = (zero.get(section) or {}).get(key) if section else zero.get(key)
        if other is not None and (found or False) != other:
            where = "".join(f"[{part!r}]" for part in ("zero_optimization", section, key) if part)
            raise contradiction(f"deepspeed{where}={found!r}", other, name)


def fill_fsdp(options: Any, config: LauncherConfig) -> dict[str, Any]:
    """Returns `fsdp_config` with the launcher's settings added.

    Raises:
        ValueError: a setting has two values.
    """
    fsdp = sharding.strip(sharding.read_config(options.fsdp_config))
    for name, (value, variable) in config.fsdp_config.items():
        mine = fsdp.get(name)
        is_default = name == "cpu_ram_efficient_loading"  # the launcher's default
        if mine in (None, ""):
            fsdp[name] = value
        elif sharding.read_word(mine) != sharding.read_word(value) and not is_default:
            raise contradiction(f"fsdp_config[{name!r}]={mine!r}", value, variable)
    return fsdp
