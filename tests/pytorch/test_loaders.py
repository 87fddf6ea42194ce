"""The maker of loaders, given settings and the coordinates of a process, without a Trainer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.args.mesh import Mesh
from paceline.pytorch.data.data_shard import DataShard
from paceline.pytorch.data.loading import KeptLoaders
from paceline.pytorch.loaders import LoaderFactory, LoaderSettings

SETTINGS = LoaderSettings(
    train_batch_size=4,
    eval_batch_size=8,
    accumulation=2,
    sampling="random",
    eval_sampling="sequential",
    seed=3,
    length_column="length",
    model_input_name=None,
    drop_last=False,
    accelerator=None,
)


def make(rank: int = 0, size: int = 1, **changes: Any) -> LoaderFactory:
    given: dict[str, Any] = {
        "settings": SETTINGS,
        "world": SimpleNamespace(is_distributed=size > 1, world_size=size, is_first=rank == 0),
        "strategy": SimpleNamespace(mesh=Mesh(dp_replicate=size), data_coordinates=lambda: (rank, size)),
        "make_loader": lambda dataset, **options: SimpleNamespace(dataset=dataset, **options),
        "collate": list,
        "filter_collator": lambda collate, description: (collate, description),
        "filter_dataset": lambda dataset, description: dataset,
    }
    return LoaderFactory(**{**given, **changes})


def test_a_loader_gets_its_collator_sampler_and_seed() -> None:
    loader = make().make([1, 2, 3], "training", 4, lambda dataset: ("order of", len(dataset)), True)
    assert (loader.dataset, loader.batch_size, loader.sampler) == ([1, 2, 3], 4, ("order of", 3))
    assert (loader.collate, loader.train, loader.seed) == ((list, "training"), True, 3)
    assert loader.data_shard is None
    assert loader.dispatcher is None


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_reads_its_shard(rank: int) -> None:
    assert make(rank, 2).make([1], "training", 4, None, True).data_shard == DataShard(rank, 2, (8,))


def test_a_resumed_run_keeps_its_optimizer_steps() -> None:
    factory = make(resumed_batch_size=6)
    assert factory.make([1], "training", 4, None, True).data_shard == DataShard(0, 1, (3, 3))
    assert factory.make([1], "evaluation", 4, None, False).data_shard is None


def test_kept_loaders_are_those_of_evaluations() -> None:
    factory, data = make(kept=KeptLoaders()), [1, 2]
    first = factory.make(data, "evaluation", 8, None, False)
    assert factory.make(data, "evaluation", 8, None, False) is first
    assert factory.make(data, "training", 4, None, True) is not factory.make(data, "training", 4, None, True)


def test_orders_are_drawn_as_the_settings_say() -> None:
    factory, data = make(), list(range(6))
    assert sorted(factory.train_order(data)) == data
    assert list(factory.eval_order(data)) == data
    assert factory.train_order(iter(data)) is None
    in_order = make(settings=replace(SETTINGS, sampling="sequential"))
    assert list(in_order.train_order(data)) == data
