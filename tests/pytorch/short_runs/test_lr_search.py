"""trainer.find_lr(): a suggestion, and a Trainer that is as it was."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lr_job
import processes
import pytest
import torch
from memory_job import Blocks, trainer_in
from small_models import Classifier, Tagger, classification, losses, make_trainer, tagging, weights
from torch import nn

from paceline import Adafactor, Trainer, TrainerCallback, UnsupportedOption
from paceline.pytorch.short_runs.lr_search import check_support, evaluate

DATA = classification(32)


class Uneasy(Classifier):
    """With buffers, random numbers and a counter that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.num_passes = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.num_passes += 1
        torch.rand(1)
        return super().forward(*args, **kwargs)


class Counting(TrainerCallback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1


def of_own_optimizer(folder: Path) -> Trainer:
    model = Uneasy()
    optimizer = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=0.01)
    return make_trainer(folder, model, DATA, optimizers=(optimizer, None))


def of_own_schedule(folder: Path) -> Trainer:
    model = Uneasy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return make_trainer(folder, model, DATA, optimizers=(optimizer, schedule))


EVALUATED: dict[str, Any] = {"keep_best": 1, "eval_strategy": "epoch", "eval_dataset": DATA}
KINDS: dict[str, Any] = {
    "options": lambda folder: make_trainer(folder, Uneasy(), DATA, learning_rate=0.01),
    "optimizer": of_own_optimizer,
    "schedule": of_own_schedule,
    "model_init": lambda folder: make_trainer(
        folder, None, DATA, model_init=Uneasy, gradient_accumulation_steps=2, **EVALUATED
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_after_it_ends_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    plain = KINDS[kind](tmp_path / "plain")
    torch.manual_seed(0)
    searched = KINDS[kind](tmp_path / "searched")
    counting = Counting()
    searched.add_callback(counting)
    before, drawn = copy.deepcopy(vars(searched.state)), torch.get_rng_state()
    found = searched.find_lr(num_steps=20)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert vars(searched.state) == before
    assert counting.steps == 0
    assert searched.model.num_passes == plain.model.num_passes
    assert not list((tmp_path / "searched").iterdir())
    assert 10 <= len(found.losses) <= 20
    assert found.rates[0] == pytest.approx(1e-7)
    for trainer in (plain, searched):
        trainer.train()
    assert losses(searched) == losses(plain)
    for mine, theirs in zip(weights(searched.model), weights(plain.model), strict=True):
        assert torch.equal(mine, theirs)


def test_between_two_runs_the_optimizer_keeps_its_state(tmp_path: Path) -> None:
    trainer = of_own_schedule(tmp_path)
    trainer.train()
    before = copy.deepcopy(trainer.optimizer.state_dict())
    trainer.find_lr(num_steps=12)
    after = trainer.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for name, entry in before["state"].items():
        assert torch.equal(after["state"][name]["momentum_buffer"], entry["momentum_buffer"])
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_the_suggestion_is_a_rate_that_trains(tmp_path: Path) -> None:
    """Neither so low that nothing is learned, nor so high that the loss grows."""
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    data = [{"x": x, "labels": int(x[:4].argmax())} for x in inputs]

    def make(**options: Any) -> Trainer:
        torch.manual_seed(0)
        return make_trainer(tmp_path, Classifier(), data, optim="sgd", per_device_train_batch_size=16, **options)

    def loss_after(rate: float) -> float:
        trainer = make(learning_rate=rate, max_steps=40)
        trainer.train()
        return sum(losses(trainer)[-5:])

    found = make().find_lr(lowest=1e-5, highest=1e3)
    assert found.suggestion is not None
    assert len(found.losses) < 100  # it ended where the loss diverged
    assert loss_after(found.suggestion) < 0.7 * min(loss_after(1e-5), loss_after(100))


def test_groups_keep_their_ratios(tmp_path: Path) -> None:
    seen = []

    class Recording(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.append([group["lr"] for group in self.param_groups])
            super().step(closure)

    model = Classifier()
    first, *others = model.parameters()
    optimizer = Recording([{"params": [first], "lr": 0.1}, {"params": others}], lr=0.4)
    make_trainer(tmp_path, model, DATA, optimizers=(optimizer, None)).find_lr(1e-4, 1e-2, 12)
    assert [rates[1] for rates in seen] == pytest.approx([1e-4 * 100 ** (step / 11) for step in range(12)])
    assert all(rates[0] == pytest.approx(rates[1] / 4) for rates in seen)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.4]


def test_a_stream_that_knows_its_position_is_rewound(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __init__(self) -> None:
            self.place = 0

        def __iter__(self) -> Any:
            while self.place < len(DATA):
                self.place += 1
                yield DATA[self.place - 1]
            self.place = 0

        def state_dict(self) -> dict[str, int]:
            return {"place": self.place}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.place = state["place"]

    stream = Stream()
    stream.place = 4
    make_trainer(tmp_path, Classifier(), stream, max_steps=3).find_lr(num_steps=10)
    assert stream.place == 4


def test_wrong_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, Classifier(), DATA)
    for options in ({"lowest": 1.0, "highest": 0.1}, {"lowest": 0.0}, {"num_steps": 3}, {"divergence": 1.0}):
        with pytest.raises(ValueError, match="find_lr: lowest="):
            trainer.find_lr(**options)
    model = Classifier()
    with pytest.raises(UnsupportedOption, match="computes its learning rate by itself"):
        make_trainer(tmp_path, model, DATA, optimizers=(Adafactor(model.parameters()), None)).find_lr()
    several = SimpleNamespace(parallel="deepspeed", world_size=2)
    with pytest.raises(UnsupportedOption, match="find_lr with parallel='deepspeed' on 2 processes is not supported"):
        check_support(cast(Any, several), None)
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0)).tolist()
    assert evaluate([1.1**step for step in range(100)], noise).suggestion is None
    assert evaluate([1e-3, 1e-2, 1e-1], [3.0, 2.0, 1.0]).suggestion is None
    assert "does not fall clearly" in caplog.text


def test_a_loss_that_is_not_finite_ends_it(tmp_path: Path) -> None:
    class Bursting(Tagger):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            self.calls = getattr(self, "calls", 0) + self.training
            return {**outputs, "loss": outputs["loss"] * (math.inf if self.calls > 14 else 1)}

    found = make_trainer(tmp_path, Bursting(), tagging(32)).find_lr(num_steps=50)
    assert len(found.losses) < 20
    assert not math.isfinite(found.losses[-1])


def test_a_loss_below_zero_is_searched_to_the_end(tmp_path: Path) -> None:
    class Below(Tagger):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            return {**outputs, "loss": outputs["loss"] - 9}

    found = make_trainer(tmp_path, Below(), tagging(32)).find_lr(highest=1e-3, num_steps=12)
    assert len(found.losses) == 12


@pytest.mark.slow
def test_several_processes_find_the_same_and_keep_nothing(tmp_path: Path) -> None:
    processes.run("lr_job.py", 2, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    alone = trainer_in(tmp_path / "alone", 1, "ddp", Blocks()).find_lr(**lr_job.RANGE)
    assert alone.suggestion is not None
    for found in ranks:
        for name, result in found.items():
            assert result["losses"] == pytest.approx(alone.losses, rel=1e-3), name
            assert result["losses"] == ranks[0][name]["losses"], name
            assert result["suggestion"] == pytest.approx(alone.suggestion), name
            assert result["is_alike"], name
            assert result["draws_alike"], name


@pytest.mark.slow  # matplotlib comes with packages of the slow tests
def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = make_trainer(tmp_path, Classifier(), DATA).find_lr(num_steps=20)
    assert found.plot(tmp_path / "rates.svg").read_text().count("<path") > 5
