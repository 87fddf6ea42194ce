"""A loss or gradient that is not finite: counted, logged as what it is, and handled as the user chose."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, losses, make_trainer, weights
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from paceline import ShuffleBuffer, Trainer, TrainerCallback
from paceline.core.journal import JOURNAL_FILE, read_rows
from paceline.core.nonfinite import NonFiniteError

DATA = classification(40)
POISON = 17  # the sample that makes the loss NaN


class Poisoned(Classifier):
    """NaN where a feature is exactly 100."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        loss, logits = super().forward(x.clamp(max=10), labels)
        return loss * float("nan") if bool((x == 100).any()) else loss, logits


def data() -> list[dict[str, Tensor]]:
    samples = [dict(sample) for sample in DATA]
    samples[POISON] = {**samples[POISON], "x": torch.full((8,), 100.0)}
    return samples


def run(folder: Path, policy: str, **options: Any) -> Any:
    trainer = make_trainer(
        folder, Poisoned(), data(), nonfinite_policy=policy, **{"num_train_epochs": 2, "logging_steps": 5, **options}
    )
    trainer.train()
    return trainer


def test_warn_logs_what_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = run(tmp_path, "warn")
    assert any(math.isnan(loss) for loss in losses(trainer))
    assert not any(loss == 0.0 for loss in losses(trainer))
    assert not torch.isfinite(weights(trainer.model)).all()
    assert "not finite" in caplog.text


@pytest.mark.parametrize("policy", ["raise", "rollback", "warn"])
def test_finding_a_loss_scale_for_fp16_is_no_failure(
    tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The scale starts too high, and the updates that overflow until it fits are left out: that is how it works."""

    class Steep(Classifier):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            loss, logits = super().forward(x, labels)
            return loss * 200, logits

    trainer = make_trainer(
        tmp_path, Steep(), DATA, fp16=True, nonfinite_policy=policy, max_steps=12, logging_steps=1, learning_rate=1e-4
    )
    trainer.train()
    assert trainer.state.global_step == 12
    assert "not finite" not in caplog.text
    norms = [row.get("grad_norm") for row in trainer.state.log_history if "loss" in row]
    assert norms[0] is None  # overflowed: there is none
    assert norms[-1] is not None
    assert math.isfinite(norms[-1])


def test_fp16_does_not_hide_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="loss nan"):
        run(tmp_path, "raise", fp16=True)


def test_raise_names_the_first_update(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"step \d+ .*samples \d+ to \d+"):
        run(tmp_path, "raise", save_strategy="steps", save_steps=1, logging_steps=100)
    steps = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
    bad = [row for row in read_rows(tmp_path / JOURNAL_FILE) if not math.isfinite(row.loss)]
    assert bad == []
    assert steps == list(range(1, len(steps) + 1))  # every update before it was saved, and none after


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_skip_leaves_the_weights_finite(tmp_path: Path, optim: str) -> None:
    trainer = run(tmp_path, "skip", optim=optim)
    assert torch.isfinite(weights(trainer.model)).all()
    assert sum(row.get("nonfinite_steps", 0) for row in trainer.state.log_history) == 2
    assert all(math.isfinite(loss) for loss in losses(trainer))


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_skip_is_as_if_the_update_had_not_been(tmp_path: Path, optim: str) -> None:
    options = {"optim": optim, "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"}
    skipped = run(tmp_path, "skip", num_train_epochs=1, **options)
    without = data()[:16] + data()[20:]  # the batch of four that holds the poison
    clean = make_trainer(tmp_path, Poisoned(), without, **options)
    clean.train()
    torch.testing.assert_close(weights(skipped.model), weights(clean.model), rtol=1e-6, atol=1e-8)


def test_rollback_leaves_the_samples_out_and_records_them(tmp_path: Path) -> None:
    options = {"lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", "num_train_epochs": 1}
    trainer = run(tmp_path, "rollback", logging_steps=3, **options)
    without = data()[:16] + data()[20:]
    clean = make_trainer(tmp_path / "clean", Poisoned(), without, **options)
    clean.train()
    assert torch.equal(weights(trainer.model), weights(clean.model))
    assert trainer.state.global_step == 9
    line = json.loads((tmp_path / "skipped_samples.jsonl").read_text())
    assert line["sample_ids"] == [16, 17, 18, 19]
    assert [row.step for row in read_rows(tmp_path / JOURNAL_FILE)] == list(range(1, 10))


def test_rollback_over_the_end_of_an_epoch(tmp_path: Path) -> None:
    trainer = run(tmp_path, "rollback", logging_steps=7, num_train_epochs=2)
    assert torch.isfinite(weights(trainer.model)).all()
    lines = [json.loads(line) for line in (tmp_path / "skipped_samples.jsonl").read_text().splitlines()]
    assert [POISON in line["sample_ids"] for line in lines] == [True, True]
    assert trainer.state.global_step == 18


@pytest.mark.parametrize("length", [{"num_train_epochs": 2}, {"num_train_epochs": 1}, {"max_steps": 10}])
def test_rollback_ends_as_every_run_does(tmp_path: Path, length: dict[str, int]) -> None:
    """With an evaluation and a checkpoint of the last update; and max_steps is the number of updates all the same."""
    options = {"eval_strategy": "steps", "eval_steps": 100, "save_strategy": "steps", "save_steps": 100}
    trainer = run(tmp_path, "rollback", logging_steps=4, eval_dataset=DATA, **options, **length)
    last = length.get("max_steps", 9 * length["num_train_epochs"] if "num_train_epochs" in length else 0)
    assert trainer.state.global_step == trainer.state.max_steps == last
    assert (tmp_path / f"checkpoint-{last}").is_dir()
    assert [row["step"] for row in trainer.state.log_history if "eval_loss" in row] == [last]


def test_the_journal_knows_every_update(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Classifier(), DATA, num_train_epochs=2)
    trainer.train()
    rows = read_rows(tmp_path / JOURNAL_FILE)
    assert [row.step for row in rows] == list(range(1, 21))
    assert [row.loss for row in rows] == losses(trainer)
    assert [(row.epoch, row.first, row.num_samples) for row in rows[9:11]] == [(0, 36, 4), (1, 0, 4)]


def test_rollback_with_nothing_due_before_the_end(tmp_path: Path) -> None:
    trainer = run(tmp_path, "rollback", logging_strategy="no", num_train_epochs=1)
    assert torch.isfinite(weights(trainer.model)).all()
    assert trainer.state.global_step == 9


class Keeping(IterableDataset[dict[str, Tensor]]):
    """A stream that goes on from where it was read to, whoever asks again."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Any:
        samples = data()
        while self.next < len(samples):
            self.next += 1
            yield samples[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


@pytest.mark.parametrize("logging_steps", [1, 6, 100])
@pytest.mark.parametrize(
    ("workers", "shuffled"), [({}, False), ({}, True), ({"num_workers": 1, "persistent_workers": True}, False)]
)
def test_rollback_loses_no_sample_of_a_stream_that_keeps_its_place(
    tmp_path: Path, workers: dict[str, Any], shuffled: bool, logging_steps: int
) -> None:
    stream = ShuffleBuffer(Keeping(), 8) if shuffled else Keeping()
    seen: dict[int, list[int]] = {}  # by updates done: what counts of those made again is the last time

    class Noting(Poisoned):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            rows = [next(i for i, sample in enumerate(data()) if torch.equal(sample["x"], row)) for row in x]
            seen[trainer.state.global_step] = rows
            return super().forward(x, labels)

    options = {f"dataloader_{name}": value for name, value in workers.items()}
    trainer = make_trainer(
        tmp_path,
        Noting(),
        stream,
        nonfinite_policy="rollback",
        max_steps=18,
        logging_steps=logging_steps,
        loss_weight="samples",
        **options,
    )
    trainer.train()
    assert trainer.state.global_step == 18
    for epoch in range(2):
        ids = [sample for step in range(9 * epoch, 9 * epoch + 9) for sample in seen[step]]
        assert len(set(ids)) == len(ids) == 36
        assert POISON not in ids


@pytest.mark.parametrize("step", [2, 10])
def test_a_rollback_leaves_the_schedule_of_a_resumed_run_alone(tmp_path: Path, step: int) -> None:
    """Resumed before the first rewind, or between the two, of which each makes the run one update shorter."""
    options = {"lr_scheduler_type": "cosine", "save_strategy": "steps", "save_steps": 1, "loss_weight": "samples"}
    whole = run(tmp_path, "rollback", **options)
    parts = make_trainer(
        tmp_path / "parts",
        Poisoned(),
        data(),
        nonfinite_policy="rollback",
        num_train_epochs=2,
        logging_steps=5,
        **options,
    )
    parts.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert parts.state.global_step == parts.state.max_steps == whole.state.max_steps == 18
    assert torch.equal(weights(whole.model), weights(parts.model))


def test_rollback_to_where_a_callback_ended_an_epoch(tmp_path: Path) -> None:
    class EndsEpoch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = state.global_step == 3

    options = {"train_sampling_strategy": "sequential", "logging_steps": 3, "max_steps": 9, "num_train_epochs": 1}
    run(tmp_path, "rollback", callbacks=[EndsEpoch()], logging_strategy="steps", **options)
    rows = [(row.epoch, row.first) for row in read_rows(tmp_path / JOURNAL_FILE)]
    assert rows == [(0, 0), (0, 4), (0, 8), (1, 0), (1, 4), (1, 8), (1, 12), (1, 20), (1, 24)]


def test_rollback_with_an_own_loader_that_keeps_its_workers(tmp_path: Path) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(
                data(),  # type: ignore[arg-type]
                batch_size=4,
                shuffle=True,
                num_workers=1,
                persistent_workers=True,
                collate_fn=self.data_collator,
            )

    options = {"cls": Own, "loss_weight": "samples", "num_train_epochs": 2}
    often, seldom = (
        make_trainer(tmp_path, Poisoned(), data(), nonfinite_policy="rollback", logging_steps=number, **options)
        for number in (1, 100)
    )
    often.train()
    seldom.train()
    assert often.state.global_step == seldom.state.global_step == 18
    assert torch.equal(weights(often.model), weights(seldom.model))
