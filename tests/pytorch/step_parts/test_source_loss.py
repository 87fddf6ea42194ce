"""The training loss of each source is the mean of the losses of its samples, computed by hand."""

from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from small_models import Classifier, Tagger, classification, make_trainer, tagging
from source_loss_job import OPTIONS, Watched, logged, mixture, run
from torch import Tensor, nn
from torch.nn import functional

from paceline import Mixup, Phase, Trainer, TrainerCallback, UnsupportedOption

STEPS = OPTIONS["logging_steps"]


def check(rows: list[dict[str, float]], found: list[tuple[int, str, float, int]]) -> None:
    """Compares log rows with (step, source, loss, targets) of the samples."""
    assert len(rows) > 1
    before = 0.0
    for row in rows:
        for source in ("web", "books"):
            own = [each for each in found if before <= each[0] < row["step"] and each[1] == source and each[3]]
            key = f"loss/{source}"
            assert (key in row) == bool(own)
            if own:
                expected = sum(each[2] for each in own) / sum(each[3] for each in own)
                assert row[key] == pytest.approx(expected, rel=1e-5), row
        before = row["step"]


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_training_stop = state.global_step == self.step


@pytest.mark.parametrize("is_stream", [False, True])
def test_each_source_has_the_loss_of_its_samples(tmp_path: Path, is_stream: bool) -> None:
    whole = run(tmp_path / "one", mixture(is_stream), dataloader_num_workers=0, max_steps=8)
    check(logged(whole), whole.found)
    assert sum("loss/books" in row for row in logged(whole)) >= 2


@pytest.mark.slow
def test_a_resume_is_exact(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    whole = run(tmp_path / "one", mixture(), **options)
    run(tmp_path / "two", mixture(), callbacks=[StopAt(4)], **options)  # between two rows, within an epoch
    resumed = run(tmp_path / "two", mixture(), resume=True, **options)
    assert logged(resumed) == logged(whole)


@pytest.mark.slow
def test_all_processes_count(tmp_path: Path) -> None:
    processes.run("source_loss_job.py", 2, str(tmp_path))
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for name in one:
        rows, found = one[name]
        assert rows == two[name][0]
        check(rows, found + two[name][1])


class Regressor(nn.Module):
    """A model with a loss of its own: squared errors, a sum, or losses of the samples that it returns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.layer = kind, nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        value = self.layer(x)
        target = labels.float()[:, None]
        if self.kind == "given":
            losses = functional.huber_loss(value, target, reduction="none")[:, 0]
            return {"loss": losses.mean(), "sample_losses": losses, "logits": value}
        if self.kind == "weighted":
            return {"loss": 3 * functional.mse_loss(value, target), "logits": value}
        function = functional.mse_loss if self.kind == "squared" else functional.l1_loss
        return {"loss": function(value, target), "logits": value}


def regression(dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    rows = classification(24)
    return [
        {"x": row["x"], "labels": row["labels"].to(dtype), "source": "ab"[place % 3 == 0]}
        for place, row in enumerate(rows)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("kind", ["squared", "absolute", "given"])
def test_losses_of_other_heads(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    data = regression(dtype)
    model = Regressor(kind)
    batch = {"x": torch.stack([row["x"] for row in data]), "labels": torch.stack([row["labels"] for row in data])}
    expected = {}
    for name in "ab":
        own = torch.tensor([row["source"] == name for row in data])
        expected[f"loss/{name}"] = model(**{key: value[own] for key, value in batch.items()})["loss"].item()
    trainer = make_trainer(tmp_path, model, data, loss_by_source="source", learning_rate=0, logging_steps=6)
    trainer.train()
    (row,) = (row for row in trainer.state.log_history if "loss" in row)
    assert {key: row.get(key) for key in expected} == pytest.approx(expected, rel=1e-5)


def test_label_smoothing_counts(tmp_path: Path) -> None:
    data = [{**row, "source": "only"} for row in classification(16)]
    options = {"loss_by_source": "source", "label_smoothing_factor": 0.2}
    trainer = make_trainer(tmp_path, Classifier(), data, **options)
    trainer.train()
    for row in trainer.state.log_history[:-1]:
        assert row["loss/only"] == pytest.approx(row["loss"], rel=1e-5)


def test_a_run_without_memory_for_its_batches_counts_each_sample_once(tmp_path: Path) -> None:
    class Small(Classifier):
        def forward(self, x: Tensor, labels: Any = None) -> Any:
            if len(x) > 2:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(x, labels)

    data = [{**row, "source": place % 2} for place, row in enumerate(classification(16))]
    trainer = make_trainer(
        tmp_path, Small(), data, loss_by_source="source", auto_find_batch_size=True, learning_rate=0, logging_steps=4
    )
    trainer.train()
    (row,) = (row for row in trainer.state.log_history if "loss" in row)
    assert (row["loss/0"] + row["loss/1"]) / 2 == pytest.approx(row["loss"], rel=1e-5)


def test_phases_with_mixtures_of_their_own(tmp_path: Path) -> None:
    phases = [
        Phase("first", until="4 steps", train_dataset=mixture()),
        Phase("second", until="4 steps", train_dataset=mixture()),
    ]
    trainer = run(tmp_path, None, phases=phases, num_train_epochs=3)
    check(logged(trainer), trainer.found)


class OwnStep(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = model(**inputs)["loss"]
        loss.backward()
        return loss.detach()


class OwnLoader(Watched):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(tagging(8), batch_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "data", "options", "words"),
    [
        (Classifier(), classification(8), {}, "a sample has x, labels"),
        (Tagger(), mixture(), {"cls": OwnStep}, "overridden training_step"),
        (Tagger(), mixture(), {"cls": OwnLoader}, "get_train_dataloader"),
        (Tagger(), mixture(), {"data_collator": lambda rows: [torch.stack([r["labels"] for r in rows])]}, "a list"),
        (Regressor("weighted"), regression(), {}, "sample_losses"),
        (Regressor("weighted"), regression(torch.int64), {}, "without weights"),
        (Classifier(classes=1), regression(), {"compute_loss_func": lambda outputs, labels: outputs.sum()}, "no mean"),
        (Tagger(), mixture(), {"regularizers": [Mixup(on="embeddings")]}, "with regularizers"),
        (Tagger(), mixture(), {"packing": "flatten"}, "joins samples"),
    ],
)
def test_refused(tmp_path: Path, model: Any, data: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedOption, match=words) as caught:
        make_trainer(tmp_path, model, data, loss_by_source="source", **options).train()
    assert "loss_by_source" in str(caught.value)
