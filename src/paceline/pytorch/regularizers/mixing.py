"""Mixup (Zhang et al., 2018, arXiv:1710.09412) and CutMix (Yun et al., 2019, arXiv:1905.04899).

Each sample of a micro-batch is mixed with another one of it, by one weight for the micro-batch. The loss is the
weighted mean of the losses for both targets. Both have the weight of the micro-batch in the optimizer step, because the
targets are the same ones in another order.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.args.errors import UnsupportedOption
from paceline.args.regularizers import CutMix, Mixup
from paceline.pytorch.data.batches import rebuild_mapping
from paceline.pytorch.distributed.window import Pass
from paceline.pytorch.engine import Engine
from paceline.pytorch.model.loss import IGNORE_INDEX, align
from paceline.pytorch.model.outputs import candidate_logits
from paceline.pytorch.model.prepare import input_embedding
from paceline.pytorch.regularizers.passes import Context, LossCall, RegularizerPass
from paceline.pytorch.sync import RunWindow

logger = logging.getLogger(__name__)

PURPOSE = "mixing"


@dataclass(frozen=True)
class Draw:
    """The random numbers of one micro-batch.

    Attributes:
        share: weight of a sample's own input and target, 0 to 1.
        partners: index of the sample that each one is mixed with, shape (samples,), on the device.
        box: (top, bottom, left, right) of what CutMix pastes, as fractions of height and width; None for mixup.
    """

    share: float
    partners: Tensor
    box: tuple[float, float, float, float] | None = None


class Mixing(RegularizerPass):
    """One of the mixing regularizers of a run; with several, each micro-batch draws one of them.

    Args:
        settings: a Mixup or a CutMix.
        context: the parts of the run.

    Raises:
        UnsupportedOption: sequences are split over processes.
    """

    def __init__(self, settings: Mixup | CutMix, context: Context) -> None:
        super().__init__(settings, context)
        if context.strategy.mesh.num_parts > 1:
            raise UnsupportedOption(
                f"regularizers: {settings.name} is not supported with context or sequence parallelism, where no "
                "process has the outputs of whole sequences: use another axis of parallel, or leave it out."
            )
        mixers = [each.name for each in context.settings if isinstance(each, Mixup | CutMix)]
        self._place, self._num_mixers = mixers.index(settings.name), len(mixers)
        self._own_loss = OwnLoss(settings.name)
        self._draw: Draw | None = None  # of the pass in progress, for the hook of the embedding
        self._is_forward = False
        self._pass: Pass | None = None  # that the draw is for
        self._engine: Engine | None = None
        self.mixes_embeddings = isinstance(settings, Mixup) and settings.on == "embeddings"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Mixes the output of the input embedding while entered, with `on="embeddings"`."""
        if not self.mixes_embeddings:
            yield
            return
        _, embedding = input_embedding(self.context.model, "regularizers: mixup(on='embeddings')")

        def mix(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
            draw = self._draw
            if draw is None or not (self._is_forward or self._is_recomputing()):
                return output
            return mix_by_share(output, draw)

        handle = embedding.register_forward_hook(mix)
        try:
            yield
        finally:
            handle.remove()
            self._draw = self._pass = self._engine = None

    def _is_recomputing(self) -> bool:
        """Returns True in the backward pass of the draw's micro-batch, where checkpointed modules run once more."""
        is_own = self._engine is not None and self._pass is not None and self._engine.current is self._pass
        return is_own and torch.is_grad_enabled()

    def run_window(self, call: RunWindow, engine: Engine, passes: list[Pass]) -> list[Tensor]:
        """Runs the passes, and records the one in progress."""
        self._engine = engine
        return call(engine, passes)

    def compute_loss(
        self, call: LossCall, model: nn.Module, inputs: Any, num_items: Any, current: Pass | None
    ) -> tuple[Tensor, Any]:
        """Returns the loss of mixed inputs for both targets, and the outputs."""
        name = self.settings.name
        if not isinstance(inputs, Mapping):
            raise UnsupportedOption(
                f"regularizers: {name} needs batches with names, and got a {type(inputs).__name__}: let the "
                "data_collator return a dict."
            )
        labels = {key: inputs[key] for key in self.context.objective.label_names if isinstance(inputs.get(key), Tensor)}
        if not labels:
            raise UnsupportedOption(
                f"regularizers: {name} mixes targets, and the batch has none under "
                f"{' or '.join(map(repr, self.context.objective.label_names)) or 'any name'}, only "
                f"{', '.join(map(str, inputs))}: name them in label_names=[...], or leave it out."
            )
        first = next(iter(labels.values()))
        draw = self.draw(first, current.index if current is not None else 0)
        if draw is None:
            self._draw = None
            return call(model, inputs, num_items)
        draw, mixed = self.mixed(inputs, labels, draw, first.shape[0])
        self._draw, self._pass, self._is_forward = draw if self.mixes_embeddings else None, current, True
        try:
            loss, outputs = call(model, mixed, num_items)
        finally:
            self._is_forward = False
        if all(each.is_floating_point() for each in labels.values()):
            return loss, outputs  # the loss is linear in the targets, which are mixed
        others = {key: mixed[key] if each.is_floating_point() else each[draw.partners] for key, each in labels.items()}
        differs = current is None or current.needs_factor
        other = self._loss_for(outputs, labels, others, num_items, loss, differs)
        return draw.share * loss + (1 - draw.share) * other, outputs

    def draw(self, labels: Tensor, index: int) -> Draw | None:
        """Returns the random numbers of a micro-batch; None if another mixing regularizer is drawn for it."""
        generator = self.context.generator(PURPOSE, index)
        if int(generator.integers(self._num_mixers)) != self._place:
            return None
        share = float(generator.beta(self.settings.alpha, self.settings.alpha))
        partners = torch.from_numpy(generator.permutation(labels.shape[0])).to(labels.device)
        if not isinstance(self.settings, CutMix):
            return Draw(share, partners)
        side = math.sqrt(1 - share)
        middles = generator.random(2).tolist()
        top, bottom, left, right = (
            min(max(middle + half, 0.0), 1.0) for middle in middles for half in (-side / 2, side / 2)
        )
        return Draw(share, partners, (top, bottom, left, right))

    def mixed(
        self, inputs: Mapping[str, Any], labels: Mapping[str, Tensor], draw: Draw, num_samples: int
    ) -> tuple[Draw, dict[str, Any]]:
        """Returns the draw, with the exact area of a pasted box, and the mixed micro-batch.

        Floating-point targets are mixed; others are left as they are.

        Raises:
            UnsupportedOption: an input cannot be mixed.
        """
        rows = {
            key: value
            for key, value in inputs.items()
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == num_samples and key not in labels
        }
        changed: dict[str, Any] = {}
        if isinstance(self.settings, CutMix):
            draw, changed = paste(rows, draw)
        elif self.mixes_embeddings:
            changed = self._masks(rows, draw)
        else:
            for key, value in rows.items():
                if not value.is_floating_point():
                    raise not_mixable(key, value)
                changed[key] = mix_by_share(value, draw)
        for key, value in labels.items():
            if value.is_floating_point():
                changed[key] = mix_by_share(value, draw)
        return draw, rebuild_mapping(inputs, {**inputs, **changed})

    def _masks(self, rows: Mapping[str, Tensor], draw: Draw) -> dict[str, Any]:
        """Returns the attention masks, in which a token counts if it does in either of the two samples."""
        changed = {}
        for key, value in rows.items():
            if key == "attention_mask" and value.dim() == 2:
                changed[key] = torch.maximum(value, value[draw.partners])
            elif value.is_floating_point():
                changed[key] = mix_by_share(value, draw)
        return changed

    def _loss_for(
        self,
        outputs: Any,
        labels: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
        num_items: Any,
        loss: Tensor,
        is_shared: bool,
    ) -> Tensor:
        """Returns the loss of the outputs for the targets `others`.

        Args:
            outputs: the model's outputs for the mixed inputs.
            labels, loss: the samples' own targets, and their loss.
            others: the targets of the partners.
            num_items: `num_items_in_batch`, or None.
            is_shared: the optimizer step has other micro-batches with targets.
        """
        objective = self.context.objective
        if self.context.owns_loss and objective.has_function:
            return objective.loss_of_function(outputs, others, num_items)
        if len(labels) > 1:
            raise UnsupportedOption(
                f"regularizers: {self.settings.name} with targets under several names ({', '.join(labels)}) needs "
                "compute_loss_func=(outputs, labels), which is given them by name; or leave it out."
            )
        (own,), (other,) = labels.values(), others.values()
        if self.context.owns_loss and objective.smoother is not None:
            return objective.smoothed_loss(outputs, other)
        return self._own_loss(outputs, own, other, num_items, loss, is_shared)

    def after_read(self) -> None:
        """Warns if the model's own loss was another one than in the first passes."""
        self._own_loss.check_later()

    def state_dict(self) -> dict[str, Any]:
        """Returns what was seen of the model's own loss."""
        return self._own_loss.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what was seen of the model's own loss."""
        self._own_loss.load_state_dict(state)


def mix_by_share(values: Tensor, draw: Draw) -> Tensor:
    """Returns the weighted means of each row and its partner."""
    return values * draw.share + values[draw.partners] * (1 - draw.share)


def paste(rows: Mapping[str, Tensor], draw: Draw) -> tuple[Draw, dict[str, Any]]:
    """Returns the draw with the exact share of pixels that images keep, and the images with a box of their partner's.

    Args:
        rows: the inputs; images have the shape (samples, ..., height, width), and all of them the same size.

    Raises:
        UnsupportedOption: an input is no image.
    """
    sizes = {tuple(value.shape[-2:]) for value in rows.values() if value.dim() > 2}
    odd = next((key for key, value in rows.items() if value.dim() < 3), None)
    if odd is not None or len(sizes) != 1:
        shapes = ", ".join(f"{key}{tuple(value.shape)}" for key, value in rows.items())
        raise UnsupportedOption(
            "regularizers: cutmix pastes a box into images of shape (samples, ..., height, width), and the inputs are "
            f"{shapes or 'none'}: leave it out, or use mixup."
        )
    height, width = next(iter(sizes))
    assert draw.box is not None
    top, bottom = (round(edge * height) for edge in draw.box[:2])
    left, right = (round(edge * width) for edge in draw.box[2:])
    changed: dict[str, Any] = {}
    for key, value in rows.items():
        image = value.clone()
        image[..., top:bottom, left:right] = value[draw.partners][..., top:bottom, left:right]
        changed[key] = image
    share = 1 - (bottom - top) * (right - left) / (height * width)
    return Draw(share, draw.partners, draw.box), changed


def not_mixable(name: str, value: Tensor) -> UnsupportedOption:
    """Returns the error for an input that has no mean."""
    kind = str(value.dtype).removeprefix("torch.")
    return UnsupportedOption(
        f"regularizers: mixup mixes floating-point inputs, and {name!r} is {kind} of shape {tuple(value.shape)}: "
        "convert pixels to floating point in the data; for token ids set mixup: {on: embeddings}; or leave it out."
    )


def rounding_of(loss: Tensor) -> float:
    """Returns the relative difference that two ways to compute a loss may have."""
    return 1e-4 if loss.dtype.itemsize > 2 else 2e-2


Form = Callable[[Tensor, Tensor, Any], Tensor]


def mean_form(logits: Tensor, labels: Tensor, num_items: Any) -> Tensor:
    """Returns the mean cross-entropy over targets."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX)


def sum_form(logits: Tensor, labels: Tensor, num_items: Any) -> Tensor:
    """Returns the sum of the cross-entropy over targets."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def scaled_form(logits: Tensor, labels: Tensor, num_items: Any) -> Tensor:
    """Returns the sum of the cross-entropy, divided by the number of targets of the optimizer step."""
    return sum_form(logits, labels, num_items) / (1 if num_items is None else num_items)


FORMS: dict[str, Form] = {"mean": mean_form, "scaled": scaled_form, "sum": sum_form}


class OwnLoss:
    """The loss of a model that computes it itself, for other targets.

    The loss is recomputed from the logits as a cross-entropy, in the form that was seen to be the model's own. It is
    compared in the first two passes, and in later ones as long as several forms fit and differ. The difference in all
    other passes is kept on the device, and a warning once it is read.

    Args:
        name: the regularizer, for the error.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._forms = list(FORMS)
        self._num_looks = 0
        self._error: Tensor | None = None  # largest difference in later passes, in units of rounding
        self._has_warned = False

    def __call__(
        self, outputs: Any, labels: Tensor, others: Tensor, num_items: Any, loss: Tensor, is_shared: bool
    ) -> Tensor:
        """Returns the loss for `others`, given that for `labels`.

        Raises:
            UnsupportedOption: the loss is no cross-entropy of the logits.
        """
        aligned = (align(each, labels) for each in candidate_logits(outputs))
        logits = next((each for each in aligned if each is not None), None)
        if logits is None:
            raise self._unknown(f"no output has the shape (*{tuple(labels.shape)}, classes)")
        logits = logits if logits.dtype == torch.float64 else logits.float()
        is_open = len(self._forms) > 1 and is_shared and labels.numel() > 1
        if self._num_looks < 2 or is_open:
            self._look(logits.detach(), labels, num_items, loss.detach())
        elif not self._has_warned:
            self._compare(logits.detach(), labels, num_items, loss.detach())
        return FORMS[self._forms[0]](logits, others, num_items).to(loss.dtype)

    def _look(self, logits: Tensor, labels: Tensor, num_items: Any, loss: Tensor) -> None:
        """Keeps the forms that give the model's own loss. Synchronizes with the device."""
        rounding = rounding_of(loss)
        candidates = [name for name in self._forms if num_items is not None or name != "scaled"]
        values = [FORMS[name](logits, labels, num_items).to(loss.dtype) for name in candidates]
        fits = [
            name
            for name, value in zip(candidates, values, strict=True)
            if torch.isclose(value, loss, rtol=rounding, atol=1e-6)
        ]
        if not fits and torch.isfinite(loss):
            raise self._unknown("it is no cross-entropy of the logits")
        self._forms = fits or self._forms
        self._num_looks += 1

    @torch.no_grad()
    def _compare(self, logits: Tensor, labels: Tensor, num_items: Any, loss: Tensor) -> None:
        """Keeps the largest difference from the model's own loss, on the device."""
        value = FORMS[self._forms[0]](logits, labels, num_items).to(loss.dtype)
        error = (value - loss).abs() / (rounding_of(loss) * loss.abs() + 1e-6)
        error = torch.where(torch.isfinite(error), error, torch.zeros_like(error))
        self._error = error if self._error is None else torch.maximum(self._error, error)

    def check_later(self) -> None:
        """Warns once if the model's own loss was no cross-entropy in a later pass. Synchronizes with the device."""
        error, self._error = self._error, None
        if error is not None and float(error) > 1:
            self._has_warned = True
            logger.warning(
                "regularizers: %s: the model's own loss was a cross-entropy of the logits in the first passes, and is "
                "not any more; of the loss for the partners' targets, only that part is known. Pass "
                "compute_loss_func=(outputs, labels) -> loss to the Trainer.",
                self.name,
            )

    def _unknown(self, reason: str) -> UnsupportedOption:
        return UnsupportedOption(
            f"regularizers: {self.name} needs the loss for two sets of targets, and the model's own loss cannot be "
            f"recomputed: {reason}. Pass compute_loss_func=(outputs, labels) -> loss to the Trainer, or give targets "
            "as probabilities of the classes (floating point), or leave it out."
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the forms that fit so far."""
        return {"forms": list(self._forms), "looks": self._num_looks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the forms; unknown ones are dropped."""
        self._forms = [name for name in state["forms"] if name in FORMS] or list(FORMS)
        self._num_looks = int(state["looks"])
