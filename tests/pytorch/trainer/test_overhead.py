"""The overhead of a step: calls into the library, and reads of the device. Times are in benchmarks/."""

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, make_trainer

from paceline import TrainerCallback

PACKAGE = str(Path(sys.modules["paceline"].__file__ or "").parent)


class CountCalls(TrainerCallback):
    """Counts Python calls of functions of the package between two steps.

    Garbage collection is off meanwhile: it would call the finalizers of what earlier tests left.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 20:
            gc.disable()
            sys.setprofile(self.profile)
        elif state.global_step == 30:
            sys.setprofile(None)

    def profile(self, frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            name = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"
            self.counts[name] = self.counts.get(name, 0) + 1


def test_at_most_40_calls_a_step(tmp_path: Path) -> None:
    counter = CountCalls()
    trainer = make_trainer(
        tmp_path, Classifier(), classification(400), logging_steps=500, max_steps=40, callbacks=[counter]
    )
    try:
        trainer.train()
    finally:
        sys.setprofile(None)
        gc.enable()
    calls = sum(counter.counts.values()) / 10
    ranked = sorted(counter.counts.items(), key=lambda item: -item[1])
    listing = "\n".join(f"{number / 10:6.1f} {name}" for name, number in ranked)
    assert calls <= 40, f"{calls} calls a step:\n{listing}"


READS = {"item", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy", "tolist", "nonzero"}


class Watched(torch.Tensor):
    """A tensor that notes each time its value is read back to the host."""

    reads: list[str] = []
    active = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if cls.active and name in READS:
            cls.reads.append(name)
        return super().__torch_function__(func, types, args, kwargs or {})


class WatchSteps(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        number = state.global_step + 1
        # at updates 4, 8, 16 it is looked at what the loss is a mean over
        Watched.active = number > 2 and number & (number - 1) != 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Watched.active = Watched.active and state.global_step < 20  # then the run's last log reads


class WatchedClassifier(Classifier):
    """Its outputs are watched, and everything computed from them, the loss and its norm included."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        loss, logits = super().forward(x, labels)
        return loss.as_subclass(Watched), logits.as_subclass(Watched)


def test_nothing_is_read_back_between_logs(tmp_path: Path) -> None:
    Watched.reads.clear()
    trainer = make_trainer(
        tmp_path,
        WatchedClassifier(),
        classification(400),
        logging_steps=50,
        max_steps=20,
        gradient_accumulation_steps=2,
        callbacks=[WatchSteps()],
    )
    try:
        trainer.train()
    finally:
        Watched.active = False
    assert Watched.reads == []
    assert trainer.state.global_step == 20


def test_constructing_a_trainer_leaves_the_generators_alone(tmp_path: Path) -> None:
    import random

    import numpy as np

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    make_trainer(tmp_path, None, classification(8), model_init=Classifier)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


class WatchUnread(TrainerCallback):
    """Notes how many updates wait on the device."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.most = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.most = max(self.most, len(self.trainer.run.engine.log))


def test_what_waits_for_a_log_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, most = [], []
    for bound in (1000, 7):
        monkeypatch.setattr("paceline.core.loop.MAX_UNREAD", bound)
        watch = WatchUnread()
        torch.manual_seed(0)
        options: dict[str, Any] = {"logging_strategy": "no", "max_steps": 30, "callbacks": [watch]}
        watch.trainer = make_trainer(tmp_path / str(bound), Classifier(), classification(400), **options)
        losses.append(watch.trainer.train().training_loss)
        most.append(watch.most)
    assert losses[0] == losses[1] > 0
    assert most == [29, 6]
