"""Predictions of several models of the same task, combined; one model at a time is in memory."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.core.outputs import EvalPrediction, PredictionOutput, check_metrics
from paceline.predictions.combination import Combination, check_kind, check_weights
from paceline.predictions.weights import log_softmax, logit_weights, mixture_weights

Array = np.ndarray[Any, Any]
Member = Any  # a model, a function that returns one, or a folder
REDUCTIONS = {"probabilities": "mean", "logits": "geometric", "vote": "vote"}


class Host(Protocol):
    """Lets the members of an ensemble predict with a Trainer; there is one for each framework.

    Attributes:
        compute_metrics: the function of the Trainer; None if it is called batch by batch.
    """

    compute_metrics: Any

    def check(self) -> None:
        """Checks that the Trainer can take another model.

        Raises:
            UnsupportedOption: it cannot.
        """

    def as_model(self, member: object) -> Any:
        """Returns the model whose config is that of a member; None for functions and folders."""

    def predict(self, member: Member, dataset: Any, prefix: str) -> PredictionOutput:
        """Returns the predictions of one member; the Trainer is afterwards as it was before."""


class HasHost(Protocol):
    """A Trainer.

    Attributes:
        ensemble_host: the module that defines `EnsembleHost`, a `Host` that is made with the Trainer.
    """

    ensemble_host: str


@dataclass(frozen=True)
class EnsembleOutput:
    """The result of `ensemble_predict`.

    Attributes:
        predictions: log-probabilities, one row per sample; the share of votes of each class for a vote.
        label_ids: the labels, if there are any.
        metrics: `compute_metrics` of the combination, with the prefix, and the mean `disagreement`.
        disagreement: `(samples,)`, the weighted share of members that predict another class than the ensemble.
        spread: `(samples,)`, the standard deviation of probabilities over the members.
        weights: one per member; their sum is 1.
        members: the metrics of each member.
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]
    disagreement: Any
    spread: Any
    weights: list[float]
    members: list[dict[str, float]] = field(default_factory=list)


def ensemble_predict(
    members: Sequence[Member],
    dataset: Any,
    trainer: HasHost,
    *,
    combine: str = "probabilities",
    weights: Sequence[float] | str | None = None,
    held_out: Any = None,
    outputs: str = "logits",
    metric_key_prefix: str = "test",
) -> EnsembleOutput:
    """Predicts with each member in turn, and combines the predictions in running sums.

    The trainer's model, with its weights, is put back afterwards. Costs the predictions of every member; with
    `weights="fit"` also those of the held-out samples, for which each member is loaded once more.

    Args:
        members: models of the trainer's framework; functions that return one when it is its turn; or folders and
            checkpoints, whose weights are loaded into the trainer's model.
        dataset: the samples.
        trainer: collates and places them, and computes metrics.
        combine: "probabilities" (their mean), "logits" (mean of log-probabilities, normalized), or "vote".
        weights: one per member; "fit": those of the smallest log loss on `held_out`; None: equal.
        held_out: labeled samples that neither training nor the report of the result uses.
        outputs: "logits", "probabilities", or "values" of a regression (`combine="probabilities"` takes their mean).
        metric_key_prefix: prefix of the metric names.

    Raises:
        ValueError: label spaces differ, weights of a folder do not fit the model, or an argument is invalid.
        UnsupportedOption: the trainer shards or pipelines the model, or is training.
    """
    host: Host = importlib.import_module(trainer.ensemble_host).EnsembleHost(trainer)
    check_call(members, host, combine, weights, held_out)
    host.check()
    check_label_spaces(members, host)
    fitted = weights
    if isinstance(weights, str):
        fitted = fit_weights(members, held_out, host, combine, outputs)
    shares = check_weights(fitted, len(members), REDUCTIONS[combine])  # type: ignore[arg-type]
    combined = Combination(REDUCTIONS[combine], outputs)
    metrics: list[dict[str, float]] = []
    labels = None
    for number, (member, share) in enumerate(zip(members, shares, strict=True)):
        output = host.predict(member, dataset, metric_key_prefix)
        labels = output.label_ids
        metrics.append(dict(output.metrics or {}))
        add_member(combined, output, number, share, outputs)
    predictions = combined.result()
    agreement = combined.agreement()
    disagreement = None if agreement is None else 1 - agreement
    found: dict[str, float] = {}
    if host.compute_metrics is not None and labels is not None:
        found = dict(check_metrics(host.compute_metrics(EvalPrediction(predictions, labels))))
    if disagreement is not None and disagreement.size:
        found["disagreement"] = float(disagreement.mean())
    named = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
    return EnsembleOutput(predictions, labels, named, disagreement, combined.spread(), shares, metrics)


def check_call(members: Sequence[Member], host: Host, combine: str, weights: object, held_out: object) -> None:
    """Checks the arguments of `ensemble_predict`.

    Raises:
        ValueError: one is invalid.
    """
    if isinstance(members, str | Path) or host.as_model(members) is not None or len(members) == 0:
        raise ValueError(f"members={members!r} is invalid: expected a list of models, functions or folders")
    if combine not in REDUCTIONS:
        raise ValueError(f"combine={combine!r} is invalid: expected one of {', '.join(REDUCTIONS)}")
    if isinstance(weights, str):
        if weights != "fit" or combine == "vote":
            raise ValueError(f'weights={weights!r} is invalid with combine="{combine}": expected numbers or None')
        if held_out is None:
            raise ValueError('weights="fit" needs held_out, labeled samples on which the weights are fitted')
    elif held_out is not None:
        raise ValueError('held_out is used only with weights="fit": set it, or leave held_out out')


def check_label_spaces(members: Sequence[Member], host: Host) -> None:
    """Checks that the members which name their classes name the same ones in the same order.

    Raises:
        ValueError: two members differ.
    """
    first: tuple[int, dict[str, str]] | None = None
    for number, member in enumerate(members):
        names = class_names(member, host)
        if names is None:
            continue
        if first is not None and names != first[1]:
            raise ValueError(
                f"ensemble_predict: the label spaces of members {first[0]} and {number} differ: "
                f"{first[1]} and {names}. Members must have the same classes in the same order."
            )
        first = first or (number, names)


def class_names(member: Member, host: Host) -> dict[str, str] | None:
    """Returns the names of a member's classes by index, from its config; None if it has none."""
    names: Any = None
    model = host.as_model(member)
    if model is not None:
        names = getattr(getattr(model, "config", None), "id2label", None)
    elif isinstance(member, str | Path) and Path(member, "config.json").is_file():
        config = json.loads(Path(member, "config.json").read_text(encoding="utf-8"))
        names = config.get("id2label") if isinstance(config, dict) else None
    else:
        return None
    return {str(index): str(name) for index, name in names.items()} if isinstance(names, dict) else None


def load_member(folder: str | Path, load: Callable[[str], Sequence[str] | None], failure: type[Exception]) -> None:
    """Loads the weights of a folder into a trainer's model.

    Args:
        folder: the folder or checkpoint.
        load: loads it; returns notes on weights that do not fit, if it loads others.
        failure: what `load` raises for weights that do not fit.

    Raises:
        ValueError: there is no such folder, or its weights do not fit the model.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"ensemble_predict: {str(folder)!r} is no folder with a model")
    try:
        notes = load(str(folder))
    except failure as error:
        raise ValueError(
            f"ensemble_predict: the weights of {folder} do not fit the trainer's model, so its classes may be others: "
            f"{error}. Pass a model, or a function that returns one."
        ) from error
    if notes:
        raise ValueError(f"ensemble_predict: the weights do not fit the trainer's model: {'; '.join(notes)}")


def add_member(combined: Combination, output: PredictionOutput, number: int, share: float, outputs: str) -> None:
    """Adds the predictions of one member.

    Raises:
        ValueError: they are no array, or have another shape than those of the first member.
    """
    predictions = one_array(output.predictions, number)
    labels = output.label_ids
    is_numbers = isinstance(labels, np.ndarray) and labels.dtype.kind == "f"
    check_kind(predictions.shape, labels.shape if is_numbers else None, outputs)
    try:
        combined.add(predictions, share)
    except ValueError as error:
        raise ValueError(
            f"ensemble_predict: member {number} cannot be combined with the members before it, because its label space "
            f"or its samples differ: {error}"
        ) from error


def one_array(predictions: Any, number: int) -> Array:
    """Returns the predictions of a member.

    Raises:
        ValueError: they are not one floating-point array.
    """
    if isinstance(predictions, np.ndarray) and predictions.dtype.kind == "f":
        return predictions
    raise ValueError(
        f"ensemble_predict: member {number} predicts {type(predictions).__name__}; one floating-point array with a row "
        "per sample can be combined. Select it with preprocess_logits_for_metrics."
    )


def fit_weights(members: Sequence[Member], held_out: Any, host: Host, combine: str, outputs: str) -> list[float]:
    """Returns the weights of the smallest log loss on held-out samples.

    Raises:
        ValueError: the samples have no labels that are classes, or the outputs are values.
    """
    logs = []
    labels: Any = None
    for number, member in enumerate(members):
        output = host.predict(member, held_out, "held_out")
        labels = output.label_ids
        predictions = one_array(output.predictions, number).astype(np.float64)
        is_class = isinstance(labels, np.ndarray) and labels.dtype.kind in "iu"
        if not is_class or labels.shape != predictions.shape[:-1] or outputs not in ("logits", "probabilities"):
            raise ValueError('weights="fit" needs held-out samples with classes as labels, and logits or probabilities')
        counts = labels.reshape(-1) != -100
        rows = predictions.reshape(-1, predictions.shape[-1])[counts]
        labels = labels.reshape(-1)[counts]
        if outputs == "probabilities":
            rows = np.log(np.maximum(rows, 1e-300))
        logs.append(log_softmax(rows))
        if logs[0].shape != rows.shape:
            raise ValueError(f"ensemble_predict: the label space of member {number} differs from that of member 0")
        if len(labels) == 0 or labels.min() < 0 or labels.max() >= rows.shape[-1]:
            raise ValueError('weights="fit": held_out has no labels, or labels outside of the classes')
    if combine == "probabilities":
        own = [each[np.arange(len(labels)), labels] for each in logs]
        return [float(weight) for weight in mixture_weights(np.exp(np.stack(own, 1)))]
    return [float(weight) for weight in logit_weights(logs, labels)]
