"""The cost of importing the package relative to `import torch`, in CPU time and wall time.

Each statement runs in a fresh process, the bytecode being compiled before; the time is that of the statement alone, not
of the interpreter's start.

    python benchmarks/import_time.py [--quick] [--rounds 15]
"""

from __future__ import annotations

import time
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

STATEMENTS = {
    "import torch": "import torch",
    "paceline Trainer": "from paceline import Trainer, TrainingArguments",
    "transformers Trainer": "from transformers import Trainer, TrainingArguments",
    "import paceline": "import paceline",
}
NEEDS = {
    "import torch": "torch",
    "paceline Trainer": "paceline",
    "transformers Trainer": "transformers",
    "import paceline": "paceline",
}
LIMIT_RATIO, LIMIT_MILLISECONDS = 1.10, 100.0


def time_statement(statement: str) -> dict[str, float]:
    """CPU and wall milliseconds of one statement, in this fresh process."""
    code = compile(statement, "<statement>", "exec")
    wall, processor = time.perf_counter(), time.process_time()
    exec(code, {})
    return {"cpu_ms": 1e3 * (time.process_time() - processor), "wall_ms": 1e3 * (time.perf_counter() - wall)}


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=15)
    arguments = parser.parse_args()
    if arguments.child:
        report_from_child(time_statement(STATEMENTS[arguments.child]))
        return
    if arguments.quick:
        arguments.rounds = 1
    contenders = choose_contenders(NEEDS, arguments.contenders)

    def measure(name: str) -> dict[str, Any]:
        return run_child(__file__, ["--child", name], num_threads=1)

    for name in contenders:  # bytecode and file caches
        measure(name)
    measured = take_turns(contenders, arguments.rounds, measure)
    over_torch, waits = (ratios(measured, key, "import torch") for key in ("cpu_ms", "wall_ms"))
    rows: dict[str, Any] = {
        name: {
            "statement": STATEMENTS[name],
            "cpu_ms": summarize([row["cpu_ms"] for row in measured[name]]),
            "wall_ms": summarize([row["wall_ms"] for row in measured[name]]),
            "over_torch": over_torch.get(name),
            "wall_over_torch": waits.get(name),
        }
        for name in contenders
    }
    ratio = (rows.get("paceline Trainer", {}).get("wall_over_torch") or {}).get("median")
    alone = rows.get("import paceline", {}).get("cpu_ms", {}).get("median")
    write_result(
        arguments,
        "import_time",
        {
            "settings": {"threads": 1},
            "rows": rows,
            "measured": measured,
            "targets": [
                target("time that importing paceline's Trainer takes, over `import torch`", ratio, LIMIT_RATIO, "x"),
                target("CPU time of `import paceline`", alone, LIMIT_MILLISECONDS, "ms"),
            ],
        },
    )


if __name__ == "__main__":
    main()
