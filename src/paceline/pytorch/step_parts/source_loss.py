"""The training loss of each source of a mixture (`loss_by_source`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption
from paceline.pytorch.data.batches import batch_size_of
from paceline.pytorch.data.sources import WindowSources
from paceline.pytorch.distributed.collectives import gather_objects
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.distributed.window import Pass, PassRunner
from paceline.pytorch.engine import Engine
from paceline.pytorch.model.objective import check_was_called, compute_loss_with_outputs
from paceline.pytorch.model.sample_losses import SampleLosses
from paceline.pytorch.sync import RunWindow

logger = logging.getLogger(__name__)

PREFIX = "loss/"
MOST_SOURCES = 1000


class SourceLoss:
    """The training loss of each source since the last log row. A meter, and an item of checkpoints.

    Args:
        sources: the sources of the windows.
        strategy: the strategy of the run.
        losses: the losses of the samples.
        leaves_out: losses that are not finite do not count.

    Raises:
        UnsupportedOption: the logits of a sample are not whole on one process.
    """

    is_recorded = True

    def __init__(self, sources: WindowSources, strategy: SingleDevice, losses: SampleLosses, leaves_out: bool) -> None:
        self._option = f"loss_by_source={sources.column!r}"
        world = strategy.world
        if strategy.runs_windows or strategy.is_lazy or world.world_size != strategy.mesh.data_size:
            raise UnsupportedOption(
                f"{self._option} is not supported with pipelines, tensor or context parallelism and XLA devices, where "
                "no process has all logits of a sample: use parallel='ddp' or 'fsdp', or leave it out."
            )
        self._sources, self._world = sources, world
        self._losses, self._leaves_out = losses, leaves_out
        self._indices: dict[str, int] = {}  # of the sources in the sums
        self._sums: Tensor | None = None  # (2, capacity): sums of losses and of their weights, on the device
        self._window: list[tuple[list[int], Tensor]] = []  # sums of the passes of the window in progress
        self._totals: dict[str, tuple[float, float]] = {}  # of all processes
        self._was_called = False  # in the window in progress
        self._has_warned = False

    # ---- the engine

    def join(self, engine: Engine) -> None:
        """Records the losses of an engine's training passes, and gathers them when it reads its losses."""
        engine.wrap(partial(self._loss_of, engine), self._window_of)
        engine.after_read.append(self.gather)

    def _loss_of(self, engine: Engine, compute_loss: Callable[..., Any]) -> Callable[..., Tensor]:
        def loss_of(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss, outputs = compute_loss_with_outputs(compute_loss, model, inputs, num_items_in_batch)
            current = engine.current
            self._was_called = True
            if current is not None and not current.is_dummy:
                rows = self._losses(outputs, current.counts, loss.detach(), num_items_in_batch)
                first = sum(map(batch_size_of, engine.batches[: current.index]))
                if rows is not None:
                    self._keep(rows, self._sources.current[first : first + rows.shape[1]])
            found: Tensor = loss
            return found

        return loss_of

    def _window_of(self, run_window: RunWindow) -> RunWindow:
        def run(runner: PassRunner, passes: list[Pass]) -> list[Tensor]:
            self._window, self._was_called = [], False  # the passes of a window that ran out of memory are dropped
            losses = run_window(runner, passes)
            check_was_called(self._option, self._was_called)
            self._add()
            return losses

        return run

    def _keep(self, rows: Tensor, names: Sequence[str]) -> None:
        """Keeps the sums of the losses and weights of a pass, `(2, samples)`, by source."""
        if len(names) != rows.shape[1]:
            raise UnsupportedOption(
                f"{self._option}: a batch has {rows.shape[1]} samples, and the loader drew {len(names)} for it; do not "
                "change the number of samples in a collator or get_batch_samples."
            )
        rows = rows if rows.device.type == "mps" else rows.double()
        if self._leaves_out:
            rows = torch.where(torch.isfinite(rows[0]), rows, 0.0)
        present = list(dict.fromkeys(names))
        for name in present:
            self._indices.setdefault(name, len(self._indices))
        if len(self._indices) > MOST_SOURCES:
            raise UnsupportedOption(
                f"{self._option}: the samples have more than {MOST_SOURCES} different values, such as {names[0]!r}: "
                "name an entry of few values."
            )
        owners = torch.tensor([present.index(name) for name in names]).to(rows.device, non_blocking=True)
        masks = owners == torch.arange(len(present), device=rows.device)[:, None]
        sums = torch.where(masks, rows[:, None], 0.0).sum(-1)  # (2, sources), in an order that does not vary
        self._window.append(([self._indices[name] for name in present], sums))

    def _add(self) -> None:
        """Adds the passes of a window to the sums."""
        for indices, sums in self._window:
            if self._sums is None or self._sums.shape[1] < len(self._indices):
                larger = sums.new_zeros(2, 2 * len(self._indices))
                if self._sums is not None:
                    larger[:, : self._sums.shape[1]] = self._sums
                self._sums = larger
            self._sums[:, indices] += sums
        self._window = []

    # ---- log rows

    def gather(self) -> None:
        """Adds the sums of all processes to the totals; collective. Synchronizes with the device."""
        sums, self._sums = self._sums, None
        own: dict[str, list[float]] = {}
        if sums is not None:
            losses, weights = sums.tolist()
            own = {name: [losses[index], weights[index]] for name, index in self._indices.items() if weights[index]}
            self._warn()
        for part in gather_objects(self._world, own):
            for name, (loss, weight) in part.items():
                total = self._totals.get(name, (0.0, 0.0))
                self._totals[name] = total[0] + loss, total[1] + weight

    def _warn(self) -> None:
        error, self._losses.error = self._losses.error, None
        if error is not None and float(error) > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: the loss was not that of the first steps: %s<source> is computed from the logits without terms "
                "that have been added since.",
                self._option,
                PREFIX,
            )

    def row(self, times: Mapping[str, float]) -> dict[str, float]:
        """Returns the mean loss of each source since the last row; none for a source without samples."""
        totals, self._totals = self._totals, {}
        return {PREFIX + name: loss / weight for name, (loss, weight) in sorted(totals.items())}

    def describe(self) -> str:
        """Returns nothing: there is no rate."""
        return ""

    # ---- an item of checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns the totals since the last log row, after `gather`."""
        return {"totals": {name: list(total) for name, total in self._totals.items()}, **self._losses.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the totals, and drops what was recorded since."""
        self._totals = {name: (float(loss), float(weight)) for name, (loss, weight) in state["totals"].items()}
        self._losses.load_state_dict(state)
        self._sums, self._window = None, []
