"""The arguments of sequence-to-sequence training."""

# ruff: noqa: RUF009  (option() makes a dataclass field, not a value shared by instances)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.args.sections import option
from paceline.args.training import TrainingArguments


@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """TrainingArguments, and how text is generated in evaluation."""

    sortish_sampler: bool = option(
        False,
        "Train on batches of like length, with some randomness in their order: train_sampling_strategy="
        "'group_by_length' for the training data only, so that predictions keep the order of their samples.",
    )
    predict_with_generate: bool = option(
        False,
        "Evaluate and predict on generated text rather than on the model's outputs for given targets. The loss is "
        "computed beside it; without compute_metrics an evaluation computes the loss only.",
    )
    generation_max_length: int | None = option(
        None, "Longest generated text, in tokens. Unset: as the model's generation config says."
    )
    generation_num_beams: int | None = option(
        None, "Beams of the search in generation. Unset: as the model's generation config says."
    )
    generation_config: Path | str | dict[str, Any] | None = option(
        None,
        "Generation settings in place of the model's own: a GenerationConfig, the path of a folder or file that holds "
        "one, or a model's name; or a dict (JSON object) of options that go over the model's own.",
    )
