"""A subclass that declares an option of paceline for itself: the option is unset, whatever the subclass holds there."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import TFTrainingArguments, Trainer, TrainerCallback, TrainingArguments
from paceline.args.plan import resolve
from paceline.args.redeclared import INHERITED, OWN, own_options, redeclared
from paceline.args.seq2seq import Seq2SeqTrainingArguments

FOREIGN = ("a text of another library", 7)
OPTIONS = {"max_steps": 2, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True}


class Model(torch.nn.Module):
    """Linear regression of 4 inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.linear(x).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(logits, labels), "logits": logits}


class Seen(TrainerCallback):
    """Keeps the arguments that each event got."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.values.append(args)

    on_train_begin = on_train_end = on_evaluate = on_save = on_log = on_step_end


def declaring(values: dict[str, Any], base: type = TrainingArguments) -> Any:
    """Returns a class of arguments that declares these fields for itself."""
    fields = [(name, Any, field(default=value)) for name, value in values.items()]
    return make_dataclass("TheirConfig", fields, bases=(base,), repr=False, eq=False)


def train(args: Any) -> tuple[list[dict[str, Any]], list[float], Seen]:
    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(6)]
    seen = Seen()
    trainer = Trainer(Model(), args, train_dataset=data, eval_dataset=data, callbacks=[seen])
    trainer.train()
    trainer.evaluate()
    timeless = [
        {key: value for key, value in row.items() if not key.endswith(("runtime", "per_second"))}
        for row in trainer.state.log_history
    ]
    return timeless, [value.item() for each in trainer.model.parameters() for value in each.flatten()], seen


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[float]]:
    return train(TrainingArguments(str(tmp_path_factory.mktemp("plain")), **OPTIONS))[:2]


@pytest.mark.parametrize(("name", "value"), [*zip(sorted(OWN), itertools.cycle(FOREIGN), strict=False)])
def test_the_option_is_unset_and_the_value_stays_the_subclass_s(
    tmp_path: Path, plain: tuple[list[dict[str, Any]], list[float]], name: str, value: object
) -> None:
    args = declaring({name: value})(str(tmp_path), **OPTIONS)
    history, weights, seen = train(args)
    assert (history, weights) == plain
    assert seen.values
    assert all(type(each) is type(args) and getattr(each, name) == value for each in seen.values)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["arguments"][name] == value
    assert any(f"TheirConfig declares {name} itself" in note for note in record["plan"]["notes"])


@pytest.mark.parametrize("value", FOREIGN)
def test_all_at_once(tmp_path: Path, plain: tuple[list[dict[str, Any]], list[float]], value: object) -> None:
    args = declaring(dict.fromkeys(sorted(OWN), value))(str(tmp_path), **OPTIONS)
    assert train(args)[:2] == plain


def test_a_subclass_of_the_class_that_declares_it_changes_nothing() -> None:
    base = declaring({"packing": True})
    assert redeclared(base) == redeclared(make_dataclass("Further", [], bases=(base,))) == ("packing",)
    assert not any(map(redeclared, (TrainingArguments, Seq2SeqTrainingArguments, TFTrainingArguments, dict)))


def test_options_of_earlier_releases_of_transformers_keep_their_meaning() -> None:
    args = declaring({"logging_dir": "logs", "packing": "theirs"})("folder", use_cpu=True)
    assert own_options(args).logging_dir == "logs"
    assert own_options(args).packing is None
    assert not INHERITED & OWN


def test_a_view_shares_the_values_of_the_arguments() -> None:
    args = declaring({"packing": 3})("folder", use_cpu=True)
    view = own_options(args)
    args.learning_rate = 0.5
    assert view.learning_rate == 0.5
    assert own_options(view) is view
    assert view.to_dict() == args.to_dict()
    assert view.to_dict()["packing"] == 3
    assert repr(view) == repr(args)
    view.learning_rate = 0.25
    assert args.learning_rate == 0.25
    plain = TrainingArguments("folder", use_cpu=True)
    assert own_options(plain) is plain
    changed = dataclasses.replace(args, packing=4)
    assert changed.packing == 4
    assert own_options(changed).packing is None
    assert resolve(args, micro_batches_per_epoch=4).notes[0].startswith("TheirConfig declares packing itself")


def test_a_url_needs_the_option_that_it_becomes() -> None:
    with pytest.raises(ValueError, match="TheirConfig declares output_store itself"):
        declaring({"output_store": None})("s3://bucket/run", use_cpu=True)


def test_of_a_class_of_transformers(tmp_path: Path, plain: tuple[list[dict[str, Any]], list[float]]) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    theirs = declaring(dict.fromkeys(sorted(OWN), "theirs"), transformers.TrainingArguments)
    history, weights, seen = train(theirs(str(tmp_path), **OPTIONS))
    assert (history, weights) == plain
    assert all(each.packing == "theirs" for each in seen.values)
