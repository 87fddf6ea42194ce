"""Summarization: a short text for a long one, evaluated on what the model generates.

    python examples/summarization.py
    python examples/summarization.py --model_name_or_path t5-small --learning_rate 3e-4 --max_source_length 512 \
        --train_file train.json --validation_file validation.json    # lines of {"document": ..., "summary": ...}
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from local_data import reports, train_tokenizer
from transformers import (
    DataCollatorForSeq2Seq,
    EvalPrediction,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "A trained model. Unset: a small new one."})
    train_file: str | None = field(default=None, metadata={"help": "JSON lines to train on. Unset: made reports."})
    validation_file: str | None = field(default=None, metadata={"help": "JSON lines to evaluate on."})
    max_source_length: int = field(default=64, metadata={"help": "Longer documents are cut to so many tokens."})
    max_target_length: int = field(default=16, metadata={"help": "Longer summaries are cut to so many tokens."})


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, Seq2SeqTrainingArguments))
    parser.set_defaults(
        output_dir="runs/summarization",
        learning_rate=3e-3,
        warmup_steps=50,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        num_train_epochs=5,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=50,
        predict_with_generate=True,
        generation_max_length=16,
    )
    script, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)

    if script.train_file:
        data = load_dataset("json", data_files={"train": script.train_file, "validation": script.validation_file})
    else:
        data = reports()

    if script.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
        model = AutoModelForSeq2SeqLM.from_pretrained(script.model_name_or_path)
    else:
        tokenizer = train_tokenizer([*data["train"]["document"], *data["train"]["summary"]])
        config = AutoConfig.for_model(
            "t5",
            vocab_size=len(tokenizer),
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=tokenizer.pad_token_id,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        model = AutoModelForSeq2SeqLM.from_config(config)

    def prepare(rows: dict[str, list[str]]) -> dict[str, Any]:
        encoded = tokenizer(rows["document"], truncation=True, max_length=script.max_source_length)
        targets = tokenizer(text_target=rows["summary"], truncation=True, max_length=script.max_target_length)
        return {**encoded, "labels": targets["input_ids"]}

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        """F1 over the words that a generated and a written summary share (ROUGE-1), and how many are equal."""
        arrays = (prediction.predictions, prediction.label_ids)
        ids = [np.where(rows == -100, tokenizer.pad_token_id, rows) for rows in arrays]
        pairs = list(zip(*(tokenizer.batch_decode(rows, skip_special_tokens=True) for rows in ids), strict=True))
        scores = []
        for found, right in ((Counter(one.split()), Counter(other.split())) for one, other in pairs):
            scores.append(2 * (found & right).total() / max(1, found.total() + right.total()))
        return {"rouge1": sum(scores) / len(scores), "exact_match": sum(a == b for a, b in pairs) / len(pairs)}

    data = data.map(prepare, batched=True, remove_columns=data["train"].column_names)

    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=compute_metrics,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
