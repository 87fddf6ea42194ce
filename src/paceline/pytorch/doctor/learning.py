"""Checks that the model learns: one batch, the learning rate, accumulation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
from torch import nn

from paceline.pytorch.doctor.findings import ERROR, WARNING, Case, Finding

STEPS = 60
RATES = (1e-3, 1e-2)
FALL = 0.9  # the loss of one batch must fall below this share of its first value
HIGH, LOW = 0.5, 1e-4  # change of the weights: in one step, and in the whole run
CLOSE = 1e-3  # relative difference of two gradients


def calm(model: nn.Module) -> nn.Module:
    """Turns dropout off."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def find_no_learning(case: Case) -> Iterator[Finding]:
    """A loss of one batch that does not fall."""
    end, best, first = time.perf_counter() + case.seconds / 2, math.inf, math.inf
    for rate in RATES:
        model = calm(case.copy_model())
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            return
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
        for number in range(STEPS):
            loss = case.compute_loss(model, dict(case.batch))[0]
            value = float(loss.detach())
            first = value if number == 0 else first
            best = min(best, value)
            if best < FALL * abs(first) or time.perf_counter() > end:
                break
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        if best < FALL * first or first <= 1e-3 or time.perf_counter() > end:
            return
    yield Finding(
        ERROR,
        f"one batch cannot be learnt: its loss goes from {first:.4g} to {best:.4g} in {STEPS} steps",
        "Check that the loss depends on all of the model, and that labels belong to their inputs.",
    )


def find_bad_rate(case: Case) -> Iterator[Finding]:
    """A learning rate that changes the weights by far too much or too little."""
    model = calm(case.copy_model())
    optimizer = case.make_optimizer(model)
    weights = [each for each in model.parameters() if each.requires_grad and each.dim() > 1 and bool(each.any())]
    before = [weight.detach().clone() for weight in weights]
    losses = []
    for _ in range(3):
        loss = case.compute_loss(model, dict(case.batch))[0]
        losses.append(float(loss.detach()))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if len(losses) == 1:
            moves = [
                float((now.detach() - then).norm() / then.norm()) for now, then in zip(weights, before, strict=True)
            ]
    if not weights:
        return
    move = sorted(moves)[len(moves) // 2]
    rate = max(float(group["lr"] or 0) for group in optimizer.param_groups)
    if not all(map(math.isfinite, losses)) or (move > HIGH and losses[-1] > losses[0]):
        seen = f"learning rate {rate:g}: one step changes the weights by {move:.0%}, the loss goes from "
        yield Finding(ERROR, f"{seen}{losses[0]:.3g} to {losses[-1]:.3g}", "Lower it: trainer.find_lr() suggests one.")
    elif move * case.max_steps < LOW:
        seen = f"learning rate {rate:g}: all {case.max_steps:,} steps change the weights by less than {LOW:.2%}"
        yield Finding(WARNING, seen, "Raise it: trainer.find_lr() suggests one.")


def find_wrong_accumulation(case: Case) -> Iterator[Finding]:
    """An accumulated gradient that is not the gradient of the same samples in one micro-batch."""
    if case.gradient_of is None or case.accumulation == 1:
        return
    number = min(case.accumulation, case.micro_batch_size)
    size = case.micro_batch_size // number
    if number < 2:
        return
    whole = case.gradient_of(size * number, 1)
    if not torch.allclose(whole, case.gradient_of(size * number, 1), rtol=CLOSE):
        return  # the loss is random
    split = case.gradient_of(size, number)
    off = float((split - whole).norm() / whole.norm().clamp(min=1e-12))
    if off > 10 * CLOSE:
        yield Finding(
            ERROR,
            f"the gradient of {number} micro-batches differs by {off:.1%} from that of one of {size * number} samples",
            "Let compute_loss return a mean and call super().training_step, or set loss_weight.",
        )
