"""The time a checkpoint of a sharded model holds up training: sharded and asynchronous, whole, and by torch's dcp.save.

Two processes of this machine train a module under `fully_shard` and save every so many updates. Held is the time from
the end of an update until the next one begins, on the first process, less what that takes without a save; from the
second save on. paceline hashes and syncs what it writes; `dcp.save` syncs, and training waits for it.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
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

CONTENDERS = {"shards, behind": "torch", "shards, at once": "torch", "whole": "torch", "dcp.save": "torch"}
PROCESSES, WIDTH, LAYERS, BATCH = 2, 1024, 12, 8
SAVES, STEPS_BETWEEN = 3, 25
LIMIT = 0.5


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=3)
    arguments = parser.parse_args()
    if arguments.child:
        if "RANK" in os.environ:
            measure(arguments.child, quick=arguments.quick, folder=Path(os.environ["BENCHMARK_FOLDER"]))
        else:
            report_from_child(start(arguments.child, ["--quick"] if arguments.quick else []))
        return
    chosen = choose_contenders(CONTENDERS, arguments.contenders)
    flags = ["--quick"] if arguments.quick else []
    rounds = 1 if arguments.quick else arguments.rounds
    measured = take_turns(chosen, rounds, lambda name: run_child(__file__, ["--child", name, *flags], num_threads=1))
    held = ratios(measured, "held_seconds", "dcp.save")
    rows = {
        name: {
            **{key: summarize([each[key] for each in taken]) for key in taken[0]},
            "held_of_dcp_save": held.get(name),
        }
        for name, taken in measured.items()
    }
    own = held.get("shards, behind", {}).get("median")
    write_result(
        arguments,
        "sharded_save",
        {
            "rows": rows,
            "settings": {"steps_between": STEPS_BETWEEN, "saves": SAVES, "batch": BATCH, "processes": PROCESSES},
            "targets": [target("time that training waits for shards written behind it, of dcp.save", own, LIMIT, "x")],
        },
    )


def start(name: str, flags: list[str]) -> Measured:
    """Run the processes of one contender; the first one's last line is the report."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        common = {**os.environ, "WORLD_SIZE": str(PROCESSES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "--child", name, *flags],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "BENCHMARK_FOLDER": folder},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(PROCESSES)
        ]
        said = [process.communicate(timeout=600) for process in started]
        if any(process.returncode for process in started):
            raise SystemExit("".join(errors[-2000:] for _, errors in said))
        import json

        report: Measured = json.loads(said[0][0].splitlines()[-1])
        return report


# ---- one contender, one of its processes


def measure(name: str, *, quick: bool, folder: Path) -> None:
    """Train, save, and time what happens between the updates."""
    import torch

    import paceline

    width, layers, between = (128, 4, 4) if quick else (WIDTH, LAYERS, STEPS_BETWEEN)
    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(layers))

        def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
            for layer in self.layers:
                x = layer(x)
            return {"loss": (x - labels).square().mean()}

    begins: list[float] = []
    ends: list[float] = []

    class Timer(paceline.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begins.append(time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())
            if name == "dcp.save" and state.global_step % between == 0:
                save_with_dcp(trainer, folder / f"dcp-{state.global_step}")

    data = [{"x": torch.randn(width), "labels": torch.randn(width)} for _ in range(BATCH)]
    args = paceline.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=between * (SAVES + 1) - 1,
        per_device_train_batch_size=BATCH // PROCESSES,
        fsdp=True,
        save_strategy="no" if name == "dcp.save" else "steps",
        save_steps=between,
        save_total_limit=1,
        logging_steps=10_000,
        report_to="none",
        disable_tqdm=True,
        checkpoint_format="full" if name == "whole" else "sharded",
        save_in_background=name == "shards, behind",
    )
    trainer = paceline.Trainer(model=Model(), args=args, train_dataset=data, callbacks=[Timer()])
    trainer.train()
    gaps = [begin - end for end, begin in zip(ends, begins[1:], strict=False)]
    plain = statistics.median(gap for step, gap in enumerate(gaps, 1) if step % between)
    held = [gap - plain for step, gap in enumerate(gaps, 1) if step % between == 0]
    steps = [end - begin for begin, end in zip(begins, ends, strict=True)][1:]
    report_from_child(
        {
            "held_seconds": statistics.median(held[1:]),
            "held_seconds_first": held[0],
            "step_seconds": statistics.median(steps),
            "parameters": width * width * layers,
        }
    )


def save_with_dcp(trainer: Any, folder: Path) -> None:
    """Model and optimizer, as torch's own documentation saves them."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


if __name__ == "__main__":
    main()
