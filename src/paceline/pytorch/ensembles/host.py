"""Ensembles of torch models: puts one member at a time in place of a Trainer's model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption
from paceline.core.optional import LateModule
from paceline.core.outputs import PredictionOutput
from paceline.predictions.ensemble import Member, load_member
from paceline.pytorch.model.signature import innermost

if TYPE_CHECKING:
    from paceline.pytorch.trainer import Trainer

PARTS = LateModule("paceline.pytorch.parts")  # a second file of the facade
OF_MODEL = (
    *("model", "model_wrapped", "signature", "label_names", "can_return_loss", "loss_normalizer"),
    *("label_smoother", "objective", "distillation", "_signature_columns", "optimizer"),
)


class EnsembleHost:
    """Lets the members of an ensemble predict with a Trainer; see `paceline.predictions.ensemble.Host`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.compute_metrics = None if trainer.args.batch_eval_metrics else trainer.compute_metrics

    def check(self) -> None:
        """Checks that the Trainer can take another model.

        Raises:
            UnsupportedOption: it is training, or its strategy splits the model.
        """
        trainer, strategy = self._trainer, self._trainer.strategy
        if (
            trainer.is_in_train
            or strategy.is_sharded
            or strategy.runs_windows
            or trainer.args.eval_do_concat_batches is False
        ):
            raise UnsupportedOption(
                "ensemble_predict needs a Trainer that is not training, has a whole model on each device (no fsdp, "
                "deepspeed or pipeline), and eval_do_concat_batches=True."
            )

    def as_model(self, member: object) -> Any:
        """Returns the innermost module of a member; None for functions and folders."""
        return innermost(member) if isinstance(member, nn.Module) else None

    def predict(self, member: Member, dataset: Any, prefix: str) -> PredictionOutput:
        """Returns the predictions of one member; the trainer is afterwards as it was before."""
        with in_place(member, self._trainer):
            return self._trainer.predict(dataset, None, prefix)


@contextmanager
def in_place(member: Member, trainer: Trainer) -> Iterator[None]:
    """Gives the trainer a member as its model, and puts its own model with its weights back afterwards."""
    before = {name: getattr(trainer, name) for name in OF_MODEL}
    trainer.optimizer = None  # its weights for evaluation would replace those of the member
    snapshot: dict[str, Any] | None = None
    made: nn.Module | None = None
    device = None
    try:
        if isinstance(member, str | Path):
            own = trainer.model.state_dict()
            snapshot = {k: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v for k, v in own.items()}
            load_member(member, lambda folder: PARTS.load_weights_of(trainer, None, folder), RuntimeError)
        else:
            made = member if isinstance(member, nn.Module) else member()
            device = next((each.device for each in made.parameters()), None)
            trainer.model = made
            trainer._signature_columns = None
            trainer.place_model()
            trainer._read_model()
        yield
    finally:
        if snapshot is not None:
            trainer.model.load_state_dict(snapshot)
        if made is not None and device is not None and made is not before["model"]:
            made.to(device)
        for name, value in before.items():
            setattr(trainer, name, value)
