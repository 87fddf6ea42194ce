"""Ensembles of TensorFlow models: puts one member at a time in place of a TFTrainer's model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.args.errors import UnsupportedOption
from paceline.core.outputs import PredictionOutput
from paceline.predictions.ensemble import Member, load_member
from paceline.tensorflow.checkpoint.variables import CheckpointError, assign, values_of
from paceline.tensorflow.objective import build_by_itself, check_model

if TYPE_CHECKING:
    from paceline.tensorflow.trainer import TFTrainer


class EnsembleHost:
    """Lets the members of an ensemble predict with a TFTrainer; see `paceline.predictions.ensemble.Host`."""

    def __init__(self, trainer: TFTrainer) -> None:
        self._trainer = trainer
        self.compute_metrics = None if trainer.args.batch_eval_metrics else trainer.compute_metrics

    def check(self) -> None:
        """Checks that the TFTrainer can take another model.

        Raises:
            UnsupportedOption: it is training, or keeps predictions as batches.
        """
        if self._trainer.run is not None or self._trainer.args.eval_do_concat_batches is False:
            raise UnsupportedOption(
                "ensemble_predict needs a TFTrainer that is not training, and eval_do_concat_batches=True."
            )

    def as_model(self, member: object) -> Any:
        """Returns a member that is a model; None for functions and folders."""
        return member if is_model(member) else None

    def predict(self, member: Member, dataset: Any, prefix: str) -> PredictionOutput:
        """Returns the predictions of one member; the trainer is afterwards as it was before."""
        with in_place(member, self._trainer):
            return self._trainer.predict(dataset, prefix)


@contextmanager
def in_place(member: Member, trainer: TFTrainer) -> Iterator[None]:
    """Gives the trainer a member as its model, and puts its own model with its weights back afterwards."""
    own = trainer.model, trainer.objective, trainer.predictor, trainer.averages
    variables = list(trainer.model.variables) if isinstance(member, str | Path) else []
    before = values_of(variables)
    trainer.averages = None  # they would replace the weights of the member
    try:
        if isinstance(member, str | Path):
            load_member(member, trainer._load_from_checkpoint, CheckpointError)
        else:
            trainer.use_model(make_member(member, trainer))
        yield
    finally:
        trainer.model, trainer.objective, trainer.predictor, trainer.averages = own
        assign(variables, before)


def is_model(member: object) -> bool:
    """Returns True for a model of TensorFlow; both it and a function that makes one can be called."""
    return callable(member) and hasattr(type(member), "trainable_variables")


def make_member(member: Member, trainer: TFTrainer) -> Any:
    """Returns a member that is a model, or that a function makes in the scope of the trainer's strategy.

    Raises:
        TypeError: the function returned no model.
    """
    if is_model(member):
        return member
    with trainer.strategy.scope():
        made = member()
        build_by_itself(made)
    check_model(made)
    return made
