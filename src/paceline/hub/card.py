"""The model card, `README.md`: metadata that the hub reads, and what a person wants to know of the training.

The text of the run stands between two comments. What somebody wrote outside of them stays, and so do metadata that
neither the run nor the caller knows better.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.metrics import jsonable
from paceline.core.optional import require
from paceline.hub.card_text import describe
from paceline.hub.contents import CARD_NAME, output_of
from paceline.hub.described import CardFacts
from paceline.hub.history import final_metrics

if TYPE_CHECKING:
    from paceline.hub.names import HubNames

logger = logging.getLogger(__name__)

BEGIN = "<!-- paceline: this part is written anew at each push -->"
END = "<!-- paceline: end of that part -->"
TEMPLATE_MARK = "[More Information Needed]"  # in cards that libraries make, of which nothing is kept but the metadata

_HUB_ID = re.compile(r"[\w][\w.-]*(?:/[\w][\w.-]*)?")
# the end of a model class's name -> the task that the hub knows it under
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
# files are no data sets: what `datasets` calls the loader of one says nothing
_LOADERS = {"csv", "json", "pandas", "parquet", "text", "arrow", "generator", "imagefolder", "audiofolder", None}


@dataclass(frozen=True)
class CardOptions:
    """What the caller of `create_model_card` knows; None or empty where the run is to say it."""

    language: Any = None
    license: Any = None
    tags: Any = None
    model_name: str | None = None
    finetuned_from: str | None = None
    tasks: Any = None
    dataset_tags: Any = None
    dataset: Any = None
    dataset_args: Any = None


def write_card(trainer: HubNames, options: CardOptions, find_facts: Callable[[], CardFacts]) -> None:
    """The body of `create_model_card`. Raises: ImportError, when huggingface_hub is missing; OSError."""
    if not trainer.is_world_process_zero():
        return
    path = output_of(trainer) / CARD_NAME
    metadata, text = read_card(path)
    name = " ".join(str(options.model_name or output_of(trainer).name).split())
    facts = find_facts()
    data = make_metadata(trainer, facts, options, metadata, name)
    own = describe(trainer, facts, name, data.base_model, results_named(options, data.datasets))
    content = f"---\n{data.to_yaml()}\n---\n\n{merged(text, own)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{CARD_NAME}.incomplete-{os.getpid()}")  # a push may be reading the one that is there
    temporary.write_text(content, encoding="utf-8")
    os.replace(temporary, path)


def read_card(path: Path) -> tuple[dict[str, Any], str]:
    """Metadata and text of a card; empty where there is none, or where they cannot be read (with a warning)."""
    if not path.is_file():
        return {}, ""
    content = path.read_text(encoding="utf-8")
    match = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", content, re.DOTALL)
    if match is None:
        return {}, content.strip()
    try:
        card = require("huggingface_hub", "hub").ModelCard(content, ignore_metadata_errors=True)
    except Exception as error:  # of YAML's many kinds
        logger.warning("The metadata of %s could not be read, and are written anew: %s", path, error)
        return {}, content[match.end() :].strip()
    return card.data.to_dict(), card.text.strip()


def merged(text: str, own: str) -> str:
    """The text of a card with our part in its place, or at the end."""
    part = f"{BEGIN}\n\n{own}\n{END}"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        return f"{before}{part}{after}".strip() + "\n"
    if not text or TEMPLATE_MARK in text:
        return part + "\n"
    return f"{text}\n\n{part}\n"


# ---- metadata


def make_metadata(
    trainer: HubNames, facts: CardFacts, options: CardOptions, earlier: dict[str, Any], name: str
) -> Any:
    """huggingface_hub's ModelCardData: what was there, what the run knows, what the caller says; the last wins."""
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
    datasets = listed(options.dataset_tags) or listed(values.get("datasets")) or builders_of(trainer.train_dataset)
    values["datasets"] = datasets or None
    results = evaluations(trainer, options, tasks, datasets, name)
    if results:
        values["metrics"] = [result.metric_type for result in results]
    return hub.ModelCardData(**jsonable(values), model_name=name if results else None, eval_results=results or None)


def evaluations(trainer: HubNames, options: CardOptions, tasks: list[str], datasets: list[str], name: str) -> list[Any]:
    """The metrics of the evaluation that describes the model, as the hub's EvalResult."""
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
        for metric, value in final_metrics(trainer).items()
    ]


def results_named(options: CardOptions, datasets: Any) -> list[str]:
    """What the text calls the data."""
    return [str(item) for item in listed(options.dataset) or listed(datasets)]


def listed(value: Any) -> list[Any]:
    """A list of what is given alone or as several."""
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict)) else [value]


def is_hub_id(name: Any) -> bool:
    """Whether a name could be that of a model of the hub; the hub refuses cards that name anything else."""
    names = listed(name)
    return bool(names) and all(
        isinstance(item, str) and _HUB_ID.fullmatch(item) and not Path(item).exists() for item in names
    )


def base_of(facts: CardFacts) -> str | None:
    """The model of the hub that this one was made from, where it tells."""
    return next((name for name in facts.origins if name and is_hub_id(name)), None)


def task_of(kind: str) -> str | None:
    """The task of a model, read off the name of its class."""
    return next((task for ending, task in _TASKS.items() if kind.endswith(ending)), None)


def builders_of(dataset: Any) -> list[str]:
    """The data set of the hub that `datasets` loaded, where it was one."""
    if "datasets" not in sys.modules:
        return []
    name = getattr(getattr(dataset, "info", None), "builder_name", None)
    return [name] if isinstance(name, str) and name not in _LOADERS and is_hub_id(name) else []
