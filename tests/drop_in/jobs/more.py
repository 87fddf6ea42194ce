"""TRL's other trainers that a CPU can run, named in the second argument."""

import sys

from datasets import Dataset
from small_parts import causal, finish, out, sentences, tokenizer
from transformers import AutoModelForCausalLM

kind = sys.argv[2]
options = {
    "output_dir": out(),
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "logging_steps": 1,
    "save_steps": 2,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "use_cpu": True,
    "disable_tqdm": True,
}
columns = {name: sentences(32, place) for place, name in enumerate(("prompt", "chosen", "rejected"))}
pairs = Dataset.from_dict(columns)
prompts = Dataset.from_dict({"prompt": columns["prompt"]})


def count_cats(completions, **kwargs):
    return [float(len(text.split()) + text.count("cat")) for text in completions]


if kind == "kto":
    from trl import KTOConfig, KTOTrainer

    rows = {"prompt": columns["prompt"], "completion": columns["chosen"], "label": [True, False] * 16}
    trainer = KTOTrainer(
        model=causal(),
        ref_model=causal(1),
        args=KTOConfig(**options),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
    )
elif kind == "cpo":
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    trainer = CPOTrainer(model=causal(), args=CPOConfig(**options), train_dataset=pairs, processing_class=tokenizer())
elif kind == "orpo":
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    trainer = ORPOTrainer(model=causal(), args=ORPOConfig(**options), train_dataset=pairs, processing_class=tokenizer())
elif kind in ("grpo", "rloo"):
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    config, cls = (GRPOConfig, GRPOTrainer) if kind == "grpo" else (RLOOConfig, RLOOTrainer)
    causal().save_pretrained(f"{out()}/model")  # a reference model is made from its path
    trainer = cls(
        model=AutoModelForCausalLM.from_pretrained(f"{out()}/model"),
        reward_funcs=count_cats,
        args=config(**options, num_generations=4, max_completion_length=8),
        train_dataset=prompts,
        processing_class=tokenizer(),
    )
else:
    raise SystemExit(f"no job {kind}")
trainer.train()
trainer.save_model(f"{out()}/final")
finish(trainer)
