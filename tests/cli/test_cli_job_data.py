"""Data of a configuration: files of every kind, saved folders, factories, splits and preprocessing."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.config import JobConfig
from paceline.cli.errors import UsageError
from paceline.cli.job_data import Splits, find_format, find_paths, load_data, preprocess, sort_splits

ROWS = [{"text": f"row {i}", "label": i % 2} for i in range(10)]


def config(folder: Path, data: Any, **sections: Any) -> JobConfig:
    return JobConfig(folder / "job.yaml", {"data": data, **sections})


def write_files(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    (folder / "more.jsonl").write_text(json.dumps({"text": "one more", "label": 0}) + "\n", encoding="utf-8")
    lines = [f"{row['text']},{row['label']}" for row in ROWS]
    (folder / "rows.csv").write_text("\n".join(["text,label", *lines]) + "\n", encoding="utf-8")
    tabs = [line.replace(",", "\t") for line in ["text,label", *lines]]
    (folder / "rows.tsv").write_text("\n".join(tabs) + "\n", encoding="utf-8")
    (folder / "lines.txt").write_text("".join(f"line {i}\n" for i in range(10)), encoding="utf-8")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    pytest.importorskip("datasets")
    write_files(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.tsv"])
def test_rows_of_each_kind_are_read(files: Path, name: str):
    splits = load_data(config(files, name), None, seed=0)
    assert splits.train.to_list() == ROWS
    assert list(splits.given()) == ["train"]


def test_parquet_is_read(files: Path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).to_parquet(str(files / "rows.parquet"))
    assert load_data(config(files, {"train": "rows.parquet"}), None, 0).train.to_list() == ROWS


def test_lists_and_patterns_of_files_are_joined(files: Path):
    assert len(load_data(config(files, ["rows.jsonl", "more.jsonl"]), None, 0).train) == 11
    assert len(load_data(config(files, {"train": "*.jsonl"}), None, 0).train) == 11


def test_lines_of_text_keep_their_breaks_and_their_order_when_some_are_held_out(files: Path):
    splits = load_data(config(files, {"train": "lines.txt", "eval_fraction": 0.2}), None, seed=0)
    assert "".join(splits.train["text"]) == "".join(f"line {i}\n" for i in range(8))
    assert "".join(splits.eval["text"]) == "line 8\nline 9\n"


def test_rows_are_held_out_at_random_but_repeatably(files: Path):
    first, again = (load_data(config(files, {"train": "rows.jsonl", "eval_fraction": 0.3}), None, 1) for _ in range(2))
    assert first.eval["text"][:] == again.eval["text"][:]
    texts = [*first.train["text"], *first.eval["text"]]
    assert sorted(texts) == sorted(row["text"] for row in ROWS)
    assert texts != [row["text"] for row in ROWS]


def test_saved_folders_bring_their_splits(files: Path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(str(files / "one"))
    datasets.DatasetDict({"train": rows, "validation": rows.select([0])}).save_to_disk(str(files / "both"))
    assert len(load_data(config(files, "one"), None, 0).train) == 10
    assert len(load_data(config(files, "both"), None, 0).eval) == 1
    assert len(load_data(config(files, {"train": "rows.jsonl", "eval": "one"}), None, 0).eval) == 10
    with pytest.raises(UsageError, match=r"data\.eval: .* holds several splits"):
        load_data(config(files, {"train": "one", "eval": "both"}), None, 0)
    with pytest.raises(UsageError, match="has an evaluation split of its own"):
        load_data(config(files, {"train": "both", "eval_fraction": 0.5}), None, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("rows.jsnl", "there is no 'rows.jsnl' in .*; did you mean 'rows.jsonl'"),
        ({"train": 3}, "data.train: 3 is not the name of a file"),
        ({"train": {"factory": "a:b"}}, "is not the name of a file; one function makes all splits: data: my_module"),
        ({"eval_fraction": 0.1}, "none of 'train', 'eval', 'test' is given"),
        ({"test": "rows.jsonl", "eval_fraction": 0.1}, "it is a part of 'train', which is missing"),
        ({"train": "rows.jsonl", "format": "jsn"}, "data.format: there is no 'jsn'; did you mean 'json'"),
        (["rows.jsonl", "rows.csv"], "files of one kind are needed; given are csv, json"),
        (["rows.jsonl", "."], "a folder stands alone"),
        (".", "was not written by datasets.save_to_disk"),
        ({"train": "lines.txt", "format": "parquet"}, "cannot be read as parquet"),
        (None, "'data' is missing"),
    ],
)
def test_what_is_wrong_is_said(files: Path, data: Any, message: str):
    with pytest.raises(UsageError, match=message):
        load_data(config(files, data), None, 0)


def test_brackets_in_the_name_of_a_folder_are_no_pattern(files: Path):
    folder = files / "data[1]"
    folder.mkdir()
    (files / "rows.jsonl").rename(folder / "rows-1.jsonl")
    assert len(load_data(config(folder, "rows-1.jsonl"), None, 0).train) == 10
    assert len(load_data(config(folder, "rows-*.jsonl"), None, 0).train) == 10


def test_the_kind_of_a_file_is_its_ending_compressed_or_not(tmp_path: Path):
    assert find_format("data", [Path("a.jsonl.gz"), Path("b.JSON")], None) == "json"
    assert find_format("data", [Path("a.unknown")], "tsv") == "csv"
    with pytest.raises(UsageError, match=r"the kind of 'a\.dat' is unknown; give data\.format"):
        find_format("data", [Path("a.dat")], None)


def test_files_beside_the_configuration_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "a.txt").touch()
    (here / "b.txt").touch()
    monkeypatch.chdir(here)
    assert find_paths(config(there, None), "data", "a.txt") == [there / "a.txt"]
    assert find_paths(config(there, None), "data", "b.txt") == [here / "b.txt"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([1], Splits([1])),
        (([1], [2]), Splits([1], [2])),
        (([1], [2], [3]), Splits([1], [2], [3])),
        ({"train": [1], "dev": [2], "test": [3]}, Splits([1], [2], [3])),
        ({"training": [1], "eval": {"a": [2], "b": [3]}}, Splits([1], {"a": [2], "b": [3]})),
    ],
)
def test_what_a_factory_may_return(given: Any, expected: Splits):
    assert sort_splits("mine:data", given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tran": [1]}, "gave a split 'tran'; did you mean 'train'"),
        ({"eval": [1], "dev": [2]}, "gave two splits for 'eval'"),
        ((1, 2, 3, 4), "gave 4 values"),
        (None, "gave nothing"),
    ],
)
def test_what_it_may_not(given: Any, message: str):
    with pytest.raises(UsageError, match=message):
        sort_splits("mine:data", given)


def shout(row: dict[str, Any], mark: str = "!", tokenizer: Any = None) -> dict[str, str]:
    return {"loud": row["text"].upper() + mark + (tokenizer or "")}


def test_preprocessing_is_mapped_over_every_split_with_its_options(files: Path, monkeypatch: pytest.MonkeyPatch):
    section = {"factory": "builtins:print", "mark": "?", "remove_columns": True}
    monkeypatch.setattr("paceline.cli.references.Reference.load", lambda self: shout)
    job = config(files, {"train": "rows.jsonl", "eval": "more.jsonl"}, preprocess=section)
    splits = load_data(job, None, 0)
    preprocess(job, splits, tokenizer="T")
    assert splits.train[0] == {"loud": "ROW 0?T"}
    assert splits.eval[0] == {"loud": "ONE MORE?T"}
    with pytest.raises(UsageError, match="the split 'train' is a list, not a dataset"):
        preprocess(job, Splits([1]), None)
