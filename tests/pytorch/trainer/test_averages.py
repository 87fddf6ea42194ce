"""`ema_decay` and `swa_start`: the numbers, what is evaluated and saved, resume, and what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from safetensors.torch import load_file
from small_models import Classifier
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from paceline import Trainer, TrainerCallback, TrainingArguments, UnsupportedOption

STEPS = 12


def rows(number: int = 48) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(number, 8, generator=generator)
    return [{"x": x, "labels": x[:4].argmax()} for x in xs]


class Watch(TrainerCallback):
    """Keeps the training weights of each step."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop = stop
        self.weights: list[dict[str, Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights.append({name: value.detach().clone() for name, value in model.named_parameters()})
        if state.global_step == self.stop:
            control.should_training_stop = True


def make(folder: Path, model: nn.Module | None = None, callbacks: Any = (), **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.05,
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "disable_tqdm": True,
        "report_to": "none",
        "use_cpu": True,
    }
    args = TrainingArguments(str(folder), **{**defaults, **options})
    return Trainer(
        model if model is not None else Classifier(dropout=0.1),
        args,
        train_dataset=rows(),
        eval_dataset=rows(16),
        callbacks=list(callbacks),
    )


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


KINDS: dict[str, dict[str, Any]] = {
    "ema": {"ema_decay": 0.9},
    "ema without warm-up": {"ema_decay": 0.7, "ema_warmup": False, "average_steps": 3},
    "ema on the host": {"ema_decay": 0.9, "average_device": "cpu"},
    "swa": {"swa_start": 0.4, "average_steps": 1, "swa_lr": 0.02, "swa_anneal_steps": 2},
    "swa by epochs": {"swa_start": 3},
}


def test_the_moving_average(tmp_path: Path) -> None:
    watch, model = Watch(), Classifier()
    first = values(model)
    make(tmp_path, model, [watch], ema_decay=0.8, ema_warmup=True, average_steps=2).train()
    for step in range(2, STEPS + 1, 2):
        decay = min(0.8, (step - 1) / (step + 8)) ** 2
        first = {name: first[name] * decay + watch.weights[step - 1][name] * (1 - decay) for name in first}
    torch.testing.assert_close(values(model), first)


def test_the_mean_and_its_learning_rate(tmp_path: Path) -> None:
    watch, model = Watch(), Classifier()
    options = {"swa_start": 0.5, "average_steps": 2, "swa_lr": 0.01, "swa_anneal_steps": 2, "logging_steps": 1}
    trainer = make(tmp_path, model, [watch], **options)
    trainer.train()
    picked = [watch.weights[step - 1] for step in (6, 8, 10, 12)]
    mean = {name: torch.stack([each[name] for each in picked]).mean(0) for name in picked[0]}
    torch.testing.assert_close(values(model), mean)
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    assert rates[:6] == pytest.approx([0.05 * (1 - step / STEPS) for step in range(6)])
    assert rates[6:] == pytest.approx([0.025, 0.0175, 0.01, 0.01, 0.01, 0.01])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_unchanged_and_resumes_bit_for_bit(tmp_path: Path, kind: str) -> None:
    options = KINDS[kind]
    watch = Watch()
    whole = make(tmp_path / "whole", callbacks=[watch], **options)
    whole.train()
    if "swa_lr" not in options:
        plain = Watch()
        make(tmp_path / "plain", callbacks=[plain]).train()
        assert_same(watch.weights[-1], plain.weights[-1])
    make(
        tmp_path / "parts", callbacks=[Watch(7)], **options, save_strategy="steps", enable_jit_checkpoint=False
    ).train()
    later = Watch()
    resumed = make(tmp_path / "parts", Classifier(seed=5, dropout=0.1), callbacks=[later], **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-4"))
    assert_same(later.weights[-1], watch.weights[-1])
    assert_same(values(resumed.model), values(whole.model))
    losses = [
        [row["eval_loss"] for row in each.state.log_history if "eval_loss" in row and row["step"] > 4]
        for each in (whole, resumed)
    ]
    assert losses[0] == losses[1]


def test_evaluation_checkpoints_and_the_best_model_have_the_average(tmp_path: Path) -> None:
    class Save(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 8:
                trainer.save_model(str(tmp_path / "own"))

    watch = Watch()
    trainer = make(tmp_path, callbacks=[watch, Save()], ema_decay=0.9, load_best_model_at_end=True)
    trainer.train()
    for step in (4, 8, 12):
        weights = load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")
        assert not torch.equal(weights["first.weight"], watch.weights[step - 1]["first.weight"])
        model = Classifier()
        model.load_state_dict(weights)
        seen = next(
            row["eval_loss"] for row in trainer.state.log_history if row.get("step") == step and "eval_loss" in row
        )
        again = make(tmp_path / "again", model).evaluate()["eval_loss"]
        assert again == pytest.approx(seen, rel=1e-6)
    assert_same(
        load_file(tmp_path / "own" / "model.safetensors"), load_file(tmp_path / "checkpoint-8" / "model.safetensors")
    )
    best = load_file(Path(str(trainer.state.best_model_checkpoint)) / "model.safetensors")
    assert_same(values(trainer.model), best)


def interrupt(average: Any, is_inside: bool) -> None:
    with average.applied():
        if is_inside:
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_interrupted_exchange_is_undone(at: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.args.averages import AverageSettings
    from paceline.pytorch.optim.averages import AveragedWeights

    model = Classifier().to(dtype)
    average = AveragedWeights(model, AverageSettings("ema", 0.5))
    for parameter in model.parameters():
        parameter.data.add_(1.0)
    average.update()
    raw, kept = values(model), {name: value.clone() for name, value in average.state_dict()["average"].items()}
    calls = []

    def copy(self: Tensor, other: Tensor, *rest: Any) -> Tensor:
        calls.append(1)
        result = original(self, other, *rest)
        if len(calls) == at:
            raise KeyboardInterrupt
        return result

    original = Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", copy)
    with pytest.raises(KeyboardInterrupt):
        interrupt(average, at in (0, 7))
    monkeypatch.undo()
    assert_same(values(model), raw)
    assert_same(dict(average.state_dict()["average"]), kept)
    with average.applied():
        assert_same(values(model), {name: value.to(dtype) for name, value in kept.items()})
    assert_same(values(model), raw)


def test_an_error_in_an_evaluation_leaves_the_training_weights(tmp_path: Path) -> None:
    class Broken(Trainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("broken")

    watch, model = Watch(), Classifier()
    trainer = make(tmp_path, model, [watch], ema_decay=0.9)
    trainer.__class__ = Broken
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    assert_same(values(model), watch.weights[-1])


class Normed(nn.Module):
    """A classifier with batch norm, tied and frozen parameters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.same, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.same.weight = self.first.weight
        self.last.bias.requires_grad_(False)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.last(self.drop(self.norm(self.same(self.first(x)))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"ema_decay": 0.9}, {"swa_start": 2, "average_steps": 1}], ids=["ema", "swa"])
def test_batch_norm_tied_and_frozen_parameters(tmp_path: Path, options: dict[str, Any]) -> None:
    watch, plain = Watch(), Watch()
    whole = make(tmp_path / "whole", Normed(), [watch], **options)
    whole.train()
    make(tmp_path / "plain", Normed(), [plain]).train()
    assert_same(watch.weights[-1], plain.weights[-1])  # passes over the data leave no trace
    assert whole.model.same.weight is whole.model.first.weight
    assert whole.model.norm.momentum == 0.1
    state = torch.load(tmp_path / "whole" / "checkpoint-8" / "averages.pt", weights_only=True)
    expected = {name for name, value in Normed().named_parameters() if value.requires_grad}
    assert set(state["raw"]) == expected | {"norm.running_mean", "norm.running_var"}
    resumed = make(tmp_path / "whole", Normed(5), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-8"))
    assert_same(values(resumed.model), values(whole.model))
    if "swa_start" in options:
        model = whole.model.train()
        model.drop.p = 0.0
        with torch.no_grad():
            xs = torch.stack([row["x"] for row in rows()])
            hidden = model.same(model.first(xs))
        torch.testing.assert_close(model.norm.running_mean, hidden.mean(0))


class Frozen(nn.Module):
    """A batch norm that keeps its statistics in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.norm.running_mean.fill_(3.0)

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.norm(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_statistics_that_training_leaves_are_kept(tmp_path: Path) -> None:
    trainer = make(tmp_path, Frozen(), swa_start=0.5)
    trainer.train()
    assert trainer.model.norm.running_mean.eq(3).all()


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from rows()


def test_a_stream_is_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer = make(tmp_path, Frozen(), swa_start=0.5)
    trainer.train_dataset = Stream()
    with pytest.raises(UnsupportedOption, match="a stream of training data"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("options", [{"swa_start": STEPS + 1}, {"ema_decay": 0.9, "average_steps": STEPS + 1}])
def test_an_average_of_no_step_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{list(options)[-1]}={STEPS + 1} is"):
        make(tmp_path, **options).train()


def test_skipped_steps_do_not_enter(tmp_path: Path) -> None:
    class Poison(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return (
                loss * float("nan")
                if self.is_in_train and self.state.global_step == 5 and self.model.training
                else loss
            )

    watch = Watch()
    trainer = make(
        tmp_path, Classifier(), [watch], swa_start=1, average_steps=1, nonfinite_policy="skip", eval_strategy="no"
    )
    trainer.__class__ = Poison
    trainer.train()
    assert_same(watch.weights[4], watch.weights[5])
    picked = [each for index, each in enumerate(watch.weights) if index != 5]
    mean = {name: torch.stack([each[name] for each in picked]).mean(0) for name in picked[0]}
    torch.testing.assert_close(values(trainer.model), mean)


def test_a_rollback_rewinds_the_average(tmp_path: Path) -> None:
    class Poison(Trainer):
        is_done = False

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if self.state.global_step == 6 and not self.is_done and self.model.training:
                self.is_done = True
                return loss * float("nan")
            return loss

    trainer = make(tmp_path, Classifier(), ema_decay=0.9, nonfinite_policy="rollback", logging_steps=2)
    trainer.__class__ = Poison
    trainer.train()
    assert trainer.is_done
    assert all(bool(torch.isfinite(value).all()) for value in values(trainer.model).values())


def test_sixteen_bit_weights_have_an_average_in_float32(tmp_path: Path) -> None:
    options = {"ema_decay": 0.99, "ema_warmup": False}
    whole = make(tmp_path, Classifier().bfloat16(), **options)
    whole.train_dataset = [{"x": row["x"].bfloat16(), "labels": row["labels"]} for row in rows()]
    whole.eval_dataset = whole.train_dataset
    whole.train()
    state = torch.load(tmp_path / "checkpoint-8" / "averages.pt", weights_only=True)
    assert {value.dtype for value in state["average"].values()} == {torch.float32}
    assert {value.dtype for value in state["raw"].values()} == {torch.bfloat16}
    resumed = make(tmp_path, Classifier(seed=3).bfloat16(), **options)
    resumed.train_dataset = resumed.eval_dataset = whole.train_dataset
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert_same(values(resumed.model), values(whole.model))


def test_thawed_parameters_join(tmp_path: Path) -> None:
    class Thaw(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 5:
                model.first.requires_grad_(True)

    model = Classifier()
    model.first.requires_grad_(False)
    trainer = make(tmp_path, model, [Thaw()], ema_decay=0.9)
    trainer.train()
    names = [
        set(torch.load(tmp_path / f"checkpoint-{step}" / "averages.pt", weights_only=True)["raw"]) for step in (4, 8)
    ]
    assert names == [{"second.weight", "second.bias"}, {name for name, _ in model.named_parameters()}]


def test_a_run_without_the_average_says_what_it_resumes_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, callbacks=[Watch(4)], ema_decay=0.9).train()
    make(tmp_path).train(resume_from_checkpoint=True)
    assert "averages.pt" in caplog.text


def test_no_update_costs_more_than_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = torch._foreach_lerp_
    monkeypatch.setattr(torch, "_foreach_lerp_", lambda *args: calls.append(len(args[0])) or original(*args))
    make(tmp_path, ema_decay=0.9, average_steps=3, eval_strategy="no", save_strategy="no").train()
    assert calls == [4] * (STEPS // 3)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ema_decay": 1.0}, "ema_decay=1.0"),
    ({"ema_decay": 0.9, "swa_start": 0.5}, "two averages"),
    ({"swa_start": 1.5}, "swa_start=1.5"),
    ({"swa_lr": 0.1}, "requires swa_start"),
    ({"swa_start": 0.5, "swa_anneal_steps": 3}, "requires swa_lr"),
    ({"average_steps": 2}, "requires ema_decay or swa_start"),
    ({"ema_decay": 0.9, "average_device": "disk"}, "average_device"),
    ({"ema_decay": 0.9, "parallel": "xla"}, "ema_decay=0.9 is not supported on XLA"),
    ({"ema_decay": 0.9, "parallel": "fsdp", "checkpoint_format": "sharded"}, "checkpoint_format='full'"),
    ({"swa_start": 3, "deepspeed": {"zero_optimization": {"stage": 2}}}, "deepspeed"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_contradictions_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TrainingArguments(str(tmp_path), **options)


def test_an_optimizer_that_averages_is_refused(tmp_path: Path) -> None:
    class Free(torch.optim.SGD):
        def eval(self) -> None: ...

        def train(self) -> None: ...

    trainer = make(tmp_path, ema_decay=0.9)
    trainer.optimizer = Free(trainer.model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedOption, match="averages the weights itself"):
        trainer.train()


@pytest.mark.slow
def test_averages_of_replicas_and_shards(tmp_path: Path) -> None:
    processes.run("averages_job.py", 2, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for way in ("ddp", "fsdp", "whole"):
        torch.testing.assert_close(first[f"{way} straight"], first["ddp straight"], rtol=1e-5, atol=1e-6)
        assert torch.equal(first[f"{way} straight"], first[f"{way} resumed"])
        assert torch.equal(first[f"{way} straight"], second[f"{way} straight"])
        assert not torch.equal(first[f"{way} straight"], first[f"{way} plain"])
        raw = torch.load(tmp_path / f"one-{way}" / "checkpoint-8" / "averages.pt", weights_only=True)["raw"]
        assert all(type(value) is Tensor for value in raw.values())
