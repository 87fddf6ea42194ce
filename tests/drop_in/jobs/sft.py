"""TRL's supervised fine-tuning, with accumulation and evaluation; `packing` and `lora` as arguments."""

import sys

from datasets import Dataset
from small_parts import DROPOUT, causal, finish, out, sentences, tokenizer, train
from trl import SFTConfig, SFTTrainer

options = {"packing": True, "max_length": 32} if "packing" in sys.argv else {}
peft_config = None
if "lora" in sys.argv:
    from peft import LoraConfig

    peft_config = LoraConfig(r=4, lora_dropout=DROPOUT, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
args = SFTConfig(
    output_dir=out(),
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
    logging_steps=1,
    save_steps=4,
    max_steps=8,
    learning_rate=1e-3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    eval_strategy="steps",
    eval_steps=4,
    use_cpu=True,
    disable_tqdm=True,
    **options,
)
trainer = SFTTrainer(
    model=causal(),
    args=args,
    train_dataset=Dataset.from_dict({"text": sentences(64)}),
    eval_dataset=Dataset.from_dict({"text": sentences(10, seed=1)}),
    processing_class=tokenizer(),
    peft_config=peft_config,
)
train(trainer)
trainer.save_model(f"{out()}/final")
finish(trainer)
