"""One training of several processes, interrupted in different ways.

    python shared_runs.py FOLDER MODE...     MODE: whole, terminated, killed, from=CHECKPOINT

Writes `MODE-RANK.json` (how it ended) and `MODE-RANK.pt` (the weights). Modes that begin with `sharded` shard it;
of `parts`, each process writes its own; those that begin with `zero` and a number do so by that stage of DeepSpeed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from small_models import Tagger, make_trainer, tagging

from paceline import Trainer, TrainerCallback


class Stop(TrainerCallback):
    """Ends training after an update, on one process."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5 and args.process_index == 1:
            control.should_training_stop = True


class Disturb(TrainerCallback):
    """Sends a signal to one process after an update."""

    def __init__(self, number: int, rank: int, step: int) -> None:
        self.number, self.rank, self.step = number, rank, step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and args.process_index == self.rank:
            os.kill(os.getpid(), self.number)


def trainer_in(folder: Path, dropout: float, callbacks: list[TrainerCallback], **options: Any) -> Trainer:
    return make_trainer(
        folder,
        Tagger(shifted=True, dropout=dropout),
        tagging(53),
        per_device_train_batch_size=int(os.environ.get("BATCH_SIZE", "3")),
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        learning_rate=0.01,
        save_strategy="steps",
        save_steps=4,
        callbacks=callbacks,
        report_to=["jsonl"],
        **options,
    )


def run(folder: Path, mode: str) -> None:
    callbacks: list[TrainerCallback] = []
    name, _, checkpoint = mode.partition("=")
    if mode == "terminated":
        callbacks = [Disturb(signal.SIGTERM, 1, 6)]
    elif mode == "stopped":
        callbacks = [Stop()]
    elif name.endswith("killed") and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        callbacks = [Disturb(signal.SIGKILL, 1, 6)]
    elif mode.endswith("terminated"):
        callbacks = [Disturb(signal.SIGTERM, 1, 6)]
    options: dict[str, Any] = {}
    if name.startswith("sharded"):
        options = {"fsdp": True}
        if name.startswith("sharded_parts"):
            options["fsdp_config"] = {"state_dict_type": "SHARDED_STATE_DICT"}
    if name.startswith("zero"):
        section: dict[str, Any] = {"stage": int(name[4])}
        if "offload" in name:
            section["offload_optimizer"] = {"device": "cpu"}
            section |= {"offload_param": {"device": "cpu"}} if section["stage"] == 3 else {}
        options = {"deepspeed": {"zero_optimization": section, "bf16": {"enabled": "auto"}}, "bf16": "bf16" in name}
    if name.startswith("hybrid_parts"):
        options = {"fsdp": "hybrid_shard", "fsdp_config": {"replicate": 2}, "checkpoint_format": "sharded"}
    if name.startswith("ddp_parts"):
        options = {"checkpoint_format": "sharded"}
    if "best" in name:
        options |= {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 4}
        options |= {"eval_dataset": tagging(17)}
    trainer = trainer_in(folder / name, float(os.environ.get("DROPOUT", "0.3")), callbacks, **options)
    output = trainer.train(resume_from_checkpoint=checkpoint or None)
    rank = trainer.args.process_index
    ended = {"global_step": output.global_step, "log": trainer.state.log_history[:-1]}
    (folder / f"{name}-{rank}.json").write_text(json.dumps(ended))
    trainer.save_model(str(folder / f"{name}-model"))
    whole = trainer.accelerator.get_state_dict(trainer.model)
    weights = torch.cat([whole[name].detach().cpu().flatten() for name, _ in trainer.model.named_parameters()])
    torch.save(weights, folder / f"{name}-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in sys.argv[2:]:
        run(Path(sys.argv[1]), each)
