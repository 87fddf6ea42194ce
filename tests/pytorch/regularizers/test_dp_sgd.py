"""DP-SGD: clipping and noise by hand, the accountant beside Opacus' own, resume, and what is refused."""

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, Tagger, classification, make_trainer, tagging, weights
from torch import Tensor, nn
from torch.nn import functional

from paceline import DPSGD as PoissonDPSGD
from paceline import MixedDataset, Trainer, TrainerCallback, UnsupportedOption

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Full backward hook is firing")]


@pytest.fixture(autouse=True)
def needs_opacus() -> None:
    pytest.importorskip("opacus")


DATA = classification(24)
OPTIONS: dict[str, Any] = {
    "optim": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0,
    "train_sampling_strategy": "sequential",
}
TINY_NOISE = 1e-9
POISSON = {**OPTIONS, "train_sampling_strategy": "random"}
DPSGD = functools.partial(PoissonDPSGD, sampling="shuffle")  # each sample once per epoch, in a known order


def train(folder: Path, model: nn.Module, settings: Any, data: Any = DATA, **options: Any) -> Trainer:
    trainer = make_trainer(folder, model, data, regularizers=settings, **{**OPTIONS, **options})
    trainer.train()
    return trainer


def reference(model: nn.Module, losses_of: Any, data: Any, norm: float, size: int, steps: int) -> None:
    """Trains with the clipped gradient of each sample, one at a time."""
    parameters = list(model.parameters())
    for step in range(steps):
        rows = data[step * size : (step + 1) * size]
        total = [torch.zeros_like(each) for each in parameters]
        for row in rows:
            batch = {key: value[None] for key, value in row.items()}
            gradients = torch.autograd.grad(losses_of(model, batch), parameters, allow_unused=True)
            found = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
            length = torch.cat([each.flatten() for each in found]).norm()
            factor = min(1.0, norm / (length.item() + 1e-6))
            total = [each + factor * gradient for each, gradient in zip(total, found, strict=True)]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, total, strict=True):
                parameter -= 0.5 * gradient / len(rows)


def of_classes(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model.logits(batch["x"]), batch["labels"])


def of_words(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the targets of one sample; 0 without any."""
    logits = model.head(torch.tanh(model.embedding(batch["input_ids"])))
    total = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return total / max(int((batch["labels"] != -100).sum()), 1)


class Scaled(Classifier):
    def forward(self, x: Tensor, labels: Any = None, num_items_in_batch: Any = None) -> Any:  # type: ignore[override]
        logits = self.logits(x)
        total = functional.cross_entropy(logits, labels, reduction="sum")
        return total / (len(x) if num_items_in_batch is None else num_items_in_batch), logits


class Summed(Classifier):
    def forward(self, x: Tensor, labels: Any = None) -> Any:
        logits = self.logits(x)
        return functional.cross_entropy(logits, labels, reduction="sum"), logits


@pytest.mark.parametrize("norm", [0.3, 1e6], ids=["clipped", "whole"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("cls", "weight"), [(Classifier, None), (Scaled, None), (Summed, "sum")])
def test_the_gradient_of_each_sample_is_clipped(
    tmp_path: Path, cls: type[Classifier], weight: str | None, accumulation: int, norm: float
) -> None:
    settings = DPSGD(norm, noise_multiplier=TINY_NOISE / norm, delta=1e-3, noise_seed=0)
    model, twin = cls(), Classifier()
    size = 4 * accumulation
    train(tmp_path, model, [settings], gradient_accumulation_steps=accumulation, loss_weight=weight)
    reference(twin, of_classes, DATA, norm, size, 24 // size)
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-4, atol=1e-6)
    assert not any(hasattr(each, "grad_sample") for each in model.parameters())
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())


@pytest.mark.parametrize("norm", [0.2, 1e6], ids=["clipped", "whole"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("weight", ["tokens", None])
def test_samples_of_many_targets_are_means(tmp_path: Path, weight: str | None, accumulation: int, norm: float) -> None:
    data = tagging(16)
    model, twin = Tagger(), Tagger()
    settings = DPSGD(norm, noise_multiplier=TINY_NOISE / norm, delta=1e-3, noise_seed=0)
    options = {"per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
    train(tmp_path, model, [settings], data, loss_weight=weight, **options)
    reference(twin, of_words, data, norm, 8, 2)
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-4, atol=1e-6)


class Tied(nn.Module):
    """Its output weights are those of its embedding, in a module of their own or not."""

    def __init__(self, has_head: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False) if has_head else None
        if self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = torch.tanh(self.embedding(input_ids))
        logits = functional.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def test_tied_weights_have_their_whole_gradient_or_are_refused(tmp_path: Path) -> None:
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"].roll(1)} for row in tagging(8)]
    options: dict[str, Any] = {"max_steps": 1, "per_device_train_batch_size": 8}
    settings = DPSGD(1e6, noise_multiplier=TINY_NOISE / 1e6, delta=1e-3)
    with pytest.raises(UnsupportedOption, match=r"'embedding.weight' do not add up .* F.linear"):
        train(tmp_path, Tied(False), [settings], data, **options)
    trainer = train(tmp_path, Tied(True), [settings], data, **options)
    plain = make_trainer(tmp_path, Tied(True), data, **{**OPTIONS, **options})
    plain.train()
    torch.testing.assert_close(weights(trainer.model), weights(plain.model), rtol=1e-4, atol=1e-5)
    train(tmp_path, Tied(True), [settings], data, bf16=True, **options)


class Scale(nn.Module):
    """A module whose parameter has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def test_a_parameter_without_dimensions_is_clipped_with_the_others(tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = Classifier()
        made.second = nn.Sequential(made.second, Scale())  # type: ignore[assignment]
        return made

    settings = DPSGD(0.3, noise_multiplier=TINY_NOISE / 0.3, delta=1e-3)
    trainer = train(tmp_path, model(), [settings], max_steps=2)
    twin = model()
    reference(twin, of_classes, DATA, 0.3, 4, 2)
    torch.testing.assert_close(weights(trainer.model), weights(twin), rtol=1e-4, atol=1e-5)


class Padded(nn.Module):
    """Its padding token is in the mean of each sample, and is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 4)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(torch.tanh(self.embedding(input_ids)).mean(1))
        return functional.cross_entropy(logits, labels), logits


@pytest.mark.parametrize("norm", [0.1, 1e6], ids=["clipped", "whole"])
def test_the_embedding_of_padding_is_no_part_of_the_gradient(tmp_path: Path, norm: float) -> None:
    data = [{"input_ids": row["input_ids"] % 3, "labels": row["input_ids"].sum() % 4} for row in tagging(8)]
    settings = DPSGD(norm, noise_multiplier=TINY_NOISE / norm, delta=1e-3)
    trainer = train(tmp_path, Padded(), [settings], data, max_steps=2)
    twin = Padded()
    reference(twin, lambda model, batch: model(**batch)[0], data, norm, 4, 2)
    torch.testing.assert_close(weights(trainer.model), weights(twin), rtol=1e-4, atol=1e-5)


def test_a_gradient_that_is_zero_but_for_rounding_is_taken(tmp_path: Path) -> None:
    """That of the bias of the keys of attention."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    ids = torch.arange(7)
    data = [{"input_ids": row["input_ids"], "position_ids": ids, "token_type_ids": 0 * ids} for row in tagging(8)]
    data = [{**row, "labels": row["input_ids"].sum() % 2} for row in data]
    trainer = train(
        tmp_path, transformers.BertForSequenceClassification(config), [DPSGD(noise_multiplier=1.0, delta=1e-3)], data
    )
    assert trainer.state.global_step > 1


def test_the_noise(tmp_path: Path) -> None:
    """Its standard deviation is sigma C / samples, and it is drawn anew in each step."""

    class Still(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(400, 50)

        def forward(self, x: Tensor) -> Any:
            return (self.layer(x) * 0.0).sum(1).mean()

    class Keep(TrainerCallback):
        def __init__(self) -> None:
            self.gradients: list[Tensor] = []

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.gradients.append(torch.cat([each.grad.flatten() for each in model.parameters()]))

    keep = Keep()
    data = [{"x": torch.zeros(400)} for _ in range(24)]
    settings = DPSGD(2.0, noise_multiplier=1.5, delta=1e-3)
    train(tmp_path, Still(), [settings], data, gradient_accumulation_steps=2, callbacks=[keep])
    for gradient in keep.gradients:
        assert gradient.std().item() == pytest.approx(1.5 * 2.0 / 8, rel=0.03)
        assert abs(gradient.mean().item()) < 0.01
    assert not torch.equal(keep.gradients[0], keep.gradients[1])
    again = Keep()
    train(tmp_path, Still(), [settings], data, gradient_accumulation_steps=2, callbacks=[again])
    assert not torch.equal(keep.gradients[0], again.gradients[0])  # the seed of the run does not give the noise away


class Rows(TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.rows += [dict(logs)] if "epsilon" in logs else []


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_epsilon_is_that_of_opacus(tmp_path: Path, accountant: str) -> None:
    """26 samples: 7 steps in an epoch, each with a sampling rate of 4 / 26, or an epoch as one mechanism."""
    from opacus.accountants import create_accountant

    found = {}
    for sampling in ("poisson", "shuffle"):
        rows = Rows()
        settings = PoissonDPSGD(noise_multiplier=1.1, delta=1e-2, accountant=accountant, sampling=sampling)
        options: dict[str, Any] = {**POISSON, "num_train_epochs": 2, "logging_steps": 7, "callbacks": [rows]}
        train(tmp_path / sampling, Classifier(), [settings], classification(26), **options)
        expected = create_accountant(mechanism=accountant)
        for _ in range(14 if sampling == "poisson" else 2):
            expected.step(noise_multiplier=1.1, sample_rate=4 / 26 if sampling == "poisson" else 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            epsilon = expected.get_epsilon(delta=1e-2)
        found[sampling] = rows.rows[-1]["epsilon"]
        # PRV computes on a grid
        assert found[sampling] == pytest.approx(epsilon, rel=1e-6 if accountant == "rdp" else 0.02)
        assert rows.rows[0]["epsilon"] < found[sampling]
    assert found["poisson"] < found["shuffle"]


class OneStep(TrainerCallback):
    """Ends each epoch after one optimizer step, and the training after a number of them."""

    def __init__(self, last: int) -> None:
        self.last = last

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = True
        control.should_training_stop |= state.global_step == self.last


def test_an_epoch_that_ends_early_may_have_used_each_sample(tmp_path: Path) -> None:
    from opacus.accountants import create_accountant

    settings = [DPSGD(noise_multiplier=2.0, delta=1e-3)]
    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    train(tmp_path, Classifier(), settings, callbacks=[OneStep(2)], **options)
    rows = Rows()
    trainer = make_trainer(
        tmp_path, Classifier(), DATA, regularizers=settings, callbacks=[OneStep(4), rows], **{**OPTIONS, **options}
    )
    trainer.train(resume_from_checkpoint=True)
    expected = create_accountant(mechanism="rdp")
    for _ in range(4):
        expected.step(noise_multiplier=2.0, sample_rate=1.0)
    assert rows.rows[-1]["epsilon"] == pytest.approx(expected.get_epsilon(delta=1e-3), rel=1e-6)


def test_the_target_epsilon_is_reached_and_recorded(tmp_path: Path) -> None:
    rows = Rows()
    settings = PoissonDPSGD(target_epsilon=3.0, delta=1e-2)
    options: dict[str, Any] = {**POISSON, "num_train_epochs": 3, "logging_steps": 6, "callbacks": [rows]}
    train(tmp_path, Classifier(), [settings], **options)
    assert 2.9 < rows.rows[-1]["epsilon"] <= 3.0
    record = json.loads((tmp_path / "run.json").read_text())
    facts = record["extra"]["regularizers"]["dp_sgd"]
    assert facts["expected_epsilon"] == pytest.approx(rows.rows[-1]["epsilon"])
    assert facts["noise_multiplier"] > 0.5
    assert facts["sampling"] == "poisson"


class Taken(TrainerCallback):
    """Keeps the samples of each step, which their first value names, and the gradient."""

    wants = frozenset({"inputs"})

    def __init__(self) -> None:
        self.steps: list[list[float]] = []
        self.gradients: list[Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append([value for batch in kwargs["inputs"] for value in batch["x"][:, 0].tolist()])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.gradients.append(torch.cat([each.grad.flatten() for each in model.parameters()]).clone())


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_gradient_of_a_poisson_sample_is_divided_by_the_expected_size(tmp_path: Path, accumulation: int) -> None:
    """2 expected samples per step, so that many steps have fewer samples than micro-batches, or none."""
    taken, rate = Taken(), 0.5
    size = 2 if accumulation == 1 else 4
    data = classification(24)
    options = {**POISSON, "per_device_train_batch_size": size // accumulation, "num_train_epochs": 6}
    options |= {"gradient_accumulation_steps": accumulation, "callbacks": [taken]}
    settings = PoissonDPSGD(0.3, noise_multiplier=TINY_NOISE, delta=1e-3, noise_seed=3)
    model, twin = Classifier(), Classifier()
    trainer = train(tmp_path, model, [settings], data, **options)
    batches = trainer.get_train_dataloader().batch_sampler
    batches.use_key(3)
    numbers, steps = [], 24 // size
    for number, gradient in enumerate(taken.gradients):
        epoch, step = divmod(number, steps)
        count = int(batches.counts(epoch)[step])
        numbers.append(count)
        names = taken.steps[number][:count] if count else []
        rows = [row for row in data if float(row["x"][0]) in names]
        assert len(rows) == count
        total = torch.zeros_like(gradient)
        for row in rows:
            loss = of_classes(twin, {key: value[None] for key, value in row.items()})
            found = torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(twin.parameters()))])
            total += found * min(1.0, 0.3 / (found.norm().item() + 1e-6))
        torch.testing.assert_close(gradient, total / size, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            position = 0
            for parameter in twin.parameters():
                part = gradient[position : position + parameter.numel()]
                parameter -= rate * part.view_as(parameter)
                position += parameter.numel()
    assert 0 in numbers or accumulation == 4
    assert min(numbers) < accumulation or accumulation == 1


def test_poisson_samples_are_independent(tmp_path: Path) -> None:
    """Inclusion of each sample, of each pair, and of one sample in two steps has the probability of independence."""
    from paceline.pytorch.data.poisson import PoissonBatches

    batches = PoissonBatches(10, 3, 2, seed=1)
    included = []
    for epoch in range(1500):
        batches.set_epoch(epoch)
        found = iter(batches)
        for count in batches.counts(epoch).tolist():
            step = [index for _ in range(2) for index in next(found)]
            if count < 2:
                step = step[:count]
            assert len(set(step)) == len(step) == count
            included.append([float(index in step) for index in range(10)])
        assert next(found, None) is None
    values = torch.tensor(included)
    rate, number = 0.3, len(values)
    assert (values.mean(0) - rate).abs().max() < 4 * (rate * (1 - rate) / number) ** 0.5
    pairs = values.T @ values / number
    off = pairs[~torch.eye(10, dtype=torch.bool)]
    assert (off - rate**2).abs().max() < 4.5 * (rate**2 * (1 - rate**2) / number) ** 0.5
    later = (values[1:].T @ values[:-1]) / (number - 1)
    assert (later - rate**2).abs().max() < 4.5 * (rate**2 * (1 - rate**2) / number) ** 0.5


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_has_the_noise_the_samples_and_the_epsilon_of_the_whole(
    tmp_path: Path, sampling: str, workers: int
) -> None:
    """The key of noise and samples is not an option: the whole run is resumed from its own checkpoints."""
    settings = [PoissonDPSGD(noise_multiplier=1.0, delta=1e-2, sampling=sampling)]
    options: dict[str, Any] = {**POISSON, "num_train_epochs": 3, "gradient_accumulation_steps": 2}
    options |= {"per_device_train_batch_size": 2, "dataloader_num_workers": workers}
    rows = Rows()
    whole = train(
        tmp_path, Classifier(dropout=0.2), settings, save_strategy="steps", save_steps=1, callbacks=[rows], **options
    )
    for step in (4, 6, 7) if workers == 0 else (8,):  # within the first epoch, at its end, and later
        later = Rows()
        resumed = make_trainer(
            tmp_path, Classifier(seed=3, dropout=0.2), DATA, regularizers=settings, callbacks=[later], **options
        )
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert torch.equal(weights(whole.model), weights(resumed.model))
        assert [row["epsilon"] for row in later.rows] == [row["epsilon"] for row in rows.rows[step:]]
    for file in (tmp_path / "checkpoint-7").glob("*.json"):
        assert str(trainer_key(whole)) not in file.read_text()  # it is in regularizers.pt alone


def trainer_key(trainer: Any) -> int:
    return int(trainer.regularizers.passes["dp_sgd"].state_dict()["key"])


def test_another_batch_size_within_an_epoch_of_poisson_sampling_is_refused(tmp_path: Path) -> None:
    settings = [PoissonDPSGD(noise_multiplier=1.0, delta=1e-2)]
    train(tmp_path, Classifier(), settings, save_strategy="steps", save_steps=2, max_steps=2, **POISSON)
    trainer = make_trainer(
        tmp_path, Classifier(), DATA, regularizers=settings, per_device_train_batch_size=6, max_steps=9, **POISSON
    )
    with pytest.raises(ValueError, match="resume with the batch size, the accumulation and the data that it had"):
        trainer.train(resume_from_checkpoint=True)


def test_samples_that_the_user_draws_are_no_poisson_samples(tmp_path: Path) -> None:
    class Own(Trainer):
        def get_batch_samples(self, iterator: Any, number: int, device: Any = None) -> Any:
            batches, items = super().get_batch_samples(iterator, number, device)
            return [{key: value[:1] for key, value in batch.items()} for batch in batches], items

    class Loaded(Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(DATA, batch_size=4)  # type: ignore[arg-type]

    for cls, message in ((Own, "no epsilon holds for it"), (Loaded, "the training loader or its sampler is not")):
        trainer = make_trainer(
            tmp_path, Classifier(), DATA, regularizers=[PoissonDPSGD(noise_multiplier=1.0, delta=1e-2)], cls=cls,
            **POISSON,
        )  # fmt: skip
        with pytest.raises(UnsupportedOption, match=message):
            trainer.train()


def test_data_and_orders_that_repeat_samples_are_refused(tmp_path: Path) -> None:
    class Weighted(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.WeightedRandomSampler([1.0] * 24, 24)

    class Loaded(Trainer):
        def get_train_dataloader(self) -> Any:
            sampler = torch.utils.data.RandomSampler(DATA, replacement=True)
            return torch.utils.data.DataLoader(DATA, batch_size=4, sampler=sampler)  # type: ignore[arg-type]

    mixed = MixedDataset({"a": DATA[:20], "b": DATA[20:]}, {"a": 0.5, "b": 0.5})
    cases: list[tuple[Any, Any, str, str]] = [
        (Trainer, mixed, "poisson", "with a MixedDataset, which repeats samples"),
        (Trainer, mixed, "shuffle", "with a MixedDataset, which repeats samples"),
        (Weighted, DATA, "shuffle", "with the order of a WeightedRandomSampler"),
        (Loaded, DATA, "shuffle", "with the order of a RandomSampler"),
    ]
    for cls, data, sampling, message in cases:
        settings = [PoissonDPSGD(noise_multiplier=1.0, delta=1e-2, sampling=sampling)]
        trainer = make_trainer(tmp_path, Classifier(), data, regularizers=settings, cls=cls, **POISSON)
        with pytest.raises(UnsupportedOption, match=message):
            trainer.train()


class Norm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, labels: Any = None) -> Any:
        return super().forward(self.norm(x), labels)


class Flat(nn.Module):
    """Flattens samples and positions before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.layer(x.reshape(-1, 4)).reshape(len(x), 2, 4).mean(1)
        return functional.cross_entropy(logits, labels)


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 4))

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return functional.cross_entropy(x @ self.weight, labels)


REFUSED: dict[str, tuple[nn.Module, dict[str, Any], str]] = {
    "batch norm": (Norm(), {}, "dp_sgd cannot train Norm: BatchNorm cannot support training with differential privacy"),
    "flattened samples": (Flat(), {}, "needs a gradient of each of 4 samples.*8 rows for 'layer.weight'"),
    "parameters of the model itself": (
        Root(),
        {},
        "dp_sgd cannot train Root: it has parameters outside of its modules",
    ),
    "weights by a function": (Classifier(), {"loss_weight": lambda batch: 1.0}, "with a function as loss_weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_the_first_step(tmp_path: Path, case: str) -> None:
    model, options, message = REFUSED[case]
    before = weights(model)
    with pytest.raises(UnsupportedOption, match=message):
        train(tmp_path, model, [DPSGD(noise_multiplier=1.0, delta=1e-3)], **options)
    assert torch.equal(before, weights(model))
    assert not any(module._forward_hooks for module in model.modules())


def test_the_opacus_optimizer_makes_the_same_step(tmp_path: Path) -> None:
    """Opacus' own engine on the same batch, almost without noise."""
    model, twin = Classifier(), Classifier()
    settings = DPSGD(0.3, noise_multiplier=TINY_NOISE, delta=1e-3, noise_seed=0)
    train(tmp_path, model, [settings], max_steps=1)
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    module = GradSampleModule(twin)
    optimizer = DPOptimizer(
        torch.optim.SGD(twin.parameters(), lr=0.5), noise_multiplier=0.0, max_grad_norm=0.3, expected_batch_size=4
    )
    batch = {key: torch.stack([row[key] for row in DATA[:4]]) for key in DATA[0]}
    module(**batch)[0].backward()
    optimizer.step()
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-5, atol=1e-7)


def test_a_run_that_was_begun_without_privacy_is_refused(tmp_path: Path) -> None:
    settings = DPSGD(noise_multiplier=1.0, delta=1e-3)
    make_trainer(tmp_path, Classifier(), DATA, save_strategy="steps", save_steps=2, max_steps=2, **OPTIONS).train()
    trainer = make_trainer(tmp_path, Classifier(), DATA, regularizers=[settings], max_steps=4, **OPTIONS)
    with pytest.raises(UnsupportedOption, match="first 2 steps of this run were made without it"):
        trainer.train(resume_from_checkpoint=True)


def test_another_run_says_that_its_epsilon_is_its_own(tmp_path: Path, caplog: Any) -> None:
    options = {**OPTIONS, "optim": "adamw_torch", "max_steps": 1}
    trainer = train(tmp_path, Classifier(), [DPSGD(noise_multiplier=1.0, delta=1e-3)], **options)
    assert "before it" not in caplog.text
    trainer.train()
    assert "does not include the steps that the optimizer has made before it" in caplog.text


def test_with_each_sample_once_per_epoch_the_target_is_that_of_epochs(tmp_path: Path) -> None:
    """An epoch is one Gaussian mechanism, so the noise is that of a run of as many full batches."""
    from opacus.accountants.utils import get_noise_multiplier

    settings = DPSGD(target_epsilon=6.0, delta=1e-3)
    trainer = train(tmp_path, Classifier(), [settings], num_train_epochs=2)
    last = [row for row in trainer.state.log_history if "epsilon" in row][-1]
    assert last["epsilon"] <= 6.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = get_noise_multiplier(
            target_epsilon=6.0, target_delta=1e-3, sample_rate=1.0, steps=2, accountant="rdp"
        )
    record = json.loads((tmp_path / "run.json").read_text())["extra"]["regularizers"]["dp_sgd"]
    assert record["noise_multiplier"] == pytest.approx(expected)
    assert record["expected_epsilon"] == pytest.approx(last["epsilon"])
