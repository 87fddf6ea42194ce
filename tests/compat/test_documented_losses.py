"""The `compute_loss` examples of the Hugging Face documentation run as printed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Trainer, TrainingArguments

transformers = pytest.importorskip("transformers")

# two forms of its example: class weights over `num_labels`, label smoothing over `vocab_size`
CLASS_WEIGHTS = """
from torch import nn
from transformers import Trainer

class CustomTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        # forward pass
        outputs = model(**inputs)
        logits = outputs.get("logits")
        # compute custom loss for 3 labels with different weights
        loss_fct = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], device=model.device))
        loss = loss_fct(logits.view(-1, self.model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss
"""
LABEL_SMOOTHING = """
from torch import nn
from transformers import Trainer

class CustomTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.get("logits")
        loss_fct = nn.CrossEntropyLoss(label_smoothing=0.1)
        loss = loss_fct(logits.view(-1, self.model.config.vocab_size), labels.view(-1))
        return (loss, outputs) if return_outputs else loss
"""
SIZES = {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "LlamaForCausalLM":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))
    config = transformers.BertConfig(
        **SIZES, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=16
    )
    return getattr(transformers, kind)(config)


def make_samples(kind: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 29, (24, 8), generator=generator)
    labels = ids.sum(-1) % 3 if kind == "BertForSequenceClassification" else ids.flip(-1)
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def make_trainer(example: str, base: type, arguments: type, kind: str, folder: Path) -> Any:
    """Runs the text of an example with Trainer imported from where `base` is, and returns a trained CustomTrainer."""
    names: dict[str, Any] = {"torch": torch}
    exec(example.replace("from transformers import", f"from {base.__module__} import"), names)
    args = arguments(
        output_dir=str(folder),
        max_steps=4,
        logging_steps=1,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    samples = make_samples(kind)
    trainer = names["CustomTrainer"](model=make_model(kind), args=args, train_dataset=samples, eval_dataset=samples[:6])
    trainer.train()
    return trainer


def losses_of(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


EXAMPLES = pytest.mark.parametrize(
    ("example", "kind"),
    [
        (CLASS_WEIGHTS, "BertForSequenceClassification"),
        (LABEL_SMOOTHING, "BertForMaskedLM"),
        (LABEL_SMOOTHING, "LlamaForCausalLM"),
    ],
    ids=["class weights, BERT", "label smoothing, BERT", "label smoothing, Llama"],
)


@EXAMPLES
def test_it_runs_as_printed(example: str, kind: str, tmp_path: Path) -> None:
    """The loss of an evaluation is the example's own, on the samples as one batch."""
    trainer = make_trainer(example, Trainer, TrainingArguments, kind, tmp_path)
    assert len(losses_of(trainer)) == 4
    samples = make_samples(kind)[:6]
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    with torch.no_grad():
        logits = trainer.model(input_ids=batch["input_ids"]).logits
        classes = logits.shape[-1]
        if example is CLASS_WEIGHTS:
            options: dict[str, Any] = {"weight": torch.tensor([1.0, 2.0, 3.0])}
        else:
            options = {"label_smoothing": 0.1}
        expected = nn.functional.cross_entropy(logits.view(-1, classes), batch["labels"].view(-1), **options)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
@EXAMPLES
def test_it_logs_the_losses_of_transformers(example: str, kind: str, tmp_path: Path) -> None:
    ours = make_trainer(example, Trainer, TrainingArguments, kind, tmp_path / "ours")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = make_trainer(
            example, transformers.Trainer, transformers.TrainingArguments, kind, tmp_path / "theirs"
        )
    assert losses_of(ours) == pytest.approx(losses_of(reference), rel=1e-3)  # transformers rounds what it logs
