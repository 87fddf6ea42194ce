"""Image classification: which digit an image shows.

    python examples/image_classification.py
    python examples/image_classification.py --model_name_or_path google/vit-base-patch16-224 --learning_rate 3e-5 \
        --train_dir train --validation_dir validation    # folders with one folder of images for each class
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import load_dataset
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification

from local_data import digits
from transformers import EvalPrediction, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ScriptArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "A trained model. Unset: a small new one."})
    train_dir: str | None = field(default=None, metadata={"help": "Images to train on. Unset: scikit-learn's digits."})
    validation_dir: str | None = field(default=None, metadata={"help": "Images to evaluate on."})


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, axis=-1) == prediction.label_ids).mean())}


def main() -> None:
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="runs/image_classification",
        learning_rate=2e-3,
        warmup_steps=30,
        per_device_train_batch_size=32,
        num_train_epochs=10,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=45,
        remove_unused_columns=False,  # `image` is needed until a sample is read, and prepared then
    )
    script, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)

    if script.train_dir:
        folders = {"train": f"{script.train_dir}/**", "validation": f"{script.validation_dir}/**"}
        data = load_dataset("imagefolder", data_files=folders)
        labels = data["train"].features["label"].names
    else:
        data = digits()
        labels = sorted(set(data["train"]["label"]))

    names: dict[str, Any] = {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}
    processor = None
    if script.model_name_or_path:
        processor = AutoImageProcessor.from_pretrained(script.model_name_or_path)
        model = AutoModelForImageClassification.from_pretrained(
            script.model_name_or_path, ignore_mismatched_sizes=True, **names
        )
    else:
        config = AutoConfig.for_model(
            "vit",
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **names,
        )
        model = AutoModelForImageClassification.from_config(config)

    def pixels(images: list[Any]) -> torch.Tensor:
        if processor is not None:
            return processor([image.convert("RGB") for image in images], return_tensors="pt")["pixel_values"]
        return torch.tensor(images)[:, None] / 8 - 1  # one channel, from -1 to 1

    def prepare(rows: dict[str, list[Any]]) -> dict[str, Any]:
        classes = [labels.index(label) if isinstance(label, str) else label for label in rows["label"]]
        return {"pixel_values": pixels(rows["image"]), "labels": torch.tensor(classes)}

    data = data.with_transform(prepare)

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=processor,
        compute_metrics=compute_metrics,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
