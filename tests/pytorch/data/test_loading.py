"""Loaders as the arguments ask, and how much they hold."""

import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from paceline.pytorch.data.data_shard import DataShard
from paceline.pytorch.data.loading import (
    KeptLoaders,
    StatefulDataIterator,
    check_dataset,
    loader_length,
    make_loader,
    sample_count,
    split_loader,
)
from paceline.pytorch.data.sampling import make_train_sampler, random_sampler


def arguments(**options: Any) -> SimpleNamespace:
    settings = {
        "dataloader_num_workers": 0,
        "dataloader_prefetch_factor": None,
        "dataloader_persistent_workers": False,
        "dataloader_multiprocessing_context": None,
        "dataloader_pin_memory": True,
        "dataloader_in_order": True,
        "dataloader_drop_last": False,
        "use_cpu": False,
    }
    return SimpleNamespace(**{**settings, **options})


def make(dataset: Any, batch_size: int = 4, sampler: Any = None, **options: Any) -> Any:
    args = arguments(**options)
    return make_loader(
        dataset, batch_size=batch_size, sampler=sampler, collate=torch.tensor, args=args, train=True, seed=0
    )


@pytest.mark.parametrize("wrong", [{"train": [1], "test": [2]}, torch.utils.data.DataLoader([1, 2])])
def test_what_is_no_dataset_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="given as a dataset: pass"):
        check_dataset(wrong)


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


def read(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_what_a_user_sees_of_a_loader() -> None:
    dataset, sampler = list(range(10)), random_sampler(10, 3)
    loader = make(dataset, sampler=sampler, dataloader_drop_last=True)
    assert isinstance(loader, DataLoader)
    assert loader.dataset is dataset
    assert loader.sampler is sampler
    assert (loader.batch_size, loader.drop_last, loader.num_workers) == (4, True, 0)
    assert len(loader) == 2
    assert [len(batch) for batch in read(loader)] == [4, 4]
    stream = Stream(10)
    loader = make(stream, dataloader_drop_last=True)
    assert (loader.dataset, loader.batch_size, loader.drop_last) == (stream, 4, True)
    assert read(loader) == read(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_passes_over_a_loader() -> None:
    loader = make(list(range(5)), 2, random_sampler(5, 1))
    assert sorted(number for batch in read(loader) for number in batch) == list(range(5))
    assert read(loader) == read(loader)
    first = read(loader)
    loader.set_epoch(1)
    assert read(loader) != first


@pytest.mark.parametrize(
    ("dataset", "drop_last", "batches", "samples"),
    [
        (list(range(10)), False, 3, 10),
        (list(range(10)), True, 2, 8),
        (Subset(list(range(10)), [1, 2, 3]), False, 1, 3),  # type: ignore[arg-type]
        (Stream(10), False, None, None),
        (SizedStream(10), False, 3, 10),
        (SizedStream(10), True, 2, 8),
        ((number for number in range(3)), False, None, None),
    ],
)
def test_lengths(dataset: Any, drop_last: bool, batches: int | None, samples: int | None) -> None:
    loader = make(dataset, dataloader_drop_last=drop_last)
    assert (loader_length(loader), sample_count(loader)) == (batches, samples)
    assert sum(1 for _ in loader) == batches or batches is None


def test_lengths_of_batch_samplers_and_other_loaders() -> None:
    data = [{"input_ids": [0] * (1 + place % 7)} for place in range(22)]
    for drop_last, batches, samples in ((True, 4, 16), (False, 6, 22)):
        sampler = make_train_sampler(
            data, strategy="batch_rebalance", batch_size=4, accumulation=2, seed=0, drop_last=drop_last
        )
        loader = make_loader(
            data,
            batch_size=4,
            sampler=sampler,
            collate=list,
            args=arguments(dataloader_drop_last=drop_last),
            train=True,
            seed=0,
        )
        assert (loader_length(loader), sample_count(loader)) == (batches, samples)
        assert [len(list(loader)), sum(map(len, loader))] == [batches, samples]
    theirs: Any = DataLoader(list(range(10)), batch_size=4, drop_last=True)  # type: ignore[arg-type]
    assert (loader_length(theirs), sample_count(theirs)) == (2, 8)
    theirs = DataLoader(list(range(10)), batch_sampler=BatchSampler(SequentialSampler(range(10)), 3, False))  # type: ignore[arg-type]
    assert (loader_length(theirs), sample_count(theirs)) == (4, 10)
    assert (loader_length([1, 2]), sample_count([1, 2])) == (2, None)
    assert loader_length(iter([])) is None


def test_a_users_batch_sampler_keeps_its_batches() -> None:
    loader = make(list(range(10)), sampler=BatchSampler(SequentialSampler(range(10)), 3, False))
    assert read(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    feed = StatefulDataIterator(loader, accumulation=2, collect=lambda iterator, number: (list(iterator), None))
    feed.start_epoch(0)
    assert len(feed.draw()[0]) == 2
    state = feed.state_dict()
    assert state["consumed"] == 6
    feed.load_state_dict({**state, "consumed": 5})
    feed.start_epoch(0)
    assert [batch.tolist() for batch in feed.draw()[0]] == [[5], [6, 7, 8]]


class Pairs(Sampler[list[int]]):
    """A batch sampler of the user's own, which is none of torch's."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3], [4, 5], [6]])

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("batches", [Pairs(), list(Pairs())])
def test_the_batches_of_a_users_loader_are_split_as_they_are(batches: Any) -> None:
    data: Any = torch.arange(7)  # a tensor takes a list of indices as well as a number
    for rank in (0, 1):
        loader = split_loader(DataLoader(data, batch_sampler=batches), DataShard(rank, 2, (1,)), 0)
        assert read(loader) == list(batches)[rank::2]
        assert len(loader) == 2


def test_a_users_sampler_is_used() -> None:
    torch.manual_seed(0)
    ours = read(make(list(range(10)), sampler=RandomSampler(range(10))))
    torch.manual_seed(0)
    assert ours == read(make(list(range(10)), sampler=RandomSampler(range(10))))
    assert sorted(number for batch in ours for number in batch) == list(range(10))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dataloader_prefetch_factor", 2),
        ("dataloader_persistent_workers", True),
        ("dataloader_multiprocessing_context", "spawn"),
    ],
)
def test_options_that_need_workers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r} needs workers: set dataloader_num_workers"):
        make([1, 2], **{name: value})


def test_worker_options_reach_the_loader() -> None:
    loader = make([1, 2], dataloader_num_workers=1, dataloader_prefetch_factor=3, dataloader_in_order=False)
    assert (loader.num_workers, loader.prefetch_factor, loader.in_order) == (1, 3, False)
    assert not make([1, 2], use_cpu=True).pin_memory


def test_batches_out_of_order_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make([1, 2], dataloader_in_order=False)
    assert "dataloader_in_order=False" in caplog.text


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_length_of_a_stream_that_workers_share(num_workers: int, train: bool, drop_last: bool) -> None:
    """Each worker has a last batch of its own."""
    for num_samples in (9, 13):
        loader = make_loader(
            SizedStream(num_samples),
            batch_size=4,
            sampler=None,
            collate=torch.tensor,
            args=arguments(dataloader_num_workers=num_workers, dataloader_drop_last=drop_last),
            train=train,
            seed=0,
        )
        assert len(loader) == len(list(loader))


class SlowAtFirst:
    """Its first batch takes longer than all others."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        time.sleep(0.2 if index == 0 else 0)
        return index


@pytest.mark.parametrize("num_samples", [10, 13])
def test_evaluation_batches_of_a_stream_are_those_without_workers(num_samples: int) -> None:
    loaders = [
        make_loader(
            Stream(num_samples),
            batch_size=2,
            sampler=None,
            collate=torch.tensor,
            args=arguments(dataloader_num_workers=number),
            train=False,
            seed=0,
        )
        for number in (0, 2)
    ]
    assert read(loaders[1]) == read(loaders[0])


@pytest.mark.parametrize("dataset", [SlowAtFirst(), Stream(12)])
def test_evaluation_batches_are_in_order_whatever_the_option(dataset: Any) -> None:
    """Predictions are returned in the order of the batches."""
    args = arguments(dataloader_num_workers=2, dataloader_in_order=False)
    loader = make_loader(dataset, batch_size=2, sampler=None, collate=torch.tensor, args=args, train=False, seed=0)
    assert loader.in_order
    assert torch.cat(list(loader)).tolist() == list(range(12))


def test_what_is_no_dataset() -> None:
    class Endless:
        def __getitem__(self, index: int) -> int:
            return index

    for dataset in (3, Endless()):
        with pytest.raises(ValueError, match=f"type {type(dataset).__name__} can be neither read by index nor"):
            make(dataset)
    assert read(make(Endless(), sampler=random_sampler(3, 0)))[0] != []


@pytest.mark.parametrize("accumulation", [1, 2])
def test_order_of_batches_equals_the_reference(tmp_path: Any, accumulation: int) -> None:
    """The order of each epoch is that of transformers.Trainer's own loader, for the same seed."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Rows:
        def __len__(self) -> int:
            return 21

        def __getitem__(self, index: int) -> dict[str, int]:
            return {"x": index}

    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        seed=11,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        use_cpu=True,
        report_to="none",
        remove_unused_columns=False,
    )
    state = torch.get_rng_state()
    reference = transformers.Trainer(torch.nn.Linear(1, 1), args, train_dataset=Rows())
    transformers.set_seed(11)
    theirs = reference.get_train_dataloader()
    sampler = make_train_sampler(Rows(), strategy="random", batch_size=4, accumulation=accumulation, seed=11)
    ours = make_loader(
        Rows(),
        batch_size=4,
        sampler=sampler,
        collate=transformers.default_data_collator,
        args=arguments(),
        train=True,
        seed=11,
    )
    for epoch in range(3):
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)  # type: ignore[attr-defined]
        assert [batch["x"].tolist() for batch in ours] == [batch["x"].tolist() for batch in theirs]
    torch.set_rng_state(state)


def test_loaders_are_kept_by_dataset_up_to_a_limit() -> None:
    kept = KeptLoaders(limit=2)
    closed: list[Any] = []
    datasets = [[index] for index in range(3)]

    def loader_of(dataset: Any, description: str = "evaluation") -> Any:
        def make_new() -> Any:
            loader = make(dataset)
            loader.close = lambda: closed.append(loader)
            return loader

        return kept.get(dataset, description, make_new)

    first, second = loader_of(datasets[0]), loader_of(datasets[1])
    assert loader_of(datasets[0]) is first
    third = loader_of(datasets[2])  # the second was not asked for longest
    assert closed == [second]
    assert [kept.holds(loader) for loader in (first, second, third)] == [True, False, True]
    assert loader_of(datasets[0]) is first
    other = loader_of(datasets[0], "test")
    assert other is not first
    kept.close()
    assert closed == [second, third, first, other]
    assert not kept.holds(first)


def test_data_that_grows_after_its_loader_was_made_is_told(caplog: pytest.LogCaptureFixture) -> None:
    data = list(range(6))
    loader = make(data, batch_size=2)
    loader.set_epoch(0)
    assert not caplog.text
    data += [6, 7]
    loader.set_epoch(1)
    loader.set_epoch(2)
    assert caplog.text.count("The training data had 6 samples when its loader was made and has 8 now") == 1
    assert read(loader) == [[0, 1], [2, 3], [4, 5]]
