"""Overhead of a step: CPU time per step on a model so small that its own share is negligible.

Two linear layers, batches of 4, clipping, a linear schedule, fused AdamW with the same two parameter groups for all.
Each contender trains 1,500 and then 4,500 steps on one thread; what the longer run takes more, divided by the 3,000
steps it has more, is the cost of a step: start and end cancel out. Contender and hand-written loop take turns three
times in one fresh process, since two processes differ by more than the limits; the loop beside itself shows the noise.
CPU time is that of the whole process, all its threads. Python calls into the library are counted in a process of their
own, not timed.

    python benchmarks/step_overhead.py [--quick] [--rounds 5] [--contenders loop paceline ...]
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from measure import (
    choose_contenders,
    make_parser,
    report_from_child,
    run_child,
    summarize,
    take_turns,
    target,
    write_result,
)

STEPS = (1500, 4500)
QUICK_STEPS = (60, 160)
TURNS = 3
COUNTED_STEPS = (50, 150)
FEATURES, HIDDEN, CLASSES, BATCH_SIZE = 16, 32, 4, 4
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM, LOG_EVERY = 1e-3, 0.01, 1.0, 500
LIMIT_RATIO, LIMIT_GUARDED, LIMIT_CALLS = 1.10, 1.15, 40
# a checkpoint behind the training with each log, rotation, and updates that are not finite left out on the device
GUARDED = {
    "save_strategy": "steps",
    "save_steps": LOG_EVERY,
    "save_total_limit": 2,
    "nonfinite_policy": "skip",
}

# contender -> the module it needs; then the packages whose calls are counted
NEEDS = {
    "loop": "torch",
    "paceline": "paceline",
    "paceline, guarded": "paceline",
    "transformers.Trainer": "transformers",
    "lightning": "lightning",
    "accelerate loop": "accelerate",
}
COUNTED = {
    "paceline": ("paceline",),
    "paceline, guarded": ("paceline",),
    "transformers.Trainer": ("transformers", "accelerate"),
    "lightning": ("lightning", "lightning_fabric", "pytorch_lightning", "lightning_utilities", "torchmetrics"),
    "accelerate loop": ("accelerate",),
}


Train = Callable[[int], None]


def make_model() -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    class TwoLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, HIDDEN)
            self.second = nn.Linear(HIDDEN, CLASSES)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.second(torch.relu(self.first(x)))
            return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    torch.manual_seed(0)
    return TwoLayers()


def make_dataset(num_samples: int) -> list[dict[str, Any]]:
    """A map-style dataset of dicts of tensors that costs next to nothing to read."""
    import torch

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, FEATURES, generator=generator)
    labels = torch.randint(0, CLASSES, (num_samples,), generator=generator)
    return [{"x": x[index], "labels": labels[index]} for index in range(num_samples)]


def make_optimizer(model: Any) -> Any:
    """The optimizer of all contenders that leave it to the user: weights decay, biases do not."""
    import torch

    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)


def make_schedule(optimizer: Any, num_steps: int) -> Any:
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / num_steps))


# ---- the contenders: each returns a function that trains a fresh model for so many steps


def by_hand(dataset: Any) -> Callable[[int], None]:
    """The loop that a careful person writes."""
    import torch
    from torch.nn.utils import clip_grad_norm_
    from torch.utils.data import DataLoader

    device = torch.device("cpu")

    def train(num_steps: int) -> None:
        model = make_model().to(device)
        model.train()
        optimizer = make_optimizer(model)
        schedule = make_schedule(optimizer, num_steps)
        loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
        running = torch.zeros((), device=device)
        step = 0
        while step < num_steps:
            for batch in loader:
                batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
                loss = model(**batch)["loss"]
                loss.backward()
                clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                running += loss.detach()
                step += 1
                if step % LOG_EVERY == 0:
                    print(step, running.item() / LOG_EVERY, schedule.get_last_lr()[0])
                    running.zero_()
                if step == num_steps:
                    break

    return train


def by_trainer(library: Any, dataset: Any, **options: Any) -> Callable[[int], None]:
    """paceline and transformers, by one and the same code."""

    def train(num_steps: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            args = library.TrainingArguments(
                output_dir=folder,
                max_steps=num_steps,
                per_device_train_batch_size=BATCH_SIZE,
                learning_rate=LEARNING_RATE,
                weight_decay=WEIGHT_DECAY,
                max_grad_norm=MAX_NORM,
                lr_scheduler_type="linear",
                optim="adamw_torch_fused",
                logging_steps=LOG_EVERY,
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                **{"save_strategy": "no", **options},
            )
            trainer = library.Trainer(model=make_model(), args=args, train_dataset=dataset)
            trainer.train()
            assert trainer.state.global_step == num_steps

    return train


def by_paceline(dataset: Any) -> Callable[[int], None]:
    import paceline

    return by_trainer(paceline, dataset)


def by_guarded_paceline(dataset: Any) -> Callable[[int], None]:
    import paceline

    return by_trainer(paceline, dataset, **GUARDED)


def by_transformers(dataset: Any) -> Callable[[int], None]:
    import transformers

    return by_trainer(transformers, dataset)


def by_lightning(dataset: Any) -> Callable[[int], None]:
    import logging

    import lightning
    from torch.utils.data import DataLoader

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self, num_steps: int) -> None:
            super().__init__()
            self.model = make_model()
            self.num_steps = num_steps

        def training_step(self, batch: Any, batch_index: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(self.model)
            schedule = make_schedule(optimizer, self.num_steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train(num_steps: int) -> None:
        trainer = lightning.Trainer(
            max_steps=num_steps,
            accelerator="cpu",
            devices=1,
            gradient_clip_val=MAX_NORM,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            logger=False,
        )
        trainer.fit(Module(num_steps), DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True))
        assert trainer.global_step == num_steps

    return train


def by_accelerate(dataset: Any) -> Callable[[int], None]:
    """The loop by hand, with accelerate in it."""
    import accelerate  # type: ignore[import-untyped]
    import torch
    from torch.utils.data import DataLoader

    def train(num_steps: int) -> None:
        accelerator = accelerate.Accelerator(cpu=True)
        model = make_model()
        model.train()
        optimizer = make_optimizer(model)
        model, optimizer, schedule, loader = accelerator.prepare(
            model,
            optimizer,
            make_schedule(optimizer, num_steps),
            DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True),
        )
        running = torch.zeros((), device=accelerator.device)
        step = 0
        while step < num_steps:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch)["loss"]
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                running += loss.detach()
                step += 1
                if step % LOG_EVERY == 0:
                    print(step, running.item() / LOG_EVERY)
                    running.zero_()
                if step == num_steps:
                    break

    return train


CONTENDERS = {
    "loop": by_hand,
    "paceline": by_paceline,
    "paceline, guarded": by_guarded_paceline,
    "transformers.Trainer": by_transformers,
    "lightning": by_lightning,
    "accelerate loop": by_accelerate,
}


# ---- in a child


def compare(name: str, base: str, steps: tuple[int, int]) -> dict[str, float]:
    """CPU microseconds per step of a contender, the median of its turns, and over those of `base` in the same turn."""
    # the longest run is a bit more than one epoch
    trains = [prepare(each, BATCH_SIZE * steps[1] * 3 // 4) for each in (name, base)]
    return take_turns_within(*trains, steps)


def take_turns_within(train: Train, base: Train, steps: tuple[int, int], turns: int = TURNS) -> dict[str, float]:
    """As `compare`, of two functions that train for so many steps."""
    for each in (train, base):
        each(min(100, steps[0]))  # what happens once per process happens here
    turns = 1 if steps == QUICK_STEPS else turns
    pairs = [(cost_of_step(train, steps), cost_of_step(base, steps)) for _ in range(turns)]
    return {
        "us_per_step": statistics.median(own for own, _ in pairs),
        "over_base": statistics.median(own / other for own, other in pairs),
    }


def cost_of_step(train: Train, steps: tuple[int, int]) -> float:
    """CPU microseconds per step."""
    seconds = []
    for num_steps in steps:
        start = time.process_time()
        train(num_steps)
        seconds.append(time.process_time() - start)
    return 1e6 * (seconds[1] - seconds[0]) / (steps[1] - steps[0])


def count_calls(name: str) -> dict[str, float]:
    """Python calls per step of functions of the library itself."""
    import importlib.util

    train = prepare(name, BATCH_SIZE * COUNTED_STEPS[1])  # no end of an epoch on the way
    folders = []
    for package in COUNTED[name]:
        spec = importlib.util.find_spec(package)
        folders += [str(Path(place)) for place in spec.submodule_search_locations or ()] if spec is not None else []
    places, counted = tuple(folders), 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal counted
        if event == "call" and frame.f_code.co_filename.startswith(places):
            counted += 1

    train(COUNTED_STEPS[0])
    counts = []
    for num_steps in COUNTED_STEPS:
        counted = 0
        sys.setprofile(note)
        try:
            train(num_steps)
        finally:
            sys.setprofile(None)
        counts.append(counted)
    return {"calls_per_step": (counts[1] - counts[0]) / (COUNTED_STEPS[1] - COUNTED_STEPS[0])}


def prepare(name: str, num_samples: int) -> Train:
    """A contender, made quiet."""
    import torch

    torch.set_num_threads(1)
    train = CONTENDERS[name](make_dataset(num_samples))

    def train_quietly(num_steps: int) -> None:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(num_steps)

    return train_quietly


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=5)
    parser.add_argument("--count-calls", action="store_true", help="(in a child) count calls instead of time")
    arguments = parser.parse_args()
    steps = QUICK_STEPS if arguments.quick else STEPS
    if arguments.child:
        child = arguments.child
        report_from_child(count_calls(child) if arguments.count_calls else compare(child, "loop", steps))
        return
    if arguments.quick:
        arguments.rounds = 1
    contenders = choose_contenders(NEEDS, arguments.contenders)
    quick = ["--quick"] if arguments.quick else []

    def measure(name: str) -> dict[str, Any]:
        return run_child(__file__, ["--child", name, *quick], num_threads=1)

    measured = take_turns(contenders, arguments.rounds, measure)
    calls = {
        name: run_child(__file__, ["--child", name, "--count-calls"], num_threads=1)["calls_per_step"]
        for name in contenders
        if name in COUNTED
    }
    rows: dict[str, Any] = {
        name: {
            "us_per_step": summarize([row["us_per_step"] for row in measured[name]]),
            "over_loop": summarize([row["over_base"] for row in measured[name]]),
            "calls_per_step": calls.get(name),
        }
        for name in contenders
    }
    ours = rows.get("paceline", {})
    ratio = (ours.get("over_loop") or {}).get("median")
    guarded = (rows.get("paceline, guarded", {}).get("over_loop") or {}).get("median")
    write_result(
        arguments,
        "step_overhead",
        {
            "settings": {"steps": steps, "batch_size": BATCH_SIZE, "threads": 1, "optimizer": "AdamW, fused, 2 groups"},
            "rows": rows,
            "measured": measured,
            "targets": [
                target("CPU time of a step, paceline over the hand-written loop", ratio, LIMIT_RATIO, "x"),
                target("... with checkpoints, rotation and the guard against NaN", guarded, LIMIT_GUARDED, "x"),
                target("Python calls a step into paceline", ours.get("calls_per_step"), LIMIT_CALLS, "calls"),
            ],
        },
    )


if __name__ == "__main__":
    main()
