"""`MembersTrainer`: each member equals its run alone, resumes to the bit, stops and is saved by itself."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.small_models import Classifier
from torch import Tensor, nn
from torch.utils.data import Subset

from paceline import (
    BestRun,
    EarlyStoppingCallback,
    HPSearchBackend,
    Member,
    MembersTrainer,
    Pruning,
    SnapshotEnsemble,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    UnsupportedOption,
    ensemble_predict,
)
from paceline.pytorch.evaluation.samples import EvaluationSamples
from paceline.pytorch.members.data import bootstrap_places
from paceline.pytorch.members.search import RandomTrial
from paceline.search.trials import SearchError

torch.manual_seed(0)
FEATURES = torch.randn(40, 8)
LABELS = (FEATURES @ torch.randn(8, 4)).argmax(-1)
DATA = [{"x": x, "labels": y} for x, y in zip(FEATURES, LABELS, strict=True)]
MEMBERS = [
    Member(learning_rate=0.003, seed=1),
    Member(learning_rate=0.01, weight_decay=0.1, seed=2),
    Member(learning_rate=0.03, seed=3, lr_scheduler_type="cosine", name="fast"),
]


class Fresh(Classifier):
    """A classifier whose weights come from the global generator, as those of most models do."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout, seed=int(torch.randint(10**6, ())))


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 2,
    }
    return TrainingArguments(str(folder), **{**defaults, **options})


def members_of(folder: Path, members: Any = None, options: Any = None, **given: Any) -> MembersTrainer:
    given = {"train_dataset": DATA, "model_init": Fresh, **given}
    return MembersTrainer(args=arguments(folder, **(options or {})), members=members or MEMBERS, **given)


def alone(trainer: MembersTrainer, number: int, folder: Path, **given: Any) -> Trainer:
    args = trainer.arguments_of(number)
    args.output_dir = str(folder / f"alone-{number}")
    run = Trainer(args=args, **{"train_dataset": DATA, "model_init": Fresh, **given})
    run.train()
    return run


def assert_same(own: nn.Module, other: nn.Module, tolerance: float = 1e-5) -> None:
    state = other.state_dict()
    for name, tensor in own.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=tolerance, atol=tolerance)


OPTIMIZERS = [
    {"optim": "adamw_torch"},
    {"optim": "adamw_torch_fused", "max_grad_norm": 0.1, "gradient_accumulation_steps": 3},
    {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=True", "max_grad_norm": 0.5, "weight_decay": 0.01},
    {"optim": "adam", "weight_decay": 0.01},
    {"optim": "rmsprop", "warmup_steps": 3, "lr_scheduler_type": "polynomial"},
]


@pytest.mark.parametrize("options", OPTIMIZERS, ids=lambda options: options["optim"])
def test_each_member_equals_its_run_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = members_of(tmp_path, options=options)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    for number, module in enumerate(trainer.modules()):
        run = alone(trainer, number, tmp_path)
        assert_same(module, run.model)
        name = trainer.members[number].name
        for own, row in zip(rows, (row for row in run.state.log_history if "loss" in row), strict=True):
            assert own[f"loss/{name}"] == pytest.approx(row["loss"], rel=1e-4)
            assert own[f"grad_norm/{name}"] == pytest.approx(row["grad_norm"], rel=1e-3)
            assert own[f"learning_rate/{name}"] == pytest.approx(row["learning_rate"])
    assert rows[0]["loss"] == pytest.approx(sum(rows[0][f"loss/{m.name}"] for m in trainer.members) / 3, rel=1e-5)


def test_members_read_their_own_samples(tmp_path: Path) -> None:
    members = [Member(data_seed=5), Member(data_seed=6, learning_rate=0.01), Member(bootstrap=7)]
    trainer = members_of(tmp_path, members, {"max_steps": 14})  # more than one epoch
    trainer.train()
    for number, module in enumerate(trainer.modules()):
        own = Subset(DATA, bootstrap_places(len(DATA), 7).tolist()) if number == 2 else DATA
        assert_same(module, alone(trainer, number, tmp_path, train_dataset=own).model)


class NormedConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 4, 3, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 4)
        )

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layers(x.unsqueeze(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.lstm(x.unsqueeze(1))[0][:, -1])
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_each_member_has_its_own_statistics_of_batch_norm(tmp_path: Path, smoothing: float) -> None:
    trainer = members_of(tmp_path, options={"label_smoothing_factor": smoothing}, model_init=NormedConvolution)
    trainer.train()
    for number, module in enumerate(trainer.modules()):
        assert_same(module, alone(trainer, number, tmp_path, model_init=NormedConvolution).model)


class Scaled(Fresh):
    """With a parameter that has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def logits(self, x: Tensor) -> Tensor:
        return self.scale * super().logits(x)


def test_a_parameter_without_dimensions_is_trained(tmp_path: Path) -> None:
    trainer = members_of(tmp_path, options={"max_grad_norm": 0.5}, model_init=Scaled)
    trainer.train()
    for number, module in enumerate(trainer.modules()):
        assert_same(module, alone(trainer, number, tmp_path, model_init=Scaled).model)


def test_a_member_that_has_stopped_keeps_its_statistics_of_batch_norm(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "score", "save_strategy": "steps"}
    options |= {"save_steps": 1, "max_steps": 6}

    def given(*factors: float) -> dict[str, Any]:
        """The score of each member rises by its factor from evaluation to evaluation."""
        scores = (factor * number for number in itertools.count() for factor in factors)
        return {
            "eval_dataset": DATA[:8],
            "compute_metrics": lambda _: {"score": next(scores)},
            "callbacks": [EarlyStoppingCallback(2)],
            "model_init": NormedConvolution,
        }

    for resumes in (False, True):
        trainer = members_of(tmp_path / "all", MEMBERS[:2], options, **given(1.0, 0.0))
        trainer.train(resume_from_checkpoint=str(tmp_path / "all" / "checkpoint-5") if resumes else None)
        assert [result.stopped_step for result in trainer.results()] == [None, 3]
        assert_same(trainer.modules()[1], alone(trainer, 1, tmp_path, **given(0.0)).model)


class Centred(Fresh):
    """Keeps a running mean and counts its passes, in place or by assignment."""

    def __init__(self, assigns: bool, scale: float) -> None:
        super().__init__()
        self.assigns = assigns
        self.register_buffer("mean", scale * torch.randn(16))
        self.register_buffer("passes", torch.zeros(()))

    def begin(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        if self.training:
            mean, passes = 0.9 * self.mean + 0.1 * hidden.detach().mean(0), self.passes + 1
            if self.assigns:
                self.mean, self.passes = mean, passes
            else:
                self.mean.copy_(mean)
                self.passes.copy_(passes)
        return torch.tanh(hidden - self.mean) * (1 + 0.1 * self.passes)


@pytest.mark.parametrize("assigns", [False, True])
@pytest.mark.parametrize(("vectorize", "scale"), [(False, 0.0), (False, 0.1), (True, 0.1)])
def test_each_member_has_its_own_buffers(tmp_path: Path, assigns: bool, vectorize: bool, scale: float) -> None:
    def init() -> nn.Module:
        return Centred(assigns, scale)

    trainer = members_of(tmp_path, model_init=init, vectorize=vectorize)
    trainer.train()
    for number, module in enumerate(trainer.modules()):
        assert_same(module, alone(trainer, number, tmp_path, model_init=init).model)


def test_a_module_without_batching_rules_is_refused_before_the_first_step_and_trained_one_by_one(
    tmp_path: Path,
) -> None:
    trainer = members_of(tmp_path, model_init=Recurrent)
    with pytest.raises(UnsupportedOption, match=r"Recurrent cannot be computed .*vectorize=False"):
        trainer.train()
    assert trainer.state.global_step == 0
    trainer = members_of(tmp_path, model_init=Recurrent, vectorize=False)
    trainer.train()
    for number, module in enumerate(trainer.modules()):
        assert_same(module, alone(trainer, number, tmp_path, model_init=Recurrent).model)


def test_a_member_that_diverges_harms_no_other(tmp_path: Path) -> None:
    members = [Member(learning_rate=0.01), Member(learning_rate=1e38), Member(learning_rate=0.02)]
    trainer = members_of(tmp_path, members, {"optim": "sgd", "max_grad_norm": 0.0})
    trainer.train()
    assert not all(p.isfinite().all() for p in trainer.stack.member(1).parameters())
    for number in (0, 2):
        assert_same(trainer.stack.member(number), alone(trainer, number, tmp_path).model)
    last = [row for row in trainer.state.log_history if "loss" in row][-1]
    assert last["loss"] == pytest.approx((last["loss/member-0"] + last["loss/member-2"]) / 2, rel=1e-4)


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


@pytest.mark.parametrize("step", [3, 6])
def test_a_run_resumes_to_the_bit(tmp_path: Path, step: int) -> None:
    # the members differ in data and initialization, dropout is drawn, one has stopped early, and a log is half full
    members = [Member(0.5, seed=1, data_seed=4), Member(0.01, seed=2), Member(0.03, seed=3, bootstrap=1)]
    options = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "logging_steps": 4,
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
        "max_steps": 8,
    }
    given = {"eval_dataset": DATA[:8], "model_init": lambda: Fresh(dropout=0.3)}
    whole = members_of(tmp_path / "whole", members, options, callbacks=[EarlyStoppingCallback(2)], **given)
    whole.train()
    stopping: list[Any] = [EarlyStoppingCallback(2), StopAt(step)]
    first = members_of(tmp_path / "parts", members, options, callbacks=stopping, **given)
    first.train()
    second = members_of(tmp_path / "parts", members, options, callbacks=[EarlyStoppingCallback(2)], **given)
    second.train(resume_from_checkpoint=True)
    assert second.state.log_history[:-1] == [{**row} for row in whole.state.log_history[:-1]] or history(
        second
    ) == history(whole)
    for name, tensor in whole.stack.state_dict().items():
        assert torch.equal(tensor, second.stack.state_dict()[name]), name
    assert [r.best_step for r in second.results()] == [r.best_step for r in whole.results()]
    assert [r.stopped_step for r in second.results()] == [r.stopped_step for r in whole.results()]
    assert any(r.stopped_step is not None for r in whole.results())
    with pytest.raises(ValueError, match="resume with the same"):
        members_of(tmp_path / "parts", [*members[:2], Member(0.1)], options, **given).train(resume_from_checkpoint=True)


def history(trainer: Trainer) -> list[dict[str, float]]:
    timed = ("_runtime", "_per_second")
    rows = [{k: v for k, v in row.items() if not k.endswith(timed)} for row in trainer.state.log_history]
    return [row for row in rows if "train_loss" not in row]


@pytest.mark.slow
def test_members_stop_by_themselves_and_end_with_their_best_weights(tmp_path: Path) -> None:
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "metric_for_best_model": "accuracy",
        "load_best_model_at_end": True,
        "max_steps": 12,
        "lr_scheduler_type": "constant",
    }
    members = [Member(0.003), Member(0.1), Member(1.0)]

    def accuracy(prediction: Any) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    def given() -> dict[str, Any]:
        return {"eval_dataset": DATA[:12], "compute_metrics": accuracy, "callbacks": [EarlyStoppingCallback(2)]}

    trainer = members_of(tmp_path / "all", members, options, **given())
    trainer.train()
    results = trainer.results()
    for number, result in enumerate(results):
        run = alone(trainer, number, tmp_path, **given())
        assert_same(trainer.stack.member(number), run.model)
        assert result.best_metric == run.state.best_metric
        assert result.best_step == run.state.best_global_step
        assert result.stopped_step in (run.state.global_step, None)
        assert result.folder is not None
        assert_same(trainer.stack.member(number), load(result.folder))
    best = trainer.best_member()
    assert results[best].best_metric == max(result.best_metric or 0 for result in results)
    metrics = trainer.evaluate()
    assert metrics["eval_accuracy"] == metrics[f"eval_accuracy/member-{best}"] == results[best].best_metric
    assert len(trainer.predict(DATA[:5]).predictions) == 5
    output = ensemble_predict(
        [str(result.folder) for result in results], DATA[:12], alone(trainer, 0, tmp_path, **given())
    )
    same = ensemble_predict(trainer.modules(), DATA[:12], trainer)
    assert (output.predictions == same.predictions).all()
    assert [m["test_accuracy"] for m in same.members] == [metrics[f"eval_accuracy/member-{k}"] for k in range(3)]


def load(folder: Path) -> nn.Module:
    module = Fresh()
    module.load_state_dict(load_file(folder / "model.safetensors"))
    return module


def test_frozen_parameters_are_stored_once(tmp_path: Path) -> None:
    base = Classifier()
    base.first.requires_grad_(False)
    before = copy.deepcopy(base.state_dict())
    members = [Member(learning_rate=0.1 / (k + 1)) for k in range(3)]
    trainer = members_of(tmp_path, members, {"optim": "sgd"}, model=base, model_init=None)
    assert sum(p.numel() for p in trainer.stack.parameters()) == (8 * 16 + 16) + 3 * (16 * 4 + 4)
    trainer.train()

    def start() -> nn.Module:
        model = Classifier()
        model.load_state_dict(before)
        model.first.requires_grad_(False)
        return model

    for number, module in enumerate(trainer.modules()):
        assert torch.equal(module.first.weight, before["first.weight"])
        assert_same(module, alone(trainer, number, tmp_path, model_init=start).model)
        assert module.second.weight.requires_grad
        assert not module.first.weight.requires_grad


def test_a_loss_function_and_smoothing_are_those_of_each_member(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return nn.functional.cross_entropy(outputs, labels, label_smoothing=0.2)

    for options, given in (({}, {"compute_loss_func": loss}), ({"label_smoothing_factor": 0.1}, {})):
        trainer = members_of(tmp_path, options=options, **given)
        trainer.train()
        assert_same(trainer.stack.member(1), alone(trainer, 1, tmp_path, **given).model)


class OwnLoss(MembersTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    ("members", "options", "given", "message"),
    [
        ([Member()], {}, {}, "two or more"),
        ([{"learning_rate": 1.0}, {"batch_size": 2}], {}, {}, "batch size, is set in the training arguments"),
        ([Member(name="a"), Member(name="a")], {}, {}, "two have the name"),
        (None, {"fp16": True, "use_cpu": True}, {}, "fp16"),
        (None, {"gradient_checkpointing": True}, {}, "gradient_checkpointing=True"),
        (None, {"torch_compile": True}, {}, "torch_compile=True"),
        (None, {"ema_decay": 0.9}, {}, "ema_decay=0.9"),
        (None, {}, {"callbacks": [Pruning(0.5)]}, "Pruning chooses weights of one model"),
        (None, {}, {"callbacks": [SnapshotEnsemble]}, "SnapshotEnsemble saves the weights of one model"),
        (None, {}, {"callbacks": [EvaluationSamples()]}, "EvaluationSamples shows the predictions of one model"),
        (None, {"pruning": 0.5}, {}, "pruning"),
        (None, {"regularizers": "sam(0.05)"}, {}, "regularizers"),
        (None, {"nonfinite_policy": "rollback"}, {}, "nonfinite_policy='rollback'"),
        (None, {"optim": "adafactor"}, {}, "Adafactor does not update element by element"),
        (None, {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, {}, "reduce_lr_on_plateau"),
        (None, {}, {"model": Classifier(), "model_init": None}, "give MembersTrainer model_init"),
        ([Member(data_seed=1), Member()], {"gradient_accumulation_steps": 2}, {}, "gradient_accumulation_steps=2"),
        ([Member(data_seed=1), Member()], {}, {"train_dataset": iter(DATA)}, "with a stream"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, members: Any, options: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        members_of(tmp_path, members, options, eval_dataset=DATA[:4], **given).train()


def test_settings_and_overrides_are_checked(tmp_path: Path) -> None:
    for wrong in ({"learning_rate": -1.0}, {"seed": 0.5}, {"name": "a/b"}, {"weight_decay": float("nan")}):
        with pytest.raises(ValueError, match=f"Member.{next(iter(wrong))}"):
            Member(**wrong)
    with pytest.raises(UnsupportedOption, match="compute_loss is overridden"):
        OwnLoss(args=arguments(tmp_path), members=MEMBERS, model_init=Fresh, train_dataset=DATA)
    for name in ("find_lr", "hyperparameter_search", "doctor"):
        with pytest.raises(UnsupportedOption, match=f"{name} of a MembersTrainer"):
            getattr(members_of(tmp_path), name)()
    other = iter([Classifier(), Classifier(features=9)])
    with pytest.raises(UnsupportedOption, match="differ in their architecture"):
        members_of(tmp_path, [Member(), Member()], model_init=lambda: next(other))


class Limit(TrainerCallback):
    """Changes the norm to which gradients are clipped after step 3."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            assert control.max_grad_norm == pytest.approx(0.5)
            control.max_grad_norm = 0.02


def test_a_changed_clipping_norm_is_that_of_each_member_also_after_a_resume(tmp_path: Path) -> None:
    options = {"max_grad_norm": 0.5, "optim": "sgd", "save_strategy": "steps", "save_steps": 5}
    trainer = members_of(tmp_path, options=options, callbacks=[Limit()])
    trainer.train()
    for number, module in enumerate(trainer.modules()):
        assert_same(module, alone(trainer, number, tmp_path, callbacks=[Limit()]).model)
    resumed = members_of(tmp_path, options=options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    for own, other in zip(resumed.modules(), trainer.modules(), strict=True):
        assert_same(own, other, 0.0)


SIZES: list[int] = []  # of the micro-batches


class Full(Fresh):
    """Runs out of memory with 4 samples from a later micro-batch of a window on."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        SIZES.append(len(x))
        if len(SIZES) > 8 and len(x) == 4:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(x, labels)


def test_a_step_that_runs_again_counts_once_in_the_logged_losses(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 3, "logging_steps": 1, "max_steps": 3, "auto_find_batch_size": True}
    rows = []
    for model_init in (Fresh, Full):
        trainer = members_of(tmp_path, options=options, model_init=model_init)
        trainer.train()
        rows.append([row["loss/fast"] for row in trainer.state.log_history if "loss/fast" in row])
    assert SIZES[-1] == 2
    assert rows[0] == pytest.approx(rows[1], rel=1e-5)


class OwnStopping(EarlyStoppingCallback):
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


def test_early_stopping_that_cannot_be_that_of_each_member_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match="on_evaluate of OwnStopping"):
        members_of(tmp_path, callbacks=[OwnStopping()])
    with pytest.raises(UnsupportedOption, match="one EarlyStoppingCallback"):
        members_of(tmp_path, callbacks=[EarlyStoppingCallback(1), EarlyStoppingCallback(9)])
    with pytest.raises(ValueError, match="from 0 to 2"):
        members_of(tmp_path).predict(DATA, member=3)


def test_a_given_model_is_left_as_it_is(tmp_path: Path) -> None:
    model = Classifier()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for folder in ("one", "two"):
        members = [Member(learning_rate=0.1), Member(learning_rate=0.01)]
        members_of(tmp_path / folder, members, {"max_steps": 1}, model=model, model_init=None).train()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_best_member_is_logged_for_one_of_several_evaluation_sets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 8, "metric_for_best_model": "a_loss"}
    trainer = members_of(tmp_path, options=options, eval_dataset={"a": DATA, "b": DATA[:10]})
    trainer.train()
    assert "no eval_a_loss" not in caplog.text
    metrics = trainer.evaluate()
    for name in ("eval_a_loss", "eval_b_loss"):
        assert metrics[name] == min(metrics[f"{name}/{member.name}"] for member in trainer.members)
    assert trainer.state.best_metric == metrics["eval_a_loss"]


def test_early_stopping_that_is_added_later_applies_to_each_member(tmp_path: Path) -> None:
    trainer = members_of(tmp_path, options={"eval_strategy": "epoch", "metric_for_best_model": "loss"})
    trainer.add_callback(EarlyStoppingCallback(1))
    assert not any(isinstance(each, EarlyStoppingCallback) for each in trainer.callback_handler.callbacks)
    with pytest.raises(ValueError, match="eval_dataset"):
        trainer.train()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no batching rule for flash attention
def test_bert_and_gpt2_members_equal_their_runs_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    caplog.set_level(logging.ERROR)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 40, (16, 6), generator=generator)
    shared = {"vocab_size": 40, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    gpt = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=8, **shared)
    labels = ids.clone()
    labels[:, 4:] = torch.where(torch.arange(16)[:, None] % 3 > 0, labels[:, 4:], -100)
    texts = [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bert = transformers.BertConfig(vocab_size=40, **sizes, **off)
    classes = [{"input_ids": a, "attention_mask": (a > 3).long(), "labels": a[0] % 2} for a in ids]
    makers = [
        (lambda: transformers.GPT2LMHeadModel(gpt), texts),
        (lambda: transformers.BertForSequenceClassification(bert), classes),
    ]
    for make, data in makers:
        members = [Member(0.001, seed=1), Member(0.01, seed=2)]
        options = {"max_steps": 3, "gradient_accumulation_steps": 2, "save_strategy": "steps"}
        trainer = members_of(tmp_path, members, options, model_init=make, train_dataset=data)
        trainer.train()
        for number, module in enumerate(trainer.modules()):
            assert_same(module, alone(trainer, number, tmp_path, model_init=make, train_dataset=data).model)
            folder = trainer.results()[number].folder
            loaded = type(module).from_pretrained(folder)
            assert_same(module, loaded, 0.0)


def test_a_resume_with_another_number_of_members_says_so(tmp_path: Path) -> None:
    members = [Member(0.01, seed=seed) for seed in range(3)]
    members_of(tmp_path, members, {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}).train()
    for others in (members[:2], [*members, Member(0.01, seed=3)]):
        fewer = members_of(tmp_path, others, {"max_steps": 4, "save_strategy": "no"})
        with pytest.raises(
            ValueError, match=f"resume with as many as the checkpoint has, here there are {len(others)}"
        ):
            fewer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_random_trials_have_the_methods_of_optuna() -> None:
    optuna = pytest.importorskip("optuna")
    for name in ("suggest_float", "suggest_int", "suggest_categorical"):
        theirs, ours = (inspect.signature(getattr(kind, name)) for kind in (optuna.Trial, RandomTrial))
        assert [(one.name, one.kind, one.default) for one in theirs.parameters.values()] == [
            (one.name, one.kind, one.default) for one in ours.parameters.values()
        ]
    trials = [RandomTrial(number, 0) for number in range(300)]
    assert {trial.suggest_int("steps", 2, 9, step=3) for trial in trials} == {2, 5, 8}
    assert {round(trial.suggest_float("float steps", 0.1, 0.5, step=0.2), 9) for trial in trials} == {0.1, 0.3, 0.5}
    small = sum(trial.suggest_int("log", 1, 1000, log=True) <= 31 for trial in trials)
    assert 120 < small < 220  # half of the range of the logarithm
    assert min(trial.params["log"] for trial in trials) >= 1
    assert trials[0].suggest_int("log", 1, 1000, log=True) == trials[0].params["log"]
    for wrong in (
        lambda trial: trial.suggest_int("x", 3, 2),
        lambda trial: trial.suggest_int("x", 1, 9, step=0),
        lambda trial: trial.suggest_int("x", 1, 9, step=2, log=True),
        lambda trial: trial.suggest_float("x", 0.0, 1.0, log=True),
        lambda trial: trial.suggest_categorical("x", []),
    ):
        with pytest.raises(SearchError, match="hp_space: x"):
            wrong(trials[0])


def test_a_search_trains_its_trials_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(tmp_path, max_steps=6, optim="sgd")
    trainer = Trainer(model_init=Fresh, args=args, train_dataset=DATA, eval_dataset=DATA[:12])

    def space(trial: Any) -> dict[str, Any]:
        seed = trial.suggest_int("seed", 1, 9)
        return {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1.0, log=True), "seed": seed}

    losses: list[float] = []

    def objective(metrics: dict[str, float]) -> float:
        losses.append(metrics["eval_loss"])
        return losses[-1]

    options = {"hp_space": space, "compute_objective": objective, "n_trials": 5, "backend": HPSearchBackend.MEMBERS}
    best = trainer.hyperparameter_search(members_at_once=2, **options)
    assert isinstance(best, BestRun)
    assert len(losses) == 5
    assert best.objective == min(losses) == losses[int(best.run_id)]
    alone = Trainer(
        model_init=Fresh,
        args=arguments(tmp_path / "alone", max_steps=6, optim="sgd", data_seed=42, **best.hyperparameters),
        train_dataset=DATA,
        eval_dataset=DATA[:12],
    )
    alone.train()
    assert alone.evaluate()["eval_loss"] == pytest.approx(best.objective, rel=1e-5)
    again = trainer.hyperparameter_search(**options)
    assert "members-0, members-1, members-2 of an earlier search" in caplog.text
    assert again.hyperparameters == best.hyperparameters  # type: ignore[union-attr]
    for wrong in ("per_device_train_batch_size", "num_hidden_layers", "num_train_epochs"):
        with pytest.raises(ValueError, match=f"{wrong}' cannot differ between members"):
            trainer.hyperparameter_search(backend="members", n_trials=2, hp_space=lambda trial, name=wrong: {name: 8})
    with pytest.raises(ValueError, match="n_jobs"):
        trainer.hyperparameter_search(n_jobs=2, **options)
    with pytest.raises(ValueError, match=r"storage='x'.*a search that died starts again"):
        trainer.hyperparameter_search(storage="x", **options)

    class Other(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    for given, wrong in (({"teacher": Fresh()}, "teacher"), ({"callbacks": [Pruning(0.5)]}, "Pruning chooses")):
        limited = Trainer(model_init=Fresh, args=args, train_dataset=DATA, eval_dataset=DATA[:12], **given)
        with pytest.raises(ValueError, match=wrong):
            limited.hyperparameter_search(**options)
    with pytest.raises(ValueError, match="hp_name"):
        trainer.hyperparameter_search(hp_name=str, **options)
    other = Other(model_init=Fresh, args=args, train_dataset=DATA, eval_dataset=DATA[:12])
    with pytest.raises(ValueError, match="compute_loss of Other is overridden"):
        other.hyperparameter_search(**options)
