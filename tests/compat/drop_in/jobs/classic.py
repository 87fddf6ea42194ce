"""A fine-tuning script as people have it: three dataclasses, a last checkpoint, results written, a card.

The flow is that of the example scripts that came with transformers 4 and 5; the model is tiny and made here.
"""

import json
import logging
import math
import os
import sys
from dataclasses import dataclass, field
from itertools import chain
from typing import Any


def run(words: list[str]) -> dict[str, Any]:  # noqa: C901  One function, as such scripts have it.
    """Train, evaluate and predict as the command line says. Returns what the script would print at its end."""
    import datasets
    import transformers
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        HfArgumentParser,
        Trainer,
        TrainingArguments,
        default_data_collator,
        set_seed,
    )
    from transformers.trainer_utils import get_last_checkpoint

    @dataclass
    class ModelArguments:
        model_name_or_path: str | None = field(default=None, metadata={"help": "The checkpoint to start from."})
        config_overrides: str | None = field(default=None, metadata={"help": "Settings of the config."})
        torch_dtype: str | None = field(
            default=None, metadata={"help": "Type of the weights.", "choices": ["auto", "bfloat16", "float32"]}
        )
        low_cpu_mem_usage: bool = field(default=False, metadata={"help": "Save memory while loading."})
        use_fast_tokenizer: bool = field(default=True, metadata={"help": "Whether to use a fast one."})

    @dataclass
    class DataArguments:
        dataset_name: str | None = field(default=None, metadata={"help": "The name of the dataset."})
        max_train_samples: int | None = field(default=None, metadata={"help": "Truncate for debugging."})
        max_eval_samples: int | None = field(default=None, metadata={"help": "Truncate for debugging."})
        block_size: int = field(default=8, metadata={"help": "Tokens of one sample."})
        overwrite_cache: bool = field(default=False, metadata={"help": "Preprocess again."})
        keep_linebreaks: bool = field(default=True, metadata={"help": "Whether to keep them."})

    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    if len(words) == 1 and words[0].endswith(".json"):
        model_args, data_args, training_args = parser.parse_json_file(json_file=os.path.abspath(words[0]))
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses(words, look_for_args_file=False)

    logger = logging.getLogger("classic")
    logging.basicConfig(format="%(levelname)s %(name)s %(message)s", handlers=[logging.StreamHandler(sys.stdout)])
    before = transformers.utils.logging.get_verbosity()
    if training_args.should_log:
        transformers.utils.logging.set_verbosity_info()
    log_level = training_args.get_process_log_level()
    logger.setLevel(log_level)
    datasets.utils.logging.set_verbosity(log_level)
    transformers.utils.logging.set_verbosity(log_level)
    transformers.utils.logging.enable_default_handler()
    logger.warning(
        f"Process rank: {training_args.local_process_index}, device: {training_args.device}, "
        f"n_gpu: {training_args.n_gpu}, distributed: {training_args.parallel_mode.value == 'distributed'}, "
        f"16-bits: {training_args.fp16}"
    )
    logger.info(f"Training parameters {training_args}")

    last_checkpoint = None
    if os.path.isdir(training_args.output_dir) and training_args.do_train:
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
        if last_checkpoint is not None and training_args.resume_from_checkpoint is None:
            logger.info(f"Checkpoint detected, resuming training at {last_checkpoint}.")
    set_seed(training_args.seed)

    texts = datasets.Dataset.from_dict({"text": [f"{number} and {number + 1}" for number in range(60)]})

    def tokenize(examples: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": [[ord(letter) % 64 for letter in text] for text in examples["text"]]}

    def group(examples: dict[str, list[list[int]]]) -> dict[str, Any]:
        size, joined = data_args.block_size, list(chain(*examples["input_ids"]))
        rows = [joined[start : start + size] for start in range(0, len(joined) // size * size, size)]
        return {"input_ids": rows, "labels": [list(row) for row in rows]}

    with training_args.main_process_first(desc="dataset map tokenization"):
        tokenized = texts.map(tokenize, batched=True, remove_columns=["text"])
    with training_args.main_process_first(desc="grouping texts together"):
        blocks = tokenized.map(group, batched=True, load_from_cache_file=not data_args.overwrite_cache)
    train_dataset, eval_dataset = blocks.select(range(40)), blocks.select(range(40, 60))
    if data_args.max_train_samples is not None:
        train_dataset = train_dataset.select(range(min(len(train_dataset), data_args.max_train_samples)))
    if data_args.max_eval_samples is not None:
        eval_dataset = eval_dataset.select(range(min(len(eval_dataset), data_args.max_eval_samples)))

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=64, n_positions=16))

    def preprocess_logits_for_metrics(logits: Any, labels: Any) -> Any:
        if isinstance(logits, tuple):
            logits = logits[0]
        return logits.argmax(dim=-1)

    def compute_metrics(eval_preds: Any) -> dict[str, float]:
        preds, labels = eval_preds
        return {"accuracy": float((preds[:, :-1].reshape(-1) == labels[:, 1:].reshape(-1)).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics if training_args.do_eval else None,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics if training_args.do_eval else None,
    )
    found: dict[str, Any] = {"last_checkpoint": last_checkpoint and os.path.basename(last_checkpoint)}
    if training_args.do_train:
        checkpoint = None
        if training_args.resume_from_checkpoint is not None:
            checkpoint = training_args.resume_from_checkpoint
        elif last_checkpoint is not None:
            checkpoint = last_checkpoint
        train_result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        metrics = train_result.metrics
        metrics["train_samples"] = len(train_dataset)
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
        found["global_step"] = trainer.state.global_step
    if training_args.do_eval:
        logger.info("*** Evaluate ***")
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(eval_dataset)
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
        found.update({name: metrics[name] for name in ("eval_loss", "eval_accuracy", "perplexity")})
    if training_args.do_predict:
        predictions = trainer.predict(eval_dataset, metric_key_prefix="predict").predictions
        if trainer.is_world_process_zero():
            with open(os.path.join(training_args.output_dir, "predict_results.txt"), "w") as writer:
                writer.write("".join(f"{index}\t{item}\n" for index, item in enumerate(predictions)))
    kwargs = {"finetuned_from": model_args.model_name_or_path, "tasks": "text-generation"}
    kwargs["dataset_tags"], kwargs["dataset"] = "counting", "counting numbers"
    if training_args.push_to_hub:
        trainer.push_to_hub(**kwargs)
    else:
        trainer.create_model_card(**kwargs)
    transformers.utils.logging.set_verbosity(before)
    return found


def main() -> None:
    """The entry point of the script."""
    print(json.dumps(run(sys.argv[1:])))


def _mp_fn(index: int) -> None:
    main()


if __name__ == "__main__":
    main()
