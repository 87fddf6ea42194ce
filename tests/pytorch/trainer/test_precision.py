"""bf16 and fp16: what runs in 16 bits, what an overflow does, and that evaluation in 16 bits leaves no trace."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow_but
from small_models import Classifier, classification, losses, make_trainer, weights
from torch import Tensor
from torch.nn import functional

from paceline import Trainer, TrainerCallback

DATA = classification(24)


class Typed(Classifier):
    """Notes in which type the matrix products ran; `factor` makes the gradients too large for float16."""

    def __init__(self, factor: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.factor = factor
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.logits(x)
        self.seen.append(logits.dtype)
        if labels is None:
            return logits
        return functional.cross_entropy(logits.float(), labels) * self.factor, logits


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize(("option", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_products_in_16_bits_parameters_in_32(tmp_path: Path, option: str, dtype: torch.dtype) -> None:
    full, mixed = Typed(), Typed()
    make_trainer(tmp_path / "full", full, DATA).train()
    trainer = make_trainer(tmp_path, mixed, DATA, eval_dataset=DATA, compute_metrics=lambda p: {}, **{option: True})
    trainer.train()
    assert set(mixed.seen) == {dtype}
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in mixed.parameters() if p.grad is not None)
    torch.testing.assert_close(weights(mixed), weights(full), rtol=0.05, atol=0.01)
    assert not torch.equal(weights(mixed), weights(full))
    mixed.seen.clear()
    predictions = trainer.predict(DATA)
    assert set(mixed.seen) == {dtype}
    assert predictions.predictions.dtype.name in ("float32", "float16")
    assert predictions.metrics["test_loss"] == pytest.approx(trainer.evaluate()["eval_loss"])


def test_float16_on_a_cpu_is_said_to_be_slow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(tmp_path, Classifier(), DATA, bf16=True).train()
    assert "on a CPU" not in caplog.text
    make_trainer(tmp_path, Classifier(), DATA, fp16=True).train()
    assert caplog.text.count("fp16=True on a CPU: most CPUs emulate float16") == 1


class Logits(Classifier):
    def forward(self, x: Tensor) -> Any:
        return self.logits(x)


class OwnLoss(Trainer):
    seen: set[torch.dtype]

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        outputs = model(inputs["x"])
        self.seen.add(outputs.dtype)
        loss = functional.cross_entropy(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("option", ["bf16", "fp16"])
@pytest.mark.parametrize("way", ["function", "override"])
def test_a_loss_made_from_the_outputs_is_made_in_full_precision(tmp_path: Path, way: str, option: str) -> None:
    seen: set[torch.dtype] = set()
    rows: list[str] = []

    def compute_loss(outputs: Tensor, labels: Tensor) -> Tensor:
        seen.add(outputs.dtype)
        return functional.cross_entropy(outputs, labels)

    def compute_metrics(prediction: Any) -> dict[str, float]:
        rows.append(prediction.predictions.dtype.name)
        return {}

    OwnLoss.seen = seen
    model = Logits()
    trainer = make_trainer(
        tmp_path,
        model,
        DATA,
        cls=OwnLoss if way == "override" else Trainer,
        compute_loss_func=compute_loss if way == "function" else None,
        eval_dataset=DATA,
        compute_metrics=compute_metrics,
        **{option: True},
    )
    trainer.train()
    assert seen == {torch.float32}
    trainer.evaluate()
    rows.append(trainer.predict(DATA).predictions.dtype.name)
    assert seen == {torch.float32}
    assert set(rows) == {"float32"}
    assert not model._forward_hooks


def test_an_overflow_skips_update_and_schedule(tmp_path: Path) -> None:
    """The scale starts at 65,536: gradients of 100 and more overflow until it has been halved often enough."""
    rows: list[tuple[bool, float, float, int]] = []

    class Watch(TrainerCallback):
        before: Tensor | None = None

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.before = weights(model).clone()

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            assert self.before is not None
            moved = not torch.equal(weights(model), self.before)
            rate = kwargs["optimizer"].param_groups[0]["lr"]
            rows.append((moved, trainer.strategy.precision.scaler.get_scale(), rate, kwargs["lr_scheduler"].last_epoch))

    trainer = make_trainer(
        tmp_path, Typed(factor=100.0), DATA, fp16=True, callbacks=[Watch()], num_train_epochs=3, learning_rate=1e-3
    )
    trainer.train()
    assert len(rows) == trainer.state.global_step == 18
    moved = [row[0] for row in rows]
    num_skipped = moved.index(True)
    assert 2 <= num_skipped < 15
    assert all(moved[num_skipped:])
    assert rows[0][1] == 65536 / 2
    assert rows[num_skipped - 1][1] == 65536 / 2**num_skipped
    assert [row[3] for row in rows] == [max(0, step - num_skipped) for step in range(1, 19)]
    assert all(row[2] == 1e-3 for row in rows[:num_skipped])
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_clipping_sees_true_gradients(tmp_path: Path, accumulation: int) -> None:
    """The logged norm is that of the gradients without the scale."""
    norms = []
    for fp16 in (False, True):
        trainer = make_trainer(
            tmp_path,
            Typed(),
            DATA,
            fp16=fp16,
            max_grad_norm=0.01,
            gradient_accumulation_steps=accumulation,
            max_steps=2,
        )
        trainer.train()
        norms.append([row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row])
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["bf16", "fp16"])
@pytest.mark.parametrize("stop", slow_but([2], [2, 9]))
def test_resume_is_exact(tmp_path: Path, option: str, stop: int) -> None:
    def run(folder: Path, stop: int | None = None, resume: bool | None = None) -> Any:
        trainer = make_trainer(
            folder,
            Typed(factor=100.0, dropout=0.2),
            DATA,
            save_strategy="steps",
            save_steps=1,
            num_train_epochs=3,
            learning_rate=1e-3,
            callbacks=[StopAt(stop)] if stop else None,
            **{option: True},
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", stop)
    assert (tmp_path / "parts" / f"checkpoint-{stop}" / "scaler.pt").is_file() == (option == "fp16")
    parts = run(tmp_path / "parts", resume=True)
    assert torch.equal(weights(whole.model), weights(parts.model))
    assert losses(whole) == losses(parts)
    if option == "fp16":
        assert whole.strategy.precision.state_dict() == parts.strategy.precision.state_dict()


@pytest.mark.parametrize(("option", "dtype"), [("bf16_full_eval", torch.bfloat16), ("fp16_full_eval", torch.float16)])
def test_evaluation_in_16_bits_restores_every_bit(tmp_path: Path, option: str, dtype: torch.dtype) -> None:
    model = Typed()
    model.register_buffer("counts", torch.arange(3))
    model.register_buffer("mean", torch.full((3,), 1 / 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    places = {name: value.data_ptr() for name, value in model.state_dict().items()}
    trainer = make_trainer(tmp_path, model, eval_dataset=[{**s, "x": s["x"].to(dtype)} for s in DATA], **{option: True})
    metrics = trainer.evaluate()
    assert set(model.seen) == {dtype}
    assert metrics["eval_loss"] > 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.data_ptr() == places[name]


def test_evaluation_in_16_bits_restores_when_it_fails(tmp_path: Path) -> None:
    model = Typed()
    before = weights(model).clone()
    trainer = make_trainer(tmp_path, model, eval_dataset=DATA, bf16_full_eval=True)
    with pytest.raises(IndexError):
        trainer.evaluate([{**sample, "labels": torch.tensor(99)} for sample in DATA])
    assert torch.equal(weights(model), before)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_evaluation_in_16_bits_casts_inputs_but_not_labels(tmp_path: Path) -> None:
    """A model in bfloat16 takes no float32 inputs; the labels are what the metrics compare with."""
    layer = torch.nn.Linear(8, 1)
    data = [{"input": sample["x"], "labels": sample["x"][:1] * 1.001} for sample in DATA]
    trainer = make_trainer(
        tmp_path, layer, eval_dataset=data, compute_loss_func=torch.nn.functional.mse_loss, bf16_full_eval=True
    )
    predicted = trainer.predict(data)
    assert predicted.label_ids.ravel().tolist() == [float(sample["labels"]) for sample in data]
    exact = layer(torch.stack([sample["input"] for sample in data])).detach()
    torch.testing.assert_close(torch.from_numpy(predicted.predictions), exact, rtol=0.05, atol=0.05)
    assert not layer._forward_pre_hooks


def test_evaluation_in_16_bits_during_training_changes_nothing(tmp_path: Path) -> None:
    class Casts(Typed):
        def logits(self, x: Tensor) -> Tensor:
            return super().logits(x.to(self.first.weight.dtype))

    found = []
    for full_eval in (False, True):
        model = Casts(dropout=0.1)
        options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": DATA}
        make_trainer(tmp_path, model, DATA, bf16_full_eval=full_eval, **options).train()
        found.append(weights(model))
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize(("tf32", "expected"), [(True, "high"), (False, "highest"), (None, "medium")])
def test_tf32(tmp_path: Path, tf32: bool | None, expected: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        make_trainer(tmp_path, Classifier(), DATA, tf32=tf32, max_steps=1).train()
        assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)
