"""TRL's direct preference optimisation, with a reference model and with LoRA (no reference model)."""

import sys

from datasets import Dataset
from small_parts import DROPOUT, causal, finish, out, sentences, tokenizer, train
from trl import DPOConfig, DPOTrainer

peft_config = None
if "lora" in sys.argv:
    from peft import LoraConfig

    peft_config = LoraConfig(r=4, lora_dropout=DROPOUT, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
args = DPOConfig(
    output_dir=out(),
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
    logging_steps=1,
    save_steps=4,
    max_steps=8,
    learning_rate=1e-3,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    eval_strategy="steps",
    eval_steps=4,
    use_cpu=True,
    disable_tqdm=True,
)


def pairs(number: int, seed: int) -> Dataset:
    names = ("prompt", "chosen", "rejected")
    return Dataset.from_dict({name: sentences(number, seed + place) for place, name in enumerate(names)})


trainer = DPOTrainer(
    model=causal(),
    ref_model=None if peft_config else causal(1),
    args=args,
    train_dataset=pairs(32, 10),
    eval_dataset=pairs(8, 20),
    processing_class=tokenizer(),
    peft_config=peft_config,
)
train(trainer)
trainer.save_model(f"{out()}/final")
finish(trainer)
