"""Time from resuming to the end of the first optimizer step, far into a stream and far into a map-style dataset.

python benchmarks/resume_time.py [--rounds N] [--quick] [--contenders NAME ...]

A small model trains until it stands 2,000 updates into a stream that has `state_dict` (its samples are texts, read into
tensors), or 1,000,000 samples into a dataset with an index. A fresh process, which has trained something else before so
that everything is imported, resumes; the seconds go from the call of `train` to the end of the first update, and hold
the verification of the checkpoint. How fast that is for large files is measured beside it.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import (
    Measured,
    choose_contenders,
    make_parser,
    report_from_child,
    run_child,
    summarize,
    take_turns,
    target,
    write_result,
)

NEEDS = {
    "paceline, stream": "paceline",
    "paceline, map": "paceline",
    "transformers, stream": "transformers",
    "transformers, map": "transformers",
}
# updates made before the stop, and samples in each
SHAPES = {"stream": (2_000, 8), "map": (1_000, 1_000)}
QUICK_SHAPES = {"stream": (20, 8), "map": (20, 1_000)}
TEXT_BYTES = 512
WIDTH = 32
VERIFIED_MB = 512
LIMIT_SECONDS = 1.0


def make_data(kind: str, num_samples: int) -> Any:
    """A training set twice as long as what was read before the stop; it counts what it reads."""
    import torch

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __init__(self) -> None:
            self.next = self.read = 0

        def __iter__(self) -> Any:
            while self.next < 2 * num_samples:
                self.next += 1
                self.read += 1
                text = (str(self.next) * TEXT_BYTES)[:TEXT_BYTES].encode()
                tokens = torch.tensor(list(text), dtype=torch.float32)
                yield {"x": tokens.view(-1, WIDTH).mean(0) / 255, "labels": tokens[0] / 255}
            self.next = 0

        def state_dict(self) -> dict[str, int]:
            return {"next": self.next}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.next = state["next"]

    class Table(torch.utils.data.Dataset[Any]):
        """Whole batches at a time, so that getting to the place in question does not take minutes."""

        read = 0

        def __len__(self) -> int:
            return 2 * num_samples

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("samples are read in batches")

        def __getitems__(self, indices: list[int]) -> Any:
            self.read += len(indices)
            rows = torch.tensor(indices, dtype=torch.float32)[:, None] / len(self)
            return [{"x": rows.expand(-1, WIDTH).contiguous(), "labels": rows[:, 0]}]

    return Stream() if kind == "stream" else Table()


def make_trainer(library: Any, kind: str, folder: Path, shape: tuple[int, int], callbacks: list[Any]) -> Any:
    """A Trainer of either library."""
    import torch

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(WIDTH, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
            )

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            return {"loss": (self.layers(x)[:, 0] - labels).square().mean()}

    steps, batch_size = shape
    arguments = library.TrainingArguments(
        output_dir=str(folder),
        max_steps=2 * steps,
        per_device_train_batch_size=batch_size,
        save_strategy="steps",
        save_steps=steps,
        logging_steps=500,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    collate = (lambda rows: rows[0]) if kind == "map" else None
    return library.Trainer(
        model=Small(),
        args=arguments,
        train_dataset=make_data(kind, steps * batch_size),
        data_collator=collate,
        callbacks=callbacks,
    )


def run_contender(name: str, stage: str, folder: Path, quick: bool) -> Measured:
    """`prepare`: train to the place and stop. `resume`: time it."""
    import importlib

    import torch

    torch.set_num_threads(1)
    module, kind = name.split(", ")
    library = importlib.import_module(module)
    shape = (QUICK_SHAPES if quick else SHAPES)[kind]
    found: Measured = {}

    class StopAfter(library.TrainerCallback):  # type: ignore[misc]
        def __init__(self, updates: int) -> None:
            self.left = updates

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.left -= 1
            if self.left == 0:
                found["end"] = time.perf_counter()
                control.should_training_stop = True

    with contextlib.redirect_stdout(sys.stderr):
        if stage == "prepare":
            make_trainer(library, kind, folder, shape, [StopAfter(shape[0])]).train()
            return {}
        with tempfile.TemporaryDirectory() as elsewhere:
            make_trainer(library, kind, Path(elsewhere), (4, 2), [StopAfter(2)]).train()
        trainer = make_trainer(library, kind, folder, shape, [StopAfter(1)])
        start = time.perf_counter()
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == shape[0] + 1
    return {"seconds": found["end"] - start, "samples_read": trainer.train_dataset.read}


def measure_verification(num_mb: int) -> float:
    """Gigabytes a second that are verified of a checkpoint just written."""
    from paceline.checkpoint import folders

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "checkpoint-1")
        with folders.staged(folder) as staged:
            block = bytes(range(256)) * 4096
            with open(staged / "model.safetensors", "wb") as file:
                for _ in range(num_mb):
                    file.write(block)
        start = time.perf_counter()
        problems = folders.verify(folder)
        seconds = time.perf_counter() - start
    assert not problems
    return num_mb * 2**20 / 1e9 / seconds


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=3)
    parser.add_argument("--stage", help="of a child")
    parser.add_argument("--folder", type=Path, help="of a child")
    arguments = parser.parse_args()
    if arguments.child == "verification":
        report_from_child({"gb_per_second": measure_verification(16 if arguments.quick else VERIFIED_MB)})
        return
    if arguments.child:
        report_from_child(run_contender(arguments.child, arguments.stage, arguments.folder, arguments.quick))
        return
    if arguments.quick:
        arguments.rounds = 1
    contenders = choose_contenders(NEEDS, arguments.contenders)
    flags = ["--quick"] if arguments.quick else []
    with tempfile.TemporaryDirectory() as place:
        prepared: set[str] = set()

        def measure(name: str) -> Measured:
            folder = ["--folder", str(Path(place, name.replace(", ", "-")))]
            if name not in prepared:
                run_child(__file__, ["--child", name, "--stage", "prepare", *folder, *flags], num_threads=1)
                prepared.add(name)
            return run_child(__file__, ["--child", name, "--stage", "resume", *folder, *flags], num_threads=1)

        measured = take_turns(contenders, arguments.rounds, measure)
    speeds = [
        run_child(__file__, ["--child", "verification", *flags])["gb_per_second"] for _ in range(arguments.rounds)
    ]
    shapes = QUICK_SHAPES if arguments.quick else SHAPES
    rows = {name: {key: summarize([run[key] for run in runs]) for key in runs[0]} for name, runs in measured.items()}
    places = {"stream": "{0:,} updates into a stream", "map": "{1:,} samples into a dataset"}
    limits = [
        target(
            f"first update after resuming {places[kind].format(shapes[kind][0], shapes[kind][0] * shapes[kind][1])}",
            rows[f"paceline, {kind}"]["seconds"]["median"],
            LIMIT_SECONDS,
            "s",
        )
        for kind in shapes
        if f"paceline, {kind}" in rows
    ]
    content = {
        "settings": {"shapes": shapes, "threads": 1},
        "rows": rows,
        "verified_gb_per_second": summarize(speeds),
        "measured": measured,
        "targets": limits,
    }
    write_result(arguments, "resume_time", content)


if __name__ == "__main__":
    main()
