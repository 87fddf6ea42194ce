"""Tasks of the lm-evaluation-harness: validation of `eval_harness`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.args.errors import did_you_mean, parse_json, wrong_value

SETTINGS = (
    *("tasks", "num_fewshot", "limit", "include_path", "batch_size", "every", "bootstrap_iters"),
    *("model_args", "evaluate_args"),
)
REMEDY = (
    f"expected names of tasks, such as ['arc_easy', 'piqa'], or a dict with tasks and some of {', '.join(SETTINGS[1:])}"
)


def keep_harness(name: str, value: object) -> dict[str, Any]:
    """Converts `eval_harness` (names, JSON or a mapping) to the arguments of the callback `EvaluationHarness`.

    Raises:
        ValueError: an unknown setting, or no tasks. The callback checks the other values when a Trainer is made.
    """
    if isinstance(value, str):
        text = value.strip()
        is_json = text[:1] in ("[", "{")
        value = parse_json(name, text) if is_json else [word.strip() for word in text.split(",") if word.strip()]
    if isinstance(value, list | tuple):
        value = {"tasks": list(value)}
    if not isinstance(value, Mapping):
        raise wrong_value(name, value, REMEDY)
    plain = {str(key): setting for key, setting in value.items()}
    for key in plain:
        if key not in SETTINGS:
            raise wrong_value(name, value, REMEDY, did_you_mean(key, list(SETTINGS)))
    tasks = plain.get("tasks")
    tasks = [tasks] if isinstance(tasks, str) else tasks
    if not isinstance(tasks, list | tuple) or not tasks or not all(isinstance(task, str) and task for task in tasks):
        raise wrong_value(name, value, REMEDY)
    return {**plain, "tasks": list(tasks)}
