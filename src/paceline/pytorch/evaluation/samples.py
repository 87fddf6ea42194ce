"""Samples at evaluation: some rows of the evaluation set, fixed by a seed, with the model's outputs for them.

A model that generates continues prompts; any other model predicts. The rows are written as a table, and pictures as a
figure, in the log, the report and the trackers. All processes take part in the passes, and the first one writes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.args.errors import UnsupportedOption
from paceline.args.eval_samples import check_settings
from paceline.core.events import TrainerCallback
from paceline.core.media import shown_cell
from paceline.core.optional import is_installed
from paceline.core.state import TrainerState
from paceline.pytorch.evaluation import sample_cells, sample_text

__all__ = ["EvaluationSamples", "EvaluationTools"]

logger = logging.getLogger(__name__)

Step = Callable[..., tuple[Any, Any, Any]]


@dataclass(frozen=True, kw_only=True)
class EvaluationTools:
    """The functions that the event `on_within_evaluation` gives to callbacks.

    Attributes:
        prefix: prefix of the metrics, such as "eval", or "eval_NAME" of one of several sets.
        dataset: the evaluation set, with all of its columns.
        model: the model without the strategy's wrapper.
        processing_class: the tokenizer or processor; None without one.
        batch_size: samples per batch on one process.
        label_names: names of the labels in a batch.
        collate: `(samples) -> batch`.
        predict: `(batches, step) -> EvalLoopOutput` over the same list of batches on all processes, whose share each
            runs, with the model as it is evaluated, without effect on the training's random numbers. A collective.
            `step` is a prediction step, None for the Trainer's.
        generate: `(inputs, settings) -> token ids`, for a batch on the device.
        place: `(batch) -> batch` on the device.
        evaluated: returns a context in which the model is as it is evaluated, and random numbers are put back.
        rank, world_size: this process among all.
        gather: `(value) -> the values of all processes`, by rank. A collective.
        log_table, log_figure: the methods of the Trainer.
        generates: True if the Trainer's own prediction step generates.
        shards: True if all processes must make the same passes.
        has_stages: True if the model is split into stages, each on another process.
    """

    prefix: str
    dataset: Any
    model: nn.Module
    processing_class: Any
    batch_size: int
    label_names: Sequence[str]
    collate: Callable[[list[Any]], Any]
    predict: Callable[[list[Any], Step | None], Any]
    generate: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
    place: Callable[[Any], Any]
    evaluated: Callable[[], Any]
    rank: int
    world_size: int
    gather: Callable[[Any], list[Any]]
    log_table: Callable[[str, Sequence[str], Sequence[Sequence[Any]]], None]
    log_figure: Callable[[str, Any], None]
    generates: bool
    shards: bool
    has_stages: bool


class EvaluationSamples(TrainerCallback):
    """Writes a table of samples at each evaluation: generated texts, or predictions beside labels.

    The table `PREFIX/samples`, and for images the figure `PREFIX/pictures`, are written as `Trainer.log_table` and
    `Trainer.log_figure` do. The rows are read at the first evaluation and kept, so that they stay the same.

    Args:
        num: rows of each evaluation set; the first ones of a stream.
        seed: chooses the rows, and seeds generation that draws random numbers.
        max_new_tokens: length of a generated text in tokens, unless `generation` sets it.
        prompt_tokens: length of the prompt in tokens, for rows that are one text without a masked prompt. Unset: half
            of the row.
        generation: options of `generate` over those of the model's own generation config; {}: that config. Unset:
            greedy decoding.
        picture_shape: (height, width) or (channels, height, width) of inputs that are pictures in flat rows. Unset:
            inputs of shape (channels, height, width) with 1, 3 or 4 channels are pictures.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(
        self,
        num: int = 8,
        *,
        seed: int = 0,
        max_new_tokens: int = 64,
        prompt_tokens: int | None = None,
        generation: Mapping[str, Any] | None = None,
        picture_shape: Sequence[int] | None = None,
    ) -> None:
        given = {"num": num, "seed": seed, "max_new_tokens": max_new_tokens, "prompt_tokens": prompt_tokens}
        check_settings("EvaluationSamples", {**given, "generation": generation, "picture_shape": picture_shape})
        self.num, self.seed = num, seed
        self.max_new_tokens, self.prompt_tokens = max_new_tokens, prompt_tokens
        self.generation = None if generation is None else dict(generation)
        self.picture_shape = None if picture_shape is None else tuple(picture_shape)
        self._kept: dict[str, tuple[Any, list[tuple[int, Any]]]] = {}  # by prefix: the set, and its rows by index
        self._is_warned = False

    def on_within_evaluation(
        self,
        args: object,
        state: TrainerState,
        control: object,
        evaluation: EvaluationTools | None = None,
        **kwargs: object,
    ) -> None:
        """Predicts the samples, and writes them. All processes take part."""
        assert evaluation is not None
        with evaluation.evaluated():
            rows = self._rows_of(evaluation)
        if not rows:
            self._warn("eval_samples: the evaluation set %s yields no rows.", type(evaluation.dataset).__name__)
            return
        size = min(evaluation.batch_size, len(rows))
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        with evaluation.evaluated():
            batches = [evaluation.collate([row for _, row in part]) for part in parts]
        kind = sample_text.kind_of(evaluation.model, batches[0], evaluation.label_names)
        if kind is None:
            self._show_predictions(evaluation, state, parts, batches)
        else:
            self._show_texts(evaluation, state, rows, batches, kind)

    def _rows_of(self, evaluation: EvaluationTools) -> list[tuple[int, Any]]:
        """Returns the chosen rows by their index, in the order of the set; the same at each evaluation."""
        held, rows = self._kept.get(evaluation.prefix, (None, []))
        if held is evaluation.dataset and rows:
            return rows
        dataset = evaluation.dataset
        if callable(getattr(dataset, "__getitem__", None)) and hasattr(dataset, "__len__"):
            chosen = random.Random(self.seed).sample(range(len(dataset)), min(self.num, len(dataset)))
            rows = [(index, dataset[index]) for index in sorted(chosen)]
        else:
            rows = list(enumerate(islice(iter(dataset), self.num)))
        self._kept[evaluation.prefix] = dataset, rows
        return rows

    def _warn(self, text: str, *values: object) -> None:
        if not self._is_warned:
            logger.warning(text, *values)
        self._is_warned = True

    # ---- generated text

    def _show_texts(
        self,
        evaluation: EvaluationTools,
        state: TrainerState,
        rows: list[tuple[int, Any]],
        batches: list[Any],
        kind: str,
    ) -> None:
        """Writes prompts, generated texts and references."""
        if evaluation.has_stages:
            raise UnsupportedOption(
                "EvaluationSamples of a model that generates and is split into stages (pp) is not supported: leave the "
                "samples out."
            )
        settings = sample_text.settings_of(evaluation.model, self.generation, self.max_new_tokens)
        positions = sample_text.num_positions(evaluation.model)
        split = sample_text.Splitter(kind, evaluation.label_names, self.prompt_tokens, self.max_new_tokens, positions)
        step: Step | None = None
        if kind != sample_text.ENCODER_DECODER or not evaluation.generates:
            step = self._generating(evaluation, settings, split)
        texts = [text for batch in batches for text in split.rows(batch)]  # before a loss may take the labels out
        generated = evaluation.predict(batches, step).predictions
        if not state.is_world_process_zero:
            return
        reader = sample_text.Reader(evaluation.processing_class, evaluation.model)
        table = [
            [index, reader.text(prompt) or sample_cells.input_of(row), reader.answer(answer), reader.text(reference)]
            for (index, row), (prompt, reference), answer in zip(rows, texts, np.asarray(generated), strict=True)
        ]
        self._write(evaluation, state, ["row", "prompt", "generated", "reference"], table)

    def _generating(
        self, evaluation: EvaluationTools, settings: Mapping[str, Any], split: sample_text.Splitter
    ) -> Step:
        """Returns a prediction step that generates; the predictions are token ids without the prompt."""

        def step(model: object, inputs: Any, loss_only: bool, ignore_keys: object = None) -> tuple[Any, Any, Any]:
            torch.manual_seed(self.seed)
            placed = evaluation.place(inputs)
            return None, sample_text.continuations(evaluation, placed, settings, split), None

        return step

    # ---- predictions

    def _show_predictions(
        self, evaluation: EvaluationTools, state: TrainerState, parts: list[list[tuple[int, Any]]], batches: list[Any]
    ) -> None:
        """Writes predictions beside labels, and pictures."""
        rows = [row for part in parts for row in part]
        inputs = [
            each
            for part, batch in zip(parts, batches, strict=True)
            for each in sample_cells.main_inputs(batch, evaluation.label_names, len(part))
        ]
        output = evaluation.predict(batches, None)
        if not state.is_world_process_zero:
            return
        reader = sample_text.Reader(evaluation.processing_class, evaluation.model)
        results = sample_cells.results_of(output.predictions, output.label_ids, len(rows), reader, inputs)
        pictures = [
            sample_cells.picture_of(row, each, self.picture_shape) for (_, row), each in zip(rows, inputs, strict=True)
        ]
        table = [
            [
                index,
                f"picture {place + 1}" if pictures[place] is not None else reader.input(each, row),
                result.label,
                result.prediction,
                result.confidence,
            ]
            for place, ((index, row), each, result) in enumerate(zip(rows, inputs, results, strict=True))
        ]
        self._write(evaluation, state, ["row", "input", "label", "prediction", "confidence"], table)
        shown = [
            (picture, each.is_right) for picture, each in zip(pictures, results, strict=True) if picture is not None
        ]
        if shown and not is_installed("PIL"):
            self._warn('Pictures of samples need Pillow: pip install "paceline[plots]".')
        elif shown:
            evaluation.log_figure(f"{evaluation.prefix}/pictures", sample_cells.montage(shown))

    def _write(
        self, evaluation: EvaluationTools, state: TrainerState, columns: Sequence[str], table: Sequence[Sequence[Any]]
    ) -> None:
        filled = [place for place in range(len(columns)) if any(row[place] not in (None, "") for row in table)]
        heads = [columns[place] for place in filled]
        cells = [[row[place] for place in filled] for row in table]
        lines = [
            "  ".join(f"{head}: {shown_cell(cell)}" for head, cell in zip(heads, row, strict=True)) for row in cells
        ]
        logger.info("Samples of %s at step %d:\n%s", evaluation.prefix, state.global_step, "\n".join(lines))
        evaluation.log_table(f"{evaluation.prefix}/samples", heads, cells)


def samples_of(value: int | Mapping[str, Any]) -> EvaluationSamples:
    """Returns the callback of the option `eval_samples`: a number of rows, or the callback's arguments."""
    return EvaluationSamples(value) if isinstance(value, int) else EvaluationSamples(**value)
