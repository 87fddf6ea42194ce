"""The cost of the time ledger: CPU time per step with it and without it, on a model so small that little else is left.

The model and the settings are those of `step_overhead.py`. Without the ledger its notes go to a C function that does
nothing. Each contender takes turns with "without" in one fresh process, as in `step_overhead.py`: "without" beside
itself shows the noise. The peers keep no such account.

    python benchmarks/ledger.py [--quick] [--rounds 5]
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import step_overhead
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

PEERS = ("loop", "transformers.Trainer", "lightning", "accelerate loop")
NEEDS = {"without": "paceline", "with": "paceline", **{name: step_overhead.NEEDS[name] for name in PEERS}}
LIMIT = 1.01
STEPS = (100, 1100)
TURNS, PEER_TURNS = 40, 3  # short ones, since the machine's speed drifts


@contextlib.contextmanager
def no_notes() -> Iterator[None]:
    """Replaces what takes the notes of runs that begin inside."""
    from paceline.core import ledger
    from paceline.pytorch.distributed import device_clock

    class Nothing(ledger.Ledger):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.note = bool  # type: ignore[assignment]
            self.now = itertools.repeat(0.0).__next__

    kept = device_clock.Ledger
    device_clock.Ledger = Nothing  # type: ignore[misc]
    try:
        yield
    finally:
        device_clock.Ledger = kept  # type: ignore[misc]


def compare(name: str, steps: tuple[int, int]) -> dict[str, float]:
    """CPU microseconds per step of a contender, and over those without the ledger."""
    num_samples = step_overhead.BATCH_SIZE * steps[1] * 3 // 4  # the longest run is a bit more than one epoch
    plain = step_overhead.prepare("paceline", num_samples)

    def train_without(num_steps: int) -> None:
        with no_notes():
            plain(num_steps)

    own = {"with": plain, "without": train_without}
    train = own[name] if name in own else step_overhead.prepare(name, num_samples)
    return step_overhead.take_turns_within(train, train_without, steps, TURNS if name in own else PEER_TURNS)


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=5)
    arguments = parser.parse_args()
    steps = step_overhead.QUICK_STEPS if arguments.quick else STEPS
    if arguments.child:
        report_from_child(compare(arguments.child, steps))
        return
    if arguments.quick:
        arguments.rounds = 1
    contenders = choose_contenders(NEEDS, arguments.contenders)
    quick = ["--quick"] if arguments.quick else []

    def measure(name: str) -> dict[str, Any]:
        return run_child(__file__, ["--child", name, *quick], num_threads=1)

    measured = take_turns(contenders, arguments.rounds, measure)
    rows = {
        name: {
            "us_per_step": summarize([row["us_per_step"] for row in measured[name]]),
            "over_without": summarize([row["over_base"] for row in measured[name]]),
        }
        for name in contenders
    }
    ratio = rows["with"]["over_without"]["median"] if "with" in rows else None
    write_result(
        arguments,
        "ledger",
        {
            "settings": {"steps": steps, "batch_size": step_overhead.BATCH_SIZE, "threads": 1},
            "rows": rows,
            "measured": measured,
            "targets": [target("CPU time of a step, with the time ledger over without it", ratio, LIMIT, "x")],
        },
    )


if __name__ == "__main__":
    main()
