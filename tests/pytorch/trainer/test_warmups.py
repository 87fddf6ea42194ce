"""`batch_size_warmup` and `sequence_length_warmup`: the numbers of a hand-written loop, exact resume, two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import warmup_job
from small_models import Tagger, make_trainer, tagging, weights
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from warmup_job import NUM_SAMPLES, OPTIONS, SIZES, Rows, trainer_in

from paceline import Trainer
from paceline.pytorch.data.warmups import SequenceCutter


def windows() -> list[tuple[int, int, int]]:
    """(epoch, first sample, number of samples) of each optimizer step."""
    found, step = [], 0
    for epoch in range(2):
        first = 0
        while first < NUM_SAMPLES:
            size = next(size for start, size in reversed(SIZES) if start <= step)
            found.append((epoch, first, min(size, NUM_SAMPLES - first)))
            first, step = first + size, step + 1
    return found


def reference() -> Tensor:
    """The weights of plain SGD on one batch per optimizer step, with samples in dataset order."""
    model, data, steps = Tagger(), tagging(NUM_SAMPLES), windows()
    optimizer = torch.optim.SGD(model.parameters(), OPTIONS["learning_rate"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / len(steps))
    for step, (_, first, count) in enumerate(steps):
        length = next(length for start, length in reversed(OPTIONS["sequence_length_warmup"]) if start <= step)
        rows = data[first : first + count]
        batch = {name: torch.stack([row[name] for row in rows])[:, :length] for name in rows[0]}
        model(**batch)["loss"].backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_steps_are_those_of_one_batch_of_the_size_and_length(tmp_path: Path, workers: int) -> None:
    rows = Rows()
    trainer = trainer_in(
        tmp_path, dropout=0.0, train_sampling_strategy="sequential", max_grad_norm=0.0, callbacks=[rows],
        dataloader_num_workers=workers,
    )  # fmt: skip
    trainer.train()
    expected = windows()
    assert warmup_job.found(trainer, tmp_path)["rows"] == expected
    assert trainer.state.global_step == trainer.state.max_steps == len(expected)
    assert trainer.state.epoch == 2.0
    assert torch.allclose(weights(trainer.model), reference(), rtol=1e-5, atol=1e-6)
    assert rows.values[:4] == [(4, 2), (4, 3), (8, 3), (16, 3)]
    assert rows.values[-1] == (16, None)


def same(results: list[dict[str, Any]]) -> bool:
    whole = results[0]
    return all(
        torch.equal(each["weights"], whole["weights"])
        and all(each[name] == whole[name] for name in ("losses", "steps"))
        for each in results[1:]
    )


@pytest.mark.slow
def test_a_run_resumed_at_any_step_is_the_same(tmp_path: Path) -> None:
    assert same(warmup_job.whole_and_resumed(tmp_path, 1, range(1, len(windows()))))


@pytest.mark.slow
def test_with_other_orders_and_workers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"train_sampling_strategy": "group_by_length", "dataloader_num_workers": 1}
    assert same(warmup_job.whole_and_resumed(tmp_path, 1, (2,), **options))


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(tagging(NUM_SAMPLES))


def test_a_stream(tmp_path: Path) -> None:
    results = []
    for resume in (None, str(tmp_path / "checkpoint-4")):
        options = {"num_train_epochs": 3, "max_steps": 10, "save_strategy": "steps", "save_steps": 4}
        trainer = make_trainer(tmp_path, Tagger(dropout=0.1), Stream(), **{**OPTIONS, **options})
        trainer.train(resume_from_checkpoint=resume)
        results.append(warmup_job.found(trainer, tmp_path))
    assert same(results)
    assert results[0]["rows"] == [*windows()[:8], (2, 0, 16), (2, 16, 16)]


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    processes.finish(processes.start("warmup_job.py", 2, str(tmp_path)))
    one = trainer_in(tmp_path / "one", dropout=0.0)
    one.train()
    alone = warmup_job.found(one, tmp_path / "one")
    for rank in range(2):
        results = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert same(results["runs"])
        assert results["plain"]["rows"] == alone["rows"] == windows()
        assert results["plain"]["steps"] == alone["steps"]
        assert torch.allclose(results["plain"]["weights"], alone["weights"], rtol=1e-5, atol=1e-6)


def test_a_changed_warmup_ends_with_the_data(tmp_path: Path) -> None:
    trainer_in(tmp_path, save_strategy="steps", save_steps=2).train()
    changed = trainer_in(tmp_path, batch_size_warmup=[[0, 4], [4, 16]])
    changed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert changed.state.global_step == changed.state.max_steps == 2 + 2 + 2 + 3  # 8 + 8 + 30 samples, then 46
    assert changed.state.epoch == 2.0


def test_after_an_out_of_memory_the_samples_are_the_same(tmp_path: Path) -> None:
    class Small(Tagger):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            if len(input_ids) > 2:
                raise MemoryError
            return super().forward(input_ids, labels)

    expected = trainer_in(tmp_path / "whole", dropout=0.0)
    expected.train()
    options = {**OPTIONS, "per_device_train_batch_size": 4, "auto_find_batch_size": True}
    trainer = make_trainer(tmp_path, Small(), tagging(NUM_SAMPLES), **options)
    trainer.train()
    assert warmup_job.found(trainer, tmp_path)["rows"] == windows()
    assert torch.allclose(weights(trainer.model), weights(expected.model), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_trial_runs_use_the_full_size(tmp_path: Path) -> None:
    found = trainer_in(tmp_path).find_batch_size(lowest=4, highest=8, num_steps=2)
    assert found is not None


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=3)


def test_another_micro_batch_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"batch_size_warmup counts micro-batches of 4 samples.* batches of 3"):
        make_trainer(tmp_path, Tagger(), tagging(8), cls=OwnLoader, **OPTIONS).train()


# ---- cutting


def cut(batch: Any, length: int = 3, **options: Any) -> Any:
    cutter = SequenceCutter("input_ids", **options)
    cutter.length = length
    return cutter(batch)


IDS = torch.arange(10).reshape(2, 5)


def test_every_column_of_the_token_length_is_cut() -> None:
    batch = {
        "input_ids": IDS,
        "labels": IDS.clone(),
        "attention_mask": torch.ones(2, 1, 5, 5),
        "position_ids": torch.arange(5).expand(2, 5),
        "weights": torch.rand(2, 5).numpy(),
        "label": torch.tensor([0, 1]),
        "features": torch.rand(2, 4),
        "texts": ["a", "b"],
    }
    found = cut(batch)
    shapes = {name: tuple(value.shape) for name, value in found.items() if name != "texts"}
    assert shapes == {
        "input_ids": (2, 3), "labels": (2, 3), "attention_mask": (2, 1, 3, 3), "position_ids": (2, 3),
        "weights": (2, 3), "label": (2,), "features": (2, 4),
    }  # fmt: skip
    assert list(found) == list(batch)
    assert found["input_ids"].is_contiguous()
    assert torch.equal(found["input_ids"], IDS[:, :3])
    assert batch["input_ids"].shape == (2, 5)


def test_both_sides_of_an_encoder_decoder_are_cut() -> None:
    found = cut({"input_ids": IDS[:, :2], "labels": torch.ones(2, 4, dtype=torch.long)}, is_encoder_decoder=True)
    assert found["input_ids"].shape == (2, 2)
    assert found["labels"].shape == (2, 3)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"input_ids": torch.rand(2, 5)}, "'input_ids' is no tensor of token ids"),
        ({"input_ids": [[1, 2]]}, "'input_ids' is no tensor of token ids"),
        ({"start_positions": torch.tensor([1, 4])}, "'start_positions' holds places"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1]] * 2)}, "'attention_mask' shows padding on the left"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1, 2]] * 2)}, "'position_ids' restarts"),
        ({"labels": torch.rand(2, 5)}, "'labels' may be one target per token or one per class"),
        ({"scores": torch.rand(2, 4, 5)}, r"'scores' of shape \(2, 4, 5\)"),
        ({"tags": [[0] * 5] * 2}, "'tags' has the token length 5 inside of a list"),
        ({"attention_mask": torch.ones(2, 1, 1, 5)}, r"'attention_mask' of shape \(2, 1, 1, 5\) is not over pairs"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(columns: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"sequence_length_warmup: .* 3 tokens, because {text}"):
        cut({"input_ids": IDS, **columns})
    with pytest.raises(ValueError, match="'input_ids' is no tensor"):
        cut((IDS, IDS))


def test_a_column_that_has_the_token_length_by_chance_is_refused() -> None:
    cutter = SequenceCutter("input_ids")
    cutter.length = 3
    cutter({"input_ids": IDS, "features": torch.rand(2, 5)})
    with pytest.raises(ValueError, match="'features' has the token length of input_ids in some batches"):
        cutter({"input_ids": IDS[:, :4], "features": torch.rand(2, 5)})
