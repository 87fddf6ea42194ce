"""A run on masked tokens: it learns, and a resumed one sees the masks that the whole run saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers_models import WORDS, tokenizer  # noqa: E402


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        control.should_training_stop = state.global_step == 7


def texts() -> list[dict[str, Any]]:
    """Texts that count on from a random word."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 15, (40,), generator=generator).tolist()
    tool = tokenizer()
    return [dict(tool(" ".join(WORDS[start : start + 5 + place % 7]))) for place, start in enumerate(starts)]


def make_trainer(folder: Path, num_workers: int) -> Trainer:
    tool = tokenizer()
    tool.add_special_tokens({"mask_token": "<mask>"})
    config = transformers.BertConfig(
        vocab_size=len(tool),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=4,
        per_device_train_batch_size=4,
        learning_rate=0.02,
        logging_steps=1,
        save_steps=7,
        dataloader_num_workers=num_workers,
        report_to="none",
        disable_tqdm=True,
    )
    model = transformers.BertForMaskedLM(config)
    return Trainer(model, arguments, DataCollatorForLanguageModeling(tool, mlm_probability=0.4), train_dataset=texts())


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_sees_the_same_masks(tmp_path: Path, num_workers: int) -> None:
    whole = make_trainer(tmp_path / "whole", num_workers)
    whole.train()
    part = make_trainer(tmp_path / "part", num_workers)
    part.add_callback(Stop())
    part.train()
    rest = make_trainer(tmp_path / "part", num_workers)
    rest.train(resume_from_checkpoint=True)
    losses, resumed = (
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (whole, rest)
    )
    assert resumed == losses
    assert len(losses) == 40
    assert sum(losses[-10:]) < 0.95 * sum(losses[:10])
