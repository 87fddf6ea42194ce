"""TRL's supervised fine-tuning, with accumulation and evaluation; `packing` and `lora` as arguments."""

import sys

from datasets import Dataset
from small_parts import EVALUATED, adapter, causal, run, sentences, settings, tokenizer
from trl import SFTConfig, SFTTrainer

options = {"packing": True, "max_length": 32} if "packing" in sys.argv else {}
args = SFTConfig(**settings(**EVALUATED, **options))
trainer = SFTTrainer(
    model=causal(),
    args=args,
    train_dataset=Dataset.from_dict({"text": sentences(64)}),
    eval_dataset=Dataset.from_dict({"text": sentences(10, seed=1)}),
    processing_class=tokenizer(),
    peft_config=adapter(),
)
run(trainer)
