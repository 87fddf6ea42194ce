"""Evaluations on generated text by several processes.

    python generation_job.py FOLDER ENGINE...       ENGINE: as `parallel` takes it ("tp=2"), or "zero3"

Each process writes `FOLDER/ENGINE-RANK.pt`: a dict by kind of model.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from mesh_job import llama
from torch import Tensor, nn

from paceline import Seq2SeqTrainer, Seq2SeqTrainingArguments

MESHES = ("tp=2", "cp=2", "sp=2")  # for causal language models with a plan: T5 is none
ZERO3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 32}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def pairs(number: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """The answer is the question, shorter or longer, so that rows end at different steps."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(number):
        ids = torch.randint(2, 6, (5,), generator=generator)
        length = int(torch.randint(1, 5, (1,), generator=generator))
        answer = torch.full((5,), -100)
        answer[:length], answer[length] = ids[:length], 1
        samples.append({"input_ids": ids, "labels": answer})
    return samples


def questions(number: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """For a model that goes on with the question itself."""
    return [{"input_ids": pair["input_ids"], "labels": pair["input_ids"]} for pair in pairs(number, seed)]


MODELS: dict[str, tuple[Any, Any]] = {"t5": (t5, pairs), "llama": (lambda: llama(eos_token_id=1), questions)}


def run(folder: Path, name: str, parts: int, **options: Any) -> dict[str, Any]:
    """Train a little, and predict with generated text."""
    make, data = MODELS[name]
    args = Seq2SeqTrainingArguments(
        str(folder),
        per_device_train_batch_size=4 // parts,
        per_device_eval_batch_size=2,
        num_train_epochs=3,
        learning_rate=0.02,
        lr_scheduler_type="constant",
        predict_with_generate=True,
        generation_max_length=12,
        generation_num_beams=2,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = Seq2SeqTrainer(make(), args, train_dataset=data(16), eval_dataset=data(7, seed=2))
    for _ in range(2):  # of the second run nothing is cut or sharded anew
        trainer.train()
    output = trainer.predict(data(9, seed=3))
    evaluations = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    return {"rows": output.predictions, "labels": output.label_ids, "eval_loss": evaluations}


def main() -> None:
    folder, rank, size = Path(sys.argv[1]), os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    for engine in sys.argv[2:]:
        options: dict[str, Any] = {"deepspeed": ZERO3} if engine == "zero3" else {"parallel": engine}
        names, parts = (["llama"], 1) if engine in MESHES else (list(MODELS), size)  # parts read different data
        results = {name: run(folder / f"{engine}-{name}", name, parts, **options) for name in names}
        torch.save(results, folder / f"{engine}-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
