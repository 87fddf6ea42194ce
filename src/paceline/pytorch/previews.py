"""Examines a run before its first step: the parts of `Trainer.plan` and `Trainer.doctor`, made from a Trainer."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption
from paceline.args.places import WITHOUT_OUTPUT
from paceline.checkpoint.retention import retention_of
from paceline.core.events import TrainerCallback
from paceline.core.fingerprint import hash_value
from paceline.core.methods import is_ours
from paceline.pytorch.data.batches import batch_size_of
from paceline.pytorch.data.lengths import length_of
from paceline.pytorch.distributed.simulated import check_group, is_simulated
from paceline.pytorch.doctor import parallel_check
from paceline.pytorch.doctor.findings import Case, Diagnosis
from paceline.pytorch.doctor.registry import examine
from paceline.pytorch.forecast.rehearsal import CannotRehearse, StepMemoryEstimate, rehearse
from paceline.pytorch.forecast.result import Evaluations, Forecast, count_evaluations, disk_of
from paceline.pytorch.model.check_targets import check_targets
from paceline.pytorch.model.objective import compute_loss_with_outputs
from paceline.pytorch.model.prepare import prepare_model
from paceline.pytorch.parts import copy_of, try_run
from paceline.pytorch.probes.side_effects import undoing
from paceline.pytorch.short_runs import trial_run
from paceline.pytorch.short_runs.batch_search import StepClock

if TYPE_CHECKING:
    from paceline.args.plan import Plan
    from paceline.pytorch.trainer import Trainer

TRACED = (None, "ddp")  # strategies whose processes hold all of the model
SIMULATED = ("fsdp", "mesh")  # those whose collective calls are traced where they move nothing
QUIET: dict[str, Any] = {
    **WITHOUT_OUTPUT,
    "disable_tqdm": True,
    "phases": None,
    "push_to_hub": False,
    "torch_compile": False,
}


class CopiedStage:
    """Runs the parts of an optimizer step of a Trainer on another model, which has no data.

    Args:
        trainer: is left as it is.
        plan: the plan of the run.
    """

    def __init__(self, trainer: Trainer, plan: Plan) -> None:
        self.real, self.plan = trainer, plan
        self.trainer = copy_of(trainer, {**QUIET, "output_dir": trainer.args.output_dir}, [])

    @contextmanager
    def edited(self, model: nn.Module) -> Iterator[None]:
        """Edits the model as training does, with the rows of a packing."""
        packing = self.real._find_packing()
        edits = prepare_model(model, self.trainer._own_options)
        try:
            with packing.applied() if packing is not None else nullcontext():
                yield
        finally:
            edits.undo()

    def prepare(self, model: nn.Module) -> Any:
        """Prepares model and optimizer with the strategy, and returns the optimizer."""
        self.trainer.model = self.trainer.model_wrapped = model
        given = self.real.optimizer
        self.trainer.optimizer = None if given is None else moved_to(given, self.real.model, model)
        self.trainer._make_session().prepare_model(self.plan)
        return self.trainer.optimizer

    def compute_loss(self, model: nn.Module, inputs: Any, num_items: Any) -> Tensor:
        """Returns the loss of a micro-batch under the precision context."""
        with self.trainer.compute_loss_context_manager():
            counts = {} if num_items is None else {"num_items_in_batch": num_items}
            loss: Tensor = self.trainer.compute_loss(model, copy.copy(inputs), **counts)
        return loss

    def micro_step(self, last: bool) -> AbstractContextManager[Any]:
        """Returns the strategy's context of a micro-batch; gradients are exchanged in the last one."""
        return self.trainer.strategy.micro_step(last)

    def backward(self, loss: Tensor) -> None:
        """Runs the backward pass."""
        self.trainer.strategy.backward(loss)

    def bucket_bytes(self, gradients: int) -> int:
        """Returns the bytes that the strategy holds besides gradients, to exchange them."""
        return gradients if self.plan.parallel == "ddp" else 0

    def finish(self) -> None:
        """Clips the gradients, steps the optimizer and clears the gradients."""
        strategy = self.trainer.strategy
        strategy.clip(self.plan.max_grad_norm or float("inf"))
        strategy.step(None)
        strategy.clear_gradients()


def moved_to(optimizer: Any, before: nn.Module, after: nn.Module) -> Any:
    """Returns a copy of an optimizer, without state, of the same parameters of another model."""
    twins = {id(old): new for old, new in zip(before.parameters(), after.parameters(), strict=True)}
    moved = copy.copy(optimizer)
    vars(moved).pop("step", None)  # a scheduler's wrapper, bound to the original optimizer
    moved.state = defaultdict(dict)
    moved.param_groups = [
        {**group, "params": [twins.get(id(parameter), parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return moved


def plan_of(trainer: Trainer, times_step: bool) -> Forecast:
    """Returns the forecast of `Trainer.plan`."""
    check_group("plan()", trainer.world)
    data = trainer.train_dataset
    check_rereadable("plan", data)
    check_phases(trainer._own_options.phases or (), times_step)
    with trial_run.unchanged(trainer.model, trainer.optimizer, data), undoing([trainer, trainer.model]):
        loader = trainer.get_train_dataloader()
        plan = trainer._make_session().make_plan(loader)
        batches = first_batches(trainer, loader, min(plan.accumulation_steps, 2))
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


def check_rereadable(method: str, data: object) -> None:
    """Raises UnsupportedOption for a stream that can be read only once, whose samples would be missing later."""
    if isinstance(data, Iterator) and not trial_run.can_rewind(data):
        raise UnsupportedOption(
            f"{method}: train_dataset is an iterator, which can be read only once: its first samples would be missing "
            "in the run. Pass a dataset whose __iter__ starts again, or one with state_dict and load_state_dict."
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


def first_batches(trainer: Trainer, loader: Any, number: int) -> list[Any]:
    """Returns the first micro-batches of a loader, named by the parameters of forward.

    Raises:
        ValueError: it gives none.
    """
    batches = [trainer.objective.name_inputs(batch) for batch in islice(loader, number)]
    if not batches:
        raise ValueError("The training data gives no batch.")
    return batches


def memory_of(trainer: Trainer, plan: Plan, batches: list[Any]) -> tuple[StepMemoryEstimate | None, str]:
    """Returns the memory of a step, or None, and what it leaves out or why it is unknown."""
    if reason := cannot_trace(plan):
        return None, reason
    if not is_ours(trainer.training_step):
        return None, "training_step is overridden; measure_memory() measures it."
    counts = trainer.objective.wants_num_items
    num_items = trainer._get_num_items_in_batch(batches) if counts else None
    try:
        found = rehearse(CopiedStage(trainer, plan), trainer.model, batches, num_items, trainer.strategy.device)
    except CannotRehearse as error:
        return None, f"the step cannot run on tensors without data ({error}); measure_memory() measures it."
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
    if plan.parallel in TRACED:
        return ""
    if plan.parallel not in SIMULATED:
        return f"with parallel={plan.parallel!r} the step runs in an engine that cannot be traced."
    if is_simulated():
        return ""
    return (
        f"with parallel={plan.parallel!r} each process holds a part of the model. Plan it on one process: "
        f"paceline plan CONFIG.yaml --processes {plan.world_size}, or trainer.plan() under simulated_processes."
    )


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


# ---- the doctor


class GradientOfStep(TrainerCallback):
    """Keeps the gradient of the first optimizer step, without dropout, and ends the run."""

    def __init__(self) -> None:
        self.found: Tensor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for module in model.modules():
            if module is not model:
                module.eval()  # the modes are restored after the run

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        gradients = [each.grad.flatten().double() for each in model.parameters() if each.grad is not None]
        self.found = torch.cat(gradients)


class RowsOfOneBatch:
    """A collator whose later batches are the rows of its first one, in order, so that two runs have the same values.

    A part of a batch that is collated alone is padded less, and masked at random in other places.

    Args:
        collate: the Trainer's own.
    """

    def __init__(self, collate: Any) -> None:
        self.collate = collate
        self.is_splitting = False  # the first batch is there, and a run reads it in parts
        self._first: Any = None
        self._size = self._taken = 0

    def __call__(self, samples: list[Any]) -> Any:
        if self._first is None:
            self._first, self._size = self.collate(samples), len(samples)
            return copy.copy(self._first)
        if not self.is_splitting or self._taken >= self._size:
            return self.collate(samples)
        rows = slice(self._taken, self._taken + len(samples))
        self._taken += len(samples)
        return {name: self._part(value, rows) for name, value in self._first.items()}

    def start(self, is_splitting: bool) -> None:
        """Begins a run, which reads whole batches or parts of the first one."""
        self.is_splitting, self._taken = is_splitting, 0
        if not is_splitting:
            self._first = None

    def _part(self, value: Any, rows: slice) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.dim() or len(value) != self._size:
            raise ValueError(f"a batch of {self._size} samples cannot be split: a tensor has the shape {value.shape}")
        return value[rows]


def diagnosis_of(trainer: Trainer) -> Diagnosis:
    """Returns the diagnosis of `Trainer.doctor`."""
    data = trainer.train_dataset
    check_rereadable("doctor", data)
    with trial_run.unchanged(trainer.model, trainer.optimizer, data), undoing([trainer, trainer.model]):
        if trainer.world.is_distributed:
            return parallel_check.diagnosis_of_processes(trainer, lambda single: examine(case_of(single)))
        return examine(case_of(trainer))


def case_of(trainer: Trainer) -> Case:
    """Returns the case that the checks examine."""
    loader = trainer.get_train_dataloader()
    plan = trainer._make_session().make_plan(loader)
    stage = CopiedStage(trainer, plan)

    def loss_of(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        with stage.trainer.compute_loss_context_manager():
            loss, outputs = compute_loss_with_outputs(stage.trainer.compute_loss, model, batch)
        return loss, outputs

    def optimizer_at_peak(model: nn.Module) -> Any:
        optimizer = stage.prepare(model)
        for group in optimizer.param_groups:  # the schedule has set the first rate of its warm-up
            group.update({"lr": group.get("initial_lr", group["lr"])})
        return optimizer

    collator = RowsOfOneBatch(trainer.data_collator)
    reader = copy.copy(trainer)
    reader.data_collator = collator

    def gradient_of(size: int, accumulation: int) -> Tensor:
        collator.start(is_splitting=accumulation > 1)
        options = {
            "max_steps": 1,
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": accumulation,
            "max_grad_norm": 0.0,
            "bf16": False,
            "fp16": False,
            "dataloader_num_workers": 0,  # the collator keeps its first batch
            "dataloader_prefetch_factor": None,
            "dataloader_persistent_workers": False,
        }
        callback = GradientOfStep()
        try_run(reader, options, callback)
        if callback.found is None:
            raise ValueError("the first step has no gradient")
        return callback.found

    return Case(
        copy_model=lambda: copy.deepcopy(trainer.model).train(),
        batches=[trainer._prepare_inputs(batch) for batch in first_batches(trainer, loader, 8)],
        label_names=trainer.label_names or trainer.objective.label_names,
        compute_loss=loss_of,
        make_optimizer=optimizer_at_peak,
        gradient_of=gradient_of,
        targets=lambda: check_targets(trainer),
        micro_batch_size=plan.micro_batch_size,
        accumulation=plan.accumulation_steps,
        max_steps=plan.max_steps,
        tokenizer=trainer.processing_class,
        train_rows=rows_of(trainer.train_dataset),
        eval_rows=[row for each in sets_of(trainer.eval_dataset) for row in rows_of(each)],
        num_rows=length_of(trainer.train_dataset),
    )


def sets_of(given: Any) -> list[Any]:
    """Returns the evaluation sets."""
    if given is None:
        return []
    return list(given.values()) if isinstance(given, dict) else [given]


def rows_of(dataset: Any) -> list[str]:
    """Returns hashes of up to 2,000 rows, from the first on; nothing for a stream, or rows that cannot be hashed."""
    number = length_of(dataset)
    if number is None or not hasattr(dataset, "__getitem__"):
        return []
    try:
        return [hash_value(dataset[index]) for index in range(min(number, 2000))]
    except Exception:  # user code
        return []
