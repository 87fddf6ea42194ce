"""Phrases that scripts match in errors and logs: in the same situation, ours contain those of transformers.

Each row does the same with both packages. The phrase is first found in what transformers says, so that no row is about
a text that it does not have.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.args.parser import HfArgumentParser

transformers = pytest.importorskip("transformers", minversion="5.23")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
ROWS = [{"x": torch.full((3,), float(number)), "labels": torch.tensor(float(number))} for number in range(6)]


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        outputs = {"logits": self.layer(x).squeeze(-1)}
        return outputs if labels is None else {"loss": ((outputs["logits"] - labels) ** 2).mean(), **outputs}


class NoLoss(Line):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(x)}


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from ROWS


class Columns:
    """A stand-in for a `datasets` dataset, of columns that the model does not take."""

    def __init__(self, names: list[str]) -> None:
        self.column_names = names

    def remove_columns(self, names: list[str]) -> Columns:
        return Columns([name for name in self.column_names if name not in names])


def arguments(package: Any, folder: Path, **options: Any) -> Any:
    shared = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "max_steps": 2, "output_dir": str(folder)}
    return package.TrainingArguments(**{**shared, **options})


def make(package: Any, folder: Path, parts: dict[str, Any] | None = None, **options: Any) -> Any:
    given = {"model": Line(), "train_dataset": ROWS, "eval_dataset": ROWS, **(parts or {})}
    given.setdefault("args", arguments(package, folder, **options))
    return package.Trainer(**given)


def an_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def constructed(**parts: Any) -> Callable[[Any, Path], Any]:
    return lambda package, folder: make(package, folder, parts)


def trained(parts: dict[str, Any] | None = None, **options: Any) -> Callable[[Any, Path], Any]:
    return lambda package, folder: make(package, folder, parts, **options).train()


def argued(**options: Any) -> Callable[[Any, Path], Any]:
    return lambda package, folder: package.TrainingArguments(str(folder), use_cpu=True, **options)


def resumed(what: Any) -> Callable[[Any, Path], Any]:
    def run(package: Any, folder: Path) -> Any:
        (folder / "empty").mkdir(parents=True, exist_ok=True)
        resume = str(folder / "empty") if what == "empty" else what
        return make(package, folder).train(resume_from_checkpoint=resume)

    return run


def parsed(words: list[str]) -> Callable[[Any, Path], Any]:
    def run(package: Any, folder: Path) -> Any:
        kind = HfArgumentParser if package is paceline else transformers.HfArgumentParser
        return kind(package.TrainingArguments).parse_args_into_dataclasses(words, look_for_args_file=False)

    return run


def with_two_optimizers(package: Any, folder: Path) -> None:
    model = Line()
    given = {"model": model, "optimizers": (an_optimizer(model), None)}
    make(package, folder, {**given, "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})})


def with_model_init_and_optimizer(package: Any, folder: Path) -> None:
    make(package, folder, {"model": None, "model_init": Line, "optimizers": (an_optimizer(Line()), None)})


def with_metrics_that_take_no_batch(package: Any, folder: Path) -> None:
    make(package, folder, {"compute_metrics": lambda prediction: {}}, batch_eval_metrics=True)


def without_a_metric(package: Any, folder: Path) -> None:
    make(package, folder, save_strategy="best", eval_strategy="steps", eval_steps=1)


def with_empty_batches(package: Any, folder: Path) -> None:
    make(package, folder, {"data_collator": lambda rows: {}}).train()


def without_matching_columns(package: Any, folder: Path) -> None:
    make(package, folder)._remove_unused_columns(Columns(["a", "b"]), "training")


def dicts_without_length(package: Any, folder: Path) -> None:
    home = paceline if package is paceline else importlib.import_module("transformers.trainer_pt_utils")
    home.LengthGroupedSampler(2, dataset=[{"y": [1]}])


def adafactor(package: Any, **options: Any) -> Any:
    home = paceline if package is paceline else importlib.import_module("transformers.optimization")
    return home.Adafactor(Line().parameters(), **options)


STEPS = {"eval_strategy": "steps", "eval_steps": 2}
BEST = {"load_best_model_at_end": True, "save_strategy": "steps", **STEPS}
GALORE = {"optim": "galore_adamw"}
ERRORS: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "no model": (constructed(model=None), "`Trainer` requires either a `model` or `model_init` argument"),
    "two models": (constructed(model_init=Line), "`Trainer` requires either a `model` or `model_init` argument, bu"),
    "two optimizers": (with_two_optimizers, "Passing both `optimizers` and `optimizer_cls_and_kwargs` arguments is"),
    "optimizer of no model": (
        with_model_init_and_optimizer,
        "Passing a `model_init` is incompatible with providing the `optimizers` argument",
    ),
    "model_init of two": (constructed(model=None, model_init=lambda a, b: 1), "model_init should have 0 or 1 argument"),
    "model_init of none": (constructed(model=None, model_init=lambda: None), "model_init should not return None"),
    "batch metrics": (with_metrics_that_take_no_batch, "function must take a `compute_result` boolean argument"),
    "no metric": (without_a_metric, "`args.metric_for_best_model` must be provided when using 'best' save_strategy"),
    "no length": (trained({"train_dataset": Endless()}, max_steps=-1), "max_steps has to be specified"),
    "no training data": (trained({"train_dataset": None}), "Trainer: training requires a train_dataset"),
    "no evaluation data": (
        lambda package, folder: make(package, folder, {"eval_dataset": None}).evaluate(),
        "Trainer: evaluation requires an eval_dataset",
    ),
    "evaluated on nothing": (
        trained({"eval_dataset": None}, **STEPS),
        "but you didn't pass an `eval_dataset` to `Trainer`",
    ),
    "no checkpoint": (resumed(True), "No valid checkpoint found in output directory ("),
    "empty checkpoint": (resumed("empty"), "Can't find a valid checkpoint at "),
    "no loss": (trained({"model": NoLoss()}), "The model did not return a loss from the inputs"),
    "empty batch": (with_empty_batches, "The batch received was empty, your model won't be able to train on it"),
    "no columns": (without_matching_columns, "No columns in the dataset match the model's forward method signature: ("),
    "unknown metric": (
        trained(metric_for_best_model="accuracy", **{**BEST, "save_steps": 2}),
        "The `metric_for_best_model` training argument is set to",
    ),
    "no optimizer": (
        lambda package, folder: make(package, folder).get_learning_rates(),
        "Trainer optimizer is None",
    ),
    "lengths": (dicts_without_length, "Can only automatically infer lengths for datasets whose items are dict"),
    "adafactor rate": (lambda package, folder: adafactor(package, lr=0.1), "Cannot combine manual `lr` and `relat"),
    "adafactor warmup": (
        lambda package, folder: adafactor(package, lr=0.1, relative_step=False, warmup_init=True),
        "`warmup_init=True` requires `relative_step=True`",
    ),
    "galore": (trained(**GALORE), "You need to define `optim_target_modules` to use "),
    "galore nowhere": (trained(optim_target_modules=["z"], **GALORE), "No target modules found for "),
    "fp16 and bf16": (argued(fp16=True, bf16=True), "At most one of fp16 and bf16 can be True"),
    "full fp16 and bf16": (argued(fp16_full_eval=True, bf16_full_eval=True), "At most one of fp16 and bf16 can be T"),
    "cache steps": (argued(torch_empty_cache_steps=0), "`torch_empty_cache_steps` must be an integer bigger than 0, "),
    "half cache steps": (argued(torch_empty_cache_steps=1.5), "`torch_empty_cache_steps` must be an integer big"),
    "logging steps": (argued(logging_steps=0), " requires non-zero --logging_steps"),
    "eval steps": (
        argued(eval_strategy="steps", eval_steps=0, logging_steps=0),
        " requires either non-zero --eval_steps or",
    ),
    "odd logging steps": (argued(logging_steps=1.5), "--logging_steps must be an integer if bigger than 1: 1.5"),
    "odd eval steps": (argued(eval_strategy="steps", eval_steps=1.5), "--eval_steps must be an integer if bigger"),
    "odd save steps": (argued(save_steps=2.5), "--save_steps must be an integer if bigger than 1: 2.5"),
    "strategies": (
        argued(load_best_model_at_end=True, eval_strategy="epoch"),
        "--load_best_model_at_end requires the save and eval strategy to match",
    ),
    "multiple": (argued(**BEST, save_steps=3), "--load_best_model_at_end requires the saving steps to be a round mul"),
    "ratios": (
        argued(**{**BEST, "eval_steps": 0.25}, save_steps=0.3),
        "--load_best_model_at_end requires the saving steps to be a multiple of the evaluation",
    ),
    "mixed": (argued(**BEST, save_steps=0.5), "cannot get guaranteed when mixing ratio and absolute steps"),
    "plateau": (argued(lr_scheduler_type="reduce_lr_on_plateau"), "lr_scheduler_type reduce_lr_on_plateau requires"),
    "greedy": (argued(lr_scheduler_type="greedy"), "lr_scheduler_type greedy requires an eval strategy"),
    "warmup": (argued(warmup_steps=-1), "Got warmup_steps = -1, Expected value warmup_steps >= 0"),
    "prefetch": (
        argued(dataloader_prefetch_factor=2),
        "--dataloader_prefetch_factor can only be set when data is loaded in a different process",
    ),
    "setter": (
        lambda package, folder: arguments(package, folder).set_save(strategy="steps", steps=0),
        "Setting `strategy` as 'steps' requires a positive value for `steps`",
    ),
    "unknown option": (argued(lerning_rate=0.1), "got an unexpected keyword argument 'lerning_rate'"),
    "unknown words": (
        parsed(["--output_dir", "x", "--zzz", "1"]),
        "Some specified arguments are not used by the HfArgumentParser: ['--zzz', '1']",
    ),
}


# where both look for galore_torch first, which only the environment of the slow tests has
CASES = [pytest.param(name, marks=pytest.mark.slow) if name.startswith("galore") else name for name in ERRORS]


@pytest.mark.parametrize("name", CASES)
def test_errors_hold_the_phrases_that_scripts_match(name: str, tmp_path: Path) -> None:
    act, phrase = ERRORS[name]
    said = {}
    for package in (transformers, paceline):
        with pytest.raises(Exception) as caught:
            act(package, tmp_path / package.__name__)
        said[package] = caught.value
    assert phrase in str(said[transformers])
    assert phrase in str(said[paceline])
    kinds = [kind for kind in (ValueError, RuntimeError, KeyError, TypeError) if isinstance(said[transformers], kind)]
    assert isinstance(said[paceline], tuple(kinds)), type(said[paceline])


# ---- the log


def whole_run(package: Any, folder: Path) -> None:
    """Training with evaluations and checkpoints, resumed, with a prediction."""
    options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "logging_steps": 1, **BEST}
    options = {**options, "eval_steps": 1, "per_device_train_batch_size": 2}
    make(package, folder, **options).train()
    trainer = make(package, folder, **{**options, "max_steps": 4})
    trainer.train(resume_from_checkpoint=True)
    trainer.predict(ROWS)


def rotated(package: Any, folder: Path) -> None:
    """The first model counts as the best one, and stays."""
    options = {**BEST, "eval_steps": 1, "save_steps": 1, "save_total_limit": 1, "max_steps": 3}
    make(package, folder, greater_is_better=True, **options).train()


def stopping_early(package: Any, folder: Path) -> None:
    callbacks = [package.EarlyStoppingCallback(), package.EarlyStoppingCallback()]
    options = {"metric_for_best_model": "loss", **STEPS}
    trainer = make(package, folder, {"callbacks": callbacks}, **options)
    trainer.add_callback(callbacks[0])
    trainer.train()


LOGS: dict[Callable[[Any, Path], Any], list[str]] = {
    whole_run: [
        "max_steps is given, it will override any value given in num_train_epochs",
        "***** Running training *****",
        "  Num examples = 6",
        "  Num Epochs = 1",
        "  Num update steps per epoch = 3",
        "  Instantaneous batch size per device = 2",
        "  Total train batch size (w. parallel, distributed & accumulation) = 2",
        "  Gradient Accumulation steps = 1",
        "  Total optimization steps = 2",
        "  Number of trainable parameters = 4",
        "***** Running Evaluation *****",
        "***** Running Prediction *****",
        "  Batch size = 8",
        "Saving model checkpoint to ",
        "/checkpoint-1",
        "Resuming training from checkpoint with epoch 0 and global step 2",
        "Loading model from ",
        "Loading best model from ",
        "(score: ",
        "Training completed",
    ],
    rotated: ["Deleting older checkpoint [", "] due to args.save_total_limit"],
    stopping_early: [
        "Using EarlyStoppingCallback without load_best_model_at_end=True",
        "to the callbacks of this Trainer, but there is already one",
    ],
}


@pytest.mark.parametrize("act", LOGS)
def test_logs_hold_the_phrases_that_scripts_match(act: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    their_logger = logging.getLogger("transformers")
    before = their_logger.propagate, their_logger.level
    their_logger.propagate = True
    try:
        for package in (transformers, paceline):
            caplog.clear()
            with caplog.at_level(logging.INFO, "paceline"), caplog.at_level(logging.INFO, "transformers"):
                act(package, tmp_path / package.__name__)
            missing = [phrase for phrase in LOGS[act] if phrase not in caplog.text]
            assert missing == [], package.__name__
    finally:
        their_logger.propagate, _ = before
        their_logger.setLevel(before[1])
