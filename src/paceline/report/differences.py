"""Finds what two runs differ in: arguments, model, plan, code, data, packages and hardware, from their records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.journal import FORMAT, JOURNAL_FILE
from paceline.core.lineage import DIFF_FILE, PACKAGES_FILE, RECORD_NAME
from paceline.report.run_data import RunData, read_run

RECORD_FORMAT = 1
# kinds of causes
ARGUMENT, DATA_ORDER, DATA_CONTENT, CODE, NUMERICS = "argument", "data order", "data content", "code", "numerics"
KINDS = (ARGUMENT, DATA_ORDER, DATA_CONTENT, CODE, NUMERICS)

# names and places, in which any two runs differ
PLACES = {"output_dir", "logging_dir", "run_name", "output_store", "resume_from_checkpoint", "local_rank"}
PLACES |= {"hub_model_id", "hub_token", "hub_revision", "project", "gcp_project"}
PLACES |= {"compile_cache_dir", "tpu_name", "tpu_zone"}
# options that leave the numbers of the optimizer steps as they are
_NEUTRAL = {
    "batch_eval_metrics", "bf16_full_eval", "checkpoint_format", "dataloader_persistent_workers",
    "dataloader_pin_memory", "dataloader_prefetch_factor", "ddp_timeout", "disable_tqdm", "do_eval", "do_predict",
    "do_train", "eval_accumulation_steps", "eval_batch_size", "eval_do_concat_batches", "eval_harness", "eval_samples",
    "eval_spill_gb", "eval_use_gather_object", "fp16_full_eval", "gradient_noise_scale", "include_for_metrics",
    "include_num_input_tokens_seen", "keep_best", "keep_best_metric", "keep_every_hours", "keep_every_steps",
    "load_best_model_at_end", "log_flops", "log_level", "log_level_replica", "log_on_each_node", "log_resources",
    "log_token_metrics",
    "logging_first_step", "logging_nan_inf_filter", "logging_steps", "logging_strategy",
    "per_device_eval_batch_size", "prediction_loss_only", "profile", "push_to_hub", "report_to",
    "save_full_log_history",
    "save_in_background", "save_on_each_node", "save_only_model", "save_steps", "save_strategy", "save_total_limit",
    "skip_memory_metrics", "snapshot_ensemble", "stop_signals", "torch_empty_cache_steps",
    "enable_jit_checkpoint", "notes",
}  # fmt: skip
_NEUTRAL_STARTS = ("hub_", "trackio_")
_MOST_ROWS = 5  # rows of a dataset that are named


class BrokenRun(ValueError):
    """A file of a run is damaged, or of another version of this package; the message names it."""


@dataclass(frozen=True)
class Difference:
    """One property in which two runs differ.

    Attributes:
        section: `arguments`, `model`, `plan`, `code`, `data`, `packages` or `hardware`.
        name: the property.
        values: its values in both runs; None where it is missing.
        kind: the kind of cause that it can be, one of `KINDS`; None if it cannot change an optimizer step.
    """

    section: str
    name: str
    values: tuple[Any, Any]
    kind: str | None


def open_run(folder: Path) -> RunData:
    """Reads a run, of which every file must be sound.

    Raises:
        FileNotFoundError: the folder holds no run.
        BrokenRun: its record or its journal is damaged, or of another version.
    """
    path = folder / RECORD_NAME
    if path.is_file():
        check_record(path)
    run = read_run(folder)
    damaged = [problem for problem in run.problems if problem.startswith((RECORD_NAME, JOURNAL_FILE))]
    if damaged:
        raise BrokenRun(f"{folder}: {damaged[0]}")
    journal = folder / JOURNAL_FILE
    if journal.is_file() and journal.stat().st_size % FORMAT.itemsize:
        run.problems.append(f"{JOURNAL_FILE} ends inside a row, which was left out: a crash, or a copy that was cut.")
    return run


def check_record(path: Path) -> None:
    """Checks that a `run.json` can be read.

    Raises:
        BrokenRun: it is damaged, or of another version.
    """
    try:
        record: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BrokenRun(f"{path} is damaged: it is not valid JSON; was its copy cut? ({error})") from error
    if not isinstance(record, dict) or not isinstance(record.get("arguments", {}), dict):
        raise BrokenRun(f"{path} is not the record of a run of paceline")
    if record.get("format") != RECORD_FORMAT:
        raise BrokenRun(
            f"{path} has format {record.get('format')!r}, and this version of paceline reads {RECORD_FORMAT}: use the "
            "version that wrote it"
        )


def find_differences(first: RunData, other: RunData) -> list[Difference]:
    """Returns everything in which two runs differ, except names, places, commands and times."""
    records = (first.record, other.record)
    found = [
        Difference("arguments", name, values, argument_kind(name)) for name, values in _unequal(records, "arguments")
    ]
    named = [(item.name, item.values) for item in found]  # values may be lists, which have no hash
    found += [Difference("model", name, values, CODE) for name, values in _unequal(records, "extra", _OF_MODEL)]
    for name, values in _unequal(records, "plan"):
        if (name, values) not in named:
            found.append(Difference("plan", name, values, argument_kind(name)))
    found += _code(records)
    found += _data(records)
    found += _packages(first, other)
    found += [Difference("hardware", name, values, NUMERICS) for name, values in _unequal(records, "hardware")]
    platforms = (first.record.get("platform"), other.record.get("platform"))
    if platforms[0] != platforms[1]:
        found.append(Difference("hardware", "platform", platforms, NUMERICS))
    return found


_OF_MODEL = ("model", "num_parameters", "num_trainable_parameters", "parameter_dtypes", "strategy")


def argument_kind(name: str) -> str | None:
    """Returns the kind of cause that an option, or a decision of the plan, can be."""
    top = name.partition(".")[0]
    return None if top in _NEUTRAL or top.startswith(_NEUTRAL_STARTS) else ARGUMENT


def mapping(value: object) -> dict[str, Any]:
    """Returns a mapping of a record; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def read_packages(run: RunData) -> dict[str, str]:
    """Returns the packages of a run by name: those of `packages.txt`, with the versions that `run.json` holds."""
    found = {}
    try:
        text = (run.folder / PACKAGES_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        name, separator, version = line.partition("==")
        if separator:
            found[name] = version
    found.update({str(name): str(version) for name, version in mapping(run.record.get("versions")).items()})
    return found


def _unequal(
    records: tuple[Mapping[str, Any], Mapping[str, Any]], section: str, names: tuple[str, ...] | None = None
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yields (name, values) of the entries of a section that differ; nested ones by dotted names."""
    pair = [dict(_flat(mapping(record.get(section)))) for record in records]
    for name in dict.fromkeys([*pair[0], *pair[1]]):
        is_named = names is None or name in names
        values = (pair[0].get(name), pair[1].get(name))
        if is_named and name.partition(".")[0] not in PLACES and values[0] != values[1]:
            yield name, values


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _code(records: tuple[Mapping[str, Any], Mapping[str, Any]]) -> Iterator[Difference]:
    states = [mapping(record.get("git")) for record in records]
    for name, kind in (("commit", CODE), ("branch", None)):
        values = (states[0].get(name), states[1].get(name))
        if values[0] != values[1]:
            yield Difference("code", name, values, kind)
    diffs = [mapping(state.get("diff")).get("sha256") for state in states]
    if diffs[0] != diffs[1]:
        texts = [f"{DIFF_FILE}, sha256 {str(digest)[:12]}" if digest else "none" for digest in diffs]
        yield Difference("code", "uncommitted changes", (texts[0], texts[1]), CODE)
    files = [mapping(state.get("untracked")) for state in states]
    for name in sorted({*files[0], *files[1]}):
        if files[0].get(name) != files[1].get(name):
            yield Difference("code", f"untracked {name}", (files[0].get(name), files[1].get(name)), CODE)


def _packages(first: RunData, other: RunData) -> Iterator[Difference]:
    versions = [read_packages(run) for run in (first, other)]
    for run, found in zip((first, other), versions, strict=True):
        if run.record.get("python") is not None:
            found["python"] = str(run.record["python"])
    for name in sorted({*versions[0], *versions[1]}):
        values = (versions[0].get(name), versions[1].get(name))
        if values[0] != values[1]:
            yield Difference("packages", name, values, NUMERICS)


# ---- data


def _data(records: tuple[Mapping[str, Any], Mapping[str, Any]]) -> Iterator[Difference]:
    pair = [mapping(record.get("data")) for record in records]
    for name in dict.fromkeys([*pair[0], *pair[1]]):
        first, other = mapping(pair[0].get(name)), mapping(pair[1].get(name))
        if first and other:
            yield from _dataset(name, first, other)
        elif pair[0] and pair[1]:
            texts = ["fingerprinted" if each else None for each in (first, other)]
            yield Difference("data", name, (texts[0], texts[1]), _data_kind(name, DATA_CONTENT))


def _dataset(name: str, first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Difference]:
    """Yields the differences of one dataset, from the length and the sampled rows of both fingerprints."""
    for entry in ("kind", "length"):
        values = (first.get(entry), other.get(entry))
        if values[0] != values[1]:
            kind = None if entry == "kind" else _data_kind(name, DATA_CONTENT)
            yield Difference("data", f"{name} {entry}", values, kind)
    rows = [{row: str(digest) for row, digest in mapping(each.get("rows")).items()} for each in (first, other)]
    common = [row for row in rows[0] if row in rows[1]]
    unequal = [row for row in common if rows[0][row] != rows[1][row]]
    if unequal and first.get("length") == other.get("length"):
        is_moved = is_reordered(rows[0], rows[1])
        text = f"{len(unequal)} of {len(common)} sampled rows: {', '.join(unequal[:_MOST_ROWS])}"
        text += ", ..." if len(unequal) > _MOST_ROWS else ""
        kind = _data_kind(name, DATA_ORDER if is_moved else DATA_CONTENT)
        label = "order" if is_moved else "rows"
        yield Difference("data", f"{name} {label}", (text, text), kind)
    own = (first.get("fingerprint"), other.get("fingerprint"))
    if own[0] != own[1] and not unequal:
        # it also depends on how the dataset was made: equal rows are stronger evidence than unequal fingerprints
        kind = None if common and len(common) == first.get("length") else _data_kind(name, DATA_CONTENT)
        yield Difference("data", f"{name} fingerprint", own, kind)


def is_reordered(first: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Returns True if rows that differ are found at other places of the other run.

    With all rows sampled, all of them must be; of a sample, where chance decides which of them are seen, several.
    """
    unequal = [row for row in first if row in other and first[row] != other[row]]
    before, after = [first[row] for row in unequal], [other[row] for row in unequal]
    if sorted(before) == sorted(after):
        return True
    num_moved = len(set(before) & set(after))
    return num_moved >= max(2, len(unequal) // 8)


def has_every_row(run: RunData, name: str = "train") -> bool:
    """Returns True if the fingerprint of a dataset covers all of its rows."""
    data = mapping(mapping(run.record.get("data")).get(name))
    return bool(data.get("rows")) and len(mapping(data.get("rows"))) == data.get("length")


def _data_kind(name: str, kind: str) -> str | None:
    return kind if name == "train" else None
