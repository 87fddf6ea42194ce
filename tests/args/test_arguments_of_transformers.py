"""Against the installed transformers: the same fields, order and defaults; each reads what the other writes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import warnings
from enum import Enum
from typing import Any

import pytest

from paceline.args import choices
from paceline.args.plan import resolve
from paceline.args.sections import PacelineSection
from paceline.args.seq2seq import Seq2SeqTrainingArguments
from paceline.args.training import TrainingArguments

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.23")

OWN = [item.name for item in dataclasses.fields(PacelineSection)]


def theirs(**options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.TrainingArguments(use_cpu=True, **options)


def defaults_of(kind: Any) -> dict[str, Any]:
    return {
        item.name: item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        for item in dataclasses.fields(kind)
        if item.init
    }


def test_fields_order_and_defaults() -> None:
    ours, reference = defaults_of(TrainingArguments), defaults_of(transformers.TrainingArguments)
    assert list(ours) == [*reference, *OWN]
    assert {name: ours[name] for name in reference} == reference
    ours, reference = defaults_of(Seq2SeqTrainingArguments), defaults_of(transformers.Seq2SeqTrainingArguments)
    assert set(ours) == {*reference, *OWN}
    assert {name: ours[name] for name in reference} == reference


def test_values_of_every_enum() -> None:
    from transformers import trainer_utils, training_args
    from transformers.debug_utils import DebugOption

    pairs: list[tuple[type[Enum], type[Enum]]] = [
        (choices.IntervalStrategy, trainer_utils.IntervalStrategy),
        (choices.SaveStrategy, trainer_utils.SaveStrategy),
        (choices.HubStrategy, trainer_utils.HubStrategy),
        (choices.SchedulerType, trainer_utils.SchedulerType),
        (choices.OptimizerNames, training_args.OptimizerNames),
        (choices.ParallelMode, training_args.ParallelMode),
        (choices.DebugOption, DebugOption),
    ]
    for ours, reference in pairs:
        names = {member.name: member.value for member in ours}
        assert {member.name: member.value for member in reference}.items() <= names.items()
    extra = {item.value for item in choices.OptimizerNames} - {item.value for item in training_args.OptimizerNames}
    assert extra == {"auto", "adam", "nadam", "radam", "muon", "adamw_apex_fused"}


def test_methods_and_their_parameters() -> None:
    names = [name for name in dir(transformers.TrainingArguments) if name.startswith(("set_", "get_", "to_", "main_"))]
    assert names
    for name in names:
        ours = inspect.signature(getattr(TrainingArguments, name)).parameters.values()
        reference = inspect.signature(getattr(transformers.TrainingArguments, name)).parameters.values()
        assert [(item.name, item.default) for item in ours] == [(item.name, item.default) for item in reference], name


CASES: list[dict[str, Any]] = [
    {},
    {"eval_strategy": "steps", "logging_steps": 20},
    {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True},
    {"metric_for_best_model": "accuracy", "warmup_steps": 0.1, "bf16": True},
    {"report_to": "tensorboard", "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}},
    {"activation_checkpointing": True, "torch_compile_mode": "default", "optim": "adafactor", "max_steps": 10},
    {"include_num_input_tokens_seen": True, "logging_steps": 10.0, "eval_steps": 0.25, "eval_strategy": "steps"},
]


@pytest.mark.parametrize("options", CASES)
def test_their_dict_makes_our_arguments(options: dict[str, Any]) -> None:
    reference = theirs(output_dir="x", **options)
    ours = TrainingArguments.from_dict(reference.to_dict())
    ignored = {"disable_tqdm", "accelerator_config", *OWN}
    mine = ours.to_dict()
    assert {name: item for name, item in reference.to_dict().items() if name not in ignored} == {
        name: item for name, item in mine.items() if name not in ignored
    }
    assert TrainingArguments.from_dict(json.loads(reference.to_json_string())) == ours
    assert TrainingArguments("x", use_cpu=True, **options).to_dict() == mine


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({}, 10),
        ({"num_train_epochs": 1.3, "gradient_accumulation_steps": 3}, 10),
        ({"max_steps": 17}, 10),
        ({"warmup_steps": 0.07, "eval_steps": 0.07, "save_steps": 0.3, "logging_steps": 0.01}, 100),
    ],
)
def test_derived_numbers(options: dict[str, Any], batches: int) -> None:
    import torch
    from transformers.trainer_callback import TrainerState

    reference = theirs(output_dir="x", **options)
    model = torch.nn.Linear(1, 1)
    trainer = transformers.Trainer(model, reference, train_dataset=[{"x": 0}])
    loader: Any = torch.utils.data.DataLoader(range(batches))  # type: ignore[arg-type]
    epochs, updates, _, _, total, _, max_steps = trainer.set_initial_training_values(reference, loader)
    state = TrainerState()
    state.compute_steps(reference, max_steps)
    plan = resolve(TrainingArguments("x", **options), micro_batches_per_epoch=batches)
    assert (plan.num_epochs, plan.updates_per_epoch, plan.global_batch_size, plan.max_steps) == (
        epochs,
        updates,
        total,
        max_steps,
    )
    assert (plan.logging_steps, plan.save_steps) == (state.logging_steps, state.save_steps)
    if options.get("eval_steps"):
        assert plan.eval_steps == state.eval_steps
    assert plan.warmup_steps == reference.get_warmup_steps(max_steps)


def test_their_parser_reads_our_arguments() -> None:
    line = (
        "--output_dir out --learning_rate 1e-4 --bf16 --no_dataloader_pin_memory --report_to csv --eval_strategy epoch "
        "--tf32 true --include_for_metrics inputs --activation_checkpointing true --loss_weight tokens "
        '--lr_scheduler_kwargs {"a":1} --generation_config folder --include_num_input_tokens_seen all'
    )
    from paceline.args.parser import HfArgumentParser

    (ours,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses(line.split(), False, False)
    parser = transformers.HfArgumentParser(Seq2SeqTrainingArguments)
    (parsed,) = parser.parse_args_into_dataclasses(line.split(), False, False)
    assert parsed == ours
    assert parsed.report_to == ["csv"]


def test_our_parser_reads_their_arguments() -> None:
    from paceline.args.parser import HfArgumentParser

    line = "--output_dir out --use_cpu --learning_rate 1e-4 --eval_strategy epoch --no_dataloader_pin_memory"
    (args,) = HfArgumentParser(transformers.TrainingArguments).parse_args_into_dataclasses(line.split(), False, False)
    assert isinstance(args, transformers.TrainingArguments)
    assert (args.learning_rate, args.eval_strategy, args.dataloader_pin_memory) == (1e-4, "epoch", False)
