# Generated from seq2seq.py by tools/docs.py; do not edit.

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.args.training import TrainingArguments

@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """TrainingArguments with options for text generation in evaluation."""

    sortish_sampler: bool = ...
    """Train on batches of similar length in a partly random order: train_sampling_strategy='group_by_length' for the
    training data only, so that predictions keep the order of their samples."""
    predict_with_generate: bool = ...
    """Evaluate and predict on generated text rather than on the model's outputs for given targets. The loss is
    computed too; without compute_metrics an evaluation computes the loss only."""
    generation_max_length: int | None = ...
    """Maximum length of generated text, in tokens. Unset: the model's generation config."""
    generation_num_beams: int | None = ...
    """Number of beams for generation. Unset: the model's generation config."""
    generation_config: Path | str | dict[str, Any] | None = ...
    """Generation settings that replace the model's own: a GenerationConfig, the path of a folder or file with one,
    or a model's name; or a dict (JSON object) of options that override the model's own."""
