"""Makes the data loaders of a run: samples, order, and the batches of this process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.args.accelerator_config import check_batch, global_micro_batch_size, is_on
from paceline.args.mesh import Mesh
from paceline.args.packing import TokenBudget
from paceline.args.plan import Plan
from paceline.core.contracts import Strategy
from paceline.core.optional import LateModule
from paceline.pytorch.data.columns import has_removable_columns
from paceline.pytorch.data.data_shard import DataShard
from paceline.pytorch.data.dispatch import BatchDispatcher
from paceline.pytorch.data.feed import Collect, StatefulDataIterator
from paceline.pytorch.data.loading import KeptLoaders, check_dataset
from paceline.pytorch.data.sampling import make_eval_sampler, make_train_sampler
from paceline.pytorch.data.stream import with_own_position
from paceline.pytorch.distributed.collectives import dispatch_objects, pack
from paceline.pytorch.distributed.world import World
from paceline.pytorch.model.objective import adapted

if TYPE_CHECKING:
    from paceline.pytorch.data import sources, warmups
    from paceline.pytorch.packing import Packing
else:
    sources = LateModule("paceline.pytorch.data.sources")
    warmups = LateModule("paceline.pytorch.data.warmups")


@dataclass(frozen=True)
class LoaderSettings:
    """The settings of loaders, from the arguments.

    Attributes:
        train_batch_size, eval_batch_size: samples per batch on one process.
        accumulation: micro-batches per optimizer step.
        sampling: the order of training samples, a name in `ORDERS` of `paceline.args.registry`.
        eval_sampling: the order of evaluation samples, a name in `SAMPLERS`.
        seed: the seed of both orders.
        length_column: the column with the length of each sample.
        model_input_name: the column to measure if there is no length column; None: the usual names.
        drop_last: drop an incomplete last training batch.
        accelerator: `accelerator_config`: what a batch size counts, and which process reads the data.
        budget: tokens per training micro-batch; None: `train_batch_size` samples.
    """

    train_batch_size: int
    eval_batch_size: int
    accumulation: int
    sampling: str
    eval_sampling: str
    seed: int
    length_column: str
    model_input_name: str | None
    drop_last: bool
    accelerator: Any
    budget: TokenBudget | None = None


@dataclass(eq=False, kw_only=True)
class LoaderFactory:
    """Makes the loaders and samplers of a Trainer.

    Args:
        settings: the settings from the arguments.
        world: the processes.
        strategy: determines which processes read the same data.
        make_loader: `paceline.pytorch.data.loading.make_loader`, bound to the arguments.
        collate: `(samples) -> batch`.
        filter_collator: `(collate, description) -> collate` that drops columns the model does not take.
        filter_dataset: `(dataset, description) -> dataset` without the columns that the model does not take.
        kept: evaluation loaders whose workers are kept alive; None disables keeping them.
        resumed_batch_size: global batch size in samples (with a token budget, in micro-batches) of a run that is
            resumed on another number of processes; else None.
        find_packing: returns the packing of training batches, or None.
        source_column: entry of the training samples whose values are added to the batches; see
            `paceline.pytorch.data.sources`.
    """

    settings: LoaderSettings
    world: World
    strategy: Strategy
    make_loader: Callable[..., Any]
    collate: Callable[[list[Any]], Any]
    filter_collator: Callable[[Any, str], Any]
    filter_dataset: Callable[[Any, str], Any]
    kept: KeptLoaders | None = None
    resumed_batch_size: int | None = None
    find_packing: Callable[[], Packing | None] = lambda: None
    source_column: str | None = None

    def __post_init__(self) -> None:
        self.mesh = self.strategy.mesh
        self.rank, self.size = self.strategy.data_coordinates()

    def make(
        self,
        dataset: object,
        description: str,
        batch_size: int,
        make_sampler: Callable[[Any], Any] | None,
        is_training: bool,
    ) -> Any:
        """Returns a loader of `dataset`; a cached evaluation loader if its workers are kept alive.

        Args:
            dataset: may have columns that the model does not take.
            description: the use of the dataset, such as "evaluation".
            batch_size: samples per batch, as in the arguments.
            make_sampler: `(dataset) -> sampler`; None: the dataset's own order.
            is_training: True for training steps.

        Raises:
            TypeError, ValueError: it is not a dataset, or has no column that the model takes.
        """
        check_dataset(dataset)
        packing = self.find_packing() if is_training else None
        chosen = self.collate if packing is None else packing.collator(self.collate)
        given, collate = dataset, self.filter_collator(chosen, description)
        dataset = with_own_position(dataset)
        sampler = adapted(make_sampler, 1)(dataset) if make_sampler is not None else None  # may read any column
        if is_training and self.source_column:
            collate = sources.SourceCollator(collate, self.source_column, dataset)
        elif has_removable_columns(dataset):
            dataset, collate = self.filter_dataset(dataset, description), chosen
        make = partial(
            self.make_loader,
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            collate=collate,
            train=is_training,
            seed=self.settings.seed,
            data_shard=self._data_shard(batch_size, is_training),
            dispatcher=dispatcher_of(self.world, self.mesh, is_on(self.settings.accelerator, "dispatch_batches")),
        )
        return make() if is_training or self.kept is None else self.kept.get(given, description, make)

    def _data_shard(self, batch_size: int, is_training: bool) -> DataShard | None:
        """Returns this process's shard of the data; None with a single data rank, unless a run that is resumed on
        another number of processes needs a shard to reproduce its global batches.
        """
        config = self.settings.accelerator
        at_once = global_micro_batch_size(config, batch_size, self.size)
        if is_training and self.resumed_batch_size is not None and self.settings.budget is None:
            return DataShard.of_update(self.rank, self.size, math.ceil(at_once / self.size), self.resumed_batch_size)
        if self.size == 1:
            return None
        check_batch(config, f"per_device_{'train' if is_training else 'eval'}_batch_size", batch_size, self.size)
        return DataShard(self.rank, self.size, (at_once,))

    def train_order(self, dataset: object) -> Any:
        """Returns the training sampler; None for a dataset without a length."""
        settings = self.settings
        return make_train_sampler(
            dataset,
            strategy=settings.sampling,
            batch_size=global_micro_batch_size(settings.accelerator, settings.train_batch_size, self.size),
            accumulation=settings.accumulation,
            seed=settings.seed,
            length_column=settings.length_column,
            model_input_name=settings.model_input_name,
            drop_last=settings.drop_last,
            num_ranks=self.size,
            rank=self.rank,
            budget=settings.budget,
            update_size=self.resumed_batch_size,
            multiple=getattr(self.collate, "pad_to_multiple_of", None) or 1,
        )

    def eval_order(self, dataset: object) -> Any:
        """Returns the evaluation sampler; None for a dataset without a length."""
        settings = self.settings
        return make_eval_sampler(
            dataset,
            strategy=settings.eval_sampling,
            batch_size=global_micro_batch_size(settings.accelerator, settings.eval_batch_size, self.size),
            seed=settings.seed,
            length_column=settings.length_column,
            model_input_name=settings.model_input_name,
        )


def check_train_loader(loader: Any, owner: str, packing: Packing | None, tokens: int | None) -> None:
    """Checks that a training loader applies packing and the token budget.

    Args:
        loader: the training loader of the run.
        owner: class name of the Trainer, for the error message.
        packing: the packing of the run, or None.
        tokens: token budget of a micro-batch; None: micro-batches are counted in samples.

    Raises:
        ValueError: the loader or its sampler is the user's own.
    """
    if packing is not None:
        packing.check_loader(loader, owner)
    settings = getattr(getattr(loader, "batch_sampler", None), "settings", {})
    if tokens is not None and settings.get("kind") != "tokens":
        raise ValueError(
            f"per_device_train_tokens={tokens}: the training loader or its sampler is {owner}'s own, and its "
            "micro-batches are of samples. Leave per_device_train_tokens out, or let the Trainer make the loader and "
            "its order."
        )


def make_feed(
    loader: Any,
    plan: Plan,
    model: object,
    *,
    collect: Collect,
    ignore_data_skip: bool,
    step: Callable[[], int],
) -> StatefulDataIterator:
    """Returns the iterator over the training data, with the warm-ups of batch size and sequence length.

    Args:
        loader: the training loader.
        plan: the plan of the run.
        model: the model, whose main input is cut.
        collect, ignore_data_skip: see `StatefulDataIterator`.
        step: returns the number of optimizer steps made.

    Raises:
        ValueError: the batch size grows, and the loader is the user's own and has another or an unknown one.
    """
    accumulation = plan.accumulation_steps
    if plan.batch_warmup is None and plan.length_warmup is None:
        return StatefulDataIterator(
            loader, accumulation=accumulation, collect=collect, ignore_data_skip=ignore_data_skip
        )
    if plan.batch_warmup is not None:
        check_batch_size(loader, plan.batch_warmup.unit, plan.micro_batch_size)
    config = getattr(model, "config", None)
    name = getattr(model, "main_input_name", "input_ids")
    return warmups.WarmingFeed(
        loader,
        accumulation=accumulation,
        collect=collect,
        ignore_data_skip=ignore_data_skip,
        batch_warmup=plan.batch_warmup,
        length_warmup=plan.length_warmup,
        cutter=warmups.SequenceCutter(name, bool(getattr(config, "is_encoder_decoder", False))),
        step=step,
    )


def check_batch_size(loader: object, in_all: int, in_one: int) -> None:
    """Checks that a loader has the micro-batch size of the arguments, which a warm-up of the batch size counts in.

    Args:
        loader: the training loader.
        in_all: samples in a micro-batch of all processes.
        in_one: samples in a micro-batch of one process.

    Raises:
        ValueError: the loader has another micro-batch size, or hides it.
    """
    shared = getattr(loader, "global_micro_batch_size", None)
    own, expected = (shared, in_all) if shared is not None else (getattr(loader, "batch_size", None), in_one)
    if own != expected:
        size = "no batch_size" if own is None else f"batches of {own} samples"
        raise ValueError(
            f"batch_size_warmup counts micro-batches of {expected} samples, and the training loader has {size}: give "
            f"it batch_size={expected}, set per_device_train_batch_size, or leave batch_size_warmup out."
        )


def dispatcher_of(world: World, mesh: Mesh, is_asked: bool) -> BatchDispatcher | None:
    """Returns the dispatcher if one process reads the data for all; None if each process reads its own."""
    if not (world.is_distributed and is_asked):
        return None
    parts = tuple(mesh.data_coordinates(rank)[0] for rank in range(world.world_size))
    return BatchDispatcher(parts, world.is_first, pack, partial(dispatch_objects, world))
