"""The demonstration's model: causal, its loss the mean over targets, generation repeatable."""

import math

import pytest
import torch

from paceline.cli.demo.language_model import LanguageModel, Shape, generate

SHAPE = Shape(vocabulary=20, context=8, width=16, layers=2, heads=2)


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(SHAPE)


def test_the_first_loss_is_that_of_guessing(model: LanguageModel):
    ids = torch.randint(0, 20, (4, 8))
    assert float(model(ids, ids.roll(1))["loss"].detach()) == pytest.approx(math.log(20), rel=0.05)


def test_no_token_sees_a_later_one(model: LanguageModel):
    ids = torch.randint(0, 20, (1, 8))
    changed = ids.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 20
    before, after = model(ids)["logits"], model(changed)["logits"]
    torch.testing.assert_close(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5], after[0, 5])


def test_the_loss_is_the_mean_over_targets_that_are_not_ignored(model: LanguageModel):
    ids = torch.randint(0, 20, (2, 8))
    labels = ids.clone()
    labels[0, :4] = -100
    output = model(ids, labels)
    expected = torch.nn.functional.cross_entropy(output["logits"].flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(output["loss"], expected)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="heads=3"):
        LanguageModel(Shape(vocabulary=20, context=8, width=16, layers=1, heads=3))


def test_generation_is_repeatable_goes_beyond_the_context_and_leaves_the_random_numbers_alone(model: LanguageModel):
    model.train()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = generate(model, [1, 2], 12, seed=3)
    assert first == generate(model, [1, 2], 12, seed=3)
    assert first != generate(model, [1, 2], 12, seed=4)
    assert len(first) == 12
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_without_temperature_the_likeliest_token_is_taken(model: LanguageModel):
    (token,) = generate(model, [7], 1, temperature=0)
    assert token == int(model(torch.tensor([[7]]))["logits"][0, -1].argmax())
