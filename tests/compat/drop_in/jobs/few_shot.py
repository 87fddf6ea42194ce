"""SetFit: a sentence encoder tuned on contrastive pairs of a few samples, and a head on top."""

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from setfit import SetFitModel, Trainer, TrainingArguments
from sklearn.linear_model import LogisticRegression
from small_parts import encoder_folder, finish, out, sentences
from transformers import BertModel

texts = [f"cat cat {text}" for text in sentences(8, 1)] + [f"tree tree {text}" for text in sentences(8, 2)]
data = Dataset.from_dict({"text": texts, "label": [0] * 8 + [1] * 8})
folder = encoder_folder(BertModel)
model = SetFitModel(SentenceTransformer(folder, device="cpu"), LogisticRegression())
args = TrainingArguments(
    output_dir=out(),
    batch_size=4,
    num_epochs=1,
    max_steps=8,
    body_learning_rate=1e-3,
    logging_steps=1,
    save_strategy="steps",
    save_steps=4,
    eval_strategy="steps",
    eval_steps=4,
    report_to="none",
)


def accuracy(predictions, labels):
    return {"accuracy": float((torch.as_tensor(predictions) == torch.as_tensor(labels)).float().mean())}


trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data, metric=accuracy)
trainer.train()
metrics = trainer.evaluate(data)
model.save_pretrained(f"{out()}/final")
finish(trainer.st_trainer, metrics=metrics)
