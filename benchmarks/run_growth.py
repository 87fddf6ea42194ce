"""The growth of a long run: memory and saves with every row that is logged, samples grouped by length, many tensors.

Each part runs in a process of its own, paceline and transformers in turns, on one thread. Bytes are those that Python
allocates (tracemalloc), or of the file; times are CPU times. Packages that transformers imports when it finds them, and
that the run does not use, are hidden from both.

    python benchmarks/run_growth.py [--quick] [--rounds 5]
"""

from __future__ import annotations

import gc
import random
import shutil
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import (
    choose_contenders,
    make_parser,
    ratios,
    report_from_child,
    run_child,
    summarize,
    take_turns,
    target,
    write_result,
)

NEEDS = {"paceline": "paceline", "transformers": "transformers"}
HIDDEN = ("mlflow", "deepspeed", "wandb", "comet_ml")
LOGGED, QUICK_LOGGED = (500, 1500), (20, 60)
ROWS, QUICK_ROWS, ROWS_BETWEEN = 20_000, 1_000, 500
SAMPLES, QUICK_SAMPLES = 1_000_000, 10_000
TENSORS, QUICK_TENSORS, SAVES = 3_000, 30, 10


def library(name: str) -> Any:
    for package in HIDDEN:
        sys.modules[package] = None  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    if name == "paceline":
        import paceline

        return paceline
    import transformers

    transformers.utils.logging.set_verbosity_error()
    return transformers


def make_model(num_tensors: int) -> Any:
    """A module of so many small tensors."""
    import torch
    from torch import nn

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([nn.Parameter(torch.ones(64)) for _ in range(num_tensors)])

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            return {"loss": (torch.stack(list(self.parts)).sum(0) * x).pow(2).mean()}

    return Many()


def train(found: Any, model: Any, note: Callable[[int], None], **options: Any) -> None:
    """Trains, and calls `note` with the number of each optimizer step that is done."""
    import torch

    class Note(found.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            note(state.global_step)

    data = [{"x": torch.randn(64), "labels": torch.tensor(0)} for _ in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        args = found.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            **{"save_strategy": "no", "logging_steps": 10_000, **options},
        )
        trainer = found.Trainer(model=model, args=args, train_dataset=data, callbacks=[Note()])
        for callback in [each for each in trainer.callback_handler.callbacks if "Printer" in type(each).__name__]:
            trainer.remove_callback(callback)
        trainer.train()


# ---- in a child: each returns its numbers


def measure_log(found: Any, is_quick: bool) -> dict[str, float]:
    """Bytes that a run which logs each step holds more after each."""
    first, last = QUICK_LOGGED if is_quick else LOGGED
    held = []

    def note(step: int) -> None:
        if step == first // 2:
            tracemalloc.start()
        if step in (first, last):
            gc.collect()
            sys._clear_type_cache()  # its up to 4,096 names would count as growth until it is full
            held.append(tracemalloc.get_traced_memory()[0])

    train(found, make_model(2), note, max_steps=last + 1, logging_steps=1)
    return {"bytes_per_logged_step": (held[1] - held[0]) / (last - first)}


def measure_state(found: Any, is_quick: bool) -> dict[str, float]:
    """CPU time of writing the state at each save of a run that logs each step, and the bytes written."""
    num_rows = QUICK_ROWS if is_quick else ROWS
    draw = random.Random(0)
    if found.__name__ == "paceline":
        from paceline.checkpoint.log_blocks import StateFile
        from paceline.core.log_text import LogText

        state, kept = found.TrainerState(), LogText()

        def save(checkpoint: Path) -> None:
            StateFile(state.text(kept), kept, checkpoint, is_whole=False).write(checkpoint, {})
    else:
        from transformers.trainer_callback import TrainerState as TheirState

        state = TheirState()

        def save(checkpoint: Path) -> None:
            state.save_to_json(str(checkpoint / "trainer_state.json"))

    seconds, num_bytes = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, num_rows + 1):
            row = {"loss": draw.random(), "grad_norm": draw.random(), "learning_rate": draw.random() / 1000}
            state.log_history.append({**row, "epoch": step / 1000, "step": step})
            if step % ROWS_BETWEEN == 0:
                checkpoint = Path(folder, f"checkpoint-{step}")
                checkpoint.mkdir()
                start = time.process_time()
                save(checkpoint)
                seconds += time.process_time() - start
                sizes = [path.stat() for path in checkpoint.rglob("*.json")]
                num_bytes += sum(one.st_size for one in sizes if one.st_nlink == 1)  # others are of earlier checkpoints
                shutil.rmtree(Path(folder, f"checkpoint-{step - ROWS_BETWEEN}"), ignore_errors=True)
    saves = num_rows // ROWS_BETWEEN
    return {"state_ms_per_save": 1e3 * seconds / saves, "state_mb_per_save": num_bytes / saves / 1e6}


def measure_grouping(found: Any, is_quick: bool) -> dict[str, float]:
    """Bytes that the order of an epoch by length holds while it is read, and at most until its first sample."""
    import numpy as np
    import torch

    size = QUICK_SAMPLES if is_quick else SAMPLES
    column = np.random.default_rng(0).integers(1, 500, size).tolist()
    if found.__name__ == "paceline":
        from paceline.core.lengths import gather
        from paceline.pytorch.data.sampling import length_grouped_sampler

        tracemalloc.start()
        sampler: Any = length_grouped_sampler(gather(column, size), 32, 0)
    else:
        from transformers.trainer_pt_utils import LengthGroupedSampler

        tracemalloc.start()
        sampler = LengthGroupedSampler(32, lengths=list(column), generator=torch.Generator().manual_seed(0))
    start = time.process_time()
    order = iter(sampler)
    next(order)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # torch's own memory is not traced: the permutation, which both draw, and only one of them keeps no copy of
    return {"grouping_mb": held / 1e6, "grouping_peak_mb": peak / 1e6, "grouping_s": time.process_time() - start}


def measure_tensors(found: Any, is_quick: bool) -> dict[str, float]:
    """CPU time of all threads that a save of many small tensors takes, by the steps with a save and those without."""
    num_tensors = QUICK_TENSORS if is_quick else TENSORS

    def seconds(**options: Any) -> float:
        """CPU time from the second step to the end of the run, which waits for what is written behind the training."""
        starts: list[float] = []
        steps = 2 * SAVES + 3
        train(
            found, make_model(num_tensors), lambda step: starts.append(time.process_time()), max_steps=steps, **options
        )
        return time.process_time() - starts[1]

    without = seconds()
    saving = seconds(save_strategy="steps", save_steps=2, save_total_limit=2)
    return {"small_tensors_ms": 1e3 * (saving - without) / SAVES}


def measure_first(found: Any, is_quick: bool) -> dict[str, float]:
    """CPU time until the first step is done: of the process, and from the constructor on.

    torch imports its compiler with the first optimizer, which transformers does when it is imported itself. It is
    imported before the constructor here, so that it counts for the process alone.
    """
    found.Trainer, found.TrainingArguments  # noqa: B018, both are imported when they are first asked for
    import torch._dynamo  # noqa: F401

    ends: list[float] = []
    start = time.process_time()
    train(found, make_model(2), lambda step: ends.append(time.process_time()), max_steps=2)
    return {"first_step_ms": 1e3 * (ends[0] - start), "process_ms": 1e3 * ends[0]}


PARTS = {
    "log": measure_log,
    "state": measure_state,
    "grouping": measure_grouping,
    "tensors": measure_tensors,
    "first": measure_first,
}


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=5)
    parser.add_argument("--part", choices=[*PARTS], help="only this one")
    arguments = parser.parse_args()
    if arguments.child:
        import torch

        torch.set_num_threads(1)
        report_from_child(PARTS[arguments.part](library(arguments.child), arguments.quick))
        return
    if arguments.quick:
        arguments.rounds = 1
    contenders = choose_contenders(NEEDS, arguments.contenders)
    quick = ["--quick"] if arguments.quick else []
    parts = [arguments.part] if arguments.part else [*PARTS]

    def measure(name: str) -> dict[str, Any]:
        numbers: dict[str, Any] = {}
        for part in parts:
            numbers |= run_child(__file__, ["--child", name, "--part", part, *quick], num_threads=1)
        return numbers

    measured = take_turns(contenders, arguments.rounds, measure)
    keys = [*next(iter(measured.values()))[0]]
    base = "transformers" if "transformers" in contenders else contenders[0]
    rows: dict[str, Any] = {
        key: {
            **{name: summarize([row[key] for row in measured[name]]) for name in contenders},
            "of_transformers": ratios(measured, key, base).get("paceline"),
        }
        for key in keys
    }

    def of_theirs(key: str) -> float | None:
        is_measured = base == "transformers" and "paceline" in contenders and key in rows
        return rows[key]["of_transformers"]["median"] if is_measured else None

    write_result(
        arguments,
        "run_growth",
        {
            "settings": {
                "threads": 1,
                "rows": ROWS,
                "rows_between": ROWS_BETWEEN,
                "tensors": TENSORS,
                "samples": SAMPLES,
            },
            "rows": rows,
            "measured": measured,
            "targets": [
                target("memory of a logged step, of transformers'", of_theirs("bytes_per_logged_step"), 1.0, "x"),
                target("CPU time of the state at a save, of transformers'", of_theirs("state_ms_per_save"), 1.0, "x"),
                target("memory of an order by length, of transformers'", of_theirs("grouping_mb"), 1.0, "x"),
                target(
                    "CPU time of a save of 3,000 tensors, of transformers'", of_theirs("small_tensors_ms"), 1.0, "x"
                ),
                target(
                    "CPU time from constructor to first step, of transformers'", of_theirs("first_step_ms"), 1.0, "x"
                ),
            ],
        },
    )


if __name__ == "__main__":
    main()
