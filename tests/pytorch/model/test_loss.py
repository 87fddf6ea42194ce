"""The loss rule: what a returned loss is a mean over is seen, not guessed."""

import itertools
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.pytorch.model.loss import IGNORE_INDEX, LabelSmoother, LossNormalizer, LossReduction
from paceline.pytorch.model.reductions import MAIN, Observation, Split, make_candidates
from paceline.pytorch.probes.loss import LossProbe, Part, choose_parts, cuttable, leaving_no_trace

Loss = Callable[[Any, Any], Tensor]


def make_batch(lengths: list[int], width: int = 6, classes: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and ragged targets: row i has `lengths[i]` targets, the rest is ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(lengths), width, classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, classes, (len(lengths), width), generator=generator)
    for row, length in enumerate(lengths):
        labels[row, length:] = IGNORE_INDEX
    return logits, labels


def batch_of(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    logits, labels = make_batch(lengths, seed=seed)
    return {"logits": logits, "labels": labels}


def loss_under(reduction: LossReduction, logits: Tensor, labels: Tensor) -> Tensor:
    """A second, slow way to compute what a reduction says."""
    rows, numbers = [], []
    for row_logits, row_labels in zip(logits, labels, strict=True):
        if reduction.shifted:
            row_logits, row_labels = row_logits[:-1], row_labels[1:]
        kept = row_labels != reduction.ignore_index
        rows.append(cross_entropy(row_logits[kept], row_labels[kept], reduction="sum"))
        numbers.append(int(kept.sum()))
    if reduction.unit == "sum":
        return torch.stack(rows).sum()
    if reduction.unit == "tokens":
        return torch.stack(rows).sum() / sum(numbers)
    means = [row / max(number, 1) for row, number in zip(rows, numbers, strict=True)]
    if reduction.unit == "samples":
        means = [mean for mean, number in zip(means, numbers, strict=True) if number]
    return torch.stack(means).mean()


def look(normalizer: LossNormalizer, loss_of: Loss, batches: list[Any], num_items: Any = None, **options: Any) -> None:
    """One look at these micro-batches, as the engine makes it."""
    counts = [normalizer.count(batch) for batch in batches]
    parts = [Part(batch, item) for batch, item in zip(batches, counts, strict=True)]
    normalizer.num_updates += 1
    options = {"copies": len(batches), **options}
    normalizer.learn(LossProbe(nn.Linear(1, 1), loss_of, **options).look(normalizer, parts, num_items), counts)


def by(reduction: LossReduction) -> Loss:
    return lambda batch, num_items: loss_under(reduction, batch["logits"], batch["labels"])


REDUCTIONS = [*MAIN, LossReduction("tokens", ignore_index=0), LossReduction("samples", ignore_index=4)]


@pytest.mark.parametrize("truth", REDUCTIONS, ids=str)
def test_each_reduction_is_seen(truth: LossReduction, caplog: pytest.LogCaptureFixture) -> None:
    batches = [batch_of([3, 6, 1, 2, 5], seed=1), batch_of([1, 0, 4, 6], seed=2), batch_of([2, 6, 3], seed=3)]
    if truth.ignore_index != IGNORE_INDEX:
        batches = [
            {**b, "labels": torch.where(b["labels"] == IGNORE_INDEX, truth.ignore_index, b["labels"])} for b in batches
        ]
    normalizer = LossNormalizer(["labels"], pad_token_id=4)
    look(normalizer, by(truth), batches)
    assert normalizer.reduction == truth
    assert normalizer.is_confirmed
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_one_look_decides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The only cut there is contradicts the default: that is warned of, and decided by the next look."""
    normalizer = LossNormalizer(["labels"])
    look(normalizer, by(MAIN[0]), [batch_of([2, 6])])
    assert normalizer.reduction == LossReduction("samples")
    assert "one look contradicts it so far" in caplog.text
    look(normalizer, by(MAIN[0]), [batch_of([1, 5], seed=3)])
    assert normalizer.reduction == LossReduction("tokens")


def test_a_tie_is_kept_open_and_said_where_it_matters(caplog: pytest.LogCaptureFixture) -> None:
    normalizer = LossNormalizer(["labels"])
    look(normalizer, by(MAIN[2]), [batch_of([6, 6, 6]), batch_of([6, 6], seed=1)])
    assert normalizer.reduction == LossReduction("samples")
    assert not caplog.records  # all weigh alike under what is open
    normalizer.num_updates = 2
    even, ragged = (
        [normalizer.count(batch_of([6, 6]))] * 2,
        [normalizer.count(batch_of([6, 6])), normalizer.count(batch_of([2, 6]))],
    )
    assert not normalizer.is_due(even)
    assert normalizer.is_due(ragged)
    alike = [normalizer.count(batch_of([2, 6])), normalizer.count(batch_of([6, 2]))]  # but for their rows
    assert not normalizer.is_due(alike)
    assert normalizer.is_due(alike, by_row=True)


@pytest.mark.parametrize("shifts", [False, True])
def test_of_two_that_fit_the_one_of_the_models_class_is_taken(shifts: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A loss made outside of a model that shifts its targets, whose counts differ by less than rounding shows."""
    normalizer = LossNormalizer(["labels"], shifts=shifts)
    counts = [normalizer.count(batch_of([6, 3])), normalizer.count(batch_of([2, 5]))]
    for _ in range(2):
        normalizer.learn([Observation(MAIN[:2], MAIN[2:])], counts)
    assert normalizer.reduction == LossReduction("tokens", shifted=shifts)
    assert ("not decided yet" in caplog.text) is not shifts


def test_a_head_of_zeros_tells_nothing_yet_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    normalizer = LossNormalizer(["labels"])
    batches = [batch_of([3, 6, 1, 2]), batch_of([6, 6, 5], seed=1)]
    zeros = [{**batch, "logits": batch["logits"] * 0} for batch in batches]
    look(normalizer, by(MAIN[0]), zeros)
    assert "is not decided yet" in caplog.text
    assert "loss_weight=" in caplog.text
    look(normalizer, by(MAIN[0]), batches)
    assert normalizer.reduction == LossReduction("tokens")


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 7, 8, 9, 64, 100])
def test_it_is_looked_again_for_ever(number: int) -> None:
    normalizer = LossNormalizer(["labels"], declared="tokens")
    normalizer.num_updates = number - 1
    assert normalizer.is_due([normalizer.count(batch_of([6]))]) == (number in (1, 2, 4, 8, 64))


def test_what_is_seen_late_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    normalizer = LossNormalizer(["labels"])
    batches = [batch_of([3, 6, 1, 2]), batch_of([6, 2, 5], seed=1)]
    look(normalizer, by(MAIN[0]), batches)
    assert not caplog.records
    for _ in range(2):
        look(normalizer, lambda batch, _: by(MAIN[0])(batch, None) + len(batch["labels"]) ** 2, batches)
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    assert "it fits no reading that paceline knows" in caplog.text


WEIGHTS = torch.tensor([1.0, 9.0, 0.1, 3.0, 5.0], dtype=torch.float64)
UNKNOWN: dict[str, Loss] = {
    "class weights": lambda b, _: cross_entropy(b["logits"].mT, b["labels"], weight=WEIGHTS),
    "two means": lambda b, _: by(MAIN[0])(b, _) + by(MAIN[2])(b, _),
    "in-batch negatives": lambda b, _: (0.01 * b["logits"].flatten(1) @ b["logits"].flatten(1).T).logsumexp(1).mean(),
    "a root": lambda b, _: by(MAIN[0])(b, _).sqrt(),
    "noise": lambda b, _: by(MAIN[0])(b, _) + torch.rand(()) * 0 + len(b["labels"]) % 3,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_fits_no_reduction_is_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    normalizer = LossNormalizer(["labels"])
    look(normalizer, UNKNOWN[name], [batch_of([3, 6, 1, 2]), batch_of([6, 2, 5], seed=1)])
    assert "fits no reading" in caplog.text
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("truth", [MAIN[2], MAIN[0]], ids=str)
def test_a_known_class_is_audited(truth: LossReduction, caplog: pytest.LogCaptureFixture) -> None:
    normalizer = LossNormalizer(["labels"], known=LossReduction("tokens"))
    for seed in range(3):
        look(normalizer, by(truth), [batch_of([3, 6, 1, 2], seed=seed)])
    assert normalizer.reduction == truth
    assert bool(caplog.records) == (truth != normalizer.known)


def test_a_loss_that_is_computed_outside_the_model_is_certain() -> None:
    normalizer = LossNormalizer(["labels"], shifts=True)
    normalizer.know(LossReduction("tokens", shifted=True))
    normalizer.passes_count = True  # to a model whose own loss is not used
    assert normalizer.is_certain


def test_what_is_confirmed_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    told = f"The returned loss was seen to be {MAIN[2]}"
    observations = [Observation((MAIN[2],), MAIN[:2])]
    counts = [LossNormalizer(["labels"]).count(batch_of([6, 6]))]
    with caplog.at_level(logging.INFO):
        normalizer, known = LossNormalizer(["labels"]), LossNormalizer(["labels"], known=MAIN[2])
        for number in (0, 1, 1):
            normalizer.learn(observations, counts)
            known.learn(observations, counts)
            assert caplog.text.count(told) == number


@pytest.mark.parametrize("count", ["ignored", "unknown"])
def test_a_causal_head_that_ignores_the_count_is_not_known_by_its_class(
    count: str, caplog: pytest.LogCaptureFixture
) -> None:
    known = LossReduction("tokens", shifted=True)
    normalizer = LossNormalizer(["labels"], known=known, shifts=True)
    normalizer.passes_count = True
    normalizer.learn(
        [Observation(count=count)], [normalizer.count(batch_of([6, 2])), normalizer.count(batch_of([3, 3]))]
    )  # no cut
    assert normalizer.is_certain == (count == "unknown")
    assert ("could not be seen: it is taken for" in caplog.text) == (count == "ignored")


@pytest.mark.parametrize("declared", ["tokens", "samples"])
def test_a_declared_weight_is_kept_and_a_contradiction_said(declared: str, caplog: pytest.LogCaptureFixture) -> None:
    normalizer = LossNormalizer(["labels"], declared=declared)
    for seed in range(2):
        look(normalizer, by(MAIN[0]), [batch_of([3, 6, 1, 2], seed=seed)])
    assert normalizer.reduction == LossReduction(declared)
    assert ("is contradicted" in caplog.text) == (declared == "samples")


def test_declared_samples_leave_open_only_whether_empty_ones_count() -> None:
    for truth in (LossReduction("samples"), LossReduction("all_samples")):
        normalizer = LossNormalizer(["labels"], declared="samples")
        look(normalizer, by(truth), [batch_of([2, 5, 0, 1]), batch_of([0, 3, 6], seed=1)])
        assert normalizer.reduction == truth


# ---- num_items_in_batch


def total_of(batch: Any, num_items: Any) -> Tensor:
    return by(MAIN[0])(batch, None) * int((batch["labels"] != IGNORE_INDEX).sum()) / num_items


def logs(batch: Any, num_items: Any) -> Tensor:
    logging.getLogger("test").debug("%s items, %.1f", num_items, float(num_items) / 2)
    return by(MAIN[0])(batch, None)


def compares(batch: Any, num_items: Any) -> Tensor:
    mean = by(MAIN[0])(batch, None)
    return mean if num_items > 3 else mean * 1


def copies(batch: Any, num_items: Any) -> Tensor:
    assert num_items.clone() * 1.0 > 0
    return by(MAIN[0])(batch, None)


@pytest.mark.parametrize("loss_of", [logs, compares, copies, total_of])
def test_a_loss_is_scaled_only_if_changing_the_count_changes_it(loss_of: Loss) -> None:
    normalizer = LossNormalizer(["labels"])
    batches = [batch_of([3, 6, 1, 2]), batch_of([6, 2, 5], seed=1)]
    look(normalizer, loss_of, batches, normalizer.num_items(batches))
    assert normalizer.is_scaled is (loss_of is total_of)
    counts = [normalizer.count(batch) for batch in batches]
    total = normalizer.recount(counts)
    found = sum(
        float(loss_of(batch, normalizer.num_items(batches))) * normalizer.factor(item, total)
        for batch, item in zip(batches, counts, strict=True)
    )
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    assert found == pytest.approx(float(by(MAIN[0])(whole, None)), rel=1e-12)


def test_a_loss_of_which_a_part_is_scaled_is_said(caplog: pytest.LogCaptureFixture) -> None:
    normalizer = LossNormalizer(["labels"])
    batches = [batch_of([3, 6, 1, 2])]
    look(normalizer, lambda b, n: total_of(b, n) + 0.1 * by(MAIN[2])(b, n), batches, normalizer.num_items(batches))
    assert normalizer.is_scaled
    assert "Only a part of the loss is divided" in caplog.text


@pytest.mark.parametrize("loss_of", [lambda b, n: b["logits"].sum() * 0, lambda b, n: b["logits"].sum() * torch.nan])
def test_a_loss_that_tells_nothing_is_not_taken_for_scaled(loss_of: Loss, caplog: pytest.LogCaptureFixture) -> None:
    normalizer = LossNormalizer(["labels"])
    batches = [batch_of([3, 6, 1, 2])]
    look(normalizer, loss_of, batches, normalizer.num_items(batches))
    assert normalizer.is_scaled is None
    assert "Whether the loss is divided by num_items_in_batch could not be seen" in caplog.text


@pytest.mark.parametrize("share", [1, 4])
def test_a_count_that_is_not_the_models_own_is_said(share: int, caplog: pytest.LogCaptureFixture) -> None:
    """As where a loss over a part of the targets is divided by the number of all of them."""
    normalizer = LossNormalizer(["labels"])
    batches = [batch_of([3, 6, 1, 2]), batch_of([6, 2, 5], seed=1)]
    look(normalizer, lambda b, n: by(MAIN[0])(b, n) if n is None else total_of(b, n) / share, batches, torch.tensor(25))
    assert normalizer.is_scaled
    assert ("it is not what it is without a count" in caplog.text) == (share != 1)


@pytest.mark.parametrize("multiple", [1, 2])
def test_an_own_loss_may_be_multiplied_by_the_number_of_processes(multiple: int) -> None:
    """As it has to be with transformers: it is not done once more."""
    normalizer, batches = LossNormalizer(["labels"]), [batch_of([3, 6, 1, 2])]
    normalizer.scaled_factor = 2.0
    look(
        normalizer,
        lambda b, n: by(MAIN[0])(b, n) if n is None else multiple * total_of(b, n),
        batches,
        torch.tensor(30),
    )
    assert (normalizer.is_scaled, normalizer.is_multiplied) == (True, multiple == 2)
    assert normalizer.factor(normalizer.count(batches[0]), 30) == 2 / multiple


@pytest.mark.parametrize("mean", [None, torch.tensor(0.0)])
def test_a_multiple_that_cannot_be_seen_is_said(mean: Tensor | None, caplog: pytest.LogCaptureFixture) -> None:
    normalizer, batches = LossNormalizer(["labels"]), [batch_of([3, 6, 1, 2])]
    normalizer.scaled_factor = 2.0
    look(normalizer, lambda b, n: mean if n is None else total_of(b, n), batches, torch.tensor(30))  # type: ignore[return-value]
    assert (normalizer.is_scaled, normalizer.is_multiplied) == (True, True)
    assert "whether it multiplies by the number of processes too could not be seen" in caplog.text


@pytest.mark.parametrize("mean", [None, torch.tensor(0.0), torch.tensor(14.0)])
def test_a_loss_function_that_needs_the_count_is_multiplied_as_any_other(mean: Tensor | None) -> None:
    """As transformers does for every `compute_loss_func`, but not for an overridden `compute_loss`."""
    rule, batches = LossNormalizer(["labels"]), [batch_of([3, 6, 1, 2])]
    rule.scaled_factor, rule.calls_function = 2.0, True
    look(rule, lambda b, n: mean if n is None else total_of(b, n), batches, torch.tensor(30))  # type: ignore[return-value]
    assert (rule.is_scaled, rule.is_multiplied) == (True, False)
    assert rule.factor(rule.count(batches[0]), 30) == 2


def test_a_loss_that_its_author_averages_is_used_as_it_is() -> None:
    normalizer = LossNormalizer(["labels"])
    normalizer.scaled_factor = 2.0
    for is_averaged, factor in ((False, 2.0), (True, 1.0)):
        normalizer.declare("scaled", is_averaged)
        assert normalizer.factor(normalizer.count(batch_of([3])), 30) == factor


def test_labels_under_two_names_are_no_targets_to_count() -> None:
    """No loss is divided by the number of start positions of answers."""
    normalizer = LossNormalizer(["start_positions", "end_positions"])
    ones = torch.ones(4, dtype=torch.long)
    assert normalizer.num_items([{"start_positions": ones, "end_positions": ones}]) is None
    assert normalizer.count({"start_positions": ones, "end_positions": ones}).weight == 4
    assert LossNormalizer(["labels", "next"]).num_items([{"labels": ones, "next": ones}]) == 4
    assert LossNormalizer(["y"]).num_items([{"y": ones}]) == 4
    assert LossNormalizer(["labels"]).num_items([{"labels": ones.float()}]) is None


# ---- looks leave no trace, and cost no memory


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.norm.eval()

    def forward(self, logits: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.drop(self.norm(logits.float()))


def test_looks_leave_no_trace() -> None:
    model = Traced()
    modes = [module.training for module in model.modules()]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with leaving_no_trace(model):
        model.train()
        assert not model(torch.randn(4, 6, 5)).requires_grad
        model.eval()
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize(("sizes", "expected"), [((1, 1), [2]), ((4, 1), [4, 3]), ((4, 3, 4), [4, 3, 4, 4, 4])])
def test_samples_of_two_batches_are_no_more_than_one_of_them_has(sizes: tuple[int, ...], expected: list[int]) -> None:
    """Or two, where each has one: so that a look needs no more memory than a step."""
    normalizer, batches = LossNormalizer(["labels"]), [batch_of([3] * size) for size in sizes]
    found = list(cuttable([Part(batch, normalizer.count(batch)) for batch in batches]))
    assert [part.counts.samples for part in found] == expected
    assert all(len(part.batch["logits"]) == len(part.counts.labels) == part.counts.samples for part in found)  # type: ignore[arg-type]


@pytest.mark.parametrize(("wide", "is_open"), [(4, False), (2**18, True)])
def test_a_sum_is_tested_on_copies_of_a_batch_as_far_as_memory_allows(
    wide: int, is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Outputs that dwarf the rest are not copied: 4 x 8 x 2^18 floats are 32 MiB."""
    model = nn.Linear(2, wide)
    batches = [{"x": torch.randn(8, 2), "labels": torch.ones(8, dtype=torch.long)} for _ in range(4)]
    samples = []

    def loss_of(batch: Any, _: Any) -> Tensor:
        samples.append(len(batch["x"]))
        return model(batch["x"]).square().sum()

    normalizer = LossNormalizer(["labels"])
    counts = [normalizer.count(batch) for batch in batches]
    parts = [Part(batch, item) for batch, item in zip(batches, counts, strict=True)]
    normalizer.learn(LossProbe(model, loss_of, copies=4).look(normalizer, parts, None), counts)
    assert normalizer.reduction == MAIN[-1]
    assert max(samples) == (8 if is_open else 32)
    assert ("could not be tested" in caplog.text) == is_open


@pytest.mark.parametrize(("lengths", "expected"), [(([6, 6], [2, 2]), [2, 6]), (([6], [2]), None)])
def test_two_batches_are_joined_where_all_processes_can(lengths: Any, expected: list[int] | None) -> None:
    """Not where that would be more samples than the step's own: memory might end on one process alone."""
    seen: list[list[int]] = []

    def loss(batch: Any, num_items: Any) -> Tensor:
        seen.append(sorted((batch["labels"] != IGNORE_INDEX).sum(1).tolist()))
        return by(MAIN[0])(batch, num_items)

    look(LossNormalizer(["labels"]), loss, [batch_of(each) for each in lengths], must_match=True)
    assert max(map(len, seen)) == len(lengths[0])
    assert expected is None or expected in seen


def test_samples_are_joined_only_of_rows() -> None:
    normalizer = LossNormalizer(["labels"])
    for rows, is_joined in ((2, True), (3, False), (4, False)):
        batches = [batch_of([6, 3]), batch_of([2, 4])]
        batches[0]["extra"], batches[1]["extra"] = torch.ones(2, 3), torch.ones(rows, 3)
        parts = [Part(batch, normalizer.count(batch)) for batch in batches]
        assert len(list(cuttable(parts))) == 2 + is_joined
        assert len(list(cuttable(parts[::-1]))) == 2 + is_joined
    wider = {**batches[0], "extra": torch.ones(2, 4)}
    parts = [Part(batch, normalizer.count(batch)) for batch in (batches[0], wider)]
    assert len(list(cuttable(parts))) == 2


def test_each_kind_of_micro_batch_is_looked_at() -> None:
    normalizer = LossNormalizer(["labels"])
    window = [
        normalizer.count(batch_of(lengths)) for lengths in ([6, 6], [0, 0], [6, 5], [5, 6], [6, 0], [1, 6], [0, 3])
    ]
    assert choose_parts(window, 0, 9) == [2, 4, 5, 3, 6]  # whole rows; some without a target; some without a second
    assert choose_parts(window, 0, 2) == [2, 4]
    assert choose_parts(window, -1, 9) == [0, 4, 5, 2, 6, 3]


class PeakBytes(TorchDispatchMode):
    """The most bytes of new tensors that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import weakref

        result = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self.alive[storage.data_ptr()] = (weakref.ref(value), storage.nbytes())
        self.alive = {key: item for key, item in self.alive.items() if item[0]() is not None}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


@pytest.mark.parametrize("num_items", [None, torch.tensor(37)])
def test_a_look_takes_less_memory_than_a_step(num_items: Any) -> None:
    """A vocabulary that dwarfs the rest: the step holds the logits, their softmax and gradients."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4000)
    batches = [{"x": torch.randn(4, 16, 8), "labels": torch.randint(0, 4000, (4, 16))} for _ in range(2)]

    def loss_of(batch: Any, count: Any) -> Tensor:
        logits = model(batch["x"]).flatten(0, 1)
        if count is None:
            return cross_entropy(logits, batch["labels"].flatten())
        return cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / count

    with PeakBytes() as step:
        loss_of(batches[0], num_items).backward()
    model.zero_grad()
    normalizer = LossNormalizer(["labels"])
    with PeakBytes() as looking:
        look(normalizer, loss_of, batches, num_items)
    assert normalizer.is_scaled if num_items is not None else normalizer.is_confirmed
    assert looking.peak <= step.peak


# ---- what a run takes along


def test_what_was_seen_can_be_taken_along() -> None:
    normalizer = LossNormalizer(["labels"])
    look(normalizer, by(MAIN[0]), [batch_of([3, 6, 1, 2])])
    other = LossNormalizer(["labels"])
    other.load_state_dict(json.loads(json.dumps(normalizer.state_dict())))
    assert other.state_dict() == normalizer.state_dict()
    assert (other.reduction, other.hits, other.misses) == (normalizer.reduction, normalizer.hits, normalizer.misses)


def test_what_is_declared_now_is_stronger_than_what_was_seen_then() -> None:
    then = LossNormalizer(["labels"])
    now = LossNormalizer(["labels"], declared="tokens")
    now.load_state_dict(then.state_dict())
    assert now.reduction == LossReduction("tokens")


def test_what_an_older_version_wrote_is_passed_over() -> None:
    normalizer = LossNormalizer(["labels"])
    before = normalizer.state_dict()
    normalizer.load_state_dict({"declared": None, "held": [{"unit": "tokens"}], "assumed": {}, "is_settled": True})
    assert normalizer.state_dict() == before


def damaged_states() -> list[dict[str, object]]:
    normalizer = LossNormalizer(["labels"])
    look(normalizer, by(MAIN[0]), [batch_of([3, 6, 1, 2])])
    state = normalizer.state_dict()
    wrong_values = ("x", 10**30, 1.5, None, [], {}, [1, 2, 3])
    wrong_reductions = (["words", False, -100], ["tokens", 0, -100], ["tokens", False, "x"], ["tokens"])
    cases = [{**state, "reduction": value} for value in (*wrong_values, *wrong_reductions)]
    cases += [{**state, "counters": value} for value in wrong_values if value != [1, 2, 3]]
    cases += [{**state, "evidence": [[*state["evidence"][0][:4], value]]} for value in wrong_values]
    cases += [
        {**state, name: value} for name in ("is_scaled", "is_multiplied", "by_chunks") for value in (0, "true", [])
    ]
    cases += [
        {name: value for name, value in state.items() if name != left_out}
        for left_out in state
        if left_out not in ("by_chunks", "ignored")
    ]
    cases += [{**state, "ignored": value} for value in (7, "x", ["x"], [True], None)]
    return cases  # older versions wrote neither "by_chunks" nor "ignored"


@pytest.mark.parametrize("state", damaged_states(), ids=str)
def test_a_damaged_state_is_refused_whole(state: dict[str, object]) -> None:
    normalizer = LossNormalizer(["labels"])
    before = normalizer.state_dict()
    with pytest.raises((ValueError, TypeError, LookupError)):
        normalizer.load_state_dict(state)
    assert normalizer.state_dict() == before


# ---- weights


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=2, max_size=10).filter(lambda x: sum(n > 1 for n in x) > 0),
    cuts=st.lists(st.integers(1, 9), max_size=4),
    truth=st.sampled_from([item for item in MAIN if item.unit != "sum"]),
)
def test_any_split_of_the_same_samples_adds_up_to_the_same_loss(
    lengths: list[int], cuts: list[int], truth: LossReduction
) -> None:
    logits, labels = make_batch(lengths, seed=sum(lengths))
    whole = float(loss_under(truth, logits, labels))
    normalizer = LossNormalizer(["labels"], known=truth)
    edges = sorted({0, len(lengths), *(cut for cut in cuts if cut < len(lengths))})
    parts = [(logits[start:end], labels[start:end]) for start, end in itertools.pairwise(edges)]
    counts = [normalizer.count({"labels": part_labels}) for _, part_labels in parts]
    total = sum(item.weight for item in counts)
    contributions = [
        float(loss_under(truth, *part)) * normalizer.factor(item, total)
        for part, item in zip(parts, counts, strict=True)
        if item.weight
    ]
    assert sum(contributions) == pytest.approx(whole, rel=1e-12)


def test_a_function_weighs_micro_batches() -> None:
    normalizer = LossNormalizer(["labels"], declared=lambda batch: float(WEIGHTS[batch["labels"]].sum()))
    batches = [{"labels": torch.tensor([0, 1])}, {"labels": torch.tensor([2])}]
    counts = [normalizer.count(batch) for batch in batches]
    assert [item.weight for item in counts] == pytest.approx([10.0, 0.1])
    assert normalizer.recount(counts) == pytest.approx(10.1)
    assert normalizer.factor(counts[0], 10.1) == pytest.approx(10 / 10.1)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="loss_weight returned"):
            LossNormalizer(["labels"], declared=lambda batch, wrong=wrong: wrong).count(batches[0])


def test_targets_that_were_shifted_already_are_counted_where_they_stand() -> None:
    labels = torch.tensor([[5, 6, 7, 8], [5, 6, IGNORE_INDEX, IGNORE_INDEX]])
    ahead = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    normalizer = LossNormalizer(["labels"], declared="shifted_tokens", shifts=True)
    counts = normalizer.count({"labels": labels, "shift_labels": ahead})
    assert counts.weight == normalizer.count({"labels": labels}).weight == 4
    assert normalizer.recount([counts]) == 4
    assert normalizer.num_items([{"labels": labels, "shift_labels": ahead}]) == 4


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_floating_point_targets_count_but_for_nan(share: float) -> None:
    torch.manual_seed(0)
    labels = torch.randn(6, 3, dtype=torch.float64)
    labels[torch.rand(6, 3) < share] = torch.nan
    batch = {"x": torch.randn(6, 3, dtype=torch.float64), "labels": labels}

    def loss_of(b: Any, _: Any) -> Tensor:
        kept = ~b["labels"].isnan()
        return (b["x"][kept] - b["labels"][kept]).square().mean()

    normalizer = LossNormalizer(["labels"])
    look(normalizer, loss_of, [batch])
    counts = normalizer.count(batch)
    assert counts.weight / counts.samples == pytest.approx(float((~labels.isnan()).sum()) / 6 if share else 1)


def test_parts_that_weigh_nothing_add_nothing() -> None:
    """The mean over no target is NaN: what counts such a sample expects NaN for the whole."""
    split = Split(2.0, float("nan"), 2.0, {LossReduction("tokens"): 0.0, LossReduction("all_samples"): 0.5}.get, 1e-6)
    found = split.observe(MAIN)
    assert LossReduction("tokens") in found.fits
    assert LossReduction("all_samples") in found.misses
    whole_of_none = Split(3.0, 1.0, 2.0, {LossReduction("all_samples"): 0.5}.get, 1e-6).observe(MAIN)
    assert whole_of_none == Observation(
        (LossReduction("sum"),), (LossReduction("all_samples"),)
    )  # others have no weight
    assert len(make_candidates(7)) > len(make_candidates(None))
    assert Observation().fits == ()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shifted", [False, True])
def test_label_smoothing_is_torchs(shifted: bool, dtype: torch.dtype) -> None:
    logits, labels = make_batch([3, 6, 2])
    logits = logits.to(dtype)
    smoothed = LabelSmoother(0.1)({"logits": logits}, labels, shift_labels=shifted)
    left, right = (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)
    expected = cross_entropy(left.reshape(-1, 5).double(), right.reshape(-1), label_smoothing=0.1)
    assert float(smoothed) == pytest.approx(float(expected), rel=1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("inner", [(), (2,)], ids=["tokens", "several per place"])
@pytest.mark.parametrize("shifted", [False, True])
def test_the_shift_of_targets_is_read_from_the_models_own_loss(shifted: bool, inner: tuple[int, ...]) -> None:
    logits, labels = torch.randn(3, 6, *inner, 5), torch.randint(0, 5, (3, 6, *inner))
    left, right = (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)
    loss = cross_entropy(left.reshape(-1, 5), right.reshape(-1))
    smoother = LabelSmoother(0.1)
    for assumed in (False, True):
        assert smoother.find_shift({"loss": loss, "logits": logits}, labels, assumed) is shifted
        assert smoother.find_shift({"loss": loss + 1, "logits": logits}, labels, assumed) is None
        assert smoother.find_shift({"logits": logits}, labels, assumed) is None


@pytest.mark.parametrize("shifted", [False, True])
def test_the_gradient_shows_the_shift_of_targets_if_all_logits_are_equal(shifted: bool) -> None:
    """As those of a head that is initialized to zero: the loss is the logarithm of the number of classes."""
    logits, labels = torch.zeros(3, 6, 5, requires_grad=True), torch.randint(0, 5, (3, 6))
    left, right = (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)
    loss = cross_entropy(left.reshape(-1, 5), right.reshape(-1))
    for assumed in (False, True):
        assert LabelSmoother(0.1).find_shift({"loss": loss, "logits": logits}, labels, assumed) is shifted
        assert LabelSmoother(0.1).find_shift({"loss": loss.detach(), "logits": logits}, labels, assumed) is None
    loss.backward()


def test_a_single_target_per_sample_has_no_shift() -> None:
    logits, labels = torch.randn(3, 5), torch.randint(0, 5, (3,))
    output = {"loss": cross_entropy(logits, labels), "logits": logits}
    assert LabelSmoother(0.1).find_shift(output, labels, True) is None


def test_logits_of_masked_places_only_show_no_shift() -> None:
    """As those of ModernBERT with `sparse_prediction`; smoothing then names its own option and value."""
    output = {"loss": torch.tensor(1.0), "logits": torch.randn(4, 5)}
    assert LabelSmoother(0.1).find_shift(output, torch.zeros(3, 6, dtype=torch.long), True) is None


def test_label_smoothing_without_logits_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1"):
        LabelSmoother(0.1)({"hidden": torch.ones(2, 3)}, torch.ones(4, dtype=torch.long))
