"""Text classification: which of several classes a text belongs to.

    python examples/text_classification.py
    python examples/text_classification.py --model_name_or_path bert-base-uncased --learning_rate 3e-5 \
        --train_file train.json --validation_file validation.json    # lines of {"text": ..., "label": ...}
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from local_data import reviews, train_tokenizer
from paceline import DataCollatorWithPadding, EvalPrediction, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ScriptArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "A trained model. Unset: a small new one."})
    train_file: str | None = field(default=None, metadata={"help": "JSON lines to train on. Unset: made reviews."})
    validation_file: str | None = field(default=None, metadata={"help": "JSON lines to evaluate on."})
    max_length: int = field(default=64, metadata={"help": "Longer texts are cut to so many tokens."})


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, axis=-1) == prediction.label_ids).mean())}


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="runs/text_classification",
        learning_rate=1e-3,
        per_device_train_batch_size=32,
        num_train_epochs=4,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=25,
    )
    script, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)

    if script.train_file:
        data = load_dataset("json", data_files={"train": script.train_file, "validation": script.validation_file})
    else:
        data = reviews()
    labels = sorted(set(data["train"]["label"]))

    names: dict[str, Any] = {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}
    if script.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
        model = AutoModelForSequenceClassification.from_pretrained(script.model_name_or_path, **names)
    else:
        tokenizer = train_tokenizer(data["train"]["text"])
        config = AutoConfig.for_model(
            "bert",
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **names,
        )
        model = AutoModelForSequenceClassification.from_config(config)

    def prepare(rows: dict[str, list[Any]]) -> dict[str, Any]:
        encoded = tokenizer(rows["text"], truncation=True, max_length=script.max_length)
        return {**encoded, "labels": [labels.index(label) for label in rows["label"]]}

    data = data.map(prepare, batched=True, remove_columns=data["train"].column_names)

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
    )
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
