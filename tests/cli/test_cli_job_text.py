"""Models and tokenizers of transformers, and text made into blocks."""

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.config import JobConfig
from paceline.cli.errors import UsageError
from paceline.cli.job_data import Splits, load_data
from paceline.cli.job_model import build_model
from paceline.cli.job_text import BlockCutter, check_labels, count_rows_per_call, tokenize
from paceline.cli.job_tokenizer import build_tokenizer
from paceline.cli.main import main
from paceline.pytorch.model.signature import read_signature

LINES = [f"line {i} of the text that is read\n" for i in range(60)]
GPT = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 32}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(LINES, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    loaded = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", model_max_length=32)
    loaded.save_pretrained(str(folder))
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def config(folder: Path, **sections: Any) -> JobConfig:
    return JobConfig(folder / "job.yaml", sections)


def make_text(folder: Path, tokenizer: Any, **data: Any) -> tuple[Splits, bool]:
    job = config(folder, model=GPT, data=data)
    splits = load_data(job, tokenizer, 0)
    return splits, tokenize(job, splits, build_model(job, tokenizer), tokenizer, ())


def test_lines_are_joined_and_cut_into_blocks(tmp_path: Path, tokenizer: Any):
    (tmp_path / "a.txt").write_text("".join(LINES), encoding="utf-8")
    splits, is_blocks = make_text(tmp_path, tokenizer, train="a.txt", block_size=16)
    assert is_blocks
    joined = [index for row in splits.train for index in row["input_ids"]]
    assert "".join(LINES).startswith(tokenizer.decode(joined))
    assert len("".join(LINES)) - len(tokenizer.decode(joined)) < 16 * 8
    assert {len(row["input_ids"]) for row in splits.train} == {16}
    assert splits.train[0]["labels"] == splits.train[0]["input_ids"]
    assert set(splits.train.column_names) == {"input_ids", "labels"}


def test_documents_are_ended_by_the_end_token(tmp_path: Path, tokenizer: Any):
    rows = '{"body": "one text", "id": 1}\n{"body": "another", "id": 2}\n'
    (tmp_path / "a.jsonl").write_text(rows * 20, encoding="utf-8")
    splits, _ = make_text(tmp_path, tokenizer, train="a.jsonl")
    joined = [index for row in splits.train for index in row["input_ids"]]
    assert tokenizer.decode(joined).startswith("one text<|end|>another<|end|>one text")
    assert {len(row["input_ids"]) for row in splits.train} == {32}  # as many as the model and the tokenizer take


def test_data_that_the_model_can_take_is_left_alone(tmp_path: Path, tokenizer: Any):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "a", "inputs_embeds": [0.0]}])
    job = config(tmp_path, data="unused")
    splits = Splits(rows)
    model = build_model(config(tmp_path, model=GPT), tokenizer)
    assert not tokenize(job, splits, model, tokenizer, read_signature(model).names)
    assert splits.train is rows


def test_rows_of_several_lengths_get_a_padding_token(tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture):
    (tmp_path / "a.csv").write_text("text,label\na,0\nb,1\n", encoding="utf-8")
    copy = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    job = config(tmp_path, model={**GPT, "task": "sequence_classification"}, data={"train": "a.csv"})
    model: Any = build_model(job, copy)
    tokenize(job, load_data(job, copy, 0), model, copy, ())
    assert copy.pad_token == "<|end|>"
    assert model.config.pad_token_id == copy.pad_token_id
    assert "has no padding token" in caplog.text
    copy.pad_token = copy.eos_token = None
    with pytest.raises(UsageError, match="no padding token and no end token"):
        tokenize(job, load_data(job, copy, 0), model, copy, ())


def test_rows_with_labels_stay_rows(tmp_path: Path, tokenizer: Any):
    (tmp_path / "a.csv").write_text("text,label\na,0\nmuch longer text that is cut,1\n", encoding="utf-8")
    splits, is_blocks = make_text(tmp_path, tokenizer, train="a.csv", block_size=4)
    assert not is_blocks
    assert [len(row["input_ids"]) for row in splits.train] == [1, 4]
    assert splits.train["label"][:] == [0, 1]
    assert "text" not in splits.train.column_names


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"text_column": "txt"}, "the data has no 'txt'; did you mean 'text'"),
        ({"block_size": 64}, "64 tokens are more than the 32 positions of the model"),
        ({"block_size": 1}, "1 is not a whole number above 1"),
        ({"block_size": "long"}, "'long' is not a whole number"),
        ({}, "data.train: 1 tokens are fewer than one block of 32"),
    ],
)
def test_what_is_wrong_with_text_is_said(tmp_path: Path, tokenizer: Any, data: dict[str, Any], message: str):
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        make_text(tmp_path, tokenizer, train="a.txt", **data)


def test_text_without_a_tokenizer_is_an_error_only_where_tokens_are_asked_for(tmp_path: Path, tokenizer: Any):
    (tmp_path / "a.txt").write_text("a\n", encoding="utf-8")
    assert make_text(tmp_path, None, train="a.txt")[0].train.to_list() == [{"text": "a\n"}]
    with pytest.raises(UsageError, match="there is no tokenizer; give 'tokenizer'"):
        make_text(tmp_path, None, train="a.txt", block_size=8)


def test_a_model_for_masked_tokens_gets_no_labels_from_here():
    assert BlockCutter(2, has_labels=False)({"input_ids": [[1, 2, 3]]}) == {"input_ids": [[1, 2]]}


def test_a_call_holds_many_blocks_whatever_the_rows():
    datasets = pytest.importorskip("datasets")
    short, long = ({"input_ids": [[1] * length] * 5} for length in (10, 10_000))
    assert count_rows_per_call(datasets.Dataset.from_dict(short), 100) == 2560
    assert count_rows_per_call(datasets.Dataset.from_dict(long), 100) == 3


# ---- models


def test_a_fresh_model_takes_the_vocabulary_of_the_tokenizer(tmp_path: Path, tokenizer: Any):
    model: Any = build_model(config(tmp_path, model=GPT), tokenizer)
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.n_layer == 1
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.bos_token_id is None


def test_a_saved_model_is_loaded_with_its_tokenizer_and_kind(tmp_path: Path, tokenizer: Any):
    section = {**GPT, "task": "sequence_classification", "num_labels": 3}
    saved: Any = build_model(config(tmp_path, model=section), tokenizer)
    saved.save_pretrained(str(tmp_path / "saved"))
    job = config(tmp_path, model="saved")
    assert build_tokenizer(job) is None
    tokenizer.save_pretrained(str(tmp_path / "saved"))
    assert len(build_tokenizer(job)) == len(tokenizer)
    model: Any = build_model(job, None)
    assert type(model).__name__ == "GPT2ForSequenceClassification"
    assert (model.score.weight == saved.score.weight).all()
    other: Any = build_model(config(tmp_path, model={"path": "saved", "task": "causal-lm", "resid_pdrop": 0.5}), None)
    assert type(other).__name__ == "GPT2LMHeadModel"
    assert other.config.resid_pdrop == 0.5


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"model_type": "gpt3"}, "model.model_type: there is no 'gpt3'; did you mean 'gpt"),
        ({**GPT, "n_layers": 2}, "model.n_layers: a gpt2 has no 'n_layers'; did you mean 'n_layer'"),
        ({**GPT, "task": "causal"}, "model.task: there is no 'causal'; did you mean 'causal_lm'"),
        ({**GPT, "task": "masked_lm"}, "a gpt2 cannot do 'masked_lm'; it can: causal_lm"),
        ({"n_layer": 2}, "give one of 'path' .*, 'model_type'"),
        ({"path": "x", "model_type": "gpt2"}, "give one of"),
        ("not-a-folder-of-ours", "model: 'not-a-folder-of-ours' cannot be loaded"),
        (None, "'model' is missing"),
    ],
)
def test_what_is_wrong_with_a_model_is_said(tmp_path: Path, tokenizer: Any, model: Any, message: str):
    with pytest.raises(UsageError, match=message):
        build_model(config(tmp_path, model=model), tokenizer)


def test_what_is_wrong_with_a_tokenizer_is_said(tmp_path: Path, tokenizer: Any):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="tokenizer: no tokenizer can be loaded from 'empty'"):
        build_tokenizer(config(tmp_path, tokenizer="empty"))
    with pytest.raises(UsageError, match="tokenizer: unknown key 'paht'; did you mean 'path'"):
        build_tokenizer(config(tmp_path, tokenizer={"paht": "empty"}))


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"paceline\[transformers\]"):
        build_model(config(tmp_path, model=GPT), None)


def test_a_language_model_is_trained_from_a_file(tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.txt").write_text("".join(LINES), encoding="utf-8")
    tokenizer.save_pretrained(str(tmp_path / "words"))
    (tmp_path / "job.yaml").write_text(
        f"model: {GPT}\ntokenizer: words\ndata: {{train: a.txt, eval_fraction: 0.2}}\noutput_dir: {tmp_path}/run\n"
        "max_steps: 4\neval_strategy: steps\neval_steps: 2\nsave_steps: 2\nlearning_rate: 1e-2\nuse_cpu: true\n"
        "disable_tqdm: true\n",
        encoding="utf-8",
    )
    assert main(["train", str(tmp_path / "job.yaml")]) == 0
    assert "eval_loss" in capsys.readouterr().out
    assert (tmp_path / "run" / "tokenizer.json").is_file()


def test_a_classifier_without_labels_names_the_column_that_looks_like_them(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "a.csv").write_text("text,sentiment\n" + "good film,1\n" * 40, encoding="utf-8")
    tokenizer.save_pretrained(str(tmp_path / "words"))
    (tmp_path / "job.yaml").write_text(
        f"model: {GPT | {'task': 'sequence_classification'}}\ntokenizer: words\ndata: {{train: a.csv}}\n"
        f"output_dir: {tmp_path}/run\nuse_cpu: true\n",
        encoding="utf-8",
    )
    assert main(["train", str(tmp_path / "job.yaml")]) == 2
    message = capsys.readouterr().err
    assert "its columns: text, sentiment" in message
    assert "'sentiment' looks like the labels of a GPT2ForSequenceClassification: rename" in message


def test_labels_that_are_words_are_refused():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["good", "bad"], "label": ["pos", "neg"]})
    with pytest.raises(UsageError, match=r"column 'label' of the train set holds text \('pos'\).*number the classes"):
        check_labels(rows, "train")
    check_labels(rows.remove_columns("label").add_column("label", [1, 0]), "train")
