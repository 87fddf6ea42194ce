"""`find_batch_size`: the largest size that fits and the fastest, without effects on the Trainer."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Tagger, losses, make_trainer, tagging, weights
from torch import Tensor

from paceline import Trainer, TrainingArguments, UnsupportedOption
from paceline.args.plan import resolve
from paceline.pytorch.short_runs import batch_search
from paceline.pytorch.short_runs.batch_search import BatchSearch, Taken, Trial

DATA = tagging(40)


class Narrow(Tagger):
    """Has memory for `room` samples."""

    def __init__(self, room: int, **options: Any) -> None:
        super().__init__(**options)
        self.room = room
        self.sizes = np.zeros(64)  # of an array nothing is put back after a short run

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.sizes[len(input_ids)] += 1
        if len(input_ids) > self.room:
            raise torch.OutOfMemoryError("no room")
        return super().forward(input_ids, labels)


@pytest.mark.slow
def test_the_largest_size_that_fits(tmp_path: Path) -> None:
    model = Narrow(9)
    found = make_trainer(tmp_path, model, DATA).find_batch_size()
    assert [trial.size for trial in found.trials] == [1, 2, 4, 8, 16]
    assert found.largest == 8
    assert found.fastest in (1, 2, 4, 8)
    assert found.trials[-1].samples_per_second is None
    assert np.flatnonzero(model.sizes).tolist() == [1, 2, 4, 8, 16], "no smaller batch at the end of an epoch"
    text = str(found)
    assert "out of memory" in text
    assert text.endswith("; largest: 8")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_no_size_above_the_data(tmp_path: Path) -> None:
    found = make_trainer(tmp_path, Tagger(), DATA).find_batch_size(lowest=16)
    assert [trial.size for trial in found.trials] == [16, 32, 40]
    assert found.largest == 40


@pytest.mark.slow
def test_nothing_remains_of_it(tmp_path: Path) -> None:
    runs = []
    for is_searched in (False, True):
        torch.manual_seed(0)
        model = Narrow(9, dropout=0.2)
        trainer = make_trainer(tmp_path, model, copy.deepcopy(DATA), num_train_epochs=2, gradient_accumulation_steps=2)
        if is_searched:
            state = copy.deepcopy(trainer.state)
            trainer.find_batch_size(num_steps=2)
            assert trainer.state == state
            assert trainer.args.per_device_train_batch_size == 4
            assert all(parameter.grad is None for parameter in model.parameters())
        trainer.train()
        runs.append((losses(trainer), weights(model)))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])


def test_the_fastest_is_the_smallest_that_is_about_as_fast() -> None:
    trials = [
        Trial(1, 10.0, None),
        Trial(2, 19.5, None),
        Trial(4, 20.0, None),
        Trial(8, 12.0, None),
        Trial(16, None, None),
    ]
    assert batch_search.result_of(trials) == BatchSearch(tuple(trials), largest=8, fastest=2)
    assert batch_search.result_of(trials[-1:]) == BatchSearch((trials[-1],), None, None)


@pytest.mark.slow
def test_on_a_cpu_the_search_ends_before_memory_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that exceeds the memory of the host is killed."""
    peaks = iter([100, 110, 110, 160, 160, 300, 300])
    monkeypatch.setattr(batch_search, "peak_of_process", lambda: next(peaks))
    monkeypatch.setattr(batch_search, "available_host_memory", lambda: 300)
    found = make_trainer(tmp_path, Tagger(), DATA).find_batch_size()
    assert [trial.size for trial in found.trials] == [1, 2, 4]
    assert "may exceed the free memory" in caplog.text


@pytest.mark.slow
def test_steps_without_a_target_do_not_count(tmp_path: Path) -> None:
    """They take no time, and no memory."""
    data = [{**row, "labels": torch.full_like(row["labels"], -100)} if i % 3 else row for i, row in enumerate(DATA)]
    model = Narrow(9)
    found = make_trainer(tmp_path, model, data, train_sampling_strategy="sequential").find_batch_size(highest=2)
    assert found.trials[0].samples_per_second is not None
    assert found.trials[0].samples_per_second < 1e5
    silent = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in DATA]
    with pytest.raises(ValueError, match="no optimizer step was run with micro-batches of 1"):
        make_trainer(tmp_path, Narrow(9), silent).find_batch_size()


@pytest.mark.slow
def test_a_stream_that_ends_and_a_loader_of_ones_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(DATA[:10])

    found = make_trainer(tmp_path, Tagger(), Stream(), max_steps=5).find_batch_size()
    assert found.largest == 8
    assert "no optimizer step was run with micro-batches of 16" in caplog.text

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(DATA, batch_size=4)

    with pytest.raises(UnsupportedOption, match=r"micro-batches of \[4\] samples instead of 1"):
        make_trainer(tmp_path, Tagger(), DATA, cls=Own).find_batch_size()


@pytest.mark.slow
def test_options_that_a_short_run_cannot_take_are_left_out(tmp_path: Path) -> None:
    class Reads(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            assert self.args.own == 1  # type: ignore[attr-defined]
            return super().compute_loss(*args, **kwargs)

    options: dict[str, Any] = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}}
    options |= {"gradient_noise_scale": True, "resume_from_checkpoint": "/nowhere"}
    trainer = make_trainer(tmp_path, Tagger(), DATA, cls=Reads, gradient_accumulation_steps=4, **options)
    trainer.args.own = 1  # type: ignore[attr-defined]
    assert trainer.find_batch_size(highest=2).largest == 2
    assert len(trainer.find_lr(num_steps=10).losses) == 10


@pytest.mark.slow
def test_a_buffer_that_forward_replaces_is_restored(tmp_path: Path) -> None:
    class Counts(Tagger):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            self.seen = self.seen + 1
            return super().forward(input_ids, labels)

    model = Counts()
    buffer, gradient = model.seen, torch.ones(11)
    model.head.bias.grad = gradient
    make_trainer(tmp_path, model, DATA).find_batch_size(highest=4)
    assert model.seen is buffer
    assert float(model.seen) == 0
    assert model.head.bias.grad is gradient
    assert float(gradient.sum()) == 11


def test_wrong_use(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Tagger(), DATA)
    for options in ({"lowest": 0}, {"lowest": 8, "highest": 4}, {"num_steps": 1}, {"highest": 4.0}):
        with pytest.raises(ValueError, match="find_batch_size: lowest="):
            trainer.find_batch_size(**options)
    for number, options, message in (
        (2, {"parallel": {"pp": 2}}, "find_batch_size with parallel='pipeline'"),
        (2, {"ddp_static_graph": True}, "ddp_static_graph=True is not supported on 2 processes"),
        (2, {"optimizer_in_backward": True, "fsdp": True}, "optimizer_in_backward=True is not supported on 2"),
        (1, {"per_device_train_tokens": 64}, "per_device_train_tokens=64 decides"),
    ):
        args = TrainingArguments(str(tmp_path), max_grad_norm=0, **options)
        with pytest.raises(UnsupportedOption, match=message):
            batch_search.check_support(args, resolve(args, world_size=number, micro_batches_per_epoch=3))


def test_the_slowest_process_counts() -> None:
    """Two steps of one and three seconds after the first, on the slower of two processes that read different data."""
    fast = Taken([(9.0, 4), (1.0, 4), (1.0, 4)], False, None, True, True)
    slow = Taken([(1.0, 4), (1.0, 4), (3.0, 4)], False, None, True, True)
    assert batch_search.samples_per_second([fast, slow]) == 16 / 4
    assert batch_search.samples_per_second([fast, replace(slow, is_leader=False)]) == 8 / 4


def test_another_error_is_raised(tmp_path: Path) -> None:
    class Fails(Tagger):
        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match") as raised:
        make_trainer(tmp_path, Fails(), DATA).find_batch_size()
    assert "find_batch_size: with micro-batches of 1." in raised.value.__notes__


def test_layers_that_need_two_samples_are_told_of(tmp_path: Path) -> None:
    class Normalized(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": torch.nn.functional.cross_entropy(self.layers(x), labels)}

    data = [{"x": torch.ones(4), "labels": torch.tensor(1)}] * 8
    trainer = make_trainer(tmp_path, Normalized(), data)
    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        trainer.find_batch_size()
    assert "lowest=2 leaves this size out" in raised.value.__notes__[-1]
    assert trainer.find_batch_size(lowest=2, highest=4, num_steps=2).largest == 4
