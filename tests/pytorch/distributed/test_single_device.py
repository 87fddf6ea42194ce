"""The strategy of one process: clipping and clearing gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.pytorch.distributed.precision import make_precision
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.distributed.world import World

CPU = torch.device("cpu")


def mixed() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].double()
    return model


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


MODELS = {"plain": plain, "mixed": mixed, "sparse": sparse}


def prepared(model: nn.Module) -> SingleDevice:
    strategy = SingleDevice(World(device=CPU), make_precision("full", CPU))
    strategy.prepare(model, lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
    return strategy


def give_gradients(model: nn.Module, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            grad = scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.grad = grad.to_sparse(1) if getattr(module, "sparse", False) else grad


def dense(model: nn.Module) -> list[Tensor]:
    return [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("make", [plain, mixed])
@pytest.mark.parametrize("max_norm", [1.0, 0.1, 1e6])
@pytest.mark.parametrize("scale", [1.0, 1e30, float("nan"), float("inf")])
def test_clipping_is_that_of_torch_bit_for_bit(make: Callable[[], nn.Module], max_norm: float, scale: float):
    ours, theirs = make(), make()
    strategy = prepared(ours)
    for _ in range(2):  # what was found out about the gradients is remembered
        give_gradients(ours, scale)
        give_gradients(theirs, scale)
        norm = strategy.clip(max_norm)
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        torch.testing.assert_close(norm, expected, rtol=0, atol=0, equal_nan=True)
        for one, other in zip(dense(ours), dense(theirs), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("make", [plain, mixed, sparse])
@pytest.mark.parametrize("scale", [1.0, float("nan"), float("inf")])
def test_a_norm_alone_leaves_the_gradients_as_they_are(make: Callable[[], nn.Module], scale: float):
    ours, theirs = make(), make()
    strategy = prepared(ours)
    give_gradients(ours, scale)
    give_gradients(theirs, scale)
    norm = strategy.clip(float("inf"))
    expected = torch.linalg.vector_norm(torch.cat([each.double().flatten() for each in dense(theirs)]))
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0, equal_nan=True)
    for one, other in zip(dense(ours), dense(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_parameter_that_joins_later_is_looked_at():
    model = mixed()
    strategy = prepared(model)
    give_gradients(model)
    for parameter in model[1].parameters():
        parameter.grad = None
    first = strategy.clip(1e6)
    give_gradients(model)
    both = strategy.clip(1e6)
    assert both > first


def test_sparse_gradients_are_refused_as_torch_refuses_them_or_clipped():
    model = sparse()
    strategy = prepared(model)
    give_gradients(model)
    reference = sparse()
    give_gradients(reference)
    try:
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    except (RuntimeError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            strategy.clip(1.0)
    else:
        torch.testing.assert_close(strategy.clip(1.0), expected)


def test_no_gradients_have_the_norm_zero():
    assert prepared(plain()).clip(1.0) == 0


def test_clearing_reaches_parameters_that_the_optimizer_does_not_hold():
    model = plain()
    strategy = SingleDevice(World(device=CPU), make_precision("full", CPU))
    strategy.prepare(model, lambda module: torch.optim.SGD(module[0].parameters(), lr=0.1))
    give_gradients(model)
    strategy.clear_gradients()
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4
