"""TRL's reward modelling."""

from datasets import Dataset
from small_parts import EVALUATED, run, scorer, sentences, settings, tokenizer
from trl import RewardConfig, RewardTrainer

args = RewardConfig(**settings(**EVALUATED))
trainer = RewardTrainer(
    model=scorer(),
    args=args,
    train_dataset=Dataset.from_dict({"chosen": sentences(64, 1), "rejected": sentences(64, 2)}),
    eval_dataset=Dataset.from_dict({"chosen": sentences(8, 3), "rejected": sentences(8, 4)}),
    processing_class=tokenizer(),
)
run(trainer)
