"""The setters beside transformers': the same fields afterwards, whatever was set before and whatever is named."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from typing import Any

import pytest

from paceline.args.training import TrainingArguments

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.23")

SETTERS = sorted(name for name in dir(transformers.TrainingArguments) if name.startswith("set_"))
# machine's own, and what follows from the device
IGNORED = {"disable_tqdm", "accelerator_config", "dataloader_pin_memory", "use_cpu"}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("set_training", {"learning_rate": 1e-4, "batch_size": 32, "weight_decay": 0.1, "num_epochs": 1.5, "max_steps": 7}),
    ("set_training", {"gradient_accumulation_steps": 4, "seed": 3, "activation_checkpointing": True}),
    ("set_training", {"gradient_checkpointing": True}),
    ("set_evaluate", {"strategy": "steps", "steps": 20, "batch_size": 2, "accumulation_steps": 3, "loss_only": True}),
    ("set_evaluate", {"strategy": "epoch", "delay": 2.0}),
    ("set_evaluate", {"strategy": "steps", "steps": 0.1}),
    ("set_testing", {"batch_size": 3, "loss_only": True}),
    ("set_save", {"strategy": "epoch", "total_limit": 2, "on_each_node": True}),
    ("set_save", {"strategy": "steps", "steps": 7}),
    ("set_logging", {"strategy": "epoch", "report_to": "tensorboard", "level": "info", "first_step": True}),
    ("set_logging", {"steps": 3, "nan_inf_filter": True, "on_each_node": True, "replica_level": "error"}),
    ("set_optimizer", {"name": "adafactor", "learning_rate": 0.5, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.9}),
    ("set_optimizer", {"epsilon": 1e-6, "args": "a=1"}),
    ("set_lr_scheduler", {"name": "cosine", "num_epochs": 2.0, "max_steps": 9, "warmup_steps": 0.1}),
    ("set_dataloader", {"train_batch_size": 2, "eval_batch_size": 3, "drop_last": True, "sampler_seed": 5}),
    ("set_dataloader", {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3, "in_order": False}),
    ("set_dataloader", {"num_workers": 1, "multiprocessing_context": "spawn", "auto_find_batch_size": True}),
    ("set_dataloader", {"ignore_data_skip": True, "pin_memory": True}),
]


def fields_of(kind: Any, before: dict[str, Any], setter: str, given: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = kind(output_dir="x", use_cpu=True, **before)
        assert getattr(args, setter)(**given) is args
    names = [item.name for item in dataclasses.fields(transformers.TrainingArguments) if item.init]
    values = {name: getattr(args, name) for name in names if name not in IGNORED}
    reporters = values["report_to"] if isinstance(values["report_to"], list) else [values["report_to"]]
    # ours converts what is set, as on construction; theirs keeps None and "none" as they are
    return {**values, "eval_delay": values["eval_delay"] or 0, "report_to": [n for n in reporters if n != "none"]}


BEFORE: list[dict[str, Any]] = [
    {},
    {"learning_rate": 3e-3, "eval_strategy": "epoch", "save_total_limit": 5, "weight_decay": 0.2, "data_seed": 1},
]


@pytest.mark.parametrize("before", BEFORE, ids=["new", "changed"])
@pytest.mark.parametrize(("setter", "given"), [*CALLS, *((name, {}) for name in SETTERS if name != "set_push_to_hub")])
def test_the_same_fields_are_set(before: dict[str, Any], setter: str, given: dict[str, Any]) -> None:
    ours = fields_of(TrainingArguments, before, setter, given)
    theirs = fields_of(transformers.TrainingArguments, before, setter, given)
    differing = {name: (ours[name], theirs[name]) for name in theirs if ours[name] != theirs[name]}
    assert not differing


def test_pushing() -> None:
    given = {"model_id": "owner/name", "strategy": "end", "token": "t", "private_repo": True, "always_push": True}
    ours = fields_of(TrainingArguments, {}, "set_push_to_hub", given)
    assert ours == fields_of(transformers.TrainingArguments, {}, "set_push_to_hub", given)


def test_every_setter_is_called_with_every_argument() -> None:
    for name in SETTERS:
        taken = set(inspect.signature(getattr(TrainingArguments, name)).parameters) - {"self"}
        named = {key for setter, given in CALLS if setter == name for key in given}
        assert taken == named or name == "set_push_to_hub", name
