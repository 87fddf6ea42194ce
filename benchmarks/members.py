"""Eight learning rates at once against eight runs: CPU seconds of each, and their ratio.

    python benchmarks/members.py [--steps 300] [--rounds 5] [--members 8] [--hidden 64]

A two-layer classifier of 64 inputs is trained with AdamW on one CPU thread in batches of 32. Both contenders take turns
in one process, and the ratio is one of neighbours. CPU time includes everything from the call of `train` to its end.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from functools import partial
from typing import Any

import torch
from torch import nn

from measure import choose_contenders, make_parser, ratios, summarize, take_turns, write_result
from paceline import Member, MembersTrainer, Trainer, TrainingArguments

AT_ONCE, ONE_BY_ONE = "members at once", "a run for each"


class Classifier(nn.Module):
    """Two linear layers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def arguments(folder: str, steps: int, **options: Any) -> TrainingArguments:
    """Returns the arguments of both contenders."""
    return TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=32,
        logging_steps=100,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )


def seconds_of(trainer: Trainer) -> float:
    """Returns the CPU seconds of a training."""
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return time.process_time() - start


def main() -> None:
    """Trains both contenders in turns, and writes the seconds of each and their ratio."""
    parser = make_parser(__doc__ or "", rounds=5)
    for name, value in (("steps", 300), ("members", 8), ("hidden", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    steps = 20 if given.quick else given.steps
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = [{"x": torch.randn(64), "labels": torch.randint(10, ())} for _ in range(1000)]
    rates = [10 ** (-4 + 2 * k / (given.members - 1)) for k in range(given.members)]
    model_init = partial(Classifier, given.hidden)

    def at_once(folder: str, steps: int) -> float:
        members = [Member(learning_rate=rate) for rate in rates]
        args = arguments(folder, steps)
        return seconds_of(MembersTrainer(model_init=model_init, args=args, train_dataset=data, members=members))

    def one_by_one(folder: str, steps: int) -> float:
        each = [arguments(folder, steps, learning_rate=rate) for rate in rates]
        return sum(seconds_of(Trainer(model_init=model_init, args=args, train_dataset=data)) for args in each)

    calls = {AT_ONCE: at_once, ONE_BY_ONE: one_by_one}
    chosen = choose_contenders(dict.fromkeys(calls, "torch"), given.contenders)
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            calls[name](folder, 5)  # warm caches
        rounds = 1 if given.quick else given.rounds
        measured = take_turns(chosen, rounds, lambda name: {"seconds": calls[name](folder, steps)})
    share = ratios(measured, "seconds", ONE_BY_ONE)
    rows = {
        name: {"seconds": summarize([each["seconds"] for each in taken]), "of_alone": share.get(name)}
        for name, taken in measured.items()
    }
    settings = {"steps": steps, "members": given.members, "hidden": given.hidden}
    write_result(given, "members", {"rows": rows, "settings": settings, "targets": []})


if __name__ == "__main__":
    main()
