"""Which samples a Trainer's loaders read, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.data.sampling import make_eval_sampler, make_train_sampler
from paceline.data.shares import Shares

if TYPE_CHECKING:
    from paceline.trainer import Trainer


def shares_of(trainer: Trainer, batch_size: int, is_training: bool) -> Shares | None:
    """This process's part of the data, where several read different parts, or read it as several did before."""
    rank, size = trainer.strategy.data_coordinates()
    if is_training and trainer._update_size is not None:
        return Shares.of_update(rank, size, batch_size, trainer._update_size)
    return Shares.even(rank, size, batch_size) if size > 1 else None


def train_order(trainer: Trainer, dataset: Any) -> Any:
    """The body of `_get_train_sampler`."""
    args, (rank, size) = trainer.args, trainer.strategy.data_coordinates()
    return make_train_sampler(
        dataset,
        strategy=str(args.train_sampling_strategy),
        batch_size=args.train_batch_size * size,
        accumulation=args.gradient_accumulation_steps,
        seed=trainer._data_seed,
        length_column=args.length_column_name,
        model_input_name=trainer._model_input_name,
        drop_last=args.dataloader_drop_last,
        num_ranks=size,
        rank=rank,
    )


def eval_order(trainer: Trainer, dataset: Any) -> Any:
    """The body of `_get_eval_sampler`."""
    args = trainer.args
    return make_eval_sampler(
        dataset,  # batches that are kept apart cannot be put back in order
        strategy=str(args.train_sampling_strategy) if args.eval_do_concat_batches else "sequential",
        batch_size=args.eval_batch_size * trainer.strategy.data_coordinates()[1],
        seed=trainer._data_seed,
        length_column=args.length_column_name,
        model_input_name=trainer._model_input_name,
    )
