"""Mixup and CutMix: the numbers against soft targets, every kind of loss, resume, and what is refused."""

import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Classifier, RecordGradient, classification, losses, make_trainer, weights
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paceline import CutMix, Mixup, Trainer, TrainerCallback, UnsupportedOption
from paceline.args.mesh import Mesh
from paceline.pytorch.regularizers.mixing import Mixing

DATA = classification(22)  # micro-batches of 4: the last one has 2
CLASSES = 4


def drawn(step: int, index: int, number: int, alpha: float, mixers: int = 1) -> tuple[int, float, Tensor]:
    """Returns (regularizer, share, partners) of a micro-batch."""
    generator = np.random.default_rng([42, 0, step, index, zlib.crc32(b"mixing")])
    which = int(generator.integers(mixers))
    return which, float(generator.beta(alpha, alpha)), torch.from_numpy(generator.permutation(number))


class Batches:
    """Keeps the micro-batches of each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[list[dict[str, Tensor]]] = []

    def wrap(self, trainer: Any) -> None:
        collect = trainer.get_batch_samples

        def get_batch_samples(*arguments: Any) -> Any:
            batches, number = collect(*arguments)
            if batches:
                self.steps.append([dict(batch) for batch in batches])
            return batches, number

        trainer.get_batch_samples = get_batch_samples


def reference(model: nn.Module, windows: list[list[dict[str, Tensor]]], alpha: float, rate: float) -> list[float]:
    """Trains with SGD on soft targets; returns the loss of each optimizer step."""
    found = []
    for step, window in enumerate(windows):
        total = sum(len(batch["labels"]) for batch in window)
        loss = torch.zeros(())
        for index, batch in enumerate(window):
            x, targets = batch["x"], functional.one_hot(batch["labels"], CLASSES).float()
            _, share, partners = drawn(step, index, len(x), alpha)
            logits = model.logits(share * x + (1 - share) * x[partners])
            mixed = share * targets + (1 - share) * targets[partners]
            loss = loss + functional.cross_entropy(logits, mixed, reduction="sum") / total
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
        found.append(loss.item())
    return found


SGD = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0}


class Scaled(Classifier):
    """A loss that is divided by the number of all targets of the optimizer step."""

    def forward(self, x: Tensor, labels: Any = None, num_items_in_batch: Any = None) -> Any:  # type: ignore[override]
        logits = self.logits(x)
        total = functional.cross_entropy(logits, labels, reduction="sum")
        return total / (len(x) if num_items_in_batch is None else num_items_in_batch), logits


class Headless(Classifier):
    def forward(self, x: Tensor, labels: Any = None) -> Any:
        return {"logits": self.logits(x)}


def function(outputs: Any, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs["logits"], labels)


def soft(rows: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{**row, "labels": functional.one_hot(row["labels"], CLASSES).float()} for row in rows]


KINDS: dict[str, tuple[type[Classifier], dict[str, Any]]] = {
    "the model's own loss": (Classifier, {}),
    "a loss for the whole step": (Scaled, {}),
    "compute_loss_func": (Headless, {"compute_loss_func": function}),
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_soft_targets(tmp_path: Path, kind: str, accumulation: int) -> None:
    cls, options = KINDS[kind]
    watch, model, twin = Batches(), cls(), Classifier()
    trainer = make_trainer(
        tmp_path, model, DATA, regularizers=[Mixup(0.7)], gradient_accumulation_steps=accumulation,
        num_train_epochs=2, **SGD, **options,
    )  # fmt: skip
    watch.wrap(trainer)
    trainer.train()
    expected = reference(twin, watch.steps, 0.7, 0.1)
    assert losses(trainer) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-5, atol=1e-6)


def test_targets_as_probabilities(tmp_path: Path) -> None:
    watch, model, twin = Batches(), Classifier(), Classifier()
    trainer = make_trainer(tmp_path, model, soft(DATA), regularizers="mixup", gradient_accumulation_steps=2, **SGD)
    watch.wrap(trainer)
    trainer.train()
    windows = [[{**batch, "labels": batch["labels"].argmax(1)} for batch in window] for window in watch.steps]
    assert losses(trainer) == pytest.approx(reference(twin, windows, 0.2, 0.1), rel=1e-5)
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-5, atol=1e-6)


def test_label_smoothing_joins(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, Classifier(), DATA, regularizers="mixup", label_smoothing_factor=0.2, max_steps=1, **SGD
    )
    watch, twin = Batches(), Classifier()
    watch.wrap(trainer)
    trainer.train()
    (batch,) = watch.steps[0]
    _, share, partners = drawn(0, 0, 4, 0.2)
    logits = twin.logits(share * batch["x"] + (1 - share) * batch["x"][partners])
    first, second = (
        functional.cross_entropy(logits, labels, label_smoothing=0.2)
        for labels in (batch["labels"], batch["labels"][partners])
    )
    assert losses(trainer)[0] == pytest.approx((share * first + (1 - share) * second).item(), rel=1e-5)


class Pictures(nn.Module):
    """A convolution over pictures (samples, 1, height, width)."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.drop, self.head = nn.Conv2d(1, 3, 3), nn.Dropout(0.3), nn.Linear(3, CLASSES)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, labels: Any = None) -> dict[str, Tensor]:
        if self.training:
            self.seen.append(x.detach().clone())
        logits = self.head(self.drop(self.conv(x)).mean((2, 3)))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def pictures(number: int = 26) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    xs = torch.rand(number, 1, 8, 10, generator=generator)
    return [{"x": x, "labels": torch.tensor(index % CLASSES)} for index, x in enumerate(xs)]


def test_cutmix_weighs_by_the_pasted_area(tmp_path: Path) -> None:
    model, data = Pictures(), pictures()
    model.drop.p = 0.0
    trainer = make_trainer(tmp_path, model, data, regularizers="cutmix", loss_weight="samples", **SGD)
    watch, twin = Batches(), Pictures()
    watch.wrap(trainer)
    trainer.train()
    twin.drop.p = 0.0
    shares = []
    for step, (window, seen) in enumerate(zip(watch.steps, model.seen, strict=True)):
        x, labels = window[0]["x"], window[0]["labels"]
        _, _, partners = drawn(step, 0, len(x), 1.0)
        kept = (seen == x).flatten(1).float().mean(1)
        foreign = seen != x
        assert torch.equal(seen[foreign], x[partners][foreign])
        moved = partners != torch.arange(len(x))
        share = float(kept[moved].mean()) if moved.any() else 1.0
        assert torch.allclose(kept[moved], torch.tensor(share))
        shares.append(share)
        if step == 0:
            logits = twin(seen, labels)["logits"]
            first, second = (functional.cross_entropy(logits, each) for each in (labels, labels[partners]))
            assert losses(trainer)[0] == pytest.approx((share * first + (1 - share) * second).item(), rel=1e-5)
    assert min(shares) < 0.6 < max(shares)


def test_one_of_several_is_drawn_for_each_micro_batch(tmp_path: Path) -> None:
    model, data = Pictures(), pictures(80)
    trainer = make_trainer(tmp_path, model, data, regularizers=[Mixup(8.0), CutMix(8.0)], loss_weight="samples")
    watch = Batches()
    watch.wrap(trainer)
    trainer.train()
    whole = [bool((seen == window[0]["x"]).any()) for window, seen in zip(watch.steps, model.seen, strict=True)]
    expected = [drawn(step, 0, 4, 8.0, 2)[0] == 1 for step in range(20)]
    for step, (found, is_cut) in enumerate(zip(whole, expected, strict=True)):
        partners = np.random.default_rng([42, 0, step, 0, zlib.crc32(b"mixing")])
        partners.integers(2), partners.beta(8.0, 8.0)
        fixed = (partners.permutation(4) == np.arange(4)).any()
        assert found == is_cut or fixed
    assert 0 < sum(expected) < 20


class Stop(TrainerCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            control.should_training_stop = control.should_save = True


@pytest.mark.parametrize("at", [1, 3, 4])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resume_is_bit_for_bit(tmp_path: Path, at: int, workers: int) -> None:
    options: dict[str, Any] = {
        "regularizers": [Mixup(0.5), CutMix(1.0)],
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "dataloader_num_workers": workers,
    }
    whole = make_trainer(tmp_path / "whole", Pictures(), pictures(), **options)
    whole.train()
    make_trainer(tmp_path / "parts", Pictures(), pictures(), callbacks=[Stop(at)], **options).train()
    resumed = make_trainer(tmp_path / "parts", Pictures(7), pictures(), **options)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(whole.model), weights(resumed.model))
    assert losses(whole) == losses(resumed)


def test_evaluation_is_not_mixed(tmp_path: Path) -> None:
    model = Classifier()
    trainer = make_trainer(
        tmp_path, model, DATA, eval_dataset=DATA, regularizers="mixup", eval_strategy="steps", eval_steps=2, max_steps=4
    )
    trainer.train()
    seen = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row][-1]
    batch = {key: torch.stack([row[key] for row in DATA]) for key in DATA[0]}
    assert seen == pytest.approx(model(**batch)[0].item(), rel=1e-5)


class Words(nn.Module):
    """A classifier of token ids with the mean of the embeddings of attended tokens."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.head = nn.Embedding(20, 6), nn.Linear(6, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids) * attention_mask[..., None]
        logits = self.head(hidden.sum(1) / attention_mask.sum(1, keepdim=True))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def sentences(number: int = 12) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 20, (number, 7), generator=generator)
    masks = (torch.arange(7) < torch.randint(2, 8, (number, 1), generator=generator)).long()
    return [{"input_ids": ids[i], "attention_mask": masks[i], "labels": torch.tensor(i % 4)} for i in range(number)]


def test_embeddings_of_token_ids(tmp_path: Path) -> None:
    model, twin, watch = Words(), Words(), Batches()
    trainer = make_trainer(tmp_path, model, sentences(), regularizers=[Mixup(1.0, on="embeddings")], max_steps=1, **SGD)
    watch.wrap(trainer)
    trainer.train()
    (batch,) = watch.steps[0]
    _, share, partners = drawn(0, 0, 4, 1.0)
    mask = torch.maximum(batch["attention_mask"], batch["attention_mask"][partners])
    embedded = twin.embedding(batch["input_ids"])
    hidden = (share * embedded + (1 - share) * embedded[partners]) * mask[..., None]
    logits = twin.head(hidden.sum(1) / mask.sum(1, keepdim=True))
    first, second = (functional.cross_entropy(logits, each) for each in (batch["labels"], batch["labels"][partners]))
    loss = share * first + (1 - share) * second
    assert losses(trainer)[0] == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter -= 0.1 * parameter.grad
    torch.testing.assert_close(weights(model), weights(twin))
    assert not model.embedding._forward_hooks


class Weighted(Classifier):
    """A cross-entropy with weights of the classes: not that of the logits alone."""

    def forward(self, x: Tensor, labels: Any = None) -> Any:
        logits = self.logits(x)
        return functional.cross_entropy(logits, labels, weight=torch.tensor([1.0, 2.0, 3.0, 9.0])), logits


class Positional(Classifier):
    def forward(self, x: Tensor, target: Any = None) -> Any:
        return super().forward(x, target)


REFUSED: dict[str, tuple[nn.Module, Any, Any, str]] = {
    "token ids": (Words(), sentences(), "mixup", "mixes floating-point inputs, and 'input_ids' is int64"),
    "no images": (Classifier(), DATA, "cutmix", "cutmix pastes a box into images"),
    "another loss": (Weighted(), DATA, "mixup", "it is no cross-entropy of the logits.*compute_loss_func"),
    "no targets": (
        Positional(), [{"x": row["x"], "target": row["labels"]} for row in DATA], "mixup", "the batch has none under",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_the_first_step(tmp_path: Path, case: str) -> None:
    model, data, regularizers, message = REFUSED[case]
    before = weights(model)
    trainer = make_trainer(tmp_path, model, data, regularizers=regularizers, label_names=["labels"], max_steps=2)
    with pytest.raises(UnsupportedOption, match=message):
        trainer.train()
    assert torch.equal(before, weights(model))


def test_an_overridden_compute_loss_is_mixed(tmp_path: Path) -> None:
    class Own(RecordGradient):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            logits = model(**inputs)
            loss = functional.cross_entropy(logits, labels)
            return (loss, logits) if return_outputs else loss

    class Bare(Classifier):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.logits(x)

    options: dict[str, Any] = {"regularizers": [Mixup(0.7)], "gradient_accumulation_steps": 2, **SGD}
    own = make_trainer(tmp_path, Bare(), DATA, cls=Own, remove_unused_columns=False, label_names=["labels"], **options)
    own.train()
    plain = make_trainer(tmp_path, Classifier(), DATA, **options)
    plain.train()
    torch.testing.assert_close(weights(own.model), weights(plain.model))


@pytest.mark.slow
@pytest.mark.parametrize("regularizers", ["mixup", "cutmix"])
def test_an_image_classifier_of_transformers(tmp_path: Path, regularizers: str) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4,
        num_channels=1, num_labels=4,
    )  # fmt: skip
    data = [{"pixel_values": torch.rand(1, 8, 8), "labels": index % 4} for index in range(24)]
    found = []
    for accumulation in (1, 3):
        torch.manual_seed(0)
        model = ViTForImageClassification(config)
        trainer = make_trainer(
            tmp_path, model, data, regularizers=regularizers, gradient_accumulation_steps=accumulation, max_steps=2
        )
        trainer.train()
        found.append(losses(trainer))
        assert all(np.isfinite(found[-1]))
    assert found[0][0] != found[1][0]


@pytest.mark.parametrize("axis", ["cp", "sp"])
def test_sequences_in_shards_are_refused(axis: str) -> None:
    settings = Mixup(on="embeddings")
    context: Any = SimpleNamespace(settings=(settings,), strategy=SimpleNamespace(mesh=Mesh(**{axis: 2})))
    with pytest.raises(UnsupportedOption, match="mixup is not supported with context or sequence parallelism"):
        Mixing(settings, context)


def test_a_training_step_without_the_mixing_is_refused(tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss: Tensor = self.compute_loss(model, self._prepare_inputs(inputs))
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

    trainer = make_trainer(tmp_path, Classifier(), DATA, cls=Own, regularizers="mixup")
    with pytest.raises(UnsupportedOption, match="mixup would have no effect"):
        trainer.train()


class Tokens(nn.Module):
    """Embeds tokens in a part that may be run again in the backward pass."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body, self.head = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.use_reentrant = use_reentrant

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def encode(self, tokens: Tensor, anchor: Tensor) -> Tensor:
        return torch.tanh(self.body(self.embedding(tokens))).mean(1) + 0 * anchor

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        anchor = torch.zeros((), requires_grad=True)  # reentrant checkpoints need an input with a gradient
        if self.use_reentrant is None:
            states = self.encode(input_ids, anchor)
        else:
            states = checkpoint(self.encode, input_ids, anchor, use_reentrant=self.use_reentrant)
        logits = self.head(states)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def test_embeddings_that_are_computed_again_are_mixed_again(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [{"input_ids": torch.randint(10, (5,), generator=generator), "labels": index % 3} for index in range(22)]
    trained = []
    for use_reentrant in (None, False, True):
        model = Tokens(use_reentrant)
        trainer = make_trainer(
            tmp_path, model, data, regularizers=[Mixup(1.0, on="embeddings")], gradient_accumulation_steps=2, **SGD
        )
        trainer.train()
        trained.append(weights(model))
    assert torch.equal(trained[0], trained[1])
    assert torch.equal(trained[0], trained[2])


def test_a_loss_that_becomes_another_one_is_a_warning(tmp_path: Path, caplog: Any) -> None:
    class Later(Classifier):
        """Adds a penalty from its fifth pass on."""

        passes = 0

        def forward(self, x: Tensor, labels: Any = None) -> Any:
            loss, logits = super().forward(x, labels)
            self.passes += 1
            return loss + (logits.square().mean() if self.passes > 4 else 0.0), logits

    make_trainer(tmp_path, Later(), DATA, regularizers="mixup", max_steps=4, loss_weight="samples").train()
    assert "is not any more" not in caplog.text
    make_trainer(tmp_path, Later(), DATA, regularizers="mixup", max_steps=9, loss_weight="samples").train()
    assert caplog.text.count("is not any more") == 1
