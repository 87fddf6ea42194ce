"""Makes the case that the checks of `Trainer.doctor` examine: a second file of the facade."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.core.events import TrainerCallback
from paceline.core.fingerprint import hash_value
from paceline.pytorch.data.lengths import length_of
from paceline.pytorch.doctor import parallel_check
from paceline.pytorch.doctor.findings import Case, Diagnosis
from paceline.pytorch.doctor.registry import examine
from paceline.pytorch.forecast.copied_stage import CopiedStage, first_batches
from paceline.pytorch.model.check_targets import check_targets
from paceline.pytorch.model.objective import compute_loss_with_outputs
from paceline.pytorch.parts import try_run
from paceline.pytorch.probes.side_effects import undoing
from paceline.pytorch.short_runs import trial_run

if TYPE_CHECKING:
    from paceline.pytorch.trainer import Trainer


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
    trial_run.check_rereadable("doctor", data)
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

    return Case(
        copy_model=lambda: copy.deepcopy(trainer.model).train(),
        batches=[trainer._prepare_inputs(batch) for batch in first_batches(trainer, loader, 8)],
        label_names=trainer.label_names or trainer.objective.label_names,
        compute_loss=loss_of,
        make_optimizer=optimizer_at_peak,
        gradient_of=partial(gradient_of, reader, collator),
        targets=lambda: check_targets(trainer),
        micro_batch_size=plan.micro_batch_size,
        accumulation=plan.accumulation_steps,
        max_steps=plan.max_steps,
        tokenizer=trainer.processing_class,
        train_rows=rows_of(trainer.train_dataset),
        eval_rows=[row for each in sets_of(trainer.eval_dataset) for row in rows_of(each)],
        num_rows=length_of(trainer.train_dataset),
    )


def gradient_of(reader: Trainer, collator: RowsOfOneBatch, size: int, accumulation: int) -> Tensor:
    """Returns the gradient of the first optimizer step of a run with this micro-batch size and accumulation.

    Args:
        reader: a Trainer whose data collator is `collator`.
        collator: makes the parts of the first batch.
        size: samples per micro-batch and process.
        accumulation: micro-batches per optimizer step.

    Raises:
        ValueError: no parameter has a gradient.
    """
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
