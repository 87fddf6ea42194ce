"""Five classifiers of handwritten digits trained at once, as an ensemble, against snapshots of one run.

    python examples/members.py

Prints the accuracy on held-out digits of each member alone, of the ensemble of members, and of the snapshots of one
cyclic run. Needs scikit-learn (`pip install "paceline[demo]"`); runs in a minute on a CPU.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import paceline

STEPS = 600


class Classifier(nn.Module):
    """Two linear layers over 64 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def accuracy(prediction: Any) -> dict[str, float]:
    """Returns the share of digits that are right."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def arguments(folder: Path, **options: Any) -> paceline.TrainingArguments:
    """Returns the arguments of both runs."""
    return paceline.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        learning_rate=1e-2,
        per_device_train_batch_size=32,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        logging_steps=STEPS,
        **options,
    )


def main() -> None:
    """Trains and compares."""
    pixels, digits = load_digits(return_X_y=True)
    inputs = torch.tensor(pixels / 16, dtype=torch.float32)
    samples = [{"pixels": x, "labels": torch.tensor(int(y))} for x, y in zip(inputs, digits, strict=True)]
    train, test = samples[:600], samples[1000:]
    with tempfile.TemporaryDirectory() as folder:
        members = [paceline.Member(seed=seed, data_seed=seed) for seed in range(5)]
        trainer = paceline.MembersTrainer(
            model_init=Classifier,
            args=arguments(Path(folder, "members")),
            train_dataset=train,
            compute_metrics=accuracy,
            members=members,
        )
        trainer.train()
        ensemble = paceline.ensemble_predict(trainer.modules(), test, trainer)
        alone = [each["test_accuracy"] for each in ensemble.members]

        snapshots = paceline.SnapshotEnsemble(last=3)
        cyclic = {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 5}}
        single = paceline.Trainer(
            model_init=Classifier,
            args=arguments(Path(folder, "snapshots"), **cyclic),
            train_dataset=train,
            compute_metrics=accuracy,
            callbacks=[snapshots],
        )
        single.train()
        combined = paceline.ensemble_predict(snapshots.folders, test, single)
    print(f"members alone        {', '.join(f'{value:.4f}' for value in alone)}, mean {sum(alone) / len(alone):.4f}")
    print(f"ensemble of members  {ensemble.metrics['test_accuracy']:.4f}")
    print(f"last snapshot        {combined.members[-1]['test_accuracy']:.4f}")
    print(f"snapshot ensemble    {combined.metrics['test_accuracy']:.4f}")


if __name__ == "__main__":
    main()
