"""Every rule an option must keep, alone or with others. No torch, no files, no environment."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from paceline.args.accelerator_config import AcceleratorConfig, check_accelerator
from paceline.args.choices import IntervalStrategy, SaveStrategy, SchedulerType
from paceline.args.deepspeed_config import fill_config
from paceline.args.errors import UnsupportedOption
from paceline.args.mesh import check_mesh
from paceline.args.places import is_url, staging_folder
from paceline.args.sections import Options
from paceline.args.sharding import is_asked, is_xla_asked, read_sharding, shard_precision_of, wants_shards

# name: (smallest value, largest value or None, whether the largest itself is allowed)
LIMITS: dict[str, tuple[float, float | None, bool]] = {
    "per_device_train_batch_size": (1, None, True),
    "per_device_eval_batch_size": (1, None, True),
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
    "seed": (0, 2**32 - 1, True),
    "data_seed": (0, 2**63 - 1, True),
}


def check_limits(options: Options) -> None:
    """Numbers within their range."""
    for name, (low, high, is_closed) in LIMITS.items():
        value = getattr(options, name)
        if value is None:
            continue
        if value < low:
            raise ValueError(f"{name}={value} is not possible: it must be at least {low}.")
        if high is not None and (value > high or (value == high and not is_closed)):
            bound = "at most" if is_closed else "below"
            raise ValueError(f"{name}={value} is not possible: it must be {bound} {high}.")
    if options.max_steps == 0:
        raise ValueError(
            f"max_steps={options.max_steps} is not possible: give a number of updates, "
            "or -1 for as many as num_train_epochs takes."
        )


def check_precision(options: Options) -> None:
    """One number format at a time."""
    if options.fp16 and options.bf16:
        raise ValueError("fp16=True and bf16=True exclude each other: keep one (bf16 needs no loss scaling).")
    if options.fp16_full_eval and options.bf16_full_eval:
        raise ValueError("fp16_full_eval=True and bf16_full_eval=True exclude each other: keep one.")
    if options.half_precision_backend == "apex" and not options.fp16:
        raise ValueError("half_precision_backend='apex' is a way to run fp16=True: set that too, or leave it out.")
    if options.fp16_opt_level != "O1" and options.half_precision_backend != "apex":
        raise ValueError(
            f"fp16_opt_level='{options.fp16_opt_level}' is a level of NVIDIA's Apex: set half_precision_backend='apex' "
            "too, or leave it out."
        )


def check_intervals(options: Options) -> None:
    """Steps that make sense wherever a strategy counts steps."""
    for kind in ("logging", "eval", "save"):
        steps = getattr(options, f"{kind}_steps")
        if getattr(options, f"{kind}_strategy") != IntervalStrategy.STEPS:
            continue
        if kind == "eval" and not steps:
            steps = options.logging_steps  # The documented fall-back.
        if not steps:
            raise ValueError(
                f"{kind}_steps={steps} is not possible with {kind}_strategy='steps': give a number of updates or a "
                f"share of them below 1; {kind}_strategy='no' turns it off."
            )
        if steps > 1 and steps != int(steps):
            raise ValueError(f"{kind}_steps={steps} is not possible: above 1 it must be a whole number of updates.")


def check_best_model(options: Options) -> None:
    """A best model needs evaluations, each with a checkpoint that it can be loaded from."""
    is_never_evaluated = options.eval_strategy == IntervalStrategy.NO
    if options.save_strategy == SaveStrategy.BEST and is_never_evaluated:
        raise ValueError("save_strategy='best' needs evaluations: set eval_strategy to 'steps' or 'epoch'.")
    if not options.load_best_model_at_end or options.save_strategy == SaveStrategy.BEST:
        return
    if is_never_evaluated:
        raise ValueError(
            "load_best_model_at_end=True needs evaluations: set eval_strategy and save_strategy to 'steps' or 'epoch'."
        )
    if options.eval_strategy != options.save_strategy:
        raise ValueError(
            f"load_best_model_at_end=True needs a checkpoint for each evaluation, but eval_strategy="
            f"'{options.eval_strategy}' and save_strategy='{options.save_strategy}' differ: make them equal, or set "
            "save_strategy='best'."
        )
    if options.eval_strategy == IntervalStrategy.STEPS:
        check_save_multiple(options.save_steps, options.eval_steps or options.logging_steps)


def check_save_multiple(save_steps: float, eval_steps: float) -> None:
    """Checkpoints fall on evaluations."""
    problem = f"load_best_model_at_end=True needs save_steps={save_steps} to be a multiple of eval_steps={eval_steps}"
    if (save_steps < 1) != (eval_steps < 1):
        raise ValueError(f"{problem}; a share of all updates and a number of updates cannot be compared: use one kind.")
    # Decimals, because 0.3 % 0.1 is not 0 in binary.
    if Decimal(str(save_steps)) % Decimal(str(eval_steps)) != 0:
        raise ValueError(f"{problem}; change one of them, or set save_strategy='best'.")


def check_schedule(options: Options) -> None:
    """Schedules that follow an evaluation metric need evaluations."""
    follows_metric = options.lr_scheduler_type in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
    if follows_metric and options.eval_strategy == IntervalStrategy.NO:
        raise ValueError(
            f"lr_scheduler_type='{options.lr_scheduler_type}' follows the evaluations: set eval_strategy to 'steps' or "
            "'epoch'."
        )


def check_loading(options: Options) -> None:
    """Settings of worker processes need worker processes."""
    if options.dataloader_num_workers > 0:
        return
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_multiprocessing_context"):
        value = getattr(options, name)
        if value:
            raise ValueError(f"{name}={value!r} needs worker processes: set dataloader_num_workers, or leave it out.")


def check_switches(options: Options) -> None:
    """Switches that mean nothing without another."""
    if options.compile_regions and not options.torch_compile:
        raise ValueError("compile_regions=True says how to compile: set torch_compile=True too.")
    if options.enable_jit_checkpoint and not options.stop_signals:
        raise ValueError(
            "enable_jit_checkpoint=True is what stop_signals does: leave stop_signals at True, or leave it out."
        )
    if options.keep_best and options.eval_strategy == IntervalStrategy.NO:
        raise ValueError(f"keep_best={options.keep_best} needs evaluations: set eval_strategy to 'steps' or 'epoch'.")
    if options.keep_best_metric is not None and not options.keep_best:
        raise ValueError(
            f"keep_best_metric={options.keep_best_metric!r} says what keep_best goes by: set keep_best to a number of "
            "checkpoints, or leave it out."
        )
    if options.optim_target_modules and not str(options.optim).startswith(("galore", "apollo", "muon")):
        raise ValueError(
            f"optim_target_modules={options.optim_target_modules!r} is read by GaLore and APOLLO, and by Muon, "
            f"not by optim='{options.optim}': leave it out, or freeze parameters with requires_grad_(False)."
        )


def check_generation(options: Options) -> None:
    """What sequence-to-sequence arguments add."""
    for name in ("generation_max_length", "generation_num_beams"):
        value = getattr(options, name, None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r} is not possible: give a whole number of at least 1, or leave it out.")
    strategy = str(options.train_sampling_strategy)
    if getattr(options, "sortish_sampler", False) and strategy not in ("random", "group_by_length"):
        raise ValueError(
            f"sortish_sampler=True and train_sampling_strategy={strategy!r} are two orders of the same samples: "
            "leave one of them out."
        )


def is_off(value: Any) -> bool:
    """Whether a value asks for nothing: empty, or a dict of values that ask for nothing."""
    if isinstance(value, dict):
        return all(is_off(item) for item in value.values())
    return not value


def is_default(*accepted: Any) -> Callable[[Any], bool]:
    """Whether a value is one of those that ask for nothing."""
    return lambda value: value in accepted


NOT_YET = "use parallel='ddp' or 'fsdp', and leave it out"
NO_TRACKIO = "the Trackio reporter is not here yet; leave it out and use report_to='tensorboard', 'jsonl' or 'csv'"
# name: (whether the value asks for nothing, what to do instead)
UNSUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "trackio_space_id": (is_default(None, "trackio"), NO_TRACKIO),
    "trackio_bucket_id": (is_off, NO_TRACKIO),
    "trackio_static_space_id": (is_off, NO_TRACKIO),
}


def check_supported(options: Options) -> None:
    """Options that later versions bring.

    Raises:
        UnsupportedOption: one of them asks for something.
    """
    for name, (asks_nothing, remedy) in UNSUPPORTED.items():
        value = getattr(options, name)
        if not asks_nothing(value):
            shown = [str(item) for item in value] if isinstance(value, list) else value
            raise UnsupportedOption(f"{name}={shown!r} is not supported: {remedy}.")
    check_accelerator(options.accelerator_config, options.gradient_accumulation_steps)


def check_engine(options: Options) -> None:
    """An engine of another library shares the work by itself."""
    for name in ("parallel", "parallelism_config", "fsdp", "fsdp_config"):
        value = getattr(options, name)
        if value is not None and not is_off(value):
            raise ValueError(f"deepspeed and {name}={value!r} are two ways to share the work: keep one.")
    if options.checkpoint_format == "sharded":
        raise UnsupportedOption(
            "checkpoint_format='sharded' with deepspeed is not supported: its parts are put together; leave it out."
        )
    fill_config(options)


def check_parallel(options: Options) -> None:
    """One way to share the work."""
    if options.deepspeed:
        check_engine(options)
    elif check_mesh(options):
        pass
    elif is_asked(options.fsdp):
        read_sharding(options.fsdp, options.fsdp_config)
        if options.parallel == "ddp":
            raise ValueError(f"parallel='ddp' and fsdp={options.fsdp!r} are two ways to share the work: keep one.")
    elif options.parallel == "fsdp":
        read_sharding(True, options.fsdp_config)
    elif not is_off(options.fsdp_config):
        raise ValueError(f"fsdp_config={options.fsdp_config!r} says how to shard: set fsdp=True too, or leave it out.")
    wants_shards(options)
    shard_precision_of(options)
    if options.ddp_static_graph and options.ddp_find_unused_parameters:
        raise ValueError(
            "ddp_static_graph=True finds unused parameters by itself: leave ddp_find_unused_parameters out."
        )


def check_xla(options: Options) -> None:
    """What XLA devices cannot be asked for."""
    if not is_xla_asked(options.parallel, options.fsdp, options.fsdp_config):
        return
    if options.use_cpu:
        raise ValueError(
            "use_cpu=True and XLA devices exclude each other: leave use_cpu out, and set the environment variable "
            "PJRT_DEVICE=CPU to try a script on XLA's own CPU device."
        )
    if is_asked(options.fsdp) and not is_xla_asked(None, options.fsdp, options.fsdp_config):
        raise ValueError(
            f"parallel='xla' with fsdp={options.fsdp!r} shards by XLA's compiler: say so with "
            "fsdp_config={'xla': True, 'xla_fsdp_v2': True}, or leave fsdp out."
        )
    if options.tpu_num_cores == 1 and is_asked(options.fsdp):
        raise ValueError(
            f"tpu_num_cores=1 and fsdp={options.fsdp!r} contradict each other: a model is sharded over all XLA "
            "devices; leave one of them out."
        )


CHECKS = (
    check_limits,
    check_precision,
    check_intervals,
    check_best_model,
    check_schedule,
    check_loading,
    check_switches,
    check_generation,
    check_parallel,
    check_xla,
    check_supported,
)


def check(options: Options) -> None:
    """Check every rule.

    Raises:
        ValueError: a rule is broken; the message names the options, their values and what to set instead.
        UnsupportedOption: an option asks for what this version does not do.
    """
    for rule in CHECKS:
        rule(options)


def derived_values(options: Options) -> dict[str, Any]:
    """What follows from other options where it was not given: scripts and callbacks read these from the arguments."""
    values: dict[str, Any] = {}
    if options.eval_strategy != IntervalStrategy.NO:
        values["do_eval"] = True
    if options.eval_strategy == IntervalStrategy.STEPS and not options.eval_steps:
        values["eval_steps"] = options.logging_steps
    needs_metric = (
        options.load_best_model_at_end
        or options.save_strategy == SaveStrategy.BEST
        or options.lr_scheduler_type in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
    )
    metric = options.metric_for_best_model or ("loss" if needs_metric else None)
    if metric is not None:
        values["metric_for_best_model"] = metric
        if options.greater_is_better is None:
            values["greater_is_better"] = not metric.endswith("loss")
    if options.torch_compile or options.torch_compile_mode or options.torch_compile_backend:
        values["torch_compile"] = True
        values["torch_compile_backend"] = options.torch_compile_backend or "inductor"
    config = options.accelerator_config
    if isinstance(config, AcceleratorConfig) and config.num_steps and options.gradient_accumulation_steps == 1:
        values["gradient_accumulation_steps"] = config.num_steps
    if is_url(options.output_dir):
        if options.output_store not in (None, options.output_dir):
            raise ValueError(
                f"output_dir={options.output_dir!r} and output_store={options.output_store!r} are two stores: let "
                "output_dir be a folder of this machine, or leave output_store out."
            )
        values["output_store"] = options.output_dir
        values["output_dir"] = staging_folder(str(options.output_dir))
    if options.use_cpu:
        values["dataloader_pin_memory"] = False
    return values
