"""Methods for the predictions of trained models, on scikit-learn's breast cancer data and handwritten digits.

    python examples/predictions.py [--seeds 5]

Breast cancer: calibrates a naive Bayes classifier on a third of the samples, and fits a threshold for errors of unequal
cost. Digits: trains one network per seed, combines them, predicts with shifted copies of the images, and makes
conformal sets. All numbers are those of samples that neither training nor a fit has used. Needs scikit-learn.
"""

import argparse
import statistics
import tempfile
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.naive_bayes import GaussianNB
from torch import nn

import paceline
from paceline.core.streaming import Accuracy
from paceline.predictions.calibration import fit_calibration
from paceline.predictions.decisions import fit_conformal, fit_thresholds
from paceline.predictions.reliability import expected_calibration_error
from paceline.predictions.significance import mcnemar, paired_bootstrap
from paceline.predictions.weights import log_softmax


class Classifier(nn.Module):
    """A small convolutional network for images of 8 x 8 pixels."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 10))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def calibrate() -> None:
    """Prints the calibration error of a naive Bayes classifier and the cost of its decisions, without and with fits."""
    rows, labels = load_breast_cancer(return_X_y=True)
    parts = np.array_split(np.random.default_rng(0).permutation(len(rows)), 3)
    classifier = GaussianNB().fit(rows[parts[0]], labels[parts[0]])
    held_out, test = (classifier.predict_joint_log_proba(rows[part]) for part in parts[1:])
    errors = {"none": expected_calibration_error(np.exp(log_softmax(test)), labels[parts[2]])}
    for method in ("temperature", "vector", "isotonic"):
        calibrated = fit_calibration(held_out, labels[parts[1]], method)(test)
        errors[method] = expected_calibration_error(calibrated, labels[parts[2]])
    print("breast cancer, calibration error:", ", ".join(f"{name} {value:.3f}" for name, value in errors.items()))
    seen, new = (np.exp(log_softmax(logits))[:, 0] for logits in (held_out, test))  # of the class malignant
    threshold, _ = fit_thresholds(seen, labels[parts[1]] == 0, lambda true, chosen: -cost(true, chosen))
    true = labels[parts[2]] == 0
    print(f"breast cancer, cost: threshold 0.5 {cost(true, new >= 0.5):.3f}, fitted {cost(true, new >= threshold):.3f}")


def cost(true: Any, chosen: Any) -> float:
    """Returns the mean cost of decisions, of which a missed case costs ten times a false alarm."""
    return float((10 * (true & ~chosen) + (chosen & ~true)).mean())


def digits() -> tuple[list[dict[str, Any]], ...]:
    """Returns 600 samples to train, 598 to fit on, and the others."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0)).tolist()
    images = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    samples = [{"images": images[index], "labels": int(labels[index])} for index in order]
    return samples[:600], samples[600:1198], samples[1198:]


def train(seed: int, data: list[dict[str, Any]], folder: str) -> paceline.Trainer:
    """Trains one network."""
    options: dict[str, Any] = {"per_device_train_batch_size": 32, "use_cpu": True, "disable_tqdm": True}
    args = paceline.TrainingArguments(
        folder, max_steps=250, learning_rate=4e-3, seed=seed, save_strategy="no", report_to="none", **options
    )
    trainer = paceline.Trainer(Classifier(seed), args, train_dataset=data)
    trainer.remove_callback(paceline.PrinterCallback)
    trainer.train()
    return trainer


def main() -> None:
    """Prints a line for each method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    calibrate()
    data, held_out, test = digits()
    truth = np.array([sample["labels"] for sample in test])
    with tempfile.TemporaryDirectory() as folder:
        trainers = [train(seed, data, folder) for seed in range(parser.parse_args().seeds)]
    single = [trainer.predict(test).predictions for trainer in trainers]

    def error(predictions: Any) -> float:
        return 100.0 * float((predictions.argmax(-1) != truth).mean())

    names = ["shift_left", "shift_right", "shift_up", "shift_down"]
    augmentation = paceline.TestTimeAugmentation(names, weights=[4, 1, 1, 1, 1])
    shifted = [trainer.predict(test, augmentation=augmentation).predictions for trainer in trainers]
    ensemble = paceline.ensemble_predict([trainer.model for trainer in trainers], test, trainers[0])
    print(f"digits, error: single {statistics.mean(map(error, single)):.2f} %, ", end="")
    print(f"with shifts {statistics.mean(map(error, shifted)):.2f} %, ensemble {error(ensemble.predictions):.2f} %")
    chosen = {"first network": single[0].argmax(-1), "ensemble": ensemble.predictions.argmax(-1)}
    for name, classes in chosen.items():
        metric = Accuracy()
        metric.update(paceline.EvalPrediction(classes, truth))
        found = metric.compute()
        low, high = (100 * (1 - found[f"accuracy_{side}"]) for side in ("high", "low"))
        print(f"digits, {name}: error {100 * (1 - found['accuracy']):.2f} % (95 %: {low:.2f} to {high:.2f})")
    paired = mcnemar(*chosen.values(), truth)
    change = paired_bootstrap(*chosen.values(), truth, lambda classes, true: 100 * float((classes != true).mean()))
    print(f"digits, first network and ensemble: {change.difference:+.2f} % ", end="")
    print(f"({change.low:+.2f} to {change.high:+.2f}), p = {paired.p_value:.3g} (McNemar)")
    known = trainers[0].predict(held_out)
    calibrator = fit_calibration(known.predictions, known.label_ids)
    seen, new = calibrator(known.predictions), calibrator(single[0])
    for method in ("split", "aps"):
        sets = fit_conformal(seen, known.label_ids, coverage=0.95, method=method)(new)
        covered = 100 * sets[np.arange(len(truth)), truth].mean()
        print(f"digits, conformal sets ({method}) for 95 %: {covered:.1f} % covered, {sets.sum(1).mean():.2f} classes")


if __name__ == "__main__":
    main()
