"""The engine where the strategy runs the forward and backward passes of all micro-batches of an update itself.

The processes of one such strategy read the same data. One of them makes the losses, with the Trainer's own methods;
what it finds out about them it tells the others.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.core.contracts import Emit, StepOutput
from paceline.distributed.collectives import gather_objects
from paceline.engine import MicroStep
from paceline.model.loss import Counts
from paceline.model.objective import WatchedCount, compute_loss_with_outputs
from paceline.model.outputs import detach
from paceline.shared_engine import SharedEngine


class WindowEngine(SharedEngine):
    """Updates made by `strategy.run_window`. Options: those of `SharedEngine`."""

    strategy: Any  # one that runs windows

    def __init__(self, **options: Any) -> None:
        check_own(options["training_step"])
        super().__init__(**options)
        self._place = self.prepare_inputs
        self.prepare_inputs = self._prepare
        self._prepared: Mapping[str, Any] = {}

    def step(self, batches: Sequence[Any], num_items: Any, emit: Emit | None) -> StepOutput:
        """As for others, in as many micro-batches as the strategy wants."""
        return super().step(self.strategy.divide(batches, self.split), num_items, emit)

    def _accumulate(
        self, batches: Sequence[Any], counts: Sequence[Counts], total: float, num_items: Any, emit: Emit | None
    ) -> list[Tensor]:
        """Forward and backward of the micro-batches that weigh something; their contributions, on all processes."""
        exchange, strategy = self.exchange, self.strategy
        if exchange.weight == 0:
            return []
        self._to_training()
        if not self.rule.is_settled:
            self._identify(batches, counts, num_items)
        self._window, self._weighed = counts, []
        chosen = [index for index, item in enumerate(counts) if item.weight > 0 and not exchange.is_idle]
        prepared = [self._place(copy.copy(batches[index])) for index in chosen] or [self._place(exchange.filler())]
        weighing = [counts[index] for index in chosen]
        losses: dict[int, Tensor] = {}

        def make_loss(number: int) -> Tensor:
            is_silent = number >= len(weighing)
            now = Counts(0, None, 0) if is_silent else weighing[number]
            self._current = MicroStep(now, 0.0 if is_silent else exchange.total, number == len(weighing) - 1)
            self._prepared = copy.copy(prepared[0 if is_silent else number])
            strategy.last.expect(self._prepared)
            loss = self.training_step(strategy.last, self._prepared, num_items)
            strategy.last.check_called("compute_loss")
            if not is_silent:
                losses[number] = loss
                if self.keep_outputs:
                    self._kept.append(detach(self._seen))
            self._seen = None
            weighed: Tensor = strategy.take_loss()
            return weighed

        strategy.run_window(prepared, make_loss)
        self._current, self._prepared = None, {}
        for _ in range(len(batches) - 1 if emit is not None else 0):
            assert emit is not None
            emit("on_substep_end")
        if not weighing:
            return [torch.zeros((), device=strategy.device)]
        shared: list[Tensor] = strategy.share_losses([losses[number] for number in sorted(losses)], len(weighing))
        return shared

    def _to_training(self) -> None:
        """Training mode, on the processes that make no losses too."""
        last = self.strategy.last
        if not (last.training and self._inner.training):
            last.train()
            if callable(self._enter_train):
                self._enter_train()

    def _prepare(self, inputs: Any) -> Any:
        """A batch that was prepared for the stages is not prepared again."""
        return inputs if inputs is self._prepared else self._place(inputs)

    def _is_telling(self, counts: Counts) -> bool:
        """Nothing is looked at inside an update: `_identify` has."""
        return False

    def _identify(self, batches: Sequence[Any], counts: Sequence[Counts], num_items: Any) -> None:
        """Find out what the loss is a mean over, before the update is made: the stages of one that has begun cannot be
        told to weigh otherwise. Micro-batches that tell something go through the stages once more, without gradients.
        """
        rule, strategy, exchange = self.rule, self.strategy, self.exchange
        for index in [] if exchange.is_idle else self._most_telling_first(counts):
            if rule.telling(counts[index]) == 0:
                continue
            batch = self._place(copy.copy(batches[index]))
            with strategy.looking():
                if strategy.is_last:
                    self._look_at(batch, counts[index], num_items)
                else:
                    strategy.forward(batch, None)
            rule.load_state_dict(strategy.share_from_last(rule.state_dict()))
        if exchange.mesh.data_size > 1:
            found = gather_objects(exchange.world, (rule.state_dict(), rule.scaled_factor))
            rule.merge([state for state, _ in found])
            rule.scaled_factor = min(factor for _, factor in found)
        exchange.weigh_again(0 if exchange.is_idle else rule.recount(counts))

    def _look_at(self, batch: Any, counts: Counts, num_items: Any) -> None:
        given = WatchedCount.of(num_items) if isinstance(num_items, Tensor) else num_items
        last = self.strategy.last
        last.expect(batch)
        last.receive(None)
        with self.strategy.forward_context():
            loss, outputs = compute_loss_with_outputs(self.compute_loss, last, batch, given)
        if type(given) is WatchedCount and given.is_used:
            self.rule.scaled_factor = 1  # as in transformers: used as it is, if it is unknown
            if not self.rule.is_assumed_scaled:
                self.rule.assume_scaled(True)
        if loss is not None:
            self.rule.look(loss.detach(), outputs, counts, num_items)


def check_own(training_step: Any) -> None:
    """Refuse a method that the strategy would have to call around forward and backward of each micro-batch.

    Raises:
        ValueError: `training_step` is a subclass's own.
    """
    function = getattr(training_step, "__func__", training_step)
    if not str(getattr(function, "__module__", None)).startswith("paceline."):
        name = getattr(function, "__qualname__", "training_step")
        raise ValueError(
            f"{name}: training_step cannot be overridden with stages on several processes, whose schedule runs forward "
            "and backward of all micro-batches. Override compute_loss, which the last stage calls, or leave 'pp' out "
            "of parallel."
        )
