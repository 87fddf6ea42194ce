"""The plan of a run: its configuration, resolved once from the arguments and the size of the data."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.args.accelerator_config import accelerator_notes, check_sharing, global_micro_batch_size
from paceline.args.choices import IntervalStrategy
from paceline.args.construction import derived_values
from paceline.args.errors import UnsupportedOption
from paceline.args.mesh import Mesh, engine_of, read_size, resolve_mesh
from paceline.args.packing import check_packing_on, tokens_of
from paceline.args.redeclared import note_on_redeclared, own_options
from paceline.args.registry import STRATEGIES
from paceline.args.rules import check, check_for_run
from paceline.args.sections import Options
from paceline.args.sharding import is_asked, is_xla_asked, shard_precision_of
from paceline.args.warmups import (
    BatchWarmup,
    LengthWarmup,
    describe_warmups,
    passes_of,
    resolve_batch_warmup,
    resolve_length_warmup,
)

__all__ = ["Plan", "UnsupportedOption", "check", "resolve", "resolve_warmup"]

UNCOUNTED = {"no": "never", "epoch": "at each end of an epoch", "best": "when an evaluation is the best yet"}


@dataclass(frozen=True)
class Plan:
    """The resolved configuration of one run. A step is one optimizer step.

    Attributes:
        micro_batch_size: samples per process in one training micro-batch; with a token budget the mean, rounded.
        eval_batch_size: samples per process in one evaluation batch.
        accumulation_steps: micro-batches per step; after `batch_warmup`, if there is one.
        world_size: number of processes.
        mesh: the device mesh, which determines the ranks that read the same data.
        parallel: the strategy; None for one process.
        global_batch_size: samples per step, over all processes; with a token budget the mean, rounded.
        updates_per_epoch: steps in one epoch (after `batch_warmup`), of which the last one may have fewer
            micro-batches; None if unknown.
        micro_batches_per_epoch: micro-batches of one process in one epoch, as the loader counts; None if unknown.
        max_steps: steps of the run.
        num_epochs: maximum number of epochs; `sys.maxsize` if the length is unknown.
        num_train_epochs: epochs requested, or the equivalent of max_steps.
        samples_per_epoch: samples in one epoch, over all processes; None if unknown.
        warmup_steps: steps of warmup.
        logging_strategy, eval_strategy, save_strategy: intervals of logs, evaluations and checkpoints.
        logging_steps, eval_steps, save_steps: steps between two logs, evaluations and checkpoints; at least 1.
        eval_on_start: evaluate before the first step.
        precision: "full" (no autocast), "bf16", "fp16", or "apex-" and the level of NVIDIA's Apex.
        shard_precision: description of a sharded model's dtypes; None for the dtypes of its parameters.
        max_grad_norm: L2 norm that gradients are clipped to; 0 disables clipping.
        seed, data_seed: seeds of all random generators, and of the order of the data.
        average_tokens_across_devices: losses are divided by the number of targets over all processes.
        nonfinite_policy: policy for a loss or gradient that is not finite.
        leave_out_non_finite: the logged mean is over the finite losses if there are any.
        auto_find_batch_size: halve the micro-batch size after an out-of-memory.
        metric_for_best_model, greater_is_better: criterion of the best model; None if unused.
        micro_batch_tokens: maximum tokens per process in one training micro-batch; None without a token budget.
        update_size: samples per step over all processes, or micro-batches with a token budget. A run resumed on
            another number of processes keeps it.
        batch_warmup: the micro-batches of each step while the global batch size grows; None if it is constant.
        length_warmup: the maximum sequence length of each step; None if samples are not cut.
        notes: one sentence for each decision to report.
    """

    micro_batch_size: int
    eval_batch_size: int
    accumulation_steps: int
    world_size: int
    global_batch_size: int
    updates_per_epoch: int | None
    micro_batches_per_epoch: int | None
    max_steps: int
    num_epochs: int
    num_train_epochs: float
    samples_per_epoch: int | None
    warmup_steps: int
    logging_strategy: str
    eval_strategy: str
    save_strategy: str
    logging_steps: int
    eval_steps: int
    save_steps: int
    eval_on_start: bool
    precision: str
    max_grad_norm: float
    seed: int
    data_seed: int
    average_tokens_across_devices: bool
    nonfinite_policy: str
    leave_out_non_finite: bool
    auto_find_batch_size: bool
    metric_for_best_model: str | None
    greater_is_better: bool | None
    parallel: str | None = None
    shard_precision: str | None = None
    mesh: Mesh = field(default_factory=Mesh)
    micro_batch_tokens: int | None = None
    update_size: int = 0
    batch_warmup: BatchWarmup | None = None
    length_warmup: LengthWarmup | None = None
    notes: tuple[str, ...] = ()

    def halved(self) -> Plan:
        """Returns the plan with twice as many micro-batches of half the size (rounded up); the global batch size stays.

        Raises:
            ValueError: a micro-batch is one sample already.
        """
        if self.micro_batch_size == 1:
            raise ValueError("A micro-batch of one sample cannot be halved: memory is too small for one sample.")
        size = (self.micro_batch_size + 1) // 2
        steps = self.accumulation_steps * 2
        note = (
            f"Memory ran out: micro-batches of {size} instead of {self.micro_batch_size} samples, "
            f"{steps} instead of {self.accumulation_steps} per step; still {self.global_batch_size} samples per step."
        )
        return replace(self, micro_batch_size=size, accumulation_steps=steps, notes=(*self.notes, note))

    def num_micro_batches(self, num_steps: int) -> int:
        """Returns the micro-batches of one process in the first `num_steps` steps, if no epoch ends among them."""
        warmup = self.batch_warmup
        return num_steps * self.accumulation_steps if warmup is None else warmup.total(num_steps)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan in JSON types."""
        return {**asdict(self), "notes": list(self.notes)}

    def describe(self) -> str:
        """Describes the plan in a few lines of text."""
        processes, parts = "", 1
        if self.world_size > 1:
            parts = self.mesh.data_size
            processes = f" x {parts} {'processes' if self.mesh.is_data_only else 'data-parallel ranks'}"
        epoch = "unknown length" if self.updates_per_epoch is None else f"{self.updates_per_epoch:,} per epoch"
        samples = "" if self.samples_per_epoch is None else f", {self.samples_per_epoch:,} samples each"
        unit = "epoch" if self.num_train_epochs == 1 else "epochs"
        epochs = "" if self.updates_per_epoch is None else f" ({self.num_train_epochs:.4g} {unit}{samples})"
        clip = f"gradients clipped to norm {self.max_grad_norm:g}" if self.max_grad_norm else "gradients not clipped"
        seeds = f"seed {self.seed}" + (f", data seed {self.data_seed}" if self.data_seed != self.seed else "")
        numbers = f"{self.precision} precision"
        if self.shard_precision is not None:
            own = "" if self.precision == "full" else f"{numbers}, "
            numbers = f"{own}mixed_precision_policy ({self.shard_precision})"
        most = "at most " if self.micro_batch_size * self.accumulation_steps * parts > self.global_batch_size else ""
        lines = [
            f"steps      {self.max_steps:,}{epochs}, {epoch}, warmup {self.warmup_steps:,}",
            f"samples    {self._batch(most)} x {self.accumulation_steps} micro-batches{processes}",
            *([self._processes()] if self.parallel is not None else []),
            f"numbers    {numbers}, {clip}, {seeds}",
            f"log        {self._interval('logging')}",
            f"evaluate   {self._interval('eval')}, batches of {self.eval_batch_size}",
            f"save       {self._interval('save')}",
            *(f"note       {note}" for note in self.notes),
        ]
        return "\n".join(lines)

    def _batch(self, most: str) -> str:
        if self.micro_batch_tokens is not None:
            return f"about {self.global_batch_size:,} per step = at most {self.micro_batch_tokens:,} tokens"
        return f"{self.global_batch_size:,} per step = {most}{self.micro_batch_size}"

    def _processes(self) -> str:
        assert self.parallel is not None
        several = len(self.mesh.axes) > 1 or self.parallel == "mesh"
        mesh = f"; mesh {self.mesh.describe()}" if several else ""
        return f"processes  {self.world_size}, {STRATEGIES[self.parallel].description}{mesh}"

    def _interval(self, kind: str) -> str:
        strategy = getattr(self, f"{kind}_strategy")
        if strategy == IntervalStrategy.STEPS:
            end = "" if kind == "logging" else " and after the last"  # see DefaultFlowCallback
            return f"every {getattr(self, f'{kind}_steps'):,} steps{end}"
        return UNCOUNTED[strategy]


@dataclass(frozen=True)
class Duration:
    """The length of the run."""

    updates_per_epoch: int | None
    max_steps: int
    num_epochs: int
    num_train_epochs: float


def precision_of(args: Any) -> str:
    """Returns the value of `Plan.precision` for these arguments."""
    if args.fp16 and args.half_precision_backend == "apex":
        return f"apex-{args.fp16_opt_level}"
    return half_format(args.fp16, args.bf16) or "full"


def half_format(fp16: bool, bf16: bool) -> str | None:
    """Returns the 16-bit format that the two flags request, or None."""
    if fp16:
        return "fp16"
    return "bf16" if bf16 else None


def resolve(
    args: Options,
    *,
    world_size: int = 1,
    micro_batches_per_epoch: int | None,
    samples_per_epoch: int | None = None,
    resumed_batch_size: int | None = None,
    local_size: int | None = None,
) -> Plan:
    """Resolves the plan of a run.

    Args:
        args: the arguments.
        world_size: number of processes.
        micro_batches_per_epoch: training micro-batches of one process in one epoch; None if unknown.
        samples_per_epoch: training samples in one epoch over all processes; None if unknown.
        resumed_batch_size: the `update_size` of a run started on another number of processes; None computes it from
            the arguments.
        local_size: processes per machine; None for all.

    Raises:
        ValueError: the arguments break a rule, or the length of the run is unknown.
        UnsupportedOption: an option that this version does not support.
    """
    check_for_run(args)
    args = own_options(args)
    mesh = resolve_mesh(args, world_size, local_size)
    notes = [*note_on_redeclared(args), *notes_on_idle_options(args, world_size, mesh), *notes_on_passes(args)]
    derived = derived_values(args)
    check_packing_on(args, mesh)
    accumulation_steps, update_size = resolve_update(args, mesh.data_size, resumed_batch_size)
    train_size, eval_size = resolve_batches(args, mesh.data_size, notes)
    train_size, size = mean_sizes(args, train_size, update_size, samples_per_epoch, micro_batches_per_epoch, mesh)
    batch_warmup = resolve_batch_warmup(args, accumulation_steps, update_size)
    duration = resolve_duration(args, micro_batches_per_epoch, accumulation_steps, notes, batch_warmup)
    return Plan(
        **resolve_intervals(args, duration.max_steps, duration.num_train_epochs, notes),
        micro_batch_size=train_size,
        eval_batch_size=eval_size,
        accumulation_steps=accumulation_steps,
        world_size=world_size,
        global_batch_size=size,
        micro_batches_per_epoch=micro_batches_per_epoch,
        **vars(duration),
        samples_per_epoch=samples_per_epoch,
        warmup_steps=note_warmup(args, duration.max_steps, notes),
        parallel=resolve_parallel(args, world_size, local_size),
        mesh=mesh,
        micro_batch_tokens=tokens_of(args),
        update_size=update_size,
        batch_warmup=batch_warmup,
        length_warmup=note_length_warmup(args, batch_warmup, notes),
        precision=precision_of(args),
        shard_precision=resolve_shard_precision(args, mesh),
        max_grad_norm=args.max_grad_norm,
        seed=args.seed,
        data_seed=args.seed if args.data_seed is None else args.data_seed,
        average_tokens_across_devices=args.average_tokens_across_devices,
        nonfinite_policy=args.nonfinite_policy,
        leave_out_non_finite=args.logging_nan_inf_filter,
        auto_find_batch_size=args.auto_find_batch_size,
        metric_for_best_model=derived.get("metric_for_best_model"),
        greater_is_better=derived.get("greater_is_better", args.greater_is_better),
        notes=tuple(notes),
    )


def check_memory_retries(what: str, parallel: str | None, mesh: Mesh) -> None:
    """Checks that all processes can abandon a step in which one of them runs out of memory.

    Args:
        what: the option or method that needs it, for the message.
        parallel, mesh: the strategy and the layout of the processes.

    Raises:
        UnsupportedOption: they cannot with this strategy.
    """
    if parallel in ("ddp", "fsdp") or (parallel == "mesh" and mesh.num_parts == 1):
        return
    name = mesh.describe() if parallel == "mesh" else repr(parallel)
    raise UnsupportedOption(
        f"{what} with parallel={name} is not supported: a process that runs out of memory during a "
        "pass leaves the others waiting for it. Set per_device_train_batch_size and gradient_accumulation_steps; it "
        "works with ddp, fsdp and tensor parallel."
    )


def resolve_parallel(args: Options, world_size: int, local_size: int | None = None) -> str | None:
    """Returns the name of the strategy for several processes; None for one process without a special engine.

    Raises:
        UnsupportedOption: the requested strategy is not supported here; the message names the remedy.
    """
    if is_xla_asked(args.parallel, args.fsdp, args.fsdp_config):
        return "xla"
    parallel = "deepspeed" if args.deepspeed else engine_of(resolve_mesh(args, world_size, local_size), args)
    if world_size == 1 and isinstance(args.parallel, dict) and args.parallel.get("pp") == -1:
        raise ValueError(
            "A pipeline needs several processes, and there is one: start the script with `paceline launch`, or leave "
            "parallel out."
        )
    if world_size > 1 and args.auto_find_batch_size:
        check_memory_retries("auto_find_batch_size=True", parallel, resolve_mesh(args, world_size, local_size))
    if world_size == 1 and (parallel == "fsdp" or (args.parallel is None and is_asked(args.fsdp))):
        raise ValueError(
            "fsdp needs several processes, and there is one: start the script with `paceline launch`, or leave fsdp "
            "and parallel out."
        )
    return parallel if world_size > 1 or parallel == "deepspeed" else None


def resolve_shard_precision(args: Options, mesh: Mesh) -> str | None:
    """Describes the dtypes of a sharded model; None if unset.

    Raises:
        ValueError: they are set, but the mesh shards nothing.
    """
    policy = shard_precision_of(args)
    if policy is None:
        return None
    if mesh.dp_shard * mesh.num_parts == 1:
        raise ValueError(
            f"fsdp_config={args.fsdp_config!r} sets dtypes of shards, and parallel={args.parallel!r} shards nothing: "
            "leave mixed_precision_policy out, or give dp_shard a size."
        )
    return policy.describe()


def notes_on_idle_options(args: Options, world_size: int, mesh: Mesh) -> list[str]:
    """Returns notes on options without an effect in this run: with one process, or without their switch."""
    several = [
        name
        for name in (
            "ddp_backend",
            "ddp_find_unused_parameters",
            "ddp_bucket_cap_mb",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
            "ddp_comm_hook",
            "parallel",
            "eval_use_gather_object",
        )
        if world_size == 1 and getattr(args, name) not in (None, False, "xla")
    ]
    notes = [f"{', '.join(several)}: it has no effect with one process."] if several else []
    if args.liger_kernel_config and not args.use_liger_kernel:
        notes.append("liger_kernel_config: not read without use_liger_kernel=True.")
    if args.activation_checkpointing_kwargs and not args.activation_checkpointing:
        notes.append("activation_checkpointing_kwargs: not read without activation_checkpointing=True.")
    sequences = args.parallelism_config if isinstance(args.parallelism_config, dict) else {}
    idle = [name for name in ("sp_backend", "sp_handler") if sequences.get(name)]
    if idle and read_size("parallelism_config", "sp", sequences.get("sp_size") or 1) != 1:
        notes.append(f"parallelism_config: {' and '.join(idle)} have no effect; paceline runs its own collectives.")
    return [*notes, *notes_on_idle_plans(args, mesh), *accelerator_notes(args.accelerator_config, world_size)]


def notes_on_idle_plans(args: Options, mesh: Mesh) -> list[str]:
    """Returns notes on the settings of axes that the mesh does not have."""
    settings = (("tp_plan", "tp", mesh.tp), ("pipeline_config", "pp", mesh.pp))
    return [
        f"{name}: not read without {axis} of 2 or more in parallel."
        for name, axis, size in settings
        if getattr(args, name) and size < 2
    ]


def notes_on_passes(args: Options) -> list[str]:
    """Returns a note on the order of the regularizers; empty without any."""
    if not args.regularizers:
        return []
    notes: list[str] = importlib.import_module("paceline.args.regularizers").order_notes(args)
    return notes


def resolve_update(args: Options, data_size: int, resumed_batch_size: int | None) -> tuple[int, int]:
    """Returns (micro-batches per process, `update_size`) of one optimizer step."""
    if tokens_of(args) is None:
        at_once = global_micro_batch_size(args.accelerator_config, args.per_device_train_batch_size, data_size)
    else:
        at_once = data_size
    if resumed_batch_size is not None:
        return math.ceil(resumed_batch_size / at_once), resumed_batch_size
    return args.gradient_accumulation_steps, at_once * args.gradient_accumulation_steps


def resolve_batches(args: Options, data_size: int, notes: list[str]) -> tuple[int, int]:
    """Returns the maximum samples per process in a training micro-batch and in an evaluation batch.

    Raises:
        ValueError, UnsupportedOption: batches cannot be distributed as requested.
    """
    check_sharing(args, data_size)
    config, asked = args.accelerator_config, (args.per_device_train_batch_size, args.per_device_eval_batch_size)
    train_size, eval_size = (math.ceil(global_micro_batch_size(config, size, data_size) / data_size) for size in asked)
    if (train_size, eval_size) != asked:
        most = f"{'at most ' if asked[0] % data_size else ''}{train_size}"
        notes.append(f"split_batches=True: {asked[0]} samples in a micro-batch of all processes, {most} on each.")
    return train_size, eval_size


def mean_sizes(
    args: Options, train_size: int, update_size: int, samples: int | None, micro_batches: int | None, mesh: Mesh
) -> tuple[int, int]:
    """Returns the samples per micro-batch and per optimizer step. With a token budget they are means, at least 1."""
    if tokens_of(args) is None:
        return train_size, update_size
    mean = (samples or 0) / ((micro_batches or 1) * mesh.data_size)
    return max(round(mean), 1), max(round(mean * update_size), 1)


def resolve_duration(
    args: Options,
    micro_batches: int | None,
    accumulation_steps: int,
    notes: list[str],
    warmup: BatchWarmup | None = None,
) -> Duration:
    """Resolves steps and epochs from max_steps, num_train_epochs and the length of the data."""
    if micro_batches is None:
        if args.max_steps < 0:
            raise ValueError(
                f"max_steps={args.max_steps} is not possible here: the training data has no length (the train_dataset "
                "does not implement __len__), so the end of the run is unknown: max_steps has to be specified."
            )
        return Duration(None, args.max_steps, sys.maxsize, float(sys.maxsize))
    if micro_batches == 0:
        too_few = ", or has fewer samples than one batch while dataloader_drop_last=True"
        reason = f"it is empty{too_few if args.dataloader_drop_last else ''}"
        raise ValueError(f"The training data gives no batch: {reason}.")
    updates = math.ceil(micro_batches / accumulation_steps)
    rest = micro_batches % accumulation_steps
    if rest and warmup is None:
        notes.append(
            f"The last optimizer step of each epoch takes {rest} of {accumulation_steps} micro-batches, weighted as "
            "they are."
        )
    if args.max_steps < 0:
        max_steps = math.ceil(args.num_train_epochs * updates)
        if warmup is not None:
            max_steps = warmup.step_after(0, passes_of(args.num_train_epochs, micro_batches))
        if max_steps == 0:
            notes.append("num_train_epochs=0: no optimizer step is run.")
        return Duration(updates, max_steps, math.ceil(args.num_train_epochs), float(args.num_train_epochs))
    epochs = args.max_steps / updates if warmup is None else warmup.epochs_in(args.max_steps, micro_batches)
    notes.append(
        f"max_steps={args.max_steps} decides the length of the run, {epochs:.2f} epochs; num_train_epochs does not."
    )
    return Duration(updates, args.max_steps, math.ceil(epochs), epochs)


def resolve_intervals(args: Options, max_steps: int, num_epochs: float, notes: list[str]) -> dict[str, Any]:
    """Returns the fields of the Plan for the intervals of logs, evaluations and checkpoints."""
    logging_steps = resolve_interval("logging_steps", args.logging_steps, max_steps, notes)
    eval_steps, save_steps = resolve_eval_and_save(args, logging_steps, max_steps, notes)
    note_logging(args, logging_steps, max_steps, notes)
    note_delay(args, max_steps, num_epochs, notes)
    return {
        "logging_strategy": str(args.logging_strategy),
        "eval_strategy": str(args.eval_strategy),
        "save_strategy": str(args.save_strategy),
        "logging_steps": logging_steps,
        "eval_steps": eval_steps,
        "save_steps": save_steps,
        "eval_on_start": args.eval_on_start,
    }


def follow_length(plan: Plan, args: Options, max_steps: int) -> Plan:
    """Returns a plan with the intervals, and the notes on intervals and warm-up, of another number of optimizer steps.

    Args:
        plan: the plan as resolved from the arguments.
        args: the arguments.
        max_steps: optimizer steps of the resumed run; `plan.max_steps` itself stays as it is.
    """
    before, now = list[str](), list[str]()
    resolve_intervals(args, plan.max_steps, plan.num_train_epochs, before)
    intervals = resolve_intervals(args, max_steps, plan.num_train_epochs, now)
    note_warmup(args, plan.max_steps, before)
    note_warmup(args, max_steps, now)
    notes = (*(note for note in plan.notes if note not in before), *now)
    return replace(plan, **intervals, notes=notes)


def resolve_interval(name: str, steps: float, max_steps: int, notes: list[str]) -> int:
    """Returns the steps of an interval; a ratio of all steps is rounded up, to at least 1."""
    if steps >= 1 or steps == 0:
        return max(1, int(steps))
    updates = max(1, math.ceil(max_steps * steps))
    notes.append(f"{name}={steps} of {max_steps} steps: every {updates}.")
    return updates


def resolve_eval_and_save(args: Options, logging_steps: int, max_steps: int, notes: list[str]) -> tuple[int, int]:
    """Returns the steps between evaluations and between checkpoints; for a best model the latter are a multiple."""
    if args.eval_steps:
        eval_steps = resolve_interval("eval_steps", args.eval_steps, max_steps, notes)
    else:
        eval_steps = logging_steps
    save_steps = resolve_interval("save_steps", args.save_steps, max_steps, notes)
    is_tied = args.load_best_model_at_end and args.save_strategy == args.eval_strategy == IntervalStrategy.STEPS
    if is_tied and save_steps % eval_steps:
        # A ratio may be a multiple of another one, and still not be so after rounding to steps.
        save_steps = eval_steps * max(1, round(save_steps / eval_steps))
        notes.append(f"Checkpoints every {save_steps} steps, so that each coincides with an evaluation.")
    return eval_steps, save_steps


def resolve_warmup(warmup_steps: float, max_steps: int) -> int:
    """Returns the warmup steps, from a number of steps or a ratio of all steps (below 1, rounded up)."""
    return int(warmup_steps) if warmup_steps >= 1 else math.ceil(max_steps * warmup_steps)


def note_logging(args: Options, logging_steps: int, max_steps: int, notes: list[str]) -> None:
    """Adds a note if the loss is logged only at the end."""
    if args.logging_strategy == IntervalStrategy.STEPS and logging_steps > max_steps > 0:
        notes.append(
            f"logging_steps={logging_steps} is more than the {max_steps} steps of the run: the training loss "
            "is logged once, at the end."
        )


def note_delay(args: Options, max_steps: int, num_epochs: float, notes: list[str]) -> None:
    """Adds a note if the run ends before the first evaluation is due."""
    units = {"steps": ("steps", max_steps), "epoch": ("epochs", num_epochs)}
    unit, last = units.get(str(args.eval_strategy), ("", math.inf))
    if args.eval_delay > last > 0:
        length = f"eval_delay={args.eval_delay:g} is more than the {last:g} {unit} of the run"
        kept = " load_best_model_at_end then keeps the last weights." if args.load_best_model_at_end else ""
        notes.append(f"{length}: no evaluation is due in it.{kept}")


def note_length_warmup(args: Options, batch_warmup: BatchWarmup | None, notes: list[str]) -> LengthWarmup | None:
    """Returns the warm-up of the sequence length; adds a note for it and for that of the batch size."""
    length_warmup = resolve_length_warmup(args)
    notes += describe_warmups(batch_warmup, length_warmup)
    return length_warmup


def note_warmup(args: Options, max_steps: int, notes: list[str]) -> int:
    """Returns the warmup steps; adds a note if they are a ratio or fill the run."""
    updates = resolve_warmup(args.warmup_steps, max_steps)
    if updates >= max_steps > 0:
        notes.append(f"warmup_steps={args.warmup_steps}: the learning rate is still rising when the run ends.")
    elif 0 < args.warmup_steps < 1:
        notes.append(f"warmup_steps={args.warmup_steps} of {max_steps} steps: {updates}.")
    return updates
