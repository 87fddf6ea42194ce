"""Options that cannot take effect are reported at once, by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, make_trainer
from torch import nn

from paceline import TrainerCallback
from paceline.args.plan import resolve

DATA = classification(16)


class OwnNames(nn.Module):
    """Targets under a name that is not taken for labels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Classifier()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.inner(x, y)


def test_smoothing_beside_a_loss_function_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1: with compute_loss_func"):
        make_trainer(
            tmp_path, Classifier(), DATA, label_smoothing_factor=0.1, compute_loss_func=lambda given, labels: given[0]
        )


def test_smoothing_without_targets_that_are_known_is_refused(tmp_path: Path):
    data = [{"x": sample["x"], "y": sample["labels"]} for sample in DATA]
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1: .* no targets under .* only x, y"):
        make_trainer(tmp_path, OwnNames(), data, label_smoothing_factor=0.1).train()


@pytest.mark.parametrize("option", ["torch_compile_mode", "torch_compile_backend"])
def test_unknown_ways_to_compile_are_refused_before_the_first_step(tmp_path: Path, option: str):
    with pytest.raises(ValueError, match=f"{option}='bogus' is unknown: use one of .*"):
        make_trainer(tmp_path, Classifier(), DATA, torch_compile=True, **{option: "bogus"}).train()


def test_callbacks_that_hear_nothing_are_refused(tmp_path: Path):
    with pytest.raises(TypeError, match=r"callbacks: <function .* has no method of an event"):
        make_trainer(tmp_path, Classifier(), DATA, callbacks=[lambda state: None])
    with pytest.raises(TypeError, match="give a list of callbacks"):
        make_trainer(tmp_path, Classifier(), DATA, callbacks=object())


def test_an_evaluation_set_that_is_not_there(tmp_path: Path):
    trainer = make_trainer(tmp_path, Classifier(), DATA, eval_dataset={"a": DATA})
    with pytest.raises(ValueError, match=r"eval_dataset='b': .* but those of 'a'"):
        trainer.evaluate("b")
    with pytest.raises(ValueError, match="evaluation requires an eval_dataset"):
        make_trainer(tmp_path, Classifier(), DATA).evaluate()


def test_a_folder_that_is_no_checkpoint(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("no checkpoint")
    with pytest.raises(ValueError, match=r"no manifest and no trainer_state\.json, so it is no checkpoint"):
        make_trainer(tmp_path, Classifier(), DATA).train(resume_from_checkpoint=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 5}, "ddp_bucket_cap_mb: it has no effect"),
        ({"liger_kernel_config": {"rope": True}}, "liger_kernel_config: not read without use_liger_kernel"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": False}}, "activation_checkpointing_kwargs: not read"),
        ({"tp_plan": {"first": "colwise"}}, "tp_plan: not read without tp"),
        ({"pipeline_config": {"schedule": "gpipe"}}, "pipeline_config: not read without pp"),
    ],
)
def test_what_changes_nothing_is_noted_in_the_plan(tmp_path: Path, options: dict[str, Any], note: str):
    args = make_trainer(tmp_path, Classifier(), DATA, **options).args
    assert any(line.startswith(note) for line in resolve(args, micro_batches_per_epoch=4).notes)


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_a_length_that_the_model_does_not_take_is_sampled_by(tmp_path: Path, strategy: str):
    data = [{**sample, "length": index % 5 + 1} for index, sample in enumerate(DATA)]
    options = {"train_sampling_strategy": strategy, "per_device_train_batch_size": 2}
    make_trainer(tmp_path, Classifier(), data, **options).train()
    datasets = pytest.importorskip("datasets")
    columns = {name: [torch.as_tensor(row[name]).tolist() for row in data] for name in data[0]}
    trainer = make_trainer(tmp_path, Classifier(), datasets.Dataset.from_dict(columns).with_format("torch"), **options)
    trainer.train()
    assert trainer.state.global_step == 8


def test_a_tokenizer_under_both_names(tmp_path: Path):
    first, second = object(), object()
    with pytest.raises(ValueError, match="`tokenizer` is the older name of `processing_class`: pass one of the two"):
        make_trainer(tmp_path, Classifier(), DATA, tokenizer=first, processing_class=second)
    assert make_trainer(tmp_path, Classifier(), DATA, tokenizer=first).processing_class is first
    assert make_trainer(tmp_path, Classifier(), DATA, tokenizer=first, processing_class=first).tokenizer is first


def test_a_training_inside_a_training_is_refused(tmp_path: Path):
    class Nested(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            trainer.train()

    trainer = make_trainer(tmp_path, Classifier(), DATA, max_steps=2, callbacks=[Nested()])
    with pytest.raises(RuntimeError, match=r"train\(\) was called while a run of the same Trainer is in progress"):
        trainer.train()
    assert trainer.run is None


def test_a_training_may_follow_at_the_end_of_another(tmp_path: Path):
    class Again(TrainerCallback):
        is_first = True

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            if self.is_first:
                self.is_first = False
                trainer.train()

    trainer = make_trainer(tmp_path, Classifier(), DATA, max_steps=2, callbacks=[Again()])
    assert trainer.train().global_step == 2
