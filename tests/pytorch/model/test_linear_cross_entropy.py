"""The chunked cross-entropy against torch's own over all logits: value and gradients."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from paceline.pytorch.model.linear_cross_entropy import CrossEntropy, check_classes, linear_cross_entropy
from paceline.pytorch.model.linear_head import Cast, Head, Scale, Shift, Squash

ROWS, FEATURES, CLASSES = 13, 6, 17
SOFTCAP = (Scale(1 / 3.0), Squash(), Scale(3.0))
STEPS = {"none": (), "scaled": (Scale(0.25),), "soft-capped": SOFTCAP, "cast": (Cast(torch.float32), Scale(2.0))}


def make_tensors(
    dtype: torch.dtype = torch.float64, with_bias: bool = True
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(0)
    rows = torch.randn(ROWS, FEATURES, dtype=dtype, requires_grad=True)
    weight = torch.randn(CLASSES, FEATURES, dtype=dtype, requires_grad=True)
    bias = torch.randn(CLASSES, dtype=dtype, requires_grad=True) if with_bias else None
    targets = torch.randint(0, CLASSES, (ROWS,))
    targets[::3] = -100
    return rows, weight, bias, targets


def both_ways(
    head_steps: tuple, loss: CrossEntropy, dtype: torch.dtype = torch.float64, with_bias: bool = True
) -> list[list[Tensor]]:
    """The loss and the gradients of a weighted sum, in the plain way and by chunks."""
    found = []
    for chunked in (False, True):
        rows, weight, bias, targets = make_tensors(dtype, with_bias)
        head = Head(weight, bias, None, head_steps)
        value = linear_cross_entropy(rows, targets, head, loss, 4) if chunked else loss(head.logits(rows), targets)
        leaves = [each for each in (rows, weight, bias) if each is not None]
        slopes = torch.autograd.grad((value * torch.arange(1.0, 1.0 + value.numel()).view(value.shape)).sum(), leaves)
        found.append([value.detach(), *slopes])
    return found


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_that_of_the_logits(reduction: str, smoothing: float, steps: tuple, weighted: bool) -> None:
    weight = torch.rand(CLASSES, dtype=torch.float64) if weighted else None
    loss = CrossEntropy(-100, reduction, smoothing, weight)
    plain, chunked = both_ways(tuple(step for step in steps if not isinstance(step, Cast)), loss)
    for one, other in zip(plain, chunked, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_single_precision_is_within_rounding(steps: tuple, with_bias: bool) -> None:
    plain, chunked = both_ways(steps, CrossEntropy(), torch.float32, with_bias)
    for one, other in zip(plain, chunked, strict=True):
        assert (one - other).norm() <= 1e-6 * one.norm()


def test_a_constant_for_each_class_is_added() -> None:
    offset = torch.randn(CLASSES, dtype=torch.float64)
    offset[3] = -torch.inf  # a class that is never chosen
    rows, weight, _, targets = make_tensors()
    targets[targets == 3] = 4
    head = Head(weight, None, None, (Shift(offset),))
    plain = functional.cross_entropy(functional.linear(rows, weight) + offset, targets)
    torch.testing.assert_close(linear_cross_entropy(rows, targets, head, CrossEntropy(), 4), plain)


def test_16_bits_are_computed_in_single_precision() -> None:
    (plain, *slopes), (chunked, *chunked_slopes) = both_ways((), CrossEntropy(), torch.bfloat16)
    assert chunked.dtype == torch.float32
    assert (plain - chunked).abs() <= 1e-2 * plain.abs()
    for one, other in zip(slopes, chunked_slopes, strict=True):
        assert other.dtype == one.dtype
        assert (one - other).float().norm() <= 3e-2 * one.float().norm()


@pytest.mark.slow
def test_small_gradients_in_float16_are_kept_for_the_scale_of_the_loss() -> None:
    """A mean over many rows and classes: probabilities by rows are less than float16 can hold, before the scale."""
    torch.manual_seed(0)
    scale, values = 2.0**16, (torch.randn(1024, 4), torch.randn(32_000, 4) * 0.2)
    targets = torch.randint(0, 32_000, (1024,))
    for half_rows in (False, True):
        found = []
        for autocast in (None, torch.float16):
            rows, weight = (each.clone().requires_grad_() for each in values)
            inputs = rows.half() if half_rows and autocast else rows
            value = linear_cross_entropy(inputs, targets, Head(weight, None, autocast), CrossEntropy())
            found.append([each / scale for each in torch.autograd.grad(value * scale, [rows, weight])])
        for single, half in zip(*found, strict=True):
            assert (single - half).norm() <= 2e-3 * single.norm()


def test_what_needs_no_gradient_gets_none() -> None:
    for frozen in itertools.product((False, True), repeat=3):
        rows, weight, bias, targets = make_tensors()
        assert bias is not None
        leaves = [rows, weight, bias]
        for each, is_frozen in zip(leaves, frozen, strict=True):
            each.requires_grad_(not is_frozen)
        value = linear_cross_entropy(rows, targets, Head(weight, bias), CrossEntropy(), 4)
        assert value.requires_grad == (not all(frozen))
        if value.requires_grad:
            value.backward()
        assert [each.grad is None for each in leaves] == list(frozen)


def test_a_retained_graph_gives_the_same_gradient_again() -> None:
    rows, weight, bias, targets = make_tensors()
    value = linear_cross_entropy(rows, targets, Head(weight, bias), CrossEntropy(), 4)
    first = torch.autograd.grad(value * 3, [rows, weight], retain_graph=True)
    second = torch.autograd.grad(value * 3, [rows, weight])
    torch.testing.assert_close(first, second)


def test_a_batch_whose_targets_are_all_ignored_is_as_torch_has_it() -> None:
    for reduction in ("mean", "sum"):
        rows, weight, bias, targets = make_tensors()
        targets.fill_(-100)
        loss = CrossEntropy(reduction=reduction)
        value = linear_cross_entropy(rows, targets, Head(weight, bias), loss, 4)
        plain = loss(functional.linear(rows, weight, bias), targets)
        torch.testing.assert_close(value, plain, equal_nan=True)
        slopes = [torch.autograd.grad(each, [rows, weight]) for each in (value, plain)]
        torch.testing.assert_close(*slopes, equal_nan=True)


def test_a_target_that_is_no_class_is_an_error() -> None:
    rows, weight, bias, targets = make_tensors()
    targets[1] = CLASSES
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(rows, targets, Head(weight, bias), CrossEntropy(), 4)


def test_weights_that_change_between_the_passes_are_an_error_where_they_are_needed() -> None:
    rows, weight, bias, targets = make_tensors()
    value = linear_cross_entropy(rows, targets, Head(weight, bias), CrossEntropy(reduction="none"), 4)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()


def test_a_target_in_no_shard_is_an_error() -> None:
    check_classes(torch.tensor([0, 4, -100]), 5, -100)
    for wrong in (5, -1):
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            check_classes(torch.tensor([0, wrong]), 5, -100)
