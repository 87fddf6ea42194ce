"""The optimizer and the schedule of a run, and their exact state after resuming."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, losses, make_trainer, weights

import paceline
from paceline import Trainer, TrainerCallback
from paceline.args.choices import SchedulerType
from paceline.pytorch.optim.optimizers import OPTIMIZERS

DATA = classification(24)
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine_with_restarts": {"num_cycles": 2},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 4},
    "reduce_lr_on_plateau": {"patience": 0},
    "greedy": {"patience": 1},
}


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def run(folder: Path, *, stop: int | None = None, resume: Any = None, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 5,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.01,
        "warmup_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_dataset": DATA[:8],
        "callbacks": [StopAt(stop)] if stop else None,
    }
    trainer = make_trainer(folder, Classifier(dropout=0.1), DATA, **{**defaults, **options})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def check_resume(folder: Path, stop: int = 5, **options: Any) -> Any:
    whole = run(folder / "whole", save_strategy="no", **options)
    run(folder / "parts", stop=stop, **options)
    parts = run(folder / "parts", resume=True, **options)
    assert torch.equal(weights(whole.model), weights(parts.model))
    assert losses(whole) == losses(parts)
    assert not torch.equal(weights(whole.model), weights(Classifier()))
    assert all(torch.isfinite(p).all() for p in whole.model.parameters())
    return whole


@pytest.mark.parametrize("optim", [*(name for name, entry in OPTIMIZERS.items() if entry.package == "torch"), "auto"])
def test_every_optimizer_resumes(tmp_path: Path, optim: str) -> None:
    if optim == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    check_resume(tmp_path, optim=optim)


@pytest.mark.parametrize("schedule", list(SchedulerType))
def test_every_schedule_resumes(tmp_path: Path, schedule: str) -> None:
    options: dict[str, Any] = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": SCHEDULES.get(schedule)}
    if schedule in ("reduce_lr_on_plateau", "greedy"):
        options.update(metric_for_best_model="loss", learning_rate=0.3)
    whole = check_resume(tmp_path, **options)
    rates = [row["learning_rate"] for row in whole.state.log_history if "loss" in row]
    assert len(rates) == 12
    if schedule not in ("constant",):
        assert len(set(rates)) > 1


@pytest.mark.filterwarnings("ignore")  # of transformers and accelerate
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("reduce_lr_on_plateau", {"patience": 0, "factor": 0.5}),
        ("reduce_lr_on_plateau", {"patience": 1, "mode": "max", "cooldown": 1}),
        ("greedy", {"patience": 1, "factor": 0.5}),
        ("greedy", {"patience": 0, "warmup": 2, "smooth": True}),
    ],
)
def test_schedules_that_follow_evaluations_equal_the_reference(
    tmp_path: Path, schedule: str, options: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.23")
    pytest.importorskip("accelerate")
    shared = {
        "output_dir": str(tmp_path), "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1,
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "num_train_epochs": 3, "optim": "sgd",
        "learning_rate": 1.5, "lr_scheduler_type": schedule, "lr_scheduler_kwargs": options, "eval_strategy": "steps",
        "eval_steps": 1, "metric_for_best_model": "loss", "report_to": "none",
    }  # fmt: skip

    def rates(library: Any) -> list[float]:
        trainer = library.Trainer(
            Classifier(), library.TrainingArguments(**shared), train_dataset=DATA, eval_dataset=DATA[:8]
        )
        trainer.train()
        return [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]

    found = rates(paceline)
    assert found == pytest.approx(rates(transformers))
    assert len(set(found)) > 1


class FusedSGD(torch.optim.Optimizer):
    """Steps inside the backward pass, as LOMO does; like LOMO's class, it has no step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad, alpha=lr)
                    parameter.grad = None


def test_an_optimizer_that_steps_inside_backward(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"weight_decay": 0.0, "save_strategy": "no", "max_grad_norm": 0, "learning_rate": 0.5}
    fused = run(tmp_path / "fused", optimizer_cls_and_kwargs=(FusedSGD, {"lr": 0.5}), **options)
    usual = run(tmp_path / "usual", optim="sgd", **options)
    assert torch.equal(weights(fused.model), weights(usual.model))
    assert losses(fused) == losses(usual)
    assert not any("grad_norm" in row for row in fused.state.log_history)  # the gradients are gone
    assert all(row["grad_norm"] > 0 for row in usual.state.log_history if "loss" in row)
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2.*FusedSGD"):
        run(tmp_path / "no", optimizer_cls_and_kwargs=(FusedSGD, {}), gradient_accumulation_steps=2, **options)
    options["max_grad_norm"] = 1.0
    unclipped = run(tmp_path / "warned", optimizer_cls_and_kwargs=(FusedSGD, {"lr": 0.5}), **options)
    assert torch.equal(weights(unclipped.model), weights(usual.model))
    assert "not clipped" in caplog.text


def test_memory_that_runs_out_inside_a_fused_step_is_not_tried_again(tmp_path: Path) -> None:
    """A part of the update may be done: doing it over in halves would do that part twice."""

    class NoMemory(FusedSGD):
        def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
            super().fused_backward(loss, lr)
            raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        run(tmp_path, optimizer_cls_and_kwargs=(NoMemory, {}), auto_find_batch_size=True, save_strategy="no")


def test_a_rate_is_logged_as_it_was_used(tmp_path: Path) -> None:
    trainer = run(tmp_path, learning_rate=1.0, optim="sgd", eval_strategy="no", save_strategy="no")
    rates = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
    assert rates == pytest.approx([0, 0.5, *((12 - step) / 10 for step in range(2, 12))])


def test_a_rate_in_a_tensor_is_logged_as_it_was_used(tmp_path: Path) -> None:
    """The schedule changes it in place, before it is read for the log."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    trainer = make_trainer(tmp_path, model, DATA, optimizers=(optimizer, None), logging_steps=2)
    trainer.train()
    rates = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
    assert rates == pytest.approx([0.5 * (6 - step) / 6 for step in (1, 3, 5)])


def test_given_ones_are_used(tmp_path: Path) -> None:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    trainer = make_trainer(tmp_path, model, DATA, optimizers=(optimizer, scheduler))
    trainer.train()
    assert trainer.optimizer is optimizer
    assert trainer.lr_scheduler is scheduler
    rates = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
    assert rates == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005, 0.005])


def test_a_given_optimizer_gets_the_schedule_of_the_arguments(tmp_path: Path) -> None:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = make_trainer(tmp_path, model, DATA, optimizers=(optimizer, None))
    trainer.train()
    rates = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
    assert rates == pytest.approx([0.5 * (6 - step) / 6 for step in range(6)])


def test_given_ones_resume(tmp_path: Path) -> None:
    def go(folder: Path, resume: bool, stop: int | None = None) -> Any:
        model = Classifier(dropout=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
        trainer = make_trainer(
            folder,
            model,
            DATA,
            optimizers=(optimizer, scheduler),
            save_strategy="steps",
            save_steps=1,
            callbacks=[StopAt(stop)] if stop else None,
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = go(tmp_path / "whole", False)
    go(tmp_path / "parts", False, 3)
    parts = go(tmp_path / "parts", True)
    assert torch.equal(weights(whole.model), weights(parts.model))
    assert losses(whole) == losses(parts)


def test_a_class_with_arguments(tmp_path: Path) -> None:
    trainer = run(tmp_path, optimizer_cls_and_kwargs=(torch.optim.Adamax, {"lr": 0.02, "betas": (0.8, 0.9)}))
    assert type(trainer.optimizer) is torch.optim.Adamax
    group = trainer.optimizer.param_groups[0]
    assert group["betas"] == (0.8, 0.9)
    assert group["initial_lr"] == 0.02
    assert {g["weight_decay"] for g in trainer.optimizer.param_groups} == {0.0, 0.01}
    decayed = {id(p) for g in trainer.optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert decayed == {id(p) for name, p in trainer.model.named_parameters() if not name.endswith("bias")}


def test_a_class_with_arguments_is_made_anew_for_a_fresh_model(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, None, DATA, model_init=Classifier, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1})
    )
    trainer.train()
    first = trainer.optimizer
    trainer.train()
    assert trainer.optimizer is not first
    assert losses(trainer)[0] != losses(trainer)[-1]


def test_contradictions_are_refused(tmp_path: Path) -> None:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    pair = (torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(RuntimeError, match="not both"):
        make_trainer(tmp_path, model, DATA, optimizers=(optimizer, None), optimizer_cls_and_kwargs=pair)
    with pytest.raises(RuntimeError, match="model_init"):
        make_trainer(tmp_path, None, DATA, model_init=Classifier, optimizers=(optimizer, None))
    with pytest.raises(ValueError, match="but not both"):
        make_trainer(tmp_path, model, DATA, model_init=Classifier)
    with pytest.raises(TypeError, match="returned int"):
        make_trainer(tmp_path, None, DATA, model_init=lambda: 3)


def test_frozen_parameters_stay(tmp_path: Path) -> None:
    model = Classifier()
    model.first.requires_grad_(False)
    before = model.first.weight.clone()
    trainer = make_trainer(tmp_path, model, DATA, weight_decay=0.1)
    trainer.train()
    assert torch.equal(model.first.weight, before)
    assert sum(len(group["params"]) for group in trainer.optimizer.param_groups) == 2
    assert trainer.get_num_trainable_parameters() == 16 * 4 + 4


def test_clipping(tmp_path: Path) -> None:
    trainer = run(
        tmp_path, max_grad_norm=0.01, optim="sgd", learning_rate=1.0, weight_decay=0.0, warmup_steps=0, max_steps=1
    )
    moved = torch.linalg.vector_norm(weights(trainer.model) - weights(Classifier()))
    assert float(moved) == pytest.approx(0.01, rel=1e-3)
    assert trainer.state.log_history[0]["grad_norm"] > 0.01


class SwitchesWeights(torch.optim.SGD):
    """Keeps two sets of weights, as schedule-free optimizers do."""

    mode = "eval"
    modes: list[str]

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"

    def step(self, closure: Any = None) -> Any:
        assert self.mode == "train"
        return super().step(closure)


def test_an_optimizer_with_two_sets_of_weights_is_told(tmp_path: Path) -> None:
    """Trained with one set, evaluated and saved with the other."""
    seen: dict[str, set[str]] = {"evaluate": set(), "save": set()}

    class Watches(Trainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            seen["evaluate"].add(self.optimizer.mode)
            return super().prediction_step(*args, **kwargs)

        def _save(self, *args: Any, **kwargs: Any) -> None:
            seen["save"].add(self.optimizer.mode)
            super()._save(*args, **kwargs)

    model = Classifier()
    trainer = make_trainer(
        tmp_path,
        model,
        DATA,
        cls=Watches,
        optimizers=(SwitchesWeights(model.parameters(), lr=0.1), None),
        eval_strategy="steps",
        eval_steps=2,
        eval_dataset=DATA[:4],
        save_strategy="steps",
        save_steps=3,
    )
    trainer.train()
    assert trainer.optimizer.mode == "eval"
    assert seen == {"evaluate": {"eval"}, "save": {"eval"}}
    assert trainer.state.global_step == 6


def test_adafactor_with_rates_of_its_own(tmp_path: Path) -> None:
    model = Classifier()
    optimizer = paceline.Adafactor(model.parameters())
    schedule = paceline.AdafactorSchedule(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.0
    shown = []

    class Looks(TrainerCallback):  # as people's callbacks do
        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            shown.append(optimizer.param_groups[0]["lr"])

    trainer = make_trainer(
        tmp_path, model, DATA, optimizers=(optimizer, schedule), logging_steps=1, callbacks=[Looks()]
    )
    trainer.train()
    assert len(losses(trainer)) == 6
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    assert all(0 < rate < 1e-2 for rate in rates)
    assert trainer.get_learning_rates() == [rates[-1]]
    assert shown == rates
    assert all(type(rate) is float for rate in shown)


def test_adafactor_schedule_changes_no_rate_that_was_given() -> None:
    optimizer = paceline.Adafactor(Classifier().parameters(), lr=0.01, relative_step=False)
    paceline.AdafactorSchedule(optimizer).step()
    assert optimizer.param_groups[0]["lr"] == 0.01
