import math

import pytest
import torch
from torch import nn

from paceline.pytorch.optim.adamw_of_v4 import AdamW


@pytest.mark.parametrize("correct_bias", [True, False])
def test_steps_by_hand(correct_bias: bool) -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = AdamW([weight], lr=0.1, weight_decay=0.5, correct_bias=correct_bias)
    expected, first, second = [1.0, -2.0], [0.0, 0.0], [0.0, 0.0]
    for step in range(1, 4):
        gradients = [step * 0.3, -0.1]
        weight.grad = torch.tensor(gradients, dtype=torch.float64)
        optimizer.step()
        for place, gradient in enumerate(gradients):
            first[place] = 0.9 * first[place] + 0.1 * gradient
            second[place] = 0.999 * second[place] + 0.001 * gradient**2
            rate = 0.1 * (math.sqrt(1 - 0.999**step) / (1 - 0.9**step) if correct_bias else 1.0)
            expected[place] -= rate * first[place] / (math.sqrt(second[place]) + 1e-6)
            expected[place] -= 0.1 * 0.5 * expected[place]
        assert weight.tolist() == pytest.approx(expected, rel=1e-12)


def test_wrong_numbers_are_refused() -> None:
    for options in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1e-6}):
        with pytest.raises(ValueError, match="expected lr and eps"):
            AdamW([nn.Parameter(torch.zeros(1))], **options)  # type: ignore[arg-type]
