"""Every method that a subclass may override is on the real path: its own version is what runs."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, losses, make_trainer, weights
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

from paceline import Trainer, TrainerCallback
from paceline.pytorch.model.outputs import ModelOutputError

DATA = classification(24)

TRAIN = {
    # documented ones
    "get_train_dataloader", "get_eval_dataloader", "create_optimizer_and_scheduler", "create_optimizer",
    "create_scheduler", "get_optimizer_cls_and_kwargs", "get_decay_parameter_names", "compute_loss", "training_step",
    "prediction_step", "evaluation_loop", "evaluate", "log", "save_model", "compute_loss_context_manager",
    "get_batch_samples", "store_flos", "is_world_process_zero", "is_local_process_zero", "call_model_init",
    # private ones that public subclasses override
    "_get_train_sampler", "_get_eval_sampler", "_prepare_inputs", "_prepare_input", "_get_num_items_in_batch",
    "_evaluate", "_save_checkpoint", "_save", "_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler",
    "_load_best_model", "_wrap_model", "_maybe_log_save_evaluate", "_load_from_checkpoint", "_get_output_dir",
}  # fmt: skip
RESUME = {"_load_optimizer_and_scheduler", "_load_rng_state", "_load_scaler", "_load_from_checkpoint"}
PREDICT = {"predict", "get_test_dataloader", "evaluation_loop", "prediction_step", "compute_loss", "_prepare_inputs"}
COLUMNS = {"_set_signature_columns_if_needed", "_remove_unused_columns", "_get_collator_with_removed_columns"}


def counting(names: set[str]) -> tuple[type[Trainer], dict[str, int]]:
    """A subclass that counts the calls of each method and goes on with super()."""
    calls = dict.fromkeys(names, 0)

    def make(name: str) -> Callable[..., Any]:
        def method(self: Trainer, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return getattr(super(cls, self), name)(*args, **kwargs)

        return method

    body: dict[str, Any] = {}
    for name in names:
        is_static = isinstance(inspect.getattr_static(Trainer, name), staticmethod)
        body[name] = make(name)
        if is_static:

            def static(*args: Any, _name: str = name, **kwargs: Any) -> Any:
                calls[_name] += 1
                return getattr(Trainer, _name)(*args, **kwargs)

            body[name] = staticmethod(static)
    cls = type("Counting", (Trainer,), body)
    return cls, calls


def options(**more: Any) -> dict[str, Any]:
    return {
        "eval_dataset": DATA[:8],
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "num_train_epochs": 2,
        "load_best_model_at_end": True,
        **more,
    }


def test_what_train_calls(tmp_path: Path) -> None:
    cls, calls = counting(TRAIN)
    trainer = make_trainer(tmp_path, None, DATA, cls=cls, model_init=Classifier, **options())
    trainer.train()
    plain = make_trainer(tmp_path / "plain", None, DATA, model_init=Classifier, **options())
    plain.train()
    assert {name for name, number in calls.items() if number == 0} == set()
    assert torch.equal(weights(trainer.model), weights(plain.model))
    for name in ("training_step", "compute_loss"):
        assert calls[name] >= 12, name
    assert calls["_save_checkpoint"] == calls["_evaluate"] == calls["evaluate"] == 2
    assert calls["create_optimizer"] == calls["create_scheduler"] == 1


def test_what_a_resume_calls(tmp_path: Path) -> None:
    cls, calls = counting(RESUME)
    make_trainer(tmp_path, Classifier(), DATA, **options(load_best_model_at_end=False, fp16=True)).train()
    trainer = make_trainer(tmp_path, Classifier(), DATA, cls=cls, **options(load_best_model_at_end=False, fp16=True))
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert calls == dict.fromkeys(RESUME, 1)


def test_what_predict_calls(tmp_path: Path) -> None:
    cls, calls = counting(PREDICT)
    make_trainer(tmp_path, Classifier(), cls=cls).predict(DATA)
    assert {name for name, number in calls.items() if number == 0} == set()


def test_what_chooses_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"x": [s["x"].tolist() for s in DATA], "labels": [int(s["labels"]) for s in DATA], "text": ["a"] * len(DATA)}
    cls, calls = counting(COLUMNS)
    make_trainer(tmp_path, Classifier(), datasets.Dataset.from_dict(rows), cls=cls).train()
    assert {name for name, number in calls.items() if number == 0} == set()


def test_an_own_optimizer_and_schedule(tmp_path: Path) -> None:
    class Own(Trainer):
        def create_optimizer(self, model: nn.Module | None = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1 / num_training_steps, 100)
            return self.lr_scheduler

    trainer = make_trainer(tmp_path, Classifier(), DATA, cls=Own)
    trainer.train()
    assert type(trainer.optimizer) is torch.optim.SGD
    assert trainer.state.log_history[0]["learning_rate"] == pytest.approx(0.25 / 6)


def test_own_both_at_once(tmp_path: Path) -> None:
    class Own(Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    trainer = make_trainer(tmp_path, Classifier(), DATA, cls=Own)
    trainer.train()
    assert [row["learning_rate"] for row in trainer.state.log_history if "loss" in row] == pytest.approx(
        [0.25 / n for n in range(1, 7)]
    )


def test_an_own_loader(tmp_path: Path) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=6, collate_fn=self.data_collator, shuffle=False)

    trainer = make_trainer(tmp_path, Classifier(), DATA, cls=Own, num_train_epochs=2)
    trainer.train()
    assert trainer.state.global_step == 8


def test_an_own_loader_resumes(tmp_path: Path) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            generator = torch.Generator().manual_seed(3)
            return DataLoader(
                self.train_dataset, batch_size=6, collate_fn=self.data_collator, shuffle=True, generator=generator
            )

    class StopAt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    more: dict[str, Any] = {"cls": Own, "save_strategy": "steps", "save_steps": 1}
    whole = make_trainer(tmp_path / "whole", Classifier(), DATA, **more)
    whole.train()
    make_trainer(tmp_path / "parts", Classifier(), DATA, callbacks=[StopAt()], **more).train()
    parts = make_trainer(tmp_path / "parts", Classifier(), DATA, **more)
    parts.train(resume_from_checkpoint=True)
    assert torch.equal(weights(parts.model), weights(whole.model))


@pytest.mark.parametrize("with_argument", [False, True])
def test_an_own_sampler(tmp_path: Path, with_argument: bool) -> None:
    class Old(Trainer):
        def _get_train_sampler(self) -> Any:  # type: ignore[override]
            return SequentialSampler(self.train_dataset)

    class New(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(train_dataset)

    trainer = make_trainer(tmp_path, Classifier(), DATA, cls=New if with_argument else Old)
    trainer.train()
    expected = make_trainer(tmp_path, Classifier(), DATA, train_sampling_strategy="sequential")
    expected.train()
    assert losses(trainer) == losses(expected)


def test_an_own_training_step_owns_its_scaling(tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs)) / self.args.gradient_accumulation_steps
            loss.backward()
            return loss.detach()

    own = make_trainer(tmp_path, Classifier(), DATA, cls=Own, gradient_accumulation_steps=2)
    own.train()
    plain = make_trainer(tmp_path, Classifier(), DATA, gradient_accumulation_steps=2)
    plain.train()
    assert losses(own) == pytest.approx(losses(plain))
    torch.testing.assert_close(weights(own.model), weights(plain.model))


def test_a_training_step_of_older_times(tmp_path: Path) -> None:
    class Old(Trainer):
        def training_step(self, model: nn.Module, inputs: Any) -> Any:  # type: ignore[override]
            return super().training_step(model, inputs)

    old = make_trainer(tmp_path, Classifier(), DATA, cls=Old, gradient_accumulation_steps=2)
    old.train()
    plain = make_trainer(tmp_path, Classifier(), DATA, gradient_accumulation_steps=2)
    plain.train()
    assert losses(old) == losses(plain)


def test_an_own_loss_is_one_number(tmp_path: Path) -> None:
    found = []
    wrong = [lambda loss: float(loss.detach()), lambda loss: loss.expand(2), lambda loss: loss.detach().long()]
    for change in (lambda loss: loss, lambda loss: loss.reshape(1), *wrong):

        class Own(Trainer):
            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, change: Any = change, **kwargs: Any
            ) -> Any:
                loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
                return (change(loss), outputs) if return_outputs else change(loss)

        trainer = make_trainer(tmp_path, Classifier(), DATA, cls=Own, max_steps=2)
        if change not in wrong:
            trainer.train()
            found.append(losses(trainer))
            continue
        with pytest.raises(ModelOutputError, match=r"compute_loss returned .*; a loss must be a tensor of one number"):
            trainer.train()
    assert found[0] == found[1]


def test_inputs_can_be_prepared(tmp_path: Path) -> None:
    class Own(Trainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            inputs = super()._prepare_inputs(inputs)
            return {**inputs, "x": torch.zeros_like(inputs["x"])}

    zeros = [{**sample, "x": torch.zeros_like(sample["x"])} for sample in DATA]
    own = make_trainer(tmp_path, Classifier(), DATA, cls=Own, eval_dataset=DATA)
    expected = make_trainer(tmp_path, Classifier(), zeros, eval_dataset=zeros)
    own.train()
    expected.train()
    assert losses(own) == losses(expected)
    assert own.evaluate()["eval_loss"] == expected.evaluate()["eval_loss"]


def test_rows_can_be_changed_on_their_way_to_the_log(tmp_path: Path) -> None:
    class Own(Trainer):
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            if "loss" in logs:
                logs["perplexity"] = 2.0 ** logs["loss"]
            super().log(logs, start_time)

    class OldLog(Trainer):
        def log(self, logs: dict[str, float]) -> None:  # type: ignore[override]
            super().log({**logs, "old": 1.0})

    trainer = make_trainer(tmp_path, Classifier(), DATA, cls=Own)
    trainer.train()
    assert all("perplexity" in row for row in trainer.state.log_history if "loss" in row)
    old = make_trainer(tmp_path, Classifier(), DATA, cls=OldLog, eval_strategy="epoch", eval_dataset=DATA)
    old.train()
    assert all(row["old"] == 1.0 for row in old.state.log_history)


def test_an_own_evaluation_decides(tmp_path: Path) -> None:
    scores = iter([0.1, 0.9, 0.5])

    class Own(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            metrics = super().evaluate(*args, **kwargs)
            metrics["eval_score"] = next(scores)
            return metrics

    trainer = make_trainer(
        tmp_path, Classifier(), DATA, cls=Own, **options(num_train_epochs=3, metric_for_best_model="score")
    )
    trainer.train()
    assert trainer.state.best_metric == 0.9
    assert trainer.state.best_global_step == 12


def test_an_own_prediction_step(tmp_path: Path) -> None:
    class Own(Trainer):
        def prediction_step(
            self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
        ) -> Any:
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad():
                loss, logits = model(**inputs)
            return loss * 0 + 2, logits.argmax(-1), inputs["labels"]

    output = make_trainer(tmp_path, Classifier(), cls=Own).predict(DATA)
    assert output.predictions.shape == (24,)
    assert output.metrics["test_loss"] == 2


def test_more_files_in_a_checkpoint(tmp_path: Path) -> None:
    class Own(Trainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            assert output_dir is not None
            Path(output_dir, "extra.txt").write_text("extra")

        def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            assert (folder / "extra.txt").is_file()  # published, and complete
            (folder / "later.txt").write_text("later")

    make_trainer(tmp_path, Classifier(), DATA, cls=Own, **options(load_best_model_at_end=False)).train()
    trainer = make_trainer(tmp_path, Classifier(), DATA, cls=Own, **options(load_best_model_at_end=False))
    trainer.train(resume_from_checkpoint=True)
    assert (tmp_path / "checkpoint-12" / "later.txt").is_file()
    trainer.save_model(str(tmp_path / "final"))
    assert (tmp_path / "final" / "extra.txt").is_file()


def test_an_attribute_of_the_instance_counts(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Classifier(), DATA, eval_dataset=DATA)
    calls = {"compute_loss": 0, "log": 0, "evaluate": 0}

    def wrapped(name: str) -> Callable[..., Any]:
        method = getattr(trainer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return method(*args, **kwargs)

        return call

    for name in calls:
        setattr(trainer, name, wrapped(name))
    trainer.args.eval_strategy = "epoch"
    trainer.train()
    assert calls["compute_loss"] >= 6
    assert calls["log"] == 8
    assert calls["evaluate"] == 1
