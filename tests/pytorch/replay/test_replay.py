"""One recorded update, made again bit for bit."""

from pathlib import Path

import pytest
from small_models import Classifier, Tagger, classification, losses, make_trainer, tagging

from paceline import EarlyStoppingCallback
from paceline.core.journal import JOURNAL_FILE, read_rows
from paceline.pytorch.replay.step import replay

DATA = classification(26)
OPTIONS = {
    "num_train_epochs": 3,
    "gradient_accumulation_steps": 2,
    "save_strategy": "steps",
    "save_steps": 5,
    "logging_steps": 4,
}


@pytest.mark.parametrize("step", [2, 5, 6, 12])
def test_a_step_comes_out_as_recorded(tmp_path: Path, step: int) -> None:
    trainer = make_trainer(tmp_path, Classifier(dropout=0.3), DATA, **OPTIONS)
    trainer.train()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    rows = read_rows(tmp_path / JOURNAL_FILE)
    again = make_trainer(tmp_path, Classifier(dropout=0.3), DATA, **OPTIONS)
    replayed = replay(again, step)
    assert replayed.is_exact
    assert replayed.loss == rows[step - 1].loss
    assert len(replayed.sample_ids) == rows[step - 1].num_samples
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    assert losses(trainer)


@pytest.mark.parametrize("step", [2, 3, 5])
def test_a_run_whose_loss_is_still_being_looked_at(tmp_path: Path, step: int) -> None:
    """Its evaluations see that samples are what counts before training does; a replay makes none of them."""
    ragged = [sample for sample in tagging(60) if (sample["labels"] != -100).any()]
    full = [{**sample, "labels": sample["input_ids"]} for sample in ragged]
    data = full[:20] + ragged[:4] + full[:4] + ragged[4:8] + ragged[:8]
    options = {**OPTIONS, "save_steps": 2, "train_sampling_strategy": "sequential", "num_train_epochs": 1}
    run = {**options, "eval_dataset": ragged, "eval_strategy": "steps", "eval_steps": 1}
    make_trainer(tmp_path, Tagger(per_sample=True, dropout=0.3), data, **run).train()
    assert replay(make_trainer(tmp_path, Tagger(per_sample=True, dropout=0.3), data, **options), step).is_exact


def test_every_sample_of_an_epoch_is_named_once(tmp_path: Path) -> None:
    make_trainer(tmp_path, Classifier(), DATA, **{**OPTIONS, "save_strategy": "no"}).train()
    ids: list[int] = []
    for step in range(1, 5):
        ids += replay(make_trainer(tmp_path, Classifier(), DATA, **OPTIONS), step).sample_ids
    assert sorted(ids) == list(range(26))


def test_a_changed_run_is_not_called_exact(tmp_path: Path) -> None:
    make_trainer(tmp_path, Classifier(), DATA, **OPTIONS).train()
    other = make_trainer(tmp_path, Classifier(), DATA, **{**OPTIONS, "learning_rate": 1e-2})
    assert not replay(other, 4).is_exact


def test_a_step_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Classifier(), DATA, **OPTIONS)
    trainer.train()
    with pytest.raises(ValueError, match="steps 1 to 12"):
        replay(trainer, 99)


def test_an_update_of_another_batch_size_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """The run went on with a smaller one from step 5."""
    smaller = {**OPTIONS, "per_device_train_batch_size": 2}
    make_trainer(tmp_path, Classifier(), DATA, **OPTIONS).train()
    make_trainer(tmp_path, Classifier(), DATA, **smaller).train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    with pytest.raises(ValueError, match=r"step=3 was made of 8 samples .* from 16 on.*per_device_train_batch_size"):
        replay(make_trainer(tmp_path, Classifier(), DATA, **smaller), 3)
    assert replay(make_trainer(tmp_path, Classifier(), DATA, **OPTIONS), 3).is_exact
    assert replay(make_trainer(tmp_path, Classifier(), DATA, **smaller), 7).is_exact


def test_trackers_keep_what_they_hold_and_early_stopping_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TensorBoard would hide the steps after the checkpoint; early stopping needs evaluations."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = {**OPTIONS, "logging_steps": 1, "report_to": "tensorboard", "logging_dir": str(tmp_path / "logs")}
    stop = EarlyStoppingCallback(early_stopping_patience=9)
    evaluations = {"eval_dataset": DATA, "eval_strategy": "epoch", "metric_for_best_model": "loss"}
    trainer = make_trainer(tmp_path / "run", Classifier(), DATA, callbacks=[stop], **evaluations, **options)
    trainer.train()

    def logged() -> list[int]:
        found = events.EventAccumulator(str(tmp_path / "logs")).Reload()
        return [event.step for event in found.Scalars("train/loss")]

    assert logged() == list(range(1, 13))
    callbacks, state = list(trainer.callback_handler.callbacks), stop.state_dict()
    caplog.clear()
    assert replay(trainer, 7).is_exact
    assert logged() == list(range(1, 13))
    assert (trainer.callback_handler.callbacks, stop.state_dict()) == (callbacks, state)
    assert "callbacks not included" not in caplog.text
