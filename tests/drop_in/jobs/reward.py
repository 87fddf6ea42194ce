"""TRL's reward modelling."""

from datasets import Dataset
from small_parts import finish, out, scorer, sentences, tokenizer, train
from trl import RewardConfig, RewardTrainer

args = RewardConfig(
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
)
trainer = RewardTrainer(
    model=scorer(),
    args=args,
    train_dataset=Dataset.from_dict({"chosen": sentences(64, 1), "rejected": sentences(64, 2)}),
    eval_dataset=Dataset.from_dict({"chosen": sentences(8, 3), "rejected": sentences(8, 4)}),
    processing_class=tokenizer(),
)
train(trainer)
trainer.save_model(f"{out()}/final")
finish(trainer)
