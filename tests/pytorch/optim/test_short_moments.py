"""Stochastic rounding to bfloat16: exact in the mean, seeded, and without an effect on what bfloat16 represents."""

import pytest
import torch

from paceline.pytorch.optim import short_moments
from paceline.pytorch.optim.short_moments import ShortMoments, round_stochastically


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_mean_is_exact() -> None:
    for value in (1.001, -3.3e-7, 1e30, -0.7):
        rounded = round_stochastically(torch.full((200_000,), value), generator())
        assert set(rounded.unique().tolist()) == {float(x) for x in neighbours(value)}
        assert float(rounded.double().mean()) == pytest.approx(value, rel=1e-4)


def neighbours(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    lower = (torch.tensor(value).view(torch.int32) & -(1 << 16)).view(torch.float32)
    upper = (lower.view(torch.int32) + (1 << 16)).view(torch.float32)
    return lower, upper


def test_numbers_of_bfloat16_and_special_ones_stay() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-130, torch.inf, -torch.inf])
    assert torch.equal(round_stochastically(exact, generator()).float(), exact)
    patterns = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32)  # NaN with all kinds of payloads
    assert round_stochastically(patterns.view(torch.float32), generator()).isnan().all()


def test_layouts_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(4, 3, 5, 5)
    monkeypatch.setattr(short_moments, "CHUNK", 7)
    for given in (values, values.to(memory_format=torch.channels_last), values[:0], torch.tensor(0.3)):
        rounded = round_stochastically(given, generator())
        assert rounded.shape == given.shape
        torch.testing.assert_close(rounded.float(), given, rtol=2**-7, atol=0)


def test_a_second_moment_keeps_moving() -> None:
    """Rounded to nearest, it would stay at its first value for ever."""
    parameter = torch.zeros(1000)
    moments, entry = ShortMoments(0), {"exp_avg_sq": torch.full((1000,), 1.0)}
    nearest = torch.ones(1000, dtype=torch.bfloat16)
    for _ in range(1000):
        moments.expand(entry)
        entry["exp_avg_sq"] = entry["exp_avg_sq"] * 0.999
        moments.shorten(entry, parameter, 0)
        nearest = (nearest.float() * 0.999).bfloat16()
    assert float(entry["exp_avg_sq"].float().mean()) == pytest.approx(0.999**1000, rel=0.02)
    assert float(nearest.float().mean()) == 1.0


def test_noise_differs_by_parameter_and_step_and_repeats() -> None:
    def rounded(seed: int, place: int, rounds: int) -> torch.Tensor:
        entry = {"exp_avg": torch.full((4096,), 1.003), "rounds": rounds}
        ShortMoments(seed).shorten(entry, torch.zeros(4096), place)
        assert entry["rounds"] == rounds + 1
        found: torch.Tensor = entry["exp_avg"]
        return found

    assert torch.equal(rounded(0, 0, 0), rounded(0, 0, 0))
    for other in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert not torch.equal(rounded(0, 0, 0), rounded(*other))


def test_projected_moments_are_rounded_and_quantized_ones_refused() -> None:
    """GaLore's moments have the shape of a projection; those of torchao are subclasses of tensors."""

    class Quantized(torch.Tensor):
        pass

    entry = {"exp_avg": torch.ones(2, 8), "row": torch.ones(8)}
    ShortMoments(0).shorten(entry, torch.zeros(8, 8), 0)
    assert [value.dtype for value in entry.values()] == [torch.bfloat16, torch.float32, torch.float64]
    with pytest.raises(ValueError, match=r"'exp_avg' is not known as a moment.*not quantized"):
        ShortMoments(0).shorten({"exp_avg": torch.ones(8, 8).as_subclass(Quantized)}, torch.zeros(8, 8), 0)
