"""Tokens per second, share of the peak (MFU) and memory of a 124 M-parameter GPT-2 in bfloat16, on one GPU.

The model is a plain module of GPT-2's shape (12 blocks, 768 wide, 12 heads, 1,024 tokens, tied embeddings); weights
in float32, products in bfloat16; fused AdamW with two parameter groups, clipping, a linear schedule; a log every 10
steps. Each contender runs in a fresh process, eager and compiled. A trace of some steps says where the time goes.

    python benchmarks/gpt2_124m.py [--rounds 3] [--batch-size 16] [--steps 60] [--contenders loop paceline ...]
    python benchmarks/gpt2_124m.py --smoke      # tiny, on the CPU: shows that it works
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from measure import (
    choose_contenders,
    make_parser,
    ratios,
    report_from_child,
    run_child,
    summarize,
    take_turns,
    write_result,
)

LEARNING_RATE, WEIGHT_DECAY, MAX_NORM, LOG_EVERY = 3e-4, 0.1, 1.0, 10

# dense bfloat16 peak in FLOP/s by a part of the device's name: the makers' data sheets, without sparsity
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}

# what a kernel does, by its name; the first that fits
KINDS = {
    "attention": r"flash|fmha|attention|sdpa",
    "matrix products": r"gemm|nvjet|cutlass|xmma|aten::(mm|addmm|bmm|linear|matmul)|mkldnn",
    "optimizer and clipping": r"adam|multi_tensor|foreach|lpnorm",
    "loss": r"softmax|nll|cross_entropy",
    "copies": r"memcpy|memset|copy_|aten::(_?to|_to_copy|fill|zero)",
    "compiled, fused": r"triton",
    "norms": r"layer_norm|layernorm|gammabeta",
    "elementwise": r"elementwise|aten::(add|mul|gelu|div|sub|tanh)|gelu|vectorized",
    "embeddings": r"embedding|index|gather|scatter",
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT-2."""

    depth: int = 12
    width: int = 768
    heads: int = 12
    length: int = 1024
    vocabulary: int = 50304  # 50,257 rounded up to a multiple of 64


TINY = Shape(depth=2, width=64, heads=2, length=32, vocabulary=512)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))
        return result


class GPT2(nn.Module):
    """Token ids and targets (already shifted), both (batch, length) -> mean cross-entropy and logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def flops_per_token(model: GPT2, shape: Shape) -> float:
    """Forward and backward (Chowdhery et al., 2022, arXiv:2204.02311, appendix B): 6 N + 12 depth x width x length."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    products = num_parameters - model.positions.weight.numel()
    return 6.0 * products + 12.0 * shape.depth * shape.width * shape.length


@dataclass(frozen=True)
class Job:
    """One contender's run."""

    shape: Shape
    device: torch.device
    batch_size: int
    warmup: int
    steps: int
    compiled: bool
    traced: bool

    @property
    def total(self) -> int:
        return self.warmup + self.steps


def make_dataset(job: Job) -> list[dict[str, Tensor]]:
    """Random tokens: enough for every step, none repeated."""
    generator = torch.Generator().manual_seed(1)
    size = (job.total * job.batch_size, job.shape.length + 1)
    text = torch.randint(0, job.shape.vocabulary, size, generator=generator)
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in text]


def make_model(job: Job) -> GPT2:
    torch.manual_seed(0)
    return GPT2(job.shape)


class Watch:
    """Takes time and memory between two steps, and a trace if asked. The device is waited for at these two only."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.start = self.seconds = 0.0
        self.profiler: Any = None
        self.is_cuda = job.device.type == "cuda"

    def note(self, step: int) -> None:
        """Tell that `step` updates are done."""
        if step == self.job.warmup:
            self.begin()
        elif step == self.job.total:
            self.end()

    def begin(self) -> None:
        self.wait()
        if self.job.traced:
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if self.is_cuda else []
            self.profiler = torch.profiler.profile(activities=activities)
            self.profiler.__enter__()
        self.start = time.perf_counter()

    def end(self) -> None:
        self.wait()
        self.seconds = time.perf_counter() - self.start
        if self.profiler is not None:
            self.profiler.__exit__(None, None, None)

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def report(self) -> dict[str, Any]:
        job = self.job
        tokens = job.steps * job.batch_size * job.shape.length
        report: dict[str, Any] = {"tokens_per_second": tokens / self.seconds}
        if self.is_cuda:
            report["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if self.profiler is not None:
            report["trace"] = read_trace(self.profiler, self.seconds, self.is_cuda)
        return report


# ---- the contenders


def by_hand(job: Job, watch: Watch) -> None:
    """The loop that a careful person writes."""
    from torch.optim.lr_scheduler import LambdaLR
    from torch.utils.data import DataLoader

    plain = make_model(job).to(job.device).train()
    decayed = [parameter for parameter in plain.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in plain.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
    schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / job.total))
    model = torch.compile(plain) if job.compiled else plain
    data: Any = make_dataset(job)
    pin_memory = job.device.type == "cuda"
    loader: Any = DataLoader(data, batch_size=job.batch_size, shuffle=True, pin_memory=pin_memory)
    running = torch.zeros((), device=job.device)
    for step, batch in enumerate(loader, start=1):
        batch = {name: value.to(job.device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(job.device.type, dtype=torch.bfloat16):
            loss = model(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        running += loss.detach()
        if step % LOG_EVERY == 0:
            print(step, running.item() / LOG_EVERY, schedule.get_last_lr()[0])
            running.zero_()
        watch.note(step)


def by_trainer(library: Any, job: Job, watch: Watch) -> None:
    """paceline and transformers, by one and the same code."""

    class Note(library.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.note(state.global_step)

    with tempfile.TemporaryDirectory() as folder:
        args = library.TrainingArguments(
            output_dir=folder,
            max_steps=job.total,
            per_device_train_batch_size=job.batch_size,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_NORM,
            lr_scheduler_type="linear",
            optim="adamw_torch_fused",
            bf16=True,
            torch_compile=job.compiled,
            logging_steps=LOG_EVERY,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=job.device.type == "cpu",
        )
        trainer = library.Trainer(model=make_model(job), args=args, train_dataset=make_dataset(job), callbacks=[Note()])
        trainer.train()


def by_paceline(job: Job, watch: Watch) -> None:
    import paceline

    by_trainer(paceline, job, watch)


def by_transformers(job: Job, watch: Watch) -> None:
    import transformers

    by_trainer(transformers, job, watch)


CONTENDERS: dict[str, Callable[[Job, Watch], None]] = {
    "loop": by_hand,
    "paceline": by_paceline,
    "transformers.Trainer": by_transformers,
}
COMPILED = ", compiled"
MODULES = {"loop": "torch", "paceline": "paceline", "transformers.Trainer": "transformers"}
NEEDS = {name + how: module for how in ("", COMPILED) for name, module in MODULES.items()}


# ---- the trace


def read_trace(profiler: Any, seconds: float, is_cuda: bool) -> dict[str, Any]:
    """Returns the time by kind and by kernel, as fractions of the wall time of the traced steps.

    On a GPU these are its kernels, and what is left to 1 is the time it stood idle; on a CPU, the operators themselves.
    """
    times: dict[str, float] = {}
    for event in profiler.key_averages():
        on_device = event.device_type.name != "CPU"
        if on_device != is_cuda:
            continue
        microseconds = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        times[event.key] = times.get(event.key, 0.0) + microseconds / 1e6
    kinds: dict[str, float] = {}
    for name, spent in times.items():
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + spent
    top = sorted(times.items(), key=lambda item: -item[1])[:10]
    return {
        "wall_seconds": seconds,
        "busy": sum(times.values()) / seconds,
        "by_kind": {kind: spent / seconds for kind, spent in sorted(kinds.items(), key=lambda item: -item[1])},
        "top": [{"name": name[:120], "share": spent / seconds} for name, spent in top if spent > 0],
    }


# ---- in a child, and around it


def run_contender(arguments: argparse.Namespace) -> dict[str, Any]:
    name = arguments.child
    job = make_job(arguments, compiled=name.endswith(COMPILED))
    watch = Watch(job)
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        CONTENDERS[name.removesuffix(COMPILED)](job, watch)
    report = watch.report()
    peak = peak_flops(arguments)
    if peak is not None:
        report["mfu"] = report["tokens_per_second"] * flops_per_token(make_model(job), job.shape) / peak
    return report


def make_job(arguments: argparse.Namespace, compiled: bool) -> Job:
    if arguments.smoke:
        return Job(TINY, torch.device("cpu"), 2, 1, 3, compiled, arguments.traced)
    steps = 5 if arguments.traced else arguments.steps
    device = torch.device("cuda")
    return Job(Shape(), device, arguments.batch_size, arguments.warmup, steps, compiled, arguments.traced)


def peak_flops(arguments: argparse.Namespace) -> float | None:
    """The device's peak in FLOP/s: given, or looked up by its name."""
    if arguments.peak_tflops is not None:
        return float(arguments.peak_tflops) * 1e12
    if arguments.smoke:
        return None
    name = torch.cuda.get_device_name(0)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", rounds=3)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=20, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=60, help="steps that are timed")
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16 peak of the device, for MFU")
    parser.add_argument("--traced", action="store_true", help="(in a child) with a trace, not timed")
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a GPU that torch can use; --smoke shows on the CPU that it works.")
    if arguments.quick or arguments.smoke:
        arguments.rounds, arguments.steps, arguments.quick = 1, 20, True
    return arguments


def child_options(arguments: argparse.Namespace) -> list[str]:
    options = ["--batch-size", str(arguments.batch_size), "--warmup", str(arguments.warmup)]
    options += ["--steps", str(arguments.steps)]
    if arguments.peak_tflops is not None:
        options += ["--peak-tflops", str(arguments.peak_tflops)]
    return [*options, "--smoke"] if arguments.smoke else options


def main() -> None:
    arguments = parse()
    if arguments.child:
        report_from_child(run_contender(arguments))
        return
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # transformers would spread a batch over all of them
    contenders = choose_contenders(NEEDS, arguments.contenders)
    options = child_options(arguments)
    threads = 1 if arguments.smoke else None

    def run(name: str, *more: str) -> dict[str, Any]:
        return run_child(__file__, ["--child", name, *more, *options], num_threads=threads)

    if arguments.smoke:  # one run for both: the numbers mean nothing
        measured = take_turns(contenders, 1, lambda name: run(name, "--traced"))
        traces = {name: rows[0].pop("trace") for name, rows in measured.items()}
    else:
        measured = take_turns(contenders, arguments.rounds, run)
        traces = {name: run(name, "--traced")["trace"] for name in contenders}
    over_loop = ratios(measured, "tokens_per_second", "loop")
    over_compiled = ratios(measured, "tokens_per_second", "loop" + COMPILED)
    rows: dict[str, Any] = {}
    for name, values in measured.items():
        own = over_compiled if name.endswith(COMPILED) else over_loop
        rows[name] = {"speed_over_loop": own.get(name), "trace": traces[name]}
        for key in ("tokens_per_second", "mfu", "peak_memory_gib"):
            rows[name][key] = summarize([row[key] for row in values]) if key in values[0] else None
    job = make_job(arguments, compiled=False)
    write_result(
        arguments,
        "gpt2_124m",
        {
            "settings": {
                "smoke": arguments.smoke,
                "parameters": sum(parameter.numel() for parameter in GPT2(job.shape).parameters()),
                "batch_size": job.batch_size,
                "sequence_length": job.shape.length,
                "steps": job.steps,
            },
            "rows": rows,
            "measured": measured,
            "targets": [],
        },
    )


if __name__ == "__main__":
    main()
