"""TrainingArguments: construction, derived values, assignment, round trips, secrets, setters."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import logging
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.args.accelerator_config import AcceleratorConfig
from paceline.args.choices import (
    BACKENDS,
    LOG_LEVELS,
    LOSS_WEIGHTS,
    TOKEN_COUNTS,
    IntervalStrategy,
    OptimizerNames,
    ParallelMode,
    SaveStrategy,
    SchedulerType,
)
from paceline.args.registry import SAMPLERS
from paceline.args.sections import Options
from paceline.args.seq2seq import Seq2SeqTrainingArguments
from paceline.args.training import TrainingArguments
from paceline.tensorflow.arguments import TFTrainingArguments


@dataclasses.dataclass(repr=False)
class MyArguments(TrainingArguments):
    """A user's subclass, with fields of its own and a changed default."""

    learning_rate: float = 2e-5
    temperature: float = 1.0
    beta: float = None  # type: ignore[assignment]  # Users write this.
    strategy: IntervalStrategy | str = "epoch"
    is_fast: bool = False


make: Any = TrainingArguments  # For what a type checker rightly refuses.


class LooseArguments(TrainingArguments):
    """A subclass with an __init__ of its own."""

    def __init__(self, output_dir: str, flavour: str = "plain", **kwargs: Any) -> None:
        super().__init__(output_dir, **kwargs)
        self.flavour = flavour


def test_import_and_construction_load_no_torch() -> None:
    code = (
        "import sys; import paceline.args.training, paceline.args.parser, paceline.args.seq2seq as s;"
        "s.Seq2SeqTrainingArguments('out', bf16=True); bad = {'torch', 'numpy', 'transformers'} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_first_positional_is_the_output_folder() -> None:
    assert TrainingArguments("here").output_dir == "here"
    assert TrainingArguments().output_dir == "trainer_output"
    assert TrainingArguments("~/runs").output_dir == str(Path.home() / "runs")
    assert TrainingArguments(Path("a") / "b").output_dir == str(Path("a/b"))  # type: ignore[arg-type]


def test_signature_is_the_real_one() -> None:
    parameters = inspect.signature(TrainingArguments).parameters
    assert list(parameters)[:2] == ["output_dir", "per_device_train_batch_size"]
    assert parameters["learning_rate"].default == 5e-5
    assert list(inspect.signature(LooseArguments).parameters) == ["output_dir", "flavour", "kwargs"]


@pytest.mark.parametrize(
    ("keyword", "nearest"),
    [
        ("learning_rte", "learning_rate"),
        ("per_device_batch_size", "per_device_eval_batch_size"),
        ("evaluation_stategy", "evaluation_strategy"),
    ],
)
def test_unknown_keyword_names_the_nearest(keyword: str, nearest: str) -> None:
    with pytest.raises(TypeError, match=rf"argument '{keyword}': no such option; did you mean '{nearest}'\?"):
        make(**{keyword: 1})
    with pytest.raises(TypeError, match="argument 'temprature': no such option; did you mean 'temperature'"):
        MyArguments(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"argument 'zzzz': no such option$"):
        TrainingArguments(zzzz=1)  # type: ignore[call-arg]


def test_subclasses() -> None:
    mine: Any = MyArguments
    args = mine("x", temperature="0.5", is_fast="yes", strategy="steps", evaluation_strategy="epoch")
    assert (args.temperature, args.is_fast, args.beta, args.learning_rate) == (0.5, True, None, 2e-5)
    assert args.strategy is IntervalStrategy.STEPS
    assert args.eval_strategy is IntervalStrategy.EPOCH
    loose = LooseArguments("x", flavour="sour", warmup_ratio=0.25)
    assert (loose.flavour, loose.warmup_steps) == ("sour", 0.25)
    seq2seq = Seq2SeqTrainingArguments("x", predict_with_generate=True, generation_max_length="20")  # type: ignore[arg-type]
    assert seq2seq.generation_max_length == 20


def test_a_field_under_an_older_name_acts() -> None:
    @dataclasses.dataclass(repr=False)
    class Own(TrainingArguments):
        warmup_ratio: float = 0.5

    args = Own(warmup_ratio=0.7)
    assert (args.warmup_ratio, args.warmup_steps) == (0.7, 0.7)


def test_every_option_is_explained_in_text_argparse_can_show() -> None:
    for item in dataclasses.fields(Seq2SeqTrainingArguments):
        text = item.metadata["help"]
        assert len(text) > 15, item.name
        assert "%" not in text, item.name
        assert text.endswith("."), item.name


def test_enum_like_options_equal_their_strings() -> None:
    args = TrainingArguments(eval_strategy="epoch", save_strategy="epoch", optim="sgd", lr_scheduler_type="cosine")
    assert args.eval_strategy == "epoch"
    assert isinstance(args.eval_strategy, IntervalStrategy)
    assert f"{args.save_strategy}" == "epoch"
    assert args.save_strategy == IntervalStrategy.EPOCH
    assert args.optim is OptimizerNames.SGD
    assert {args.lr_scheduler_type: 1}["cosine"] == 1
    assert TrainingArguments(optim="adamw_hf").optim == "adamw_torch"


DERIVED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"eval_strategy": "steps", "logging_steps": 20}, {"do_eval": True, "eval_steps": 20}),
    ({"eval_strategy": "steps", "eval_steps": 0, "logging_steps": 7}, {"eval_steps": 7}),
    ({"eval_strategy": "epoch"}, {"do_eval": True, "eval_steps": None}),
    ({}, {"do_eval": False, "metric_for_best_model": None, "greater_is_better": None}),
    (
        {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
        {"metric_for_best_model": "loss", "greater_is_better": False},
    ),
    (
        {"save_strategy": "best", "eval_strategy": "steps", "metric_for_best_model": "eval_f1"},
        {"metric_for_best_model": "eval_f1", "greater_is_better": True},
    ),
    ({"metric_for_best_model": "eval_loss"}, {"greater_is_better": False}),
    ({"metric_for_best_model": "loss", "greater_is_better": True}, {"greater_is_better": True}),
    (
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
        {"metric_for_best_model": "loss", "greater_is_better": False},
    ),
    ({"lr_scheduler_type": "greedy", "eval_strategy": "epoch"}, {"metric_for_best_model": "loss"}),
    ({"torch_compile_mode": "max-autotune"}, {"torch_compile": True, "torch_compile_backend": "inductor"}),
    ({"torch_compile_backend": "aot_eager"}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
    ({"torch_compile": True}, {"torch_compile_backend": "inductor"}),
    ({"use_cpu": True}, {"dataloader_pin_memory": False}),
    ({"gradient_checkpointing": True}, {"activation_checkpointing": True, "gradient_checkpointing": True}),
    ({"activation_checkpointing": True}, {"gradient_checkpointing": True}),
    ({"activation_checkpointing": False, "gradient_checkpointing": True}, {"gradient_checkpointing": False}),
    ({}, {"activation_checkpointing": False, "gradient_checkpointing": False}),
    (
        {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"activation_checkpointing_kwargs": {"use_reentrant": False}},
    ),
    ({"report_to": None}, {"report_to": []}),
    ({"report_to": "none"}, {"report_to": []}),
    ({"report_to": ["none"]}, {"report_to": []}),
    ({"report_to": "all"}, {"report_to": ["all"]}),
    ({"report_to": "tensorboard, csv"}, {"report_to": ["tensorboard", "csv"]}),
    ({"include_num_input_tokens_seen": True}, {"include_num_input_tokens_seen": "all"}),
    ({"include_num_input_tokens_seen": "false"}, {"include_num_input_tokens_seen": "no"}),
    ({"logging_steps": 20.0, "save_steps": "30"}, {"logging_steps": 20, "save_steps": 30}),
    ({"eval_delay": None, "max_grad_norm": None}, {"eval_delay": 0, "max_grad_norm": 0}),
    ({"debug": "", "include_for_metrics": None}, {"debug": [], "include_for_metrics": []}),
    ({"fp16": True}, {"mixed_precision": "fp16"}),
    ({"bf16": True}, {"mixed_precision": "bf16"}),
    ({}, {"mixed_precision": "no", "accelerator_config": AcceleratorConfig()}),
    ({"accelerator_config": '{"even_batches": true}'}, {"accelerator_config": AcceleratorConfig()}),
]


@pytest.mark.parametrize(("given_options", "expected"), DERIVED)
def test_values_that_follow(given_options: dict[str, Any], expected: dict[str, Any]) -> None:
    args = TrainingArguments("x", **given_options)
    assert {name: getattr(args, name) for name in expected} == expected


def test_integers_stay_integers() -> None:
    args = TrainingArguments(logging_steps=20.0, save_steps=1e3, warmup_steps=10)
    assert [type(value) for value in (args.logging_steps, args.save_steps, args.warmup_steps)] == [int, int, int]


def test_assignment_converts_and_derives_anew() -> None:
    args = TrainingArguments("x")
    args.learning_rate = "3e-4"  # type: ignore[assignment]
    args.eval_strategy = "steps"
    assert (args.learning_rate, args.eval_strategy, args.do_eval, args.eval_steps) == (3e-4, "steps", True, 500)
    args.logging_steps = 25
    assert args.eval_steps == 25
    args.eval_steps = 50
    args.logging_steps = 5
    assert args.eval_steps == 50
    args.load_best_model_at_end = True
    assert (args.metric_for_best_model, args.greater_is_better) == ("loss", False)
    args.metric_for_best_model = "accuracy"
    assert args.greater_is_better is True
    args.do_eval = False
    assert args.do_eval is False
    args.gradient_checkpointing = True
    assert args.activation_checkpointing is True
    with pytest.raises(ValueError, match="max_steps='many' is invalid: expected a number"):
        args.max_steps = "many"  # type: ignore[assignment]
    args.anything_else = [1]
    assert args.anything_else == [1]


def test_older_attributes_read_and_write_todays() -> None:
    args: Any = TrainingArguments("x", warmup_ratio=0.1, optim="sgd")  # type: ignore[call-arg]
    assert (args.warmup_ratio, args.evaluation_strategy, args.no_cuda, args.group_by_length) == (
        0.1,
        "no",
        False,
        False,
    )
    args.evaluation_strategy = "epoch"
    args.group_by_length = True
    args.no_cuda = True
    assert (args.eval_strategy, args.train_sampling_strategy, args.use_cpu) == ("epoch", "group_by_length", True)
    args.no_cuda = False
    args.group_by_length = False
    args.adafactor = False
    assert (args.use_cpu, args.train_sampling_strategy, args.optim) == (False, "random", "sgd")
    with pytest.raises(AttributeError, match="no attribute 'past_indices'"):
        _ = args.past_indices


def test_copies_are_equal_and_independent() -> None:
    args = TrainingArguments("x", eval_strategy="steps", report_to=["csv"])
    for twin in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args)), dataclasses.replace(args)):
        assert twin == args
        twin.logging_steps = 3
        assert args.logging_steps == 500
    assert dataclasses.replace(args, activation_checkpointing=True).gradient_checkpointing is True


def test_a_copy_repeats_no_warning_and_gives_its_own(caplog: pytest.LogCaptureFixture) -> None:
    args = TrainingArguments("x", eval_steps=10)
    for change in ({}, {"learning_rate": 1.0}, {"eval_strategy": "steps"}, {"seed": 2}):
        args = dataclasses.replace(args, **change)
    assert len(caplog.records) == 1, caplog.text
    dataclasses.replace(args, eval_strategy="no")
    assert len(caplog.records) == 1  # said of the first
    dataclasses.replace(args, eval_strategy="epoch")
    assert "eval_steps=10 has no effect with eval_strategy='epoch'" in caplog.records[1].getMessage()
    dataclasses.replace(TrainingArguments("x", eval_strategy="steps", eval_steps=0), seed=3)
    assert len(caplog.records) == 3


def test_a_copy_derives_anew_what_the_user_did_not_set(caplog: pytest.LogCaptureFixture) -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    args = TrainingArguments("x", **best, logging_steps=50, save_steps=100)
    assert (args.metric_for_best_model, args.greater_is_better, args.eval_steps) == ("loss", False, 50)
    other = dataclasses.replace(args, metric_for_best_model="accuracy", logging_steps=20)
    assert (other.greater_is_better, other.eval_steps) == (True, 20)
    given = dataclasses.replace(TrainingArguments("x", greater_is_better=False), metric_for_best_model="wer")
    assert given.greater_is_better is False
    plain = dataclasses.replace(args, load_best_model_at_end=False, eval_strategy="no")
    assert (plain.metric_for_best_model, plain.eval_steps) == (None, None)
    assert not caplog.records


def test_construction_changes_no_global_state(monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import random

    before = (dict(os.environ), random.getstate(), logging.getLogger("paceline").level)
    TrainingArguments("x", torch_compile=True, bf16=True, seed=1, log_level="debug")
    assert (dict(os.environ), random.getstate(), logging.getLogger("paceline").level) == before


# Round trips.

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
positive = st.integers(1, 10**6)
share = st.floats(0.001, 0.999)
numbers = st.floats(0, 1e6, allow_nan=False, allow_subnormal=False)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "output_dir": names.filter(lambda text: not text.startswith("~")),
    "per_device_train_batch_size": positive,
    "num_train_epochs": numbers,
    "max_steps": st.one_of(st.just(-1), positive),
    "learning_rate": numbers,
    "lr_scheduler_type": st.sampled_from(
        [item for item in SchedulerType if item not in ("greedy", "reduce_lr_on_plateau")]
    ),
    "lr_scheduler_kwargs": st.dictionaries(names, st.one_of(numbers, st.booleans(), names, st.none()), max_size=3),
    "warmup_steps": st.one_of(positive, share),
    "optim": st.sampled_from(OptimizerNames),
    "weight_decay": numbers,
    "adam_beta1": share,
    "max_grad_norm": st.one_of(numbers, st.just(math.inf)),
    "bf16": st.booleans(),
    "tf32": st.one_of(st.none(), st.booleans()),
    "activation_checkpointing": st.booleans(),
    "torch_compile_mode": st.one_of(st.none(), names),
    "neftune_noise_alpha": st.one_of(st.none(), numbers),
    "logging_steps": st.one_of(positive, share),
    "include_num_input_tokens_seen": st.sampled_from(TOKEN_COUNTS),
    "log_level": st.sampled_from(list(LOG_LEVELS)),
    "disable_tqdm": st.booleans(),
    "report_to": st.sampled_from([[], ["all"], ["csv"], ["csv", "jsonl"]]),
    "run_name": st.one_of(st.none(), names),
    "eval_strategy": st.sampled_from(IntervalStrategy),
    "eval_steps": st.one_of(st.none(), positive, share),
    "eval_delay": numbers,
    "include_for_metrics": st.lists(st.sampled_from(["inputs", "loss"]), unique=True),
    "save_strategy": st.sampled_from([item for item in SaveStrategy if item != "best"]),
    "save_total_limit": st.one_of(st.none(), positive),
    "metric_for_best_model": st.one_of(st.none(), names),
    "greater_is_better": st.one_of(st.none(), st.booleans()),
    "seed": st.integers(0, 2**32 - 1),
    "use_cpu": st.booleans(),
    "label_names": st.one_of(st.none(), st.lists(names, max_size=3)),
    "train_sampling_strategy": st.sampled_from(list(SAMPLERS)),
    "ddp_backend": st.one_of(st.none(), st.sampled_from(BACKENDS)),
    "loss_weight": st.one_of(st.none(), st.sampled_from(LOSS_WEIGHTS)),
    "logging_dir": st.one_of(st.none(), names),
}
some_options = st.fixed_dictionaries({}, optional=VALUES)


@given(some_options)
def test_round_trip_through_a_dict(options: dict[str, Any]) -> None:
    args = TrainingArguments(**options)
    values = args.to_dict()
    assert TrainingArguments.from_dict(values) == args
    assert TrainingArguments(**values) == args
    assert TrainingArguments.from_dict(values).to_dict() == values
    assert TrainingArguments.from_dict(json.loads(args.to_json_string())) == args


def test_derived_values_of_a_dict_follow_later_assignments(tmp_path: Path) -> None:
    """As those of the arguments that it is of; formerly the trip made them the user's own."""
    made = TrainingArguments(
        "x", load_best_model_at_end=True, eval_strategy="steps", logging_steps=7, save_steps=14, use_cpu=True,
        torch_compile_mode="default", accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 4}},
    )  # fmt: skip
    made.to_json(tmp_path / "args.json")
    made.to_yaml(tmp_path / "args.yaml")
    copies = [
        TrainingArguments.from_dict(made.to_dict()),
        TrainingArguments.from_json(tmp_path / "args.json"),
        TrainingArguments.from_yaml(tmp_path / "args.yaml"),
    ]
    assert copies == [made] * 3
    for args in (made, *copies):
        args.metric_for_best_model, args.use_cpu, args.logging_steps = "accuracy", False, 5
        args.torch_compile_mode = None
        assert (args.greater_is_better, args.dataloader_pin_memory, args.eval_steps) == (True, True, 5)
        args.torch_compile = False
        assert not args.torch_compile


def test_values_of_a_dict_that_do_not_follow_are_the_users_own() -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
    own = TrainingArguments("x", **best, metric_for_best_model="wer", greater_is_better=False, eval_steps=3)
    copy = TrainingArguments.from_dict(own.to_dict())
    copy.metric_for_best_model, copy.logging_steps = "f1", 9
    assert (copy.greater_is_better, copy.eval_steps) == (False, 3)
    given = TrainingArguments.from_dict({"eval_strategy": "steps", "eval_steps": 10, "logging_steps": 10})
    given.logging_steps = 5
    assert given.eval_steps == 10


@given(some_options)
def test_round_trip_through_files(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("args")
    args = TrainingArguments(**options)
    args.to_json(folder / "new" / "args.json")
    args.to_yaml(folder / "args.yaml")
    assert TrainingArguments.from_json(folder / "new" / "args.json") == args
    assert TrainingArguments.from_yaml(folder / "args.yaml") == args


@given(some_options)
def test_values_survive_a_trip_as_text(options: dict[str, Any]) -> None:
    """A command line and a shell know text only."""
    args = TrainingArguments(**options)
    texts = {
        name: json.dumps(item) if isinstance(item, (dict, list)) else str(item)
        for name, item in args.to_dict().items()
        if item is not None and not name.startswith("hub_")
    }
    for name in ("lr_scheduler_kwargs", "accelerator_config"):
        texts.pop(name, None)  # Text inside a dict is revived: "1" becomes 1.
    again = make(**texts)
    again.lr_scheduler_kwargs = args.lr_scheduler_kwargs
    assert again.to_dict() == args.to_dict()


def test_yaml_as_people_write_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "output_dir: out\nlearning_rate: 1e-4\neval_strategy: no\nsave_strategy: off\nbf16: on\nmax_steps: 1e3\n"
        "run_name: 2024\nlr_scheduler_kwargs: {num_cycles: 2}\n"
    )
    args = TrainingArguments.from_yaml(file)
    assert (args.learning_rate, args.eval_strategy, args.save_strategy, args.bf16) == (1e-4, "no", "no", True)
    assert (args.max_steps, args.run_name, args.lr_scheduler_kwargs) == (1000, "2024", {"num_cycles": 2})
    file.write_text("seed: 1\nseed: 2\n")
    with pytest.raises(ValueError, match="'seed' is given twice"):
        TrainingArguments.from_yaml(file)
    file.write_text("- seed\n")
    with pytest.raises(ValueError, match="holds a list"):
        TrainingArguments.from_yaml(file)
    file.write_text("{seed: ")
    with pytest.raises(ValueError, match="cannot be read"):
        TrainingArguments.from_yaml(file)
    file.write_text("")
    assert TrainingArguments.from_yaml(file) == TrainingArguments()


def test_secrets_never_leave(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    args = TrainingArguments("x", hub_token="hf_secret", log_level="debug")
    assert args.hub_token == "hf_secret"
    assert args.to_dict()["hub_token"] == "<HUB_TOKEN>"
    args.to_yaml(tmp_path / "a.yaml")
    args.to_json(tmp_path / "a.json")
    written = (tmp_path / "a.yaml").read_text() + (tmp_path / "a.json").read_text()
    texts = [written, repr(args), str(args), args.to_json_string(), str(args.to_sanitized_dict()), caplog.text]
    older = TrainingArguments("x", push_to_hub_token="hf_secret")  # type: ignore[call-arg]
    assert older.hub_token == "hf_secret"
    assert not any("hf_secret" in text for text in [*texts, caplog.text])
    assert TrainingArguments.from_yaml(tmp_path / "a.yaml").hub_token is None
    assert TrainingArguments(**args.to_dict()).hub_token is None


@pytest.mark.parametrize("kind", [TrainingArguments, TFTrainingArguments])
def test_signed_addresses_are_masked_where_they_are_written(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "of https://host/data?X-Amz-Signature=Zq7rT2xW9bVn4KcL8mPd"
    args = kind("x", run_name=name)
    args.to_yaml(tmp_path / "a.yaml")
    args.to_json(tmp_path / "a.json")
    texts = [(tmp_path / "a.yaml").read_text(), (tmp_path / "a.json").read_text(), args.to_json_string(), repr(args)]
    if kind is TFTrainingArguments:  # the other one asks for the device
        texts.append(str(args.to_sanitized_dict()))
    assert not any("Zq7rT2" in text for text in texts)
    assert args.run_name == args.to_dict()["run_name"] == copy.deepcopy(args).run_name == name
    assert kind(**args.to_dict()).run_name == name
    assert "Zq7rT2" not in kind.from_json(tmp_path / "a.json").run_name
    assert "A part of run_name was secret" in caplog.text


def test_sanitized_dict_holds_scalars_only() -> None:
    values = TrainingArguments("x", lr_scheduler_kwargs={"a": 1}, per_device_train_batch_size=3).to_sanitized_dict()
    assert {type(item) for item in values.values()} <= {bool, int, float, str}
    assert (values["train_batch_size"], values["eval_batch_size"]) == (3, 8)


def test_to_dict_copies_and_flattens() -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"beams": np.int64(2), "path": Path("a")}

    kwargs = {"every_n_layers": 2}
    args = Seq2SeqTrainingArguments("x", activation_checkpointing_kwargs=kwargs, generation_config=Config())  # type: ignore[arg-type]
    values = args.to_dict()
    values["activation_checkpointing_kwargs"]["every_n_layers"] = 3
    assert kwargs == {"every_n_layers": 2}
    assert values["generation_config"] == {"beams": 2, "path": "a"}


def test_dtypes_are_written_by_name() -> None:
    torch = pytest.importorskip("torch")

    @dataclasses.dataclass(repr=False)
    class WithModelKwargs(TrainingArguments):
        model_init_kwargs: dict[str, Any] | None = None

    values = WithModelKwargs("x", model_init_kwargs={"dtype": torch.bfloat16}).to_dict()
    assert values["model_init_kwargs"] == {"dtype": "bfloat16"}


# What scripts ask.


def test_numbers_and_processes() -> None:
    args = TrainingArguments("x", use_cpu=True, ddp_timeout=60, warmup_steps=0.1)
    assert args.get_warmup_steps(101) == 11
    assert TrainingArguments(warmup_steps=7).get_warmup_steps(3) == 7
    assert args.ddp_timeout_delta.total_seconds() == 60
    assert (args.train_batch_size, args.eval_batch_size) == (8, 8)
    assert str(args.device) == str(args._setup_devices) == "cpu"
    assert (args.world_size, args.process_index, args.local_process_index, args.n_gpu) == (1, 0, 0, 0)
    assert args.parallel_mode is ParallelMode.NOT_PARALLEL
    assert args.should_log
    assert args.should_save
    assert args.place_model_on_device is None
    assert args._no_sync_in_gradient_accumulation
    with args.main_process_first(desc="tokenising"):
        pass


def test_process_log_level() -> None:
    assert TrainingArguments(use_cpu=True, log_level="error").get_process_log_level() == logging.ERROR
    expected = logging.getLogger("paceline").getEffectiveLevel()
    assert TrainingArguments(use_cpu=True).get_process_log_level() == expected


def test_progress_bars_follow_the_logger() -> None:
    logger = logging.getLogger("paceline")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        assert TrainingArguments().disable_tqdm is True
        logger.setLevel(logging.WARNING)
        assert TrainingArguments().disable_tqdm is False
    finally:
        logger.setLevel(level)


def test_setters() -> None:
    args = (
        TrainingArguments("x")
        .set_training(learning_rate=1e-4, batch_size=32, num_epochs=2, gradient_checkpointing=True)
        .set_evaluate(strategy="steps", steps=100, batch_size=4, accumulation_steps=2, loss_only=True)
        .set_save(strategy="steps", steps=200, total_limit=3)
        .set_logging(strategy="epoch", report_to="csv", level="info", first_step=True)
        .set_optimizer(name="sgd", learning_rate=0.5, weight_decay=0.1, args="momentum=0.9")
        .set_lr_scheduler(name="cosine", max_steps=50, warmup_steps=0.05)
        .set_dataloader(train_batch_size=16, num_workers=2, prefetch_factor=4, sampler_seed=3)
        .set_testing(batch_size=5)
    )
    expected = {
        "do_train": True,
        "do_eval": True,
        "do_predict": True,
        "learning_rate": 0.5,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 5,
        "activation_checkpointing": True,
        "eval_strategy": "steps",
        "eval_steps": 100,
        "eval_delay": 0,
        "eval_accumulation_steps": 2,
        "prediction_loss_only": False,
        "save_steps": 200,
        "save_total_limit": 3,
        "logging_strategy": "epoch",
        "report_to": ["csv"],
        "log_level": "info",
        "logging_nan_inf_filter": False,
        "optim": "sgd",
        "optim_args": "momentum=0.9",
        "lr_scheduler_type": "cosine",
        "max_steps": 50,
        "warmup_steps": 0.05,
        "dataloader_num_workers": 2,
        "dataloader_prefetch_factor": 4,
        "data_seed": 3,
    }
    assert {name: getattr(args, name) for name in expected} == expected
    assert args.set_evaluate().do_eval is False


@pytest.mark.parametrize("setter", ["set_evaluate", "set_save", "set_logging"])
def test_setters_refuse_an_interval_of_zero(setter: str) -> None:
    with pytest.raises(ValueError, match="_steps=0 is invalid"):
        getattr(TrainingArguments("x"), setter)(strategy="steps", steps=0)


def test_set_push_to_hub() -> None:
    args = TrainingArguments("x").set_push_to_hub("owner/name", "end", token="secret", private_repo=True, revision="b")
    values = {name: value for name, value in args.to_dict().items() if "hub" in name}
    assert values == {
        "push_to_hub": True, "hub_model_id": "owner/name", "hub_strategy": "end", "hub_token": "<HUB_TOKEN>",
        "hub_private_repo": True, "hub_always_push": False, "hub_revision": "b",
    }  # fmt: skip
    assert args.hub_token == "secret"


def test_options_are_the_fields_of_the_arguments() -> None:
    assert [item.name for item in dataclasses.fields(TrainingArguments)] == [
        item.name for item in dataclasses.fields(Options)
    ]


def test_the_docstring_holds_the_text_of_each_option() -> None:
    """Written where the option is declared; a subclass adds its own fields to it."""
    text = inspect.getdoc(TrainingArguments) or ""
    assert text.startswith("All options of a run")
    for item in dataclasses.fields(TrainingArguments):
        assert f"    {item.name} (" in text
        assert " ".join(item.metadata["help"].split()) in " ".join(text.split())
    assert "learning_rate (float, default 5e-05):" in text

    @dataclasses.dataclass
    class Flavoured(TrainingArguments):
        """With a flavour."""

        flavour: str = dataclasses.field(default="plain", metadata={"help": "What it tastes like."})

    own = inspect.getdoc(Flavoured) or ""
    assert own.startswith("With a flavour.")
    assert "What it tastes like." in own
    assert "Peak learning rate" in own
    Flavoured.__doc__ = "Another."
    assert (inspect.getdoc(Flavoured) or "").startswith("Another.")
