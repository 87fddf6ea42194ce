"""PEFT's LoRA with the plain Trainer, and the adapter loaded back from the last checkpoint."""

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from small_parts import DROPOUT, causal, finish, sentences, settings, tokenizer, train
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

words = tokenizer()
config = LoraConfig(r=4, lora_alpha=8, lora_dropout=DROPOUT, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
rows = [words(text, truncation=True, max_length=16)["input_ids"] for text in sentences(64)]
trainer = Trainer(
    model=get_peft_model(causal(), config),
    args=TrainingArguments(**settings()),
    train_dataset=Dataset.from_dict({"input_ids": rows}),
    data_collator=DataCollatorForLanguageModeling(words, mlm=False),
)
train(trainer)
finish(trainer)
