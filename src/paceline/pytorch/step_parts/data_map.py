"""Records a data map from the logits of the training passes; see `paceline.predictions.data_map`.

Logits of small outputs wait on the device and are evaluated many passes at a time, so that a pass costs little more
than the look-up of its sample ids.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption
from paceline.args.sections import Options
from paceline.core.events import CallbackHandler, TrainerCallback
from paceline.core.optional import is_installed
from paceline.predictions.data_map import COLUMNS, DataMap
from paceline.pytorch.data.loading import batch_size_of
from paceline.pytorch.data.window_ids import WindowIds, find_obstacle
from paceline.pytorch.distributed.collectives import gather_objects
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.engine import Engine
from paceline.pytorch.model.loss import Counts, LabelSmoother, LossNormalizer
from paceline.pytorch.model.soft_targets import find_logits, kept_items, widen

logger = logging.getLogger(__name__)

FIELDS = ("step", "sample", "loss", "confidence", "margin", "correct")
MOST_BYTES = 2**24  # bytes of logits that wait on the device
MOST_ROWS = 8192  # samples whose logits wait
NUM_SHOWN = 50  # likely label errors in the report
TABLE, PICTURE = "data_map.csv", "data_map.svg"


def check_run(options: Options, loader: object) -> None:
    """Checks that samples and their logits are known.

    Raises:
        UnsupportedOption: they are not.
    """
    obstacle = find_obstacle(options, loader)
    if obstacle is None and options.linear_cross_entropy not in (False, "auto"):
        given = options.linear_cross_entropy
        obstacle = f"needs logits, and linear_cross_entropy={given!r} saves them: set it to False."
    dataset: Any = getattr(loader, "dataset", None)
    if getattr(dataset, "changes_by_epoch", False):
        obstacle = (
            f"follows each index of the dataset, at which a {type(dataset).__name__} has another sample in each epoch: "
            "leave it out, or give a dataset that stays the same, such as torch's ConcatDataset of the sources."
        )
    if obstacle is not None:
        raise UnsupportedOption(f"data_map=True {obstacle}")


@dataclass(frozen=True)
class Waiting:
    """The outputs of a pass that are not evaluated yet.

    Attributes:
        step: number of the optimizer step in this run.
        samples: the indices of its samples.
        logits: classes last, on the device.
        labels: on the host.
        is_shifted: the collator has shifted the labels.
    """

    step: int
    samples: list[int]
    logits: Tensor
    labels: Tensor
    is_shifted: bool


class DataMapRecorder:
    """Records a data map during a run; an item of checkpoints.

    Args:
        training_step: the Trainer's, bound: forward and backward of one micro-batch.
        ids: the sample ids of the accumulation windows.
        strategy: the strategy of the run.
        normalizer: the loss normalizer, which knows the shift of the targets.
        num_samples: the number of samples of the dataset.
        copies: copy the logits, since compiled code may write to their memory again.

    Raises:
        UnsupportedOption: the logits of a sample are not whole on one process.
    """

    def __init__(
        self,
        training_step: Callable[..., Tensor],
        ids: WindowIds,
        strategy: SingleDevice,
        normalizer: LossNormalizer,
        num_samples: int,
        copies: bool,
    ) -> None:
        if strategy.runs_windows or strategy.is_lazy or strategy.world.world_size != strategy.mesh.data_size:
            raise UnsupportedOption(
                "data_map=True is not supported with pipelines, tensor or context parallelism and XLA devices, where "
                "no process has all logits of a sample: use parallel='ddp' or 'fsdp', or leave it out."
            )
        self._training_step, self._ids = training_step, ids
        self._strategy, self._normalizer = strategy, normalizer
        self._copies = copies
        self._engine: Engine | None = None
        self._outputs: Any = None
        self._shifts: bool | None = None  # seen in the loss that the model returned
        self._has_warned = False
        self._waiting: list[Waiting] = []
        self._num_bytes = self._num_rows = 0
        self._rows: list[dict[str, Any]] = []  # rows of this process that are not merged with those of others yet
        self.result = DataMap(num_samples)

    # ---- a pass

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs the Trainer's `training_step`, and keeps the model's last outputs."""
        handle = model.register_forward_hook(self._see)
        try:
            loss = self._training_step(model, inputs, num_items_in_batch)
        finally:
            handle.remove()
        outputs, self._outputs = self._outputs, None
        engine = self._engine
        if engine is not None and engine.current is not None and not engine.current.is_dummy:
            self._keep(engine, engine.current, outputs)
        return loss

    def _see(self, module: nn.Module, args: Any, outputs: Any) -> None:
        self._outputs = outputs
        counts = self._engine.current.counts if self._engine is not None and self._engine.current is not None else None
        if self._shifts is None and counts is not None and counts.labels is not None and self._is_shift_open(counts):
            smoother = LabelSmoother(0.0, self._normalizer.reduction.ignore_index)
            labels = counts.labels.to(self._strategy.device)
            self._shifts = smoother.find_shift(outputs, labels, self._normalizer.reduction.shifted)

    def _is_shift_open(self, counts: Counts | Waiting) -> bool:
        """Returns True if it is not known yet whether the loss compares an output with the next target.

        Probes of the reduction need not tell: rows of the same number of targets have the same weights in both cases.
        """
        labels, normalizer = counts.labels, self._normalizer
        if labels is None or labels.dim() < 2 or labels.is_floating_point() or counts.is_shifted:
            return False
        return not normalizer.trusts_class and normalizer.declared not in ("tokens", "shifted_tokens")

    def _keep(self, engine: Engine, current: Any, outputs: Any) -> None:
        """Keeps the logits of a pass until they are evaluated."""
        labels = current.counts.labels
        if labels is None or labels.is_floating_point():
            raise UnsupportedOption(
                "data_map=True needs integer classes as targets in the batches, under one of the names "
                f"{', '.join(self._normalizer.label_names)}: leave it out."
            )
        first = sum(map(batch_size_of, engine.batches[: current.index]))
        samples = self._ids.current[first : first + len(labels)]
        if len(samples) != len(labels):
            raise UnsupportedOption(
                f"data_map=True: a batch has {len(labels)} samples, and the loader drew {len(samples)} for it; do not "
                "change the number of samples in a collator or get_batch_samples."
            )
        logits = find_logits(outputs, labels, "model", "data_map=True").detach()
        self._waiting.append(
            Waiting(
                engine.num_steps,
                samples,
                logits.clone() if self._copies else logits,
                labels,
                current.counts.is_shifted,
            )
        )
        self._num_bytes += logits.numel() * logits.element_size()
        self._num_rows += len(samples)
        if self._num_bytes > MOST_BYTES or self._num_rows > MOST_ROWS:
            self.flush()

    # ---- evaluation of the logits

    def flush(self) -> None:
        """Evaluates the logits that wait. Synchronizes with the device."""
        waiting, self._waiting = self._waiting, []
        self._num_bytes = self._num_rows = 0
        group: list[Waiting] = []
        for each in waiting:
            if group and (group[0].logits.shape[1:] != each.logits.shape[1:] or each.labels.dim() > 1):
                self._evaluate(group)
                group = []
            group.append(each)
        if group:
            self._evaluate(group)
        if self._strategy.world.world_size == 1:
            self._apply()

    @torch.no_grad()
    def _evaluate(self, group: Sequence[Waiting]) -> None:
        logits = torch.cat([each.logits for each in group])
        labels = torch.cat([each.labels for each in group]).to(logits.device, non_blocking=True)
        reduction = self._normalizer.reduction
        if self._is_shift_open(group[0]):
            if self._shifts is None:
                self._warn_of_shift(reduction.shifted)
            reduction = replace(reduction, shifted=bool(reduction.shifted if self._shifts is None else self._shifts))
        kept, shifts = kept_items(labels, reduction, group[0].is_shifted)
        if shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        values, has_target = evaluate_samples(widen(logits), labels, kept)
        numbers = torch.cat([values, has_target[None]]).cpu().numpy()
        samples = np.array([sample for each in group for sample in each.samples], dtype=np.int64)
        steps = np.repeat([each.step for each in group], [len(each.samples) for each in group])
        # one presentation that is not finite (a step that nonfinite_policy="skip" skips) would spoil a sample's sums
        seen = (numbers[-1] > 0) & np.isfinite(numbers).all(axis=0)
        fields = [steps, samples, *numbers[:-1]]
        self._rows.append({name: field[seen] for name, field in zip(FIELDS, fields, strict=True)})

    def _warn_of_shift(self, is_shifted: bool) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "data_map=True: it could not be seen whether the output at i is compared with the target at i or at "
                "i + 1; the map takes it for i%s. Set loss_weight='tokens' or 'shifted_tokens'.",
                " + 1" if is_shifted else "",
            )

    def _apply(self) -> None:
        """Adds the rows of all processes to the map."""
        parts, self._rows = self._rows, []
        gathered = gather_objects(self._strategy.world, parts)
        everyone = [part for own in gathered for part in own]
        if not everyone:
            return
        rows = {name: np.concatenate([part[name] for part in everyone]) for name in FIELDS}
        order = np.argsort(rows["step"], kind="stable")
        self.result.add(
            *(rows[name][order] for name in ("sample", "loss", "confidence", "margin", "correct")),
        )

    def merge(self) -> None:
        """Brings the map up to date on all processes; collective."""
        self.flush()
        self._apply()

    # ---- the run

    @contextmanager
    def recording(self, engine: Engine, handler: CallbackHandler) -> Iterator[None]:
        """Records the passes of an engine while entered; merges the rows of the processes at the end of each epoch."""
        self._engine = engine
        engine.sync.probe_single_batches()  # for the targets that do not count
        listener = EpochEnds(self)
        handler.callbacks.insert(0, listener)
        try:
            yield
            self.merge()
        finally:
            handler.pop_callback(listener)
            self._waiting, self._outputs = [], None

    def write(self, folder: Path, log_table: Callable[..., None], log_figure: Callable[..., None]) -> None:
        """Writes table and picture, and records likely label errors and the picture for report and trackers.

        Args:
            folder: the output folder.
            log_table, log_figure: the Trainer's, bound.
        """
        try:
            self.result.write_table(folder / TABLE)
            self.result.write_map(folder / PICTURE)
        except OSError as error:  # a failed write, as on a full disk, does not end the run
            logger.warning("The data map could not be written: %s", error)
        shown = self.result.rows(self.result.label_errors(NUM_SHOWN))
        if shown:
            log_table("data map, likely label errors", COLUMNS, shown)
        if shown and is_installed("PIL"):
            log_figure("data map", self.result.pixels())

    # ---- an item of checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums, and this process's rows that are not merged."""
        self.flush()
        return {"sums": self.result.state_dict(), "rows": [dict(part) for part in self._rows]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the map, and drops what was recorded since.

        Raises:
            ValueError: it is of another number of samples.
        """
        self.result.load_state_dict({name: np.asarray(values) for name, values in state["sums"].items()})
        self._rows = [{name: np.asarray(values) for name, values in part.items()} for part in state["rows"]]
        self._waiting, self._num_bytes, self._num_rows = [], 0, 0


class EpochEnds(TrainerCallback):
    """Merges a data map at the end of each epoch, so that the memory of the rows is bounded."""

    def __init__(self, recorder: DataMapRecorder) -> None:
        self._recorder = recorder

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Merges the rows."""
        self._recorder.merge()


def evaluate_samples(logits: Tensor, labels: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Returns loss, confidence, margin and correctness of samples, `(4, n)`, and 1 for those with a target, `(n,)`.

    A sample of several targets has their mean loss, confidence and margin, and is correct if all of them are.

    Args:
        logits: `(n, ..., num_classes)`.
        labels: `(n, ...)`.
        kept: mask of the labels that count.
    """
    targets = labels.masked_fill(~kept, 0).unsqueeze(-1)
    own = logits.gather(-1, targets).squeeze(-1)
    loss = logits.logsumexp(-1) - own
    other = logits.scatter(-1, targets, float("-inf")).amax(-1)
    margin = own - other
    counts = kept.reshape(len(kept), -1).sum(1)
    values = []
    for each in (loss, (-loss).exp(), margin, (margin > 0).to(loss.dtype)):
        total = torch.where(kept, each, torch.zeros_like(each)).reshape(len(each), -1).sum(1)
        values.append(total / counts.clamp(min=1))
    values[3] = (values[3] == 1).to(loss.dtype)
    return torch.stack(values), (counts > 0).to(loss.dtype)
