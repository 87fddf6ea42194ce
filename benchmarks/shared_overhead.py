"""Overhead of the Trainer with several processes: CPU time of a step beside a loop that calls the engine itself.

For each engine there is a loop written by hand around it (`DistributedDataParallel`, `fully_shard`,
`deepspeed.initialize` with ZeRO 2), and the Trainer with the option that asks for it: the same model, the same batches,
clipping, a linear schedule, fused AdamW with two groups, float32, gloo. Each loop takes what the engine's documentation
shows, and its defaults: a DistributedSampler, no look for unused parameters, no counting of targets, no agreement
between the processes beside their gradients. DeepSpeed clips by itself; it is left out where it is not installed, and
needs ninja and a C++ compiler on a CPU.

One group of processes makes all pairs of an engine. In each round every contender trains a fresh model; CPU time of
all threads is read where forward passes begin, so that start and end are left out, and added up over the processes.
The step of a long run is measured after step 130. Before it the Trainer makes extra forward passes at steps 1, 2, 4, 8
... and at up to ten others, which find out how a module of one's own reduces its loss; the mean step of the first 130
is a figure of its own. The loop runs twice a round: what the second one takes over the first tells how far the machine
can be trusted.

    python benchmarks/shared_overhead.py [--quick] [--rounds 5] [--contenders ddp fsdp deepspeed]
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

from measure import (
    CHILD_MINUTES,
    Failed,
    choose_contenders,
    make_parser,
    ratios,
    report_from_child,
    run_child,
    summarize,
    target,
    write_result,
)

SIZE = 2
STEPS, QUICK_STEPS = (4, 130, 150), (1, 2, 5)  # forward passes that are the marks: of the first steps, of a later step
WIDTH, HEADS, LAYERS, VOCABULARY, TOKENS, BATCH_SIZE = 192, 4, 4, 512, 96, 4
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM, LOG_EVERY = 1e-3, 0.01, 1.0, 10
LIMIT, LEAST_STEP_MS = 1.05, 50.0
LOOP, AGAIN, OURS = "loop", "loop again", "paceline"

Step = Callable[[dict[str, Any]], Any]  # a batch -> its loss, after one update
# engine -> the module that it needs
NEEDS = {"ddp": "torch", "fsdp": "torch", "deepspeed": "deepspeed"}
NAMES = {"ddp": "DDP", "fsdp": "FSDP", "deepspeed": "DeepSpeed (ZeRO 2)"}
ZERO: dict[str, Any] = {"zero_optimization": {"stage": 2}}
OPTIONS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"fsdp": True}, "deepspeed": {"deepspeed": ZERO}}


def make_model(marks: list[float]) -> Any:
    """A small language model that notes the CPU time at which each of its forward passes begins."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, _ = x.shape
            parts = self.mix(self.before(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
            result: torch.Tensor = x + self.wide(self.between(x))
            return result

    class LanguageModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            marks.append(time.process_time())
            x = self.embedding(input_ids)
            for layer in self.layers:
                x = layer(x)
            logits = self.head(x)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return {"loss": loss, "logits": logits}

    torch.manual_seed(0)
    return LanguageModel()


def make_dataset(num_samples: int) -> list[dict[str, Any]]:
    """Token ids, of which the first ones of a sample are no targets: a different number in each."""
    import torch

    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(num_samples):
        ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(0, TOKENS // 2, (1,), generator=generator))] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def make_optimizer(model: Any) -> Any:
    import torch

    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)


# ---- the loops by hand: each makes of a model what runs one update


def plain_step(model: Any, optimizer: Any) -> Step:
    """The five lines that everybody writes."""
    from torch.nn.utils import clip_grad_norm_

    parameters = list(model.parameters())

    def step(batch: dict[str, Any]) -> Any:
        loss = model(**batch)["loss"]
        loss.backward()
        clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def with_ddp(model: Any) -> tuple[Step, Any]:
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model)
    optimizer = make_optimizer(wrapped)
    return plain_step(wrapped, optimizer), optimizer


def with_fsdp(model: Any) -> tuple[Step, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (SIZE,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model)
    return plain_step(model, optimizer), optimizer


def with_deepspeed(model: Any) -> tuple[Step, Any]:
    """The loop of DeepSpeed's documentation, with torch's optimizer as in the others."""
    import deepspeed

    config = {
        **ZERO,
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": MAX_NORM,
        "zero_allow_untested_optimizer": True,  # fused=True makes it one that DeepSpeed does not know
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = make_optimizer(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(batch: dict[str, Any]) -> Any:
        loss = engine(**batch)["loss"]
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, optimizer


LOOPS: dict[str, Callable[[Any], tuple[Step, Any]]] = {
    "ddp": with_ddp, "fsdp": with_fsdp, "deepspeed": with_deepspeed,
}  # fmt: skip


def train_by_hand(engine: str, dataset: Any, num_steps: int, marks: list[float]) -> None:
    """The loop of a careful person."""
    import torch
    from torch.optim.lr_scheduler import LambdaLR
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    step, optimizer = LOOPS[engine](make_model(marks))
    schedule = LambdaLR(optimizer, lambda number: max(0.0, 1 - number / num_steps))
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=DistributedSampler(dataset, seed=42))
    running = torch.zeros(())
    for number, batch in enumerate(loader, start=1):
        running += step(batch)
        schedule.step()
        if number % LOG_EVERY == 0:
            print(number, running.item() / LOG_EVERY, schedule.get_last_lr()[0])
            running.zero_()
        if number == num_steps:
            break


def train_by_paceline(engine: str, dataset: Any, num_steps: int, marks: list[float]) -> None:
    from paceline import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=num_steps,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_NORM,
            lr_scheduler_type="linear",
            optim="adamw_torch_fused",
            logging_steps=LOG_EVERY,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            **OPTIONS[engine],
        )
        Trainer(model=make_model(marks), args=args, train_dataset=dataset).train()


CONTENDERS = {LOOP: train_by_hand, OURS: train_by_paceline, AGAIN: train_by_hand}


# ---- in a child: one engine, all its rounds


def measure_here(engine: str, rounds: int, steps: tuple[int, int, int]) -> dict[str, list[dict[str, float]]]:
    """CPU milliseconds a step of this process, by contender and round."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    start, first, last = steps
    dataset = make_dataset(BATCH_SIZE * SIZE * (last + 1))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for number in range(-1, rounds):  # one round more, for what happens once per process
        names = list(CONTENDERS) if number % 2 else list(reversed(CONTENDERS))
        for name in names:
            marks: list[float] = []
            with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                CONTENDERS[name](engine, dataset, last + 1, marks)
            assert len(marks) == last + 1
            if number >= 0:
                row = {"cpu_ms": (first, last), "early_cpu_ms": (start, first)}
                found[name].append({key: 1e3 * (marks[b] - marks[a]) / (b - a) for key, (a, b) in row.items()})
    gc.collect()  # engines that nothing refers to any more: they hold the group, whose threads must not outlive it
    distributed.destroy_process_group()
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def measure_group(engine: str, rounds: int, quick: bool) -> dict[str, Any]:
    """Start the processes of one engine and add up what they took."""
    port = str(free_port())
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(SIZE), "DS_ACCELERATOR": "cpu"}
    shared["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"  # ninja, for DeepSpeed
    words = ["--child", engine, "--member", "--rounds", str(rounds), *(["--quick"] if quick else [])]
    with tempfile.TemporaryDirectory() as folder:
        members = []
        for rank in range(SIZE):
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with open(os.path.join(folder, f"{rank}.txt"), "w", encoding="utf-8") as output:
                command = [sys.executable, __file__, *words]
                members.append(subprocess.Popen(command, env=environment, stdout=output))
        try:
            codes = [member.wait(timeout=60 * CHILD_MINUTES) for member in members]
        finally:
            for member in members:
                member.kill()
        if any(codes):
            raise Failed(f"{engine}: the processes ended with {codes}")
        reports = []
        for rank in range(SIZE):
            with open(os.path.join(folder, f"{rank}.txt"), encoding="utf-8") as output:
                reports.append(json.loads(output.read().splitlines()[-1]))
    return {
        name: [{key: sum(row[key] for row in rows) for key in rows[0]} for rows in zip(*each, strict=True)]
        for name, each in ((name, [report[name] for report in reports]) for name in CONTENDERS)
    }


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=5)
    parser.add_argument("--member", action="store_true", help="(in a process of a group) measure here")
    arguments = parser.parse_args()
    steps = QUICK_STEPS if arguments.quick else STEPS
    if arguments.child and arguments.member:
        report_from_child(measure_here(arguments.child, arguments.rounds, steps))
        return
    if arguments.child:
        report_from_child(measure_group(arguments.child, arguments.rounds, arguments.quick))
        return
    if arguments.quick:
        arguments.rounds = 1
    engines = choose_contenders(NEEDS, arguments.contenders)
    rows: dict[str, Any] = {}
    targets, all_measured = [], {}
    for engine in engines:
        words = ["--child", engine, "--rounds", str(arguments.rounds), *(["--quick"] if arguments.quick else [])]
        measured = run_child(__file__, words, num_threads=1)
        over_loop = ratios(measured, "cpu_ms", LOOP)
        rows[engine] = {
            "loop_cpu_ms": summarize([row["cpu_ms"] for row in measured[LOOP]]),
            "paceline_cpu_ms": summarize([row["cpu_ms"] for row in measured[OURS]]),
            "over_loop": over_loop[OURS],
            "early_over_loop": ratios(measured, "early_cpu_ms", LOOP)[OURS],
            "loop_over_loop": over_loop[AGAIN],
        }
        all_measured[engine] = measured
        name = f"CPU time of a step of {SIZE} processes, paceline over the loop around {NAMES[engine]}"
        targets.append(target(name, over_loop[OURS]["median"], LIMIT, "x"))
        least = rows[engine]["loop_cpu_ms"]["median"] / SIZE
        if least < LEAST_STEP_MS and not arguments.quick:
            print(f"{engine}: a step takes {least:.0f} ms, which is less than {LEAST_STEP_MS:.0f}", file=sys.stderr)
    settings = {
        "processes": SIZE, "steps": steps, "batch_size": BATCH_SIZE, "tokens": TOKENS, "threads": 1, "layers": LAYERS,
        "width": WIDTH,
    }  # fmt: skip
    write_result(
        arguments, "shared_overhead", {"settings": settings, "rows": rows, "measured": all_measured, "targets": targets}
    )


if __name__ == "__main__":
    main()
