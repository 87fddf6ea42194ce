"""Distillation on two processes: the gradient of a language model, and a resumed run with projections."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).resolve().parent.parent / "pytorch" / "distillation" / "test_loss.py"


def main() -> None:
    folder = Path(sys.argv[1])
    spec = importlib.util.spec_from_file_location("test_distillation", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    cases: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    found: dict[str, Any] = {}
    layers = {"transformer.h.0": "transformer.h.1"}
    trainer = cases.RecordGradient(
        cases.gpt2(0),
        cases.TrainingArguments(
            str(folder / "gpt2"), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=1,
            max_grad_norm=0, train_sampling_strategy="sequential", save_strategy="no", use_cpu=True, disable_tqdm=True,
            distillation_layers=layers,
        ),
        train_dataset=cases.sentences(),
        teacher=cases.gpt2(1),
    )  # fmt: skip
    trainer.train()
    found["gpt2"] = trainer.gradients[0]
    shards, _ = cases.run(folder / "shards", per_device_train_batch_size=4, parallel="fsdp")
    cases.run(folder / "shards-two", stop=3, per_device_train_batch_size=4, parallel="fsdp")
    again, _ = cases.run(folder / "shards-two", resume=True, per_device_train_batch_size=4, parallel="fsdp")
    for name, each in (("shards", shards), ("shards resumed", again)):
        maps = [made.weight.detach() for made in each.distillation.projections.maps.values()]
        whole = each.strategy.full_weights(each.model)
        found[name] = torch.cat([value.flatten() for value in [*whole.values(), *maps]])
    straight, seen = cases.run(folder / "one", per_device_train_batch_size=4)
    cases.run(folder / "two", stop=3, per_device_train_batch_size=4)
    resumed, rest = cases.run(folder / "two", resume=True, per_device_train_batch_size=4)
    found["straight"], found["resumed"] = cases.weights(straight), cases.weights(resumed)
    found["hard_loss of one"] = [row["hard_loss"] for row in seen.rows if "hard_loss" in row][-2:]
    found["hard_loss"] = [row["hard_loss"] for row in rest.rows if "hard_loss" in row][-2:]
    for engine in ("ddp", "fsdp"):
        for name, cache in (("plain", None), ("cached", str(folder / "cache")), ("again", str(folder / "cache"))):
            trained, _ = cases.run(
                folder / f"{name}-{engine}", per_device_train_batch_size=4, parallel=engine, distillation_layers=None,
                distillation_cache=cache, learning_rate=0.01,
            )  # fmt: skip
            whole = trained.strategy.full_weights(trained.model)
            found[f"{engine} {name}"] = torch.cat([value.flatten() for value in whole.values()])
    torch.save(found, folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
