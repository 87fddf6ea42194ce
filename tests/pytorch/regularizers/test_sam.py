"""SAM and ASAM: the numbers against a hand-written loop, on one and on two processes, resume, and what is refused."""

import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import sam_job
import torch
from sam_job import Normed, reference
from small_models import Classifier, classification, losses, make_trainer, weights
from torch import Tensor, nn

from paceline import SAM, Trainer, TrainerCallback, UnsupportedOption

DATA = classification(24)
KINDS = {"sam": SAM(0.3), "asam": SAM(0.8, adaptive=True, eta=0.05)}


def train(folder: Path, model: nn.Module, settings: Any, **options: Any) -> Trainer:
    trainer = make_trainer(folder, model, DATA, regularizers=settings, **{**sam_job.OPTIONS, **options})
    trainer.train()
    return trainer


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.2}], ids=["plain", "clipped"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_a_loop(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """With batch norm, dropout, accumulation and momentum."""
    settings = KINDS[kind]
    trainer = train(tmp_path, Normed(), settings, **options)
    torch.manual_seed(42)
    twin, expected = Normed(), []
    torch.manual_seed(42)
    expected = reference(twin, DATA, settings, options.get("max_grad_norm", math.inf))
    assert losses(trainer) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(weights(trainer.model), weights(twin), rtol=1e-5, atol=1e-6)
    for (name, own), other in zip(trainer.model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(own, other, msg=name)
    plain = train(tmp_path, Normed(), None, **options)
    assert not torch.allclose(weights(plain.model), weights(twin), atol=1e-3)


class Watch(TrainerCallback):
    """Counts events, and keeps the weights that the optimizer steps from, and those that callbacks saw before."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.before: list[Tensor] = []
        self.stepped: list[Tensor] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.before.append(weights(model).clone())

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("substep")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.stepped.append(weights(model).clone())


def test_weights_are_restored_bit_for_bit_and_events_fire_once(tmp_path: Path) -> None:
    watch = Watch([])
    train(tmp_path, Classifier(dropout=0.2), SAM(10.0), callbacks=[watch], max_steps=3)
    assert len(watch.before) == 3
    assert all(torch.equal(one, other) for one, other in zip(watch.before, watch.stepped, strict=True))
    assert watch.events == ["substep"] * 3  # two micro-batches a step


class Assigning(Classifier):
    """Counts its passes in a buffer that it assigns, in a training pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        self.passes = self.passes + self.training
        return super().forward(x, labels)


def test_a_buffer_that_a_pass_assigns_is_that_of_the_first_time(tmp_path: Path) -> None:
    trainer = train(tmp_path, Assigning(), [SAM(0.3)], max_steps=3, gradient_accumulation_steps=1)
    assert int(trainer.model.passes) == 3


def test_an_error_in_the_second_time_restores_the_weights(tmp_path: Path) -> None:
    class Broken(Classifier):
        calls = 0

        def forward(self, x: Tensor, labels: Any = None) -> Any:
            if self.training and torch.is_grad_enabled():
                self.calls += 1
                if self.calls == 4:
                    raise RuntimeError("broken")
            return super().forward(x, labels)

    model = Broken()
    before = weights(model)
    with pytest.raises(RuntimeError, match="broken"):
        train(tmp_path, model, SAM(10.0))
    assert torch.equal(weights(model), before)


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            control.should_training_stop = control.should_save = True


def test_a_resume_is_bit_for_bit_with_other_options(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "ema_decay": 0.9,
        "label_smoothing_factor": 0.1,
        "lr_scheduler_type": "cosine",
        "num_train_epochs": 2,
    }
    settings = "mixup,sam"
    whole = train(tmp_path / "whole", Normed(), settings, **options)
    train(tmp_path / "parts", Normed(), settings, callbacks=[Stop()], **options)
    parts = make_trainer(tmp_path / "parts", Normed(3), DATA, regularizers=settings, **{**sam_job.OPTIONS, **options})
    parts.train(resume_from_checkpoint=True)
    assert torch.equal(weights(whole.model), weights(parts.model))
    assert losses(whole) == losses(parts)


def test_a_step_that_is_not_finite_is_skipped(tmp_path: Path) -> None:
    class Poison(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("nan") if self.state.global_step == 1 and self.model.training else loss

    watch = Watch([])
    trainer = make_trainer(
        tmp_path, Classifier(), DATA, cls=Poison, regularizers="sam", nonfinite_policy="skip", callbacks=[watch],
        **sam_job.OPTIONS,
    )  # fmt: skip
    trainer.train()
    assert torch.equal(watch.before[1], watch.before[2])
    assert weights(trainer.model).isfinite().all()


def test_frozen_and_sparse_parameters(tmp_path: Path) -> None:
    class Sparse(nn.Module):
        def __init__(self, is_sparse: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(9, 4, sparse=is_sparse), nn.Linear(4, 4)
            self.head.bias.requires_grad_(False)

        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            return nn.functional.cross_entropy(self.head(self.embedding(ids).mean(1)), labels)

    data = [{"ids": torch.arange(i, i + 3) % 9, "labels": torch.tensor(i % 4)} for i in range(16)]
    found = []
    for is_sparse in (False, True):
        trainer = make_trainer(
            tmp_path, Sparse(is_sparse), data, regularizers=[SAM(0.3)], optim="sgd", max_grad_norm=0, learning_rate=0.1
        )
        trainer.train()
        found.append(weights(trainer.model))
    torch.testing.assert_close(found[0], found[1])


def test_the_memory_of_modules_that_run_twice_is_not_measured(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match="sam runs each module twice"):
        make_trainer(tmp_path, Classifier(), DATA, regularizers="sam").measure_memory()


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "steps in the backward pass": lambda model: type(
        "Fused", (torch.optim.SGD,), {"fused_backward": lambda self, loss, lr: None}
    )(model.parameters(), lr=0.1),
}


def test_an_optimizer_that_steps_inside_is_refused(tmp_path: Path) -> None:
    model = Classifier()
    optimizer = OPTIMIZERS["steps in the backward pass"](model)
    trainer = make_trainer(tmp_path, model, DATA, regularizers="sam", optimizers=(optimizer, None), max_grad_norm=0)
    with pytest.raises(UnsupportedOption, match="sam with an optimizer that steps in the backward pass"):
        trainer.train()


@pytest.mark.slow
def test_replicas_and_shards_have_the_numbers_of_one_process(tmp_path: Path) -> None:
    processes.run("sam_job.py", 2, str(tmp_path))
    for name, settings in sam_job.CASES.items():
        twin = Normed(dropout=0.0, has_norm=False)
        expected = reference(twin, sam_job.DATA, settings, math.inf, batch_size=8)
        for way in sam_job.WAYS:
            for rank in range(2):
                found = torch.load(tmp_path / f"{rank}.pt")[f"{name} {way}"]
                torch.testing.assert_close(found["weights"], weights(twin), rtol=1e-5, atol=1e-6)
                assert found["losses"] == pytest.approx(expected, rel=1e-5)
    check_mixup([torch.load(tmp_path / f"{rank}.pt") for rank in range(2)])


def check_mixup(ranks: list[dict[str, Any]]) -> None:
    """Compares with soft targets, for which each process draws its own shares and partners."""
    twin = Normed(dropout=0.0, has_norm=False)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for step in range(len(ranks[0]["mixup ddp"]["losses"])):
        windows = [rank["mixup ddp"]["windows"][step] for rank in ranks]
        total = sum(len(batch["labels"]) for window in windows for batch in window)
        loss = torch.zeros(())
        for rank, window in enumerate(windows):
            for index, batch in enumerate(window):
                generator = np.random.default_rng([42, rank, step, index, zlib.crc32(b"mixing")])
                generator.integers(1)
                share, partners = float(generator.beta(0.7, 0.7)), generator.permutation(len(batch["x"]))
                targets = nn.functional.one_hot(batch["labels"], 4).float()
                logits = twin(share * batch["x"] + (1 - share) * batch["x"][partners], batch["labels"])["logits"]
                mixed = share * targets + (1 - share) * targets[partners]
                loss = loss + nn.functional.cross_entropy(logits, mixed, reduction="sum") / total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for way in sam_job.WAYS:
        for rank in ranks:
            assert rank[f"mixup {way}"]["losses"] == pytest.approx(expected, rel=1e-5)
            torch.testing.assert_close(rank[f"mixup {way}"]["weights"], weights(twin), rtol=1e-5, atol=1e-6)
