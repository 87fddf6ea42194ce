"""Private methods of the Hugging Face Trainer: on the class, called where that does no harm, told of where replaced."""

import functools
import inspect
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, losses, make_trainer
from torch import nn

from paceline import ExportableState, Trainer, TrainerCallback
from paceline.compat.private_names import UNCALLED


def warnings_of(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if "never called" in record.getMessage()]


# ---- named on the class


def test_a_wrapper_of_a_private_method_is_made_and_told_of(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    original = Trainer._inner_training_loop

    @functools.wraps(original)
    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    assert patched.__module__ == original.__module__  # so the module tells nothing
    monkeypatch.setattr(Trainer, "_inner_training_loop", patched)
    make_trainer(tmp_path, Classifier(), classification(8)).train()
    assert warnings_of(caplog) == [
        f"Trainer._inner_training_loop is never called by paceline: {UNCALLED['_inner_training_loop']}."
    ]


def test_a_method_that_is_replaced_after_construction_is_told_of_when_training_starts(
    tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    class Own(Trainer):
        def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    trainer = make_trainer(tmp_path, Classifier(), classification(8), cls=Own)
    assert len(warnings_of(caplog)) == 1
    monkeypatch.setattr(Trainer, "_rotate_checkpoints", lambda self, *args, **kwargs: None)
    trainer._clip_grad_norm = lambda model: None  # type: ignore[method-assign, assignment]
    trainer.train()
    told = warnings_of(caplog)
    assert len(told) == 3
    assert "Trainer._rotate_checkpoints" in told[2]
    assert "Own object._clip_grad_norm" in told[1]


def test_nothing_is_told_where_nothing_was_replaced(tmp_path: Path, caplog: Any) -> None:
    make_trainer(tmp_path, Classifier(), classification(8)).train()
    assert not warnings_of(caplog)


def test_a_method_that_a_run_calls_acts_where_it_is_replaced_on_the_class(tmp_path: Path, monkeypatch: Any) -> None:
    """As one of a subclass does: it is called, and a checkpoint is whole when an own save returns."""
    save, seen = Trainer._save_checkpoint, []

    @functools.wraps(save)
    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        save(self, *args, **kwargs)
        seen.append((tmp_path / f"checkpoint-{self.state.global_step}" / "manifest.json").is_file())

    monkeypatch.setattr(Trainer, "_save_checkpoint", patched)
    monkeypatch.setattr(Trainer, "floating_point_ops", lambda self, inputs: 1000)
    trainer = make_trainer(tmp_path, Classifier(), classification(8), save_strategy="steps", save_steps=1)
    trainer.train()
    assert seen == [True, True]
    assert trainer.state.total_flos == 2000


# ---- called by copies of the reference's methods


class OwnTrain(Trainer):
    """`train` as libraries write it anew."""

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **kwargs: Any) -> Any:
        self.is_in_train = True
        self._memory_tracker.start()
        self._hp_search_setup(trial)
        return self._inner_training_loop(
            batch_size=self._train_batch_size, args=self.args, resume_from_checkpoint=resume_from_checkpoint
        )


def test_an_own_train_comes_to_the_loop(tmp_path: Path) -> None:
    own, plain = (make_trainer(tmp_path, Classifier(), classification(24), cls=cls) for cls in (OwnTrain, Trainer))
    assert own.train().global_step == plain.train().global_step
    assert losses(own) == losses(plain)
    with pytest.raises(ValueError, match=r"set trainer\.args first"):
        own._inner_training_loop(args=plain.args)
    own._inner_training_loop(batch_size=8)
    assert own.state.global_step == 3


def test_warnings_after_loading(tmp_path: Path, caplog: Any) -> None:
    trainer = make_trainer(tmp_path, Classifier(), classification(8))
    trainer._issue_warnings_after_load(SimpleNamespace(missing_keys=[], unexpected_keys=[]))
    assert not caplog.records
    trainer._issue_warnings_after_load(SimpleNamespace(missing_keys=["head"], unexpected_keys=["tail"]))
    assert [record.getMessage() for record in caplog.records] == [
        "There were missing keys in the checkpoint model loaded: ['head'].",
        "There were unexpected keys in the checkpoint model loaded: ['tail'].",
    ]
    tied: list[bool] = []
    trainer.model._keys_to_ignore_on_save = ["head"]  # type: ignore[assignment]
    trainer.model.tie_weights = lambda: tied.append(True)  # type: ignore[assignment]
    caplog.clear()
    trainer._issue_warnings_after_load(SimpleNamespace(missing_keys=["head"], unexpected_keys=[]))
    assert tied == [True]
    assert not caplog.records


def test_helpers_of_a_step_work_within_a_run(tmp_path: Path) -> None:
    class Own(Trainer):
        norms: list[float] = []

        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            context, inputs = self._prepare_context_parallel_inputs(model, self._prepare_inputs(inputs))
            with context(), self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            assert not any((self.use_apex, self.use_cuda_amp, self.do_grad_scaling))
            assert self.scaler is None
            self.accelerator.backward(loss)
            assert not self._has_mixed_mesh_grads(model)
            self.norms.append(float(self._get_grad_norm(model)))
            self.norms.append(float(self._clip_grad_norm(model)))
            self._track_num_input_tokens(inputs)
            with self._defer_fsdp_gradient_reduction():
                pass
            return loss.detach()

    trainer = make_trainer(tmp_path, Classifier(), classification(8), cls=Own, max_grad_norm=0.01)
    trainer.train()
    assert Own.norms[0] == pytest.approx(Own.norms[1])
    assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(0.01, rel=1e-3)  # clipped before
    assert trainer._get_grad_norm(trainer.model, 3.0) == 3.0


def test_helpers_of_checkpoints_and_evaluation(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, Classifier(), classification(24), save_strategy="steps", save_steps=2, save_total_limit=2
    )
    trainer.train()
    names = [Path(path).name for path in trainer._sorted_checkpoints()]
    assert names == ["checkpoint-4", "checkpoint-6"]
    trainer.args.save_total_limit = 1
    trainer._rotate_checkpoints(output_dir=str(tmp_path))
    assert [Path(path).name for path in trainer._sorted_checkpoints(output_dir=str(tmp_path))] == ["checkpoint-6"]
    trainer._tune_save_checkpoint(str(tmp_path / "tune"))
    files = {path.name for path in (tmp_path / "tune" / "checkpoint-6").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= files
    trainer._save_tpu(str(tmp_path / "whole"))
    assert (tmp_path / "whole" / "model.safetensors").is_file()
    values = {"a": torch.arange(3), "b": torch.tensor(1.0)}
    assert trainer._nested_gather(values) is values
    assert trainer._nested_gather(None) is None
    assert torch.equal(trainer._pad_across_processes(torch.ones(2, 3)), torch.ones(2, 3))
    trainer._validate_args()
    trainer._report_to_hp_search(None, 1, {})
    trainer.create_accelerator_and_postprocess()
    assert trainer.accelerator.num_processes == 1
    other = nn.Linear(2, 2)
    trainer._move_model_to_device(other, torch.device("cpu"))
    metrics: dict[str, float] = {}
    trainer._memory_tracker.stop_and_update_metrics(metrics)
    assert metrics == {}
    assert trainer.is_local_master()
    assert trainer.is_world_master()


@pytest.mark.filterwarnings("ignore")
def test_an_own_evaluate_measures_its_memory(tmp_path: Path) -> None:
    class Own(Trainer):
        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
            self._memory_tracker.start()
            output = self.evaluation_loop(self.get_eval_dataloader(eval_dataset), "Evaluation", True)
            self._memory_tracker.stop_and_update_metrics(output.metrics)
            return output.metrics

    data = classification(8)
    trainer = make_trainer(tmp_path, Classifier(), data, cls=Own, eval_dataset=data, skip_memory_metrics=False)
    assert "eval_mem_cpu_alloc_delta" in trainer.evaluate()


def test_the_states_of_callbacks_are_given_back_where_that_is_asked(tmp_path: Path) -> None:
    class Counts(TrainerCallback, ExportableState):
        def __init__(self, number: int = 0) -> None:
            self.number = number

        def state(self) -> dict[str, Any]:
            return {"args": {"number": self.number}, "attributes": {}}

    trainer = make_trainer(
        tmp_path, Classifier(), classification(8), callbacks=[Counts()], restore_callback_states_from_checkpoint=True
    )
    trainer.state.stateful_callbacks = {"Counts": {"args": {"number": 5}, "attributes": {}}}
    trainer._load_callback_state()
    assert [item.number for item in trainer.callback_handler.callbacks if isinstance(item, Counts)] == [5]


@pytest.mark.parametrize(
    "name",
    ["_init_training_state", "_prepare_for_training", "_run_epoch", "_finalize_training", "_build_accelerator_args"],
)
def test_what_cannot_be_called_says_what_to_do(tmp_path: Path, name: str) -> None:
    method = getattr(make_trainer(tmp_path, Classifier(), classification(8)), name)
    values = [None for item in inspect.signature(method).parameters.values() if item.kind is not item.VAR_KEYWORD]
    with pytest.raises(NotImplementedError, match=name):
        method(*values)


# ---- signatures of version 4


def test_signatures_of_version_4(tmp_path: Path) -> None:
    class Own(Trainer):
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int) -> Any:  # type: ignore[override]
            return super().get_batch_samples(epoch_iterator, num_batches)

        def _save_checkpoint(self, model: nn.Module, trial: Any, metrics: Any = None) -> None:
            super()._save_checkpoint(model, trial, metrics)

    data = classification(24)
    trainer = make_trainer(tmp_path, Classifier(), data, cls=Own, save_strategy="steps", save_steps=4)
    trainer.train()
    again = make_trainer(tmp_path, Classifier(), data, cls=Own, save_strategy="steps", save_steps=4)
    again.train(model_path=str(tmp_path / "checkpoint-4"))
    assert losses(again) == losses(trainer)
    assert Trainer.metrics_format({"loss": 0.5}) == trainer.metrics_format({"loss": 0.5})


# ---- patched by source text


def test_the_lines_that_libraries_look_for() -> None:
    source = inspect.getsource(Trainer.get_batch_samples)
    assert source.strip().endswith("return batch_samples, num_items_in_batch")


# ---- files in the folder of a checkpoint


class WritesBefore(Trainer):
    """Saves parts of the model beside the checkpoint, as trainers of adapters do."""

    def _save_checkpoint(self, model: nn.Module, trial: Any, metrics: Any = None) -> None:
        folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"step": self.state.global_step}, folder / "projector.bin")
        super()._save_checkpoint(model, trial)


class WritesAtStepEnd(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "note.txt").write_text(str(state.global_step))


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_files_written_before_the_save_are_kept(tmp_path: Path, kind: str, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="paceline")
    trainer = make_trainer(
        tmp_path, Classifier(), classification(24), cls=WritesBefore, callbacks=[WritesAtStepEnd()],
        save_strategy="steps", save_steps=3, checkpoint_format=kind,
    )  # fmt: skip
    trainer.train()
    for step in (3, 6):
        folder = tmp_path / f"checkpoint-{step}"
        assert (folder / "note.txt").read_text() == str(step)
        assert torch.load(folder / "projector.bin", weights_only=True) == {"step": step}
        assert (folder / "manifest.json").is_file()
