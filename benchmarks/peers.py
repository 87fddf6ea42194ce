"""Trainings that benchmarks compare with beside Trainers: a loop by hand, with accelerate in it, and Lightning.

All three train by AdamW or plain SGD with a rate that falls along a line, and clip the gradient if they are told to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# contender -> the module it needs
NEEDS = {"loop": "torch", "accelerate loop": "accelerate", "lightning": "lightning"}


@dataclass(frozen=True)
class Job:
    """A training.

    Attributes:
        model: returns an output with a loss.
        samples: at least as many as `steps` batches have.
        collate: makes a batch of a list of samples; None: torch's.
        on_step: called with the number of optimizer steps after each.
        max_norm: gradients are clipped to it; 0: they are not.
        shuffles: samples are taken in random order.
    """

    model: Any
    samples: list[Any]
    batch_size: int
    steps: int
    on_step: Callable[[int], None]
    collate: Callable[[list[Any]], Any] | None = None
    optimizer: str = "adamw"
    learning_rate: float = 5e-5
    max_norm: float = 1.0
    shuffles: bool = True

    def make_loader(self) -> Any:
        from torch.utils.data import DataLoader

        return DataLoader(self.samples, self.batch_size, shuffle=self.shuffles, collate_fn=self.collate)

    def make_optimizer(self) -> Any:
        import torch

        if self.optimizer == "sgd":
            return torch.optim.SGD(self.model.parameters(), self.learning_rate)
        return torch.optim.AdamW(self.model.parameters(), self.learning_rate, weight_decay=0.0, fused=True)

    def make_schedule(self, optimizer: Any) -> Any:
        from torch.optim.lr_scheduler import LambdaLR

        return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / self.steps))


def fit(contender: str, job: Job) -> None:
    """Trains as one of `NEEDS` does."""
    {"loop": by_hand, "accelerate loop": by_accelerate, "lightning": by_lightning}[contender](job)


def batches(loader: Any, steps: int) -> Iterator[Any]:
    """Yields so many batches, over as many epochs as it takes."""
    taken = 0
    while taken < steps:
        for batch in loader:
            yield batch
            taken += 1
            if taken == steps:
                return


def by_hand(job: Job) -> None:
    from torch.nn.utils import clip_grad_norm_

    job.model.train()
    optimizer = job.make_optimizer()
    schedule = job.make_schedule(optimizer)
    for step, batch in enumerate(batches(job.make_loader(), job.steps), 1):
        job.model(**batch)["loss"].backward()
        if job.max_norm:
            clip_grad_norm_(job.model.parameters(), job.max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        job.on_step(step)


def by_accelerate(job: Job) -> None:
    import accelerate  # type: ignore[import-untyped]

    accelerator = accelerate.Accelerator(cpu=True)
    job.model.train()
    optimizer = job.make_optimizer()
    schedule = job.make_schedule(optimizer)
    model, optimizer, schedule, loader = accelerator.prepare(job.model, optimizer, schedule, job.make_loader())
    for step, batch in enumerate(batches(loader, job.steps), 1):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if job.max_norm:
                accelerator.clip_grad_norm_(model.parameters(), job.max_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        job.on_step(step)


def by_lightning(job: Job) -> None:
    import logging
    import tempfile

    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model.train()

        def training_step(self, batch: Any, batch_index: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = job.make_optimizer()
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": job.make_schedule(optimizer), "interval": "step"},
            }

    class Steps(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
            job.on_step(trainer.global_step)

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            default_root_dir=folder,
            max_steps=job.steps,
            accelerator="cpu",
            devices=1,
            gradient_clip_val=job.max_norm or None,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            logger=False,
            callbacks=[Steps()],
        )
        trainer.fit(Module(), job.make_loader())
