"""Classes and settings of optimizers of other packages, by their name in `optim`.

Each package is imported when its optimizer is requested. If it is missing, the error says what to install. The mixins
of the classes are in `optim.adapted`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from paceline.args.sections import Options
from paceline.core.apex import require_apex
from paceline.core.optional import require
from paceline.pytorch.optim.entries import (
    Made,
    OptimizerEntry,
    adam_settings,
    as_it_is,
    changed_adam_settings,
    no_settings,
)
from paceline.pytorch.optim.low_rank import apply_targets

logger = logging.getLogger(__name__)

PROJECTION = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
APOLLO_PROJECTION = {
    "rank": 128,
    "proj": "random",
    "scale_type": "channel",
    "update_proj_gap": 200,
    "scale": 1.0,
    "proj_type": "std",
}
CHOICES = {
    "proj_type": ("std", "reverse_std", "left", "right", "full"),
    "proj": ("random", "svd"),
    "scale_type": ("channel", "tensor"),
}
_MOMENT_TYPES = ("momentum_dtype", "variance_dtype", "compensation_buffer_dtype")
EXTRA_OF = {
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "galore-torch": "galore",
    "apollo-torch": "apollo",
    "lomo-optim": "lomo",
    "grokadamw": "grokadamw",
    "schedulefree": "schedulefree",
    "torch-optimi": "optimi",
}
"""Package -> the extra of paceline that installs it. Other packages come with their device, or must be built."""


# ---- classes


def load_from(module: str, name: str, extra: str) -> Any:
    """Returns a class of an optional package."""
    return getattr(require(module, extra), name)


def load_torchao(name: str) -> Any:
    """Returns a class of torchao, and suppresses its log about missing GPU kernels on import."""
    with quiet("torchao"):
        return load_from("torchao.optim", name, "torchao")


def load_grokadamw() -> Any:
    """Returns GrokAdamW, and undoes the logging setup of the whole process that importing its module makes."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        return load_from("grokadamw", "GrokAdamW", "grokadamw")
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def load_foreign(module: str, name: str, what: str) -> Any:
    """Returns a class of a package that no extra can install, because it comes with its device or must be built.

    Raises:
        ImportError: the package is missing; the message names it.
    """
    try:
        return getattr(__import__(module, fromlist=[name]), name)
    except ImportError as error:
        raise ImportError(f"{module} is required: {what} ({error})") from error


def load_apex_adam() -> Any:
    """Returns Apex's fused Adam."""
    return require_apex("optimizers").FusedAdam


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Suppresses a package's log messages below level ERROR while entered."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# ---- settings


def lion_settings(args: Options) -> dict[str, Any]:
    """Returns the betas of Lion, which has no eps."""
    return {"betas": (args.adam_beta1, args.adam_beta2)}


def ademamix_settings(args: Options) -> dict[str, Any]:
    """Returns the settings of AdEMAMix, which has a third, slow average."""
    return {"betas": (args.adam_beta1, args.adam_beta2, 0.9999), "alpha": 5.0, "eps": args.adam_epsilon}


def bits(settings: Any, number: int, paged: bool | None) -> Any:
    """Returns a function that adds the bits of the optimizer state to settings of bitsandbytes.

    Args:
        settings: `(args) -> settings`.
        number: bits per value of the state.
        paged: keep the state in paged memory; None: the class has no such option.
    """
    more = {"optim_bits": number} if paged is None else {"optim_bits": number, "is_paged": paged}
    return lambda args: {**settings(args), **more}


def join_betas(made: Made, args: Options, model: object, given: dict[str, Any]) -> Made:
    """Combines beta1, beta2 and beta3 of `optim_args` into the argument `betas`."""
    betas = list(made[1]["betas"])
    for number in range(len(betas)):
        betas[number] = float(given.pop(f"beta{number + 1}", betas[number]))
    return made[0], {**made[1], **given, "betas": tuple(betas)}


def anyprecision_settings(args: Options) -> dict[str, Any]:
    """Returns the settings of an AdamW with configurable dtypes of its moments."""
    types = {"momentum_dtype": torch.float32, "variance_dtype": torch.float32}
    further = {"use_kahan_summation": False, **types, "compensation_buffer_dtype": torch.bfloat16}
    return {**adam_settings(args), **further}


def name_types(made: Made, args: Options, model: object, given: dict[str, Any]) -> Made:
    """Converts names of torch dtypes among the arguments to dtypes."""
    kwargs = {**made[1], **given}
    for name in _MOMENT_TYPES:
        kind = getattr(torch, kwargs[name], None) if isinstance(kwargs[name], str) else kwargs[name]
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"optim_args: {name}={kwargs[name]!r} is no torch dtype; give one as in {name}=bfloat16")
        kwargs[name] = kind
    return made[0], kwargs


def grokadamw_settings(args: Options) -> dict[str, Any]:
    """Returns GrokAdamW's own defaults, explicitly."""
    own = {"alpha_init": 0.98, "lamb": 2.0, "gamma": 0.1, "grokking_signal_decay_rate": 0.1, "gradient_clipping": 1.0}
    return {**changed_adam_settings(args), **own}


def torchao_settings(args: Options) -> dict[str, Any]:
    """Returns the settings of torchao, with one scale per 256 values of the state."""
    return {"block_size": 256, "bf16_stochastic_round": False, **adam_settings(args)}


def schedule_free_settings(adam: bool, warmup: bool, args: Any) -> dict[str, Any]:
    """Returns the settings of schedule-free optimizers.

    These implement the warm-up themselves, except RAdam, which needs none.

    Args:
        adam: the optimizer takes betas and eps.
        warmup: the optimizer takes warm-up steps.
        args: the training arguments.

    Raises:
        ValueError: the warm-up is a share of the steps of a run of unknown length.
    """
    schedule = str(getattr(args, "lr_scheduler_type", "constant"))
    if schedule != "constant":
        logger.warning(
            "optim=%r needs no schedule, but lr_scheduler_type=%r is applied too: set lr_scheduler_type='constant'.",
            str(args.optim),
            schedule,
        )
    settings: dict[str, Any] = adam_settings(args) if adam else {}
    settings["weight_decay"] = args.weight_decay
    if warmup:
        steps = args.warmup_steps
        if 0 < steps < 1:
            if args.max_steps <= 0:
                raise ValueError(
                    f"warmup_steps={steps} is a share of all updates, and optim={str(args.optim)!r} needs their "
                    "number: give warmup_steps as a whole number, or max_steps"
                )
            steps = args.get_warmup_steps(args.max_steps)
        settings["warmup_steps"] = int(steps)
    return {**settings, "weight_lr_power": 2.0, "r": 0.0}


def stable_settings(args: Options) -> dict[str, Any]:
    """Returns torch-optimi's own defaults explicitly, and the weight decay, which the class requires."""
    further = {"weight_decay": args.weight_decay, "decouple_lr": False, "max_lr": None, "kahan_sum": None}
    return {**adam_settings(args), **further}


def without_triton(made: Made, args: Options, model: Any, given: dict[str, Any]) -> Made:
    """Disables Triton on a CPU, where it has no driver; the package does not check that."""
    kwargs = {**made[1], **given}
    if model is not None and next((p.device.type for p in model.parameters()), "cpu") == "cpu":
        kwargs.setdefault("triton", False)
    return made[0], kwargs


def lomo_model(made: Made, args: Options, model: object, given: dict[str, Any]) -> Made:
    """Passes the model instead of parameter groups to LOMO, and one weight decay for all parameters."""
    if model is None:
        raise ValueError(f"optim={str(args.optim)!r} updates inside the model's backward pass: pass the model")
    decay = {"weight_decay": args.weight_decay} if args.weight_decay else {}
    return made[0], {**made[1], **given, "model": model, **decay}


def projected(defaults: dict[str, Any], further: Any, made: Made, args: Any, model: Any, given: dict[str, Any]) -> Made:
    """Returns the class and arguments of a low-rank optimizer, with its parameter groups.

    Args:
        defaults: default options of the projected groups.
        further: `(args) -> settings` of the projected groups only.
        made: the class and its arguments.
        args: the training arguments.
        model: the model whose weights are projected.
        given: options from `optim_args`.

    Raises:
        ValueError: an option is invalid.
    """
    options = {**defaults, **given}
    for name, allowed in CHOICES.items():
        if name in options and options[name] not in allowed:
            raise ValueError(f"optim_args: {name}={options[name]!r} is invalid; choose from {', '.join(allowed)}")
    for name in ("rank", "update_proj_gap"):
        if not isinstance(options[name], int) or options[name] < 1:
            raise ValueError(f"optim_args: {name}={options[name]!r} must be a whole number of at least 1")
    return apply_targets(*made, model, args, {**options, **further(args)})


# ---- the table


def _bitsandbytes(
    name: str, settings: object, number: int, paged: bool | None = False, note: str = ""
) -> OptimizerEntry:
    is_ademamix = name == "AdEMAMix"
    return OptimizerEntry(
        partial(load_from, "bitsandbytes.optim", name, "bitsandbytes"),
        bits(settings, number, paged),
        options={"beta1": 0.9, "beta2": 0.999, "beta3": 0.9999} if is_ademamix else {},
        finish=join_betas if is_ademamix else as_it_is,
        package="bitsandbytes",
        note=note or ("paged on a GPU, like the others on a CPU" if paged else ""),
    )


def _galore(name: str, settings: Any, note: str = "") -> OptimizerEntry:
    return OptimizerEntry(
        partial(load_from, "galore_torch", name, "galore"),
        settings,
        PROJECTION,
        partial(projected, PROJECTION, no_settings),
        targets=True,
        devices=frozenset({"cuda"}) if name.endswith("8bit") else frozenset(),
        package="galore-torch",
        note=note,
    )


def _galore_adam(args: Options) -> dict[str, Any]:
    return {"no_deprecation_warning": True, **changed_adam_settings(args)}


def _galore_adafactor(args: Options) -> dict[str, Any]:
    return {"scale_parameter": False, "relative_step": False}


def _apollo(note: str = "") -> OptimizerEntry:
    finish = partial(projected, APOLLO_PROJECTION, adam_settings)
    return OptimizerEntry(
        partial(load_from, "apollo_torch", "APOLLOAdamW", "apollo"),
        changed_adam_settings,
        APOLLO_PROJECTION,
        finish,
        targets=True,
        package="apollo-torch",
        note=note,
    )


def _lomo(name: str) -> OptimizerEntry:
    load = partial(load_from, "lomo_optim", name, "lomo")
    return OptimizerEntry(load, finish=lomo_model, package="lomo-optim", note=_LAYERWISE)


def _schedule_free(name: str, adam: bool, warmup: bool) -> OptimizerEntry:
    return OptimizerEntry(
        partial(load_from, "schedulefree", name, "schedulefree"),
        partial(schedule_free_settings, adam, warmup),
        package="schedulefree",
        note="set `lr_scheduler_type='constant'`; evaluated and saved with the averaged weights",
    )


_EIGHT = "embeddings in 32 bits"
_LAYERWISE = "steps inside backward: no accumulation, no clipping, no fp16"

FROM_LIBRARIES: dict[str, OptimizerEntry] = {
    "adamw_torch_xla": OptimizerEntry(
        partial(load_foreign, "torch_xla.amp.syncfree", "AdamW", "install torch_xla for your device"),
        adam_settings,
        devices=frozenset({"xla"}),
        package="torch_xla",
        note="with `parallel='xla'`",
    ),
    "adamw_torch_npu_fused": OptimizerEntry(
        partial(load_foreign, "torch_npu.optim", "NpuFusedAdamW", "install Ascend's torch_npu"),
        adam_settings,
        devices=frozenset({"npu"}),
        package="torch_npu",
        note="paceline is not tried on NPU devices",
    ),
    "adamw_apex_fused": OptimizerEntry(
        load_apex_adam, adam_settings, devices=frozenset({"cuda"}), package="NVIDIA's Apex"
    ),
    "adamw_anyprecision": OptimizerEntry(
        partial(load_foreign, "torchdistx.optimizers", "AnyPrecisionAdamW", "build torchdistX from its source"),
        anyprecision_settings,
        finish=name_types,
        package="torchdistX",
        note="types in `optim_args`, as in `momentum_dtype=bfloat16`",
    ),
    "adamw_torch_4bit": OptimizerEntry(
        partial(load_torchao, "AdamW4bit"), torchao_settings, package="torchao", note="compiles: needs a C++ compiler"
    ),
    "adamw_torch_8bit": OptimizerEntry(
        partial(load_torchao, "AdamW8bit"), torchao_settings, package="torchao", note="compiles: needs a C++ compiler"
    ),
    "ademamix": _bitsandbytes("AdEMAMix", ademamix_settings, 32),
    "ademamix_8bit": _bitsandbytes("AdEMAMix", ademamix_settings, 8, note=_EIGHT),
    "adamw_bnb_8bit": _bitsandbytes("AdamW", adam_settings, 8, note=_EIGHT),
    "adamw_8bit": _bitsandbytes("AdamW", adam_settings, 8, note=_EIGHT),
    "lion_8bit": _bitsandbytes("Lion", lion_settings, 8, note=_EIGHT),
    "lion_32bit": _bitsandbytes("Lion", lion_settings, 32),
    "paged_adamw_32bit": _bitsandbytes("AdamW", adam_settings, 32, True),
    "paged_adamw_8bit": _bitsandbytes("AdamW", adam_settings, 8, True),
    "paged_ademamix_32bit": _bitsandbytes("AdEMAMix", ademamix_settings, 32, True),
    "paged_ademamix_8bit": _bitsandbytes("AdEMAMix", ademamix_settings, 8, True),
    "paged_lion_32bit": _bitsandbytes("Lion", lion_settings, 32, True),
    "paged_lion_8bit": _bitsandbytes("Lion", lion_settings, 8, True),
    "rmsprop_bnb": _bitsandbytes("RMSprop", no_settings, 32, None),
    "rmsprop_bnb_8bit": _bitsandbytes("RMSprop", no_settings, 8, None, _EIGHT),
    "rmsprop_bnb_32bit": _bitsandbytes("RMSprop", no_settings, 32, None),
    "galore_adamw": _galore("GaLoreAdamW", _galore_adam),
    "galore_adamw_8bit": _galore("GaLoreAdamW8bit", changed_adam_settings),
    "galore_adafactor": _galore("GaLoreAdafactor", _galore_adafactor),
    "galore_adamw_layerwise": _galore("GaLoreAdamW", _galore_adam, _LAYERWISE),
    "galore_adamw_8bit_layerwise": _galore("GaLoreAdamW8bit", changed_adam_settings, _LAYERWISE),
    "galore_adafactor_layerwise": _galore("GaLoreAdafactor", _galore_adafactor, _LAYERWISE),
    "lomo": _lomo("Lomo"),
    "adalomo": _lomo("AdaLomo"),
    "grokadamw": OptimizerEntry(load_grokadamw, grokadamw_settings, package="grokadamw"),
    "schedule_free_radam": _schedule_free("RAdamScheduleFree", True, False),
    "schedule_free_adamw": _schedule_free("AdamWScheduleFree", True, True),
    "schedule_free_sgd": _schedule_free("SGDScheduleFree", False, True),
    "apollo_adamw": _apollo(),
    "apollo_adamw_layerwise": _apollo(_LAYERWISE),
    "stable_adamw": OptimizerEntry(
        partial(load_from, "optimi", "StableAdamW", "optimi"),
        stable_settings,
        finish=without_triton,
        package="torch-optimi",
    ),
}
"""Name in `optim` -> how to make it from the package that owns it."""
