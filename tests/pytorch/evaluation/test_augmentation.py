"""Test-time augmentation: the combined predictions are those of the formulas, on one process and on several."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import harness_job
import numpy as np
import processes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Classifier
from torch import Tensor, nn

from paceline import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments, UnsupportedOption
from paceline.predictions.augmentation import TestTimeAugmentation
from paceline.pytorch.evaluation.image_transforms import Crop, Flip, Shift, Zoom

ROWS = torch.randn(13, 8, generator=torch.Generator().manual_seed(0))
DATA = [{"x": row, "labels": torch.tensor(index % 4)} for index, row in enumerate(ROWS)]


def negate(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "x": -batch["x"]}


def halve(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "x": batch["x"] / 2}


def make_trainer(tmp_path: Path, kind: type[Trainer] = Trainer, model: nn.Module | None = None, **options: Any) -> Any:
    makes = Seq2SeqTrainingArguments if kind is Seq2SeqTrainer else TrainingArguments
    names = {"report_to": "none", "disable_tqdm": True, "per_device_eval_batch_size": 4}
    own = {name: options.pop(name) for name in ("compute_metrics", "preprocess_logits_for_metrics") if name in options}
    args = makes(str(tmp_path), **names, **options)
    return kind(Classifier() if model is None else model, args, eval_dataset=DATA, **own)


def logits_of(*factors: float) -> list[Tensor]:
    with torch.no_grad():
        return [Classifier().logits(ROWS * factor) for factor in factors]


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_the_mean_is_that_of_probabilities(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    plain = trainer.predict(DATA)
    output = trainer.predict(DATA, augmentation=TestTimeAugmentation([negate, halve]))
    stacked = torch.stack([each.softmax(-1) for each in logits_of(1, -1, 0.5)])
    np.testing.assert_allclose(output.predictions, stacked.mean(0).log(), atol=1e-5)
    np.testing.assert_allclose(output.spread, stacked.std(0, correction=0).mean(1), atol=1e-5)
    votes = (stacked.argmax(-1) == stacked.mean(0).argmax(-1)).float().mean(0)
    np.testing.assert_allclose(output.agreement, votes, atol=1e-5)
    assert len(output) == 3
    assert output.metrics["test_loss"] == plain.metrics["test_loss"]
    assert output.metrics["test_agreement"] == pytest.approx(float(votes.mean()), abs=1e-5)
    np.testing.assert_array_equal(output.label_ids, plain.label_ids)
    assert "test_agreement" not in trainer.predict(DATA).metrics


def test_other_reductions_and_weights(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)

    def predict(**options: Any) -> Tensor:
        return torch.tensor(trainer.predict(DATA, augmentation=TestTimeAugmentation([negate, halve], **options))[0])

    stacked = torch.stack([each.log_softmax(-1) for each in logits_of(1, -1, 0.5)])
    weights = torch.tensor([0.5, 0.3, 0.2])[:, None, None]
    close = {"atol": 1e-5, "rtol": 1e-4}
    geometric = (stacked * weights).sum(0).log_softmax(-1)
    torch.testing.assert_close(predict(reduce="geometric", weights=[5, 3, 2]), geometric, **close)
    torch.testing.assert_close(predict(weights=[5, 3, 2]), (stacked.exp() * weights).sum(0).log(), **close)
    torch.testing.assert_close(predict(reduce="max"), stacked.max(0).values.log_softmax(-1), **close)
    torch.testing.assert_close(predict(reduce="median"), stacked.median(0).values.log_softmax(-1), **close)
    torch.testing.assert_close(predict(weights=[0, 0, 1]), stacked[2], **close)
    without = predict(include_original=False)
    torch.testing.assert_close(without, stacked[1:].exp().mean(0).log(), **close)
    votes = torch.nn.functional.one_hot(stacked.argmax(-1), 4).float().mean(0)
    torch.testing.assert_close(predict(reduce="vote"), votes, **close)


def test_evaluate_uses_the_combination_for_its_metrics(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, compute_metrics=accuracy)
    plain = trainer.evaluate()
    found = trainer.evaluate(augmentation=TestTimeAugmentation([negate], include_original=False))
    expected = (logits_of(-1)[0].argmax(-1) == torch.arange(13) % 4).float().mean()
    assert found["eval_accuracy"] == pytest.approx(float(expected))
    assert found["eval_loss"] == plain["eval_loss"]
    named = trainer.evaluate({"a": DATA, "b": DATA[:5]}, augmentation=TestTimeAugmentation([negate]))
    assert {"eval_a_accuracy", "eval_b_agreement"} <= named.keys()
    assert trainer.augmented is None


def test_streamed_metrics_get_the_combination(tmp_path: Path) -> None:
    def add(prediction: Any, compute_result: bool) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {"rows": float(sum(map(len, seen)))} if compute_result else {}

    seen: list[Any] = []
    trainer = make_trainer(tmp_path, compute_metrics=add, batch_eval_metrics=True)
    found = trainer.evaluate(augmentation=TestTimeAugmentation([negate], include_original=False))
    assert found["eval_rows"] == 13
    torch.testing.assert_close(torch.cat(seen), logits_of(-1)[0].log_softmax(-1))


def test_overrides_without_the_argument_still_work(tmp_path: Path) -> None:
    class Own(Trainer):
        def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> Any:  # type: ignore[override]
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:  # type: ignore[override]
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    trainer = make_trainer(tmp_path, Own, compute_metrics=accuracy)
    trainer.evaluate({"a": DATA})
    trainer.predict(DATA)
    output = Trainer.predict(trainer, DATA, augmentation=TestTimeAugmentation([negate]))
    assert output.agreement is not None


def test_a_loop_that_does_not_use_it_is_an_error(tmp_path: Path) -> None:
    class Own(Trainer):
        def evaluation_loop(self, *args: Any, **options: Any) -> Any:
            from paceline import EvalLoopOutput

            return EvalLoopOutput(np.zeros((13, 4)), None, {}, 13)

    with pytest.raises(ValueError, match="evaluation_loop does not call"):
        make_trainer(tmp_path, Own).predict(DATA, augmentation=TestTimeAugmentation([negate]))


def test_sequence_to_sequence_without_generation(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Seq2SeqTrainer)
    assert trainer.predict(DATA, augmentation=TestTimeAugmentation([negate])).agreement.shape == (13,)


def test_options_of_generation_without_it_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, Seq2SeqTrainer, compute_metrics=accuracy)
    for method in (trainer.evaluate, trainer.predict):
        caplog.clear()
        method(DATA, augmentation=TestTimeAugmentation([negate]), num_beams=2)
        assert "was given num_beams for generation, and nothing is generated" in caplog.text


def test_generation_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.args.predict_with_generate = True
    with pytest.raises(UnsupportedOption, match="predict_with_generate=True"):
        trainer.predict(DATA, augmentation=TestTimeAugmentation([negate]))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda batch: None, "returned NoneType"),
        (lambda batch: {**batch, "x": batch["x"].neg_()}, "changed the tensor 'x' in place"),
        (lambda batch: {"x": batch["x"][:1], "labels": batch["labels"][:1]}, "have 1 rows, the batch has 4"),
    ],
)
def test_wrong_transforms_are_named(tmp_path: Path, transform: Any, message: str) -> None:
    data = [{"x": row.clone(), "labels": torch.tensor(0)} for row in ROWS]
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path).predict(data, augmentation=TestTimeAugmentation([transform]))


@pytest.mark.parametrize(
    "options",
    [
        {"transforms": []},
        {"transforms": "horizontal_flip"},
        {"transforms": ["flip"]},
        {"transforms": [negate], "reduce": "average"},
        {"transforms": [negate], "outputs": "boxes"},
        {"transforms": [negate], "outputs": "values", "reduce": "vote"},
        {"transforms": [negate], "weights": [1.0]},
        {"transforms": [negate], "weights": [1.0, float("nan")]},
        {"transforms": [negate], "weights": [1.0, -1.0]},
        {"transforms": [negate], "weights": [0.0, 0.0]},
        {"transforms": [negate], "weights": [1.0, 1.0], "reduce": "median"},
        {"transforms": [negate], "inverse": "image"},
        {"transforms": ["shift_left"], "inverse": "image"},
        {"transforms": [negate], "inverse": []},
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"invalid|expected"):
        TestTimeAugmentation(**options)


def test_only_losses_or_another_object_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(ValueError, match="Set compute_metrics"):
        trainer.evaluate(augmentation=TestTimeAugmentation([negate]))
    with pytest.raises(TypeError, match="TestTimeAugmentation"):
        trainer.predict(DATA, augmentation=[negate])


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        values = self.linear(x)
        return {"loss": (values - labels).square().mean(), "values": values} if labels is not None else values


def test_a_regression_is_not_read_as_logits(tmp_path: Path) -> None:
    model, data = Regression(), [{"x": row, "labels": row[:2]} for row in ROWS]
    trainer = make_trainer(tmp_path, model=model)
    with pytest.raises(ValueError, match='outputs="values"'):
        trainer.predict(data, augmentation=TestTimeAugmentation([negate]))
    output = trainer.predict(data, augmentation=TestTimeAugmentation([negate], outputs="values"))
    np.testing.assert_allclose(output.predictions, model.linear.bias.detach().expand(13, 2), atol=1e-5)
    assert output.agreement is None


class Pixels(nn.Module):
    """Predicts a mask: the pixels themselves, plus the column."""

    def forward(self, images: Tensor) -> Tensor:
        return images + torch.arange(images.shape[-1])


def test_masks_are_brought_back(tmp_path: Path) -> None:
    images = torch.rand(5, 1, 4, 6)
    trainer = make_trainer(tmp_path, model=Pixels())
    names = ["horizontal_flip", "vertical_flip"]
    augmentation = TestTimeAugmentation(names, inverse="image", outputs="values", include_original=False)
    output = trainer.predict([{"images": image} for image in images], augmentation=augmentation)
    expected = images + (torch.arange(6) + torch.arange(5, -1, -1)) / 2
    np.testing.assert_allclose(output.predictions, expected, atol=1e-5)


class Waves(nn.Module):
    """Classifies waves `(samples, time)` by the largest response of circular filters: the same wherever they begin."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.filters, self.head = nn.Conv1d(1, 6, 9, padding=4, padding_mode="circular"), nn.Linear(6, 3)

    def forward(self, waves: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.filters(waves[:, None]).relu().amax(-1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.slow
def test_waves_that_are_shifted_and_louder(tmp_path: Path) -> None:
    """The model does not depend on the beginning of a wave, but on its loudness."""
    generator = torch.Generator().manual_seed(1)
    times = torch.arange(64) / 64
    waves = [
        torch.sin(2 * torch.pi * (3 + 4 * (i % 3)) * (times + torch.rand(1, generator=generator))) for i in range(24)
    ]
    data = [{"waves": wave, "labels": torch.tensor(i % 3)} for i, wave in enumerate(waves)]
    options = {"max_steps": 60, "learning_rate": 0.05, "lr_scheduler_type": "constant", "save_strategy": "no"}
    trainer = make_trainer(tmp_path, model=Waves(), compute_metrics=accuracy, **options)
    trainer.train_dataset = data
    trainer.train()
    plain = trainer.predict(data)
    assert plain.metrics["test_accuracy"] > 0.9
    shifts = [lambda batch, n=n: {**batch, "waves": batch["waves"].roll(n, -1)} for n in (1, 17, 63)]
    output = trainer.predict(data, augmentation=TestTimeAugmentation(shifts))
    np.testing.assert_allclose(output.predictions, torch.tensor(plain.predictions).log_softmax(-1), atol=1e-4)
    assert output.agreement.min() == 1
    assert output.spread.max() < 1e-4
    louder = TestTimeAugmentation([lambda batch: {**batch, "waves": 3 * batch["waves"]}])
    by_hand = [torch.tensor(trainer.predict([{**row, "waves": n * row["waves"]} for row in data])[0]) for n in (1, 3)]
    expected = torch.stack([each.softmax(-1) for each in by_hand]).mean(0).log()
    np.testing.assert_allclose(trainer.predict(data, augmentation=louder).predictions, expected, atol=1e-4)


@pytest.mark.slow
def test_texts_with_several_prompts_and_tokenisations(tmp_path: Path) -> None:
    """Each pass of a padded batch is what the texts give alone, with that prompt or in those tokens."""
    from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding

    tokens = harness_job.tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=len(tokens), pad_token_id=0, num_labels=3, initializer_range=0.5, **sizes)
    model = BertForSequenceClassification(config).eval()
    texts = [" ".join(f"w{(3 * i + k) % 28}" for k in range(2 + i % 5)) for i in range(11)]
    data = [{"input_ids": tokens(text)["input_ids"], "labels": i % 3} for i, text in enumerate(texts)]

    def prompted(prompt: str) -> Any:
        ids = torch.tensor(tokens(prompt)["input_ids"])

        def transform(batch: dict[str, Tensor]) -> dict[str, Tensor]:
            front = ids.expand(len(batch["input_ids"]), -1)
            joined = torch.cat([front, batch["input_ids"]], 1)
            mask = torch.cat([torch.ones_like(front), batch["attention_mask"]], 1)
            return {"input_ids": joined, "attention_mask": mask, "labels": batch["labels"]}

        return transform

    def backwards(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        words = [text.split() for text in tokens.batch_decode(batch["input_ids"], skip_special_tokens=True)]
        again = tokens([" ".join(reversed(each)) for each in words], padding=True, return_tensors="pt")
        return {"input_ids": again["input_ids"], "attention_mask": again["attention_mask"], "labels": batch["labels"]}

    def alone(text: str) -> Tensor:
        with torch.no_grad():
            return model(input_ids=torch.tensor([tokens(text)["input_ids"]])).logits[0].softmax(-1)

    trainer = make_trainer(tmp_path, model=model)
    trainer.data_collator = DataCollatorWithPadding(tokens)
    augmentation = TestTimeAugmentation([prompted("w1 w2"), prompted("w9"), backwards])
    output = trainer.predict(data, augmentation=augmentation)
    ways = [lambda text: text, "w1 w2 {}".format, "w9 {}".format, lambda text: " ".join(reversed(text.split()))]
    expected = torch.stack([torch.stack([alone(way(text)) for way in ways]).mean(0) for text in texts])
    np.testing.assert_allclose(np.exp(output.predictions), expected, atol=1e-5)


class Edges(nn.Module):
    """Finds the box `(left, top, right, bottom)` around the bright pixels, with the same error on all sides."""

    def __init__(self, error: float = 0.0) -> None:
        super().__init__()
        self.error = error

    def forward(self, images: Tensor) -> Tensor:
        bright = images[:, 0] > 0.5
        found = []
        for axis in (1, 2):  # the columns, then the rows in which there is a bright pixel
            line = bright.any(axis).float()
            found.append((line.argmax(-1), line.shape[-1] - line.flip(-1).argmax(-1)))
        (left, right), (top, bottom) = found
        return torch.stack([left, top, right, bottom], -1).float() + self.error


def flip_boxes(boxes: Tensor) -> Tensor:
    """Flips boxes in images of 12 columns from left to right."""
    left, top, right, bottom = boxes.unbind(-1)
    return torch.stack([12 - right, top, 12 - left, bottom], -1)


@given(st.lists(st.tuples(*[st.integers(0, 11), st.integers(0, 7)] * 2), min_size=1, max_size=6))
@settings(max_examples=20)
def test_boxes_are_brought_back(places: list[tuple[int, int, int, int]]) -> None:
    images = torch.zeros(len(places), 1, 8, 12)
    for image, (left, top, right, bottom) in zip(images, places, strict=True):
        image[0, [top, bottom], [left, right]] = 1
    data = [{"images": image} for image in images]
    augmentation = TestTimeAugmentation(["horizontal_flip"], inverse=[flip_boxes], outputs="values")
    with tempfile.TemporaryDirectory() as folder:
        plain = make_trainer(Path(folder), model=Edges()).predict(data)
        output = make_trainer(Path(folder), model=Edges()).predict(data, augmentation=augmentation)
        biased = make_trainer(Path(folder), model=Edges(0.25)).predict(data, augmentation=augmentation)
    np.testing.assert_array_equal(output.predictions, plain.predictions)
    assert not output.spread.any()
    # the error of a side of the image is the opposite one after the flip
    np.testing.assert_allclose(biased.predictions - plain.predictions, np.array([[0, 0.25] * 2] * len(places)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8])
def test_image_transforms_keep_shape_and_type(dtype: torch.dtype) -> None:
    images = (torch.rand(2, 3, 8, 9) * 255).to(dtype)
    for transform in (Flip(), Flip("vertical"), Shift(2, -3), Crop(0.1, 0.2, 0.5), Zoom(1.3), Zoom(0.7)):
        batch = {"images": images.clone(), "labels": torch.zeros(2)}
        changed = transform(batch)
        assert changed["images"].shape == images.shape
        assert changed["images"].dtype == dtype
        assert torch.equal(batch["images"], images)
        assert changed["labels"] is batch["labels"]
    shifted = Shift(2, -3)({"images": images})["images"]
    assert torch.equal(shifted[..., :5, 2:], images[..., 3:, :7])
    assert not shifted[..., 5:, :].any()
    assert not shifted[..., :2].any()
    assert torch.equal(Zoom(1.0)({"images": images})["images"], images)


def test_images_must_be_found() -> None:
    two = {"a": torch.zeros(1, 1, 2, 2), "b": torch.zeros(1, 1, 2, 2)}
    with pytest.raises(ValueError, match="there are 2"):
        Flip()(two)
    assert Flip(key="b")(two)["a"] is two["a"]
    with pytest.raises(ValueError, match="key='c'"):
        Flip(key="c")(two)


@pytest.mark.slow
def test_two_processes_return_what_one_returns(tmp_path: Path) -> None:
    processes.run("augmentation_job.py", 2, str(tmp_path))
    output = make_trainer(tmp_path / "one", compute_metrics=accuracy).predict(
        DATA, augmentation=TestTimeAugmentation([negate, halve])
    )
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        np.testing.assert_allclose(found["predictions"], output.predictions, atol=1e-6)
        np.testing.assert_allclose(found["agreement"], output.agreement, atol=1e-6)
        np.testing.assert_allclose(found["spread"], output.spread, atol=1e-6)
        assert found["accuracy"] == output.metrics["test_accuracy"]
