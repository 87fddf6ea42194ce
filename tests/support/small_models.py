"""Small modules and datasets that the tests of the Trainer share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline import Trainer, TrainingArguments


class Part(nn.Module):
    """Some modules of a model with the function that runs them: a stage of a pipeline."""

    def __init__(self, forward: Any, **modules: nn.Module) -> None:
        super().__init__()
        self.forward = forward
        for name, module in modules.items():
            self.add_module(name, module)


def with_loss(logits: Tensor, labels: Tensor | None) -> Any:
    return logits if labels is None else (functional.cross_entropy(logits, labels), logits)


class Classifier(nn.Module):
    """A plain module: features -> mean cross-entropy and logits, in a tuple. No config anywhere."""

    tp_plan: ClassVar[dict[str, str]] = {"first": "colwise", "second": "rowwise"}

    def __init__(self, features: int = 8, classes: int = 4, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(features, 16)
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(16, classes)

    def begin(self, x: Tensor) -> Tensor:
        result: Tensor = self.drop(torch.tanh(self.first(x)))
        return result

    def logits(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.begin(x))
        return result

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return with_loss(self.logits(x), labels)

    def pipeline_stages(self, num_stages: int) -> list[nn.Module]:
        """Two or four: this model can be cut in the middle, and around each of its steps."""
        begin = [Part(self.begin, first=self.first, drop=self.drop)]
        if num_stages == 4:
            begin = [Part(lambda x: self.first(x), first=self.first), nn.Tanh(), self.drop]
        return [*begin, Part(self.finish, second=self.second)]

    def finish(self, hidden: Tensor, labels: Tensor | None = None) -> Any:
        return with_loss(self.second(hidden), labels)


class WithHead(Classifier):
    """Adds a second head to its logits, where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: nn.Module | None = None

    def logits(self, x: Tensor) -> Tensor:
        logits = super().logits(x)
        return logits if self.extra is None else logits + self.extra(x)


class Tagger(nn.Module):
    """A plain module over token ids with ragged targets: mean cross-entropy over the targets that are not -100.

    Args:
        shifted: the output at i is compared with the target at i + 1, as in a language model.
        per_sample: the mean over samples of each one's mean, instead of the mean over targets.
    """

    tp_plan: ClassVar[dict[str, str]] = {"embedding": "embedding_colwise", "head": "rowwise_split_input"}

    def __init__(
        self,
        classes: int = 11,
        shifted: bool = False,
        per_sample: bool = False,
        seed: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(classes, 12)
        self.head = nn.Linear(12, classes)
        self.drop = nn.Dropout(dropout)
        self.shifted, self.per_sample = shifted, per_sample

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return self.finish(self.begin(input_ids), labels)

    def pipeline_stages(self, num_stages: int) -> list[nn.Module]:
        """Two or four: this model can be cut in the middle, and around each of its steps."""
        begin = [Part(self.begin, embedding=self.embedding, drop=self.drop)]
        if num_stages == 4:
            begin = [Part(lambda input_ids: self.embedding(input_ids), embedding=self.embedding), nn.Tanh(), self.drop]
        return [*begin, Part(self.finish, head=self.head)]

    def begin(self, input_ids: Tensor) -> Tensor:
        result: Tensor = self.drop(torch.tanh(self.embedding(input_ids)))
        return result

    def finish(self, hidden: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(hidden)
        left, right = (logits[:, :-1], labels[:, 1:]) if self.shifted else (logits, labels)
        if not self.per_sample:
            return {"loss": functional.cross_entropy(left.flatten(0, 1), right.flatten()), "logits": logits}
        losses = functional.cross_entropy(left.movedim(-1, 1), right, reduction="none")
        counts = (right != -100).sum(1)
        return {"loss": (losses.sum(1) / counts.clamp(min=1))[counts > 0].mean(), "logits": logits}


def classification(
    num_samples: int = 48, features: int = 8, classes: int = 4, seed: int = 1
) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, features, generator=generator)
    labels = (x[:, :classes] + 0.1 * torch.randn(num_samples, classes, generator=generator)).argmax(1)
    return [{"x": x[i], "labels": labels[i]} for i in range(num_samples)]


def tagging(num_samples: int = 24, width: int = 7, classes: int = 11, seed: int = 1) -> list[dict[str, Tensor]]:
    """Token ids with 0 to `width` targets each."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(num_samples):
        ids = torch.randint(0, classes, (width,), generator=generator)
        labels = torch.randint(0, classes, (width,), generator=generator)
        labels[int(torch.randint(0, width + 1, (1,), generator=generator)) :] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def make_trainer(
    folder: Path, model: nn.Module | None, train: Any = None, *, cls: type[Trainer] = Trainer, **options: Any
) -> Trainer:
    """A quiet Trainer; keywords of the constructor and of the arguments may be mixed."""
    names = {
        "eval_dataset", "data_collator", "callbacks", "compute_metrics", "compute_loss_func", "optimizers",
        "model_init",
        "preprocess_logits_for_metrics", "processing_class", "tokenizer",
        "optimizer_cls_and_kwargs",
    }  # fmt: skip
    for_trainer = {name: options.pop(name) for name in list(options) if name in names}
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
    }
    args = TrainingArguments(**{**defaults, **options})
    return cls(model=model, args=args, train_dataset=train, **for_trainer)


class RecordGradient(Trainer):
    """Keeps the gradient of each update, as the optimizer gets it: shape (number of parameters,)."""

    gradients: list[Tensor]

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        optimizer = super().create_optimizer(model)
        self.gradients = []

        def keep(*_: Any) -> None:
            self.gradients.append(torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]))

        optimizer.register_step_pre_hook(keep)
        return optimizer


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def scored(scores: Iterable[float], data: Any) -> dict[str, Any]:
    """Returns options of a run that is evaluated every two steps, with these metrics, and keeps its best model."""
    values = iter(scores)
    return {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_dataset": data,
        "compute_metrics": lambda prediction: {"score": next(values)},
        "metric_for_best_model": "score",
        "greater_is_better": True,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
