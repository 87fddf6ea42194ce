"""`eval_samples`: the rows, generated text, predictions and pictures; training stays the same to the bit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import generation_job
import numpy as np
import processes
import pytest
import samples_job
import torch
from small_models import Classifier
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from paceline import (
    EvaluationSamples,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    UnsupportedOption,
)
from paceline.pytorch.evaluation.sample_cells import montage, picture_of, results_of
from paceline.pytorch.evaluation.sample_text import Reader

STEPS = 4


class Drawing(torch.utils.data.Dataset[Any]):
    """Rows that draw random numbers when they are read."""

    def __init__(self, number: int = 12) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.rand(8) + np.random.rand(), "labels": torch.tensor(index % 4)}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(6):
            yield {"x": torch.full((8,), float(index)), "labels": torch.tensor(index % 4)}


def make(
    folder: Path,
    model: nn.Module,
    train: Any,
    evaluation: Any,
    kind: Any = Trainer,
    arguments: Any = None,
    **given: Any,
) -> Any:
    options: dict[str, Any] = {
        "max_steps": STEPS,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 2,
        "learning_rate": 0.05,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    parts = {
        name: given.pop(name)
        for name in ("callbacks", "processing_class", "compute_loss_func", "data_collator")
        if name in given
    }
    args = (arguments or TrainingArguments)(str(folder), **{**options, **given})
    return kind(model, args, train_dataset=train, eval_dataset=evaluation, **parts)


def table(folder: Path, name: str = "eval/samples", step: int = STEPS) -> dict[str, Any]:
    path = folder / "media" / f"{name.replace('/', '%2F')}-{step}.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def column(found: dict[str, Any], name: str) -> list[Any]:
    place = found["columns"].index(name)
    return [row[place] for row in found["rows"]]


def test_training_is_the_same_to_the_bit_with_and_without_samples(tmp_path: Path) -> None:
    weights = []
    for samples in (0, 5):
        trainer = make(tmp_path / str(samples), Classifier(dropout=0.5), Drawing(), Drawing(), eval_samples=samples)
        trainer.train()
        rows = [
            {k: v for k, v in row.items() if "per_second" not in k and "runtime" not in k}
            for row in trainer.state.log_history
        ]
        weights.append((trainer.model.state_dict(), rows, torch.rand(4)))
    (first, rows, drawn), (second, other_rows, other_drawn) = weights
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert rows == other_rows
    assert torch.equal(drawn, other_drawn)
    assert not (tmp_path / "0" / "media").exists()
    one, two = table(tmp_path / "5", step=2), table(tmp_path / "5")
    assert column(one, "row") == column(two, "row")
    assert column(one, "input") == column(two, "input")  # kept, though the rows draw
    assert column(one, "label") == [index % 4 for index in column(one, "row")]
    assert len(one["rows"]) == 5


def test_predictions_are_those_of_the_model(tmp_path: Path) -> None:
    model = Classifier()
    data = [dict(Drawing()[index]) for index in range(7)]

    def loss_that_takes_labels_out(outputs: Any, labels: Tensor, num_items_in_batch: object = None) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"] if isinstance(outputs, dict) else outputs, labels)

    trainer = make(tmp_path, model, data, data, eval_samples=20, compute_loss_func=loss_that_takes_labels_out)
    trainer.evaluate()
    found = table(tmp_path, step=0)
    logits = model.eval().logits(torch.stack([row["x"] for row in data]))
    assert column(found, "row") == list(range(7))  # fewer rows than asked for
    assert column(found, "prediction") == logits.argmax(1).tolist()
    np.testing.assert_allclose(column(found, "confidence"), logits.softmax(1).amax(1).detach(), atol=1e-4)


def test_a_stream_gives_its_first_rows_and_sets_have_names(tmp_path: Path) -> None:
    sets = {"a": Stream(), "b": [Drawing()[0]], "none": []}
    make(tmp_path, Classifier(), Drawing(), {name: sets[name] for name in "ab"}, eval_samples=4).evaluate()
    assert column(table(tmp_path, "eval_a/samples", 0), "row") == [0, 1, 2, 3]
    assert column(table(tmp_path, "eval_b/samples", 0), "label") == [0]


def test_entries_added_within_an_evaluation_are_logged_and_choose_the_best_model(tmp_path: Path) -> None:
    class Score(TrainerCallback):
        def on_within_evaluation(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            metrics["eval_score"] = 10.0 - state.global_step

    best = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    trainer = make(
        tmp_path, Classifier(), Drawing(), Drawing(), callbacks=[Score()], metric_for_best_model="score", **best
    )
    trainer.train()
    assert [row["eval_score"] for row in trainer.state.log_history if "eval_loss" in row] == [8.0, 6.0]
    assert trainer.state.best_global_step == 2


# ---- generated text


class Tokens:
    """A tokenizer of numbers."""

    pad_token_id, eos_token_id = 0, 1
    model_input_names = ("input_ids",)

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(str(each) for each in ids if each > 1 or not skip_special_tokens)


def alone(model: Any, prompt: str, number: int) -> str:
    """The greedy continuation of one prompt, without padding."""
    ids = torch.tensor([[int(each) for each in prompt.split()]])
    for _ in range(number):
        token = model(input_ids=ids).logits[0, -1].argmax()
        if token == 1:
            break
        ids = torch.cat([ids, token[None, None]], 1)
    return Tokens().decode(ids[0, len(prompt.split()) :].tolist(), skip_special_tokens=True)


@pytest.mark.parametrize("masked", [True, False])
def test_a_causal_model_continues_each_prompt_as_it_would_alone(tmp_path: Path, masked: bool) -> None:
    data = samples_job.texts(20, masked)
    options: dict[str, Any] = {"num": 5, "max_new_tokens": 6}
    trainer = make(tmp_path, samples_job.llama(), data[:12], data[12:], eval_samples=options, processing_class=Tokens())
    trainer.data_collator = samples_job.collate
    trainer.train()
    found = table(tmp_path)
    assert len({len(each.split()) for each in column(found, "prompt")}) > 1
    trainer.model.eval()
    for prompt, generated in zip(column(found, "prompt"), column(found, "generated"), strict=True):
        assert generated == alone(trainer.model, prompt, 6)
    for index, prompt, reference in zip(*(column(found, name) for name in ("row", "prompt", "reference")), strict=True):
        row = data[12:][index]
        length = row["labels"].count(-100) if masked else len(row["input_ids"]) // 2
        end = None if masked else length + 6
        decode = Tokens().decode
        assert prompt == decode(row["input_ids"][:length], skip_special_tokens=True)
        assert reference == decode(row["input_ids"][length:end], skip_special_tokens=True)


def test_texts_end_where_the_positions_of_a_model_do(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    data = samples_job.texts(12, False)
    longest = max(len(row["input_ids"]) for row in data)
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 64, "n_positions": longest}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
    trainer = make(tmp_path, model, data, data, eval_samples={"num": 12, "prompt_tokens": longest})
    trainer.data_collator = samples_job.collate
    trainer.train()
    found = table(tmp_path)
    assert all(0 < len(each.split()) < longest for each in column(found, "prompt"))
    assert any(column(found, "generated"))


def test_generation_that_draws_is_the_same_each_time_and_leaves_training_alone(tmp_path: Path) -> None:
    data, found = samples_job.texts(20), []
    for place, generation in enumerate(({"do_sample": True, "max_new_tokens": 9}, {"do_sample": True}, None)):
        samples = EvaluationSamples(4, generation=generation, seed=3, max_new_tokens=9)
        callbacks = [samples] if place != 1 else []
        trainer = make(tmp_path / str(place), samples_job.llama(), data[:12], data[12:], callbacks=callbacks)
        trainer.data_collator = samples_job.collate
        trainer.train()
        found.append(trainer.model.state_dict())
        if place == 0:
            first = table(tmp_path / "0")
            trainer.evaluate()
            assert table(tmp_path / "0") == first
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in other)
    assert column(table(tmp_path / "0"), "generated") != column(table(tmp_path / "2"), "generated")


def until_end(row: list[int]) -> str:
    return " ".join(map(str, row[: row.index(1) + 1] if 1 in row else row))


def test_an_encoder_decoder_generates_with_either_trainer(tmp_path: Path) -> None:
    pairs = generation_job.pairs(10)
    options: dict[str, Any] = {"num": 3, "max_new_tokens": 5}
    trainer = make(tmp_path / "plain", generation_job.t5(), pairs, pairs, eval_samples=options)
    trainer.train()
    found = table(tmp_path / "plain")
    ids = torch.stack([pairs[index]["input_ids"] for index in column(found, "row")])
    wanted = trainer.model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    assert column(found, "prompt") == [" ".join(map(str, row.tolist())) for row in ids]
    assert column(found, "generated") == [until_end(row) for row in wanted.tolist()]
    own = {"predict_with_generate": True, "generation_max_length": 7, "generation_num_beams": 2, "eval_samples": 3}
    trainer = make(tmp_path / "own", generation_job.t5(), pairs, pairs, Seq2SeqTrainer, Seq2SeqTrainingArguments, **own)
    trainer.train()
    ids = torch.stack([pairs[index]["input_ids"] for index in column(table(tmp_path / "own"), "row")])
    wanted = trainer.model.generate(input_ids=ids, max_length=7, num_beams=2)
    for row, text in zip(wanted.tolist(), column(table(tmp_path / "own"), "generated"), strict=True):
        assert text.startswith(until_end(row))


@pytest.mark.slow
def test_samples_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    samples_job.run(tmp_path / "one", 1)
    processes.finish(processes.start("samples_job.py", 2, str(tmp_path)), timeout=300)
    for kind in ("text", "classes"):
        wanted = table(tmp_path / "one" / kind, step=0)
        for engine in ("ddp", "fsdp"):
            assert table(tmp_path / engine / kind, step=0) == wanted, (kind, engine)


# ---- cells


class Named(nn.Module):
    class config:
        id2label = {0: "cat", 1: "dog", 2: "eel"}


def test_cells_of_each_kind_of_prediction() -> None:
    named, plain = Reader(None, Named()), Reader(None, nn.Linear(1, 1))
    logits = np.array([[0.0, 2.0, 1.0], [np.nan, 0.0, 0.0]], dtype=np.float32)
    first, second = results_of({"logits": logits, "other": logits}, np.array([1, 2]), 2, named)
    assert (first.label, first.prediction, first.is_right) == ("dog", "dog", True)
    assert (second.label, second.is_right) == ("eel", None)  # no class is the largest
    found = results_of(np.array([[1.0, -1.0, 0.5]], dtype=np.float32), np.array([[1.0, 0.0, 1.0]]), 1, named)[0]
    assert (found.label, found.prediction, found.is_right) == ("cat, eel", "cat, eel", True)
    found = results_of(np.array([[1.5]], dtype=np.float32), np.array([2.5]), 1, plain)[0]
    assert (found.label, found.prediction) == (2.5, "1.5")
    tokens = np.eye(3, dtype=np.float32)[None, [0, 1, 2, 2]]
    found = results_of(tokens, np.array([[0, 1, -100, 1]]), 1, named)[0]
    assert (found.label, found.prediction, found.is_right) == ("cat dog dog", "cat dog eel", False)
    assert results_of(None, None, 2, plain)[1].prediction is None


@pytest.mark.parametrize("masks_prompt", [False, True])
def test_a_causal_module_without_generate_is_compared_with_the_next_labels(masks_prompt: bool) -> None:
    """Labels that are the input tokens are shifted in the loss; those that a collator has shifted are not."""
    plain = Reader(None, nn.Linear(1, 1))
    inputs = [np.array([3, 1, 2, 0]), np.array([2, 2, 1])]
    outputs = np.zeros((2, 4, 4), dtype=np.float32)
    outputs[0, [0, 1, 2, 3], [1, 2, 0, 3]] = 1.0  # the next token of each place
    outputs[1, [0, 1, 2, 3], [2, 0, 3, 3]] = 1.0  # one of two right
    labels = np.array([[3, 1, 2, 0], [2, 2, 1, -100]])
    if masks_prompt:
        labels[:, 0] = -100
    first, second = results_of(outputs, labels, 2, plain, inputs)
    assert (first.label, first.prediction, first.is_right) == ("1 2 0", "1 2 0", True)
    assert (second.label, second.prediction, second.is_right) == ("2 1", "2 0", False)
    shifted = np.array([[1, 2, 0, -100], [2, 1, -100, -100]])
    first, second = results_of(outputs, shifted, 2, plain, inputs)
    assert (first.label, first.is_right) == ("1 2 0", True)
    assert (second.label, second.prediction) == ("2 1", "2 0")


def test_pictures_are_shown_with_their_verdict(tmp_path: Path) -> None:
    from PIL import Image

    picture = picture_of({}, np.arange(16, dtype=np.float32), (4, 4))
    assert picture is not None
    assert picture.shape == (4, 4, 3)
    assert (picture.min(), picture.max()) == (0, 255)
    assert picture_of({}, np.zeros((3, 8), dtype=np.float32), None) is None
    assert picture_of({"image": Image.new("L", (5, 6))}, None, None).shape == (6, 5, 3)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="picture_shape"):
        picture_of({}, np.zeros(15, dtype=np.float32), (4, 4))
    sheet = montage([(picture, True), (picture, False), (picture, None)])
    assert sheet.shape == (2 * (64 + 12), 2 * (64 + 12), 3)
    assert sheet[4, 40].tolist() == [46, 125, 50]
    data = [{"x": torch.rand(8), "labels": torch.tensor(0)} for _ in range(3)]
    make(tmp_path, Classifier(), data, data, eval_samples={"num": 2, "picture_shape": [2, 4]}).evaluate()
    assert column(table(tmp_path, step=0), "input") == ["picture 1", "picture 2"]
    with Image.open(tmp_path / "media" / "eval%2Fpictures-0.png") as figure:
        assert figure.size == (2 * (128 + 12), 64 + 12)


# ---- wrong use


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "eval_samples=-1"),
        (True, "eval_samples=True"),
        ("many", "eval_samples='many'"),
        ({"nmu": 3}, "num"),
        ({"num": 0}, r"eval_samples\(num\)"),
        ({"num": 2, "generation": "greedy"}, r"eval_samples\(generation\)"),
        ({"picture_shape": 8}, r"eval_samples\(picture_shape\)"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingArguments(str(tmp_path), eval_samples=value)


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match=r"eval_samples=4.*pipeline"):
        TrainingArguments(str(tmp_path), eval_samples=4, parallel={"pp": 2})
    with pytest.raises(ValueError, match=r"EvaluationSamples\(seed\)"):
        EvaluationSamples(seed=-1)
    data = samples_job.texts(4)
    trainer = make(tmp_path, samples_job.llama(), data, data, callbacks=[EvaluationSamples(generation={"num_beam": 2})])
    trainer.data_collator = samples_job.collate
    with pytest.raises(ValueError, match="num_beams"):
        trainer.evaluate()


def test_text_forms_of_the_option(tmp_path: Path) -> None:
    assert TrainingArguments(str(tmp_path), eval_samples="6").eval_samples == 6
    assert TrainingArguments(str(tmp_path), eval_samples='{"num": 3, "seed": 1}').eval_samples == {"num": 3, "seed": 1}
    assert TrainingArguments(str(tmp_path)).eval_samples == 0


class Nested(Classifier):
    def forward(self, inputs: Any, edges: Tensor, labels: Tensor | None = None) -> Any:
        return super().forward(inputs["x"], labels)


def test_inputs_that_are_no_rows_of_samples_and_texts_that_no_file_can_hold_are_shown(tmp_path: Path) -> None:
    data = [{"x": torch.randn(8), "labels": torch.tensor(index % 4), "text": "\ud83d <b>é"} for index in range(6)]

    def collate(rows: list[Any]) -> dict[str, Any]:
        labels = torch.stack([row["labels"] for row in rows])
        return {"inputs": {"x": torch.stack([row["x"] for row in rows])}, "edges": torch.zeros(2, 9), "labels": labels}

    trainer = make(tmp_path, Nested(), data, data, eval_samples=3, remove_unused_columns=False, data_collator=collate)
    trainer.train()
    found = table(tmp_path)
    assert column(found, "input") == ["? <b>é"] * 3
    assert column(found, "label") == [index % 4 for index in column(found, "row")]
    assert "<b>é" not in (tmp_path / "report.html").read_text(encoding="utf-8")
