"""Makes the forecast of `Trainer.plan`: a second file of the facade."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption
from paceline.checkpoint.retention import retention_of
from paceline.core.methods import is_ours
from paceline.core.optional import load
from paceline.pytorch.data.batches import batch_size_of
from paceline.pytorch.data.lengths import length_of
from paceline.pytorch.distributed.simulated import check_group, is_simulated
from paceline.pytorch.forecast.copied_stage import first_batches
from paceline.pytorch.forecast.rehearsal import CannotRehearse, NotTraced, StepMemoryEstimate
from paceline.pytorch.forecast.result import Evaluations, Forecast, count_evaluations, disk_of
from paceline.pytorch.parts import try_run
from paceline.pytorch.probes.side_effects import undoing
from paceline.pytorch.short_runs import trial_run
from paceline.pytorch.short_runs.batch_search import StepClock

if TYPE_CHECKING:
    from paceline.args.plan import Plan
    from paceline.pytorch.trainer import Trainer


@dataclass(frozen=True)
class Rehearsal:
    """The way to find the memory of a step with a strategy.

    Attributes:
        rehearse: location of `(trainer, plan, batches, num_items) -> StepMemoryEstimate`.
        is_in_parts: each process holds a part of the model, and the step is traced under `simulated_processes` only.
        num_batches: micro-batches of an accumulation window that are traced, at most; None for all of them.
    """

    rehearse: str
    is_in_parts: bool = False
    num_batches: int | None = 2  # two stand for any larger number


STEP = "paceline.pytorch.forecast.copied_stage:rehearse_step"
REHEARSALS: dict[str | None, Rehearsal] = {
    None: Rehearsal(STEP),
    "ddp": Rehearsal(STEP),
    "fsdp": Rehearsal(STEP, is_in_parts=True),
    "mesh": Rehearsal(STEP, is_in_parts=True),
    "pipeline": Rehearsal(
        "paceline.pytorch.forecast.copied_pipeline:rehearse_pipeline", is_in_parts=True, num_batches=None
    ),
    "deepspeed": Rehearsal("paceline.pytorch.forecast.copied_zero:rehearse_zero", is_in_parts=True),
}


def plan_of(trainer: Trainer, times_step: bool) -> Forecast:
    """Returns the forecast of `Trainer.plan`."""
    check_group("plan()", trainer.world)
    data = trainer.train_dataset
    trial_run.check_rereadable("plan", data)
    check_phases(trainer._own_options.phases or (), times_step)
    with trial_run.unchanged(trainer.model, trainer.optimizer, data), undoing([trainer, trainer.model]):
        loader = trainer.get_train_dataloader()
        plan = trainer._make_session().make_plan(loader)
        batches = first_batches(trainer, loader, num_traced(plan))
        memory, note = memory_of(trainer, plan, batches)
    args = trainer._own_options
    state = None if memory is None else memory.optimizer_of_all
    weights = {id(value): value for value in saved_tensors(trainer.model)}.values()
    disk = disk_of(
        plan,
        sum(value.numel() * value.element_size() for value in weights),
        0 if args.save_only_model else state,
        retention_of(args),
        bool(args.load_best_model_at_end),
    )
    changed = changed_options(args)
    return Forecast(
        plan=plan,
        memory=memory,
        memory_note=note,
        disk=disk,
        evaluations=evaluations_of(trainer, plan),
        samples=count_samples(plan),
        tokens=count_tokens(batches, plan),
        seconds_per_step=time_step(trainer) if times_step else None,
        options=args.to_sanitized_dict(),
        changed=changed,
    )


def check_phases(phases: Sequence[Any], times_step: bool) -> None:
    """Refuses a forecast that would hold for some of the phases only.

    Raises:
        UnsupportedOption: a phase has other data or another batch size, or the time is asked for.
    """
    changed = next((phase.name for phase in phases if phase.changes_data), None)
    if changed is not None:
        raise UnsupportedOption(
            f"plan: phases[{changed!r}] has data or a batch size of its own, and the forecast is of one loader: plan "
            "each phase by itself, without phases."
        )
    if phases and times_step:
        raise UnsupportedOption(
            "plan: the time of a step differs between phases, which train different parameters: leave time=True "
            "(--time) out, or plan each phase by itself, without phases."
        )


def memory_of(trainer: Trainer, plan: Plan, batches: list[Any]) -> tuple[StepMemoryEstimate | None, str]:
    """Returns the memory of a step, or None, and what it leaves out or why it is unknown."""
    if reason := cannot_trace(plan):
        return None, reason
    if not is_ours(trainer.training_step):
        return None, "training_step is overridden; measure_memory() measures it."
    counts = trainer.objective.wants_num_items
    num_items = trainer._get_num_items_in_batch(batches) if counts else None
    try:
        found = load(REHEARSALS[plan.parallel].rehearse)(trainer, plan, batches, num_items)
    except NotTraced as error:
        return None, str(error)
    except CannotRehearse as error:
        remedy = "" if plan.world_size > 1 else "; measure_memory() measures it"
        return None, f"the step cannot run on tensors without data ({error}){remedy}."
    notes = []
    if not found.has_optimizer_step:
        notes.append("The optimizer's step reads values: tensors that exist only during it are not included.")
    if trainer._own_options.phases:
        notes.append("Of a step that trains every parameter; phases that freeze some need less.")
    if trainer.args.torch_compile:
        notes.append("Of the model without torch_compile, which may keep other tensors.")
    return found, " ".join(notes)


def cannot_trace(plan: Plan) -> str:
    """Returns why the memory of a run of several processes cannot be found; empty if it can."""
    if plan.parallel not in REHEARSALS:
        return f"with parallel={plan.parallel!r} the step runs in an engine that cannot be traced."
    if not REHEARSALS[plan.parallel].is_in_parts or is_simulated():
        return ""
    return (
        f"with parallel={plan.parallel!r} each process holds a part of the model. Plan it on one process: "
        f"paceline plan CONFIG.yaml --processes {plan.world_size}, or trainer.plan() under simulated_processes."
    )


def num_traced(plan: Plan) -> int:
    """Returns the number of micro-batches to trace."""
    most = REHEARSALS[plan.parallel].num_batches if plan.parallel in REHEARSALS else 2
    return plan.accumulation_steps if most is None else min(plan.accumulation_steps, most)


def saved_tensors(model: nn.Module) -> list[Tensor]:
    """Returns the tensors that a checkpoint of the model holds; of PEFT, the adapters."""
    if hasattr(model, "peft_config"):
        return [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [*model.parameters(), *(value for value in model.state_dict(keep_vars=True).values() if is_buffer(value))]


def is_buffer(value: object) -> bool:
    """Returns True for a tensor that is no parameter."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def evaluations_of(trainer: Trainer, plan: Plan) -> Evaluations:
    """Returns the evaluations of a run."""
    given = trainer.eval_dataset
    sets = list(given.values()) if isinstance(given, dict) else [given]
    lengths = [0 if data is None else length_of(data) for data in sets]
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return Evaluations(count_evaluations(plan), None, None)
    at_once = plan.eval_batch_size * plan.mesh.data_size
    return Evaluations(count_evaluations(plan), sum(known), sum(math.ceil(length / at_once) for length in known))


def count_samples(plan: Plan) -> int:
    """Returns the training samples of a run, over all processes."""
    if plan.samples_per_epoch is not None and plan.updates_per_epoch:
        return round(plan.max_steps / plan.updates_per_epoch * plan.samples_per_epoch)
    return plan.max_steps * plan.global_batch_size


def count_tokens(batches: list[Any], plan: Plan) -> int | None:
    """Returns the tokens of a run by the mean of these micro-batches; None without `input_ids`."""
    tokens = [batch["input_ids"] for batch in batches if isinstance(batch, Mapping) and "input_ids" in batch]
    if not tokens or not all(isinstance(value, Tensor) for value in tokens):
        return None
    per_sample: float = sum(value.numel() for value in tokens) / max(sum(batch_size_of(batch) for batch in batches), 1)
    return int(per_sample * count_samples(plan) + 0.5)


def changed_options(args: Any) -> tuple[str, ...]:
    """Returns the names of the options that differ from their defaults."""
    defaults = type(args)(output_dir=str(args.output_dir)).to_sanitized_dict()
    given = args.to_sanitized_dict()
    return tuple(name for name, value in given.items() if name == "output_dir" or value != defaults.get(name))


def time_step(trainer: Trainer) -> float:
    """Returns the seconds of an optimizer step: the second one of a short run, whose effects are undone."""
    trial_run.check_one_process("plan", trainer.strategy)
    clock = StepClock(trainer.strategy.device)
    try_run(trainer, {"max_steps": 2}, clock)
    if not clock.steps:
        raise ValueError("plan: no step could be timed: the first batches have no target.")
    return clock.steps[-1][0]
