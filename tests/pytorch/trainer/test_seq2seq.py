"""Seq2SeqTrainer: generated text in evaluation and prediction, beside the reference and with models of one's own."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow_but
from small_models import Classifier, classification
from torch import Tensor, nn

import paceline
from paceline import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainingArguments,
    UnsupportedOption,
)
from paceline.pytorch.model import generation

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers_models import MODELS as ALL_MODELS  # noqa: E402
from transformers_models import WORDS, bart, t5, tokenizer, whisper  # noqa: E402

# of transformers, accelerate and what they import
pytestmark = pytest.mark.filterwarnings("ignore")

MODELS = {"t5": t5, "bart": bart}
PAD, END = 0, 1


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    yield
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


# ---- data: the answer is each word's successor


def task(num_samples: int, num_words: int = 4, words: int = 27, seed: int = 3) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(num_samples):
        source = torch.randint(0, words, (num_words,), generator=generator)
        target = (source + 1) % words
        ids, labels = [*(source + 4).tolist(), END], [*(target + 4).tolist(), END]
        samples.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return samples


def ragged_task(num_samples: int) -> list[dict[str, list[int]]]:
    return [sample for index in range(num_samples) for sample in task(1, 2 + index % 5, seed=index)]


def texts(rows: Any) -> list[str]:
    rows = np.where(np.asarray(rows) == -100, PAD, rows)
    decoded: list[str] = tokenizer().batch_decode(rows, skip_special_tokens=True)
    return decoded


def ngrams(text: str, size: int) -> Counter[tuple[str, ...]]:
    words = text.split()
    return Counter(tuple(words[start : start + size]) for start in range(len(words) - size + 1))


def overlap(prediction: Any) -> dict[str, float]:
    """ROUGE-1 (the mean of F1 over samples) and BLEU with two orders, from text."""
    answers, references = texts(prediction.predictions), texts(prediction.label_ids)
    rouge, matches, totals = 0.0, [0, 0], [0, 0]
    for answer, reference in zip(answers, references, strict=True):
        for size in (1, 2):
            found, wanted = ngrams(answer, size), ngrams(reference, size)
            matches[size - 1] += (found & wanted).total()
            totals[size - 1] += found.total()
        found, wanted = ngrams(answer, 1), ngrams(reference, 1)
        rouge += 2 * (found & wanted).total() / max(1, found.total() + wanted.total())
    lengths = [sum(len(text.split()) for text in side) for side in (answers, references)]
    brevity = math.exp(min(0.0, 1 - lengths[1] / max(1, lengths[0])))
    precision = math.prod(match / max(1, total) for match, total in zip(matches, totals, strict=True))
    return {"rouge1": rouge / len(answers), "bleu": brevity * math.sqrt(precision)}


def make(library: Any, folder: Path, model: Any, **options: Any) -> Any:
    """A Seq2SeqTrainer of either library; keywords of the constructor and of the arguments may be mixed."""
    names = {"train_dataset", "eval_dataset", "compute_metrics", "data_collator", "processing_class", "model_init"}
    for_trainer: dict[str, Any] = {
        "data_collator": library.DataCollatorForSeq2Seq(tokenizer()),
        "processing_class": tokenizer(),
        **{name: options.pop(name) for name in list(options) if name in names},
    }
    defaults = {
        "output_dir": str(folder / library.__name__),
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 1,
        "predict_with_generate": True,
    }
    args = library.Seq2SeqTrainingArguments(**{**defaults, **options})
    return library.Seq2SeqTrainer(model=model, args=args, **for_trainer)


def ours(folder: Path, model: Any, **options: Any) -> Seq2SeqTrainer:
    trainer: Seq2SeqTrainer = make(paceline, folder, model, **options)
    return trainer


def as_wide(rows: Any, width: int) -> Any:
    """Rows filled with the padding token, however they were filled before."""
    rows = np.where(rows == -100, PAD, rows)
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=PAD)


def assert_same_rows(found: Any, expected: Any) -> None:
    width = max(found.shape[1], expected.shape[1])
    assert as_wide(found, width).tolist() == as_wide(expected, width).tolist()


SPEEDS = ("_runtime", "_per_second")
NOT_COMPARED = ("_model_preparation_time",)  # theirs repeats it with each evaluation


def assert_same_numbers(found: dict[str, Any], expected: dict[str, Any]) -> None:
    found, expected = (
        {name: value for name, value in row.items() if not name.endswith(NOT_COMPARED)} for row in (found, expected)
    )
    assert set(found) == set(expected)
    for name, value in expected.items():
        if not name.endswith(SPEEDS):
            assert found[name] == pytest.approx(value, rel=1e-5), name


# ---- it learns, and the metrics are taken from text


@pytest.mark.parametrize("kind", slow_but(["t5"], MODELS))
def test_train_evaluate_predict(tmp_path: Path, kind: str) -> None:
    data = task(96, num_words=2, words=6)
    model = MODELS[kind]()
    trainer = ours(
        tmp_path,
        model,
        train_dataset=data,
        eval_dataset=data[:16],
        compute_metrics=overlap,
        generation_max_length=8,
        data_collator=DataCollatorForSeq2Seq(tokenizer(), model=model),
        num_train_epochs=16,
        per_device_train_batch_size=8,
        learning_rate={"t5": 2e-2, "bart": 1e-2}[kind],
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="rouge1",
        save_total_limit=1,
        logging_steps=50,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    rows = [row for row in trainer.state.log_history if "eval_rouge1" in row]
    assert len(rows) == 17  # training starts a new log
    assert all({"eval_loss", "eval_bleu", "eval_runtime"} <= set(row) for row in rows)
    assert before["eval_rouge1"] < 0.5
    assert after["eval_rouge1"] > 0.9
    assert after["eval_bleu"] > 0.8
    assert after["eval_rouge1"] == max(row["eval_rouge1"] for row in rows)
    output = trainer.predict(data[:16], num_beams=2)
    assert output.predictions.shape == output.label_ids.shape == (16, 20)
    assert output.metrics["test_rouge1"] > 0.9
    assert set(" ".join(texts(output.predictions)).split()) <= set(WORDS)
    best = type(model).from_pretrained(trainer.state.best_model_checkpoint)
    assert best.generation_config.pad_token_id == PAD
    for name, value in best.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name])


# ---- beside the reference


LONG = [{**sample, "labels": [*sample["labels"][:-1] * 6, END]} for sample in task(8)]
SHORT = transformers.GenerationConfig(max_new_tokens=5, num_beams=2, bos_token_id=0)
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing given": ({}, {}),
    "length and beams of the arguments": ({"generation_max_length": 9, "generation_num_beams": 3}, {}),
    "longer than the config": ({"generation_max_length": 26}, {}),
    "keywords win": ({"generation_max_length": 9, "generation_num_beams": 3}, {"max_length": 6, "num_beams": 2}),
    "new tokens win": ({"generation_max_length": 9}, {"max_new_tokens": 4}),
    "None is not given": ({"generation_max_length": 9}, {"max_length": None, "num_beams": None}),
    "more options": ({}, {"max_length": 12, "num_beams": 4, "length_penalty": 2.0, "no_repeat_ngram_size": 2}),
    "forced start": ({}, {"max_length": 7, "forced_bos_token_id": 5, "min_length": 5}),
    "labels longer than what is generated": ({"generation_max_length": 5, "eval_dataset": LONG}, {}),
    "config object": ({"generation_config": SHORT}, {}),
    "config object in a call": ({}, {"generation_config": transformers.GenerationConfig(max_length=6, num_beams=2)}),
    "smoothed loss": ({"generation_max_length": 6, "label_smoothing_factor": 0.1}, {}),
    "no tokenizer": ({"generation_max_length": 6, "processing_class": None}, {}),
    "loss only": ({"compute_metrics": None}, {}),
    "without generation": ({"predict_with_generate": False}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["t5"], MODELS))
@pytest.mark.parametrize("call", CALLS)
def test_the_same_as_the_reference(tmp_path: Path, kind: str, call: str) -> None:
    options, gen_kwargs = CALLS[call]

    def score(prediction: Any) -> dict[str, float]:
        return overlap(prediction) if options.get("predict_with_generate", True) else {"rows": len(prediction[1])}

    results = []
    for library in (transformers, paceline):
        model = MODELS[kind]()
        # logits that differ: no prediction hangs on the last bit
        torch.nn.init.normal_(model.get_input_embeddings().weight, generator=torch.Generator().manual_seed(1))
        # whole batches: theirs counts a partial last one as a whole one in the loss
        given: dict[str, Any] = {"eval_dataset": task(12), "compute_metrics": score, **options}
        if "label_smoothing_factor" in options:
            given["data_collator"] = library.DataCollatorForSeq2Seq(tokenizer(), model=model)
        trainer = make(library, tmp_path, model, **given)
        if "max_length" not in gen_kwargs and library is transformers:
            trainer.predict(given["eval_dataset"])  # by default its first batch ever is a token longer than the others
        results.append([])
        for name, method in (("evaluate", trainer.evaluate), ("predict", trainer.predict)):
            arguments = [given["eval_dataset"]] if name == "predict" else []
            results[-1].append(method(*arguments, **gen_kwargs))
    (their_metrics, theirs), (our_metrics, found) = results
    assert_same_numbers(our_metrics, their_metrics)
    assert_same_numbers(found.metrics, theirs.metrics)
    if not options.get("predict_with_generate", True):
        np.testing.assert_allclose(found.predictions[0], theirs.predictions[0], rtol=1e-4, atol=1e-5)
        return
    assert_same_rows(found.predictions, theirs.predictions)
    assert_same_rows(found.label_ids, theirs.label_ids)
    assert found.predictions.dtype == theirs.predictions.dtype
    if max(options.get("generation_max_length") or 0, gen_kwargs.get("max_length") or 0) <= 20:
        assert found.predictions.shape == theirs.predictions.shape
        assert found.label_ids.tolist() == theirs.label_ids.tolist()
    assert not (found.predictions == -100).any()


FIVE = {"max_new_tokens": 5}
IN_CALL = transformers.GenerationConfig(max_length=6, num_beams=2)


@pytest.mark.parametrize(
    ("options", "call", "expected"),
    [
        ({"generation_config": FIVE}, {}, (6, 1)),
        ({"generation_config": FIVE, "generation_max_length": 9}, {}, (9, 1)),
        ({"generation_config": FIVE, "generation_max_length": 3}, {}, (3, 1)),
        ({"generation_config": FIVE}, {"max_length": 8}, (8, 1)),
        ({"generation_config": {"max_length": 5}}, {"max_new_tokens": 7}, (8, 1)),
        ({"generation_max_length": 9, "generation_num_beams": 3}, {"generation_config": IN_CALL}, (6, 2)),
        ({"generation_config": FIVE}, {"generation_config": IN_CALL}, (6, 2)),
        ({"generation_config": FIVE}, {"generation_config": IN_CALL, "max_length": 4}, (4, 2)),
    ],
)
def test_the_order_of_precedence(
    tmp_path: Path, options: dict[str, Any], call: dict[str, Any], expected: tuple[int, int]
) -> None:
    """A length replaces another one in either form: `max_length`, or `max_new_tokens` without the start token."""
    model: Any = t5()
    torch.nn.init.normal_(model.get_input_embeddings().weight, generator=torch.Generator().manual_seed(1))
    widths: list[tuple[int, int]] = []
    generate, prepare, configs = model.generate, model._prepare_generation_config, list[Any]()

    def note_config(*given: Any, **named: Any) -> Any:
        found = prepare(*given, **named)
        configs.append(found[0])
        return found

    def note_width(**named: Any) -> Any:
        rows = generate(**named)
        widths.append((rows.shape[1], configs[-1].num_beams))
        return rows

    model._prepare_generation_config, model.generate = note_config, note_width
    ours(tmp_path, model, **options).predict(task(2), **call)
    assert widths == [expected]


def test_ragged_labels(tmp_path: Path) -> None:
    """The same predictions; the loss is ours: the mean over all targets, whatever the batches."""
    data, results = ragged_task(11), []
    for library in (transformers, paceline):
        trainer = make(library, tmp_path, t5(), eval_dataset=data, compute_metrics=overlap)
        results.append(trainer.predict(data, max_length=20))
    assert_same_rows(results[1].predictions, results[0].predictions)
    assert_same_rows(results[1].label_ids, results[0].label_ids)
    assert results[1].metrics["test_bleu"] == pytest.approx(results[0].metrics["test_bleu"])
    one = ours(tmp_path, t5(), per_device_eval_batch_size=11).predict(data, max_length=20)
    assert one.metrics["test_loss"] == pytest.approx(results[1].metrics["test_loss"], rel=1e-5)
    assert one.predictions.tolist() == results[1].predictions.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_the_same_run(tmp_path: Path, kind: str) -> None:
    found = []
    for library in (transformers, paceline):
        trainer = make(
            library,
            tmp_path,
            MODELS[kind](),
            train_dataset=task(24),
            eval_dataset={"a": task(8), "b": task(4, seed=9)},
            compute_metrics=overlap,
            generation_max_length=8,
            eval_strategy="epoch",
            save_strategy="epoch",
            num_train_epochs=2,
            seed=7,
        )
        trainer.train()
        found.append(trainer)
    theirs, mine = found
    assert len(mine.state.log_history) == len(theirs.state.log_history)
    for row, expected in zip(mine.state.log_history, theirs.state.log_history, strict=True):
        assert_same_numbers(row, expected)
    checkpoints = [Path(t.args.output_dir) / "checkpoint-12" for t in found]
    files = [{path.name for path in folder.iterdir()} for folder in checkpoints]
    assert files[0] <= files[1]
    assert "generation_config.json" in files[1]


# ---- the generation config, in all its forms


def write_config(folder: Path, name: str = "generation_config.json", **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(options))
    return folder / name


@pytest.mark.parametrize("form", ["object", "dict", "json", "folder", "path of a folder", "file"])
def test_forms_of_a_generation_config(tmp_path: Path, form: str) -> None:
    options = {"max_new_tokens": 3, "num_beams": 2, "pad_token_id": 0, "decoder_start_token_id": 0}
    file = write_config(tmp_path / "settings", "mine.json" if form == "file" else "generation_config.json", **options)
    forms: dict[str, Any] = {
        "object": transformers.GenerationConfig(**options),
        "dict": options,
        "json": json.dumps(options),
        "folder": str(file.parent),
        "path of a folder": file.parent,
        "file": str(file),
    }
    model = t5()
    trainer = ours(
        tmp_path, model, generation_config=forms[form], save_strategy="steps", save_steps=1, max_steps=1,
        train_dataset=task(4),
    )  # fmt: skip
    assert model.generation_config.num_beams == 2
    assert model.generation_config is not forms[form]
    assert trainer.predict(task(4)).predictions[:, 4:].max() == PAD
    trainer.train()
    saved = json.loads((Path(trainer.args.output_dir) / "checkpoint-1" / "generation_config.json").read_text())
    assert {name: saved[name] for name in options} == options
    assert model.generation_config.eos_token_id == (1 if form in ("dict", "json") else None)
    again = Seq2SeqTrainingArguments.from_dict(json.loads(trainer.args.to_json_string()))
    assert Seq2SeqTrainer.load_generation_config(again.generation_config).max_new_tokens == 3


def test_arguments_of_transformers(tmp_path: Path) -> None:
    config = transformers.GenerationConfig(max_new_tokens=3, decoder_start_token_id=0)
    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), use_cpu=True, predict_with_generate=True, generation_config=config, report_to="none"
    )
    model = t5()
    trainer = Seq2SeqTrainer(model, args, data_collator=DataCollatorForSeq2Seq(tokenizer()))
    assert trainer.args.generation_config is config
    assert trainer.predict(task(3)).predictions[:, 4:].max() == PAD


def test_a_model_made_by_model_init_gets_the_config(tmp_path: Path) -> None:
    trainer = ours(
        tmp_path, None, model_init=t5, generation_config={"max_new_tokens": 3}, train_dataset=task(8),
        eval_dataset=task(4), compute_metrics=overlap, eval_strategy="epoch",
    )  # fmt: skip
    first = trainer.model
    trainer.train()
    assert trainer.model is not first
    assert trainer.model.generation_config.max_new_tokens == 3


def test_the_models_config_is_left_as_it_was(tmp_path: Path) -> None:
    model = t5()
    before = model.generation_config.to_dict()
    ours(tmp_path, model, generation_max_length=6).predict(task(4), num_beams=2)
    assert model.generation_config.to_dict() == before


BAD: list[tuple[Any, type[Exception], str]] = [
    ({"num_beam": 2}, ValueError, "no option 'num_beam'; did you mean 'num_beams'?"),
    ({"num_beams": "four"}, ValueError, "num_beams='four'"),
    ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
    ({"max_length": -1}, ValueError, "max_length=-1 is invalid"),
    ({"temperature": 0.3}, ValueError, "temperature"),
    ({"num_return_sequences": 3}, ValueError, "num_return_sequences"),
    ({"early_stopping": "sometimes"}, ValueError, "early_stopping"),
    ("./nowhere", FileNotFoundError, "generation_config='./nowhere'"),
]


@pytest.mark.parametrize(("config", "error", "message"), BAD)
def test_a_bad_generation_config_is_found_at_once(
    tmp_path: Path, config: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        ours(tmp_path, t5(), generation_config=config)
    assert message in str(caught.value)


def test_an_option_that_only_some_models_know(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        ours(tmp_path, t5(), generation_config={"language": "en", "num_beams": 2})
    assert "generation_config has 'language'" in caplog.text


def test_loading_a_config_in_ones_own_way(tmp_path: Path) -> None:
    class Shorter(Seq2SeqTrainer):
        @staticmethod
        def load_generation_config(gen_config_arg: Any) -> Any:
            config = Seq2SeqTrainer.load_generation_config(gen_config_arg)
            config.max_new_tokens = 2
            return config

    for config in (transformers.GenerationConfig(max_new_tokens=9), {"max_new_tokens": 9}):
        model = t5()
        Shorter(model, Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, generation_config=config))
        assert model.generation_config.max_new_tokens == 2


def test_a_folder_without_a_generation_config(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no generation_config\.json in that folder"):
        ours(tmp_path, t5(), generation_config=tmp_path)


def test_a_bad_config_of_the_model_itself_is_found_at_once(tmp_path: Path) -> None:
    model = t5()
    model.generation_config.num_return_sequences = 3
    with pytest.raises(ValueError, match=r"The model's generation config cannot be used.*num_return_sequences"):
        ours(tmp_path, model)
    ours(tmp_path, model, generation_num_beams=3)  # that makes it possible


def test_a_config_without_a_start_is_found_before_training(tmp_path: Path) -> None:
    config = transformers.GenerationConfig(max_new_tokens=3)
    options = {"generation_config": config, "train_dataset": task(8), "eval_dataset": task(4)}
    trainer = ours(tmp_path, t5(), eval_strategy="epoch", **options)
    with pytest.raises(ValueError, match="neither decoder_start_token_id nor bos_token_id"):
        trainer.train()
    assert trainer.state.global_step == 0
    trainer = ours(tmp_path, t5(), **options)
    trainer.train()
    assert trainer.predict(task(4), decoder_start_token_id=0).predictions.shape == (4, 20)


def test_a_config_that_cannot_be_saved_is_found_before_training(tmp_path: Path) -> None:
    model = t5()
    model.generation_config.top_p = 0.5  # which searching does not read: generation only warns of it
    trainer = ours(tmp_path, model, train_dataset=task(8), save_strategy="epoch")
    with pytest.raises(ValueError, match=r"cannot be saved in a checkpoint.*\s.*top_p"):
        trainer.train()
    assert trainer.state.global_step == 0
    ours(tmp_path, model, train_dataset=task(8), save_strategy="no").train()


@pytest.mark.parametrize("name", ["generation_max_length", "generation_num_beams"])
@pytest.mark.parametrize("value", [0, -3, 2.5, True])
def test_numbers_that_are_not_possible(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r} is invalid"):
        Seq2SeqTrainingArguments("out", **{name: value})


# ---- what cannot generate, and what is not read


def test_arguments_without_the_options_of_generation(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Seq2SeqTrainer needs Seq2SeqTrainingArguments"):
        Seq2SeqTrainer(t5(), TrainingArguments(str(tmp_path)))


def test_no_arguments_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not Seq2SeqTrainer(t5()).args.predict_with_generate


@pytest.mark.parametrize("make_model", [ALL_MODELS["bert"][0], Classifier])
def test_a_model_that_cannot_generate(tmp_path: Path, make_model: Any) -> None:
    with pytest.raises(UnsupportedOption, match=r"predict_with_generate=True: \w+ cannot generate; .*AutoModelFor"):
        ours(tmp_path, make_model())
    data = classification(8)
    options: dict[str, Any] = {"predict_with_generate": False, "data_collator": None, "processing_class": None}
    if make_model is Classifier:
        trainer = ours(tmp_path, make_model(), eval_dataset=data, train_dataset=data, **options)
        trainer.train()
        assert trainer.predict(data).predictions.shape == (8, 4)
        with pytest.raises(UnsupportedOption, match="Classifier cannot generate"):
            ours(tmp_path, make_model(), generation_config={"num_beams": 2}, **options)


def test_options_that_nothing_reads_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        trainer = ours(tmp_path, t5(), predict_with_generate=False, generation_num_beams=2, eval_dataset=task(4))
        trainer.evaluate(max_length=5, num_beams=None)
    assert [record.getMessage() for record in caplog.records if record.name == "paceline.pytorch.seq2seq"] == [
        "The arguments hold num_beams for generation, and nothing is generated: predict_with_generate=False.",
        "evaluate() was given max_length for generation, and nothing is generated: predict_with_generate=False.",
    ]


# ---- batches


class Prompted(Seq2SeqTrainer):
    """Notes what generation was given."""

    def _generate(self, inputs: Any, settings: Any) -> Any:
        self.given = generation.select_inputs(inputs, self.label_names)
        self.settings = dict(settings)
        return super()._generate(inputs, settings)


def prompted(folder: Path, **options: Any) -> Prompted:
    model = options.pop("model", None) or t5()
    args = Seq2SeqTrainingArguments(str(folder), use_cpu=True, predict_with_generate=True, disable_tqdm=True, **options)
    return Prompted(model, args, data_collator=lambda features: features[0], processing_class=tokenizer())


def test_decoder_inputs_made_of_the_labels_are_dropped(tmp_path: Path) -> None:
    batch = {name: torch.tensor([[5, 6, 1]]) for name in ("input_ids", "labels", "decoder_input_ids")}
    batch["decoder_attention_mask"] = torch.ones(1, 3, dtype=torch.int64)
    trainer = prompted(tmp_path)
    trainer.prediction_step(trainer.model, batch, False)
    assert set(trainer.given) == {"input_ids"}
    assert set(batch) == {"input_ids", "labels", "decoder_input_ids", "decoder_attention_mask"}


def test_a_prompt_of_the_decoder_is_gone_on_from(tmp_path: Path) -> None:
    batch = {"input_ids": torch.tensor([[5, 6, 1]]), "labels": torch.tensor([[5, 6, 1]])}
    trainer = prompted(tmp_path)
    step = {**batch, "decoder_input_ids": torch.tensor([[0, 9]])}
    _, rows, _ = trainer.prediction_step(trainer.model, {k: v for k, v in step.items() if k != "labels"}, False)
    assert rows[0, :2].tolist() == [0, 9]


def test_the_settings_of_a_direct_call(tmp_path: Path) -> None:
    batch = {"input_ids": torch.tensor([[5, 6, 1]]), "labels": torch.tensor([[5, 6, 1]])}
    trainer = prompted(tmp_path, generation_num_beams=2)
    trainer.prediction_step(trainer.model, batch, False)
    assert trainer.settings == {"num_beams": 2, "max_length": 20}
    trainer.prediction_step(trainer.model, batch, False, max_new_tokens=3)
    assert trainer.settings == {"max_new_tokens": 3}
    loss, rows, labels = trainer.prediction_step(trainer.model, batch, True)
    assert loss is not None
    assert rows is labels is None


def test_sampling(tmp_path: Path) -> None:
    batch = DataCollatorForSeq2Seq(tokenizer())(task(4))
    rows, losses = [], []
    for library in (transformers, paceline, paceline):
        trainer = make(library, tmp_path, t5())
        torch.manual_seed(0)
        loss, found, _ = trainer.prediction_step(trainer.model, dict(batch), False, do_sample=True, max_length=9)
        rows.append(found.tolist())
        losses.append(float(loss))
    assert rows[0] == rows[1] == rows[2]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_predict_without_labels(tmp_path: Path) -> None:
    data = [{name: value for name, value in sample.items() if name != "labels"} for sample in task(5)]
    output = ours(tmp_path, t5(), compute_metrics=overlap).predict(data, max_length=6)
    with_labels = ours(tmp_path, t5(), compute_metrics=overlap).predict(task(5), max_length=6)
    assert output.label_ids is None
    speed = {"test_runtime", "test_samples_per_second", "test_steps_per_second"}
    assert set(output.metrics) == {*speed, "test_model_preparation_time"}
    assert output.predictions.tolist() == with_labels.predictions.tolist()


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    class Doubled(Seq2SeqTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **counts: Any) -> Any:
            inputs.pop("attention_mask")
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **counts)
            return (2 * loss, outputs) if return_outputs else 2 * loss

    data, losses = [{k: v for k, v in sample.items() if k != "attention_mask"} for sample in task(8)], []
    for cls in (Seq2SeqTrainer, Doubled):
        args = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, predict_with_generate=True, disable_tqdm=True)
        trainer = cls(t5(), args, data_collator=DataCollatorForSeq2Seq(tokenizer()), eval_dataset=data,
                      compute_metrics=overlap)  # fmt: skip
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(2 * losses[0])


def test_keywords_reach_every_dataset_of_a_dict(tmp_path: Path) -> None:
    widths: list[int] = []

    def longest(prediction: Any) -> dict[str, float]:
        widths.append(int((prediction.predictions != PAD).sum(1).max()))
        return {}

    trainer = ours(tmp_path, t5(), eval_dataset={"a": task(4), "b": task(4, seed=5)}, compute_metrics=longest)
    metrics = trainer.evaluate(max_new_tokens=2)
    assert {"eval_a_loss", "eval_b_loss"} <= set(metrics)
    assert max(widths) <= 3
    trainer.evaluate({"c": task(4)}, max_new_tokens=1)
    assert len(widths) == 3
    assert widths[-1] <= 2


def test_several_sequences_per_sample(tmp_path: Path) -> None:
    trainer = ours(tmp_path, t5(), eval_dataset=task(6))
    output = trainer.predict(task(6), num_beams=4, num_return_sequences=3, max_length=7)
    assert output.predictions.shape == (6, 3, 20)
    best = trainer.predict(task(6), num_beams=4, max_length=7)
    assert output.predictions[:, 0].tolist() == best.predictions.tolist()
    assert trainer.predict(task(6), return_dict_in_generate=True, max_length=7).predictions.shape == (6, 20)


def test_batches_of_metrics_and_inputs(tmp_path: Path) -> None:
    seen = []

    def by_batch(prediction: Any, compute_result: bool) -> dict[str, float]:
        seen.append((prediction.predictions.shape, prediction.label_ids.shape, prediction.inputs.shape))
        return {"batches": len(seen)} if compute_result else {}

    metrics = ours(
        tmp_path, t5(), eval_dataset=ragged_task(6), compute_metrics=by_batch, batch_eval_metrics=True,
        include_for_metrics=["inputs"],
    ).evaluate()  # fmt: skip
    assert metrics["eval_batches"] == 2
    assert [shapes[:2] for shapes in seen] == [((4, 20), (4, 20)), ((2, 20), (2, 20))]


def test_predictions_do_not_depend_on_the_batches(tmp_path: Path) -> None:
    """Neither on how many a batch holds, nor on whether it is the first; by default 20 tokens, the start counted."""
    rows = [ours(tmp_path, t5(), per_device_eval_batch_size=size).predict(task(8)).predictions for size in (2, 8)]
    assert rows[0].tolist() == rows[1].tolist()
    assert rows[0].shape == (8, 20)
    longer = [ours(tmp_path, t5(), generation_max_length=24).predict(task(8)).predictions for _ in range(2)]
    assert longer[0].tolist() == longer[1].tolist()
    assert longer[0].shape == (8, 24)


def test_every_token_is_generated_from_the_cache(tmp_path: Path) -> None:
    widths = []

    def note(module: Any, args: Any, named: Any) -> None:
        widths.append(named["decoder_input_ids"].shape[1] if named.get("decoder_input_ids") is not None else 0)

    trainer = ours(tmp_path, t5(), train_dataset=task(4), eval_dataset=task(4))
    trainer.train()
    handle = trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    trainer.predict(task(4))
    handle.remove()
    assert set(widths) == {0, 1}  # 0: the loss, whose decoder inputs the model makes


def test_padding_tokens() -> None:
    class Owner:
        def __init__(self, **tokens: Any) -> None:
            self.__dict__.update(tokens)

    model = t5()
    find = generation.find_pad_token
    assert find(Owner(pad_token_id=7), model) == 7
    assert find(Owner(pad_token_id=None, eos_token_id=8), model) == 8
    assert find(Owner(tokenizer=Owner(pad_token_id=9)), model) == 0
    model.config.pad_token_id = model.generation_config.pad_token_id = None
    assert find(Owner(tokenizer=Owner(pad_token_id=9)), model) == 9
    model.generation_config.eos_token_id = [4, 5]
    assert find(None, model) == 4
    model.generation_config.eos_token_id = None
    assert find(None, model) is None
    rows = torch.ones(2, 3, dtype=torch.int64)
    assert generation.pad_rows(rows, 5, None) is rows
    assert generation.pad_rows(rows, 5, 4).tolist() == [[1, 1, 1, 4, 4]] * 2
    assert generation.pad_rows(rows, 2, 4) is rows


@pytest.mark.parametrize("option", ["bf16", "bf16_full_eval", "gradient_checkpointing"])
def test_other_precisions_and_checkpointing(tmp_path: Path, option: str) -> None:
    trainer = ours(
        tmp_path, bart(), train_dataset=task(8), eval_dataset=task(4), compute_metrics=overlap, eval_strategy="epoch",
        **{option: True},
    )  # fmt: skip
    trainer.train()
    assert trainer.predict(task(4)).predictions.shape == (4, 20)


def speech(num_samples: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        {
            "input_features": torch.randn(8, 40, generator=generator),
            "labels": torch.randint(3, 31, (6,), generator=generator),
        }
        for _ in range(num_samples)
    ]


def test_speech_as_in_the_reference(tmp_path: Path) -> None:
    found, data = [], speech(8)
    for library in (transformers, paceline):
        options = {"data_collator": None, "processing_class": None, "generation_max_length": 9}
        found.append(make(library, tmp_path, whisper(), **options).predict(data))
    assert found[1].predictions.tolist() == found[0].predictions.tolist()
    assert_same_numbers(found[1].metrics, found[0].metrics)


def test_speech_in_half_precision(tmp_path: Path) -> None:
    """`generate` hands features to the encoder itself: theirs fails, for their type is not that of the weights."""
    trainer = ours(tmp_path, whisper(), data_collator=None, processing_class=None, bf16_full_eval=True)
    assert trainer.predict(speech(4), max_length=9).predictions.shape == (4, 20)


class QuestionAnswering(Seq2SeqTrainer):
    """As the examples of the reference do it: metrics from answers that are put together after the loop."""

    def evaluate(self, eval_dataset: Any = None, **gen_kwargs: Any) -> dict[str, float]:  # type: ignore[override]
        self._gen_kwargs = {"num_beams": 2, **gen_kwargs}
        metric, self.compute_metrics = self.compute_metrics, None
        try:
            output = self.evaluation_loop(self.get_eval_dataloader(eval_dataset), "Evaluation", None, None, "eval")
        finally:
            self.compute_metrics = metric
        assert output.metrics is not None
        return {**output.metrics, "eval_answers": len(texts(output.predictions))}

    def _pad_tensors_to_max_len(self, tensor: Any, max_length: int) -> Any:
        return super()._pad_tensors_to_max_len(tensor, max_length + 1)


def test_a_subclass_of_the_examples(tmp_path: Path) -> None:
    args = Seq2SeqTrainingArguments(str(tmp_path), use_cpu=True, predict_with_generate=True, disable_tqdm=True)
    trainer = QuestionAnswering(
        t5(), args, DataCollatorForSeq2Seq(tokenizer()), eval_dataset=task(4), compute_metrics=overlap
    )
    assert trainer.evaluate(max_length=6)["eval_answers"] == 4
    assert trainer._gen_kwargs == {"num_beams": 2, "max_length": 6}
    assert trainer.predict(task(4)).predictions.shape == (4, 21)


def test_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=2, target_modules=["q", "v"])
    model = peft.get_peft_model(t5(), config)
    trainer = ours(
        tmp_path, model, train_dataset=task(8), eval_dataset=task(8), compute_metrics=overlap, eval_strategy="epoch",
        generation_config={"max_new_tokens": 3, "num_beams": 2},
    )  # fmt: skip
    trainer.train()
    assert trainer.predict(task(4)).predictions[:, 4:].max() == PAD


def test_a_decoder_alone(tmp_path: Path) -> None:
    """Rows begin with the prompt."""
    model = ALL_MODELS["gpt2"][0]()
    samples = [{"input_ids": [5, 6, 7], "attention_mask": [1] * 3, "labels": [5, 6, 7]} for _ in range(5)]
    found = []
    for library in (transformers, paceline):
        trainer = make(library, tmp_path, model, processing_class=tokenizer("left"))
        found.append(trainer.predict(samples, max_new_tokens=4))
    assert found[1].predictions[:, :3].tolist() == [[5, 6, 7]] * 5
    assert_same_rows(found[1].predictions, found[0].predictions)
    assert_same_numbers(found[1].metrics, found[0].metrics)


# ---- a model that is not one of transformers


class Repeater(nn.Module):
    """Says its input again, up to a length; learns nothing of use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 8)
        self.head = nn.Linear(8, 31)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def generate(self, input_ids: Tensor, max_length: int = 3) -> Tensor:
        return input_ids[:, :max_length]


def repeats(num_samples: int = 6) -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.arange(4, 9), "labels": torch.arange(4, 9), "weight": torch.ones(2)}] * num_samples


def plain(folder: Path, **options: Any) -> Seq2SeqTrainer:
    data = {"data_collator": None, "processing_class": None, "train_dataset": repeats(), "eval_dataset": repeats()}
    return ours(folder, Repeater(), compute_metrics=lambda prediction: {"width": prediction.predictions.shape[1]},
                **{**data, **options})  # fmt: skip


def test_a_plain_module_with_generate(tmp_path: Path) -> None:
    trainer = plain(tmp_path, eval_strategy="epoch", generation_max_length=2)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "eval_width" in row]
    assert [row["eval_width"] for row in rows] == [2]
    assert rows[0]["eval_loss"] > 0
    output = trainer.predict(repeats(), max_length=4)
    assert output.predictions.tolist() == [[4, 5, 6, 7]] * 6
    assert output.label_ids.tolist() == [[4, 5, 6, 7, 8]] * 6
    assert plain(tmp_path).predict(repeats()).predictions.tolist() == [[4, 5, 6]] * 6


def test_its_settings_from_a_generation_config(tmp_path: Path) -> None:
    file = write_config(tmp_path / "settings", max_length=4, transformers_version="5")
    for config in ({"max_length": 4}, file, file.parent, transformers.GenerationConfig(max_length=4)):
        trainer = plain(tmp_path, generation_config=config)
        assert trainer.evaluate()["eval_width"] == 4
        assert trainer.evaluate(max_length=1)["eval_width"] == 1
        assert trainer.evaluate(max_length=None)["eval_width"] == 4
    file.write_text("[1]")
    with pytest.raises(ValueError, match=r"generation_config=\[1\] is invalid"):
        plain(tmp_path, generation_config=file)


def test_what_its_generate_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match=r"Repeater\.generate has no parameter 'num_beams'"):
        plain(tmp_path, generation_num_beams=2)
    with pytest.raises(TypeError, match=r"Repeater\.generate.* cannot be called with .* the options temperature"):
        plain(tmp_path).evaluate(temperature=0.5)

    class Other(Repeater):
        def generate(self, prompts: Tensor) -> Tensor:  # type: ignore[override]
            return prompts

    trainer = plain(tmp_path)
    trainer.model = Other()
    with pytest.raises(TypeError, match=r"missing a required argument: 'prompts'.*names of its\s+parameters"):
        trainer.evaluate()


# ---- the order of training


def lengths_in_order(trainer: Seq2SeqTrainer) -> list[int]:
    return [len(trainer.train_dataset[index]["input_ids"]) for index in trainer._get_train_sampler()]


def test_sortish_sampler(tmp_path: Path) -> None:
    data = ragged_task(64)
    trainer = ours(tmp_path, t5(), train_dataset=data, sortish_sampler=True)
    grouped = ours(tmp_path, t5(), train_dataset=data, train_sampling_strategy="group_by_length")
    assert list(trainer._get_train_sampler()) == list(grouped._get_train_sampler())

    def waste(trainer: Seq2SeqTrainer) -> int:
        lengths = lengths_in_order(trainer)
        batches = [lengths[start : start + 4] for start in range(0, len(lengths), 4)]
        return sum(max(batch) * len(batch) - sum(batch) for batch in batches)

    assert waste(trainer) < waste(ours(tmp_path, t5(), train_dataset=data)) / 2
    assert list(trainer._get_eval_sampler(data)) == list(range(64))  # predictions keep their order
    trainer.train()


def test_sortish_sampler_resumes_exactly(tmp_path: Path) -> None:
    def run(folder: Path, resume: Any = None) -> Any:
        trainer = ours(folder, t5(), train_dataset=ragged_task(24), sortish_sampler=True, save_strategy="steps",
                       save_steps=2, num_train_epochs=1)  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole")
    resumed = run(tmp_path / "resumed", os.path.join(whole.args.output_dir, "checkpoint-2"))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name])


def test_sortish_sampler_where_there_is_nothing_to_sort(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sortish_sampler=True and train_sampling_strategy='sequential'"):
        Seq2SeqTrainingArguments("out", sortish_sampler=True, train_sampling_strategy="sequential")

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(task(8))

    for data in (Stream(), classification(8)):
        trainer = ours(tmp_path, t5(), train_dataset=data, sortish_sampler=True, max_steps=1)
        with pytest.raises(ValueError, match="sortish_sampler=True: "):
            trainer.train()
