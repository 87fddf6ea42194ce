"""The cost of the time ledger: CPU time per step with it and without it, on a model so small that little else is left.

The model and the settings are those of `step_overhead.py`. Without the ledger its notes go to a C function that does
nothing. Each contender trains 1,500 and then 4,500 steps in one fresh process on one thread; what the longer run takes
more, divided by the 3,000 steps it has more, is the cost of a step. The contenders take turns, and the ratio is one of
neighbours. The peers, which keep no such account, take part in the turns.

    python benchmarks/ledger.py [--quick] [--rounds 15]
"""

from __future__ import annotations

import itertools
from typing import Any

import step_overhead
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

PEERS = ("loop", "transformers.Trainer", "lightning", "accelerate loop")
NEEDS = {"without": "paceline", "with": "paceline", **{name: step_overhead.NEEDS[name] for name in PEERS}}
LIMIT = 1.01


def throw_notes_away() -> None:
    """Replaces what takes the notes, for the rest of this process."""
    from paceline.core import ledger

    class Nothing(ledger.Ledger):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.note = bool  # type: ignore[assignment]
            self.now = itertools.repeat(0.0).__next__

    from paceline.pytorch.distributed import device_clock

    device_clock.Ledger = Nothing  # type: ignore[misc]


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=15)
    arguments = parser.parse_args()
    steps = step_overhead.QUICK_STEPS if arguments.quick else step_overhead.STEPS
    if arguments.child:
        if arguments.child == "without":
            throw_notes_away()
        trained = arguments.child if arguments.child in PEERS else "paceline"
        report_from_child(step_overhead.time_contender(trained, steps))
        return
    if arguments.quick:
        arguments.rounds = 1
    contenders = choose_contenders(NEEDS, arguments.contenders)
    quick = ["--quick"] if arguments.quick else []

    def measure(name: str) -> dict[str, Any]:
        return run_child(__file__, ["--child", name, *quick], num_threads=1)

    measured = take_turns(contenders, arguments.rounds, measure)
    over = ratios(measured, "us_per_step", "without")
    rows = {
        name: {"us_per_step": summarize([row["us_per_step"] for row in measured[name]]), "over_without": over.get(name)}
        for name in contenders
    }
    ratio = (over.get("with") or {}).get("median")
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
