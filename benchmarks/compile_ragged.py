"""Compilation of a model for batches of ragged lengths: its time, its number of graphs, and the step after it.

The texts are those of `ragged_text.py` in fixed order, so that nearly every batch has a length of its own. Each
contender trains the same model in a fresh process on one thread, with an empty folder for the compiler's cache. Graphs
are counted by torch: those of forward passes, and of them those that torch compiled again for other inputs. The time
until the first step is wall time, of `train()`; the CPU time of a step is that of the second half of the steps.

A quick run compiles with the backend `eager`: torch traces as always, and no code is generated.

    python benchmarks/compile_ragged.py [--quick] [--rounds 1] [--contenders ...]
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import time
import warnings
from typing import Any

import peers
from measure import (
    Measured,
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
from ragged_text import LONGEST, MEAN, make_lengths, make_model, make_texts, pad

EAGER, COMPILED = "paceline, eager", "paceline, torch_compile"
THEIRS = "transformers.Trainer, torch_compile"
NEEDS = {
    EAGER: "transformers",
    COMPILED: "transformers",
    "transformers.Trainer, eager": "accelerate",
    THEIRS: "accelerate",
    **{f"{name}, {way}": needed for name, needed in peers.NEEDS.items() for way in ("eager", "torch_compile")},
}
BATCH_SIZE, STEPS, QUICK_STEPS = 4, 30, 4
LIMIT_RECOMPILATIONS = 1  # docs/speed.md: once a batch differs from the first, code is compiled for any size


def train(contender: str, is_quick: bool) -> Measured:
    import torch
    from torch._dynamo.utils import get_compilation_metrics, set_compilation_metrics_limit

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    set_compilation_metrics_limit(10_000)  # torch keeps the last 64
    steps = QUICK_STEPS if is_quick else STEPS
    marks: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")
        fit = make_training(contender, folder, steps, is_quick, marks)
        start = time.perf_counter()
        fit()
    metrics = get_compilation_metrics()
    forward = [each for each in metrics if each.co_name is not None and each.fail_type is None]
    last = steps - steps // 2
    return {
        "first_step_seconds": marks[0][0] - start,
        "cpu_seconds": (marks[-1][1] - marks[steps - last - 1][1]) / last,
        "graphs": len(forward),
        "recompilations": sum(each.recompile_reason is not None for each in forward),
        "failures": sum(each.fail_type is not None for each in metrics),
    }


def make_training(contender: str, folder: str, steps: int, is_quick: bool, marks: list[tuple[float, float]]) -> Any:
    """Returns a function that trains, and notes (wall seconds, CPU seconds) after each step."""
    peer, _, way = contender.partition(", ")
    if peer not in peers.NEEDS:
        return make_trainer(contender, folder, steps, is_quick, marks).train

    def note(step: int) -> None:
        marks.append((time.perf_counter(), time.process_time()))

    importlib.import_module(peers.NEEDS[peer])  # no part of what is measured
    model = make_model()
    if way == "torch_compile":
        model.compile(backend="eager" if is_quick else "inductor")
    return lambda: peers.fit(peer, peers.Job(model, make_some(steps), BATCH_SIZE, steps, note, pad, shuffles=False))


def make_some(steps: int) -> Any:
    """The texts of so many batches."""
    return make_texts(make_lengths(STEPS * BATCH_SIZE)[: steps * BATCH_SIZE])


def make_trainer(contender: str, folder: str, steps: int, is_quick: bool, marks: list[tuple[float, float]]) -> Any:
    """Returns a Trainer that notes (wall seconds, CPU seconds) after each step."""
    if contender.startswith("paceline"):
        import paceline as library
    else:
        import transformers as library  # type: ignore[no-redef]
    options: dict[str, Any] = {}
    if contender.endswith("torch_compile"):
        options = {"torch_compile": True, **({"torch_compile_backend": "eager"} if is_quick else {})}
    args = library.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH_SIZE,
        max_steps=steps,
        train_sampling_strategy="sequential",
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        **options,
    )

    class Clock(library.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append((time.perf_counter(), time.process_time()))

    return library.Trainer(make_model(), args, train_dataset=make_some(steps), data_collator=pad, callbacks=[Clock()])


def count_lengths(steps: int) -> int:
    """Number of different lengths of batches."""
    lengths = make_lengths(STEPS * BATCH_SIZE)[: steps * BATCH_SIZE]
    return len({max(lengths[first : first + BATCH_SIZE]) for first in range(0, len(lengths), BATCH_SIZE)})


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=1)
    arguments = parser.parse_args()
    if arguments.child:
        report_from_child(train(arguments.child, arguments.quick))
        return
    if arguments.quick:
        arguments.rounds = 1
    steps = QUICK_STEPS if arguments.quick else STEPS
    contenders = choose_contenders(NEEDS, arguments.contenders)
    quick = ["--quick"] if arguments.quick else []

    def measure(name: str) -> Measured:
        return run_child(__file__, ["--child", name, *quick], num_threads=1)

    measured = take_turns(contenders, arguments.rounds, measure)
    over_eager = ratios(measured, "cpu_seconds", EAGER)
    rows = {
        name: {
            **{key: summarize([run[key] for run in runs]) for key in runs[0]},
            "cpu_seconds_over_eager": over_eager.get(name),
        }
        for name, runs in measured.items()
    }
    again = rows[COMPILED]["recompilations"]["max"] if COMPILED in rows else None
    first = ratios(measured, "first_step_seconds", THEIRS).get(COMPILED)
    targets = [
        target("recompilations for batches of ragged lengths", again, LIMIT_RECOMPILATIONS, "graphs"),
        target("time to the first compiled step, of the Hugging Face Trainer's", first and first["median"], 1.0, "x"),
    ]
    settings = {
        "steps": steps,
        "steps_measured": steps - steps // 2,
        "batch_size": BATCH_SIZE,
        "lengths": count_lengths(steps),
        "mean": MEAN,
        "longest": LONGEST,
        "parameters": sum(parameter.numel() for parameter in make_model().parameters()),
        "threads": 1,
    }
    content = {"settings": settings, "rows": rows, "measured": measured, "targets": targets}
    write_result(arguments, "compile_ragged", content)


if __name__ == "__main__":
    main()
