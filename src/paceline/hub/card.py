"""Writes the model card, `README.md`: metadata for the hub and a description of the training.

The generated text is between two comments. Text outside of them is kept, and so is metadata that neither the run nor
the caller provides.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.args.secrets import mask_text
from paceline.core.metrics import jsonable
from paceline.core.optional import require
from paceline.hub.card_text import describe
from paceline.hub.contents import CARD_NAME
from paceline.hub.described import CardFacts, CardRun
from paceline.hub.history import final_metrics

logger = logging.getLogger(__name__)

BEGIN = "<!-- paceline: this part is written anew at each push -->"
END = "<!-- paceline: end of that part -->"
TEMPLATE_MARK = "[More Information Needed]"  # occurs in template cards of libraries; only their metadata is kept

_HUB_ID = re.compile(r"[\w][\w.-]*(?:/[\w][\w.-]*)?")
# suffix of a model's class name -> the hub's task name
_TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "ForImageClassification": "image-classification",
    "ForObjectDetection": "object-detection",
    "ForSemanticSegmentation": "image-segmentation",
    "ForAudioClassification": "audio-classification",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
    "ForCTC": "automatic-speech-recognition",
    "ForImageTextToText": "image-text-to-text",
}
# builders of `datasets` for local files, which do not identify a dataset on the hub
_LOADERS = {"csv", "json", "pandas", "parquet", "text", "arrow", "generator", "imagefolder", "audiofolder", None}


@dataclass(frozen=True)
class CardOptions:
    """The arguments of `create_model_card`; None or empty values are filled from the run."""

    language: Any = None
    license: Any = None
    tags: Any = None
    model_name: str | None = None
    finetuned_from: str | None = None
    tasks: Any = None
    dataset_tags: Any = None
    dataset: Any = None
    dataset_args: Any = None


def write_card(folder: Path, run: CardRun, facts: CardFacts, options: CardOptions) -> None:
    """Writes the card of a model to a folder, or regenerates the generated part of the existing card.

    Args:
        folder: the output folder; its name is the default title.
        run: the run that trained the model.
        facts: facts about the model.
        options: further metadata.

    Raises: ImportError, if huggingface_hub is missing; OSError.
    """
    path = folder / CARD_NAME
    metadata, text = read_card(path)
    name = " ".join(str(options.model_name or folder.name).split())
    data = make_metadata(run, facts, options, metadata, name)
    own = describe(run, facts, name, data.base_model, results_named(options, data.datasets))
    content = mask_text(f"---\n{data.to_yaml()}\n---\n\n{merged(text, own)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{CARD_NAME}.incomplete-{os.getpid()}")  # a push may be reading the current file
    temporary.write_text(content, encoding="utf-8")
    os.replace(temporary, path)


def card_text(run: CardRun, facts: CardFacts, name: str) -> str:
    """Returns the description of a run in Markdown, without metadata of the hub; secrets are masked."""
    return mask_text(describe(run, facts, name, base_of(facts), listed(builders_of(run.train_dataset))))


def read_card(path: Path) -> tuple[dict[str, Any], str]:
    """Returns (metadata, text) of a card, empty if there is none. Drops unreadable metadata with a warning."""
    if not path.is_file():
        return {}, ""
    content = path.read_text(encoding="utf-8")
    match = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", content, re.DOTALL)
    if match is None:
        return {}, content.strip()
    try:
        card = require("huggingface_hub", "hub").ModelCard(content, ignore_metadata_errors=True)
    except Exception as error:  # YAML raises many types
        logger.warning("The metadata of %s could not be read and are replaced: %s", path, error)
        return {}, content[match.end() :].strip()
    return card.data.to_dict(), card.text.strip()


def merged(text: str, own: str) -> str:
    """Replaces the generated part of a card's text, or appends it."""
    part = f"{BEGIN}\n\n{own}\n{END}"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        return f"{before}{part}{after}".strip() + "\n"
    if not text or TEMPLATE_MARK in text:
        return part + "\n"
    return f"{text}\n\n{part}\n"


# ---- metadata


def make_metadata(run: CardRun, facts: CardFacts, options: CardOptions, earlier: dict[str, Any], name: str) -> Any:
    """Builds huggingface_hub's ModelCardData from the existing card, the run and the caller, whose values win."""
    hub = require("huggingface_hub", "hub")
    values = {key: value for key, value in earlier.items() if key != "model-index"}
    base = options.finetuned_from or base_of(facts) or values.get("base_model")
    tasks = listed(options.tasks) or [task for task in [task_of(facts.kind)] if task is not None]
    values["base_model"] = base if is_hub_id(base) else None
    values["library_name"] = facts.library or values.get("library_name")
    if not values.get("pipeline_tag") and tasks:
        values["pipeline_tag"] = tasks[0]
    tags = [*listed(values.get("tags")), *listed(options.tags), "generated_from_trainer", "paceline"]
    values["tags"] = list(dict.fromkeys(tags))
    for key in ("language", "license"):
        if getattr(options, key):
            values[key] = getattr(options, key)
    datasets = listed(options.dataset_tags) or listed(values.get("datasets")) or builders_of(run.train_dataset)
    values["datasets"] = datasets or None
    results = evaluations(run, options, tasks, datasets)
    if results:
        values["metrics"] = [result.metric_type for result in results]
    return hub.ModelCardData(**jsonable(values), model_name=name if results else None, eval_results=results or None)


def evaluations(run: CardRun, options: CardOptions, tasks: list[str], datasets: list[str]) -> list[Any]:
    """Returns the metrics of the evaluation that describes the model, as the hub's EvalResult objects."""
    hub = require("huggingface_hub", "hub")
    dataset_names, arguments = listed(options.dataset), listed(options.dataset_args)
    dataset_type = datasets[0] if datasets else "unknown"
    return [
        hub.EvalResult(
            task_type=tasks[0] if tasks else "other",
            dataset_type=dataset_type,
            dataset_name=dataset_names[0] if dataset_names else dataset_type,
            dataset_args=arguments[0] if arguments else None,
            metric_type=metric,
            metric_name=metric.replace("_", " ").capitalize(),
            metric_value=value,
        )
        for metric, value in final_metrics(run).items()
    ]


def results_named(options: CardOptions, datasets: object) -> list[str]:
    """Returns the names of the datasets for the text."""
    return [str(item) for item in listed(options.dataset) or listed(datasets)]


def listed(value: object) -> list[Any]:
    """Returns one value or several values as a list."""
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict)) else [value]


def is_hub_id(name: object) -> bool:
    """True if one or all names are valid hub model ids and no local paths. The hub refuses cards with other names."""
    names = listed(name)
    return bool(names) and all(
        isinstance(item, str) and _HUB_ID.fullmatch(item) and not Path(item).exists() for item in names
    )


def base_of(facts: CardFacts) -> str | None:
    """Returns the id of the base model on the hub, if known."""
    return next((name for name in facts.origins if name and is_hub_id(name)), None)


def task_of(kind: str) -> str | None:
    """Returns the task of a model, from the name of its class."""
    return next((task for ending, task in _TASKS.items() if kind.endswith(ending)), None)


def builders_of(dataset: object) -> list[str]:
    """Returns the hub id of the dataset, if `datasets` loaded it from the hub; else an empty list."""
    if "datasets" not in sys.modules:
        return []
    name = getattr(getattr(dataset, "info", None), "builder_name", None)
    return [name] if isinstance(name, str) and name not in _LOADERS and is_hub_id(name) else []
