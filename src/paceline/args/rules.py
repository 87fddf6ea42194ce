"""Validation rules of options, alone and in combination. Reads no files and no environment; imports no torch."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from paceline.args.accelerator_config import check_accelerator
from paceline.args.choices import IntervalStrategy, SaveStrategy, SchedulerType
from paceline.args.compilation import check_activations, check_compilation, check_fp8
from paceline.args.deepspeed_config import fill_config
from paceline.args.errors import UnsupportedOption
from paceline.args.mesh import check_mesh
from paceline.args.metric_names import seems_lower_better
from paceline.args.packing import check_packing, check_tokens
from paceline.args.redeclared import own_options
from paceline.args.sections import DistillationSection, Options
from paceline.args.sharding import is_asked, is_xla_asked, read_sharding, shard_precision_of, wants_shards
from paceline.args.warmups import check_warmups

# name: (minimum, maximum or None, True if the maximum is inclusive)
LIMITS: dict[str, tuple[float, float | None, bool]] = {
    "per_device_train_batch_size": (1, None, True),
    "per_device_eval_batch_size": (1, None, True),
    "packing_length": (2, None, True),
    "per_device_train_tokens": (1, None, True),
    "gradient_accumulation_steps": (1, None, True),
    "num_train_epochs": (0, None, True),
    "learning_rate": (0, None, True),
    "warmup_steps": (0, None, True),
    "weight_decay": (0, None, True),
    "adam_beta1": (0, 1, False),
    "adam_beta2": (0, 1, False),
    "adam_epsilon": (0, None, True),
    "max_grad_norm": (0, None, True),
    "label_smoothing_factor": (0, 1, False),
    "neftune_noise_alpha": (0, None, True),
    "torch_empty_cache_steps": (1, None, True),
    "tpu_num_cores": (1, None, True),
    "logging_steps": (0, None, True),
    "eval_steps": (0, None, True),
    "save_steps": (0, None, True),
    "keep_best": (0, None, True),
    "keep_every_steps": (0, None, True),
    "keep_every_hours": (0, None, True),
    "eval_delay": (0, None, True),
    "eval_accumulation_steps": (1, None, True),
    "eval_spill_gb": (0, None, True),
    "dataloader_num_workers": (0, None, True),
    "dataloader_prefetch_factor": (1, None, True),
    "ddp_bucket_cap_mb": (1, None, True),
    "ddp_timeout": (1, None, True),
    "activation_memory_budget": (0, 1, True),
    "average_steps": (1, None, True),
    "swa_lr": (0, None, True),
    "swa_anneal_steps": (0, None, True),
    "seed": (0, 2**32 - 1, True),
    "data_seed": (0, 2**63 - 1, True),
}

MAY_BE_INFINITE = frozenset({"max_grad_norm", "eval_spill_gb"})  # no limit
INSTEAD_OF_INFINITY = {
    "num_train_epochs": "set max_steps to train for a number of optimizer steps",
    "logging_steps": "logging_strategy='no' turns the logs off",
    "eval_steps": "eval_strategy='no' turns evaluations off",
    "eval_delay": "eval_strategy='no' turns evaluations off",
    "save_steps": "save_strategy='no' turns checkpoints off",
    "keep_every_hours": "0 turns it off",
}

# the prefix of the Hugging Face Trainer's message, which scripts may match
WORDS_OF_LIMITS = {
    "torch_empty_cache_steps": "`torch_empty_cache_steps` must be an integer bigger than 0, got {}",
    "warmup_steps": "Got warmup_steps = {}, Expected value warmup_steps >= 0",
}


def check_limits(options: Options) -> None:
    """Checks that numbers are within their range."""
    for name, (low, high, is_closed) in LIMITS.items():
        value = getattr(options, name)
        if value is None:
            continue
        if value < low:
            begin = f"{WORDS_OF_LIMITS[name].format(value)}: " if name in WORDS_OF_LIMITS else ""
            raise ValueError(f"{begin}{name}={value} is invalid: it must be at least {low}.")
        if high is not None and (value > high or (value == high and not is_closed)):
            bound = "at most" if is_closed else "below"
            raise ValueError(f"{name}={value} is invalid: it must be {bound} {high}.")
        if value == math.inf and name not in MAY_BE_INFINITE:
            remedy = f"; {INSTEAD_OF_INFINITY[name]}" if name in INSTEAD_OF_INFINITY else ""
            raise ValueError(f"{name}={value} is invalid: expected a finite number{remedy}.")
    if options.max_steps == 0:
        raise ValueError(
            f"max_steps={options.max_steps} is invalid: expected a number of optimizer steps, "
            "or -1 to use num_train_epochs."
        )


def check_precision(options: Options) -> None:
    """Checks that only one precision is set."""
    if options.fp16 and options.bf16:
        raise ValueError(
            "At most one of fp16 and bf16 can be True: they exclude each other: keep one (bf16 needs no loss scaling)."
        )
    if options.fp16_full_eval and options.bf16_full_eval:
        raise ValueError(
            "At most one of fp16 and bf16 can be True for full eval: fp16_full_eval and bf16_full_eval exclude each "
            "other: keep one."
        )
    if options.half_precision_backend == "apex" and not options.fp16:
        raise ValueError("half_precision_backend='apex' requires fp16=True: set that too, or leave it out.")
    if options.fp16_opt_level != "O1" and options.half_precision_backend != "apex":
        raise ValueError(
            f"fp16_opt_level='{options.fp16_opt_level}' is a level of NVIDIA's Apex: set half_precision_backend='apex' "
            "too, or leave it out."
        )


NO_STEPS = {
    "logging": "logging strategy {} requires non-zero --logging_steps",
    "eval": "evaluation strategy {} requires either non-zero --eval_steps or --logging_steps",
    "save": "save strategy {} requires non-zero --save_steps",
}


def check_intervals(options: Options) -> None:
    """Checks the step intervals of strategies that count steps."""
    for kind in ("eval", "logging", "save"):
        steps = getattr(options, f"{kind}_steps")
        strategy = getattr(options, f"{kind}_strategy")
        if strategy != IntervalStrategy.STEPS:
            continue
        if kind == "eval" and not steps:
            steps = options.logging_steps  # The documented fall-back.
        if not steps:
            raise ValueError(
                f"{NO_STEPS[kind].format(strategy)}: {kind}_steps={steps} is invalid with "
                f"{kind}_strategy='steps': expected a number of optimizer steps, or a ratio of all steps below 1; "
                f"{kind}_strategy='no' turns it off."
            )
        if steps > 1 and steps != int(steps):
            raise ValueError(
                f"--{kind}_steps must be an integer if bigger than 1: {steps}; above 1 it must be a whole number of "
                "optimizer steps."
            )


def check_best_model(options: Options) -> None:
    """Checks that a run with a best model has evaluations, and a checkpoint at each of them."""
    is_never_evaluated = options.eval_strategy == IntervalStrategy.NO
    if options.save_strategy == SaveStrategy.BEST and is_never_evaluated:
        raise ValueError("save_strategy='best' needs evaluations: set eval_strategy to 'steps' or 'epoch'.")
    if not options.load_best_model_at_end or options.save_strategy == SaveStrategy.BEST:
        return
    if is_never_evaluated:
        raise ValueError(
            "--load_best_model_at_end requires the save and eval strategy to match: load_best_model_at_end=True needs "
            "evaluations: set eval_strategy and save_strategy to 'steps' or 'epoch'."
        )
    if options.eval_strategy != options.save_strategy:
        raise ValueError(
            "--load_best_model_at_end requires the save and eval strategy to match: load_best_model_at_end=True needs "
            "a checkpoint for each evaluation, but eval_strategy="
            f"'{options.eval_strategy}' and save_strategy='{options.save_strategy}' differ: make them equal, or set "
            "save_strategy='best'."
        )
    if options.eval_strategy == IntervalStrategy.STEPS:
        check_save_multiple(options.save_steps, options.eval_steps or options.logging_steps)


def check_best_metric(options: Options) -> None:
    """Checks that the metric of the best model is set. Only for a Trainer: arguments may be created before it is known.

    Raises:
        ValueError: it is not set.
    """
    if options.save_strategy == SaveStrategy.BEST and options.metric_for_best_model is None:
        raise ValueError(
            "`args.metric_for_best_model` must be provided when using 'best' save_strategy: name the evaluation metric "
            "that decides, as in metric_for_best_model='loss'."
        )


def check_save_multiple(save_steps: float, eval_steps: float) -> None:
    """Checks that every checkpoint coincides with an evaluation."""
    is_round = "round " if save_steps >= 1 and eval_steps >= 1 else ""
    problem = (
        f"--load_best_model_at_end requires the saving steps to be a {is_round}multiple of the evaluation steps: "
        f"load_best_model_at_end=True needs save_steps={save_steps} to be a multiple of eval_steps={eval_steps}"
    )
    if (save_steps < 1) != (eval_steps < 1):
        raise ValueError(
            f"{problem}, which cannot get guaranteed when mixing ratio and absolute steps: use one kind of both."
        )
    # Decimals, because 0.3 % 0.1 is not 0 in binary.
    if Decimal(str(save_steps)) % Decimal(str(eval_steps)) != 0:
        raise ValueError(f"{problem}; change one of them, or set save_strategy='best'.")


def check_schedule(options: Options) -> None:
    """Checks that a schedule that follows an evaluation metric has evaluations."""
    follows_metric = options.lr_scheduler_type in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
    if follows_metric and options.eval_strategy == IntervalStrategy.NO:
        raise ValueError(
            f"lr_scheduler_type {options.lr_scheduler_type} requires an eval strategy: it follows the evaluations; set "
            "eval_strategy to 'steps' or 'epoch'."
        )


def check_loading(options: Options) -> None:
    """Checks that settings of worker processes come with worker processes."""
    if options.dataloader_num_workers > 0:
        return
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_multiprocessing_context"):
        value = getattr(options, name)
        if value:
            raise ValueError(
                f"--{name} can only be set when data is loaded in a different process: {name}={value!r} needs worker "
                "processes; set dataloader_num_workers, or leave it out."
            )


def check_switches(options: Options) -> None:
    """Checks options that require another option."""
    if options.enable_jit_checkpoint and not options.stop_signals:
        raise ValueError(
            "enable_jit_checkpoint=True requires stop_signals=True: leave stop_signals at True, or leave it out."
        )
    if options.keep_best and options.eval_strategy == IntervalStrategy.NO:
        raise ValueError(f"keep_best={options.keep_best} needs evaluations: set eval_strategy to 'steps' or 'epoch'.")
    if options.keep_best_metric is not None and not options.keep_best:
        raise ValueError(
            f"keep_best_metric={options.keep_best_metric!r} requires keep_best: set keep_best to a number of "
            "checkpoints, or leave it out."
        )
    kept, best = (
        (name or "loss").removeprefix("eval_") for name in (options.keep_best_metric, options.metric_for_best_model)
    )
    if kept != best and seems_lower_better(kept, at_end=True):
        raise ValueError(
            f"keep_best_metric={options.keep_best_metric!r}: the checkpoints with the highest values would be kept, "
            f"since the name does not end in 'loss': set metric_for_best_model={options.keep_best_metric!r} with "
            "greater_is_better=False, or give it a name that ends in 'loss'."
        )
    if options.optim_target_modules and not str(options.optim).startswith(("galore", "apollo", "muon")):
        raise ValueError(
            f"optim_target_modules={options.optim_target_modules!r} is read by GaLore and APOLLO, and by Muon, "
            f"not by optim='{options.optim}': leave it out, or freeze parameters with requires_grad_(False)."
        )


def check_optimizer_memory(options: Options) -> None:
    """Checks that `optimizer_in_backward` and `optimizer_state_dtype` are not combined with what they exclude."""
    if not options.optimizer_in_backward and options.optimizer_state_dtype == "float32":
        return
    if options.deepspeed or is_xla_asked(options.parallel, options.fsdp, options.fsdp_config):
        asked = "optimizer_in_backward=True" if options.optimizer_in_backward else "optimizer_state_dtype='bfloat16'"
        raise UnsupportedOption(f"{asked} is not supported with DeepSpeed and on XLA devices: leave it out.")
    if options.half_precision_backend == "apex" and options.optimizer_state_dtype != "float32":
        raise UnsupportedOption(
            "optimizer_state_dtype='bfloat16' with half_precision_backend='apex' is not supported: set bf16=True "
            "instead."
        )
    if not options.optimizer_in_backward:
        return
    why = "optimizer_in_backward=True steps each parameter inside the backward pass and never holds all gradients"
    steps = options.gradient_accumulation_steps
    excluded = {
        f"gradient_accumulation_steps={steps}": (steps > 1, "set gradient_accumulation_steps=1"),
        "fp16=True": (options.fp16, "set bf16=True instead"),
        "nonfinite_policy='skip'": (options.nonfinite_policy == "skip", "set 'raise' or 'rollback'"),
        "auto_find_batch_size=True": (options.auto_find_batch_size, "set per_device_train_batch_size"),
        "gradient_noise_scale=True": (options.gradient_noise_scale, "leave gradient_noise_scale out"),
        "parallel='ddp'": (options.parallel == "ddp", "set parallel='fsdp', which averages each gradient first"),
    }
    for name, (is_set, remedy) in excluded.items():
        if is_set:
            raise UnsupportedOption(f"{name}: {why}; {remedy}.")


def check_generation(options: Options) -> None:
    """Checks the options of sequence-to-sequence arguments."""
    for name in ("generation_max_length", "generation_num_beams"):
        value = getattr(options, name, None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r} is invalid: expected a whole number of at least 1; or leave it out.")
    strategy = str(options.train_sampling_strategy)
    if getattr(options, "sortish_sampler", False) and strategy not in ("random", "group_by_length"):
        raise ValueError(
            f"sortish_sampler=True and train_sampling_strategy={strategy!r} are two orders of the same samples: "
            "leave one of them out."
        )


def is_off(value: object) -> bool:
    """True if a value has no effect: it is empty, or a dict of such values."""
    if isinstance(value, dict):
        return all(is_off(item) for item in value.values())
    return not value


def is_default(*accepted: Any) -> Callable[[Any], bool]:
    """Returns a function that is True for the values without an effect."""
    return lambda value: value in accepted


def check_accumulation(options: Options) -> None:
    """Checks `accelerator_config` and its accumulation steps."""
    check_accelerator(options.accelerator_config, options.gradient_accumulation_steps)


def check_engine(options: Options) -> None:
    """Checks that DeepSpeed is not combined with another way to parallelize."""
    for name in ("parallel", "parallelism_config", "fsdp", "fsdp_config"):
        value = getattr(options, name)
        if value is not None and not is_off(value):
            using = "Using --fsdp xxx together with --deepspeed is not possible: " if name == "fsdp" else ""
            raise ValueError(f"{using}deepspeed and {name}={value!r} are two ways to parallelize: keep one.")
    if options.checkpoint_format == "sharded":
        raise UnsupportedOption(
            "checkpoint_format='sharded' with deepspeed is not supported: its shards are consolidated; leave it out."
        )
    fill_config(options)


def check_parallel(options: Options) -> None:
    """Checks that at most one way to parallelize is set."""
    if options.deepspeed:
        check_engine(options)
    elif check_mesh(options):
        pass
    elif is_asked(options.fsdp):
        read_sharding(options.fsdp, options.fsdp_config)
        if isinstance(options.parallel, str) and options.parallel not in ("fsdp", "xla"):
            raise ValueError(
                f"parallel={options.parallel!r} and fsdp={options.fsdp!r} are two ways to parallelize: keep one."
            )
    elif options.parallel == "fsdp":
        read_sharding(True, options.fsdp_config)
    elif not is_off(options.fsdp_config):
        raise ValueError(f"fsdp_config={options.fsdp_config!r} requires fsdp: set fsdp=True too, or leave it out.")
    wants_shards(options)
    shard_precision_of(options)
    if options.ddp_static_graph and options.ddp_find_unused_parameters:
        raise ValueError(
            "ddp_static_graph=True finds unused parameters by itself: leave ddp_find_unused_parameters out."
        )


def check_xla(options: Options) -> None:
    """Checks options that XLA devices do not support."""
    if not is_xla_asked(options.parallel, options.fsdp, options.fsdp_config):
        return
    if options.use_cpu:
        raise ValueError(
            "use_cpu=True and XLA devices exclude each other: leave use_cpu out, and set the environment variable "
            "PJRT_DEVICE=CPU to try a script on XLA's own CPU device."
        )
    if is_asked(options.fsdp) and not is_xla_asked(None, options.fsdp, options.fsdp_config):
        raise ValueError(
            f"parallel='xla' with fsdp={options.fsdp!r} shards by XLA's compiler: set "
            "fsdp_config={'xla': True, 'xla_fsdp_v2': True}, or leave fsdp out."
        )
    if options.tpu_num_cores == 1 and is_asked(options.fsdp):
        raise ValueError(
            f"tpu_num_cores=1 and fsdp={options.fsdp!r} contradict each other: a model is sharded over all XLA "
            "devices; leave one of them out."
        )


def check_average(options: Options) -> None:
    """Checks the options of weight averages, if any is set."""
    unset = (options.ema_decay is None, options.swa_start is None, options.swa_lr is None, options.ema_warmup)
    if not all((*unset, options.average_steps is None, options.average_device == "model")) or options.swa_anneal_steps:
        importlib.import_module("paceline.args.averages").check_averages(options)


def check_passes(options: Options) -> None:
    """Checks the regularizers, if there are any."""
    if options.regularizers:
        importlib.import_module("paceline.args.regularizers").check_regularizers(options)


def check_samples(options: Options) -> None:
    """Checks the options that call the model at evaluations, if they are set."""
    for name in ("eval_samples", "eval_harness"):
        if getattr(options, name):
            importlib.import_module("paceline.args.eval_samples").check_pipeline(options, name)


def check_training_phases(options: Options) -> None:
    """Checks the phases of the run, if there are any."""
    if options.phases:
        importlib.import_module("paceline.args.phases").check_phases(options)


def check_sources(options: Options) -> None:
    """Checks the option of the losses by source, if it is set."""
    if options.loss_by_source:
        importlib.import_module("paceline.args.source_loss").check_source_loss(options)


def check_token_terms(options: Options) -> None:
    """Checks the options of terms beside the cross-entropies, if one is set."""
    if options.log_token_metrics or options.z_loss_weight:
        importlib.import_module("paceline.args.token_terms").check_token_terms(options)


def check_teacher(options: Options) -> None:
    """Checks the options of distillation, if any is set."""
    unset = {name: field.default for name, field in DistillationSection.__dataclass_fields__.items()}
    if any(getattr(options, name) != default for name, default in unset.items()):
        importlib.import_module("paceline.args.distillation").check_distillation(options)


CHECKS = (
    check_limits,
    check_precision,
    check_intervals,
    check_best_model,
    check_schedule,
    check_loading,
    check_switches,
    check_optimizer_memory,
    check_generation,
    check_parallel,
    check_compilation,
    check_activations,
    check_fp8,
    check_packing,
    check_tokens,
    check_warmups,
    check_xla,
    check_accumulation,
    check_average,
    check_passes,
    check_samples,
    check_training_phases,
    check_teacher,
    check_sources,
    check_token_terms,
)


def check(options: Options) -> None:
    """Checks every rule.

    Raises:
        ValueError: a rule is broken; the message names the options, their values and the remedy.
        UnsupportedOption: an option that this version does not support.
    """
    read = own_options(options)
    for rule in CHECKS:
        rule(read)


def check_for_run(options: Options) -> None:
    """Checks every rule, including those that apply only once there is a Trainer.

    Raises:
        ValueError, UnsupportedOption: see `check` and `check_best_metric`.
    """
    check(options)
    check_best_metric(own_options(options))
