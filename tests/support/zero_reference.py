"""A tiny language model, trained by transformers on DeepSpeed, or by paceline.

    python zero_reference.py FOLDER MODE...

MODE: zero2 or zero3, whole runs of transformers; zero2=CHECKPOINT, gone on from by paceline.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import paceline


def model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 37, (9,), generator=generator) for _ in range(24)]
    return [{"input_ids": row, "labels": row} for row in rows]


def trained(library: Any, folder: Path, config: Any = None, checkpoint: str | None = None, batch_size: int = 3) -> Any:
    """A Trainer of either library after its run of 8 updates."""
    args = library.TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=8, save_steps=3, logging_steps=1, report_to=[],
        per_device_train_batch_size=batch_size, learning_rate=0.01, disable_tqdm=True, optim="adamw_torch",
        deepspeed=config,
    )  # fmt: skip
    trainer = library.Trainer(model(), args, train_dataset=samples())
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def main() -> None:
    folder = Path(sys.argv[1])
    for mode in sys.argv[2:]:
        name, _, checkpoint = mode.partition("=")
        own = "auto"
        config: dict[str, Any] = {"zero_optimization": {"stage": int(name[4])}, "gradient_clipping": own}
        config |= {"train_micro_batch_size_per_gpu": own, "gradient_accumulation_steps": own}
        config |= {"zero_allow_untested_optimizer": True}
        if not checkpoint:
            trained(transformers, folder / name, config)
            continue
        trainer = trained(paceline, folder / f"{name}-from", config, checkpoint)
        trainer.save_model(str(folder / f"{name}-saved"))
        if os.environ["RANK"] == "0":
            torch.save([row["loss"] for row in trainer.state.log_history if "loss" in row], folder / f"{name}-from.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
