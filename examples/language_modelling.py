"""Language modelling: the next token of a text, here of the Python documentation.

    python examples/language_modelling.py
    python examples/language_modelling.py --model_name_or_path gpt2 --learning_rate 5e-5 --block_size 512 \
        --train_file train.txt --validation_file validation.txt
"""

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from local_data import documentation, train_tokenizer
from paceline import HfArgumentParser, Trainer, TrainingArguments, default_data_collator, set_seed


@dataclass
class ScriptArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "A trained model. Unset: a small new one."})
    train_file: str | None = field(default=None, metadata={"help": "A text to train on. Unset: Python's own help."})
    validation_file: str | None = field(default=None, metadata={"help": "A text to evaluate on."})
    block_size: int = field(default=64, metadata={"help": "Tokens in one sample."})


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="runs/language_modelling",
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        per_device_train_batch_size=16,
        num_train_epochs=4,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=25,
    )
    script, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)

    if script.train_file:
        data = load_dataset("text", data_files={"train": script.train_file, "validation": script.validation_file})
    else:
        data = documentation()

    if script.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
        model = AutoModelForCausalLM.from_pretrained(script.model_name_or_path)
    else:
        tokenizer = train_tokenizer(data["train"]["text"])
        config = AutoConfig.for_model(
            "llama",
            vocab_size=len(tokenizer),
            max_position_embeddings=max(512, script.block_size),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            attention_dropout=0.0,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = AutoModelForCausalLM.from_config(config)

    def join_and_cut(rows: dict[str, list[list[int]]]) -> dict[str, Any]:
        """All texts one after the other, cut into blocks of one length; the model shifts the labels itself."""
        ids = list(chain.from_iterable(rows["input_ids"]))
        size = script.block_size
        blocks = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
        return {"input_ids": blocks, "attention_mask": [[1] * size for _ in blocks], "labels": blocks}

    data = data.map(lambda rows: tokenizer(rows["text"], verbose=False), batched=True, remove_columns=["text"])
    data = data.map(join_and_cut, batched=True, remove_columns=data["train"].column_names)

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
