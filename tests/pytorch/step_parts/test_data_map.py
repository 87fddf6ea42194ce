"""Data maps: the numbers of each sample, planted label errors, resume, sequences, and what is refused."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
from small_models import Tagger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterableDataset

from paceline import MixedDataset, Trainer, TrainerCallback, TrainingArguments, UnsupportedOption
from paceline.predictions.data_map import SUMS, DataMap


class Linear(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(x)
        return {"loss": functional.cross_entropy(logits.flatten(0, -2), labels.flatten()), "logits": logits}


def rows(number: int = 26) -> list[dict[str, Tensor]]:
    xs = torch.randn(number, 8, generator=torch.Generator().manual_seed(1))
    return [{"x": x, "labels": x[:4].argmax()} for x in xs]


class Watch(TrainerCallback):
    """Computes the map's numbers of each step from its inputs and outputs."""

    wants = frozenset({"inputs", "outputs"})

    def __init__(self, data: list[dict[str, Tensor]], stop: int | None = None) -> None:
        self.stop, self.expected = stop, DataMap(len(data))
        self.places = {tuple(row["x"].flatten().tolist()): place for place, row in enumerate(data)}

    def on_step_end(
        self, args: Any, state: Any, control: Any, inputs: Any = (), outputs: Any = (), **kwargs: Any
    ) -> None:
        for batch, seen in zip(inputs, outputs, strict=True):
            for x, label, logits in zip(batch["x"], batch["labels"], seen["logits"], strict=True):
                log_probabilities = logits.log_softmax(-1)
                others = torch.cat([logits[:label], logits[label + 1 :]])
                margin = (logits[label] - others.max()).item()
                place = self.places[tuple(x.flatten().tolist())]
                loss = -log_probabilities[label].item()
                arrays = [np.array([value]) for value in (place, loss, np.exp(-loss), margin, float(margin > 0))]
                self.expected.add(*arrays)
        control.should_training_stop |= state.global_step == self.stop


def run(folder: Path, stop: int | None = None, resume: bool = False, data: Any = None, **options: Any) -> Any:
    data = rows() if data is None else data
    defaults: dict[str, Any] = {
        "num_train_epochs": 4, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "learning_rate": 0.2,
        "save_strategy": "steps", "save_steps": 3, "data_map": True, "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    watch = Watch(data, stop)
    trainer: Any = Trainer(
        Linear(), TrainingArguments(str(folder), **{**defaults, **options}), train_dataset=data, callbacks=[watch]
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.watch = watch
    return trainer


class NanOnce(Linear):
    """Gives NaN in its third training pass."""

    passes = 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.passes += 1
        found = super().forward(x, labels)
        return {name: value * float("nan") for name, value in found.items()} if self.passes == 3 else found


def test_a_presentation_that_is_not_finite_does_not_count(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), num_train_epochs=2, per_device_train_batch_size=3, data_map=True, nonfinite_policy="skip",
        save_strategy="no", use_cpu=True, disable_tqdm=True, loss_weight="samples",
    )  # fmt: skip
    trainer: Any = Trainer(NanOnce(), args, train_dataset=rows())
    trainer.train()
    times = trainer.data_map.result.sums["times"]
    assert sorted(times.tolist()) == [1.0] * 3 + [2.0] * 23
    assert all(np.isfinite(values).all() for values in trainer.data_map.result.columns().values())


def test_each_sample_has_the_numbers_of_its_presentations(tmp_path: Path) -> None:
    trainer = run(tmp_path)
    found, expected = trainer.data_map.result, trainer.watch.expected
    for name in SUMS:
        np.testing.assert_allclose(found.sums[name], expected.sums[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert (found.sums["times"] == 4).all()
    with (tmp_path / "data_map.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [int(row["sample"]) for row in table] == list(range(26))
    assert float(table[3]["confidence"]) == pytest.approx(found.sums["confidence"][3] / 4, rel=1e-5)
    assert "<svg" in (tmp_path / "data_map.svg").read_text()
    assert list((tmp_path / "media").glob("data map*likely label errors*.json"))


@pytest.mark.slow
def test_a_resume_is_exact(tmp_path: Path) -> None:
    straight = run(tmp_path / "one")
    run(tmp_path / "two", stop=7)  # within an epoch, and after the last checkpoint of the first part
    resumed = run(tmp_path / "two", resume=True, dataloader_num_workers=0)
    for name in SUMS:
        assert (straight.data_map.result.sums[name] == resumed.data_map.result.sums[name]).all(), name


@pytest.mark.slow
def test_processes_share_one_map(tmp_path: Path) -> None:
    """It is that of one process with the same global batches, and a resume is exact."""
    processes.run("data_map_job.py", 2, str(tmp_path))
    alone = run(tmp_path / "alone", per_device_train_batch_size=6).data_map.result.sums
    one, two = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1))
    for way in ("ddp", "fsdp"):
        straight, resumed = one[way]
        for name in SUMS:
            np.testing.assert_allclose(straight[name], alone[name], rtol=1e-4, atol=1e-5, err_msg=f"{way} {name}")
            assert (straight[name] == resumed[name]).all(), f"{way} {name}"
            assert (straight[name] == two[way][0][name]).all(), f"{way} {name}"


def test_forgetting_events_and_samples_that_repeat() -> None:
    made = DataMap(3)
    right = np.array([1.0, 0.0, 1.0, 0.0, 1.0])
    made.add(np.array([0, 0, 0, 0, 2]), right, right, 2 * right - 1, right)
    assert made.sums["forgotten"].tolist() == [2, 0, 0]
    assert made.sums["times"].tolist() == [4, 0, 1]
    assert made.label_errors() == [0, 2]
    assert made.columns()["correctness"].tolist() == [0.5, 1.0]
    assert made.columns()["variability"].tolist() == [0.5, 0.0]
    with pytest.raises(ValueError, match="of 3 samples, and the dataset has 4"):
        DataMap(4).load_state_dict(made.state_dict())


def test_planted_label_errors_are_found(tmp_path: Path) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    images, digits = datasets.load_digits(return_X_y=True)
    generator = np.random.default_rng(0)
    wrong = generator.choice(len(digits), len(digits) // 20, replace=False)
    labels = digits.copy()
    labels[wrong] = (labels[wrong] + generator.integers(1, 10, len(wrong))) % 10
    data = [
        {"x": torch.tensor(x / 16, dtype=torch.float32), "labels": int(y)} for x, y in zip(images, labels, strict=True)
    ]

    class Digits(Linear):
        def __init__(self) -> None:
            super().__init__(64)
            self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))  # type: ignore[assignment]

    args = TrainingArguments(
        str(tmp_path), num_train_epochs=5, per_device_train_batch_size=32, learning_rate=3e-3, data_map=True,
        save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer: Any = Trainer(Digits(), args, train_dataset=data)
    trainer.train()
    first = trainer.data_map.result.label_errors(len(wrong))
    assert len(set(first) & set(wrong.tolist())) / len(wrong) > 0.7  # 0.05 by chance


def test_sequences_count_by_their_targets(tmp_path: Path) -> None:
    data = []
    for index in range(8):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(index))
        labels = x[:, :4].argmax(-1)
        labels[2 + index % 3 :] = -100
        data.append({"x": x, "labels": labels if index else torch.full((5,), -100)})
    args = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, data_map=True, learning_rate=0.0,
        save_strategy="no", use_cpu=True, disable_tqdm=True, loss_weight="tokens",
    )  # fmt: skip
    trainer: Any = Trainer(Linear(), args, train_dataset=data)
    trainer.train()
    found = trainer.data_map.result
    assert found.sums["times"].tolist() == [0, *[1] * 7]
    losses = functional.cross_entropy(Linear().head(data[1]["x"][:3]), data[1]["labels"][:3])
    assert found.sums["loss"][1] == pytest.approx(losses.item(), rel=1e-5)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(rows())


class Silent(Linear):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return {"loss": functional.mse_loss(self.head(x).mean(), labels.float().mean())}


def test_refused(tmp_path: Path) -> None:
    data: Any = Stream()
    args = TrainingArguments(str(tmp_path), max_steps=2, data_map=True, use_cpu=True, disable_tqdm=True)
    streamed = Trainer(Linear(), args, train_dataset=data)
    with pytest.raises(UnsupportedOption, match="needs a dataset with an index"):
        streamed.train()
    for options, message in (
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"linear_cross_entropy": True}, "linear_cross_entropy=True"),
    ):
        with pytest.raises(UnsupportedOption, match=message):
            run(tmp_path, **options)
    mixed = Trainer(Linear(), args, train_dataset=MixedDataset({"a": rows(4), "b": rows(9)}))
    with pytest.raises(UnsupportedOption, match="a MixedDataset has another sample in each epoch"):
        mixed.train()
    silent = Trainer(Silent(), args, train_dataset=rows())
    with pytest.raises(ValueError, match="which data_map=True needs"):
        silent.train()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("shifted", [True, False])
def test_targets_of_a_language_model_are_those_of_its_loss(tmp_path: Path, shifted: bool, accumulation: int) -> None:
    """Rows of the same length, whose weights do not show if the targets are shifted."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 11, (6,), generator=generator) for _ in range(12)]
    data = [{"input_ids": row, "labels": row.clone()} for row in ids]
    model = Tagger(shifted=shifted)
    args = TrainingArguments(
        str(tmp_path), num_train_epochs=1, per_device_train_batch_size=3, gradient_accumulation_steps=accumulation,
        data_map=True, learning_rate=0.0, save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer: Any = Trainer(model, args, train_dataset=data)
    trainer.train()
    with torch.no_grad():
        expected = [float(model(row[None], row[None])["loss"]) for row in ids]
    np.testing.assert_allclose(trainer.data_map.result.sums["loss"], expected, rtol=1e-5)
