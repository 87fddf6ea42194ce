"""Token accuracy, entropy and perplexity in the log (`log_token_metrics`), and the z-loss (`z_loss_weight`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption
from paceline.args.sections import Options
from paceline.args.token_terms import name_of
from paceline.pytorch.distributed.collectives import gather_objects
from paceline.pytorch.distributed.context_link import context_of
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.distributed.window import Pass, PassRunner
from paceline.pytorch.engine import Engine
from paceline.pytorch.evaluation.token_metrics import TokenMetrics
from paceline.pytorch.model.loss_terms import LossTerms
from paceline.pytorch.model.objective import accepts, check_was_called
from paceline.pytorch.model.token_sums import NUM_SUMS, metrics_of
from paceline.pytorch.sync import RunWindow


def check_support(option: str, strategy: SingleDevice) -> None:
    """Checks that the cross-entropies of a pass are computed where they can be observed.

    Raises:
        UnsupportedOption: they are not.
    """
    if strategy.runs_windows or strategy.is_lazy:
        raise UnsupportedOption(
            f"{option} is not supported with pipelines and XLA devices: use parallel='ddp', 'fsdp', or a mesh of tp, "
            "cp or sp, or leave it out."
        )


def evaluation_metrics(strategy: SingleDevice) -> TokenMetrics:
    """Returns what computes the token metrics of an evaluation.

    Raises:
        UnsupportedOption: the strategy hides the cross-entropies.
    """
    check_support("log_token_metrics=True", strategy)
    return TokenMetrics("log_token_metrics=True", strategy.unwrap)


class TokenTerms:
    """Sums over the targets since the last log row. A meter, and an item of checkpoints.

    Args:
        options: the arguments.
        strategy: the strategy of the run.
        leaves_out: passes whose sums are not finite do not count.

    Raises:
        UnsupportedOption: the strategy hides the cross-entropies.
    """

    is_recorded = True

    def __init__(self, options: Options, strategy: SingleDevice, leaves_out: bool) -> None:
        self._option = name_of(options)
        check_support(self._option, strategy)
        self._strategy, self._world, self._leaves_out = strategy, strategy.world, leaves_out
        self._terms = LossTerms(self._option, options.z_loss_weight)
        self._logs_metrics, self._z_weight = options.log_token_metrics, options.z_loss_weight
        self._sums: Tensor | None = None  # of the windows since the last gather, on the device
        self._window: list[Tensor] = []  # of the passes of the window in progress
        self._was_called = False  # in the window in progress
        self._totals = [0.0] * NUM_SUMS  # of all processes

    # ---- the engine

    def join(self, engine: Engine) -> None:
        """Observes the losses of an engine's training passes, and gathers the sums when it reads its losses."""
        engine.wrap(partial(self._loss_of, engine), self._window_of)
        engine.after_read.append(self.gather)

    def _loss_of(self, engine: Engine, compute_loss: Callable[..., Any]) -> Callable[..., Tensor]:
        takes_count = accepts(compute_loss, "num_items_in_batch")

        def loss_of(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            numbers = {"num_items_in_batch": num_items_in_batch} if takes_count else {}
            self._was_called = True
            inner = self._strategy.unwrap(model)
            with self._terms.observed(model, inner, context_of(inner)):
                loss: Tensor = compute_loss(model, inputs, **numbers)
            current, sums = engine.current, self._terms.sums.total
            if sums is not None and not (current is not None and current.is_dummy):
                if self._leaves_out:
                    sums = torch.where(torch.isfinite(sums).all(), sums, 0.0)
                self._window.append(sums)
            return loss

        return loss_of

    def _window_of(self, run_window: RunWindow) -> RunWindow:
        def run(runner: PassRunner, passes: list[Pass]) -> list[Tensor]:
            self._window, self._was_called = [], False  # the passes of a window that ran out of memory are dropped
            losses = run_window(runner, passes)
            check_was_called(self._option, self._was_called)
            for sums in self._window:
                self._sums = sums if self._sums is None else self._sums + sums
            self._window = []
            return losses

        return run

    # ---- log rows

    def gather(self) -> None:
        """Adds the sums of all processes to the totals; collective. Synchronizes with the device."""
        sums, self._sums = self._sums, None
        is_leader = self._strategy.mesh.is_data_leader(self._world.process_index)  # of ranks that read the same data
        own = [0.0] * NUM_SUMS if sums is None or not is_leader else sums.tolist()
        for part in gather_objects(self._world, own):
            self._totals = [total + value for total, value in zip(self._totals, part, strict=True)]

    def row(self, times: Mapping[str, float]) -> dict[str, float]:
        """Returns the means over the targets since the last row; nothing without targets."""
        totals, self._totals = self._totals, [0.0] * NUM_SUMS
        number = totals[0]
        if not number:
            return {}
        found = metrics_of(totals) if self._logs_metrics else {}
        if self._z_weight:
            found["z_loss"] = self._z_weight * totals[4] / number
        return found

    def describe(self) -> str:
        """Returns nothing: there is no rate."""
        return ""

    # ---- an item of checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns the totals since the last log row, after `gather`."""
        return {"totals": list(self._totals)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the totals, and drops what was recorded since."""
        self._totals = [float(total) for total in state["totals"]]
        self._sums, self._window = None, []
