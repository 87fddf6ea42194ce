"""A loss or gradient that is not finite: counted, logged as what it is, and handled as the user chose."""

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow_but
from small_models import Classifier, Tagger, classification, losses, make_trainer, tagging, weights
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

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


@pytest.mark.parametrize("where", [0, POISON])
def test_skip_moves_the_schedule_on_whatever_the_optimizer(tmp_path: Path, where: int) -> None:
    """Also where the first update is bad; torch warns, elsewhere, of a schedule before the optimizer."""
    samples = data()
    samples[where] = samples[POISON]
    rates = {}
    for optim in ("adamw_torch_fused", "adamw_torch", "sgd"):
        options = {"optim": optim, "train_sampling_strategy": "sequential", "max_steps": 10}
        trainer = make_trainer(tmp_path / optim, Poisoned(), samples, nonfinite_policy="skip", **options)
        trainer.train()
        assert sum(row.get("nonfinite_steps", 0) for row in trainer.state.log_history) == 1 + (where == 0)
        rates[optim] = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
        assert trainer.lr_scheduler.last_epoch == 10
    assert rates["adamw_torch_fused"] == rates["adamw_torch"] == rates["sgd"]
    assert rates["sgd"] == pytest.approx([5e-5 * (1 - step / 10) for step in range(10)])


def test_skip_with_fp16_is_the_same_for_every_optimizer(tmp_path: Path) -> None:
    steps = []
    for optim in ("adamw_torch_fused", "adamw_torch", "sgd"):
        options = {"optim": optim, "fp16": True, "train_sampling_strategy": "sequential", "max_steps": 10}
        steps.append(run(tmp_path / optim, "skip", **options).lr_scheduler.last_epoch)
    assert steps == [9, 9, 9]


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


def test_rollback_on_a_disk_that_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The record of what was left out waits until it can be written; training goes on."""
    blocked = tmp_path / "skipped_samples.jsonl"
    blocked.mkdir()

    class Unblock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 8 and blocked.is_dir():
                blocked.rmdir()

    options = {"train_sampling_strategy": "sequential", "num_train_epochs": 1, "logging_steps": 1}
    trainer = run(tmp_path, "rollback", callbacks=[Unblock()], **options)
    assert trainer.state.global_step == 9
    assert json.loads(blocked.read_text())["sample_ids"] == [16, 17, 18, 19]
    assert caplog.text.count("skipped_samples.jsonl could not be written") == 1
    assert [row.step for row in read_rows(tmp_path / JOURNAL_FILE)] == list(range(1, 10))


class Remembers(Poisoned):
    """Its loss depends on what it has seen: in a buffer that no checkpoint holds, or in a plain attribute."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.attribute = where, torch.zeros(())
        self.register_buffer("unsaved", torch.zeros(()), persistent=False)
        self.register_buffer("queue", torch.zeros(1))  # grows
        self.inner = torch.nn.Module()
        self.inner.register_buffer("replaced", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        loss, logits = super().forward(x, labels)
        new = loss.detach()
        seen = 0.9 * self.unsaved + 0.1 * self.inner.replaced + self.queue.mean()
        if self.where == "attribute":
            self.attribute = self.attribute * 0.9 + new
        else:
            self.unsaved.mul_(0.9).add_(new)
            self.inner.replaced = self.inner.replaced * 0.9 + new
            self.queue = torch.cat([self.queue, new.reshape(1)])
        return loss * (1 + 0.1 * torch.tanh(seen + self.attribute)), logits


def test_rollback_rewinds_all_buffers(tmp_path: Path) -> None:
    options = {"lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", "logging_steps": 3}
    options |= {"loss_weight": "samples"}
    model, expected = Remembers("buffer"), Remembers("buffer")
    trainer = make_trainer(tmp_path, model, data(), nonfinite_policy="rollback", **options)
    trainer.train()
    assert trainer.state.global_step == 9
    make_trainer(tmp_path / "clean", expected, data()[:16] + data()[20:], **options).train()
    assert torch.equal(weights(model), weights(expected))
    assert all(map(torch.equal, model.buffers(), expected.buffers()))
    assert len(model.queue) == 10


def test_rollback_that_does_not_help_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"no good step between.*outside its parameters and buffers"):
        make_trainer(
            tmp_path, Remembers("attribute"), data(), nonfinite_policy="rollback", loss_weight="samples"
        ).train()


def test_rollback_of_bad_samples_side_by_side(tmp_path: Path) -> None:
    samples = data()
    for place in range(4, 36, 4):  # of each window but the first and the last: five in a row, a good one, two
        if place != 24:
            samples[place] = samples[POISON]
    options = {"train_sampling_strategy": "sequential", "logging_steps": 1}
    trainer = make_trainer(tmp_path, Poisoned(), samples, nonfinite_policy="rollback", **options)
    trainer.train()
    assert trainer.state.global_step == 3
    assert torch.isfinite(weights(trainer.model)).all()


class Counted(Poisoned):
    """With dropout, and inputs that are counted as tokens."""

    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        self.drop.p = 0.2


class Counts(TrainerCallback):
    """Has state of its own, as a callback that is saved."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.events: list[int] = []

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": list(self.steps)}}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)
        self.events.append(state.global_step)


@pytest.mark.parametrize("logging_steps", [1, 2, 3, 4])
def test_rollback_resumes_at_the_last_good_log_and_keeps_what_was_there(tmp_path: Path, logging_steps: int) -> None:
    """No update is made again that a log has shown to be good; all that a run records is that of the good updates."""
    options: dict[str, Any] = {
        "logging_steps": logging_steps,
        "eval_strategy": "steps",
        "eval_steps": logging_steps,
        "eval_dataset": DATA[:8],
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 7,
        "train_sampling_strategy": "sequential",
        "metric_for_best_model": "loss",
        "save_strategy": "steps",
        "save_steps": logging_steps,
        "load_best_model_at_end": True,
        "learning_rate": 0.01,
        "include_num_input_tokens_seen": "all",
    }
    counts, clean_counts = Counts(), Counts()
    trainer = make_trainer(
        tmp_path / "bad", Counted(), data(), nonfinite_policy="rollback", callbacks=[counts], **options
    )
    trainer.train()
    clean = make_trainer(tmp_path / "clean", Counted(), data()[:16] + data()[20:], callbacks=[clean_counts], **options)
    clean.train()
    bad = 5  # the update of the poison, found at the next log
    found = -(-bad // logging_steps) * logging_steps
    good = found - logging_steps
    assert counts.events == [*range(1, found + 1), *range(good + 1, 10)]
    assert torch.equal(weights(trainer.model), weights(clean.model))
    assert trainer.lr_scheduler.last_epoch == clean.lr_scheduler.last_epoch == 9
    ours, theirs = trainer.state, clean.state
    names = ("best_metric", "best_global_step", "global_step", "max_steps", "num_input_tokens_seen", "total_flos")
    assert int(ours.num_input_tokens_seen) == 9 * 4 * 8
    assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
    kept = ("step", "loss", "eval_loss", "learning_rate", "grad_norm")
    rows = [[{key: row[key] for key in kept if key in row} for row in state.log_history] for state in (ours, theirs)]
    assert rows[0] == rows[1]
    saved = [sorted(path.name for path in (tmp_path / name).glob("checkpoint-*")) for name in ("bad", "clean")]
    assert saved[0] == saved[1]


# ---- rollback with every kind of data


class Recording(Classifier):
    """Keeps the samples of each micro-batch that it is trained on."""

    def __init__(self, is_poisoned: bool) -> None:
        super().__init__()
        self.is_poisoned = is_poisoned
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if self.training:
            self.seen.append(x.clone())
        loss, logits = super().forward(x.clamp(max=10), labels)
        return loss * float("nan") if self.is_poisoned and bool((x == 100).any()) else loss, logits


class Stream(IterableDataset[Any]):
    """Without a state of its own; workers share it out."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from data()[start::step]


def without_poison(model: Recording, accumulation: int) -> list[dict[str, Tensor]]:
    """The samples that a model saw, in this order, less the windows that hold the poison."""
    known = {tuple(sample["x"].tolist()): sample for sample in data()}
    windows = [torch.cat(model.seen[at : at + accumulation]) for at in range(0, len(model.seen), accumulation)]
    return [known[tuple(row.tolist())] for window in windows if not bool((window == 100).any()) for row in window]


@pytest.mark.parametrize("schedule", ["constant", "constant_with_warmup"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("num_workers", slow_but([0], [0, 2]))
@pytest.mark.parametrize("kind", ["list", "stream"])
def test_rollback_is_as_if_the_window_had_not_been(
    tmp_path: Path, kind: str, num_workers: int, accumulation: int, schedule: str
) -> None:
    options: dict[str, Any] = {
        "gradient_accumulation_steps": accumulation,
        "lr_scheduler_type": schedule,
        "warmup_steps": 3 if schedule != "constant" else 0,
        "loss_weight": "samples",
        "logging_steps": 2,
    }
    data_options = {"dataloader_num_workers": num_workers, "max_steps": 10 // accumulation}

    def make(name: str, model: Recording, **more: Any) -> Any:
        train = Stream() if kind == "stream" else data()
        trainer = make_trainer(tmp_path / name, model, train, **options, **data_options, **more)
        trainer.train()
        return trainer

    recorded, model, expected = Recording(False), Recording(True), Recording(False)
    make("recorded", recorded)
    data_options["max_steps"] -= 1
    trainer = make("rollback", model, nonfinite_policy="rollback")
    clean = without_poison(recorded, accumulation)
    assert len(clean) == 40 - 4 * accumulation
    make_trainer(tmp_path / "clean", expected, clean, train_sampling_strategy="sequential", **options).train()
    assert torch.equal(weights(model), weights(expected))
    assert trainer.state.global_step == data_options["max_steps"]


class StopsAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", slow_but([9], [3, 6, 9, 13]))
def test_a_run_that_was_rolled_back_resumes_to_the_bit(tmp_path: Path, stop: int, num_workers: int) -> None:
    """Stopped before the poison's turn or after it, in the first epoch or the second."""
    options = {
        "nonfinite_policy": "rollback",
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 1,
        "num_train_epochs": 2,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 4,
        "dataloader_num_workers": num_workers,
    }
    whole, parts = Poisoned(), Poisoned()
    undisturbed = make_trainer(tmp_path / "whole", whole, data(), **options)
    undisturbed.train()
    make_trainer(tmp_path / "parts", Poisoned(), data(), callbacks=[StopsAt(stop)], **options).train()
    resumed = make_trainer(tmp_path / "parts", parts, data(), **options)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(whole), weights(parts))
    assert resumed.state.global_step == undisturbed.state.global_step == 18
    assert losses(resumed) == losses(undisturbed)
    kept = [(tmp_path / name / "skipped_samples.jsonl").read_text() for name in ("whole", "parts")]
    assert kept[0] == kept[1]
    assert read_rows(tmp_path / "whole" / JOURNAL_FILE) == read_rows(tmp_path / "parts" / JOURNAL_FILE)


class PoisonedTagger(Tagger):
    """A mean over samples, with dropout; not finite for a sample that begins with 10."""

    def __init__(self) -> None:
        super().__init__(per_sample=True, dropout=0.2)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = super().forward(input_ids, labels)
        return {**outputs, "loss": outputs["loss"] * math.nan} if (input_ids[:, 0] == 10).any() else outputs


def test_rollback_forgets_what_the_bad_update_told_of_the_loss(tmp_path: Path) -> None:
    """That it is a mean over samples shows in the second update, which is bad, and again in the third."""
    ragged = [sample for sample in tagging(60) if 0 < int((sample["labels"] != -100).sum()) < 7]
    for sample in ragged:
        sample["input_ids"][0] %= 10
    full = [{**sample, "labels": sample["input_ids"]} for sample in ragged]
    bad = {**full[0], "input_ids": torch.full((7,), 10)}
    window = [*full[:2], *ragged[:2]]
    good, poisoned = [*full[4:8], *window, *window], [*full[4:8], bad, full[1], *ragged[8:10], *window, *window]
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "lr_scheduler_type": "constant"}
    found = []
    for samples, policy in ((poisoned, "rollback"), (good, "warn")):
        trainer = make_trainer(
            tmp_path / policy,
            PoisonedTagger(),
            samples,
            train_sampling_strategy="sequential",
            nonfinite_policy=policy,
            **options,
        )
        trainer.train()
        found.append(weights(trainer.model))
    assert trainer.state.global_step == 3
    assert torch.equal(*found)


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


@pytest.mark.slow
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
