"""The records of a run: rows of the log, metrics files, run.json; and the arguments objects that it accepts."""

import json
import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, Tagger, classification, make_trainer, tagging
from torch import nn

import paceline
from paceline import Trainer, TrainerCallback, TrainingArguments

DATA = classification(16)
TRAIN_SPEED = {"train_runtime", "train_samples_per_second", "train_steps_per_second"}
EVAL_SPEED = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    logger = logging.getLogger("paceline")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers = handlers


def test_the_keys_of_every_row(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        Classifier(),
        DATA,
        eval_dataset=DATA[:6],
        eval_strategy="epoch",
        num_train_epochs=2,
        logging_steps=3,
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    )
    output = trainer.train()
    rows = trainer.state.log_history
    assert [set(row) for row in rows] == [
        {"loss", "grad_norm", "learning_rate", "epoch", "step"},
        {"eval_loss", "eval_accuracy", *EVAL_SPEED, "epoch", "step"},
        {"loss", "grad_norm", "learning_rate", "epoch", "step"},
        {"eval_loss", "eval_accuracy", *EVAL_SPEED, "epoch", "step"},
        {*TRAIN_SPEED, "total_flos", "train_loss", "epoch", "step"},
    ]
    assert [(row["step"], row["epoch"]) for row in rows] == [(3, 0.75), (4, 1.0), (6, 1.5), (8, 2.0), (8, 2.0)]
    assert set(output.metrics) == set(rows[-1]) - {"step"}
    assert output.global_step == 8
    assert output.metrics["train_loss"] == output.training_loss
    assert all(isinstance(value, int | float) for row in rows for value in row.values())


def test_the_train_loss_is_the_mean_of_all_updates(tmp_path: Path) -> None:
    """Also of those after the last log."""
    every = make_trainer(tmp_path, Classifier(), DATA, logging_steps=1).train()
    rarely = make_trainer(tmp_path, Classifier(), DATA, logging_steps=3).train()
    never = make_trainer(tmp_path, Classifier(), DATA, logging_strategy="no").train()
    assert every.training_loss == pytest.approx(rarely.training_loss) == pytest.approx(never.training_loss)


def test_without_a_loss_there_is_no_train_loss(tmp_path: Path) -> None:
    """Every target is ignored: 0.0 would be a number that nobody measured. With nothing to do it is transformers'."""
    ignored = [{**sample, "labels": torch.tensor(-100)} for sample in DATA]
    trainer = make_trainer(tmp_path, Classifier(), ignored)
    output = trainer.train()
    assert math.isnan(output.training_loss)
    assert math.isnan(output.metrics["train_loss"])
    assert math.isnan(trainer.state.log_history[-1]["train_loss"])
    options = {"save_strategy": "epoch"}
    make_trainer(tmp_path, Classifier(), DATA, **options).train()
    again = make_trainer(tmp_path, Classifier(), DATA, **options).train(resume_from_checkpoint=True)
    assert again.training_loss == again.metrics["train_loss"] == 0.0


@pytest.mark.parametrize(("first", "expected"), [(False, [4, 8]), (True, [1, 4, 8])])
def test_logging_first_step(tmp_path: Path, first: bool, expected: list[int]) -> None:
    trainer = make_trainer(tmp_path, Classifier(), DATA, logging_first_step=first, logging_steps=4, num_train_epochs=2)
    trainer.train()
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == expected


@pytest.mark.parametrize(("how", "expected"), [("all", 4 * 7 * 6), ("non_padding", 4 * 5 * 6), (True, 4 * 7 * 6)])
def test_tokens_are_counted(tmp_path: Path, how: Any, expected: int) -> None:
    class Masked(Tagger):
        def forward(self, input_ids: Any, labels: Any, attention_mask: Any = None) -> Any:
            return super().forward(input_ids, labels)

    mask = torch.tensor([1, 1, 1, 1, 1, 0, 0])
    data = [{**sample, "attention_mask": mask} for sample in tagging(24)]
    trainer = make_trainer(tmp_path, Masked(), data, include_num_input_tokens_seen=how)
    trainer.train()
    assert trainer.state.num_input_tokens_seen == expected
    seen = [row["num_input_tokens_seen"] for row in trainer.state.log_history if "loss" in row]
    assert seen == [expected * step // 6 for step in range(1, 7)]
    assert trainer.state.log_history[-2]["train_tokens_per_second"] > 0


@pytest.mark.parametrize("how", ["model", "trainer", "neither"])
def test_operations_are_counted(tmp_path: Path, how: str) -> None:
    class Estimates(Classifier):
        def floating_point_ops(self, inputs: Any) -> int:
            return 100 * len(inputs["x"])

    class Own(Trainer):
        def floating_point_ops(self, inputs: Any) -> int:
            return 100 * len(inputs["x"])

    model = Estimates() if how == "model" else Classifier()
    cls = Own if how == "trainer" else Trainer
    options: dict[str, Any] = {"cls": cls, "save_strategy": "epoch", "num_train_epochs": 2}
    trainer = make_trainer(tmp_path, model, DATA, **options)
    total = trainer.train().metrics["total_flos"]
    assert total == trainer.state.total_flos == (0 if how == "neither" else 100 * 32)
    resumed = make_trainer(tmp_path, model, DATA, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.state.total_flos == total


def test_the_speed_counts_the_samples_there_were(tmp_path: Path) -> None:
    """Also where the last batch is smaller, and after a resume those of this run only."""
    options: dict[str, Any] = {"save_strategy": "epoch", "num_train_epochs": 2}
    for resume, number in ((None, 28), (str(tmp_path / "checkpoint-4"), 14)):
        metrics = (
            make_trainer(tmp_path, Classifier(), DATA[:14], **options).train(resume_from_checkpoint=resume).metrics
        )
        assert metrics["train_samples_per_second"] * metrics["train_runtime"] == pytest.approx(number, rel=0.2)


def test_the_speed_of_a_run_that_ended_early_is_that_of_its_steps(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 3

    metrics = make_trainer(tmp_path, Classifier(), DATA, num_train_epochs=50, callbacks=[Stop()]).train().metrics
    assert metrics["train_steps_per_second"] * metrics["train_runtime"] == pytest.approx(3, rel=0.2)
    assert metrics["train_samples_per_second"] * metrics["train_runtime"] == pytest.approx(12, rel=0.2)


def test_metrics_files_and_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(tmp_path, Classifier(), DATA, eval_dataset=DATA)
    train = trainer.train().metrics
    trainer.save_metrics("train", train)
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_metrics("other", {"a": 1}, combined=False)
    trainer.log_metrics("train", train)
    trainer.save_state()
    assert json.loads((tmp_path / "train_results.json").read_text())["train_loss"] == train["train_loss"]
    both = json.loads((tmp_path / "all_results.json").read_text())
    assert {"train_loss", "eval_loss"} <= set(both)
    assert "a" not in both
    assert "***** train metrics *****" in capsys.readouterr().out
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    assert len(state["log_history"]) == 6


def test_the_arguments_in_run_json_can_be_read_back(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Classifier(), classification(8), logging_steps=3)
    trainer.train()
    arguments = json.loads((tmp_path / "run.json").read_text())["arguments"]
    assert TrainingArguments.from_dict(arguments) == trainer.args


def test_run_json_lies_beside_the_outputs(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Classifier(), DATA, learning_rate=1e-3, seed=7, num_train_epochs=2)
    trainer.train()
    record = json.loads((tmp_path / "run.json").read_text())
    text = json.dumps(record)
    assert '"learning_rate": 0.001' in text
    for part in ("seed", "paceline", "torch", "python", "max_steps", "num_trainable_parameters"):
        assert part in text, part
    assert record["plan"]["max_steps"] == 8
    assert record["seeds"] == {"seed": 7, "data_seed": 7}


def test_a_secret_is_written_nowhere(tmp_path: Path) -> None:
    secret = "hf_verysecret"
    trainer = make_trainer(
        tmp_path, Classifier(), DATA, hub_token=secret, save_strategy="epoch", report_to=["jsonl", "csv", "tensorboard"]
    )
    trainer.train()
    trainer.save_model()
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(paths) > 8
    assert [path for path in paths if secret.encode() in path.read_bytes()] == []


SECRET = "Zq7rT2xW9bVn4KcL8mPd"
SIGNED = f"https://host/data?X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}"


class Leaky(TrainerCallback):
    """Logs text, and fails, as a client of some service would: with the request in its error."""

    may_fail = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        logs["note"] = f"read {SIGNED}"
        raise OSError(f"cannot reach {SIGNED} with Authorization: Bearer {SECRET}")


def test_no_byte_of_a_secret_leaves_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A secret in every place that a run takes text from; every byte that it writes, logs or prints is looked at."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", SIGNED, "--api_key", SECRET, f"--name=hf_{SECRET}"])
    monkeypatch.setenv("MY_TRACKER_TOKEN", SECRET[::-1])
    caplog.set_level(logging.DEBUG, "paceline")
    trainer = make_trainer(
        tmp_path / "run", Classifier(), DATA, hub_token=f"hf_{SECRET}", run_name=f"try {SIGNED} sig={SECRET}",
        save_strategy="steps", save_steps=2, max_steps=4,
        logging_steps=1, eval_strategy="epoch", report_to=["jsonl", "csv", "tensorboard"],
        callbacks=[Leaky()], compute_metrics=lambda seen: {"text": f"api_key={SECRET[::-1]}", "n": 1.0},
        eval_dataset=DATA, lr_scheduler_type="constant", log_level="debug",
    )  # fmt: skip
    trainer.train()
    trainer.log({"note": SIGNED, "nested": {"token": SECRET}})
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.log_metrics("eval", {"eval_text": SIGNED})
    trainer.save_state()
    trainer.save_model()
    trainer.args.to_json(tmp_path / "run" / "args.json")
    trainer.args.to_yaml(tmp_path / "run" / "args.yaml")
    again = make_trainer(tmp_path / "run", Classifier(), DATA, max_steps=5, run_name=SIGNED, report_to=[])
    again.train(resume_from_checkpoint=True)

    assert trainer.args.run_name == f"try {SIGNED} sig={SECRET}"  # what a run needs stays as it is
    assert trainer.args.hub_token == f"hf_{SECRET}"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "training_args.bin", "progress.json", "trainer_state.json", "log.jsonl", "log.csv"} <= {
        path.name for path in files
    }
    for path in files:
        content = path.read_bytes()
        assert SECRET.encode() not in content, path
        assert SECRET[::-1].encode() not in content, path
    assert [path for path in tmp_path.rglob("*") if SECRET in path.name] == []
    printed = caplog.text + "".join(capfd.readouterr())
    assert "cannot reach https://host/data?" in printed
    assert SECRET not in printed
    assert SECRET[::-1] not in printed


@pytest.mark.parametrize(
    ("level", "shown"), [("error", False), ("warning", False), ("info", True), ("debug", True), ("passive", False)]
)
def test_log_level(tmp_path: Path, level: str, shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("paceline").setLevel(logging.NOTSET)
    make_trainer(tmp_path, Classifier(), DATA, log_level=level).train()
    expected = {"error": 40, "warning": 30, "info": 20, "debug": 10, "passive": 0}[level]
    assert logging.getLogger("paceline").level == expected
    assert logging.getLogger("paceline.pytorch.session").isEnabledFor(logging.INFO) == shown


@pytest.mark.slow
def test_an_info_line_is_shown_without_any_set_up(tmp_path: Path) -> None:
    """In a process of its own: pytest sets logging up."""
    import subprocess
    import sys

    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from small_models import Classifier, classification, make_trainer\n"
        "make_trainer(sys.argv[2], Classifier(), classification(4), log_level='info').train()\n"
    )
    support = str(Path(__file__).parents[2] / "support")
    done = subprocess.run(
        [sys.executable, "-c", code, support, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "steps      1" in done.stderr


def test_the_model_goes_to_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.pytorch.distributed.world import World

    monkeypatch.setattr(paceline.pytorch.trainer, "current_world", lambda args: World(torch.device("meta")))
    monkeypatch.setattr("paceline.pytorch.distributed.world.current_world", lambda args: World(torch.device("meta")))
    assert {p.device.type for p in make_trainer(tmp_path, Classifier()).model.parameters()} == {"meta"}

    @dataclass
    class Stay(TrainingArguments):
        @property
        def place_model_on_device(self) -> bool:
            return False

    trainer = Trainer(Classifier(), Stay(output_dir=str(tmp_path)))
    assert {p.device.type for p in trainer.model.parameters()} == {"cpu"}
    parts = Classifier()
    parts.hf_device_map = {"first": 0, "second": 1}  # type: ignore[assignment]
    assert {p.device.type for p in make_trainer(tmp_path, parts).model.parameters()} == {"cpu"}


class TestArgumentsOfTransformers:
    def make(self, tmp_path: Path, cls: Any = None, **options: Any) -> Any:
        transformers = pytest.importorskip("transformers")
        cls = cls or transformers.TrainingArguments
        return cls(output_dir=str(tmp_path), use_cpu=True, save_strategy="no", disable_tqdm=True, **options)

    def test_are_taken(self, tmp_path: Path) -> None:
        theirs = self.make(tmp_path, learning_rate=1e-3, hub_token="secret", max_steps=2, logging_steps=1)
        trainer = Trainer(Classifier(), theirs, train_dataset=DATA)
        assert isinstance(trainer.args, TrainingArguments)
        assert trainer.args.hub_token == "secret"
        trainer.train()
        assert trainer.state.log_history[0]["learning_rate"] == 1e-3
        assert trainer.state.global_step == 2

    def test_subclass_with_options_of_its_own(self, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")

        @dataclass
        class Mine(transformers.TrainingArguments):  # type: ignore[misc, name-defined]
            margin: float = 0.5

        trainer = Trainer(Classifier(), self.make(tmp_path, Mine, margin=0.25), train_dataset=DATA)
        assert trainer.args.margin == 0.25  # type: ignore[attr-defined]

    def test_of_sequence_to_sequence(self, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        theirs = self.make(tmp_path, transformers.Seq2SeqTrainingArguments, generation_num_beams=3)
        assert Trainer(Classifier(), theirs).args.generation_num_beams == 3  # type: ignore[attr-defined]

    def test_anything_else_is_refused(self) -> None:
        with pytest.raises(TypeError, match="`args` is dict"):
            Trainer(nn.Linear(1, 1), {"output_dir": "x"})  # type: ignore[arg-type]


def test_a_header_is_printed_unless_the_log_or_a_quiet_display_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten lines, and a loss at the end of a run shorter than `logging_steps`."""
    make_trainer(tmp_path, Tagger(), tagging(8), disable_tqdm=False, logging_steps=500, max_steps=2).train()
    shown = capsys.readouterr().out
    assert shown.startswith("Training Tagger: ")
    assert "parameters, on cpu\n  steps      2 (" in shown
    assert f"output     {tmp_path}" in shown
    assert "\n  lengths    " in shown
    assert "\n  optimizer  AdamW, learning rate 5e-05, schedule linear\n  memory     " in shown
    assert "'loss'" in shown
    for options in ({"disable_tqdm": True}, {"log_level": "error"}, {"log_level": "info"}):
        make_trainer(tmp_path, Tagger(), tagging(8), **{"disable_tqdm": False, "max_steps": 2, **options}).train()
        assert "Training Tagger" not in capsys.readouterr().out


class AddsUp(Trainer):
    """Adds the losses up in place, in the tensor of the first one."""

    total: torch.Tensor | None = None

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return self.add(super().compute_loss(*args, **kwargs))

    def add(self, loss: torch.Tensor) -> torch.Tensor:
        if self.total is None:
            self.total = loss.detach()
        else:
            self.total += loss.detach()
        return loss


class AddsUpSteps(AddsUp):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return Trainer.compute_loss(self, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.add(super().training_step(*args, **kwargs))


@pytest.mark.parametrize("cls", [AddsUp, AddsUpSteps])
def test_a_loss_that_user_code_changes_in_place_later_is_logged_as_it_was(tmp_path: Path, cls: type[Trainer]) -> None:
    logged = []
    for name, kind in (("plain", Trainer), ("own", cls)):
        trainer = make_trainer(tmp_path / name, Classifier(), DATA, cls=kind, logging_steps=4)
        trainer.train()
        logged.append(trainer.state.log_history[0]["loss"])
    assert logged[1] == logged[0]
