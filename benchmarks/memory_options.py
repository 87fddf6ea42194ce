"""Memory and CPU time of a training step with each option that saves memory, and without.

Each contender trains a small causal model in a fresh process on one thread, on the same tokens, with AdamW and without
clipping. A thread reads RssAnon, the memory that is the process's own and cannot be dropped, from /proc/self/status
(Linux) every 2 ms. `added` is the peak of the steps after the first two above the level that is left when the Trainer
and the gradients are deleted: gradients, the optimizer's state, activations and logits. What the compiler and late
imports keep is in both levels. Freed blocks above 1 MB go back to the system at once for everyone
(MALLOC_MMAP_THRESHOLD_), smaller ones before that level is read (malloc_trim). CPU time is that of the same steps.

`activation_memory_budget` needs compiled code, so it is compared with the same run compiled without it. The backend is
torch's partitioner without a code generator. `activation_offload` has no meaning on a CPU and is refused there.

    python benchmarks/memory_options.py [--quick] [--rounds 2] [--contenders ...]
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import peers
from eval_memory import Watch, own_bytes
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

COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager_decomp_partition"}
PLAIN, WITH_COMPILER, THEIRS = "paceline, plain", "paceline, compiled", "transformers.Trainer, plain"
CHECKPOINTED = "paceline, gradient_checkpointing"
BUDGET = "paceline, compiled, activation_memory_budget=0.5"
THEIRS_CHECKPOINTED = "transformers.Trainer, gradient_checkpointing"
OPTIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    CHECKPOINTED: {"gradient_checkpointing": True},
    "paceline, optimizer_in_backward": {"optimizer_in_backward": True},
    "paceline, both of these": {"gradient_checkpointing": True, "optimizer_in_backward": True},
    "paceline, optimizer_state_dtype=bfloat16": {"optimizer_state_dtype": "bfloat16"},
    "paceline, linear_cross_entropy=False": {"linear_cross_entropy": False},
    WITH_COMPILER: COMPILED,
    BUDGET: {**COMPILED, "activation_memory_budget": 0.5},
    THEIRS: {},
    THEIRS_CHECKPOINTED: {"gradient_checkpointing": True},
}
OF_PEERS = {
    f"{name}, {option}": (name, option == "gradient_checkpointing")
    for name in peers.NEEDS
    for option in ("plain", "gradient_checkpointing")
}
NEEDS = {
    **{name: "accelerate" if name.startswith("transformers") else "transformers" for name in OPTIONS},
    **{name: peers.NEEDS[peer] for name, (peer, _) in OF_PEERS.items()},
}
BASES = {BUDGET: WITH_COMPILER}  # of the others: PLAIN
SAVES_NOTHING = (PLAIN, WITH_COMPILER, "paceline, linear_cross_entropy=False")
MODEL = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
VOCABULARY = 16_384  # with these tokens, logits that are large enough for the loss to go by chunks by itself
ROWS, LENGTH, QUICK_LENGTH = 4, 288, 192
FIRST_STEPS, STEPS, QUICK_STEPS = 2, 4, 3
LIMIT = 1.02  # of memory; no option may cost any


def make_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**MODEL, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, tie_word_embeddings=False)
    return LlamaForCausalLM(config)


def make_texts(steps: int, length: int) -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, VOCABULARY, (length,), generator=generator) for _ in range(ROWS * steps)]
    return [{"input_ids": text, "labels": text} for text in texts]


def make_notes(steps: int, watch: Watch, cpu: list[float]) -> Callable[[int], None]:
    """Returns what is called after each step: it enters `watch` after the first ones and leaves it after the last."""
    watched = contextlib.ExitStack()

    def note(step: int) -> None:
        if step in (FIRST_STEPS, steps):
            cpu.append(time.process_time())
        if step == FIRST_STEPS:
            watched.enter_context(watch)
        elif step == steps:
            watched.close()

    return note


def train(name: str, folder: str, shape: tuple[int, int], note: Callable[[int], None]) -> Any:
    """Trains, and returns the model."""
    if name not in OF_PEERS:
        trainer = make_trainer(name, folder, shape, note)
        trainer.train()
        return trainer.model
    model, (peer, is_checkpointed) = make_model(), OF_PEERS[name]
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    steps = shape[0]
    peers.fit(peer, peers.Job(model, make_texts(*shape), ROWS, steps, note, learning_rate=1e-4, max_norm=0.0))
    return model


def make_trainer(name: str, folder: str, shape: tuple[int, int], note: Callable[[int], None]) -> Any:
    """Returns a Trainer that calls `note` with the number of each step that is done."""
    if name.startswith("paceline"):
        import paceline as library
    else:
        import transformers as library  # type: ignore[no-redef]
    args = library.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=ROWS,
        max_steps=shape[0],
        learning_rate=1e-4,
        max_grad_norm=0.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **OPTIONS[name],
    )

    class Notes(library.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            note(state.global_step)

    return library.Trainer(model=make_model(), args=args, train_dataset=make_texts(*shape), callbacks=[Notes()])


def measure_contender(name: str, is_quick: bool) -> Measured:
    import torch

    torch.set_num_threads(1)
    shape = (QUICK_STEPS, QUICK_LENGTH) if is_quick else (STEPS, LENGTH)
    watch = Watch()
    cpu: list[float] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        model = train(name, folder, shape, make_notes(shape[0], watch, cpu))
        for parameter in model.parameters():
            parameter.grad = None
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        left = own_bytes()
    return {
        "added_mb": (watch.peak - left) / 1e6,
        "cpu_seconds": (cpu[1] - cpu[0]) / (shape[0] - FIRST_STEPS),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def make_rows(measured: dict[str, list[Measured]]) -> dict[str, dict[str, Any]]:
    """Medians of each contender, and its ratios to the plain run, of compiled ones also to the compiled run."""
    rows: dict[str, dict[str, Any]] = {}
    for name, runs in measured.items():
        rows[name] = {key: summarize([run[key] for run in runs]) for key in ("added_mb", "cpu_seconds")}
        for key in ("added_mb", "cpu_seconds"):
            rows[name][f"{key}_over_plain"] = ratios(measured, key, BASES.get(name, PLAIN)).get(name)
    return rows


def make_targets(measured: dict[str, list[Measured]], rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    options = [name for name in rows if name.startswith("paceline") and name not in SAVES_NOTHING]
    saved = [rows[name]["added_mb_over_plain"]["median"] for name in options if rows[name]["added_mb_over_plain"]]
    plain = ratios(measured, "added_mb", THEIRS).get(PLAIN)
    checkpointed = ratios(measured, "added_mb", THEIRS_CHECKPOINTED).get(CHECKPOINTED)
    over = "memory of a step over the Hugging Face Trainer's"
    return [
        target("memory of a step with an option over without, the worst option", max(saved, default=None), LIMIT, "x"),
        target(f"{over}, plain", plain and plain["median"], LIMIT, "x"),
        target(f"{over}, gradient checkpointing", checkpointed and checkpointed["median"], LIMIT, "x"),
    ]


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=2)
    arguments = parser.parse_args()
    if arguments.child:
        report_from_child(measure_contender(arguments.child, arguments.quick))
        return
    own_bytes()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # for the children
    if arguments.quick:
        arguments.rounds = 1
    contenders = choose_contenders(NEEDS, arguments.contenders)
    quick = ["--quick"] if arguments.quick else []

    def measure(name: str) -> Measured:
        return run_child(__file__, ["--child", name, *quick], num_threads=1)

    measured = take_turns(contenders, arguments.rounds, measure)
    rows = make_rows(measured)
    settings = {
        "tokens": ROWS * (QUICK_LENGTH if arguments.quick else LENGTH),
        "vocabulary": VOCABULARY,
        "steps": (QUICK_STEPS if arguments.quick else STEPS) - FIRST_STEPS,
        "layers": MODEL["num_hidden_layers"],
        "hidden": MODEL["hidden_size"],
        "parameters": measured[contenders[0]][0]["parameters"],
        "threads": 1,
    }
    content = {"settings": settings, "rows": rows, "measured": measured, "targets": make_targets(measured, rows)}
    write_result(arguments, "memory_options", content)


if __name__ == "__main__":
    main()
