"""Samples at evaluation on one and on two processes, replicated and sharded: an odd number of rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from optimizer_memory_job import SHARDS
from small_models import Classifier
from torch import Tensor

from paceline import Trainer, TrainingArguments


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=1, bos_token_id=2, pad_token_id=0))


def texts(number: int, masked: bool = True) -> list[dict[str, list[int]]]:
    """Rows of different lengths: some tokens, a sign, and the tokens again, which alone count if `masked`."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(number):
        ids = torch.randint(3, 30, (3 + index % 4,), generator=generator).tolist()
        whole = [*ids, 31, *ids, 1]
        rows.append(
            {"input_ids": whole, "labels": [-100] * (len(ids) + 1) + whole[len(ids) + 1 :] if masked else whole}
        )
    return rows


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    length = max(len(row["input_ids"]) for row in rows)

    def padded(values: list[int], token: int) -> list[int]:
        return values + [token] * (length - len(values))

    return {
        "input_ids": torch.tensor([padded(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([padded([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([padded(row["labels"], -100) for row in rows]),
    }


def run(folder: Path, parts: int, **options: Any) -> None:
    """Evaluates a language model and a classifier, with samples."""
    xs = torch.randn(9, 8, generator=torch.Generator().manual_seed(1))
    classes = [{"x": x, "labels": x[:4].argmax()} for x in xs]
    for name, model, data in (("text", llama(), texts(9)), ("classes", Classifier(), classes)):
        args = TrainingArguments(
            str(folder / name),
            eval_samples={"num": 5, "max_new_tokens": 7},
            per_device_eval_batch_size=2,
            max_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            **options,
        )
        trainer = Trainer(model, args, train_dataset=data, eval_dataset=data)
        if name == "text":
            trainer.data_collator = collate
        trainer.evaluate()


def main() -> None:
    for name, way in {"ddp": {"parallel": "ddp"}, "fsdp": SHARDS}.items():
        run(Path(sys.argv[1]) / name, 2, **way)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
