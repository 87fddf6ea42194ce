"""The time a checkpoint holds up training: written asynchronously, synchronously, and by transformers.

A module of 67 million parameters with AdamW trains on this machine and saves every so many updates. Held is the time
from the end of an update until the next one begins, less what that takes without a save; the first save of a run, which
also makes the memory that is copied into, is told apart. All of paceline's saves write, hash and fsync the same bytes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

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

CONTENDERS = {"background": "torch", "synchronous": "torch", "transformers": "transformers"}
WIDTH, LAYERS, BATCH = 2048, 16, 8
SAVES, STEPS_BETWEEN = 4, 80
LIMIT = 0.15


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=3)
    parser.add_argument("--steps-between", type=int, default=STEPS_BETWEEN, help="updates between two saves")
    arguments = parser.parse_args()
    if arguments.child:
        report_from_child(measure(arguments.child, quick=arguments.quick, between=arguments.steps_between))
        return
    chosen = choose_contenders(CONTENDERS, arguments.contenders)
    rounds = 1 if arguments.quick else arguments.rounds
    flags = ["--quick"] if arguments.quick else []
    flags += ["--steps-between", str(arguments.steps_between)]
    measured = take_turns(chosen, rounds, lambda name: run_child(__file__, ["--child", name, *flags]))
    held = ratios(measured, "held_seconds", "synchronous")
    rows = {
        name: {
            **{key: summarize([each[key] for each in taken]) for key in taken[0]},
            "held_of_synchronous": held.get(name),
        }
        for name, taken in measured.items()
    }
    own = held.get("background", {}).get("median")
    write_result(
        arguments,
        "checkpoint_save",
        {
            "rows": rows,
            "settings": {"steps_between": arguments.steps_between, "saves": SAVES, "batch": BATCH},
            "targets": [target("time that training waits for a save, of a synchronous one", own, LIMIT, "x")],
        },
    )


# ---- one contender, in a process of its own


def measure(name: str, *, quick: bool, between: int) -> Measured:
    """Train, save, and time what happens between the updates."""
    import torch

    width, layers, between, saves = (256, 4, 4, 3) if quick else (WIDTH, LAYERS, between, SAVES)
    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))

        def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
            return {"loss": (self.layers(x) - labels).square().mean()}

    data = [{"x": torch.randn(width), "labels": torch.randn(width)} for _ in range(BATCH)]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        clock, trainer = train(name, Model(), data, Path(folder), between, saves)
        return {**clock.summary(between), **verification(Path(folder), name), "parameters": parameters(trainer)}


def parameters(trainer: Any) -> int:
    return sum(parameter.numel() for parameter in trainer.model.parameters())


class Clock:
    """Callback methods shared by both libraries: notes when updates begin and end, and whether files are written."""

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []
        self.busy: list[bool] = []
        self.is_busy: Any = lambda: False

    def summary(self, between: int) -> Measured:
        gaps = [begin - end for end, begin in zip(self.ends, self.begins[1:], strict=False)]
        plain = statistics.median(gap for step, gap in enumerate(gaps, 1) if step % between)
        held = [gap - plain for step, gap in enumerate(gaps, 1) if step % between == 0]
        steps = [end - begin for begin, end in zip(self.begins, self.ends, strict=True)][1:]
        writing = [seconds for seconds, busy in zip(steps, self.busy[1:], strict=True) if busy]
        quiet = [seconds for seconds, busy in zip(steps, self.busy[1:], strict=True) if not busy]
        found = {
            "held_seconds": statistics.median(held[1:]),
            "held_seconds_first": held[0],
            "held_seconds_most": max(held[1:]),
            "step_seconds": statistics.median(quiet),
        }
        if writing:
            found["step_seconds_while_writing"] = statistics.median(writing)
            found["steps_while_writing"] = len(writing) / len(held)
        return found


def train(name: str, model: Any, data: Any, folder: Path, between: int, saves: int) -> tuple[Clock, Any]:
    if name == "transformers":
        import transformers as library

        options: dict[str, Any] = {}
    else:
        import paceline as library

        options = {"save_in_background": name == "background"}
    clock = Clock()

    class Timer(library.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.begins.append(time.perf_counter())
            clock.busy.append(clock.is_busy())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.ends.append(time.perf_counter())

    args = library.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=between * (saves + 1) - 1,
        per_device_train_batch_size=BATCH,
        save_steps=between,
        save_total_limit=1,
        logging_steps=10_000,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = library.Trainer(model=model, args=args, train_dataset=data, callbacks=[Timer()])
    if name == "background":
        clock.is_busy = lambda: trainer.run.saves.writer.is_busy and not trainer.run.saves.writer.is_due
    trainer.train()
    return clock, trainer


def verification(folder: Path, name: str) -> Measured:
    """Bytes of a checkpoint, and how fast they are checked (from the page cache)."""
    checkpoint = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    size = sum(path.stat().st_size for path in checkpoint.rglob("*"))
    if name == "transformers":
        return {"checkpoint_bytes": size}
    from paceline.checkpoint.folders import verify

    start = time.perf_counter()
    problems = verify(checkpoint)
    seconds = time.perf_counter() - start
    if problems:
        raise SystemExit(f"{checkpoint}: {problems}")
    return {"checkpoint_bytes": size, "verified_gb_per_second": size / seconds / 1e9}


if __name__ == "__main__":
    main()
