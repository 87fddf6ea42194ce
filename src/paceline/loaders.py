"""The loaders of a Trainer: which samples they read, in which order, and the batches of this process."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.args.accelerator_config import batch_of_all, check_batch, is_on
from paceline.data.columns import has_removable_columns
from paceline.data.dispatch import Deal
from paceline.data.loading import check_dataset, make_loader
from paceline.data.sampling import make_eval_sampler, make_train_sampler
from paceline.data.shares import Shares
from paceline.distributed.collectives import deal_out, pack
from paceline.model.objective import adapted

if TYPE_CHECKING:
    from paceline.trainer import Trainer


def make_dataloader(
    trainer: Trainer,
    dataset: Any,
    description: str,
    batch_size: int,
    sampler_fn: Callable[[Any], Any] | None,
    is_training: bool,
) -> Any:
    """A loader of `dataset`; in a run that keeps the workers of its evaluations, the one of before.

    Args:
        dataset: with columns that the model does not take, perhaps.
        description: what it is for, as "evaluation".
        batch_size: samples of a batch, as the arguments say it.
        sampler_fn: given the dataset, returns the order; None: the dataset's own.
        is_training: as an update takes its samples.

    Raises:
        TypeError, ValueError: the dataset is none, or holds no column that the model takes.
    """
    check_dataset(dataset)
    given, collate = dataset, trainer._get_collator_with_removed_columns(trainer.data_collator, description)
    sampler = adapted(sampler_fn, 1)(dataset) if sampler_fn is not None else None  # may look at any column
    if has_removable_columns(dataset):
        dataset, collate = trainer._remove_unused_columns(dataset, description), trainer.data_collator
    make = partial(
        make_loader,
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate=collate,
        args=trainer.args,
        train=is_training,
        seed=trainer._data_seed,
        shares=shares_of(trainer, batch_size, is_training),
        deal=deal_of(trainer, is_on(trainer.args.accelerator_config, "dispatch_batches")),
    )
    if is_training or trainer.run is None or not trainer.args.dataloader_persistent_workers:
        return make()
    return trainer.run.loaders.get(given, description, make)


def shares_of(trainer: Trainer, batch_size: int, is_training: bool) -> Shares | None:
    """This process's part of the data, where several read different parts, or read it as several did before."""
    (rank, size), config = trainer.strategy.data_coordinates(), trainer.args.accelerator_config
    at_once = batch_of_all(config, batch_size, size)
    if is_training and trainer._update_size is not None:
        return Shares.of_update(rank, size, math.ceil(at_once / size), trainer._update_size)
    if size == 1:
        return None
    check_batch(config, f"per_device_{'train' if is_training else 'eval'}_batch_size", batch_size, size)
    return Shares(rank, size, (at_once,))


def deal_of(trainer: Trainer, is_asked: bool) -> Deal | None:
    """How one of several processes reads for all; None where each reads for itself."""
    world, mesh = trainer.world, trainer.strategy.mesh
    if not (world.is_shared and is_asked):
        return None
    parts = tuple(mesh.data_coordinates(rank)[0] for rank in range(world.world_size))
    return Deal(parts, world.is_first, pack, partial(deal_out, world))


def train_order(trainer: Trainer, dataset: Any) -> Any:
    """The body of `_get_train_sampler`."""
    args, (rank, size) = trainer.args, trainer.strategy.data_coordinates()
    return make_train_sampler(
        dataset,
        strategy=str(args.train_sampling_strategy),
        batch_size=batch_of_all(args.accelerator_config, args.train_batch_size, size),
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
    args, size = trainer.args, trainer.strategy.data_coordinates()[1]
    return make_eval_sampler(
        dataset,  # batches that are kept apart cannot be put back in order
        strategy=str(args.train_sampling_strategy) if args.eval_do_concat_batches else "sequential",
        batch_size=batch_of_all(args.accelerator_config, args.eval_batch_size, size),
        seed=trainer._data_seed,
        length_column=args.length_column_name,
        model_input_name=trainer._model_input_name,
    )
