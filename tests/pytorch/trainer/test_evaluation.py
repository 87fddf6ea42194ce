"""Evaluation and prediction: right numbers and one row per sample, in memory that does not grow with the set."""

from __future__ import annotations

import gc
import logging
import math
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import Classifier, Tagger, classification, make_trainer, tagging, weights
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

from paceline import EvalPrediction, Trainer, TrainerCallback
from paceline.core.byte_sizes import format_memory
from paceline.core.outputs import EvalLoopOutput
from paceline.core.streaming import F1, Accuracy, Mean, MetricGroup, Perplexity
from paceline.pytorch.evaluation.loss_sum import LossSum
from paceline.pytorch.evaluation.prediction_buffer import to_host
from paceline.pytorch.evaluation.predictor import timed_metrics
from paceline.pytorch.model.loss import LossNormalizer

DATA = classification(50)
GB = 2**30


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_a_loss_among_the_metrics_goes_first(tmp_path: Path) -> None:
    """As in the Hugging Face Trainer; one with the prefix does not."""
    for name, expected in (("loss", 7.0), ("eval_loss", None)):
        options = {"eval_dataset": DATA, "compute_metrics": lambda prediction, name=name: {name: 7.0}}
        found = make_trainer(tmp_path, Classifier(), **options).evaluate()["eval_loss"]
        assert (found == 7.0) == (expected is not None)


# ---- streaming metrics


@pytest.mark.parametrize("batch_size", [1, 7, 50])
def test_a_streaming_metric_is_given_as_compute_metrics(tmp_path: Path, batch_size: int) -> None:
    whole = make_trainer(tmp_path, Classifier(), eval_dataset=DATA, compute_metrics=accuracy).evaluate()
    trainer = make_trainer(
        tmp_path, Classifier(), eval_dataset=DATA, compute_metrics=Accuracy(), per_device_eval_batch_size=batch_size
    )
    for _ in range(2):  # the second evaluation begins anew
        metrics = trainer.evaluate()
        assert metrics["eval_accuracy"] == whole["eval_accuracy"]
        assert metrics["eval_accuracy_low"] < metrics["eval_accuracy"] < metrics["eval_accuracy_high"]
        assert metrics["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-6)


def test_streaming_keeps_no_rows_but_predict_returns_them_all(tmp_path: Path) -> None:
    metric = MetricGroup(Accuracy(), F1(4), Mean(lambda p: p.predictions.max(1), "top"))
    trainer = make_trainer(tmp_path, Classifier(), eval_dataset=DATA, compute_metrics=metric)
    output = trainer.evaluation_loop(trainer.get_eval_dataloader(), "Evaluation")
    assert output.predictions is None
    assert output.label_ids is None
    assert output.num_samples == 50
    predicted = trainer.predict(DATA)
    assert predicted.predictions.shape == (50, 4)
    assert predicted.label_ids.shape == (50,)
    assert predicted.metrics is not None
    assert predicted.metrics["test_accuracy"] == accuracy(predicted_as(predicted))["accuracy"]
    assert {"test_f1", "test_recall_low", "test_top", "test_loss"} <= predicted.metrics.keys()
    assert trainer.predict([{"x": sample["x"]} for sample in DATA]).predictions.shape == (50, 4)  # nothing to compare


def predicted_as(output: Any) -> Any:
    return EvalPrediction(output.predictions, output.label_ids)


def test_streaming_during_training_decides_about_the_best_model(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        Classifier(),
        DATA,
        eval_dataset={"a": DATA[:20], "b": DATA[20:]},
        compute_metrics=Accuracy(confidence=None),
        num_train_epochs=3,
        learning_rate=1e-2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="a_accuracy",
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "eval_a_accuracy" in row]
    assert len(rows) == 3
    assert trainer.state.best_metric == max(row["eval_a_accuracy"] for row in rows)
    for name, part in (("a", DATA[:20]), ("b", DATA[20:])):
        whole = make_trainer(tmp_path, trainer.model, eval_dataset=part, compute_metrics=accuracy).evaluate()
        assert trainer.evaluate()[f"eval_{name}_accuracy"] == whole["eval_accuracy"]


def test_perplexity_is_exp_of_eval_loss(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        Tagger(shifted=True),
        eval_dataset=tagging(30),
        compute_metrics=MetricGroup(Perplexity(), Accuracy(shifted=True)),
        per_device_eval_batch_size=7,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]), rel=1e-5)


def test_prediction_loss_only_with_a_streaming_metric(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, Classifier(), eval_dataset=DATA, compute_metrics=Accuracy(), prediction_loss_only=True
    )
    assert "eval_accuracy" not in trainer.evaluate()


def test_a_metric_that_cannot_be_reset_is_refused(tmp_path: Path) -> None:
    class Metric:
        def update(self, prediction: Any) -> None: ...

        def compute(self) -> dict[str, float]:
            return {}

    trainer = make_trainer(tmp_path, Classifier(), eval_dataset=DATA, compute_metrics=Metric())
    with pytest.raises(TypeError, match="no `reset`"):
        trainer.evaluate()


# ---- rows on disk


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 6), st.booleans(), st.integers(1, 3))
def test_spilled_rows_are_those_in_memory(
    tmp_path: Path, lengths: list[int], batch_size: int, concatenate: bool, host_every: int
) -> None:
    data = [{"x": torch.full((length, 1), float(length))} for length in lengths]
    outputs = []
    for limit in ("inf", 0, 100 / GB):
        trainer = make_trainer(
            tmp_path,
            Ragged(),
            data_collator=collate_ragged,
            per_device_eval_batch_size=batch_size,
            eval_do_concat_batches=concatenate,
            eval_accumulation_steps=host_every,
            eval_spill_gb=limit,
        )
        outputs.append(trainer.predict(data))
    for spilled in outputs[1:]:
        for ours, theirs in zip(
            (spilled.predictions, spilled.label_ids), (outputs[0].predictions, outputs[0].label_ids), strict=True
        ):
            assert len(ours) == (len(data) if concatenate else -(-len(data) // batch_size))
            for one, other in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(one, other)


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": self.layer(x).mean(), "logits": self.layer(x)}


def collate_ragged(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    longest = max(len(sample["x"]) for sample in samples)
    x = torch.stack([functional.pad(sample["x"], (0, 0, 0, longest - len(sample["x"]))) for sample in samples])
    return {"x": x, "labels": torch.zeros(len(samples), longest, dtype=torch.long)}


@pytest.mark.parametrize("limit", ["inf", 0])
@pytest.mark.parametrize("concatenate", [True, False])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_are_in_the_order_of_the_dataset(tmp_path: Path, limit: Any, concatenate: bool, num_workers: int) -> None:
    """Also where evaluation goes by length."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 9, (40,), generator=generator).tolist()
    data = [
        {"x": torch.full((length, 1), float(index)), "input_ids": [0] * length, "number": index}
        for index, length in enumerate(lengths)
    ]
    orders: list[list[int]] = []

    def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = collate_ragged(samples)
        return {**batch, "labels": torch.tensor([sample["number"] for sample in samples])}

    def compute_metrics(prediction: Any) -> dict[str, float]:
        orders.append(prediction.label_ids.tolist() if concatenate else [])
        return {"right": float((prediction.inputs["x"][:, 0, 0] == prediction.label_ids).all())} if concatenate else {}

    trainer = make_trainer(
        tmp_path,
        Ragged(),
        data_collator=collate,
        train_sampling_strategy="group_by_length",
        remove_unused_columns=False,
        eval_dataset=data,
        compute_metrics=compute_metrics,
        include_for_metrics=["inputs"],
        eval_do_concat_batches=concatenate,
        eval_spill_gb=limit,
        dataloader_num_workers=num_workers,
    )
    output = trainer.predict(data)
    metrics = trainer.evaluate()
    if not concatenate:
        assert np.concatenate(output.label_ids).tolist() == list(range(40))
        return
    assert output.label_ids.tolist() == list(range(40))
    weight, bias = (parameter.detach().numpy() for parameter in trainer.model.parameters())
    expected = np.arange(40)[:, None] * weight[:, 0] + bias
    np.testing.assert_allclose(output.predictions[:, 0], expected, rtol=1e-5, atol=1e-5)
    assert isinstance(output.predictions, np.memmap) == (limit == 0)
    assert orders == [list(range(40))] * 2
    assert metrics["eval_right"] == 1.0


def test_metrics_over_spilled_rows(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def metrics(prediction: Any) -> dict[str, float]:
        seen.update(vars(prediction))
        return accuracy(prediction)

    found = [
        make_trainer(
            tmp_path,
            Classifier(),
            eval_dataset=DATA,
            compute_metrics=metrics,
            include_for_metrics=["inputs", "loss"],
            eval_spill_gb=limit,
        ).evaluate()["eval_accuracy"]
        for limit in ("inf", 0)
    ]
    assert found[0] == found[1]
    assert all(isinstance(seen[name], np.memmap) for name in ("predictions", "label_ids", "losses"))
    assert isinstance(seen["inputs"]["x"], np.memmap)
    assert {len(seen[name]) for name in ("predictions", "label_ids", "losses")} == {50}


def seen_when_called(model: nn.Module, caplog: pytest.LogCaptureFixture) -> list[int]:
    """Returns a list that gets the number of warnings about kept predictions at each call of a model."""
    counts: list[int] = []
    model.register_forward_pre_hook(
        lambda *given: counts.append(len([r for r in caplog.records if "eval_spill_gb" in r.getMessage()]))
    )
    return counts


@pytest.mark.parametrize("kind", ["plain", "gpt2", "bfloat16", "t5"])
def test_what_a_language_model_will_keep_is_said_before_the_first_batch(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The model names the layer that gives a number for each word: the projection is that of the outputs."""

    class Named(Tagger):
        def get_output_embeddings(self) -> nn.Module:
            return self.head

    options: dict[str, Any] = {"per_device_eval_batch_size": 6, "eval_spill_gb": 1000 / GB}
    model: Any = Named()
    data = tagging(24)
    # 7 tokens a sample with a number for each of 11 words, and an int64 each
    expected = 6 * 7 * (4 * 11 + 8)
    if kind != "plain":
        pytest.importorskip("transformers")
        model = transformers_models.gpt2() if kind != "t5" else transformers_models.t5()
        data = transformers_models.language(24) if kind != "t5" else transformers_models.translations(24)
        expected = 6 * len(data[0]["labels"]) * (4 * 31 + 8)
        options["bf16_full_eval"] = kind == "bfloat16"
    counts = seen_when_called(model, caplog)
    trainer = make_trainer(tmp_path, model, **options)
    trainer.predict(data)
    assert counts[0] == 1
    messages = [r.getMessage() for r in caplog.records if "eval_spill_gb" in r.getMessage()]
    assert f"about {format_memory(4 * expected)} of predictions (4 batches of {format_memory(expected)})" in messages[0]
    # and once more only where the outputs are a good deal more: T5 returns what its encoder made as well
    assert len(messages) == (2 if kind == "t5" else 1)


def test_nothing_is_projected_that_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    assert transformers
    data = transformers_models.language(24)
    for options in (
        {"prediction_loss_only": True},
        {"preprocess_logits_for_metrics": lambda logits, labels: logits[:, :1, 0]},
        {"compute_metrics": Accuracy(shifted=True)},
    ):
        make_trainer(
            tmp_path, transformers_models.gpt2(), eval_dataset=data, eval_spill_gb=3000 / GB, **options
        ).evaluate()
    assert "eval_spill_gb" not in caplog.text


def test_what_will_be_kept_is_said_before_the_second_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a module that does not tell its outputs' size, the first batch does."""
    model = Classifier()
    batches = seen_when_called(model, caplog)
    options: dict[str, Any] = {"eval_dataset": DATA, "compute_metrics": accuracy, "per_device_eval_batch_size": 10}
    trainer = make_trainer(tmp_path, model, eval_spill_gb=1000 / GB, loss_weight="tokens", **options)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        trainer.evaluate()
    assert batches == [0, 1, 1, 1, 1]
    # 4 logits in float32 and a label in int64
    message = next(r.getMessage() for r in caplog.records if "eval_spill_gb" in r.getMessage())
    assert "1.17 KiB of predictions (5 batches of 240 B)" in message
    for remedy in ("preprocess_logits_for_metrics", "streaming metric", "prediction_loss_only"):
        assert remedy in message
    caplog.clear()
    for quiet in ({"eval_spill_gb": 1}, {"eval_spill_gb": 0, "prediction_loss_only": True}):
        make_trainer(tmp_path, Classifier(), **{**options, **quiet}).evaluate()
    make_trainer(tmp_path, Classifier(), **{**options, "eval_spill_gb": 0, "compute_metrics": Accuracy()}).evaluate()
    assert not [r for r in caplog.records if "eval_spill_gb" in r.getMessage()]


def test_a_stream_of_unknown_length_spills_too(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(DATA)

    output = make_trainer(tmp_path, Classifier(), eval_spill_gb=0).predict(Stream())
    assert isinstance(output.predictions, np.memmap)
    assert output.predictions.shape == (50, 4)


class Stateful(Classifier):
    """Returns its state, which it overwrites in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(4, 8))

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        self.state.copy_(x)  # type: ignore[operator]
        return self.logits(x).sum() * 0, self.state


def test_outputs_that_the_model_overwrites_are_kept_as_they_were(tmp_path: Path) -> None:
    data = classification(12)
    trainer = make_trainer(tmp_path, Stateful(), data, per_device_eval_batch_size=4)
    assert np.array_equal(trainer.predict(data).predictions, np.stack([sample["x"].numpy() for sample in data]))


def test_a_part_of_a_tensor_does_not_keep_the_whole() -> None:
    whole = torch.zeros(4, 1000)
    part = to_host(whole[:, -1:])
    assert part.base is None or part.base.nbytes < 100
    assert to_host(whole.bfloat16()).dtype == np.float32
    assert to_host(["a", "bc"]).tolist() == ["a", "bc"]
    assert to_host((None, [whole])) == (None, [pytest.approx(whole.numpy())])


def test_a_number_beside_tensors_is_no_list_of_rows() -> None:
    number, logits = to_host((4, torch.ones(4, 2)))
    assert (number.shape, logits.shape) == ((), (4, 2))
    assert to_host((4, 5, 6)).tolist() == [4, 5, 6]
    assert to_host(["a", None]).tolist() == ["a", None]


# ---- memory


class Texts(Dataset[Any]):
    """Samples that are made when they are asked for, so that the set itself takes no memory."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.arange(32) * 7 + index) % 64
        return {"input_ids": ids, "labels": ids.clone()}


class Peak(TrainerCallback):
    """The most that Python and numpy hold, and the most that tensors hold."""

    def __init__(self) -> None:
        self.steps = self.tensors = 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        if self.steps % 8 == 0:
            found = [item for item in gc.get_objects() if type(item) is Tensor and not item.is_sparse]
            # what a compiler has traced in an earlier test has no size
            held = sum(item.nbytes for item in found if all(type(size) is int for size in item.shape))
            self.tensors = max(self.tensors, held)


def peak_bytes(tmp_path: Path, num_samples: int, **options: Any) -> int:
    peak = Peak()
    trainer = make_trainer(
        tmp_path,
        Tagger(64, shifted=True),
        eval_dataset=Texts(num_samples),
        per_device_eval_batch_size=8,
        callbacks=[peak],
        **options,
    )
    gc.collect()
    tracemalloc.start()
    try:
        trainer.evaluate()
        return tracemalloc.get_traced_memory()[1] + peak.tensors
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"compute_metrics": Perplexity(replicates=50)},
        pytest.param(
            {"compute_metrics": lambda p: {"shape": p.predictions.shape[0]}, "eval_spill_gb": 1e-4},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["loss only", "streaming", "whole set"],
)
def test_memory_does_not_grow_with_the_set(tmp_path: Path, options: dict[str, Any]) -> None:
    peak_bytes(tmp_path, 16, **options)  # what happens once happens here
    small, large = (peak_bytes(tmp_path, count, **options) for count in (128, 512))
    assert large < 1.2 * small + 20_000  # 4 times the logits would be 3 MB more


def test_what_is_kept_of_losses_does_not_grow() -> None:
    """There is one sum for all reductions that weighed every batch alike, not a list of batches."""
    normalizer = LossNormalizer(["labels"])
    total = LossSum(normalizer)
    labels = torch.randint(2, 11, (4, 7))
    labels[:, 5:] = -100
    for _ in range(50):
        total.add(torch.tensor(1.5), normalizer.count({"labels": labels}), None)
    # by targets with and without -100, shifted and not; by samples; by batches
    assert len(total._sums) == 6
    assert total.mean() == pytest.approx(1.5, rel=1e-6)
    assert all(isinstance(each.total, Tensor) and each.total.numel() == 1 for each in total._sums)


@pytest.mark.parametrize("num_batches", [1, 2])
def test_an_open_reading_is_said_where_batches_are_weighed(num_batches: int, caplog: pytest.LogCaptureFixture) -> None:
    normalizer = LossNormalizer(["labels"], coupled="It depends on the others")
    total = LossSum(normalizer)
    for number in range(num_batches):
        labels = torch.full((4, 7), 3)
        labels[:, 4 + 2 * number :] = -100
        total.add(torch.tensor(1.5 + number), normalizer.count({"labels": labels}), None)
    assert total.mean() == (1.5 if num_batches == 1 else 2.0)
    assert ("could not be seen" in caplog.text) == (num_batches > 1)
    assert ("It depends on the others" in caplog.text) == (num_batches > 1)


@pytest.mark.parametrize("per_sample", [False, True])
def test_a_reading_that_is_decided_late_counts_for_the_batches_before(tmp_path: Path, per_sample: bool) -> None:
    """The first batches are full, so tokens and samples tie; a ragged one at the end decides."""
    data = [sample for sample in tagging(40) if (sample["labels"] != -100).sum() > 0]
    full = [{"input_ids": s["input_ids"], "labels": s["input_ids"]} for s in data[:8]]
    found = [
        make_trainer(
            tmp_path, Tagger(per_sample=per_sample), eval_dataset=full + data[8:], per_device_eval_batch_size=size
        ).evaluate()["eval_loss"]
        for size in (2, 4, 100)
    ]
    assert found == [pytest.approx(found[0], rel=1e-5)] * 3


# ---- the model afterwards


@pytest.mark.parametrize("option", ["bf16_full_eval", "fp16_full_eval"])
def test_the_model_is_as_before_to_the_bit(tmp_path: Path, option: str) -> None:
    model = nn.ModuleDict({"inner": Classifier(dropout=0.5)})
    model["inner"].register_buffer("running", torch.rand(7))
    tied = model["inner"]
    tied.again = tied.first.weight  # type: ignore[assignment]
    tied.drop.eval()
    before, buffer, pointers = weights(tied).clone(), tied.running.clone(), [p.data_ptr() for p in tied.parameters()]
    trainer = make_trainer(tmp_path, tied, eval_dataset=DATA, compute_metrics=Accuracy(), **{option: True})
    types: set[torch.dtype] = set()
    handle = tied.second.register_forward_hook(lambda module, args, output: types.add(output.dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Classifier, "logits", half_logits)
        for _ in range(2):
            trainer.evaluate()
    handle.remove()
    assert types == {torch.bfloat16 if option == "bf16_full_eval" else torch.float16}
    assert torch.equal(weights(tied), before)
    assert torch.equal(tied.running, buffer)
    assert [p.data_ptr() for p in tied.parameters()] == pointers
    assert tied.again is tied.first.weight
    assert not tied.drop.training
    assert tied.first.training


def half_logits(self: Classifier, x: Tensor) -> Tensor:
    result: Tensor = self.second(self.drop(torch.tanh(self.first(x.to(self.first.weight.dtype)))))
    return result


def test_an_error_in_evaluation_restores_the_model(tmp_path: Path) -> None:
    model = Classifier()
    before = weights(model).clone()

    def fail(prediction: Any) -> dict[str, float]:
        raise RuntimeError("metric")

    class Failing(Accuracy):
        def update(self, prediction: Any, /) -> None:
            fail(prediction)

    for metric in (fail, Failing()):
        trainer = make_trainer(tmp_path, model, eval_dataset=DATA, compute_metrics=metric, bf16_full_eval=False)
        with pytest.raises(RuntimeError, match="metric"):
            trainer.evaluate()
    assert torch.equal(weights(model), before)
    assert model.training


def test_labels_that_compute_loss_takes_out(tmp_path: Path) -> None:
    """An overridden compute_loss may pop the labels: what the loss is divided by was counted before."""

    class Popping(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            logits = model.head(torch.tanh(model.embedding(inputs["input_ids"])))
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return (loss, {"logits": logits}) if return_outputs else loss

    found = [
        make_trainer(
            tmp_path, Tagger(), cls=Popping, eval_dataset=tagging(20), per_device_eval_batch_size=size
        ).evaluate()["eval_loss"]
        for size in (1, 3, 20)
    ]
    assert found == [pytest.approx(found[0], rel=1e-5)] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("bad", [None, 0.5])
def test_metrics_that_are_no_dict_are_named(tmp_path: Path, bad: Any) -> None:
    trainer = make_trainer(tmp_path, Classifier(), eval_dataset=DATA, compute_metrics=lambda prediction: bad)
    with pytest.raises(TypeError, match=f"compute_metrics returned {type(bad).__name__}"):
        trainer.evaluate()


def test_what_an_evaluation_cannot_give_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"eval_dataset": DATA, "compute_metrics": accuracy}
    assert "eval_accuracy" in make_trainer(tmp_path, Classifier(), **options).evaluate()
    assert not caplog.records
    trainer = make_trainer(tmp_path, Classifier(), label_names=["lables"], remove_unused_columns=False, **options)
    assert "eval_loss" not in trainer.evaluate()
    assert "no eval_loss" in caplog.text
    assert "compute_metrics was not called: the batches hold no labels under lables" in caplog.text
    caplog.clear()
    some = [{name: row[name] for name in row if number < 2 or name != "labels"} for number, row in enumerate(DATA)]
    options.update(eval_dataset=some, compute_metrics=lambda prediction: {}, per_device_eval_batch_size=2)
    make_trainer(tmp_path, Classifier(), **options).evaluate()
    assert f"was given the labels of 2 of {len(DATA)} samples" in caplog.text
    caplog.clear()
    make_trainer(tmp_path, Classifier(), eval_dataset=iter(()), compute_metrics=accuracy).evaluate()
    assert "yielded no batch" in caplog.text


def test_the_time_does_not_count_what_preparing_the_model_took() -> None:
    output = EvalLoopOutput(None, None, {"eval_model_preparation_time": 1000.0}, 4)
    assert timed_metrics(output, "eval", time.time() - 1001, 2)["eval_runtime"] < 500


def test_a_last_batch_is_never_dropped(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, Classifier(), eval_dataset=DATA, dataloader_drop_last=True, per_device_eval_batch_size=8
    )
    assert trainer.predict(DATA).predictions.shape == (50, 4)
    whole = make_trainer(tmp_path, Classifier(), eval_dataset=DATA).evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(whole)


def test_nothing_is_left_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    output = make_trainer(tmp_path, Classifier(), eval_spill_gb=0).predict(DATA)
    assert isinstance(output.predictions, np.memmap)
    assert list((tmp_path / "temporary").iterdir()) == []
