"""`gradient_noise_scale`: the estimate against known gradients, resume, several processes, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import noise_job
import processes
import pytest
import torch
from small_models import Tagger, losses, make_trainer, tagging, weights
from torch import Tensor, nn

from paceline import Trainer, TrainerCallback, UnsupportedOption
from paceline.pytorch.step_parts.noise_scale import find_obstacle


class Rows(TrainerCallback):
    """Keeps the noise scale of each row that callbacks get."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "gradient_noise_scale" in logs:
            self.values.append(logs["gradient_noise_scale"])


@pytest.mark.slow
@pytest.mark.parametrize("split", [(2, 4), (4, 2), (1, 8)], ids=lambda split: f"{split[0]} x {split[1]}")
def test_the_estimate_of_a_known_noise(tmp_path: Path, split: tuple[int, int]) -> None:
    rows = Rows()
    trainer = noise_job.train(tmp_path, 600, split, callbacks=[rows], logging_steps=600)
    assert rows.values[-1] == pytest.approx(noise_job.NOISE_SCALE, rel=0.25)
    assert trainer.args.gradient_noise_scale


@pytest.mark.slow
@pytest.mark.parametrize(("model", "weight"), [(noise_job.Ragged, "tokens"), (noise_job.RaggedScaled, "scaled")])
@pytest.mark.parametrize("split", [(1, 4), (4, 2)], ids=lambda split: f"{split[0]} x {split[1]}")
def test_the_estimate_of_a_mean_over_targets(
    tmp_path: Path, model: type[nn.Module], weight: str, split: tuple[int, int]
) -> None:
    """In samples of 5.5 targets, also where short samples are a micro-batch of their own."""

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {"position_ids": torch.arange(10)[None]}
        return {**batch, **{name: torch.stack([row[name] for row in rows]) for name in rows[0]}}

    trainer = make_trainer(
        tmp_path, model(), noise_job.ragged_samples(600 * split[0] * split[1]), data_collator=collate,
        per_device_train_batch_size=split[0], gradient_accumulation_steps=split[1], gradient_noise_scale=True,
        learning_rate=0.0, logging_steps=600, remove_unused_columns=False, loss_weight=weight,
    )  # fmt: skip
    trainer.train()
    assert trainer.noise_scale is not None
    assert trainer.noise_scale.value == pytest.approx(noise_job.NOISE_SCALE / 5.5, rel=0.25)


def test_nothing_else_changes(tmp_path: Path) -> None:
    found = []
    for is_measured in (False, True):
        torch.manual_seed(0)
        trainer = make_trainer(
            tmp_path, Tagger(dropout=0.2), tagging(48), gradient_accumulation_steps=3, num_train_epochs=2,
            gradient_noise_scale=is_measured, max_grad_norm=0.1,
        )  # fmt: skip
        trainer.train()
        found.append((losses(trainer), weights(trainer.model)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_micro_batches_without_a_target_and_a_window_of_one(tmp_path: Path) -> None:
    """28 samples in windows of 3 x 4: the last has one micro-batch; the last of the first window has no target."""
    data = [
        {**row, "labels": torch.full_like(row["labels"], -100)} if 8 <= i < 12 else row
        for i, row in enumerate(tagging(28))
    ]
    rows = Rows()
    trainer = make_trainer(
        tmp_path, Tagger(), data, gradient_accumulation_steps=3, num_train_epochs=3, callbacks=[rows],
        gradient_noise_scale=True, train_sampling_strategy="sequential", logging_steps=9,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 9
    assert all(value > 0 for value in rows.values)


def test_the_averages_are_resumed(tmp_path: Path) -> None:
    whole, parts = Rows(), Rows()
    noise_job.train(tmp_path / "whole", 40, (2, 2), callbacks=[whole], logging_steps=10)
    options: dict[str, Any] = {"callbacks": [parts], "logging_steps": 10, "save_strategy": "steps", "save_steps": 20}

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 20

    noise_job.train(tmp_path / "parts", 40, (2, 2), **{**options, "callbacks": [parts, Stop()]})
    noise_job.train(tmp_path / "parts", 40, (2, 2), resume=True, **options)
    assert parts.values[:2] + parts.values[3:] == whole.values  # without the row at the end of the first part
    assert len(whole.values) == 5


@pytest.mark.slow
def test_two_processes_estimate_the_same(tmp_path: Path) -> None:
    processes.finish(processes.start("noise_job.py", 2, str(tmp_path)))
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found["scale"] == pytest.approx(noise_job.NOISE_SCALE, rel=0.25)
        assert "with 8 per optimizer step" in found["sentence"]


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (x @ self.weight).mean()}


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"gradient_accumulation_steps": 1}, "set gradient_accumulation_steps=2 or more"),
        ({"auto_find_batch_size": True}, "leave one of them out"),
        (
            {"per_device_train_tokens": 8, "per_device_train_batch_size": 8},
            "per_device_train_tokens makes micro-batches of samples of similar length",
        ),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length' makes micro"),
        ({"packing": "group"}, "packing='group' makes micro-batches of samples"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, options: dict[str, Any], remedy: str) -> None:
    trainer: Trainer = make_trainer(
        tmp_path,
        Halves(),
        [{"x": torch.ones(4), "length": 4}] * 8,
        gradient_noise_scale=True,
        **{"gradient_accumulation_steps": 2, **options},
    )
    with pytest.raises(UnsupportedOption, match=remedy):
        trainer.train()


def test_rows_of_several_samples_are_refused() -> None:
    strategy = SimpleNamespace(
        is_sharded=False, runs_windows=False, is_lazy=False, mesh=SimpleNamespace(is_data_only=True)
    )
    reason = find_obstacle(cast(Any, strategy), cast(Any, None), None, packing="flatten", order="random")
    assert reason == "counts samples, and packing='flatten' joins them into rows: leave one of them out."
