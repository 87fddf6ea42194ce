"""One loss rule: what a returned loss is a mean over, so that any split of the same samples gives the same gradient.

A model's loss is one number per micro-batch. To add micro-batches up right, one must know what the number was
divided by. Where that is not declared it is identified: on the first batches the loss is recomputed from the logits
under every hypothesis (targets shifted or not, which index is ignored, a mean over targets or over samples, with or
without those that have no target, divided by the batch's own count or by `num_items_in_batch`); those that disagree
are dropped until one is left. The forward pass that is looked at is the one being trained on: no user code runs twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.data.loading import batch_size_of
from paceline.model.outputs import ModelOutputError, find_loss
from paceline.model.readings import (
    IGNORE_INDEX,
    MEASURES,
    UNITS,
    Meaning,
    agree,
    find_outputs,
    is_target,
    present,
    signatures,
)

__all__ = ["IGNORE_INDEX", "Counts", "LabelSmoother", "LossRule", "Meaning"]

logger = logging.getLogger(__name__)

# after so many, which value is ignored makes less of a difference than rounding, and each look costs a read-back
MAX_LOOKS = 100


@dataclass(slots=True)
class Counts:
    """What one collated micro-batch holds, counted on the host before user code can take the labels out."""

    samples: int
    labels: Tensor | None  # the targets the loss is taken over; None: there are none
    weight: int  # how much this micro-batch weighs under the meaning in force when it was counted
    is_shifted: bool = False  # the labels stand where the output is compared with them, whoever shifts others


DECLARED = {
    "samples": Meaning("samples"),
    "tokens": Meaning("tokens"),
    "shifted_tokens": Meaning("tokens", shifted=True),
    "scaled": Meaning("tokens", scaled=True),
}


# `loss_is_scaled_for_ga`: a sum over micro-batches and a mean over processes, made by whoever computes the loss
AVERAGED_BY_AUTHOR = Meaning("samples", scaled=True)


class LossRule:
    """Counts micro-batches, and says how much of each returned loss belongs to an update.

    Args:
        label_names: names under which a batch carries its targets.
        declared: `loss_weight` as the user gave it (a key of `DECLARED`), or None to identify.
        shifts: the model is known to shift its targets (the first hypothesis tried).
        pad_token_id: another target value that may be ignored, beside 0, -1 and 1.

    Attributes:
        meaning: what is taken for true now: the first hypothesis that still holds.
        held: the hypotheses that agree with every loss looked at; empty before the first look.
        is_settled: nothing is looked at any more.
        is_verified: the meaning was seen to hold, not only declared or assumed.
        scaled_factor: what a loss is multiplied by that whoever made it divided for the whole update: the number of
            processes, where the division was by the count of all of them and gradients are averaged.
    """

    scaled_factor = 1
    meaning: Meaning
    held: list[Meaning]

    def __init__(
        self,
        label_names: Sequence[str],
        declared: str | None = None,
        shifts: bool = False,
        pad_token_id: int | None = None,
    ) -> None:
        self.label_names = tuple(label_names)
        self.shifts = shifts
        self.declared = DECLARED[declared] if declared is not None else None
        padding = [pad_token_id] if pad_token_id is not None and is_target(pad_token_id) else []
        self._often_ignored = tuple(dict.fromkeys([*padding, 0, -1, 1]))
        self._said: set[str] = set()  # each thing is said once, however often it is found out
        self.begin()

    def begin(self) -> LossRule:
        """Forget what was identified, not what was declared: runs of the same data are then the same. Returns self.

        Where samples were declared, it is left open whether those without a target count.
        """
        held = [self.declared] if self.declared is not None else []
        if self.declared == DECLARED["samples"]:
            shifts = (self.shifts, not self.shifts)
            held = [Meaning(unit, shifted) for unit in ("samples", "all_samples") for shifted in shifts]
        self.is_settled = len(held) == 1
        self.is_verified = False
        self.is_assumed_scaled = False
        self._assumed = Meaning("tokens", shifted=self.shifts)
        self._unseen: tuple[int, ...] = self._often_ignored
        self._num_looks = 0
        self._hold(held)
        return self

    def declare(self, meaning: Meaning) -> None:
        """Settle the question for good: the caller knows."""
        self.declared = meaning
        self.begin()

    def settle(self, meaning: Meaning) -> None:
        """Settle the question until the next run begins."""
        self.is_settled = True
        self._hold([meaning])

    def _hold(self, meanings: list[Meaning]) -> None:
        self.held = meanings
        self.meaning = meanings[0] if meanings else self._assumed

    def assume_scaled(self, scaled: bool) -> None:
        """The prior of the path taken: whether `num_items_in_batch` reached whoever computed the loss."""
        self.is_assumed_scaled = scaled
        self._assumed = replace(self._assumed, scaled=scaled)
        self._hold(self.held)

    def find_labels(self, batch: Any) -> Tensor | None:
        """The targets of a batch, under the first label name that it has."""
        if type(batch) is not dict and not isinstance(batch, Mapping):
            return None
        for name in self.label_names:
            labels = batch.get(name)
            if isinstance(labels, Tensor):
                return None if labels.dim() == 0 else labels
        return None

    def count(self, batch: Any) -> Counts:
        """Count one micro-batch. One read-back where the labels already lie on a device; none for host batches."""
        labels = self.find_labels(batch)
        if labels is None:
            samples = batch_size_of(batch)
            return Counts(samples, None, samples)
        samples = labels.shape[0]
        if "shift_labels" in batch:  # a padding-free collator shifted them already
            labels = batch["shift_labels"]
            return Counts(samples, labels, self.meaning.weigh(labels, samples, is_shifted=True), is_shifted=True)
        return Counts(samples, labels, self.meaning.weigh(labels, samples))

    def num_items(self, batches: Sequence[Any]) -> Tensor | None:
        """Targets in the micro-batches of an update, as a model divides its loss by them; None without targets.

        A 0-dim tensor on the host: reading it waits for nothing, and tensors on any device can be divided by it.
        """
        counts = [self.count(batch) for batch in batches]
        if any(item.labels is None or item.labels.is_floating_point() for item in counts):
            return None
        tokens = replace(self.meaning, unit="tokens")
        return torch.tensor(
            sum(
                item.weight if self.meaning == tokens else tokens.weigh(item.labels, item.samples, item.is_shifted)
                for item in counts
            )
        )

    # ---- how much a returned loss counts

    def factor(self, counts: Counts, total: float, num_items: Any) -> Any:
        """What to multiply a returned loss by, so that the update's contributions add up to one weighted mean.

        Args:
            counts: this micro-batch.
            total: the sum of the weights of all micro-batches of the update, not 0; of several processes whose
                gradients are averaged, each one's share of it.
            num_items: what the model was given as `num_items_in_batch` (None: nothing).
        """
        if self.meaning.scaled and not self.is_verified:
            # declared, or handed num_items_in_batch: used as it is
            return 1 if self.declared == AVERAGED_BY_AUTHOR else self.scaled_factor
        if self.meaning.scaled and num_items is not None:
            # what was given is a number on the host: reading it waits for nothing
            return 1 if float(num_items) == total else float(num_items) / total
        return 1 if counts.weight == total else counts.weight / total

    def recount(self, counts: Sequence[Counts]) -> int:
        """Weigh again after a look changed the meaning; returns the new total."""
        for item in counts:
            item.weight = self.meaning.weigh(item.labels, item.samples, item.is_shifted)
        return sum(item.weight for item in counts)

    def has_target(self, counts: Sequence[Counts]) -> bool:
        """Whether an update has a target at all: where all samples count, its weight does not tell."""
        return any(item.labels is None or bool(self._kept(item).any()) for item in counts)

    def _kept(self, counts: Counts) -> Tensor:
        assert counts.labels is not None
        return self.meaning.kept(counts.labels, counts.is_shifted)

    # ---- identification

    def telling(self, counts: Counts) -> int:
        """How much a look at this micro-batch could tell: 0 where no hypothesis that still holds would be dropped.

        What tells the units apart counts most. It alone changes the weights of micro-batches that did not tell it; of
        the rest, those keep their weights, and at most the total changes.
        """
        if self.is_settled:
            return 0
        if counts.labels is None:
            return 1  # no targets: one look settles it for samples
        hypotheses = self._hypotheses(counts.labels, None)
        found = signatures(hypotheses, counts.labels)
        tells_unit = len({each[2] for each in found if each[:2] == found[0][:2]}) > 1
        return len(set(found)) - (1 if self.held else 0) + (len(hypotheses) if tells_unit else 0)

    def look(self, loss: Tensor, outputs: Any, counts: Counts, num_items: Any = None) -> None:
        """Compare a returned loss with what each hypothesis makes of the logits, and drop those that disagree.

        Reads the device back: happens on the first batches only.
        """
        if self.is_settled or not bool(torch.isfinite(loss)):
            return
        if counts.labels is None:
            if self.declared is None:
                self._warn(
                    f"the batches hold no tensor of targets under {' or '.join(map(repr, self.label_names))}",
                    "each sample is taken to weigh the same",
                    "name the targets in label_names=[...], or ",
                )
            self.settle(Meaning("samples", scaled=self._assumed.scaled and num_items is not None))
            return
        with suppress(ModelOutputError):  # the loss is another's, and the outputs hold none
            own = find_loss(outputs)
            if own is not None:  # as the model rounded it, before what it returned was widened
                loss = loss.to(own.dtype)
        agreeing = self._agreeing(loss, outputs, counts.labels, num_items)
        if agreeing is None or (not agreeing and self.held):
            reason = "no output matches the targets" if agreeing is None else "a later batch contradicts it"
            self._give_up(reason, counts.labels)
        elif not agreeing:
            self._give_up("the loss is none that paceline knows", counts.labels)
        else:
            self._narrow(agreeing, counts.labels)
            self.is_verified = True
            self._report()

    def _narrow(self, agreeing: list[Meaning], labels: Tensor) -> None:
        """Keep the hypotheses that agree with a look at these targets."""
        self._num_looks += 1
        if self._num_looks > MAX_LOOKS:
            agreeing = [meaning for meaning in agreeing if meaning.ignore_index == agreeing[0].ignore_index]
        ignored = {meaning.ignore_index for meaning in agreeing}
        if labels.is_floating_point():
            self._unseen = ()
        elif IGNORE_INDEX not in ignored or (ignored == {IGNORE_INDEX} and bool((labels == IGNORE_INDEX).any())):
            self._unseen = ()  # a loss ignores one value
        else:
            seen = present(labels, self._unseen)
            self._unseen = tuple(index for index in self._unseen if index not in seen)
        self._hold(agreeing)
        self.is_settled = len(agreeing) == 1 and not self._unseen

    def _agreeing(self, loss: Tensor, outputs: Any, labels: Tensor, num_items: Any) -> list[Meaning] | None:
        """The hypotheses that give the returned loss; None where no output can be the logits of these targets."""
        fitting = find_outputs(outputs, labels)
        if not fitting:
            return None
        for logits in fitting:
            agreeing = agree(loss, logits, labels, num_items, self._hypotheses(labels, num_items))
            if agreeing:
                return agreeing
        return []

    def _hypotheses(self, labels: Tensor, num_items: Any) -> list[Meaning]:
        """Every hypothesis that still holds, the likelier first: while several hold, the first one counts.

        That another value is ignored than -100 is open for each that often is, until it is among the targets.
        """
        held = self.held or self._first_hypotheses(labels, num_items)
        others = present(labels, self._unseen)
        return held + [replace(m, ignore_index=i) for i in others for m in held if m.ignore_index == IGNORE_INDEX]

    def _first_hypotheses(self, labels: Tensor, num_items: Any) -> list[Meaning]:
        if labels.is_floating_point():
            units = UNITS if labels.dim() > 1 else ("tokens", "all_samples")
            return [Meaning(unit, measure=measure) for unit in units for measure in MEASURES]
        shifts = (self.shifts, not self.shifts) if labels.dim() > 1 else (False,)
        scalings = (False,) if num_items is None else (self._assumed.scaled, not self._assumed.scaled)
        return [
            Meaning(unit, shifted, scaled=scaled)
            for scaled in scalings
            for unit in UNITS
            for shifted in shifts
            # with one target a sample, those that have one are the targets
            if not (scaled and unit != "tokens") and not (unit == "samples" and labels.dim() == 1)
        ]

    def _give_up(self, reason: str, labels: Tensor | None) -> None:
        is_number = labels is not None and labels.is_floating_point()
        meaning = self.declared or (Meaning("all_samples") if is_number else self._assumed)
        self.settle(meaning)
        self.is_verified = False
        if self.declared is not None:
            self._say(logging.INFO, f"Whether samples without a target count could not be seen ({reason}): they don't.")
            return
        if meaning.scaled:  # whoever was given num_items_in_batch answers for the division by it
            self._say(logging.INFO, f"The loss was given num_items_in_batch and is used as it is ({reason}).")
            return
        is_by_samples = meaning.unit == "all_samples"
        self._warn(reason, "each sample is taken to weigh the same" if is_by_samples else f"it is taken for {meaning}")

    def _warn(self, reason: str, taken: str, remedy: str = "") -> None:
        self._say(
            logging.WARNING,
            f"What the returned loss is a mean over could not be identified ({reason}): {taken}. If that is wrong, "
            f"gradient accumulation and eval_loss weigh batches of unequal size wrongly: {remedy}say it with "
            'TrainingArguments(loss_weight="samples" | "tokens" | "shifted_tokens" | "scaled").',
        )

    def _report(self) -> None:
        tied = f" ({len(self.held)} readings still agree)" if len(self.held) > 1 else ""
        self._say(logging.INFO, f"The returned loss was identified as {self.meaning}", f"{tied}.")

    def _say(self, level: int, sentence: str, more: str = "") -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            logger.log(level, sentence + more)

    # ---- what of this a run takes along

    def state_dict(self) -> dict[str, Any]:
        """What was identified so far: plain values. It decides how an update is weighed, and in which order it runs."""
        return {
            "declared": None if self.declared is None else asdict(self.declared),
            "held": [asdict(meaning) for meaning in self.held],
            "assumed": asdict(self._assumed),
            "unseen": list(self._unseen),
            "num_looks": self._num_looks,
            "is_settled": self.is_settled,
            "is_verified": self.is_verified,
            "is_assumed_scaled": self.is_assumed_scaled,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; nothing, where something else is declared now than was then.

        Raises: ValueError, TypeError or LookupError, for anything else; then nothing has changed.
        """
        declared = None if state["declared"] is None else Meaning.restored(state["declared"])
        held = [Meaning.restored(saved) for saved in state["held"]]
        assumed = Meaning.restored(state["assumed"])
        unseen, num_looks = tuple(state["unseen"]), state["num_looks"]
        if not all(map(is_target, (*unseen, num_looks))):
            raise ValueError(f"{str(unseen)[:80]} and {str(num_looks)[:80]} are not whole numbers of 64 bits")
        flags = {name: state[name] for name in ("is_settled", "is_verified", "is_assumed_scaled")}
        if not all(isinstance(value, bool) for value in flags.values()):
            raise ValueError(f"{flags} are not true or false")
        if declared != self.declared:
            return
        self.is_settled, self.is_verified, self.is_assumed_scaled = flags.values()
        self._assumed, self._unseen, self._num_looks = assumed, unseen, num_looks
        self._hold(held)

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over what several processes identified together, each on its own batches: the same on all of them.

        Args:
            states: the `state_dict` of each, which all began from the same one.
        """
        given_up = [state for state in states if state["is_settled"] and not state["is_verified"]]
        if given_up:
            self.load_state_dict(given_up[0])
            return
        looked = [state for state in states if state["held"]]
        candidates = dict.fromkeys(Meaning.restored(saved) for state in looked for saved in state["held"])
        common = [meaning for meaning in candidates if all(is_compatible(meaning, state) for state in looked)]
        self.is_assumed_scaled = any(state["is_assumed_scaled"] for state in states)
        self._assumed = replace(self._assumed, scaled=any(state["assumed"]["scaled"] for state in states))
        self.is_verified = any(state["is_verified"] for state in states)
        self._num_looks = max(state["num_looks"] for state in states)
        self._unseen = tuple(index for index in self._often_ignored if all(index in s["unseen"] for s in states))
        if looked and not common:
            self._give_up("the batches of different processes contradict each other", None)
            return
        self._hold(common)
        self.is_settled = bool(looked) and len(common) == 1 and not self._unseen

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """What is identified inside is forgotten: so that an evaluation changes nothing in the updates after it."""
        state = self.state_dict()
        try:
            yield
        finally:
            self.load_state_dict(state)


def is_compatible(meaning: Meaning, state: Mapping[str, Any]) -> bool:
    """Whether a process whose rule has this state found nothing against a meaning.

    A value that may be ignored and was not among its targets yet is one that it could say nothing about.
    """
    held = [Meaning.restored(saved) for saved in state["held"]]
    is_untested = meaning.ignore_index in state["unseen"]
    return meaning in held or (is_untested and replace(meaning, ignore_index=IGNORE_INDEX) in held)


class LabelSmoother:
    """Cross-entropy against targets mixed with the uniform distribution (Szegedy et al., 2016, arXiv:1512.00567).

    Args:
        epsilon: the share of the uniform distribution, 0 to 1.
        ignore_index: the target value that is left out.
    """

    def __init__(self, epsilon: float = 0.1, ignore_index: int = IGNORE_INDEX) -> None:
        self.epsilon = epsilon
        self.ignore_index = ignore_index

    def __call__(
        self, model_output: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """The smoothed loss, 0-dim: a mean over targets, or their sum divided by `num_items_in_batch`.

        Args:
            model_output: the logits `(*labels.shape, num_classes)`, or an output that holds them.
            labels: integer targets.
            shift_labels: compare the output at i with the target at i + 1.
            num_items_in_batch: the divisor; None: the number of targets that are not ignored.
        """
        fitting = find_outputs(model_output, labels)
        if not fitting:
            raise ValueError(
                f"label_smoothing_factor={self.epsilon}: no output of the model has the shape (*{tuple(labels.shape)}, "
                "num_classes) that cross-entropy needs; set label_smoothing_factor=0 and smooth inside the model."
            )
        logits = fitting[0]
        if shift_labels:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float() if logits.dtype != torch.float64 else logits.flatten(0, -2),
            labels.reshape(-1),
            ignore_index=self.ignore_index,
            label_smoothing=self.epsilon,
            reduction="mean" if num_items_in_batch is None else "sum",
        ) / (1 if num_items_in_batch is None else num_items_in_batch)
