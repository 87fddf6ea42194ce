"""The script that the files of this folder start: a small model on digits. Put your model and data in its place.

paceline launch --nproc-per-node 2 launch/train.py --use_cpu --output_dir runs/digits --resume_from_checkpoint auto
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from paceline import HfArgumentParser, Trainer, TrainingArguments, set_seed


class Net(nn.Module):
    """Two layers; any module that returns its loss will do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def load_samples() -> list[dict[str, torch.Tensor]]:
    images, labels = load_digits(return_X_y=True)
    return [{"x": torch.tensor(x / 16).float(), "labels": torch.tensor(y)} for x, y in zip(images, labels, strict=True)]


def make_trainer(args: TrainingArguments) -> Trainer:
    set_seed(args.seed)
    samples = load_samples()
    return Trainer(Net(), args, train_dataset=samples[:1500], eval_dataset=samples[1500:])


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(learning_rate=2e-3, per_device_train_batch_size=16, save_steps=50, save_total_limit=2)
    (args,) = parser.parse_args_into_dataclasses()
    trainer = make_trainer(args)
    trainer.train()  # goes on, or begins anew, as --resume_from_checkpoint says
    if trainer.state.global_step == trainer.state.max_steps:  # not so after a signal: the next start goes on
        trainer.save_metrics("eval", trainer.evaluate())
        trainer.save_model()


if __name__ == "__main__":
    main()
