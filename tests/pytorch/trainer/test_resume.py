"""Checkpoint, stop, go on: the run ends where the undisturbed one does, bit for bit."""

import itertools
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow_but
from small_models import Classifier, classification, losses, make_trainer, weights
from torch.utils.data import IterableDataset

from paceline import Trainer, TrainerCallback
from paceline.checkpoint.manifest import seal
from paceline.pytorch.checkpoint.files import save_model

DATA = classification(26)


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


class StopAtEpoch(TrainerCallback):
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


class Augmented(torch.utils.data.Dataset[dict[str, Any]]):
    """Draws on torch's, numpy's and Python's generators in the process that loads."""

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import random

        import numpy as np

        noise = torch.randn(8) + float(np.random.rand()) + random.random()
        return {"x": DATA[index]["x"] + 0.1 * noise, "labels": DATA[index]["labels"]}


def run(folder: Path, *, stop: int | None = None, resume: Any = None, data: Any = DATA, **options: Any) -> Any:
    model = Classifier(dropout=0.2)
    trainer = make_trainer(
        folder,
        model,
        data,
        **{
            "save_strategy": "steps",
            "save_steps": 1,
            "num_train_epochs": 3,
            "gradient_accumulation_steps": 2,
            "lr_scheduler_type": "cosine",
            "callbacks": [StopAt(stop)] if stop else None,
            **options,
        },
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("data", [DATA, Augmented()], ids=["plain", "augmented"])
@pytest.mark.parametrize("workers", slow_but([0], [0, 2]))
def test_twice_interrupted_is_bit_identical(tmp_path: Path, data: Any, workers: int) -> None:
    options = {"data": data, "dataloader_num_workers": workers}
    whole = run(tmp_path / "whole", **options)
    run(tmp_path / "parts", stop=3, **options)  # in the middle of the first epoch
    run(tmp_path / "parts", stop=8, resume=True, **options)  # at the end of the second
    parts = run(tmp_path / "parts", resume=True, **options)
    assert torch.equal(weights(whole.model), weights(parts.model))
    assert losses(whole) == losses(parts)
    assert whole.state.log_history[:-1] == parts.state.log_history[:-1]  # the last row holds times


def test_a_finished_run_trains_no_more(tmp_path: Path) -> None:
    first = run(tmp_path)
    again = run(tmp_path, resume=True)
    assert again.state.global_step == first.state.global_step == 12
    assert torch.equal(weights(first.model), weights(again.model))


class Seen(TrainerCallback):
    wants = frozenset({"inputs"})

    def __init__(self) -> None:
        self.rows: list[tuple[float, ...]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, inputs: Any = None, **kwargs: Any) -> None:
        self.rows += [tuple(row.tolist()) for batch in inputs for row in batch["x"]]


def test_another_batch_size_sees_every_sample_once(tmp_path: Path) -> None:
    first, second = Seen(), Seen()
    run(tmp_path, callbacks=[first, StopAt(2)], num_train_epochs=1, per_device_train_batch_size=2)
    run(tmp_path, callbacks=[second], num_train_epochs=1, per_device_train_batch_size=4, resume=True)
    assert sorted(first.rows + second.rows) == sorted(tuple(sample["x"].tolist()) for sample in DATA)


class EndsEpochs(TrainerCallback):
    """Leaves every epoch after three updates."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step % 3 == 0


@pytest.mark.parametrize("step", [2, 3, 4, 6, 7])  # at 3 and 6 the epoch is about to end
def test_an_epoch_that_a_callback_ended_leaves_the_schedule_alone(tmp_path: Path, step: int) -> None:
    whole = run(tmp_path, callbacks=[EndsEpochs()])
    checkpoint = str(tmp_path / f"checkpoint-{step}")
    parts = run(tmp_path / "parts", callbacks=[EndsEpochs()], resume=checkpoint)
    assert parts.state.max_steps == whole.state.max_steps == 12
    assert parts.state.global_step == whole.state.global_step == 9
    assert torch.equal(weights(whole.model), weights(parts.model))


def test_resumed_again_a_run_of_another_batch_size_keeps_its_length(tmp_path: Path) -> None:
    run(tmp_path / "one", stop=5)
    other = {"gradient_accumulation_steps": 1}
    whole = run(tmp_path / "whole", resume=str(tmp_path / "one/checkpoint-5"), **other)
    run(tmp_path / "parts", resume=str(tmp_path / "one/checkpoint-5"), stop=9, **other)
    parts = run(tmp_path / "parts", resume=True, **other)
    assert parts.state.max_steps == whole.state.max_steps
    assert torch.equal(weights(whole.model), weights(parts.model))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("workers", slow_but([0], [0, 2]))
@pytest.mark.parametrize(
    ("before", "after"),
    slow_but([((4, 1), (2, 3))], [((2, 1), (4, 1)), ((4, 1), (2, 3)), ((3, 2), (3, 1)), ((2, 1), (5, 2))]),
    ids=lambda sizes: "x".join(map(str, sizes)),
)
def test_another_split_sees_every_sample_once(
    tmp_path: Path, stream: bool, workers: int, before: tuple[int, int], after: tuple[int, int]
) -> None:
    def split(sizes: tuple[int, int]) -> dict[str, Any]:
        return {"per_device_train_batch_size": sizes[0], "gradient_accumulation_steps": sizes[1]}

    options: dict[str, Any] = {"dataloader_num_workers": workers, "num_train_epochs": 1}
    if stream:
        options["max_steps"] = 100
    if stream and workers:
        options["dataloader_num_workers"] = 1  # each of two would read the whole of this stream
    first, second = Seen(), Seen()
    data: Any = Stream() if stream else DATA
    run(tmp_path, data=data, callbacks=[first, StopAt(2)], **split(before), **options)
    resumed = run(
        tmp_path,
        data=Stream() if stream else DATA,
        callbacks=[second, StopAtEpoch()],
        **split(after),
        **options,
        resume=True,
    )
    assert sorted(first.rows + second.rows) == sorted(tuple(sample["x"].tolist()) for sample in DATA)
    left = 26 - 2 * before[0] * before[1]
    assert resumed.state.global_step == 2 - (-left // (after[0] * after[1]))


@pytest.mark.slow
def test_another_number_of_workers_goes_on_alike(tmp_path: Path) -> None:
    """Without random augmentation, workers change nothing."""
    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", stop=3)
    run(tmp_path / "parts", stop=5, resume=True, dataloader_num_workers=2)
    parts = run(tmp_path / "parts", resume=True, dataloader_num_workers=1)
    assert torch.equal(weights(whole.model), weights(parts.model))


KEPT = {"num_workers": 2, "persistent_workers": True}


@pytest.mark.filterwarnings("ignore:.*set_vital.*")
@pytest.mark.parametrize("saved", ["steps", "epoch"])
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("torch.utils.data", {"num_workers": 0}),
        pytest.param("torch.utils.data", {"num_workers": 2}, marks=pytest.mark.slow),
        pytest.param("torch.utils.data", KEPT, marks=pytest.mark.slow),
        pytest.param("torch.utils.data", {**KEPT, "generator": None}, marks=pytest.mark.slow),
        ("torchdata.stateful_dataloader", {"num_workers": 0}),
        # torchdata waits for each worker that it ends, half a minute in all
        pytest.param("torchdata.stateful_dataloader", {"num_workers": 2}, marks=pytest.mark.slow),
    ],
)
def test_someone_elses_loader_goes_on_alike(tmp_path: Path, kind: str, workers: dict[str, Any], saved: str) -> None:
    library = pytest.importorskip(kind)
    is_torch = kind.startswith("torch.")
    data: Any = Augmented() if is_torch and workers["num_workers"] else DATA

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            loader = library.DataLoader if is_torch else library.StatefulDataLoader
            options = {"generator": torch.Generator().manual_seed(5), **workers}
            return loader(data, batch_size=4, shuffle=True, collate_fn=self.data_collator, **options)

    options = {"cls": Own, "save_strategy": saved}
    whole = run(tmp_path / "whole", **options)
    run(tmp_path / "parts", stop=6, **options)
    run(tmp_path / "parts", stop=8, resume=True, **options)
    parts = run(tmp_path / "parts", resume=True, **options)
    assert torch.equal(weights(whole.model), weights(parts.model))
    assert losses(whole) == losses(parts)


def test_workers_kept_by_someone_elses_loader_end_with_the_run(tmp_path: Path) -> None:
    """The garbage collector would wait 5 s for each."""
    made = []

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            made.append(torch.utils.data.DataLoader(DATA, batch_size=4, collate_fn=self.data_collator, **KEPT))
            return made[-1]

    before = set(multiprocessing.active_children())
    run(tmp_path, cls=Own)
    assert made[0]._iterator is None
    assert set(multiprocessing.active_children()) <= before
    assert len(list(made[0])) == len(made[0])  # it is usable as before
    made[0]._iterator._shutdown_workers()


class KeepsWorkers:
    """A loader with a state, as torchdata's with persistent workers: nothing but what is asked of it here."""

    persistent_workers = True

    def __init__(self) -> None:
        self.place = 0

    def __len__(self) -> int:
        return len(DATA) // 4

    def __iter__(self) -> Iterator[Any]:
        while self.place < len(self):
            self.place += 1
            yield torch.utils.data.default_collate([DATA[4 * self.place - 4 + index] for index in range(4)])
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def test_workers_that_a_loader_keeps_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return KeepsWorkers()

    run(tmp_path, stop=3, cls=Own)
    assert "persistent_workers" not in caplog.text
    run(tmp_path, stop=4, resume=True, cls=Own)
    assert caplog.text.count("persistent_workers=True") == 1


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, stop=3)
    path = tmp_path / "checkpoint-3" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    resumed = run(tmp_path, resume=True, stop=4)
    assert resumed.state.global_step == 4
    assert "checkpoint-3" in caplog.text
    path.write_bytes(content)
    with pytest.raises(ValueError, match="checkpoint-3"):
        run(tmp_path, resume=str(path.parent))


def test_nothing_to_resume_from_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint"):
        run(tmp_path, resume=True)


class Stream(IterableDataset[dict[str, Any]]):
    """A stream that knows its position."""

    def __init__(self) -> None:
        self.position = 0
        self.read = 0

    def __iter__(self) -> Any:
        while self.position < len(DATA):
            self.position += 1
            self.read += 1
            yield DATA[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_a_stream_with_a_state_reads_nothing_twice(tmp_path: Path) -> None:
    options = {"num_train_epochs": 1, "max_steps": 3}
    whole = run(tmp_path / "whole", data=Stream(), **options)
    run(tmp_path / "parts", data=Stream(), stop=2, **options)
    stream = Stream()
    parts = run(tmp_path / "parts", data=stream, resume=True, **options)
    assert torch.equal(weights(whole.model), weights(parts.model))
    assert stream.read <= 8


class Continuing(Stream):
    """Each epoch is the next eight samples."""

    def __iter__(self) -> Any:
        for _ in range(8):
            self.position += 1
            yield DATA[(self.position - 1) % len(DATA)]


def test_a_stream_that_goes_on_over_epochs_goes_on_after_one(tmp_path: Path) -> None:
    options = {"max_steps": 6, "gradient_accumulation_steps": 1, "save_strategy": "epoch"}
    whole = run(tmp_path, data=Continuing(), **options)
    for step in (2, 4):
        parts = run(tmp_path / "parts", data=Continuing(), resume=str(tmp_path / f"checkpoint-{step}"), **options)
        assert torch.equal(weights(whole.model), weights(parts.model))


def test_added_and_removed_callbacks_do_not_matter(tmp_path: Path) -> None:
    from paceline import EarlyStoppingCallback

    options = {
        "eval_dataset": DATA[:5],
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }
    run(tmp_path, stop=2, **options)
    added = run(tmp_path, resume=True, callbacks=[EarlyStoppingCallback(3), StopAt(4)], **options)
    assert added.state.global_step == 4
    assert run(tmp_path, resume=True, **options).state.global_step == 12


def test_changed_arguments_are_listed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, stop=3)
    run(tmp_path, stop=4, resume=True, learning_rate=0.5, logging_steps=2, eval_steps=7, run_name="other")
    lines = [record.message for record in caplog.records if "Changed since" in record.message]
    assert len(lines) == 1
    assert "checkpoint-3" in lines[0]
    assert "learning_rate 5e-05 -> 0.5" in lines[0]
    assert "eval_steps None -> 7" in lines[0]
    assert not any(name in lines[0] for name in ("run_name", "logging", "output_dir"))
    caplog.clear()
    run(tmp_path, resume=True, learning_rate=0.5, eval_steps=7)
    assert "Changed since" not in caplog.text


def test_changed_options_that_the_restored_optimizer_overrides_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class SetRate(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.learning_rate = 0.5

    def rates(trainer: Any) -> list[float]:
        return [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]

    options: dict[str, Any] = {"lr_scheduler_type": "constant", "logging_steps": 1, "weight_decay": 0.0}
    changed: dict[str, Any] = {**options, "learning_rate": 0.5, "weight_decay": 0.1, "adam_beta1": 0.5, "seed": 1}
    run(tmp_path, stop=2, learning_rate=0.25, **options)
    resumed = run(tmp_path, stop=3, resume=True, **changed)
    assert rates(resumed) == [0.25] * 3
    kept = "keep the checkpoint's values of learning_rate, weight_decay, adam_beta1. To change them, set "
    assert caplog.text.count(kept + "control.learning_rate in a callback's on_train_begin, or start a new run") == 1
    caplog.clear()
    options |= {"warmup_steps": 1, "max_grad_norm": 0.5, "learning_rate": 0.25}
    resumed = run(tmp_path, resume=True, **{**options, "callbacks": [SetRate(), StopAt(4)]})
    assert rates(resumed)[3:] == [0.5]
    assert "max_grad_norm 1.0 -> 0.5" in caplog.text
    assert "keep the checkpoint's values" not in caplog.text


def test_ratio_intervals_follow_the_length_of_a_resumed_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paceline")
    options: dict[str, Any] = {
        "data": classification(64), "gradient_accumulation_steps": 1, "num_train_epochs": 2,
        "save_steps": 0.25, "logging_steps": 0.25, "eval_steps": 0.125,
    }  # fmt: skip
    run(tmp_path, stop=16, **options)
    caplog.clear()
    resumed = run(tmp_path, resume=True, per_device_train_batch_size=8, **options)
    state = resumed.state
    assert (state.max_steps, state.logging_steps, state.eval_steps, state.save_steps) == (24, 6, 3, 6)
    assert [row["step"] for row in state.log_history if "loss" in row] == [8, 16, 18, 24]
    assert "save_steps=0.25 of 24 steps: every 6." in caplog.text
    assert "save_steps=0.25 of 16 steps" not in caplog.text


def test_input_tokens_in_another_unit_are_counted_from_the_resume_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Named(Classifier):
        main_input_name = "x"

    def count(stop: int, how: str) -> int:
        trainer = make_trainer(
            tmp_path, Named(), DATA, save_strategy="steps", save_steps=1, callbacks=[StopAt(stop)],
            include_num_input_tokens_seen=how,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint="auto")
        return int(trainer.state.num_input_tokens_seen)

    per_step = 4 * 8
    assert count(2, "no") == 0
    assert count(3, "all") == per_step
    assert "include_num_input_tokens_seen='all', and it was 'no' before" in caplog.text
    assert "include_num_input_tokens_seen no -> all" in caplog.text
    caplog.clear()
    assert count(4, "all") == 2 * per_step
    assert "include_num_input_tokens_seen" not in caplog.text
    assert count(6, "non_padding") == 2 * per_step
    assert "num_input_tokens_seen counts the tokens since optimizer step 4 only" in caplog.text


@pytest.mark.parametrize("changed", [{"metric_for_best_model": "score"}, {"greater_is_better": True}])
def test_a_model_that_another_metric_chose_is_not_the_best(
    tmp_path: Path, changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    scores = itertools.count()
    options: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_dataset": DATA[:8],
        "compute_metrics": lambda prediction: {"score": next(scores)},
        "load_best_model_at_end": True,
    }
    first = run(tmp_path, stop=2, **options)
    assert first.state.best_metric is not None
    second = run(tmp_path, stop=4, resume=True, **options, **changed)
    name = f"eval_{changed.get('metric_for_best_model', 'loss')}"
    values = [row[name] for row in second.state.log_history if name in row and row["step"] > 2]
    assert second.state.best_metric == max(values)
    assert second.state.best_global_step > 2
    assert "was chosen by loss" in caplog.text
    caplog.clear()
    run(tmp_path, stop=4, resume=True, **options, **changed)
    assert "was chosen by" not in caplog.text


def test_a_state_that_cannot_be_saved_names_its_callback(tmp_path: Path) -> None:
    class Odd(TrainerCallback):
        def state_dict(self) -> dict[str, Any]:
            return {"file": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(TypeError, match="callback Odd cannot be saved"):
        run(tmp_path, callbacks=[Odd()])


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    """Keys that are no text, tuples and sets, which JSON would change."""
    state = {"counts": {0: 5, (1, 2): 3, frozenset({1}): 1}, "seen": {1, 2}, "pair": (1, "a"), "number": np.int64(3)}
    given: list[Any] = []

    class Odd(TrainerCallback):
        def state_dict(self) -> dict[str, Any]:
            return state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            given.append(state)

    run(tmp_path, callbacks=[Odd()], max_steps=4, save_strategy="steps", save_steps=2)
    run(tmp_path, callbacks=[Odd()], max_steps=6, resume=True)
    assert given == [state]
    assert type(given[0]["pair"]) is tuple


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("before", ["whole", "shards"])
def test_weights_that_their_owner_stored_in_another_form(
    tmp_path: Path, named: bool, before: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As `save_pretrained(checkpoint, max_shard_size=...)` leaves it: the run goes on as it would have."""
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    whole = make_trainer(tmp_path / "whole", Classifier(), DATA, **options)
    whole.train()
    stopped = make_trainer(tmp_path / "run", Classifier(), DATA, callbacks=[StopAt(3)], **options)
    stopped.train()
    checkpoint = tmp_path / "run" / "checkpoint-3"
    if before == "shards":  # of a run whose model is large; the owner merged them
        save_model(stopped.model, checkpoint, max_shard_bytes=100)
        (checkpoint / "manifest.json").unlink()
        seal(checkpoint)
    save_model(stopped.model, checkpoint, max_shard_bytes=100 if before == "whole" else None)
    assert bool(list(checkpoint.glob("model-*-of-*.safetensors"))) == (before == "whole")
    trainer = make_trainer(tmp_path / "run", Classifier(), DATA, **options)
    trainer.train(resume_from_checkpoint=str(checkpoint) if named else True)
    assert "was replaced by model" in caplog.text
    assert torch.equal(weights(trainer.model), weights(whole.model))
    shard = next(checkpoint.glob("model*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"model.* is missing"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
