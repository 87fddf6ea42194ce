"""Whatever the samples come from: lists, datasets of Hugging Face, streams, workers; in every order of sampling."""

import gc
import logging
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow_but
from small_models import Classifier, Tagger, classification, losses, make_trainer, weights
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from paceline import MixedStream, ShuffleBuffer, Trainer, TrainerCallback

DATA = classification(24)


class Rows(IterableDataset[dict[str, Tensor]]):
    """A stream of unknown length, the same at each pass."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(DATA)


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def workers() -> set[int]:
    return {child.pid or 0 for child in torch.multiprocessing.active_children()}


class SeenWorkers(TrainerCallback):
    """The worker processes alive after each evaluation and each update."""

    def __init__(self) -> None:
        self.others = workers()
        self.after_evaluations: list[set[int]] = []
        self.after_updates: list[set[int]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after_evaluations.append(workers() - self.others)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after_updates.append(workers() - self.others)


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", slow_but([True], [False, True]))
@pytest.mark.parametrize("persistent", slow_but([True], [False, True]))
def test_persistent_workers_evaluate_a_whole_run(tmp_path: Path, persistent: bool, is_stream: bool) -> None:
    gc.collect()
    seen = SeenWorkers()
    trainer = make_trainer(
        tmp_path,
        Classifier(),
        DATA,
        eval_dataset={"a": Rows() if is_stream else DATA[:8], "b": DATA[8:]},
        callbacks=[seen],
        num_train_epochs=2,
        eval_strategy="steps",
        eval_steps=3,
        dataloader_num_workers=1,
        dataloader_persistent_workers=persistent,
    )
    trainer.train()
    assert workers() == seen.others
    assert len(seen.after_evaluations) == 8
    new = [after - before for before, after in zip(seen.after_updates[2::3], seen.after_evaluations[1::2], strict=True)]
    assert [len(pids) for pids in new] == ([2, 0, 0, 0] if persistent else [0, 0, 0, 0])
    rows = [row["eval_a_loss"] for row in trainer.state.log_history if "eval_a_loss" in row]
    for _ in range(2):
        assert trainer.evaluate()["eval_a_loss"] == rows[-1]
        assert trainer.predict(DATA).predictions.shape == (24, 4)
    assert workers() == seen.others


class Broken(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 7:
            raise OSError("sample 7 cannot be read")
        return DATA[index]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", slow_but([True], [False, True]))
def test_workers_end_with_an_error_in_the_data(tmp_path: Path, persistent: bool) -> None:
    gc.collect()
    others = workers()
    options: dict[str, Any] = {"dataloader_num_workers": 2, "dataloader_persistent_workers": persistent}
    training = make_trainer(tmp_path, Classifier(), Broken(), **options)
    evaluating = make_trainer(tmp_path, Classifier(), DATA, eval_dataset=Broken(), eval_strategy="epoch", **options)
    for act in (training.train, evaluating.evaluate, evaluating.train):
        with pytest.raises(OSError, match="sample 7") as caught:
            act()
        assert workers() == others
        del caught


def test_the_training_data_can_be_evaluated_while_it_is_read(tmp_path: Path) -> None:
    """Its loader's workers go on."""

    class EvaluateOnce(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                trainer.evaluation_loop(kwargs["train_dataloader"], "Evaluation")

    trainer = make_trainer(tmp_path, Classifier(), DATA, callbacks=[EvaluateOnce()], dataloader_num_workers=1)
    trainer.train()
    assert trainer.state.global_step == 6


class Seen(TrainerCallback):
    wants = frozenset({"inputs"})

    def __init__(self) -> None:
        self.batches: list[dict[str, Tensor]] = []
        self.per_update: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, inputs: Any = None, **kwargs: Any) -> None:
        self.batches += inputs
        self.per_update.append(sum(len(batch["labels"]) for batch in inputs))


def run(folder: Path, data: Any = DATA, model: Any = None, resume: Any = None, **options: Any) -> Any:
    trainer = make_trainer(folder, model or Classifier(), data, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("expected"), num_train_epochs=2)


def table() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict(
        {
            "x": [sample["x"].tolist() for sample in DATA],
            "labels": [int(sample["labels"]) for sample in DATA],
            "text": [f"sample {n}" for n in range(len(DATA))],
            "id": list(range(len(DATA))),
        }
    )


SOURCES: dict[str, Any] = {
    "tuples": lambda: [(sample["x"], sample["labels"]) for sample in DATA],
    "tensors": lambda: TensorDataset(torch.stack([s["x"] for s in DATA]), torch.stack([s["labels"] for s in DATA])),
    "numpy": lambda: [{"x": s["x"].numpy(), "labels": int(s["labels"])} for s in DATA],
    "table": table,
    "table, torch format": lambda: table().with_format("torch"),
    "table, transform": lambda: table().with_transform(
        lambda rows: {"x": [torch.tensor(x) for x in rows["x"]], "labels": rows["labels"]}
    ),
    "dicts with more in them": lambda: [{**sample, "text": "a", "weight": 1.0} for sample in DATA],
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_the_same_run(tmp_path: Path, expected: Any, name: str) -> None:
    trainer = run(tmp_path, SOURCES[name](), num_train_epochs=2)
    assert losses(trainer) == losses(expected)
    assert torch.equal(weights(trainer.model), weights(expected.model))


@pytest.mark.parametrize(
    "options",
    [
        {"dataloader_num_workers": 2},
        {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
        {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 4},
        {"dataloader_pin_memory": False},
    ],
    ids=str,
)
def test_workers_change_nothing(tmp_path: Path, expected: Any, options: dict[str, Any]) -> None:
    trainer = run(tmp_path, num_train_epochs=2, eval_strategy="epoch", eval_dataset=DATA, **options)
    assert losses(trainer) == losses(expected)
    assert trainer.predict(DATA).predictions.shape == (24, 4)


def test_what_was_dropped_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="paceline")
    run(tmp_path, table(), num_train_epochs=2)
    lines = [line for line in caplog.messages if "text" in line and "id" in line]
    assert len(lines) == 1


def test_unused_columns_may_stay(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        seen.append(set(samples[0]))
        return {
            "x": torch.tensor([sample["x"] for sample in samples]),
            "labels": torch.tensor([sample["labels"] for sample in samples]),
        }

    run(tmp_path, table(), data_collator=collate, remove_unused_columns=False)
    assert seen[0] == {"x", "labels", "text", "id"}
    seen.clear()
    run(tmp_path, table(), data_collator=collate)
    assert seen[0] == {"x", "labels"}


def test_nothing_left_is_an_error_that_names_the_columns(tmp_path: Path) -> None:
    data = table().remove_columns(["x", "labels"])
    with pytest.raises(ValueError, match=r"(?s)id.*text|text.*id"):
        run(tmp_path, data)


# ---- streams


def huggingface_stream() -> Any:
    return table().to_iterable_dataset(num_shards=3)


STREAMS = {"own": Rows, "datasets": huggingface_stream}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_ends_by_max_steps(tmp_path: Path, name: str, workers: int) -> None:
    seen = Seen()
    options: dict[str, Any] = {"max_steps": 9, "dataloader_num_workers": workers, "callbacks": [seen]}
    trainer = run(tmp_path, STREAMS[name](), **options)
    assert trainer.state.global_step == 9
    first = torch.cat([batch["x"] for batch in seen.batches])[:24]
    if workers == 0:  # each pass gives every sample once
        assert sorted(first.tolist()) == sorted(sample["x"].tolist() for sample in DATA)
    else:
        num_rows = len({tuple(row) for row in first.tolist()})
        assert num_rows >= 20  # the workers share the samples, and do not each give all


@pytest.mark.parametrize("workers", slow_but([0], [0, 2]))
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_resumes(tmp_path: Path, name: str, workers: int) -> None:
    options: dict[str, Any] = {
        "max_steps": 9,
        "dataloader_num_workers": workers,
        "save_strategy": "steps",
        "save_steps": 4,
        "model": Classifier(dropout=0.1),
    }
    whole = run(tmp_path / "whole", STREAMS[name](), **options)
    options["model"] = Classifier(dropout=0.1)
    run(tmp_path / "parts", STREAMS[name](), callbacks=[StopAt(4)], **options)
    options["model"] = Classifier(dropout=0.1)
    parts = run(tmp_path / "parts", STREAMS[name](), resume=True, **options)
    assert torch.equal(weights(parts.model), weights(whole.model))
    assert losses(parts) == losses(whole)


def test_a_stream_needs_max_steps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_steps"):
        run(tmp_path, Rows())


def test_a_stream_can_be_evaluated_and_predicted(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Classifier(), eval_dataset=Rows(), per_device_eval_batch_size=5)
    whole = make_trainer(tmp_path, Classifier(), eval_dataset=DATA)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(whole.evaluate()["eval_loss"])
    assert trainer.predict(Rows()).predictions.shape == (24, 4)


def parts_of_a_stream() -> tuple[Any, Any]:
    """Two streams that are made from one."""
    stream = table().select_columns(["x", "labels"]).to_iterable_dataset(num_shards=3).map(dict)
    return stream.skip(6), stream.take(6)


def collate_lists(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0]}


TRAINED: dict[str, Callable[[Any], Any]] = {
    "itself": lambda stream: stream,
    "shuffled": lambda stream: ShuffleBuffer(stream, 3),
    "mixed": lambda stream: MixedStream({"a": stream.take(9), "b": stream.skip(9)}, stop="all_exhausted"),
}


@pytest.mark.parametrize("kind", TRAINED)
def test_an_evaluation_leaves_the_position_of_a_stream(tmp_path: Path, kind: str) -> None:
    """Also of a training stream that is made from the same one as the evaluation set."""

    def run_parts(folder: Path, **options: Any) -> Trainer:
        train, evaluated = parts_of_a_stream()
        next(iter(train))  # looked at before
        return run(
            folder,
            TRAINED[kind](train),
            max_steps=8,
            save_strategy="steps",
            save_steps=5,
            eval_strategy="steps",
            eval_steps=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1,
            eval_dataset=evaluated,
            data_collator=collate_lists,
            **options,
        )

    whole = run_parts(tmp_path / "whole")
    losses_of_evaluations = [row["eval_loss"] for row in whole.state.log_history if "eval_runtime" in row]
    assert len(losses_of_evaluations) == 8
    run_parts(tmp_path / "parts", callbacks=[StopAt(5)])
    parts = run_parts(tmp_path / "parts", resume=True)
    assert losses(parts) == losses(whole)


def test_the_training_stream_as_evaluation_set(tmp_path: Path) -> None:
    """Refused if it has a single position, which both would move."""
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
    shuffled, plain, stream = ShuffleBuffer(Rows(), 3), Rows(), parts_of_a_stream()[0]
    for given in (shuffled, {"a": DATA, "b": shuffled}):
        with pytest.raises(ValueError, match="eval_dataset and train_dataset are the same ShuffleBuffer"):
            run(tmp_path, shuffled, eval_dataset=given, **options)
    run(tmp_path, shuffled, eval_dataset=shuffled, dataloader_num_workers=1, **options)
    for data, collator in ((plain, None), (stream, collate_lists)):
        seen = Seen()
        trainer = run(tmp_path, data, eval_dataset=data, data_collator=collator, callbacks=[seen], **options)
        assert len({tuple(row) for batch in seen.batches for row in batch["x"].tolist()}) == 12
        assert len({row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row}) == 3


@pytest.mark.parametrize("kind", TRAINED)
def test_a_stream_is_trained_on_and_evaluated_again_and_again(tmp_path: Path, kind: str) -> None:
    stream = TRAINED[kind](parts_of_a_stream()[0])
    trainer = make_trainer(tmp_path, Classifier(), stream, data_collator=collate_lists, max_steps=3)
    found = [trainer.evaluate(stream)["eval_loss"] for _ in range(4)]
    assert found == found[:1] * 4
    for _ in range(4):
        trainer.train()
        assert trainer.state.global_step == 3


def test_a_stream_that_gives_nothing_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Empty(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    trainer = run(tmp_path, Empty(), max_steps=3)
    assert trainer.state.global_step == 0
    assert "no batch" in caplog.text


# ---- orders


def texts(num_samples: int = 40) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    samples = []
    for _ in range(num_samples):
        length = int(torch.randint(2, 12, (), generator=generator))
        tokens = torch.randint(1, 11, (length,), generator=generator)
        samples.append({"input_ids": tokens, "labels": tokens})
    return samples


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], batch_first=True),
        "labels": torch.nn.utils.rnn.pad_sequence([s["labels"] for s in samples], batch_first=True, padding_value=-100),
    }


def padding(batches: list[dict[str, Tensor]]) -> int:
    return sum(int((batch["labels"] == -100).sum()) for batch in batches)


@pytest.mark.parametrize("strategy", ["random", "sequential", "group_by_length", "batch_rebalance"])
def test_every_order_sees_each_sample_once_an_epoch_and_resumes(tmp_path: Path, strategy: str) -> None:
    data = texts()
    options: dict[str, Any] = {
        "train_sampling_strategy": strategy,
        "data_collator": pad,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    seen = Seen()
    whole = run(tmp_path / "whole", data, Tagger(), callbacks=[seen], **options)
    assert whole.state.global_step == 10
    assert seen.per_update == [8] * 10
    rows = [tuple(t for t in row.tolist() if t != -100) for batch in seen.batches for row in batch["labels"]]
    all_rows = sorted(tuple(sample["labels"].tolist()) for sample in data)
    assert sorted(rows[:40]) == sorted(rows[40:]) == all_rows
    assert (rows[:40] == rows[40:]) == (strategy == "sequential")
    run(tmp_path / "parts", data, Tagger(), callbacks=[StopAt(3)], **options)
    parts = run(tmp_path / "parts", data, Tagger(), resume=True, **options)
    assert torch.equal(weights(parts.model), weights(whole.model))
    assert losses(parts) == losses(whole)


def test_grouping_saves_padding(tmp_path: Path) -> None:
    found = {}
    for strategy in ("random", "group_by_length"):
        seen = Seen()
        run(tmp_path, texts(80), Tagger(), callbacks=[seen], data_collator=pad, train_sampling_strategy=strategy)
        found[strategy] = padding(seen.batches)
    assert found["group_by_length"] < 0.6 * found["random"]


def test_lengths_may_be_a_column(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = texts(24)
    rows = {name: [sample[name].tolist() for sample in data] for name in data[0]}
    columns = {**rows, "length": [len(row) for row in rows["labels"]]}

    def tensors(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return pad([{name: torch.tensor(sample[name]) for name in ("input_ids", "labels")} for sample in samples])

    options: dict[str, Any] = {"data_collator": tensors, "train_sampling_strategy": "group_by_length"}
    read = run(tmp_path, datasets.Dataset.from_dict(rows), Tagger(), **options)
    given = run(tmp_path, datasets.Dataset.from_dict(columns), Tagger(), **options)
    assert losses(read) == losses(given)


def test_an_evaluation_set_by_name(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Classifier(), eval_dataset={"a": DATA[:8], "b": DATA[8:]})
    both = trainer.evaluate()
    assert trainer.evaluate(eval_dataset=DATA[:8])["eval_loss"] == pytest.approx(both["eval_a_loss"])
    assert trainer.evaluate(eval_dataset={"c": DATA[8:]})["eval_c_loss"] == pytest.approx(both["eval_b_loss"])
    assert len(trainer.get_eval_dataloader("b").dataset) == 16


# ---- columns that forward does not take


class Forecaster(nn.Module):
    """Makes its loss of values to come, under a name that tells of no label."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, past_values: torch.Tensor, future_values: torch.Tensor | None = None, **kwargs: Any) -> Any:
        assert not kwargs
        forecast = self.inner(past_values)
        return forecast if future_values is None else (functional.mse_loss(forecast, future_values), forecast)


def series(kind: str) -> Any:
    start = datetime(2026, 1, 1)
    rows = [
        {"past_values": [row / 8] * 4, "future_values": [0.0, 1.0], "timestamp": start + timedelta(row), "id": "a"}
        for row in range(8)
    ]
    if kind == "rows":
        return rows
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(rows)
    return table if kind == "table" else table.to_iterable_dataset()


@pytest.mark.parametrize("kind", ["rows", "table", "stream"])
def test_columns_are_left_out_where_no_label_is_known(tmp_path: Path, kind: str) -> None:
    trainer = make_trainer(tmp_path, Forecaster(), series(kind), eval_dataset=series(kind), max_steps=2)
    assert trainer.label_names == []
    trainer.train()
    assert len(losses(trainer)) == 2
    assert "eval_runtime" in trainer.evaluate()


class OwnLoss(Trainer):
    """Hands the model the whole batch, as a loss written for the reference does."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        return outputs if return_outputs else outputs[0]


@pytest.mark.parametrize("kind", ["rows", "table", "stream"])
@pytest.mark.parametrize("collates", [False, True])
def test_they_are_left_out_where_the_loss_is_the_users_own(tmp_path: Path, kind: str, collates: bool) -> None:
    seen: set[str] = set()

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.update(*rows)
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

    options: dict[str, Any] = {"data_collator": collate} if collates else {}
    trainer = make_trainer(tmp_path, Forecaster(), series(kind), cls=OwnLoss, max_steps=2, **options)
    trainer.train()
    assert len(losses(trainer)) == 2
    assert seen == ({"past_values", "future_values"} if collates else set())


def test_a_loss_of_the_users_own_gets_labels_and_what_it_names(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    class Own(OwnLoss):
        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            seen.append(set(inputs))
            inputs.pop("weight").mean()
            return super().compute_loss(model, {name: inputs[name] for name in ("past_values", "future_values")})

    data = [{**row, "weight": 1.0, "labels": 1} for row in series("rows")]
    for row in data:
        del row["timestamp"]
    make_trainer(tmp_path / "labels", Forecaster(), data, cls=Own).train()
    make_trainer(tmp_path / "all", Forecaster(), data, cls=Own, remove_unused_columns=False).train()
    assert seen[0] == {"past_values", "future_values", "labels", "weight"}
    assert seen[-1] == {"past_values", "future_values", "labels", "id", "weight"}
