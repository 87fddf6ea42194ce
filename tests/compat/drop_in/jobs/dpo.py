"""TRL's direct preference optimization, with a reference model and with LoRA (no reference model)."""

from datasets import Dataset
from small_parts import EVALUATED, adapter, causal, run, sentences, settings, tokenizer
from trl import DPOConfig, DPOTrainer

peft_config = adapter()
args = DPOConfig(**settings(per_device_train_batch_size=2, **EVALUATED))


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
run(trainer)
