"""`paceline schema`: the JSON schema of the files of `paceline train`, with which editors complete and check them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from paceline.args.members import Member
from paceline.args.older_names import OLDER_NAMES
from paceline.args.option_docs import schema_of
from paceline.cli.config import DATA_KEYS, OTHER_NAMES, SECTIONS
from paceline.cli.errors import UsageError
from paceline.cli.job_metrics import METRICS, TASKS
from paceline.cli.job_predictions import AUGMENTATION_KEYS, ENSEMBLE_KEYS
from paceline.cli.options import FRAMEWORKS, is_option_of_tensorflow
from paceline.cli.search_options import KEYS as SEARCH_KEYS
from paceline.predictions.calibration import METHODS
from paceline.tensorflow.arguments import TFTrainingArguments

FACTORY = {"type": "string", "pattern": r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"}
DESCRIPTIONS = {
    "model": "A folder or name for transformers, its configuration {model_type: ...}, or package.module:name.",
    "tokenizer": "A folder or name, or package.module:name. Default: the model's.",
    "data": "Files, a folder of datasets.save_to_disk, or package.module:name.",
    "preprocess": "package.module:function for datasets.map.",
    "metrics": "Metrics of the eval set, by name.",
    "search": "The search of `paceline search`.",
    "trainer": "A subclass of Trainer, as package.module:name.",
    "augmentation": "Test-time augmentation of the final evaluation and the predictions: transforms, or arguments.",
    "calibration": "Method of the calibration that is fitted on the evaluation data and stored beside the model.",
    "ensemble": "Folders, or patterns of folders, whose predictions of the test set are combined, or arguments.",
}


def run(words: Sequence[str]) -> int:
    """Prints the schema.

    Raises:
        UsageError: a word is given.
    """
    if words:
        raise UsageError(f"schema takes no {words[0]!r}: paceline schema > paceline.schema.json")
    print(json.dumps(make_schema(), indent=2))
    return 0


def make_schema() -> dict[str, Any]:
    """Returns the schema of a configuration: the sections, and the options at the top level or under `arguments`."""
    options = schema_of(TFTrainingArguments)
    for name, schema in options.items():
        if is_option_of_tensorflow(name):
            schema["description"] += " With framework: tf."
    options.update({name: {"deprecated": True} for name in OLDER_NAMES if name not in options})
    references = {name: {"$ref": f"#/$defs/{name}"} for name in options}
    sections = {name: section_schema(name) for name in SECTIONS}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A training job of `paceline train`, or a search of `paceline search`",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **sections,
            **{other: sections[name] for other, name in OTHER_NAMES.items()},
            "callbacks": {"type": "array", "items": {"type": ["string", "object"]}},
            "members": members_schema(),
            "search": section_schema("search"),
            "framework": {"enum": list(FRAMEWORKS), "default": FRAMEWORKS[0]},
            "arguments": {"type": ["object", "null"], "additionalProperties": False, "properties": references},
            **references,
        },
        "$defs": options,
    }


def members_schema() -> dict[str, Any]:
    """Returns the schema of the members that are trained at once."""
    settings: dict[str, Any] = {field.name: {} for field in fields(Member)}
    member = {"type": "object", "additionalProperties": False, "properties": settings}
    description = "Settings of several models of one architecture that are trained at once."
    return {"description": description, "type": ["array", "null"], "minItems": 2, "items": member}


def section_schema(name: str) -> dict[str, Any]:
    """Returns the schema of one section."""
    schema: dict[str, Any] = {"description": DESCRIPTIONS.get(name, "package.module:name.")}
    if name == "data":
        keys: dict[str, Any] = {key: {} for key in (*DATA_KEYS, "factory")}
        with_factory = {"type": "object", "required": ["factory"], "properties": {"factory": FACTORY}}
        files = {"type": "object", "additionalProperties": False, "properties": keys, "not": {"required": ["factory"]}}
        return {**schema, "anyOf": [{"type": ["string", "array", "null"]}, with_factory, files]}
    if name == "metrics":
        names = {"type": "array", "minItems": 1, "items": {"enum": list(METRICS)}}
        one = {"enum": list(METRICS)}
        keys = {"names": {"anyOf": [one, names]}, "task": {"enum": [*TASKS, None]}, "threshold": {}}
        mapping = {"type": "object", "additionalProperties": False, "required": ["names"], "properties": keys}
        return {**schema, "anyOf": [one, names, mapping, {"type": "null"}]}
    if name == "search":
        keys = {key: {} for key in SEARCH_KEYS}
        return {**schema, "type": "object", "additionalProperties": False, "required": ["space"], "properties": keys}
    if name == "calibration":
        one = {"enum": list(METHODS)}
        keys = {"method": one}
        mapping = {"type": "object", "additionalProperties": False, "required": ["method"], "properties": keys}
        return {**schema, "anyOf": [one, mapping, {"type": "null"}]}
    if name in ("augmentation", "ensemble"):
        known, needed = (AUGMENTATION_KEYS, "transforms") if name == "augmentation" else (ENSEMBLE_KEYS, "members")
        keys = {key: {} for key in known}
        mapping = {"type": "object", "additionalProperties": False, "required": [needed], "properties": keys}
        return {**schema, "anyOf": [{"type": ["string", "null"]}, {"type": "array", "minItems": 1}, mapping]}
    return {**schema, "type": ["string", "object", "null"]}
