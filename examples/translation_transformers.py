"""Translation: English to German, evaluated on what the model generates.

    python examples/translation.py
    python examples/translation.py --model_name_or_path Helsinki-NLP/opus-mt-en-de --learning_rate 3e-5 \
        --train_file train.json --validation_file validation.json    # lines of {"en": ..., "de": ...}
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from local_data import sentences, train_tokenizer
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
    train_file: str | None = field(default=None, metadata={"help": "JSON lines to train on. Unset: made sentences."})
    validation_file: str | None = field(default=None, metadata={"help": "JSON lines to evaluate on."})
    max_length: int = field(default=32, metadata={"help": "Longer sentences are cut to so many tokens."})


def bleu2(found: list[str], right: list[str]) -> float:
    """BLEU over single words and pairs of words, from 0 to 100; no hit at all counts as a tenth of one."""
    hits, totals = [0, 0], [0, 0]
    for one, other in zip(found, right, strict=True):
        words, others = one.split(), other.split()
        counts = [(Counter(words), Counter(others)), (Counter(pairwise(words)), Counter(pairwise(others)))]
        for size, (first, second) in enumerate(counts):
            hits[size] += (first & second).total()
            totals[size] += first.total()
    brevity = min(0.0, 1 - sum(len(text.split()) for text in right) / max(1, totals[0]))
    logs = [math.log(max(hit, 0.1) / max(1, total)) for hit, total in zip(hits, totals, strict=True)]
    return 100 * math.exp(brevity + sum(logs) / 2)


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, Seq2SeqTrainingArguments))
    parser.set_defaults(
        output_dir="runs/translation",
        learning_rate=3e-3,
        warmup_steps=50,
        per_device_train_batch_size=32,
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
        data = sentences()

    if name := script.model_name_or_path:
        tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForSeq2SeqLM.from_pretrained(name)
    else:
        tokenizer = train_tokenizer([*data["train"]["en"], *data["train"]["de"]])
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
        return tokenizer(rows["en"], text_target=rows["de"], truncation=True, max_length=script.max_length)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        arrays = (prediction.predictions, prediction.label_ids)
        ids = [np.where(rows == -100, tokenizer.pad_token_id, rows) for rows in arrays]
        found, right = (tokenizer.batch_decode(rows, skip_special_tokens=True) for rows in ids)
        return {"bleu2": bleu2(found, right), "exact_match": sum(map(str.__eq__, found, right)) / len(right)}

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
    trainer.log_metrics("eval", metrics := trainer.evaluate())
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
