"""Tasks of EleutherAI's lm-evaluation-harness at each evaluation."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from paceline.args.errors import UnsupportedOption
from paceline.core.events import TrainerCallback
from paceline.core.optional import require
from paceline.core.state import TrainerState
from paceline.pytorch.evaluation.samples import EvaluationTools
from paceline.pytorch.model.tensor_parts import is_dtensor

__all__ = ["EvaluationHarness"]

logger = logging.getLogger(__name__)

EXTRA = "lm-eval"
NAME = "EvaluationHarness"
SEED = 1234  # of the examples in prompts, as in the harness' own command


class EvaluationHarness(TrainerCallback):
    """Runs tasks of the lm-evaluation-harness with the model at each evaluation.

    Their results are entries of the evaluation's log row, `eval_TASK_METRIC` and `eval_TASK_METRIC_stderr`, that can
    choose the best model (`metric_for_best_model="TASK_METRIC"`). A filter other than "none" is a further part of the
    name: `eval_gsm8k_exact_match_strict-match`. With several evaluation sets the tasks run once, with the first one.

    Several processes divide the tasks among themselves. Needs `pip install "paceline[lm-eval]"`.

    Args:
        tasks: names of tasks or groups of the harness.
        num_fewshot: examples in the prompt. Unset: those of each task.
        limit: samples of each task; a float below 1 is a share. Unset: all.
        include_path: folder of YAML files that define further tasks.
        batch_size: sequences per pass. Unset: the evaluation's.
        every: runs at the first and each `every`-th evaluation after it.
        bootstrap_iters: resamples for the standard errors of metrics other than means; 0: no standard errors at all.
        model_args: further arguments of `lm_eval.models.huggingface.HFLM`, such as `max_length` or `add_bos_token`.
        evaluate_args: further arguments of `lm_eval.evaluator.evaluate`, such as `apply_chat_template`.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        *,
        num_fewshot: int | None = None,
        limit: int | float | None = None,
        include_path: str | Path | None = None,
        batch_size: int | None = None,
        every: int = 1,
        bootstrap_iters: int = 100,
        model_args: Mapping[str, Any] | None = None,
        evaluate_args: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(tasks, str) or not tasks or not all(isinstance(task, str) and task for task in tasks):
            raise ValueError(f"{NAME}(tasks={tasks!r}): expected a list of names, such as ['hellaswag'].")
        for name, value, least in (
            ("num_fewshot", num_fewshot, 0),
            ("batch_size", batch_size, 1),
            ("every", every, 1),
            ("bootstrap_iters", bootstrap_iters, 0),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"{NAME}({name}={value!r}): expected a whole number of at least {least}.")
        if limit is not None and not 0 < limit < math.inf:
            raise ValueError(f"{NAME}(limit={limit!r}): expected a number of samples, or a share below 1.")
        if include_path is not None and not Path(include_path).is_dir():
            raise ValueError(f"{NAME}(include_path={str(include_path)!r}): there is no such folder.")
        self.tasks, self.every, self.include_path = list(tasks), every, include_path
        self.batch_size, self.model_args = batch_size, dict(model_args or {})
        self.settings = {
            "limit": limit,
            "bootstrap_iters": bootstrap_iters,
            "log_samples": False,
            **(evaluate_args or {}),
        }
        self.num_fewshot = num_fewshot
        self._manager: Any = None
        self._last: tuple[int, str] | None = None  # step and prefix of the last evaluation
        self._num_evaluations = 0

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: nn.Module | None = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        """Checks before the first step that the harness is installed, has the tasks, and can call the model."""
        if model is not None:
            check_model(model, processing_class, any(is_dtensor(each) for each in model.parameters()))
        self._find_tasks()

    def on_within_evaluation(
        self,
        args: Any,
        state: TrainerState,
        control: object,
        metrics: dict[str, float] | None = None,
        evaluation: EvaluationTools | None = None,
        **kwargs: object,
    ) -> None:
        """Runs the tasks, and adds their results to the metrics. All processes take part."""
        assert evaluation is not None
        assert metrics is not None
        if not self._is_due(state.global_step, evaluation.prefix):
            return
        check_model(evaluation.model, evaluation.processing_class, evaluation.shards or evaluation.has_stages)
        self._find_tasks()
        own = self.tasks[evaluation.rank :: evaluation.world_size]
        found: dict[str, float] | Exception = {}
        try:
            found = self._run(own, evaluation) if own else {}
        except Exception as error:  # the others wait for the results
            found = error
        for part in evaluation.gather(found):
            if isinstance(part, Exception):
                raise part
            metrics.update({f"{evaluation.prefix}_{name}": value for name, value in part.items()})

    def _is_due(self, step: int, prefix: str) -> bool:
        if self._last is not None and self._last[0] == step and self._last[1] != prefix:
            return False  # another set of the same evaluation
        self._last = step, prefix
        self._num_evaluations += 1
        return (self._num_evaluations - 1) % self.every == 0

    def _find_tasks(self) -> None:
        """Lists the tasks of the harness, once.

        Raises:
            ImportError: it is not installed.
            ValueError: it has no task of a name.
        """
        if self._manager is None:
            manager = require("lm_eval.tasks", EXTRA).TaskManager
            self._manager = manager(include_path=None if self.include_path is None else str(self.include_path))
        known = set(self._manager.all_tasks)
        missing = [task for task in self.tasks if task not in known]
        if missing:
            raise ValueError(
                f"{NAME}(tasks=...): the harness has no task {missing[0]!r}; `lm_eval ls tasks` lists them, and "
                "include_path adds a folder of your own."
            )

    def _set_examples(self, task: Any) -> None:
        """Sets the examples in the prompts of a task, whose own 0 remains; they are drawn by a seed."""
        own = task.get_config("num_fewshot")
        if self.num_fewshot is not None and own != 0:
            task.set_config(key="num_fewshot", value=self.num_fewshot)
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)

    def _run(self, tasks: Sequence[str], evaluation: EvaluationTools) -> dict[str, float]:
        """Returns the results of tasks."""
        evaluate = require("lm_eval.evaluator", EXTRA).evaluate
        language_model = require("lm_eval.models.huggingface", EXTRA).HFLM
        with evaluation.evaluated():
            model = language_model(
                pretrained=evaluation.model,
                tokenizer=evaluation.processing_class,
                **{"batch_size": self.batch_size or evaluation.batch_size, **self.model_args},
            )
            loaded = self._manager.load(list(tasks))
            for task in loaded["tasks"].values():
                self._set_examples(task)
            output = evaluate(lm=model, task_dict=loaded, **self.settings)
        return flatten(output["results"])


def flatten(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Returns the results of the harness, `{task: {"METRIC,FILTER": value}}`, as numbers by `TASK_METRIC[_FILTER]`."""
    found = {}
    for task, values in results.items():
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if isinstance(value, int | float) and not isinstance(value, bool) and chosen:
                found[f"{task}_{metric}" + ("" if chosen == "none" else f"_{chosen}")] = float(value)
    return found


def check_model(model: nn.Module, processing_class: object, is_split: bool) -> None:
    """Refuses models that the harness cannot call.

    Args:
        model: the model without the strategy's wrapper.
        processing_class: the tokenizer.
        is_split: the model is sharded or split over processes.

    Raises:
        UnsupportedOption: the message names the remedy.
    """
    if is_split:
        raise UnsupportedOption(
            f"{NAME} with a model that is sharded or split over processes is not supported, since each process runs "
            "tasks of its own: replicate it, or run `lm_eval` on a checkpoint."
        )
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise UnsupportedOption(
            f"{NAME} needs a language model of transformers, and the model is a {type(model).__name__}: leave it out."
        )
    if processing_class is None:
        raise UnsupportedOption(f"{NAME} needs a tokenizer: pass Trainer(processing_class=...).")


def harness_of(value: Mapping[str, Any]) -> EvaluationHarness:
    """Returns the callback of the option `eval_harness`, the callback's arguments."""
    return EvaluationHarness(**value)
