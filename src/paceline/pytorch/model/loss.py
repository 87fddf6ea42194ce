"""Determines the divisor of a returned loss, so that any split of the same samples gives the same gradient.

A model returns one loss per micro-batch. To sum micro-batches correctly, the loss's divisor must be known. In order of
precedence it is the declared one; `num_items_in_batch`, if changing it changes the loss; the number of targets, if that
is known for the model's class; the number of samples. Extra forward passes over parts of a batch
(`paceline.pytorch.probes.loss`) test the assumption. They replace it if two probes agree, and warn if they contradict
the reduction in force.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.pytorch.data.loading import batch_size_of
from paceline.pytorch.model.outputs import candidate_logits, find_loss
from paceline.pytorch.model.reductions import (
    IGNORE_INDEX,
    MAIN,
    SUM,
    LossReduction,
    Observation,
    make_candidates,
    uncounted,
    with_ignored,
)

__all__ = ["IGNORE_INDEX", "Counts", "LabelSmoother", "LossNormalizer", "LossReduction"]

logger = logging.getLogger(__name__)

# maximum number of probes besides steps 1, 2, 4, 8, ...: of steps whose weights depend on an open decision
MAX_EXTRA_LOOKS = 10

DECLARED = {
    "samples": LossReduction("samples"),
    "tokens": LossReduction("tokens"),
    "shifted_tokens": LossReduction("tokens", shifted=True),
    "scaled": LossReduction("tokens"),
    "sum": SUM,
}
REMEDY = (
    'Say what it is with TrainingArguments(loss_weight="samples" | "tokens" | "shifted_tokens" | "scaled" | "sum"), or '
    "give loss_weight a function (batch) -> float that returns the weight of a micro-batch."
)


@dataclass(slots=True)
class Counts:
    """The counts of one collated micro-batch, taken on the host before user code can pop the labels."""

    samples: int
    labels: Tensor | None  # the targets of the loss, if there are any
    weight: float  # weight of this micro-batch under the reduction in force when it was counted
    is_shifted: bool = False  # the labels are aligned with the outputs they are compared with


class LossNormalizer:
    """Counts micro-batches, and computes the weight of each returned loss in its optimizer step.

    Args:
        label_names: names under which a batch carries its targets.
        declared: the user's `loss_weight`: a key of `DECLARED`, or a function `(batch) -> float`; None: unset.
        known: the known reduction of the loss of this model class; None: unknown.
        shifts: the model is known to shift its targets, so the first target of each sample does not count.
        pad_token_id: another target value that may be ignored.
        coupled: a sentence on how the loss couples the samples of a batch, which is logged as a warning; None: unknown.

    Attributes:
        reduction: the assumed reduction of the returned loss.
        is_scaled: the loss is divided by `num_items_in_batch`; None: not known yet.
        passes_count: the Trainer has passed the count to the model or `compute_loss_func`.
        calls_function: `compute_loss_func` is called. As in Hugging Face Trainer, it need not multiply its loss by the
            number of processes; an overridden `compute_loss` has to there.
        scaled_factor: the factor of a loss that is already divided for the whole optimizer step: the number of
            processes, if it is divided by their global count and gradients are averaged.
    """

    scaled_factor = 1.0

    def __init__(
        self,
        label_names: Sequence[str],
        declared: str | Callable[[Any], float] | None = None,
        known: LossReduction | None = None,
        shifts: bool = False,
        pad_token_id: int | None = None,
        coupled: str | None = None,
    ) -> None:
        self.label_names = tuple(label_names)
        self.function = declared if callable(declared) else None
        self.declared = "function" if callable(declared) else declared
        self.known = known
        self.shifts = shifts
        # preferred among the reductions that fit, even if the loss is computed outside the model
        self.likely = known or (LossReduction("tokens", shifted=True) if shifts else None)
        self.coupled = coupled
        self.is_averaged_by_author = False
        self._candidates = self.candidates = make_candidates(pad_token_id)
        self.passes_count = False
        self.calls_function = False
        self.is_made_here = False  # the loss is computed outside the model
        self._said: set[str] = set()  # each message is logged once
        self.begin()

    def begin(self, last_probe: int | None = None) -> LossNormalizer:
        """Resets the observations but not the declarations, so that runs on the same data are equal. Returns self.

        Args:
            last_probe: the last optimizer step that is probed; None: no limit.
        """
        self.last_probe = last_probe
        self.reduction = DECLARED.get(self.declared or "", self.known or LossReduction("samples"))
        self.is_scaled: bool | None = self.declared == "scaled" or (None if self.declared is None else False)
        self.candidates = self._candidates
        self.hits = dict.fromkeys(self.candidates, 0)
        self.misses = dict.fromkeys(self.candidates, 0)
        self._doubt: str | None = None  # the last unresolved contradiction
        self.is_multiplied = False  # user code has multiplied the loss by the number of processes
        self.by_chunks: bool | None = None  # the loss may be computed without logits; see `LinearLoss`
        self.num_updates = self.num_looks = self.num_extra = 0
        return self

    def take_over(self, other: LossNormalizer) -> None:
        """Becomes the normalizer of another loss: takes its declarations over and resets the observations."""
        vars(self).update({name: value for name, value in vars(other).items() if name != "_said"})
        self.begin(self.last_probe)

    def declare(self, name: str, is_averaged_by_author: bool = False) -> None:
        """Sets a declared reduction, which probes do not replace.

        Args:
            name: a key of `DECLARED`.
            is_averaged_by_author: with `scaled`, the loss already accounts for gradients that are averaged over
                processes.
        """
        self.declared, self.is_averaged_by_author = name, is_averaged_by_author
        self.begin()

    def know(self, reduction: LossReduction) -> None:
        """Sets the reduction of a loss that the caller computes."""
        self.known = self.reduction = reduction
        self.is_scaled = False
        self.is_made_here = True

    @property
    def has_other_shift(self) -> bool:
        """Returns True if a loss that the caller computes was seen to shift its targets, and the model's class is not
        known to, or the reverse.
        """
        return self.is_made_here and self.known is not None and self.known.shifted != self.shifts

    def know_other_shift(self) -> None:
        """Sets what another process has seen: see `has_other_shift`."""
        self.know(LossReduction("tokens", shifted=not self.shifts))

    def know_of(self, reduction: LossReduction) -> None:
        """Sets the observed reduction of the loss, unless one was declared."""
        self.known = self.likely = reduction
        self.begin(self.last_probe)

    # ---- counting

    def find_labels(self, batch: object) -> Tensor | None:
        """Returns the tensor under the first label name that the batch has; None if there is none or it is 0-dim."""
        if type(batch) is not dict and not isinstance(batch, Mapping):
            return None
        for name in self.label_names:
            labels = batch.get(name)
            if isinstance(labels, Tensor):
                return None if labels.dim() == 0 else labels
        return None

    def count(self, batch: Any) -> Counts:
        """Returns the counts of one micro-batch. Synchronizes with the device only if the labels are on it."""
        labels = self.find_labels(batch)
        samples = batch_size_of(batch) if labels is None else labels.shape[0]
        is_shifted = labels is not None and "shift_labels" in batch  # a padding-free collator shifted them already
        if is_shifted:
            labels = batch["shift_labels"]
        if self.function is not None:
            return Counts(samples, labels, self.weigh_by_function(batch), is_shifted)
        return Counts(samples, labels, sum(self.reduction.row_weights(labels, samples, is_shifted)), is_shifted)

    def weigh_by_function(self, batch: object) -> float:
        """Returns the result of `loss_weight` for a batch.

        Raises:
            ValueError: the result is not a finite number of 0 or more.
        """
        assert self.function is not None
        weight = float(self.function(batch))
        if not 0 <= weight < float("inf"):
            raise ValueError(f"loss_weight returned {weight} for a batch: its weight must be a number from 0 on.")
        return weight

    def num_items(self, batches: Sequence[Any]) -> Tensor | None:
        """Returns the number of targets in the micro-batches of an optimizer step; None if they cannot be counted.

        Labels under several names (start and end of an answer) have no common count, unless one of them is `labels`.
        The result is a 0-dim tensor on the host: reading it does not synchronize, and tensors on any device can be
        divided by it.
        """
        targets = LossReduction("tokens", shifted=self.shifts)
        total = 0
        for batch in batches:
            labels = self.find_labels(batch)
            if labels is None or labels.is_floating_point():
                return None
            if "labels" not in batch and sum(name in batch for name in self.label_names) > 1:
                return None
            is_shifted = "shift_labels" in batch
            total += targets.weigh(batch["shift_labels"] if is_shifted else labels, labels.shape[0], is_shifted)
        return torch.tensor(total)

    # ---- weight of a returned loss

    def factor(self, counts: Counts, total: float) -> float:
        """Returns the factor of a returned loss, with which the step's contributions add up to one weighted mean.

        Args:
            counts: the counts of this micro-batch.
            total: the sum of the weights of all micro-batches of the optimizer step, not 0; if gradients are averaged
                over processes, divided by their number.
        """
        if self.is_scaled or self.reduction == SUM:
            return 1 if self.is_averaged_by_author or self.is_multiplied else self.scaled_factor
        return 1 if counts.weight == total else counts.weight / total

    def recount(self, counts: Sequence[Counts]) -> float:
        """Recomputes the weights after a probe changed the reduction, and returns the new total."""
        if self.function is None:
            for item in counts:
                item.weight = self.reduction.weigh(item.labels, item.samples, item.is_shifted)
        return sum(item.weight for item in counts)

    def has_target(self, counts: Sequence[Counts]) -> bool:
        """Returns True if an optimizer step has any targets, or micro-batches without labels."""
        targets = LossReduction("tokens", self.reduction.shifted, self.reduction.ignore_index)
        return any(
            item.labels is None or targets.weigh(item.labels, item.samples, item.is_shifted) > 0 for item in counts
        )

    # ---- results of extra forward passes

    def is_due(self, counts: Sequence[Counts], by_row: bool = False) -> bool:
        """Returns True if the next step must be probed: steps 1, 2, 4, 8, ... and those that an open decision affects.

        Args:
            counts: the micro-batches of the step.
            by_row: compare the weights of rows; otherwise those of micro-batches.
        """
        number = self.num_updates + 1
        if self.last_probe is not None and number > self.last_probe:
            return False
        if number & (number - 1) == 0:
            return True
        if self.num_extra >= MAX_EXTRA_LOOKS or self.is_certain:
            return False
        return self.is_open_for(counts, by_row, self.candidates)

    @property
    def is_certain(self) -> bool:
        """Returns True if the reduction is declared, known for the model's class, or observed to be scaled.

        With `loss_weight="samples"` it stays undecided if samples without a target count.
        """
        return self.declared not in (None, "samples") or self.trusts_class or bool(self.is_scaled)

    @property
    def trusts_class(self) -> bool:
        """Returns True if the reduction is known from the model's class.

        This excludes a causal head whose loss ignores the count, because it does not compute its class's usual loss.
        """
        if self.known is None or self.is_made_here or self.declared is not None:
            return self.known is not None
        return not (self.known.shifted and self.passes_count and self.is_scaled is False)

    @property
    def is_confirmed(self) -> bool:
        """Returns True if two probes confirmed the reduction in force."""
        return self.hits[self.reduction] > 1

    def open_reductions(self, among: Sequence[LossReduction] = MAIN) -> list[LossReduction]:
        """Returns the reduction in force, followed by those of `among` that may still be right."""
        if self.is_certain or self.reduction.unit == "sum":
            return [self.reduction]
        others = (item for item in among if item not in (self.reduction, SUM) and not self.misses.get(item))
        return [self.reduction, *(item for item in others if self.declared is None or "samples" in item.unit)]

    def is_open_for(
        self,
        counts: Sequence[Counts],
        by_row: bool = False,
        among: Sequence[LossReduction] = MAIN,
    ) -> bool:
        """Returns True if an open reduction gives these micro-batches, or their rows, other weights than the one in
        force.
        """
        shares = []
        for reduction in self.open_reductions(among):
            rows = [reduction.row_weights(item.labels, item.samples, item.is_shifted) for item in counts]
            weights = [weight for row in rows for weight in row] if by_row else [sum(row) for row in rows]
            total = sum(weights)
            shares.append([weight / total if total else 0.0 for weight in weights])
        return any(other != shares[0] for other in shares[1:])

    def add_ignored(self, indices: Iterable[int]) -> None:
        """Adds the candidates in which targets of these values do not count."""
        self.candidates = with_ignored(self.candidates, indices)
        for candidate in self.candidates:
            self.hits.setdefault(candidate, 0)
            self.misses.setdefault(candidate, 0)

    def learn(self, observations: Sequence[Observation], window: Sequence[Counts] | None = None) -> None:
        """Records the observations of a step or a batch.

        Args:
            observations: those of all processes, in the same order on each of them.
            window: this process's micro-batches, whose weights may depend on an open decision; None: `warn_of_doubt`
                is called later.
        """
        self.num_extra += self.num_updates & (self.num_updates - 1) != 0
        self.warn_of_coupling()
        self._learn_scaling([item for item in observations if item.count])
        self.add_ignored(index for item in observations for index in item.ignored)
        looks = [item for item in observations if item.misses]
        self.num_looks += len(looks)
        for look in looks:
            for counter, found in ((self.hits, look.fits), (self.misses, look.misses)):
                for candidate in found:
                    counter[candidate] += 1
        if self.is_scaled or self.function is not None:
            return
        if self.misses[self.reduction]:
            self._replace(any(not look.fits for look in looks), can_wait=window is None)
        elif self.is_confirmed and not self.is_certain:
            self._say(logging.INFO, f"The returned loss was seen to be {self.reduction}.")
        if self.reduction == SUM and self.declared is None and any(item.is_open for item in observations):
            self._warn(
                "The returned loss is a sum of the samples of a batch, or a mean whose divisor has a floor, as "
                "count.clamp(min=20) has: on more targets it could not be tested",
                f"it is taken for {SUM}",
            )
        if window is not None:
            self.warn_of_doubt(self.is_open_for(window))

    def warn_of_coupling(self) -> None:
        """Warns if the model's class is known for a loss that depends on the split under any weights."""
        if self.coupled is not None:
            self._warn(f"{self.coupled}, so it depends on how samples are split into batches")

    def warn_of_doubt(self, is_open: bool) -> None:
        """Warns if the reduction is contradicted, was not observed, or is undecided and matters.

        Args:
            is_open: weights depend on the open decision.
        """
        if self._doubt is not None and self.misses[self.reduction]:
            self._warn(self._doubt)
        if self.is_certain or self.declared is not None or self.misses[self.reduction]:
            return
        if self.is_confirmed and self.reduction == self.likely:
            return
        if not self.num_looks:
            self._warn("What the returned loss is a mean over could not be seen", f"it is taken for {self.reduction}")
        elif is_open:
            self._warn(
                "What the returned loss is a mean over is not decided yet: several reductions fit what was seen",
                f"it is taken for {self.reduction} until more is seen",
            )

    def _replace(self, fits_nothing: bool, can_wait: bool) -> None:
        """Replaces a contradicted reduction by one that two probes confirmed and none contradicted, or warns.

        Args:
            fits_nothing: no reduction fits an observation.
            can_wait: no loss is weighted yet, so `warn_of_doubt` can warn later if the contradiction remains.
        """
        before = self.reduction
        confirmed = [item for item in self.candidates if self.hits[item] > 1 and not self.misses[item]]
        if self.declared == "samples":  # this leaves undeclared if samples without a target count
            self.reduction = next((item for item in confirmed if "samples" in item.unit), before)
        if self.declared is not None:
            if confirmed and self.reduction == before:
                self._warn(f"loss_weight={self.declared!r} is contradicted: the loss was seen to be {confirmed[0]}")
            return
        if not confirmed:
            more = "it fits no reading that paceline knows" if fits_nothing else "one look contradicts it so far"
            self._doubt = f"The returned loss is taken for {before}, but {more}"
            if fits_nothing or not can_wait:
                self._warn(self._doubt)
            return
        self.reduction = self.likely if self.likely in confirmed else confirmed[0]
        if self.trusts_class and self.known != self.reduction:
            self._warn(f"The loss of this class of models should be {self.known}, but was seen to be {self.reduction}")
        else:
            self._say(logging.INFO, f"The returned loss was seen to be {self.reduction}.")

    def _learn_scaling(self, looks: Sequence[Observation]) -> None:
        """Sets `is_scaled` by the effect of `num_items_in_batch` on the loss."""
        told = {item.count for item in looks} - {"unknown"}
        if not looks or self.declared is not None:
            return
        if not told:
            if self.is_scaled is None:
                what = "Whether the loss is divided by num_items_in_batch could not be seen"
                self._warn(what, "it is taken not to be")
            return
        scaled = told != {"ignored"}
        if self.is_scaled is not None and self.is_scaled != scaled:
            self._warn("The loss was divided by num_items_in_batch in one update and not in another")
        if len(told) > 1 or "partly" in told:
            self._warn("Only a part of the loss is divided by num_items_in_batch", "it is used as it is")
        self.is_scaled = scaled
        if scaled:
            self._learn_multiples({round(item.multiple, 2) for item in looks if item.count == "scaled"})
            self._say(logging.INFO, "The loss is divided by num_items_in_batch: changing that was seen to change it.")

    def _learn_multiples(self, multiples: set[float]) -> None:
        """Sets `is_multiplied` by the ratios of the loss divided by the number of its own targets to the loss without
        a count.
        """
        is_shared = self.scaled_factor != 1 and bool(multiples) and not self.passes_count
        is_seen = multiples == {round(self.scaled_factor, 2)}
        if is_shared and multiples != {1.0} and (is_seen or not self.calls_function):
            # an overridden compute_loss may multiply by the number of processes, as Hugging Face Trainer requires
            self.is_multiplied = True
            if not is_seen:
                self._warn(
                    "compute_loss divides by num_items_in_batch; whether it multiplies by the number of processes too "
                    "could not be seen",
                    "the loss is used as it is",
                )
        elif any(abs(multiple - 1) > 0.05 for multiple in multiples if multiple):
            self._warn(
                "The loss is divided by num_items_in_batch, and with the number of its targets it is not what it is "
                "without a count",
                "it is used as it is",
            )

    def _warn(self, what: str, taken: str = "") -> None:
        self._say(
            logging.WARNING,
            f"{what}{': ' if taken else ''}{taken}. Gradient accumulation, several processes and eval_loss may weigh "
            f"batches wrongly. {REMEDY} Labels under other names are found by label_names=[...].",
        )

    def _say(self, level: int, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            logger.log(level, sentence)

    # ---- saved state

    def state_dict(self) -> dict[str, Any]:
        """Returns the observations so far, which determine the weights of an optimizer step, as plain values."""
        seen = [item for item in self.candidates if self.hits[item] or self.misses[item]]
        return {
            "declared": self.declared,
            "reduction": list(astuple(self.reduction)),
            "is_scaled": self.is_scaled,
            "is_multiplied": self.is_multiplied,
            "by_chunks": self.by_chunks,
            "evidence": [[*astuple(item), self.hits[item], self.misses[item]] for item in seen],
            "ignored": list(dict.fromkeys(item.ignore_index for item in self.candidates[len(self._candidates) :])),
            "counters": [self.num_updates, self.num_looks, self.num_extra],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the result of `state_dict`; ignores it if the declaration differs, or if an older version wrote it.

        Raises:
            ValueError, TypeError, LookupError: the state is invalid; nothing is changed.
        """
        if "evidence" not in state and "held" in state:
            return
        reduction = LossReduction.restored(state["reduction"])
        evidence = {LossReduction.restored(row[:3]): (row[3], row[4]) for row in state["evidence"]}
        counters = list(state["counters"])
        numbers = [*counters, *(number for pair in evidence.values() for number in pair)]
        if len(counters) != 3 or not all(type(number) is int and 0 <= number < 2**53 for number in numbers):
            raise ValueError(f"{str(numbers)[:80]} are not counts of what was seen of a loss")
        is_scaled, is_multiplied = state["is_scaled"], state["is_multiplied"]
        if not (is_scaled is None or isinstance(is_scaled, bool)) or not isinstance(is_multiplied, bool):
            raise ValueError(f"{str([is_scaled, is_multiplied])[:80]} are not true or false")
        by_chunks = state.get("by_chunks")  # not written by older versions
        if not (by_chunks is None or isinstance(by_chunks, bool)):
            raise ValueError(f"{str(by_chunks)[:80]} is not true or false")
        ignored = state.get("ignored", [])  # not written by older versions
        if not isinstance(ignored, list) or not all(type(index) is int for index in ignored):
            raise ValueError(f"{str(ignored)[:80]} are not target values")
        if state["declared"] != self.declared:
            return
        self.begin(self.last_probe)
        self.add_ignored(ignored)
        self.reduction, self.is_scaled, self.is_multiplied = reduction, is_scaled, is_multiplied
        self.by_chunks = by_chunks
        self.num_updates, self.num_looks, self.num_extra = counters
        for item, (hits, misses) in evidence.items():
            self.hits[item], self.misses[item] = hits, misses

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Discards observations made while entered, so that an evaluation does not affect later optimizer steps."""
        state = self.state_dict()
        try:
            yield
        finally:
            self.load_state_dict(state)


def align(logits: Tensor, labels: Tensor) -> Tensor | None:
    """Returns logits with the classes last, `(*labels.shape, num_classes)`, or None if the shapes do not match."""
    if logits.shape[:-1] == labels.shape:
        return logits
    if logits.dim() == labels.dim() + 1 and logits.shape[0] == labels.shape[0] and logits.shape[2:] == labels.shape[1:]:
        return logits.movedim(1, -1)
    return None


@dataclass
class LabelSmoother:
    """Cross-entropy against targets mixed with the uniform distribution (Szegedy et al., 2016, arXiv:1512.00567).

    Attributes:
        epsilon: the share of the uniform distribution, 0 to 1.
        ignore_index: the ignored target value.
    """

    epsilon: float = 0.1
    ignore_index: int = IGNORE_INDEX

    def __call__(
        self,
        model_output: object,
        labels: Tensor,
        shift_labels: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Returns the smoothed loss, 0-dim: a mean over targets, or their sum divided by `num_items_in_batch`.

        Args:
            model_output: the logits `(*labels.shape, num_classes)`, or outputs that contain them.
            labels: integer targets.
            shift_labels: compare the output at i with the target at i + 1.
            num_items_in_batch: the divisor; None: the number of targets that are not ignored.
        """
        logits = _find_aligned(model_output, labels)
        if logits is None:
            raise ValueError(
                f"label_smoothing_factor={self.epsilon}: no output of the model has the shape (*{tuple(labels.shape)}, "
                "num_classes) that cross-entropy needs; set label_smoothing_factor=0 and smooth inside the model."
            )
        if shift_labels:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float() if logits.dtype != torch.float64 else logits.flatten(0, -2),
            labels.reshape(-1),
            ignore_index=self.ignore_index,
            label_smoothing=self.epsilon,
            reduction="mean" if num_items_in_batch is None else "sum",
        ) / (1 if num_items_in_batch is None else num_items_in_batch)

    def find_shift(self, model_output: object, labels: Tensor, assumed: bool) -> bool | None:
        """Returns True if the model's own loss compares the output at i with the target at i + 1.

        Returns None if there is no such loss, or neither it nor its gradient shows the shift.

        Args:
            model_output: outputs with a loss.
            labels: integer targets.
            assumed: the value that is tried first.
        """
        own, logits = find_loss(model_output), _find_aligned(model_output, labels) if labels.dim() > 1 else None
        if own is None or logits is None:
            return None
        plain = LabelSmoother(0.0, self.ignore_index)
        rounding = 1e-4 if own.dtype.itemsize > 2 else 2e-2
        with torch.no_grad(), uncounted():
            losses = {shift: plain(model_output, labels, shift) for shift in (assumed, not assumed)}
            fits = [shift for shift, loss in losses.items() if torch.isclose(loss.to(own.dtype), own, rtol=rounding)]
        if len(fits) < 2:
            return fits[0] if fits else None
        return plain._find_shift_of_gradient(own, logits, labels)

    def _find_shift_of_gradient(self, own: Tensor, logits: Tensor, labels: Tensor) -> bool | None:
        """Returns True if the gradient of a loss belongs to targets that are shifted; None if it does not show that.

        Logits that are the same for all classes, as those of a head initialized to zero, have the same loss with and
        without the shift, and other gradients.
        """
        if not own.requires_grad or not logits.requires_grad or type(logits) is not Tensor:
            return None
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(own, logits, retain_graph=True, allow_unused=True)
            if slope is None:
                return None
            leaf = logits.detach().requires_grad_()
            with uncounted():
                slopes = [torch.autograd.grad(self(leaf, labels, shift), leaf)[0] for shift in (False, True)]
        here, shifted = (float((slope - each).float().norm()) for each in slopes)
        return shifted < here if min(here, shifted) < 0.1 * max(here, shifted) else None


def _find_aligned(model_output: object, labels: Tensor) -> Tensor | None:
    """Returns the first logits of the outputs that match the labels, `(*labels.shape, num_classes)`, or None."""
    aligned = (align(item, labels) for item in candidate_logits(model_output))
    return next((item for item in aligned if item is not None), None)
