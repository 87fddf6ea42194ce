"""The cost of the loss of a large vocabulary: the first steps of a causal model, with its logits and without.

Each contender makes a few steps in a fresh process, on the same tokens, with plain SGD. A thread reads RssAnon, the
memory that is the process's own and cannot be dropped, from /proc/self/status (Linux) every 2 ms. `added` is
the peak of the steps above the level right before the first, less the gradients, which all contenders have alike; it
holds the first steps, in which paceline probes the loss. Freed blocks above 1 MB go back to the
system at once for everyone (MALLOC_MMAP_THRESHOLD_). CPU time is that of the steps after the first.

    python benchmarks/large_vocabulary.py [--quick] [--rounds 3] [--contenders ...]
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
import tempfile
import time
from typing import Any

import peers
from eval_memory import Watch, own_bytes
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

VOCABULARY, QUICK_VOCABULARY = 131_072, 32_768
TOKENS, ROWS, HIDDEN, STEPS = 2_048, 4, 64, 3
LIMIT_MEMORY, LIMIT_TIME, LIMIT_PEER = 0.2, 0.7, 1.02
BASE = "paceline, logits"

NEEDS = {
    "paceline, by chunks": "paceline",
    BASE: "paceline",
    "transformers.Trainer": "transformers",
    **peers.NEEDS,
}


def make_model(vocabulary: int) -> Any:
    """A small body under a large head, both untied: what is measured is the loss."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def make_texts(vocabulary: int) -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, vocabulary, (TOKENS // ROWS,), generator=generator) for _ in range(ROWS * (STEPS + 1))]
    return [{"input_ids": text, "labels": text} for text in texts]


def make_trainer(name: str, folder: str, vocabulary: int, stages: list[tuple[float, float]]) -> Any:
    """Returns a Trainer that notes (CPU seconds, wall seconds) after each step."""
    if name.startswith("paceline"):
        import paceline as library

        options: dict[str, Any] = {} if name.endswith("chunks") else {"linear_cross_entropy": False}
    else:
        import transformers as library  # type: ignore[no-redef]

        options = {}
    args = library.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=ROWS,
        max_steps=STEPS + 1,
        optim="sgd",
        learning_rate=1e-3,
        max_grad_norm=0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )

    class Notes(library.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            stages.append((time.process_time(), time.perf_counter()))

    return library.Trainer(
        model=make_model(vocabulary), args=args, train_dataset=make_texts(vocabulary), callbacks=[Notes()]
    )


def make_training(name: str, folder: str, vocabulary: int, stages: list[tuple[float, float]]) -> tuple[Any, Any]:
    """Returns a model, and a function that trains it."""
    if name not in peers.NEEDS:
        trainer = make_trainer(name, folder, vocabulary, stages)
        return trainer.model, trainer.train

    def note(step: int) -> None:
        stages.append((time.process_time(), time.perf_counter()))

    importlib.import_module(peers.NEEDS[name])  # no part of what is measured
    model = make_model(vocabulary)
    settings: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1e-3, "max_norm": 0.0}
    job = peers.Job(model, make_texts(vocabulary), ROWS, STEPS + 1, note, **settings)
    return model, lambda: peers.fit(name, job)


def measure_contender(name: str, vocabulary: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    stages: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        model, train = make_training(name, folder, vocabulary, stages)
        torch.ones(64, 64).mm(torch.ones(64, 64))  # the library's own buffers
        before = own_bytes()
        with Watch() as watch:
            train()
        gradients = sum(each.numel() * each.element_size() for each in model.parameters())
    cpu = [later[0] - earlier[0] for earlier, later in itertools.pairwise(stages)]
    wall = [later[1] - earlier[1] for earlier, later in itertools.pairwise(stages)]
    return {
        "added_gb": (watch.peak - before - gradients) / 1e9,
        "cpu_seconds": sum(cpu) / len(cpu),
        "seconds": sum(wall) / len(wall),
    }


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=3)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="classes of the head")
    arguments = parser.parse_args()
    if arguments.child:
        report_from_child(measure_contender(arguments.child, arguments.vocabulary))
        return
    own_bytes()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # for the children
    if arguments.quick:
        arguments.rounds, arguments.vocabulary = 1, QUICK_VOCABULARY
    contenders = choose_contenders(NEEDS, arguments.contenders)

    def measure(name: str) -> dict[str, Any]:
        return run_child(__file__, ["--child", name, "--vocabulary", str(arguments.vocabulary)], num_threads=1)

    measured = take_turns(contenders, arguments.rounds, measure)
    rows = {name: {key: summarize([run[key] for run in runs]) for key in runs[0]} for name, runs in measured.items()}
    for key in ("added_gb", "cpu_seconds"):
        for name, ratio in ratios(measured, key, BASE).items():
            rows[name][f"{key}_over_logits"] = ratio
    reference = ratios(measured, "added_gb", "transformers.Trainer")
    by_chunks = rows.get("paceline, by chunks", {})
    limits = [
        target("memory of steps without logits", median(by_chunks, "added_gb_over_logits"), LIMIT_MEMORY, "x"),
        target("CPU time of steps without logits", median(by_chunks, "cpu_seconds_over_logits"), LIMIT_TIME, "x"),
        target(
            "memory of steps with logits, probes of the loss included, over the Hugging Face Trainer",
            reference[BASE]["median"] if BASE in reference else None,
            LIMIT_PEER,
            "x",
        ),
    ]
    settings = {
        "vocabulary": arguments.vocabulary,
        "tokens": TOKENS,
        "hidden": HIDDEN,
        "steps": STEPS + 1,
        "logits_gb": TOKENS * arguments.vocabulary * 4 / 1e9,
        "threads": 1,
    }
    content = {"settings": settings, "rows": rows, "measured": measured, "targets": limits}
    write_result(arguments, "large_vocabulary", content)


def median(row: dict[str, Any], key: str) -> float | None:
    return row[key]["median"] if key in row else None


if __name__ == "__main__":
    main()
