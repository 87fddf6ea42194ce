"""docs/api_table.md: every public name of the Hugging Face Trainer, and what paceline does with it.

The names and defaults are those of tools/api_surface.yaml. What paceline does is found out by looking: signatures and
defaults are compared, options and their values are tried, log keys, files and attributes are those of a run. Only the
reasons that cannot be read off the package are kept by hand, in tools/api_reasons.yaml.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

import api_checks as checks
from api_checks import MISSING, Finding

ROOT = Path(__file__).resolve().parent.parent
SURFACE = ROOT / "tools" / "api_surface.yaml"
REASONS = ROOT / "tools" / "api_reasons.yaml"
PAGE = ROOT / "docs" / "api_table.md"
# what may have been found where a reason of this kind is kept by hand
FITS = {"same": (MISSING,), "different": ("same", "different"), "refused": ("refused", MISSING)}
HEAD = """# Every public name of the Hugging Face Trainer

Written by `make docs` from [the list of names](../tools/api_surface.yaml) and the package itself: signatures and
defaults are compared, options and values are tried, log keys and files are those of a run.

- **same**: the name is there, with the Hugging Face Trainer's parameters and defaults, and a value that is tried is
  accepted. What it does is compared elsewhere, by the tests that [parity.md](parity.md) and
  [migration.md](migration.md) name; defects that are not repeated are in [differences.md](differences.md).
- **different**: the name is there and works; the note says what differs.
- **refused**: it raises an error that names the remedy; the note is that error, or says why.

"""


@dataclass(frozen=True)
class Row:
    """One name of the Hugging Face Trainer.

    Attributes:
        section: where it belongs, the heading of a table.
        name: as users write it.
        theirs: its signature or default in the Hugging Face Trainer, or an empty string.
        finding: what paceline does with it.
    """

    section: str
    name: str
    theirs: str
    finding: Finding

    @property
    def key(self) -> str:
        """The name that reasons go by."""
        return f"{self.section}/{self.name}"


def pages() -> dict[Path, str]:
    """The page and its content."""
    return {PAGE: page(table())}


def read_reasons() -> dict[str, dict[str, str]]:
    """The reasons kept by hand: for each status a dict from key (or pattern of keys) to text."""
    content: dict[str, dict[str, str]] = yaml.safe_load(REASONS.read_text(encoding="utf-8"))
    return content


def with_reasons(found: list[Row], reasons: dict[str, dict[str, str]]) -> list[Row]:
    """The rows, with the reasons kept by hand in the place of the notes that were found."""
    return [replace(row, finding=settled(row, reasons)) for row in found]


def settled(row: Row, reasons: dict[str, dict[str, str]]) -> Finding:
    """Returns the entry of a row: the finding, or the hand-written text if it agrees with the finding."""
    for status in reasons:
        kept = reason_for(row, reasons[status])
        if kept is not None and row.finding.status in FITS[status]:
            return Finding(status, kept)
    return row.finding


def reason_for(row: Row, reasons: dict[str, str]) -> str | None:
    """The first reason whose key or pattern fits a row."""
    return next((text for pattern, text in reasons.items() if fnmatch.fnmatchcase(row.key, pattern)), None)


def problems(found: list[Row], reasons: dict[str, dict[str, str]]) -> list[str]:
    """Returns the faults of the reasons: names that lack one, and entries that nothing needs."""
    lacking = [
        f"{row.key}: {row.finding.status}, and tools/api_reasons.yaml gives no reason"
        for row in with_reasons(found, reasons)
        if row.finding.status == MISSING or (row.finding.status != "same" and not row.finding.note)
    ]
    idle = []
    for kind, entries in reasons.items():
        for pattern in entries:
            states = {row.finding.status for row in found if fnmatch.fnmatchcase(row.key, pattern)}
            if not states & set(FITS[kind]):
                now = " and ".join(sorted(states)) or "no name at all"
                idle.append(f"delete {pattern!r} below {kind!r} in tools/api_reasons.yaml: it is now {now}")
    return lacking + idle


def table() -> list[Row]:
    """Every row as it stands in the page."""
    return with_reasons(list(rows()), read_reasons())


def page(found: list[Row]) -> str:
    """The text of docs/api_table.md."""
    counts = {status: sum(row.finding.status == status for row in found) for status in ("same", "different", "refused")}
    lines = [HEAD + f"Of {len(found)} names, " + ", ".join(f"{n} are {status}" for status, n in counts.items()) + ".\n"]
    for section in dict.fromkeys(row.section for row in found):
        lines.append(f"\n## {section}\n\n| name | Hugging Face Trainer | here | note |\n|---|---|---|---|")
        for row in found:
            if row.section == section:
                cells = (code(row.name), code(row.theirs), row.finding.status, row.finding.note)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    """Text as code, or nothing."""
    return f"`{text}`" if text else ""


# ---- the rows, section by section


@functools.cache
def rows() -> tuple[Row, ...]:
    """Every name of the list, with what was found out about it."""
    return tuple(find_rows())


def find_rows() -> Iterator[Row]:
    """Finds out about every name of the list; takes some seconds."""
    surface: dict[str, Any] = yaml.safe_load(SURFACE.read_text(encoding="utf-8"))
    run = checks.small_run()
    yield from trainer_rows(surface, run)
    yield from argument_rows(surface["TrainingArguments"], surface)
    yield from value_rows(surface)
    yield from key_rows(surface)
    yield from callback_rows(surface["callbacks"], run)
    for kind, names in surface["outputs"].items():
        for name in names:
            bare = name.split("=")[0]
            yield Row("Outputs", f"{kind}.{bare}", name, checks.field_of(kind, bare))
    yield from log_rows(surface["log_keys"], run)
    for place, names in surface["files"].items():
        for name in [names] if isinstance(names, str) else names:
            yield Row("Files", f"{place}: {name}", "", checks.file(name, run))
    yield from function_rows(surface)
    yield from tensorflow_rows(surface)


def trainer_rows(surface: dict[str, Any], run: checks.Run) -> Iterator[Row]:
    """Trainer and Seq2SeqTrainer: the constructor argument by argument, methods, attributes."""
    trainer, seq2seq = surface["Trainer"], surface["Seq2SeqTrainer"]
    for owner, signature in (("Trainer", trainer["init_v5"]), ("Seq2SeqTrainer", seq2seq["init"])):
        for name, default in checks.parse(signature).items():
            yield Row(f"{owner}: arguments", name, default, checks.parameter(owner, name, default))
    methods = {
        "Trainer: methods": {**trainer["methods_v5"], **trainer["helper_methods_v5"]},
        "Trainer: methods of 4.57 only": {
            name: signature
            for name, signature in trainer["methods_v4_only"].items()
            if name not in trainer["helper_methods_v5"]
        },
    }
    for section, listed in methods.items():
        for name, signature in listed.items():
            yield Row(section, name, signature, checks.method("Trainer", name, signature))
    for name, signature in seq2seq["methods"].items():
        yield Row("Seq2SeqTrainer: methods", name, signature, checks.method("Seq2SeqTrainer", name, signature))
    for name in trainer["public_attributes"]:
        bare = name.split("(")[0]
        yield Row("Trainer: attributes", bare, "", checks.attribute(run.trainer, bare))
    for name in trainer["commonly_overridden_private"]:
        bare = name.split("(")[0]
        yield Row("Trainer: private methods that are often overridden", bare, "", checks.method("Trainer", bare, None))


def argument_rows(listed: dict[str, Any], surface: dict[str, Any]) -> Iterator[Row]:
    """TrainingArguments: options with their defaults, older names, properties and methods."""
    for name, default in listed["fields_v5"].items():
        yield Row("TrainingArguments", name, repr(default), checks.option("TrainingArguments", name, default))
    for name, default in surface["Seq2SeqTrainingArguments_extra"].items():
        found = checks.option("Seq2SeqTrainingArguments", name, default)
        yield Row("Seq2SeqTrainingArguments", name, repr(default), found)
    older = {**dict.fromkeys(listed["even_older_names"], ""), **listed["removed_between_4_30_and_4_57"]}
    for name, default in {**listed["v4_57_fields_removed_in_v5"], **older}.items():
        yield Row("TrainingArguments: older names", name, repr(default), checks.older_option(name))
    for name, variable in listed["env_replacements_v5"].items():
        yield Row("Environment variables", variable, f"was {name}", checks.constant(variable))
    for name in listed["properties"]:
        yield Row("TrainingArguments: properties", name, "", checks.member("TrainingArguments", name))
    for name, signature in listed["methods"].items():
        yield Row("TrainingArguments: methods", name, signature, checks.method("TrainingArguments", name, signature))


def value_rows(surface: dict[str, Any]) -> Iterator[Row]:
    """The values that options take."""
    for kind, values in surface["enums"].items():
        name = re.sub(r"_v4(_30)?(_only)?$|_v5$|_legacy$", "", kind)
        if kind == "lr_scheduler_type_v4" or kind == "HPSearchBackend_v4":
            continue  # the same names again
        section = f"Values: {name}" + (" (older)" if kind.endswith("_only") and "30" not in kind else "")
        if kind == "optim_v4_30_only":
            values, section = [value for value in values if value != "adamw_apex_fused"], "Values: optim (older)"
        for value in values:
            yield Row(section, value, "", checks.value(name, value))


def key_rows(surface: dict[str, Any]) -> Iterator[Row]:
    """The keys of options that are dicts, reporters, and the search."""
    for key in surface["fsdp_config_keys"]:
        bare = key.split("(")[0]
        yield Row("Keys: fsdp_config", bare, "", checks.fsdp_key(bare))
    configs = {"accelerator_config": "AcceleratorConfig", "parallelism_config": "ParallelismConfig_accelerate"}
    for option, section in configs.items():
        for key, default in surface[section].items():
            yield Row(f"Keys: {option}", key, repr(default), checks.config_key(option, key, default))
    for option in ("activation_checkpointing_kwargs", "liger_kernel_config"):
        for key in surface[option]:
            yield Row(f"Keys: {option}", key.removeprefix("+ "), "", checks.config_key(option, key, False))
    for name in [*surface["integrations_report_to"]["v5"], *surface["integrations_report_to"]["special"]]:
        yield Row("Values: report_to", name, "", checks.reporter(name))
    for kind in ("backends_v5", "backends_v4_extra"):
        for name in surface["hpo"][kind]:
            yield Row("Hyper-parameter search", f"backend {name}", "", checks.value("HPSearchBackend", name))


def callback_rows(listed: dict[str, Any], run: checks.Run) -> Iterator[Row]:
    """Events, what callbacks are given, the built-in ones, state and control."""
    for name in listed["events_v5"]:
        yield Row("Callbacks: events", name, "", checks.member("TrainerCallback", name))
    for name in listed["kwargs"]:
        bare = name.split("(")[0]
        status = "same" if bare in run.keywords else MISSING
        yield Row("Callbacks: keywords", bare, "", Finding(status, ""))
    for name in listed["builtin"]:
        bare = name.split("(")[0]
        found = checks.export(bare, listed.get(bare))
        yield Row("Callbacks: built in", bare, listed.get(bare, ""), found)
    for owner in ("ExportableState", "CallbackHandler"):
        for name in listed[owner]:
            bare = name.split("(")[0]
            yield Row(f"Callbacks: {owner}", bare, "", checks.member(owner, bare))
    for owner in ("TrainerState", "TrainerControl"):
        for name, default in listed[owner].items():
            yield Row(f"Callbacks: {owner}", name, repr(default), checks.default_of(owner, name, default))
    for name, signature in listed["TrainerState_methods"].items():
        yield Row("Callbacks: TrainerState", name, signature, checks.method("TrainerState", name, signature))


def log_rows(listed: dict[str, Any], run: checks.Run) -> Iterator[Row]:
    """Keys of logs and metrics."""
    for kind, names in listed.items():
        for name in names if kind != "prefixes" else ():
            yield Row("Log keys", f"{kind.split('(')[0]}: {name}", "", checks.log_key(name, run))
    for name, prefix in listed["prefixes"].items():
        yield Row("Log keys", f"prefix of {name}: {prefix}", "", checks.prefix(prefix, run))


def function_rows(surface: dict[str, Any]) -> Iterator[Row]:
    """Functions, schedules, collators, samplers, the parser."""
    for name, signature in surface["functions"].items():
        yield Row("Functions", name, signature, checks.export(name, signature))
    for name, signature in surface["schedulers"].items():
        yield Row("Schedules", name, signature, checks.export(name, signature))
    for name, content in surface["data_collators"].items():
        if name == "v4_only":
            yield from (Row("Collators", item, "", checks.collator_of_v4(item)) for item in content)
            continue
        signature = content if isinstance(content, str) else checks.signature_from(content)
        yield Row("Collators", name, signature, checks.export(name, signature))
    for name in surface["samplers"]:
        bare = name.split("(")[0]
        yield Row("Samplers", bare, "", checks.export(bare, None))
    for name, signature in surface["HfArgumentParser"].items():
        yield Row("HfArgumentParser", name, signature, checks.method("HfArgumentParser", name, signature))


def tensorflow_rows(surface: dict[str, Any]) -> Iterator[Row]:
    """The TensorFlow side, read without importing it."""
    trainer = surface["TFTrainer"]
    yield Row("TensorFlow", "TFTrainer", trainer["init"], checks.tensorflow("TFTrainer", "__init__", trainer["init"]))
    for name, signature in trainer["methods"].items():
        yield Row("TensorFlow", f"TFTrainer.{name}", signature, checks.tensorflow("TFTrainer", name, signature))
    optimization = trainer["optimization_tf"]
    created = checks.tensorflow(None, "create_optimizer", optimization["create_optimizer"])
    yield Row("TensorFlow", "create_optimizer", optimization["create_optimizer"], created)
    for name in [*optimization["classes"], *trainer["keras_callbacks"]]:
        yield Row("TensorFlow", name, "", checks.tensorflow(name, None, None))
    for name, default in surface["TFTrainingArguments_extra"].items():
        row = checks.tensorflow("TFTrainingArguments", name, None)
        yield Row("TensorFlow", f"TFTrainingArguments.{name}", repr(default), row)
    for name in surface["TFTrainingArguments_properties"]:
        yield Row("TensorFlow", f"TFTrainingArguments.{name}", "", checks.tensorflow("TFTrainingArguments", name, None))


if __name__ == "__main__":
    found_problems = problems(list(rows()), read_reasons())
    print("\n".join(found_problems))
    sys.exit(bool(found_problems))
