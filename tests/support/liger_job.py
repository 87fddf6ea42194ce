"""Losses by Liger's kernel in Triton's interpreter, on the CPU, beside those of the logits.

    TRITON_INTERPRET=1 python liger_job.py FOLDER

Prints a JSON object: relative errors by case, errors that were raised, and the logs of training runs.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import liger_kernel.ops.cross_entropy as liger
import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional
from triton.runtime import interpreter

from paceline import Trainer, TrainingArguments
from paceline.pytorch.model import linear_kernels
from paceline.pytorch.model.linear_cross_entropy import CrossEntropy, linear_cross_entropy
from paceline.pytorch.model.linear_head import Cast, Head, Scale, Squash
from paceline.pytorch.model.linear_loss import LinearLoss

ROWS, FEATURES, CLASSES, LENGTH = 13, 6, 17, 6
SOFT_CAP = (Scale(1 / 3.0), Cast(torch.float32), Squash(), Scale(3.0))


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """Stands for the function of CUDA's library, which the interpreter lacks."""
    return 2 * tl.sigmoid(2 * x) - 1


def as_compiled(convert: Any) -> Any:
    """Returns the conversion of arguments of the interpreter, with numbers in single precision, as in compiled kernels.

    It leaves a float as Python's, on which Liger's kernel calls methods of Triton's.
    """

    def converted(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)

    return converted


def error_of(found: list[Tensor], plain: list[Tensor]) -> float:
    """Returns the largest norm of a difference, in norms of the plain numbers."""
    pairs = zip(found, plain, strict=True)
    return max(float((one - other).float().norm() / other.float().norm().clamp(min=1e-9)) for one, other in pairs)


def make_leaves(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"rows": (ROWS, FEATURES), "weight": (CLASSES, FEATURES), "bias": (CLASSES,)}
    return {name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def make_targets(ignored: int) -> Tensor:
    targets = torch.randint(0, CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1))
    targets[[0, 3, 4, 9]] = ignored
    return targets


def compare(
    loss: CrossEntropy,
    steps: tuple[Any, ...] = (),
    frozen: tuple[str, ...] = (),
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
) -> float:
    """Returns the error of a loss by the kernel and of its gradients, in two backward passes of one graph."""
    found = []
    for kernel in (None, linear_kernels.LigerKernel()):
        leaves = make_leaves(dtype)
        named = {name: each for name, each in leaves.items() if name not in frozen and (bias or name != "bias")}
        for each in named.values():
            each.requires_grad_()
        head = Head(leaves["weight"], leaves["bias"] if bias else None, autocast, steps)
        targets = make_targets(loss.ignore_index)
        if kernel is None:
            value = loss(head.logits(leaves["rows"]).float(), targets)
        else:
            kernel.check(leaves["rows"], head, loss)
            value = linear_cross_entropy(leaves["rows"], targets, head, loss, kernel=kernel)
        total = (value * torch.arange(1.0, 1.0 + value.numel()).view(value.shape)).sum() * 3
        slopes = [torch.autograd.grad(total, list(named.values()), retain_graph=True) for _ in range(2)]
        found.append([value.detach(), *slopes[0], *slopes[1]])
    return error_of(found[1], found[0])


def single_precision() -> dict[str, float]:
    """Returns the errors in single precision, by case."""
    found = {}
    cases = itertools.product(("mean", "sum", "none"), (0.0, 0.1), ((), SOFT_CAP), (False, True), (False, True))
    for reduction, smoothing, steps, bias, is_weighted in cases:
        loss = CrossEntropy(-100, reduction, smoothing, torch.linspace(0.5, 2, CLASSES) if is_weighted else None)
        kind = f"{'soft-capped, ' if steps else ''}{'bias, ' if bias else ''}{'class weights, ' if is_weighted else ''}"
        found[f"{kind}smoothing={smoothing}, {reduction}"] = compare(loss, steps, bias=bias)
    for reduction, ignored in itertools.product(("mean", "none"), (-100, 5)):
        loss = CrossEntropy(ignored, reduction)
        found[f"ignored {ignored}, frozen rows, {reduction}"] = compare(loss, frozen=("rows",))
        found[f"ignored {ignored}, frozen weight, {reduction}"] = compare(loss, frozen=("weight",))
        found[f"ignored {ignored}, bias alone, {reduction}"] = compare(loss, frozen=("rows", "weight"))
    found["second derivative"] = second_derivative()
    return found


def second_derivative() -> float:
    found = []
    for kernel in (None, linear_kernels.LigerKernel()):
        leaves, loss = make_leaves(torch.float32), CrossEntropy()
        head, targets = Head(leaves["weight"].requires_grad_(), None), make_targets(-100)
        rows = leaves["rows"].requires_grad_()
        by_kernel = linear_cross_entropy(rows, targets, head, loss, kernel=kernel)
        value = loss(head.logits(rows), targets) if kernel is None else by_kernel
        (slope,) = torch.autograd.grad(value, rows, create_graph=True)
        found.append(list(torch.autograd.grad(slope.square().sum(), [rows, head.weight])))
    return error_of(found[1], found[0])


def half_precision() -> dict[str, float]:
    """Returns the errors in 16 bits, by case."""
    loss = CrossEntropy()
    return {
        "bfloat16": compare(loss, dtype=torch.bfloat16),
        "autocast to bfloat16": compare(loss, autocast=torch.bfloat16),
        "autocast to float16": compare(loss, autocast=torch.float16),
    }


class LanguageModel(nn.Module):
    """A causal model with the forward of those of transformers.

    Args:
        tied: the head has the weights of the embedding, and no bias.
        cap: soft-cap of the logits; 0: none.
        scale: factor of the logits.
    """

    def __init__(self, tied: bool = False, cap: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, FEATURES)
        self.body = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight
        self.cap, self.scale = cap, scale

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.body(self.embedding(input_ids)))).float()
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        if self.scale != 1:
            logits = logits * self.scale
        if labels is None:
            return {"logits": logits}
        shifted = logits[..., :-1, :].contiguous().view(-1, CLASSES)
        return {"loss": functional.cross_entropy(shifted, labels[..., 1:].reshape(-1)), "logits": logits}


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, CLASSES, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index % 4] = -100
        return {"input_ids": ids, "labels": labels}


def train(folder: Path, model: nn.Module, option: bool | str, **options: Any) -> tuple[Trainer, list[dict[str, Any]]]:
    """Returns the Trainer after four optimizer steps and an evaluation, and its losses and norms."""
    named: dict[str, Any] = {
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "max_steps": 4,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1,
        "per_device_eval_batch_size": 3, "optim": "sgd", "learning_rate": 0.1, **options,
    }  # fmt: skip
    args = TrainingArguments(output_dir=str(folder), linear_cross_entropy=option, **named)
    trainer = Trainer(model, args, train_dataset=Texts(), eval_dataset=Texts())
    trainer.train()
    rows = [{name: row[name] for name in ("loss", "grad_norm")} for row in trainer.state.log_history if "loss" in row]
    return trainer, [*rows, {"loss": trainer.evaluate()["eval_loss"]}]


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "untied, with a bias": ({}, {}),
    "tied": ({"tied": True}, {}),
    "soft-capped": ({"cap": 3.0}, {}),
    "smoothed": ({"tied": True}, {"label_smoothing_factor": 0.1}),
    "clipped": ({"tied": True}, {"max_grad_norm": 0.1}),
}


def runs(folder: Path) -> dict[str, Any]:
    """Returns the logs of each run with and without the kernel, its calls, and the difference of the last weights."""
    found = {}
    for name, (model, options) in RUNS.items():
        num_calls = [0]
        compute = linear_kernels.LigerKernel.__call__

        def counted(*values: Any, counts: list[int] = num_calls, compute: Any = compute) -> Any:
            counts[0] += 1
            return compute(*values)

        plain, plain_rows = train(folder, LanguageModel(**model), False, **options)
        linear_kernels.LigerKernel.__call__ = counted  # type: ignore[method-assign]
        other, rows = train(folder, LanguageModel(**model), "liger", **options)
        linear_kernels.LigerKernel.__call__ = compute  # type: ignore[method-assign]
        error = error_of([p.detach() for p in other.model.parameters()], [p.detach() for p in plain.model.parameters()])
        found[name] = {"plain": plain_rows, "liger": rows, "calls": num_calls[0], "weights": error}
    return found


def raised(function: Any, *values: Any, **options: Any) -> str:
    """Returns the error of a call, as text."""
    try:
        function(*values, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def one_loss(model: LanguageModel, **batch: Tensor) -> None:
    with LinearLoss("liger").applied(model):
        model(**batch)


def errors(folder: Path) -> dict[str, str]:
    """Returns the error of each case that is refused."""
    ids = Texts()[0]["input_ids"][None]
    kernel, loss = linear_kernels.LigerKernel(), CrossEntropy()
    leaves, beyond = make_leaves(torch.float32), make_targets(-100)
    beyond[1] = CLASSES
    head = Head(leaves["weight"], None)
    found = {
        "scaled": raised(one_loss, LanguageModel(scale=0.5), input_ids=ids, labels=ids),
        "scaled, in a run": raised(train, folder, LanguageModel(scale=0.5), "liger"),
        "no class": raised(linear_cross_entropy, leaves["rows"], beyond, head, loss, kernel=kernel),
        "double precision": raised(one_loss, LanguageModel().double(), input_ids=ids, labels=ids),
    }
    compute = linear_kernels.LigerKernel.__call__

    def wrong(self: Any, *values: Any) -> Any:  # sums the gradients of the weight as a kernel with an error would
        losses, (of_rows, of_weight, of_bias) = compute(self, *values)
        return losses, [of_rows, None if of_weight is None else 1.01 * of_weight, of_bias]

    linear_kernels.LigerKernel.__call__ = wrong  # type: ignore[method-assign]
    found["a wrong gradient"] = raised(one_loss, LanguageModel(), input_ids=ids, labels=ids)
    linear_kernels.LigerKernel.__call__ = compute  # type: ignore[method-assign]
    return found


def restored() -> list[bool | None]:
    """Returns the results of checks of the kernel, after a checkpoint gave those of other chunks."""
    ids = Texts()[0]["input_ids"][None]
    found: list[bool | None] = []
    for earlier in (True, False):
        part, model = LinearLoss("liger", SimpleNamespace(by_chunks=earlier)), LanguageModel()
        for _ in range(2):
            with part.applied(model):
                model(input_ids=ids, labels=ids)
            found.append(part.is_right)
    return found


def main(folder: Path) -> None:
    liger.tanh, interpreter._implicit_cvt = tanh, as_compiled(interpreter._implicit_cvt)
    found = {"single": single_precision(), "half": half_precision(), "runs": runs(folder)}
    print(json.dumps({**found, "errors": errors(folder), "restored": restored()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
