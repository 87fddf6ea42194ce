"""Test-time augmentation and ensembles with TensorFlow: the formulas, the rows, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_models import Linear, make_data, make_model, make_trainer, weights

from paceline import TestTimeAugmentation, TFTrainer, UnsupportedOption, ensemble_predict
from paceline.predictions.image_transforms import NAMED
from paceline.predictions.weights import log_softmax
from paceline.tensorflow.framework import keras, tf

DATA = make_data(13)
OPTIONS: dict[str, Any] = {"per_device_eval_batch_size": 4}


def negate(x: Any) -> Any:
    return -x


def halve(x: Any) -> Any:
    return x / 2


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def logits_of(model: Any, *factors: float) -> Any:
    return np.stack([model(DATA[0] * factor).numpy() for factor in factors])


@pytest.mark.parametrize("accumulation", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_mean_is_that_of_probabilities_with_a_row_per_sample(tmp_path: Path, accumulation: int) -> None:
    model = make_model()
    options = {"compute_metrics": accuracy, "eval_accumulation_steps": accumulation}
    trainer = make_trainer(tmp_path, model, DATA, eval_dataset=DATA, **OPTIONS, **options)
    plain = trainer.predict(DATA)
    output: Any = trainer.predict(DATA, augmentation=TestTimeAugmentation([negate, halve], weights=[2, 1, 1]))
    passes = np.exp(log_softmax(logits_of(model, 1, -1, 0.5)))
    shares = np.array([0.5, 0.25, 0.25])[:, None, None]
    mean = (passes * shares).sum(0)
    np.testing.assert_allclose(np.exp(output.predictions), mean, atol=1e-5)
    np.testing.assert_allclose(output.spread, np.sqrt((shares * (passes - mean) ** 2).sum(0)).mean(1), atol=1e-5)
    agreement = ((passes.argmax(-1) == mean.argmax(-1)) * shares[..., 0]).sum(0)
    np.testing.assert_allclose(output.agreement, agreement, atol=1e-5)
    assert output.metrics["test_loss"] == plain.metrics["test_loss"]
    np.testing.assert_array_equal(output.label_ids, DATA[1])
    found = trainer.evaluate(augmentation=TestTimeAugmentation([negate], include_original=False))
    assert found["eval_accuracy"] == pytest.approx((logits_of(model, -1)[0].argmax(-1) == DATA[1]).mean())
    assert trainer.augmented is None
    assert "eval_agreement" not in trainer.evaluate()


@pytest.mark.slow
def test_replicas_return_what_one_device_returns(tmp_path: Path, mirrored: Any) -> None:
    augmentation = TestTimeAugmentation([negate], reduce="geometric")
    expected: Any = make_trainer(tmp_path, make_model(), DATA, **OPTIONS).predict(DATA, augmentation=augmentation)
    with mirrored.scope():
        model = make_model()
    found: Any = make_trainer(tmp_path, model, DATA, **OPTIONS).predict(DATA, augmentation=augmentation)
    np.testing.assert_allclose(found.predictions, expected.predictions, atol=1e-5)
    np.testing.assert_allclose(found.agreement, expected.agreement, atol=1e-6)


def test_masks_come_back_in_place_and_transforms_equal_those_of_torch(tmp_path: Path) -> None:
    images = np.random.default_rng(0).random((5, 4, 6, 1), dtype=np.float32)
    inputs = keras.Input((4, 6, 1))
    model = keras.Model(inputs, keras.layers.Lambda(lambda x: x + tf.range(6.0)[:, None])(inputs))
    names = ["horizontal_flip", "vertical_flip"]
    masks = TestTimeAugmentation(names, inverse="image", outputs="values", include_original=False)
    output = make_trainer(tmp_path, model, (images, images), **OPTIONS).predict(images, augmentation=masks)
    columns = np.arange(6.0)
    np.testing.assert_allclose(output.predictions, images + ((columns + columns[::-1]) / 2)[:, None], atol=1e-5)
    torch = pytest.importorskip("torch")
    from paceline.pytorch.evaluation.image_transforms import NAMED as OF_TENSORS

    for values, tolerance in ((images, 1e-5), ((images * 255).astype(np.uint8), 1)):  # 1: rounded halves
        tensors = {"images": torch.tensor(values).permute(0, 3, 1, 2)}
        for name, transform in NAMED.items():
            expected = OF_TENSORS[name](tensors)["images"].permute(0, 2, 3, 1).numpy()
            for found in (transform(values), transform({"x": values})["x"]):
                assert found.dtype == expected.dtype
                np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0, err_msg=name)


def change_in_place(x: Any) -> Any:
    x *= 2
    return x


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda x: None, "<lambda> failed, or returned no features"),
        (change_in_place, "change_in_place changed features in place"),
        (lambda x: x[:1], "have 1 rows, the batch has 4"),
        ("horizontal_flip", r"an array of shape \(4, 8\); expected images \(samples, height, width, channels\)"),
    ],
)
def test_wrong_transforms_are_named(tmp_path: Path, transform: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, Linear(), DATA, **OPTIONS).predict(DATA, augmentation=TestTimeAugmentation([transform]))


@pytest.mark.slow
def test_what_cannot_be_augmented_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    augmentation = TestTimeAugmentation([negate])
    with pytest.raises(ValueError, match="Set compute_metrics"):
        make_trainer(tmp_path, Linear(), DATA, eval_dataset=DATA).evaluate(augmentation=augmentation)
    model = make_model()
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    trainer = make_trainer(tmp_path, model, DATA)
    assert "test_accuracy" in trainer.predict(DATA).metrics  # type: ignore[operator]
    assert "test_accuracy" not in trainer.predict(DATA, augmentation=augmentation).metrics  # type: ignore[operator]
    assert "Metrics of compile() are left out with augmentation" in caplog.text
    keras.config.set_image_data_format("channels_first")
    try:
        with pytest.raises(UnsupportedOption, match="channels_first"):
            trainer.predict(DATA, augmentation=TestTimeAugmentation(["horizontal_flip"]))
    finally:
        keras.config.set_image_data_format("channels_last")

    class Own(TFTrainer):
        def prediction_loop(self, *args: Any, **options: Any) -> Any:
            from paceline import EvalLoopOutput

            return EvalLoopOutput(None, None, {}, 13)

    with pytest.raises(ValueError, match="prediction_loop does not call that of TFTrainer"):
        make_trainer(tmp_path, Linear(), DATA, kind=Own).predict(DATA, augmentation=augmentation)


@pytest.mark.slow
def test_an_ensemble_of_models_functions_folders_and_checkpoints(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", make_model(seed=9), DATA, compute_metrics=accuracy, **OPTIONS)
    trainer.predict(DATA)
    before, own = weights(trainer.model), (trainer.model, trainer.predictor)
    make_trainer(tmp_path, make_model(seed=3), DATA).save_model(str(tmp_path / "saved"))
    make_trainer(
        tmp_path / "trained", make_model(seed=4), DATA, max_steps=2, save_strategy="steps", save_steps=2
    ).train()
    trained = make_trainer(tmp_path, make_model(), DATA)
    trained._load_from_checkpoint(str(tmp_path / "trained" / "checkpoint-2"))
    members = [make_model(seed=1), lambda: make_model(seed=2), tmp_path / "saved"]
    members.append(str(tmp_path / "trained" / "checkpoint-2"))
    output = ensemble_predict(members, DATA, trainer)
    models = [*(make_model(seed=seed) for seed in (1, 2, 3)), trained.model]
    passes = np.exp(log_softmax(np.stack([model(DATA[0]).numpy() for model in models])))
    np.testing.assert_allclose(np.exp(output.predictions), passes.mean(0), atol=1e-5)
    np.testing.assert_allclose(output.disagreement, (passes.argmax(-1) != passes.mean(0).argmax(-1)).mean(0), atol=1e-6)
    assert output.metrics["test_accuracy"] == pytest.approx((passes.mean(0).argmax(-1) == DATA[1]).mean())
    assert [each["test_accuracy"] for each in output.members] == pytest.approx(
        [float((each.argmax(-1) == DATA[1]).mean()) for each in passes]
    )
    assert (trainer.model, trainer.predictor) == own
    np.testing.assert_array_equal(weights(trainer.model), before)
    held_out = make_data(60, 1)
    fitted = ensemble_predict([models[3], make_model(seed=1)], DATA, trainer, weights="fit", held_out=held_out)
    assert sum(fitted.weights) == pytest.approx(1)
    assert fitted.weights[0] > fitted.weights[1]  # the trained one


def test_members_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", make_model(), DATA, **OPTIONS)
    before = weights(trainer.model)
    with pytest.raises(ValueError, match="expected a list of models"):
        ensemble_predict(trainer.model, DATA, trainer)
    with pytest.raises(ValueError, match="is no folder with a model"):
        ensemble_predict([tmp_path / "none"], DATA, trainer)
    make_trainer(tmp_path, Linear(), DATA).save_model(str(tmp_path / "linear"))
    with pytest.raises(ValueError, match="do not fit the trainer's model"):
        ensemble_predict([str(tmp_path / "linear")], DATA, trainer)
    with pytest.raises(ValueError, match=r"member 1 cannot be combined .* label space"):
        ensemble_predict([make_model(), Linear(outputs=4)], DATA, trainer)
    with pytest.raises(TypeError, match="a Keras model or a callable"):
        ensemble_predict([lambda: 3], DATA, trainer)
    np.testing.assert_array_equal(weights(trainer.model), before)
