"""Token classification: a tag for each word, here the names of people, places and companies.

    python examples/token_classification.py
    python examples/token_classification.py --model_name_or_path bert-base-cased --learning_rate 3e-5 \
        --train_file train.json --validation_file validation.json    # lines of {"tokens": [...], "tags": [...]}
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer

from local_data import named_entities, train_tokenizer
from transformers import (
    DataCollatorForTokenClassification,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "A trained model. Unset: a small new one."})
    train_file: str | None = field(default=None, metadata={"help": "JSON lines to train on. Unset: made sentences."})
    validation_file: str | None = field(default=None, metadata={"help": "JSON lines to evaluate on."})
    max_length: int = field(default=64, metadata={"help": "Longer texts are cut to so many tokens."})


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="runs/token_classification",
        learning_rate=5e-4,
        per_device_train_batch_size=32,
        num_train_epochs=4,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=20,
    )
    script, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)

    if script.train_file:
        data = load_dataset("json", data_files={"train": script.train_file, "validation": script.validation_file})
    else:
        data = named_entities()
    tags = sorted({tag for row in data["train"]["tags"] for tag in row})

    names: dict[str, Any] = {"id2label": dict(enumerate(tags)), "label2id": {tag: i for i, tag in enumerate(tags)}}
    if script.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
        model = AutoModelForTokenClassification.from_pretrained(script.model_name_or_path, **names)
    else:
        tokenizer = train_tokenizer(" ".join(words) for words in data["train"]["tokens"])
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
        model = AutoModelForTokenClassification.from_config(config)

    def prepare(rows: dict[str, list[Any]]) -> dict[str, Any]:
        encoded = tokenizer(rows["tokens"], is_split_into_words=True, truncation=True, max_length=script.max_length)
        encoded["labels"] = []
        for index, row in enumerate(rows["tags"]):
            words = encoded.word_ids(index)
            starts = [word is not None and word != words[i - 1] for i, word in enumerate(words)]  # of words
            encoded["labels"].append(
                [tags.index(row[word]) if start else -100 for word, start in zip(words, starts, strict=True)]
            )
        return encoded

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        """Accuracy over all words, and precision and recall over those that are part of a name."""
        found, right = np.argmax(prediction.predictions, axis=-1), prediction.label_ids
        counted, outside = right != -100, tags.index("O")
        hits = float((counted & (found == right) & (right != outside)).sum())
        return {
            "accuracy": float((found == right)[counted].mean()),
            "precision": hits / max(1.0, float((counted & (found != outside)).sum())),
            "recall": hits / max(1.0, float((counted & (right != outside)).sum())),
        }

    data = data.map(prepare, batched=True, remove_columns=data["train"].column_names)

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=compute_metrics,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
