"""The prediction step: loss, predictions and labels of one batch, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.methods import is_ours
from paceline.pytorch.data.batches import batch_size_of
from paceline.pytorch.distributed.precision import widened
from paceline.pytorch.model.objective import Objective, compute_loss_with_outputs
from paceline.pytorch.model.outputs import detach, find_loss, is_named, is_same_value, read_predictions
from paceline.pytorch.model.signature import innermost


@dataclass(eq=False, kw_only=True)
class BatchPredictor:
    """Implements `Trainer.prediction_step`.

    Args:
        objective: calls the model; names the labels if `label_names` is empty.
        label_names: names under which a batch carries its labels.
        requires_all_labels: the user declared `label_names`, so a batch that lacks one of them counts as unlabeled.
            Otherwise only the labels that the model's forward requires are required.
        can_return_loss: the model returns a loss without labels.
        autocasts: predictions are computed in a 16-bit type, and returned in float32.
        count_items: `(batches) -> num_items_in_batch`, which may be None.
        prepare_inputs: `(batch) -> batch on the device`.
        compute_loss: `(model, inputs, return_outputs, num_items_in_batch) -> loss, or (loss, outputs)`.
        forward_context: returns the precision context of a forward pass.
    """

    objective: Objective
    label_names: Sequence[str]
    requires_all_labels: bool
    can_return_loss: bool
    autocasts: bool
    count_items: Callable[[Sequence[Any]], Any]
    prepare_inputs: Callable[[Any], Any]
    compute_loss: Callable[..., Any]
    forward_context: Callable[[], AbstractContextManager[Any]]

    def predict(
        self,
        model: nn.Module,
        inputs: Any,
        loss_only: bool,
        ignore_keys: Sequence[str],
    ) -> tuple[Tensor | None, Any, Any]:
        """Returns (loss, predictions, labels) of one batch, without gradients; absent ones are None.

        Labels are read before the loss is computed, because an overridden `compute_loss` may pop them. If the batch
        lacks the labels that the model is known to take, the model is called without computing a loss. Labels that the
        model does not take are left to `compute_loss`.

        Args:
            model: the model as the strategy prepared it.
            inputs: the batch.
            loss_only: return neither predictions nor labels.
            ignore_keys: outputs of the model to drop.
        """
        names = self.labels_in(inputs)
        has_labels = bool(names)
        with torch.no_grad():
            num_items = self.count_items([inputs]) if has_labels else None
            inputs = self.prepare_inputs(inputs)
            labels = tuple(inputs[name] for name in names) if has_labels else None
            with self._logits_context(loss_only):
                loss, outputs = self._run(model, inputs, num_items, has_labels)
        place = self.objective.loss_place
        holds_loss = is_named(outputs) or place.holds(outputs, loss, batch_size_of(inputs), has_labels)
        if loss is not None:
            candidate = None if holds_loss else find_loss(outputs)
            is_prediction = candidate is not None and is_same_value(candidate, loss)
            loss = loss.detach().mean() if not is_prediction else None
        if loss_only:
            return loss, None, None
        if labels is not None and len(labels) == 1:
            labels = labels[0]
        return loss, detach(read_predictions(outputs, ignore_keys, holds_loss)), detach(labels)

    def _logits_context(self, loss_only: bool) -> AbstractContextManager[None]:
        """Returns the context of a pass whose logits are read, or not; an overridden `compute_loss` may read them."""
        if not loss_only:
            return self.objective.with_logits()
        return self.objective.unread() if is_ours(self.compute_loss) else nullcontext()

    def _run(self, model: nn.Module, inputs: object, num_items: object, has_labels: bool) -> tuple[Tensor | None, Any]:
        """Returns the loss and the model's outputs."""
        as_widened = widened(model) if self.autocasts else nullcontext()
        with self.forward_context(), as_widened:
            if has_labels or not self.label_names or self.can_return_loss:
                return compute_loss_with_outputs(self.compute_loss, model, inputs, num_items)
            return None, self.objective.call(model, inputs)

    def labels_in(self, inputs: object) -> list[str]:
        """Returns the names of a batch's labels; empty if it lacks a required one."""
        if not isinstance(inputs, Mapping):
            return []
        names = self.label_names or self.objective.label_names
        present = [name for name in names if inputs.get(name) is not None]
        needed = names if self.requires_all_labels else self.objective.signature.required.intersection(names)
        return present if set(needed).issubset(present) else []


def ignored_keys(model: nn.Module) -> Sequence[str]:
    """Returns the names of outputs that are no predictions according to the model's config."""
    config = getattr(innermost(model), "config", None)
    if not config:
        return []
    names: Sequence[str] = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
    return names
