"""Extra passes that look at a loss leave nothing in what user code counts and collects."""

import types
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, make_trainer
from torch import Tensor, nn
from torch.nn import functional

from paceline import SAM, Trainer
from paceline.pytorch.probes.side_effects import undoing

CALLS = 0
SIZES: list[int] = []


class CountingClassifier(Classifier):
    """Counts and collects in attributes of the module and of its class."""

    instances_called: int = 0
    widths: list[int] = []

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sizes = 0, {"all": deque[int]()}

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        self.calls += 1
        CountingClassifier.instances_called += 1
        self.widths.append(len(x))
        self.sizes["all"].append(len(x))
        return super().forward(x, labels)


class CountingTrainer(Trainer):
    """Counts and collects as trainers of libraries do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.metrics: dict[str, Any] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.num_samples, self.loss_sum, self.tracker = 0, torch.zeros(()), types.SimpleNamespace(calls=0)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        global CALLS
        CALLS += 1
        SIZES.append(len(inputs["x"]))
        self.tracker.calls += 1
        self.num_samples += len(inputs["x"])
        self.metrics["train" if model.training else "eval"]["sizes"].append(len(inputs["x"]))
        self.loss_sum += 1
        return super().compute_loss(model, inputs, return_outputs=return_outputs)


@pytest.mark.parametrize("split", [(8, 1), (2, 4)], ids=str)
def test_counters_of_user_code_count_the_steps_alone(tmp_path: Path, split: tuple[int, int]) -> None:
    batch, accumulation = split
    options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "max_steps": 4}
    data, model, hooked = classification(32), CountingClassifier(), []
    model.register_forward_hook(lambda *_: hooked.append(1))
    trainer = make_trainer(
        tmp_path, model, data, cls=CountingTrainer, eval_dataset=data, per_device_eval_batch_size=8, **options
    )
    SIZES.clear()
    CountingClassifier.widths.clear()
    CountingClassifier.instances_called = 0
    before, calls = CALLS, 4 * accumulation
    trainer.train()
    assert trainer.loss_normalizer.num_looks > 0 or accumulation == 1
    assert {len(hooked), model.calls, CALLS - before, trainer.tracker.calls, int(trainer.loss_sum)} == {calls}
    assert calls == CountingClassifier.instances_called == len(CountingClassifier.widths)
    assert trainer.num_samples == 32
    assert trainer.metrics["train"]["sizes"] == list(model.sizes["all"]) == SIZES == [batch] * calls
    assert not trainer.metrics["eval"]["sizes"]
    trainer.loss_normalizer.begin()  # so that the evaluation looks
    trainer.evaluate()
    assert trainer.metrics["eval"]["sizes"] == [8] * 4
    assert model.calls == calls + 4


class Normalizes(Classifier):
    """Changes its inputs in place."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return super().forward(x.div_(2.0), labels)


class CountsFromOne(Trainer):
    """Classes are numbered from 1 in the data."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        inputs["labels"] -= 1
        return super().compute_loss(model, inputs, return_outputs=return_outputs)


@pytest.mark.parametrize("regularizers", [None, SAM(0.5)])
def test_batches_that_user_code_changes_in_place(tmp_path: Path, regularizers: Any) -> None:
    """Each pass begins with what the data gave."""
    seen = []
    for is_in_place in (False, True):
        scale, first = (1.0, 1) if is_in_place else (0.5, 0)
        data = [{"x": row["x"] * scale, "labels": row["labels"] + first} for row in classification(24)]
        trainer = make_trainer(
            tmp_path / str(is_in_place),
            Normalizes() if is_in_place else Classifier(),
            data,
            cls=CountsFromOne if is_in_place else Trainer,
            eval_dataset=data,
            gradient_accumulation_steps=2,
            per_device_eval_batch_size=5,
            regularizers=regularizers,
        )
        trainer.train()
        logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        predictions = trainer.predict(data)
        seen.append([*logged, trainer.evaluate()["eval_loss"], *predictions.predictions.flatten().tolist()])
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)


class Momentum(Classifier):
    """Each pass moves the frozen weights of a second layer towards those of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(8, 16).requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        with torch.no_grad():
            for slow, own in zip(self.slow.parameters(), self.first.parameters(), strict=True):
                slow.lerp_(own, 0.1)
        return super().forward(x, labels)


@pytest.mark.parametrize("regularizers", [None, [SAM(0.05)]], ids=["plain", "sam"])
def test_a_momentum_encoder_moves_once_for_each_micro_batch(tmp_path: Path, regularizers: Any) -> None:
    model, by_hand = Momentum(), Momentum()
    options = {"gradient_accumulation_steps": 2, "learning_rate": 0.0, "max_steps": 3, "regularizers": regularizers}
    trainer = make_trainer(tmp_path, model, classification(24), **options)
    trainer.find_lr(num_steps=10)
    trainer.train()
    for _ in range(3 * 2):
        by_hand(torch.zeros(1, 8))
    torch.testing.assert_close(model.slow.weight, by_hand.slow.weight)


def test_a_loss_function_with_a_closure(tmp_path: Path) -> None:
    calls, seen = 0, []

    def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        nonlocal calls
        calls += 1
        seen.append(calls)
        return functional.cross_entropy(outputs, labels)

    model = Classifier()
    trainer = make_trainer(
        tmp_path, model, classification(32), compute_loss_func=loss_of, max_steps=4,
        per_device_train_batch_size=2, gradient_accumulation_steps=4,
    )  # fmt: skip
    trainer.train()
    assert trainer.loss_normalizer.num_looks > 0
    assert seen == list(range(1, 17))


def test_lazy_modules_and_new_attributes() -> None:
    lazy = nn.LazyLinear(2)
    owner = types.SimpleNamespace(counter=Counter(a=1), held=(held := [1]), long=list(range(5000)))
    with undoing([owner, lazy]):
        lazy(torch.ones(1, 3))
        owner.counter["b"] += 1
        held.append(2)
        owner.held, owner.new = [], 1
        owner.long.append(0)
    assert lazy(torch.ones(1, 3)).shape == (1, 2)
    assert owner.counter == Counter(a=1)
    assert owner.held is held
    assert held == [1]
    assert not hasattr(owner, "new")
    assert len(owner.long) == 5000


class Doubling(Classifier):
    """Changes its inputs, in place or not, and may have memory for fewer samples than a micro-batch."""

    def __init__(self, in_place: bool, room: int = 100, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.in_place, self.room = in_place, room

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        x = x.mul_(2) if self.in_place else x * 2
        if torch.is_grad_enabled() and len(x) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x, labels)


def final_weights(folder: Path, model: nn.Module, **options: Any) -> Tensor:
    teacher = options.pop("teacher", None)
    trainer = make_trainer(folder, model, classification(16), per_device_train_batch_size=8, **options)
    if teacher is not None:
        trainer = Trainer(model, trainer.args, train_dataset=classification(16), teacher=teacher)
    trainer.train()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_smaller_micro_batches_begin_with_what_the_data_gave(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.1, "auto_find_batch_size": True}
    plain = final_weights(tmp_path / "plain", Doubling(False), **options)
    crowded = final_weights(tmp_path / "crowded", Doubling(True, room=4), **options)
    torch.testing.assert_close(crowded, plain, rtol=1e-6, atol=1e-7)


def test_a_teacher_reads_what_the_data_gave(tmp_path: Path) -> None:
    found = [
        final_weights(tmp_path / f"{student}{teacher}", Doubling(student), teacher=Doubling(teacher, seed=1))
        for student, teacher in ((False, False), (True, False), (False, True), (True, True))
    ]
    assert all(torch.equal(each, found[0]) for each in found[1:])
