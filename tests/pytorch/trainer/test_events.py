"""The events of a run, in their order, with what they carry."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_events import EVENTS_OF_TWO_STEPS, TWO_STEPS, Recorder
from small_models import Classifier, classification, losses, make_trainer

from paceline import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerControl

DATA = classification(16)


def test_the_order_of_events(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = make_trainer(
        tmp_path,
        Classifier(),
        DATA,
        **TWO_STEPS,
        eval_dataset=DATA[:4],
        callbacks=[recorder],
    )
    trainer.train()
    assert recorder.events == EVENTS_OF_TWO_STEPS


def test_loss_inputs_and_outputs_on_request(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Curious(TrainerCallback):
        wants = frozenset({"loss", "inputs", "outputs"})

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append({key: kwargs[key] for key in ("loss", "inputs", "outputs")})

    trainer = make_trainer(tmp_path, Classifier(), DATA, gradient_accumulation_steps=2, callbacks=[Curious()])
    trainer.train()
    assert len(seen) == 2
    assert [float(step["loss"]) for step in seen] == pytest.approx(losses(trainer))
    assert [len(step["inputs"]) for step in seen] == [2, 2]
    assert seen[0]["inputs"][0]["x"].shape == (4, 8)
    assert seen[0]["outputs"][0][1].shape == (4, 4)


def test_inputs_are_whole_and_outputs_are_theirs(tmp_path: Path) -> None:
    """Though compute_loss pops the labels, and a micro-batch that tells more about the loss is done first."""

    class Popping(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            labels = inputs.pop("labels")
            logits = model(**inputs)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return (loss, {"logits": logits}) if return_outputs else loss

    class Doubling(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: Any) -> Any:
            return x * self.scale

    class Curious(TrainerCallback):
        wants = frozenset({"inputs", "outputs"})

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for inputs, outputs in zip(kwargs["inputs"], kwargs["outputs"], strict=True):
                assert sorted(inputs) == ["labels", "x"]
                torch.testing.assert_close(inputs["x"], outputs)
            seen.append(len(kwargs["inputs"]))

    class CuriousOfInputs(TrainerCallback):
        wants = frozenset({"inputs"})

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(sorted(kwargs["inputs"][0]))

    data = [{"x": torch.randn(5, 3), "labels": torch.tensor([0, 1, 2, 1, 0])} for _ in range(16)]
    for sample in data[4:]:
        sample["labels"][3:] = -100  # ragged: these micro-batches tell more
    for curious in (Curious(), CuriousOfInputs()):
        seen: list[Any] = []
        make_trainer(
            tmp_path,
            Doubling(),
            data,
            cls=Popping,
            gradient_accumulation_steps=2,
            learning_rate=0.0,
            train_sampling_strategy="sequential",
            callbacks=[curious],
        ).train()
        assert seen == ([2, 2] if isinstance(curious, Curious) else [["labels", "x"]] * 2)


def test_early_stopping_and_the_best_model(tmp_path: Path) -> None:
    values = iter([0.5, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    trainer = make_trainer(
        tmp_path,
        Classifier(),
        DATA,
        num_train_epochs=6,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=True,
        eval_dataset=DATA[:4],
        compute_metrics=lambda p: {"score": next(values)},
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    trainer.train()
    assert trainer.state.global_step == 16  # best at 8, stopped after two worse
    assert trainer.state.best_metric == 0.9
    best = Path(trainer.state.best_model_checkpoint or "")
    assert best.name == "checkpoint-8"
    assert best.is_dir()
    fresh = Classifier(seed=3)
    Trainer(model=fresh, args=trainer.args)._load_from_checkpoint(str(best))
    assert torch.equal(fresh.first.weight, trainer.model.first.weight)


def test_a_callback_evaluates_the_training_data_and_returns_a_copy_of_the_control(tmp_path: Path) -> None:
    """The usual way to log training metrics: the evaluation resets the flags, and the copy brings them back."""

    class Train(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if not control.should_evaluate:
                return None
            kept = copy.deepcopy(control)
            trainer.evaluate(DATA, metric_key_prefix="train")
            return kept

    kinds = {"eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 3}
    trainer = make_trainer(
        tmp_path, Classifier(), DATA, **kinds, eval_dataset=DATA[:4], callbacks=[Train()], load_best_model_at_end=True
    )
    trainer.train()
    rows = trainer.state.log_history
    assert [row["step"] for row in rows if "eval_loss" in row] == [4, 8, 12]
    assert sum("train_loss" in row and "train_runtime" in row for row in rows) >= 3
    assert trainer.state.best_model_checkpoint is not None


def test_a_returned_control_stops_a_run_that_logs_at_that_step(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return TrainerControl(should_training_stop=True, should_log=True) if state.global_step == 2 else None

    trainer = make_trainer(tmp_path, Classifier(), DATA, callbacks=[Stop()])
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("options", [{}, {"eval_delay": 5}])
def test_a_run_without_a_best_model_warns_at_its_end(
    tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(
        tmp_path,
        Classifier(),
        DATA,
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="score",
        eval_dataset=DATA[:4],
        compute_metrics=lambda p: {"score": float("nan")},
        **options,
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint is None
    warned = "no evaluation gave a number for metric_for_best_model='score', and the weights of the last step are kept"
    assert caplog.text.count(warned) == 1


def test_save_strategy_best(tmp_path: Path) -> None:
    values = iter([0.5, 0.4, 0.9, 0.8])
    trainer = make_trainer(
        tmp_path,
        Classifier(),
        DATA,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="best",
        metric_for_best_model="score",
        greater_is_better=True,
        eval_dataset=DATA[:4],
        compute_metrics=lambda p: {"score": next(values)},
    )
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-3"]


def test_a_missing_metric_lists_those_there_are(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        Classifier(),
        DATA,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="f1",
        eval_dataset=DATA[:4],
    )
    with pytest.raises(KeyError, match="eval_loss"):
        trainer.train()


def test_several_eval_sets(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        Classifier(),
        DATA,
        eval_strategy="epoch",
        eval_dataset={"left": DATA[:4], "right": DATA[4:]},
        metric_for_best_model="eval_right_loss",
    )
    trainer.train()
    metrics = trainer.evaluate()
    assert {"eval_left_loss", "eval_right_loss"} <= metrics.keys()
    assert trainer.state.best_metric == metrics["eval_right_loss"]
    assert trainer.evaluate("left")["eval_loss"] == metrics["eval_left_loss"]


def test_streaming_metrics(tmp_path: Path) -> None:
    class Accuracy:
        def __init__(self) -> None:
            self.right = self.all = 0

        def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
            self.right += int((prediction.predictions.argmax(-1) == prediction.label_ids).sum())
            self.all += len(prediction.label_ids)
            return {"accuracy": self.right / self.all} if compute_result else {}

    whole = make_trainer(
        tmp_path,
        Classifier(),
        eval_dataset=DATA,
        compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(-1) == p.label_ids).mean()},
        per_device_eval_batch_size=5,
    ).evaluate()
    streamed = make_trainer(
        tmp_path,
        Classifier(),
        eval_dataset=DATA,
        compute_metrics=Accuracy(),
        batch_eval_metrics=True,
        per_device_eval_batch_size=5,
    ).evaluate()
    assert streamed["eval_accuracy"] == whole["eval_accuracy"]


def test_metrics_by_batch_get_tensors_as_in_the_reference(tmp_path: Path) -> None:
    seen: list[Any] = []

    def metrics(prediction: Any, compute_result: bool) -> dict[str, float]:
        right = prediction.predictions.argmax(dim=-1).eq(prediction.label_ids)
        seen.append((len(right), prediction.losses.shape, prediction.inputs["x"].shape))
        return {"accuracy": right.float().mean()} if compute_result else {}

    make_trainer(
        tmp_path,
        Classifier(),
        eval_dataset=DATA[:10],
        compute_metrics=metrics,
        batch_eval_metrics=True,
        include_for_metrics=["inputs", "loss"],
        per_device_eval_batch_size=4,
    ).evaluate()
    assert seen == [(size, (size,), (size, 8)) for size in (4, 4, 2)]


def test_the_kept_rows_of_metrics(tmp_path: Path) -> None:
    shapes = {}

    def metrics(prediction: Any) -> dict[str, float]:
        shapes["inputs"], shapes["losses"] = prediction.inputs["x"].shape, prediction.losses.shape
        shapes["predictions"] = prediction.predictions.shape
        return {}

    make_trainer(
        tmp_path,
        Classifier(),
        eval_dataset=DATA[:10],
        compute_metrics=metrics,
        include_for_metrics=["inputs", "loss"],
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        per_device_eval_batch_size=4,
    ).evaluate()
    assert shapes == {"inputs": (10, 8), "losses": (10,), "predictions": (10,)}


def test_a_call_event_of_a_library_is_asked_for_the_events_of_the_reference_only(tmp_path: Path) -> None:
    """Setfit's asks every callback for the method of the event, whether it has one or not."""
    trainer = make_trainer(tmp_path, Classifier(), classification(16), max_steps=2, save_strategy="no")
    handler = trainer.callback_handler

    def call_event(event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        for callback in handler.callbacks:
            getattr(callback, event)(args, state, control, **handler.kwargs, **kwargs)
        return control

    handler.call_event = call_event  # type: ignore[method-assign]
    trainer.train()
    assert (tmp_path / "report.html").exists()


def test_a_callback_that_fails_at_the_model_card_costs_the_training_no_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    class Failing(TrainerCallback):
        def on_model_card(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("no room for the card")

    class Ending(TrainerCallback):
        def on_model_card(self, *args: Any, make_card: Any, **kwargs: Any) -> None:
            seen.append(make_card()[:1])

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            seen.append("end")

    callbacks = [Failing(), Ending()]
    output = make_trainer(tmp_path, Classifier(), classification(8), callbacks=callbacks, max_steps=1).train()
    assert output.global_step == 1
    assert seen == ["#", "end"]
    assert "Failing failed in on_model_card" in caplog.text
    assert "no room for the card" in caplog.text
