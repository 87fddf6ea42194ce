"""The same training as launch/train.py, by Ray Train: its workers find each other through Ray instead of torchrun.

    python launch/ray_train.py --num-workers 16 --use-gpu --output-dir s3://bucket/team/digits
    python launch/ray_train.py --num-workers 2 --output-dir runs/digits      # on this machine, on the CPU

A worker that dies ends the attempt; Ray starts all of them anew, and they go on from the last checkpoint. Ray runs the
training outside the main thread of its workers, where no signal can be handled: a preemption costs the updates since.
"""

import argparse
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from paceline import TrainingArguments


def train(options: dict[str, Any]) -> None:
    """Trains in each worker. Ray has connected the processes; the Trainer joins their group."""
    from train import make_trainer  # the script beside this one; it lies on the workers' path

    trainer = make_trainer(TrainingArguments(resume_from_checkpoint="auto", disable_tqdm=True, **options))
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        trainer.save_metrics("eval", metrics)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument("--output-dir", default="runs/digits", help="a URL, or a folder that all workers see")
    parser.add_argument("--max-failures", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=-1)
    words = parser.parse_args()

    if not ray.is_initialized():
        ray.init(runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).resolve().parent)}})
    is_url = "://" in words.output_dir
    options = {
        "output_dir": words.output_dir if is_url else str(Path(words.output_dir).resolve()),
        "learning_rate": 2e-3,
        "per_device_train_batch_size": 16,
        "save_steps": 50,
        "save_total_limit": 2,
        "max_steps": words.max_steps,
        "use_cpu": not words.use_gpu,
    }
    TorchTrainer(
        train,
        train_loop_config=options,
        scaling_config=ScalingConfig(num_workers=words.num_workers, use_gpu=words.use_gpu),
        run_config=RunConfig(name="paceline", failure_config=FailureConfig(max_failures=words.max_failures)),
    ).fit()


if __name__ == "__main__":
    main()
