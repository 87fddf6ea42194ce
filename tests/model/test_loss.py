"""The loss rule: what a returned loss is a mean over is found out, not guessed."""

import itertools
import json
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import cross_entropy

from paceline.model.loss import IGNORE_INDEX, LabelSmoother, LossRule, Meaning


def make_batch(lengths: list[int], width: int = 6, classes: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and ragged targets: row i has `lengths[i]` targets, the rest is ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(lengths), width, classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, classes, (len(lengths), width), generator=generator)
    for row, length in enumerate(lengths):
        labels[row, length:] = IGNORE_INDEX
    return logits, labels


def loss_under(meaning: Meaning, logits: Tensor, labels: Tensor, num_items: int | None = None) -> Tensor:
    """A second, slow way to compute what `meaning` says."""
    rows = []
    numbers = []
    for row_logits, row_labels in zip(logits, labels, strict=True):
        if meaning.shifted:
            row_logits, row_labels = row_logits[:-1], row_labels[1:]
        kept = row_labels != meaning.ignore_index
        rows.append(cross_entropy(row_logits[kept], row_labels[kept], reduction="sum"))
        numbers.append(int(kept.sum()))
    if meaning.scaled:
        assert num_items is not None
        return torch.stack(rows).sum() / num_items
    if meaning.unit == "tokens":
        return torch.stack(rows).sum() / sum(numbers)
    means = [row / max(number, 1) for row, number in zip(rows, numbers, strict=True)]
    if meaning.unit == "samples":
        means = [mean for mean, number in zip(means, numbers, strict=True) if number]
    return torch.stack(means).mean()


MEANINGS = [
    Meaning("tokens"),
    Meaning("tokens", shifted=True),
    Meaning("samples"),
    Meaning("samples", shifted=True),
    Meaning("all_samples"),
    Meaning("all_samples", shifted=True),
    Meaning("tokens", scaled=True),
    Meaning("tokens", shifted=True, scaled=True),
    Meaning("tokens", ignore_index=0),
]


@pytest.mark.parametrize("truth", MEANINGS, ids=str)
def test_each_meaning_is_identified_from_one_ragged_batch(truth: Meaning) -> None:
    logits, labels = make_batch([3, 6, 0, 2])
    if truth.ignore_index == 0:
        labels = labels.clamp(min=0)
    num_items = 23 if truth.scaled else None
    rule = LossRule(["labels"])
    rule.look(loss_under(truth, logits, labels, num_items), logits, rule.count({"labels": labels}), num_items)
    assert rule.meaning == truth
    assert rule.is_settled


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_that_the_model_rounded_is_compared_as_rounded(dtype: torch.dtype) -> None:
    """What is looked at is what the model returned; the loss at hand has been widened since."""
    logits, labels = make_batch([3, 6, 2])
    truth = Meaning("tokens")
    rounded = loss_under(truth, logits, labels).to(dtype)
    rule = LossRule(["labels"])
    rule.look(rounded.float(), {"loss": rounded, "logits": logits.to(dtype)}, rule.count({"labels": labels}))
    assert rule.is_verified
    assert rule.meaning == truth


def test_a_tie_is_kept_until_a_batch_separates_it() -> None:
    rule = LossRule(["labels"])
    logits, labels = make_batch([6, 6])
    counts = rule.count({"labels": labels})
    rule.look(loss_under(Meaning("samples"), logits, labels), logits, counts)
    assert rule.meaning == Meaning("tokens")  # torch's own default while both hold
    assert not rule.is_settled
    assert rule.telling(counts) == 0  # the same again would tell nothing
    logits, labels = make_batch([2, 6, 0])
    counts = rule.count({"labels": labels})
    assert rule.telling(counts) > 0
    rule.look(loss_under(Meaning("samples"), logits, labels), logits, counts)
    assert rule.meaning == Meaning("samples")
    assert rule.is_settled


def test_whether_empty_samples_count_stays_open_until_there_is_one() -> None:
    for truth in (Meaning("samples"), Meaning("all_samples")):
        rule = LossRule(["labels"])
        for lengths in ([3, 6, 2], [4, 4], [2, 5, 0]):
            assert not rule.is_settled
            logits, labels = make_batch(lengths)
            rule.look(loss_under(truth, logits, labels), logits, rule.count({"labels": labels}))
            assert rule.meaning.unit in ("samples", "all_samples")
        assert rule.meaning == truth


def test_declared_samples_leave_open_only_whether_empty_ones_count() -> None:
    for truth in (Meaning("samples"), Meaning("all_samples")):
        rule = LossRule(["labels"], declared="samples")
        full, ragged = make_batch([6, 6]), make_batch([2, 5, 0])
        assert rule.count({"labels": ragged[1]}).weight == 2
        counts = rule.count({"labels": ragged[1]})
        assert rule.telling(counts) > rule.telling(rule.count({"labels": full[1]}))
        rule.look(loss_under(truth, *ragged), ragged[0], counts)
        assert rule.meaning == truth
    rule = LossRule(["labels"], declared="samples")
    rule.look(torch.tensor(123.0), ragged[0], counts)
    assert rule.meaning == Meaning("samples")
    assert rule.is_settled


@pytest.mark.parametrize("index", [0, 1, -1, 4])
@pytest.mark.parametrize("unit", ["tokens", "samples"])
def test_another_ignored_value_shows_when_it_comes(unit: str, index: int) -> None:
    """The first batches hold none; then some have it, one more than the other."""
    rule = LossRule(["labels"], pad_token_id=4)
    truth = Meaning(unit, ignore_index=index)
    for seed in range(2):
        logits, labels = make_batch([6, 6], seed=seed)
        labels = torch.where(labels == index, 2, labels).clamp(min=0)
        rule.look(loss_under(truth, logits, labels), logits, rule.count({"labels": labels}))
        assert rule.meaning.ignore_index == IGNORE_INDEX
        assert not rule.is_settled
    labels[0, :4] = labels[1, :1] = index
    counts = rule.count({"labels": labels})
    assert rule.telling(counts) > 0
    rule.look(loss_under(truth, logits, labels), logits, counts)
    assert rule.meaning == truth
    assert rule.is_settled or unit == "samples"  # then empty samples may count


def test_a_value_that_is_ignored_often_is_a_class_all_the_same() -> None:
    rule = LossRule(["labels"])
    for seed in range(3):
        logits, labels = make_batch([6, 5], seed=seed)
        labels[1, 5] = 2
        rule.look(loss_under(Meaning("tokens"), logits, labels), logits, rule.count({"labels": labels}))
        assert rule.meaning == Meaning("tokens")
    assert not rule.is_settled  # -1 was not there yet
    counts = rule.count({"labels": labels})
    assert rule.telling(counts) == 0 or len(rule.held) > 1
    logits, labels = make_batch([6, 5])
    rule.look(loss_under(Meaning("tokens"), logits, labels), logits, rule.count({"labels": labels}))
    assert rule.held == [Meaning("tokens")]
    assert rule.is_settled  # -100 was there, and ignored


def test_a_tie_of_ignored_values_that_rounding_hides_ends_some_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.model.loss.MAX_LOOKS", 3)
    rule = LossRule(["labels"])
    logits = torch.zeros(2, 6, 5, dtype=torch.float64)  # every target costs the same
    _, labels = make_batch([6, 6])
    labels[0, :2] = 0
    for _ in range(4):
        assert len({meaning.ignore_index for meaning in rule.held}) != 1
        rule.look(loss_under(Meaning("tokens"), logits, labels), logits, rule.count({"labels": labels}))
    assert {meaning.ignore_index for meaning in rule.held} == {IGNORE_INDEX}


def test_what_was_identified_can_be_taken_along() -> None:
    rule = LossRule(["labels"])
    logits, labels = make_batch([6, 6])
    rule.look(loss_under(Meaning("samples"), logits, labels), logits, rule.count({"labels": labels}))
    rule.assume_scaled(True)
    other = LossRule(["labels"])
    other.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    assert other.state_dict() == rule.state_dict()
    assert (other.held, other.meaning) == (rule.held, rule.meaning)
    for again in (rule, other):
        logits, labels = make_batch([2, 6])
        again.look(loss_under(Meaning("samples"), logits, labels), logits, again.count({"labels": labels}))
        assert again.meaning == Meaning("samples")
    assert rule.state_dict() == other.state_dict()


def test_what_is_declared_now_is_stronger_than_what_was_identified_then() -> None:
    then = LossRule(["labels"])
    then.settle(Meaning("samples"))
    now = LossRule(["labels"], declared="tokens")
    now.load_state_dict(then.state_dict())
    assert now.meaning == Meaning("tokens")


def damaged_states() -> list[dict[str, object]]:
    rule = LossRule(["labels"])
    rule.settle(Meaning("tokens"))
    state = rule.state_dict()
    meaning = state["held"][0]
    wrong_values = ("x", 10**30, 1.5, None, [], {})
    wrong = [{**meaning, name: value} for name in meaning for value in wrong_values]
    cases = [{**state, "held": [item]} for item in wrong]
    cases += [{**state, "assumed": item} for item in [*wrong, None, 3]]
    cases += [{**state, "is_settled": value} for value in (0, "true", None)]
    cases += [{name: value for name, value in state.items() if name != left_out} for left_out in state]
    return [*cases, {**state, "held": 3}, {**state, "held": None}, {**state, "declared": "tokens"}]


@pytest.mark.parametrize("state", damaged_states(), ids=str)
def test_a_damaged_state_is_refused_whole(state: dict[str, object]) -> None:
    rule = LossRule(["labels"])
    before = rule.state_dict()
    with pytest.raises((ValueError, TypeError, LookupError)):
        rule.load_state_dict(state)
    assert rule.state_dict() == before


def test_channel_first_logits_are_understood() -> None:
    logits, labels = make_batch([3, 6, 2])
    rule = LossRule(["labels"])
    rule.look(cross_entropy(logits.movedim(-1, 1), labels), logits.movedim(-1, 1), rule.count({"labels": labels}))
    assert rule.meaning == Meaning("tokens")


def test_an_unknown_loss_is_said_once_and_not_guessed_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    logits, labels = make_batch([3, 6, 2])
    rule = LossRule(["labels"])
    with caplog.at_level(logging.WARNING):
        rule.look(torch.tensor(123.0), logits, rule.count({"labels": labels}))
        rule.look(torch.tensor(123.0), logits, rule.count({"labels": labels}))
    assert len(caplog.records) == 1
    assert "loss_weight=" in caplog.text


FLOAT_LOSSES = {
    "squared error": functional.mse_loss,
    "binary cross-entropy": functional.binary_cross_entropy_with_logits,
    "absolute error": functional.l1_loss,
    "smooth absolute error": functional.smooth_l1_loss,
    "binary cross-entropy of probabilities": lambda y, x: functional.binary_cross_entropy(y.sigmoid(), x),
    "cross-entropy with probabilities": functional.cross_entropy,
}


def make_values(samples: int = 5, width: int = 3) -> tuple[Tensor, Tensor]:
    """Predictions and floating-point targets whose rows add up to one."""
    generator = torch.Generator().manual_seed(0)
    predictions = torch.randn(samples, width, generator=generator)
    return predictions, torch.rand(samples, width, generator=generator).softmax(-1)


@pytest.mark.parametrize("measure", FLOAT_LOSSES)
def test_the_usual_losses_of_floating_point_targets_are_known(measure: str, caplog: pytest.LogCaptureFixture) -> None:
    predictions, values = make_values()
    loss = FLOAT_LOSSES[measure](predictions, values)
    outputs = predictions.sigmoid() if measure.endswith("of probabilities") else predictions
    rule = LossRule(["labels"])
    counts = rule.count({"labels": values})
    with caplog.at_level(logging.INFO):
        rule.look(loss, {"loss": loss, "logits": outputs}, counts)
    assert rule.meaning == Meaning(measure=measure)
    assert rule.telling(counts) == 0
    assert rule.num_items([{"labels": values}]) is None
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert f"of the {measure} over targets that are not NaN" in caplog.text


@pytest.mark.parametrize("shapes", [((5, 1), (5,)), ((5,), (5, 1)), ((5,), (5,)), ((1, 1), (1,))])
def test_a_dimension_of_one_makes_no_difference_to_predictions(shapes: tuple[tuple[int, ...], ...]) -> None:
    predictions, values = make_values(shapes[0][0], 1)
    loss = functional.mse_loss(predictions, values * 3)
    rule = LossRule(["labels"])
    labels = (values * 3).reshape(shapes[1])
    rule.look(loss, (loss, predictions.reshape(shapes[0])), rule.count({"labels": labels}))
    assert rule.meaning == Meaning(measure="squared error")


@pytest.mark.parametrize("unit", ["tokens", "samples", "all_samples"])
def test_what_is_nan_among_the_targets_is_left_out(unit: str) -> None:
    predictions, values = make_values()
    rule = LossRule(["labels"])
    loss = functional.mse_loss(predictions, values)
    rule.look(loss, predictions, rule.count({"labels": values}))
    assert rule.meaning.unit == "tokens"  # while it makes no difference
    values[0, 0] = values[1] = values[2, 1:] = torch.nan
    errors = (predictions - values.nan_to_num()).square() * ~values.isnan()
    numbers = (~values.isnan()).sum(1)
    means = errors.sum(1) / numbers.clamp(min=1)
    wanted = {"tokens": errors.sum() / numbers.sum(), "samples": means[numbers > 0].mean(), "all_samples": means.mean()}
    counts = rule.count({"labels": values})
    assert rule.telling(counts) > 0
    rule.look(wanted[unit], predictions, counts)
    assert rule.meaning == Meaning(unit, measure="squared error")
    assert rule.is_settled
    assert rule.recount([counts]) == {"tokens": 9, "samples": 4, "all_samples": 5}[unit]


@pytest.mark.parametrize("outputs", [torch.ones(7, 3), torch.ones(7, 2), None])
def test_an_unknown_loss_of_floating_point_targets_weighs_samples_and_says_so(
    outputs: Tensor | None, caplog: pytest.LogCaptureFixture
) -> None:
    rule = LossRule(["labels"])
    counts = rule.count({"x": torch.ones(7, 2), "labels": torch.ones(7, 3)})
    for _ in range(2):
        rule.look(torch.tensor(0.1), outputs, counts)
        rule.begin()
    rule.look(torch.tensor(0.1), outputs, counts)
    assert rule.is_settled
    assert rule.recount([counts]) == counts.samples == 7
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "each sample is taken to weigh the same" in caplog.text
    assert "loss_weight=" in caplog.text


@pytest.mark.parametrize("declared", [None, "samples"])
def test_without_targets_samples_weigh_the_same_and_it_is_said(
    declared: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    rule = LossRule(["labels"], declared=declared)
    counts = rule.count({"idx": torch.ones(7, 2), "targets": torch.ones(7, 2)})
    assert rule.telling(counts) > 0
    rule.look(torch.tensor(0.1), None, counts)
    assert rule.is_settled
    assert (rule.meaning.unit, counts.weight) == ("samples", 7)
    assert ("label_names=[...]" in caplog.text) == (declared is None)


def test_a_non_finite_loss_tells_nothing() -> None:
    rule = LossRule(["labels"])
    logits, labels = make_batch([3, 6])
    rule.look(torch.tensor(float("nan")), logits, rule.count({"labels": labels}))
    assert not rule.is_settled


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=2, max_size=10).filter(lambda x: sum(n > 1 for n in x) > 0),
    cuts=st.lists(st.integers(1, 9), max_size=4),
    truth=st.sampled_from(MEANINGS[:6]),
)
def test_any_split_of_the_same_samples_adds_up_to_the_same_loss(
    lengths: list[int], cuts: list[int], truth: Meaning
) -> None:
    logits, labels = make_batch(lengths, seed=sum(lengths))
    whole = float(loss_under(truth, logits, labels))
    rule = LossRule(["labels"])
    rule.declare(truth)
    edges = sorted({0, len(lengths), *(cut for cut in cuts if cut < len(lengths))})
    parts = [(logits[start:end], labels[start:end]) for start, end in itertools.pairwise(edges)]
    counts = [rule.count({"labels": part_labels}) for _, part_labels in parts]
    total = sum(item.weight for item in counts)
    contributions = [
        float(loss_under(truth, *part)) * rule.factor(item, total, None)
        for part, item in zip(parts, counts, strict=True)
        if item.weight
    ]
    assert sum(contributions) == pytest.approx(whole, rel=1e-12)


def test_targets_that_were_shifted_already_are_counted_where_they_stand() -> None:
    labels = torch.tensor([[5, 6, 7, 8], [5, 6, IGNORE_INDEX, IGNORE_INDEX]])
    ahead = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    rule = LossRule(["labels"])
    rule.declare(Meaning("tokens", shifted=True))
    counts = rule.count({"labels": labels, "shift_labels": ahead})
    assert counts.weight == rule.count({"labels": labels}).weight == 4
    assert rule.recount([counts]) == 4
    assert rule.num_items([{"labels": labels, "shift_labels": ahead}]) == 4


@pytest.mark.parametrize("shifted", [False, True])
def test_label_smoothing_is_torchs(shifted: bool) -> None:
    logits, labels = make_batch([3, 6, 2])
    smoothed = LabelSmoother(0.1)({"logits": logits}, labels, shift_labels=shifted)
    left, right = (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)
    assert float(smoothed) == pytest.approx(
        float(cross_entropy(left.reshape(-1, 5), right.reshape(-1), label_smoothing=0.1)), rel=1e-12
    )


def test_label_smoothing_without_logits_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1"):
        LabelSmoother(0.1)({"hidden": torch.ones(2, 3)}, torch.ones(4, dtype=torch.long))
