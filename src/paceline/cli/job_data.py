"""Loads the data of a configuration as splits, and preprocesses it."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli.config import JobConfig
from paceline.cli.errors import UsageError, need, suggest
from paceline.cli.references import Reference, read_reference, require_reference

SPLITS = {
    "train": "train",
    "training": "train",
    "eval": "eval",
    "evaluation": "eval",
    "validation": "eval",
    "valid": "eval",
    "dev": "eval",
    "test": "test",
}
FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
MAP_KEYS = ("batched", "num_proc", "remove_columns")


@dataclass
class Splits:
    """The data of a job.

    Attributes:
        train, eval, test: datasets, or None. `eval` may be a dict of several datasets by name.
        is_lines: True if the rows are consecutive lines of text files.
    """

    train: Any = None
    eval: Any = None
    test: Any = None
    is_lines: bool = False

    def given(self) -> dict[str, Any]:
        """Returns the splits that are not None, by name."""
        splits = {"train": self.train, "eval": self.eval, "test": self.test}
        return {name: dataset for name, dataset in splits.items() if dataset is not None}


def load_data(config: JobConfig, tokenizer: object, seed: int) -> Splits:
    """Loads the section `data`.

    Raises:
        UsageError: the section is missing or invalid; the message names the key.
    """
    section = config.get("data")
    if section is None:
        raise UsageError("'data' is missing: files, a folder of datasets.save_to_disk, or package.module:name")
    reference = read_reference("data", section)
    if reference is not None:
        return sort_splits(reference.name, reference.call(tokenizer=tokenizer))
    if not isinstance(section, Mapping):
        section = {"train": section}
    splits = load_files(config, section)
    fraction = section.get("eval_fraction")
    if fraction is not None:
        hold_out(splits, float(fraction), seed)
    return splits


def check_files(config: JobConfig) -> None:
    """Checks that the files of the section `data` exist, without reading them.

    Raises:
        UsageError: there is no such file or folder.
    """
    section = config.get("data")
    if section is None or read_reference("data", section) is not None:
        return
    names = section if isinstance(section, Mapping) else {"train": section}
    for name in ("train", "eval", "test"):
        if names.get(name) is not None:
            find_paths(config, f"data.{name}", names[name])


def sort_splits(source: str, given: object) -> Splits:
    """Builds splits from a factory's result or a saved folder: a dataset, a tuple of two or three, or a dict by name.

    Raises:
        UsageError: a name of the dict is not a split.
    """
    if isinstance(given, Mapping):
        splits = Splits()
        for name, dataset in given.items():
            split = SPLITS.get(str(name))
            if split is None:
                raise UsageError(f"data: {source} gave a split {name!r}{suggest(str(name), SPLITS)}")
            if getattr(splits, split) is not None:
                raise UsageError(f"data: {source} gave two splits for {split!r}")
            setattr(splits, split, dataset)
        return splits
    if isinstance(given, tuple):
        if not 1 <= len(given) <= 3:
            raise UsageError(f"data: {source} gave {len(given)} values; (train, eval) or (train, eval, test) are known")
        return Splits(*given)
    if given is None:
        raise UsageError(f"data: {source} gave nothing")
    return Splits(train=given)


def load_files(config: JobConfig, section: Mapping[str, Any]) -> Splits:
    """Loads `train`, `eval` and `test` from files or saved folders, through `datasets`."""
    datasets = need("datasets", "datasets", "data")
    splits = Splits()
    for name in ("train", "eval", "test"):
        if section.get(name) is None:
            continue
        paths = find_paths(config, f"data.{name}", section[name])
        if len(paths) == 1 and paths[0].is_dir():
            loaded = load_saved(datasets, paths[0])
            if isinstance(loaded, Mapping) and name == "train":
                found = sort_splits(str(paths[0]), loaded)
                splits.train, splits.eval, splits.test = found.train, found.eval, found.test
                continue
            if isinstance(loaded, Mapping):
                raise UsageError(f"data.{name}: {paths[0]} holds several splits; name the folder of one")
        else:
            kind = find_format(f"data.{name}", paths, section.get("format"))
            loaded = load_rows(datasets, f"data.{name}", paths, kind)
            splits.is_lines = splits.is_lines or kind == "text"
        setattr(splits, name, loaded)
    if not splits.given():
        raise UsageError("data: none of 'train', 'eval', 'test' is given")
    return splits


def find_paths(config: JobConfig, where: str, value: object) -> list[Path]:
    """Returns the files or the folder for a name, a pattern (`part-*.jsonl`), or a list of names and patterns.

    Raises:
        UsageError: there is no such file or folder.
    """
    names = value if isinstance(value, list) else [value]
    paths: list[Path] = []
    for name in names:
        if not isinstance(name, str):
            hint = "; one function makes all splits: data: my_module:make_data" if isinstance(name, dict) else ""
            raise UsageError(f"{where}: {name!r} is not the name of a file{hint}")
        found = config.find_file(name)
        if found is not None:
            paths.append(found)
            continue
        patterns = [str(Path(glob.escape(str(base))) / name) for base in (config.folder, Path.cwd())]
        matches = [Path(path) for pattern in patterns for path in sorted(glob.glob(pattern))]
        if not matches:
            near = suggest(Path(name).name, [path.name for path in (config.folder / name).parent.glob("*")])
            raise UsageError(f"{where}: there is no {name!r} in {config.folder} or the current folder{near}")
        paths += list(dict.fromkeys(path.resolve() for path in matches))
    if len(paths) > 1 and any(path.is_dir() for path in paths):
        raise UsageError(f"{where}: a folder stands alone, not in a list")
    return paths


def find_format(where: str, paths: Sequence[Path], given: object) -> str:
    """Returns text, json, csv or parquet: the given format, else that of the files' suffixes."""
    kinds = sorted(set(FORMATS.values()))
    if given is not None:
        name = {"jsonl": "json", "tsv": "csv", "txt": "text"}.get(str(given), str(given))
        if name not in kinds:
            raise UsageError(f"data.format: there is no {given!r}{suggest(str(given), kinds)}")
        return name
    found = {}
    for path in paths:
        suffixes = [suffix for suffix in path.suffixes if suffix not in COMPRESSED]
        kind = FORMATS.get(suffixes[-1].lower()) if suffixes else None
        if kind is None:
            raise UsageError(f"{where}: the kind of {path.name!r} is unknown; give data.format: {', '.join(kinds)}")
        found[kind] = path
    if len(found) > 1:
        raise UsageError(f"{where}: files of one kind are needed; given are {', '.join(sorted(found))}")
    return next(iter(found))


def load_rows(datasets: Any, where: str, paths: Sequence[Path], kind: str) -> Any:
    """Loads rows from files, cached by `datasets`. Text files give one row per line, with its line break."""
    options: dict[str, Any] = {}
    if kind == "text":
        options = {"keep_linebreaks": True}
    elif kind == "csv" and all(".tsv" in path.suffixes for path in paths):
        options = {"sep": "\t"}
    files = [glob.escape(str(path)) for path in paths]  # `datasets` takes names for patterns, too
    try:
        return datasets.load_dataset(kind, data_files=files, split="train", **options)
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        cause = error.__cause__ or error
        raise UsageError(f"{where}: {', '.join(map(str, paths))} cannot be read as {kind}: {cause}") from error


def load_saved(datasets: Any, folder: Path) -> Any:
    """Loads a folder written by `save_to_disk`."""
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        raise UsageError(
            f"data: the folder {folder} was not written by datasets.save_to_disk; name files, for instance "
            f"{folder.name}/*.jsonl"
        )
    return datasets.load_from_disk(str(folder))


def hold_out(splits: Splits, fraction: float, seed: int) -> None:
    """Splits off evaluation data: random rows, or the end of text files, whose lines are consecutive."""
    if splits.eval is not None:
        raise UsageError("data.eval_fraction: the data has an evaluation split of its own")
    if splits.train is None:
        raise UsageError("data.eval_fraction: it is a part of 'train', which is missing")
    if len(splits.train) < 2:
        raise UsageError(f"data.eval_fraction: {len(splits.train)} rows cannot be split")
    parts = splits.train.train_test_split(test_size=fraction, shuffle=not splits.is_lines, seed=seed)
    splits.train, splits.eval = parts["train"], parts["test"]


def preprocess(config: JobConfig, splits: Splits, tokenizer: object) -> None:
    """Maps the section's function over every split, with the cache and the worker processes of `datasets.map`.

    Raises:
        UsageError: a split is not a dataset of `datasets`, or a setting is invalid.
    """
    reference = require_reference("preprocess", config.get("preprocess"))
    reference, settings = split_settings(reference)
    function = reference.bind(tokenizer=tokenizer)
    for name, dataset in splits.given().items():
        if not hasattr(dataset, "map") or not hasattr(dataset, "column_names"):
            raise UsageError(
                f"preprocess: the split {name!r} is a {type(dataset).__name__}, not a dataset of `datasets`; "
                "preprocess it in the function that returns it"
            )
        setattr(splits, name, map_rows(dataset, function, f"Preprocessing {name}", **settings))


def split_settings(reference: Reference) -> tuple[Reference, dict[str, Any]]:
    """Separates the options of the function from the settings of `datasets.map`. Returns (function, settings)."""
    settings = {key: value for key, value in reference.options.items() if key in MAP_KEYS}
    options = {key: value for key, value in reference.options.items() if key not in MAP_KEYS}
    return Reference(reference.where, reference.name, options), settings


def map_rows(
    dataset: Any, function: Any, title: str, num_proc: object = None, remove_columns: Any = None, **more: Any
) -> Any:
    """Calls `dataset.map`. `remove_columns=True` means all existing columns."""
    if remove_columns is True:
        remove_columns = list(dataset.column_names or ())
    options: dict[str, Any] = {"remove_columns": remove_columns or None, **more}
    if hasattr(dataset, "__len__"):  # a stream is mapped lazily
        options.update(num_proc=num_proc, desc=title)
    elif num_proc is not None:
        raise UsageError("num_proc: a stream is mapped while it is read; use dataloader_num_workers")
    return dataset.map(function, **options)
