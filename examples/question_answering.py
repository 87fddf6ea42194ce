"""Question answering: the piece of a text that answers a question.

    python examples/question_answering.py
    python examples/question_answering.py --model_name_or_path bert-base-uncased --learning_rate 3e-5 --max_length 384 \
        --train_file train.json --validation_file validation.json    # lines of SQuAD's context, question and answers
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoTokenizer

from local_data import questions, train_tokenizer
from paceline import DataCollatorWithPadding, EvalPrediction, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ScriptArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "A trained model. Unset: a small new one."})
    train_file: str | None = field(default=None, metadata={"help": "JSON lines to train on. Unset: made questions."})
    validation_file: str | None = field(default=None, metadata={"help": "JSON lines to evaluate on."})
    max_length: int = field(default=64, metadata={"help": "Longer contexts are cut, so that all is so many tokens."})


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Returns the accuracy of the answer's first token, of its last token, and of both together."""
    starts, ends = (np.argmax(logits, axis=-1) for logits in prediction.predictions[:2])
    is_start, is_end = starts == prediction.label_ids[0], ends == prediction.label_ids[1]
    return {
        "start_accuracy": float(is_start.mean()),
        "end_accuracy": float(is_end.mean()),
        "exact_match": float((is_start & is_end).mean()),
    }


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="runs/question_answering",
        learning_rate=2e-3,
        warmup_steps=30,
        per_device_train_batch_size=32,
        num_train_epochs=6,
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
        data = questions()

    if script.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
        model = AutoModelForQuestionAnswering.from_pretrained(script.model_name_or_path)
    else:
        tokenizer = train_tokenizer([*data["train"]["question"], *data["train"]["context"]])
        config = AutoConfig.for_model(
            "bert",
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        model = AutoModelForQuestionAnswering.from_config(config)

    def prepare(rows: dict[str, list[Any]]) -> dict[str, Any]:
        """Question and context as one sequence; an answer that was cut off is asked for at the first token."""
        encoded = tokenizer(rows["question"], rows["context"], truncation="only_second", max_length=script.max_length)
        firsts, lasts = [], []
        for index, answer in enumerate(rows["answers"]):
            start = answer["answer_start"][0]
            first = encoded.char_to_token(index, start, sequence_index=1)
            last = encoded.char_to_token(index, start + len(answer["text"][0]) - 1, sequence_index=1)
            firsts.append(0 if first is None or last is None else first)
            lasts.append(0 if first is None or last is None else last)
        return {**encoded, "start_positions": firsts, "end_positions": lasts}

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
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
