"""The sections `augmentation`, `calibration` and `ensemble` of `paceline train`, from the file to the predictions."""

import sys
from pathlib import Path

import numpy as np
import pytest
from train_jobs import module_of, results, write_job

from paceline.cli.main import main
from paceline.predictions.calibration import Calibrator, fit_calibration

MODULE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

    def forward(self, images, labels=None):
        logits = self.layers(images)
        return {"logits": logits} if labels is None else {
            "loss": nn.functional.cross_entropy(logits, labels), "logits": logits
        }


def rows(size, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 1, 4, 4, generator=generator)
    noise = torch.randn(size, 3, generator=generator)
    return [
        {"images": image, "labels": (image.flatten()[:3] + each).argmax()} for image, each in zip(images, noise)
    ]


def data():
    return {"train": rows(64, 0), "validation": rows(40, 1), "test": rows(24, 2)}


def metrics(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def brighter(batch, factor=2.0):
    return {**batch, "images": batch["images"] * factor}
"""
CONFIG = """
model: {module}:Net
data: {module}:data
compute_metrics: {module}:metrics
output_dir: {folder}/run
max_steps: 12
learning_rate: 3e-1
lr_scheduler_type: cosine_with_restarts
lr_scheduler_kwargs: {{num_cycles: 3}}
save_strategy: "no"
report_to: none
disable_tqdm: true
use_cpu: true
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return write_job(tmp_path, MODULE, CONFIG)


def predicted(config: Path) -> dict[str, np.ndarray]:
    with np.load(config.parent / "run" / "predictions.npz") as kept:
        return dict(kept)


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.slow
def test_a_calibration_is_stored_beside_the_model_and_applied(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = config.parent / "run"
    stages = ["--do_train", "--do_eval", "--do_predict"]
    assert main(["train", str(config), *stages, "--calibration", "temperature"]) == 0
    kept = predicted(config)
    stored = Calibrator.load(folder)
    np.testing.assert_allclose(kept["probabilities"], stored(kept["predictions"]))
    held_out = config.read_text() + "\ncalibration: {method: vector}\n"
    config.write_text(held_out)
    capsys.readouterr()
    assert main(["train", str(config), "--do_predict"]) == 2
    assert "is of the method 'temperature'" in capsys.readouterr().err
    assert main(["train", str(config)]) == 0  # finished: only the calibration is fitted
    output = capsys.readouterr().out
    assert "This run is finished" in output
    assert "Calibration, fitted on the evaluation data" in output
    assert main(["train", str(config), "--do_predict"]) == 0
    again = predicted(config)
    np.testing.assert_array_equal(again["predictions"], kept["predictions"])
    np.testing.assert_allclose(again["probabilities"], Calibrator.load(folder)(kept["predictions"]))
    fitted = fit_calibration(*evaluated(config), "vector")
    for name, values in Calibrator.load(folder).parameters.items():  # batches of another size round otherwise
        np.testing.assert_allclose(values, fitted.parameters[name], rtol=1e-4)
    # other weights: the calibration is not theirs
    config.write_text(held_out.replace("calibration: {method: vector}", ""))
    assert main(["train", str(config), "--max_steps", "15", "--save_strategy", "steps", "--save_steps", "15"]) == 0
    assert not (folder / "calibration.json").exists()
    words = ["--calibration", "vector", "--max_steps", "15"]
    assert main(["train", str(config), *words, "--do_predict"]) == 2
    assert "there is no calibration.json" in capsys.readouterr().err
    checkpoint = ["--resume_from_checkpoint", str(folder / "checkpoint-15")]
    assert main(["train", str(config), *words, "--do_eval", *checkpoint]) == 2
    assert "stored beside the model of a finished run, and the weights are those of" in capsys.readouterr().err


def evaluated(config: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns logits and labels of the evaluation set, by the stored model."""
    import torch
    from safetensors.torch import load_file

    module = __import__(module_of(config))
    model = module.Net()
    model.load_state_dict(load_file(config.parent / "run" / "model.safetensors"))
    rows = module.rows(40, 1)
    with torch.no_grad():
        logits = model(torch.stack([row["images"] for row in rows]))["logits"].numpy()
    return logits, np.array([int(row["labels"]) for row in rows])


@pytest.mark.slow
def test_augmentation_is_of_the_final_evaluation_and_the_predictions(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config), "--do_train", "--do_eval", "--do_predict"]) == 0
    plain, before = predicted(config), results(config.parent / "run")
    module = module_of(config)
    section = f'augmentation: {{transforms: [horizontal_flip, {{factory: "{module}:brighter", factor: 1.0}}]'
    config.write_text(f"{config.read_text()}\n{section}, weights: [1, 0, 3]}}\n")
    assert main(["train", str(config), "--do_eval", "--do_predict"]) == 0
    kept, after = predicted(config), results(config.parent / "run")
    # the transforms with a weight leave the images as they are
    np.testing.assert_allclose(kept["predictions"], log_probabilities(plain["predictions"]), atol=1e-5)
    assert kept["agreement"].shape == kept["spread"].shape == (24,)
    assert after["eval_loss"] == pytest.approx(before["eval_loss"])
    assert after["eval_augmented_accuracy"] == pytest.approx(before["eval_accuracy"])
    assert 0 <= after["eval_augmented_agreement"] <= 1
    assert main(["train", str(config), "--do_eval", "--augmentation.reduce", "vot"]) == 2
    assert "reduce='vot'" in capsys.readouterr().err


@pytest.mark.slow
def test_an_ensemble_of_folders_is_predicted_with(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", str(config), "--snapshot_ensemble", "true"]
    pattern = str(config.parent / "run" / "snapshots" / "*")
    assert main([*words, "--do_train", "--do_predict", "--ensemble", pattern]) == 0
    assert "An ensemble of 3, weights 0.333, 0.333, 0.333." in capsys.readouterr().out
    combined = predicted(config)
    assert combined["disagreement"].shape == (24,)
    logits = []
    for number in (1, 2, 3):
        member = f"[{config.parent}/run/snapshots/snapshot-{number}]"
        assert main([*words, "--do_predict", "--ensemble", member]) == 0
        logits.append(predicted(config)["predictions"])
    mean = np.exp(np.stack(logits)).mean(0)
    np.testing.assert_allclose(np.exp(combined["predictions"]), mean, atol=1e-5)
    fitted = [*words, "--do_predict", "--ensemble", pattern, "--ensemble.weights", "fit"]
    assert main(fitted) == 0
    assert {"test_accuracy", "test_disagreement"} <= set(results(config.parent / "run"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--calibration", "temprature"], "did you mean 'temperature'"),
        (["--calibration.methods", "vector"], "calibration: unknown key 'methods'"),
        (["--augmentation", "[flip_left]"], "augmentation.transforms[0]: 'flip_left' is neither"),
        (["--augmentation", "[rotate]", "--augmentation.reduces", "max"], "unknown key 'reduces'"),
        (["--augmentation", "[{module}:dimmer]"], "has no 'dimmer'"),
        (["--ensemble", "[runs/a]"], "only the stage do_predict uses it"),
        (["--ensemble", "[nowhere]", "--do_predict"], "there is no folder nowhere"),
        (["--ensemble", "[nowhere]", "--do_train", "--do_predict"], "there is no folder nowhere"),
        (["--ensemble", "[runs*/snapshots/*]", "--do_train", "--do_predict"], "there is no folder runs*/snapshots/*"),
        (["--ensemble", "[a]", "--ensemble.combine", "sum", "--do_predict"], "'sum' is not one of"),
        (
            ["--ensemble", "[a]", "--calibration", "vector", "--do_predict"],
            "calibration and ensemble exclude each other",
        ),
        (["--compute_metrics", "null", "--augmentation", "[shift_left]"], "the evaluation computes only the loss"),
    ],
)
def test_sections_that_are_refused(
    config: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config), *(word.format(module=module_of(config)) for word in words)]) == 2
    assert message in capsys.readouterr().err
    assert not (config.parent / "run" / "model.safetensors").exists()
