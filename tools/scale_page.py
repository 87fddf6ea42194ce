"""Write docs/scale.md: what a step costs on many processes, by simulating one of them.

    python tools/scale_page.py            # a few minutes
    python tools/scale_page.py --simulate '[{"parallel": "dp_shard=64,tp=8", "world_size": 512}]'

A simulated process is real but for two things: torch's `fake` process group, which answers for all others, and
FakeTensor, whose tensors have shapes and no content. The strategy, torch's `fully_shard` and DTensor, the optimizer and
clipping are the ones that train; what they ask of the group is counted, and so are the bytes of their shards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.args.mesh import engine_of, resolve_mesh
from paceline.args.training import TrainingArguments
from paceline.pytorch.distributed.device_mesh import build_device_mesh
from paceline.pytorch.distributed.fsdp import FullyShardedData
from paceline.pytorch.distributed.mesh import MeshParallel
from paceline.pytorch.distributed.precision import make_precision
from paceline.pytorch.distributed.world import World

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scale.md"
BYTES = 4  # of a number in full precision
MACHINE = 8  # processes on one
# operations of the group that move data, by what they do; waiting for one is none
KINDS = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a causal language model.

    Attributes:
        width, layers, hidden, vocabulary: as usual; head_size: numbers of one attention head.
        sequence: tokens of a sequence, of which a process reads one.
    """

    width: int = 4096
    layers: int = 32
    hidden: int = 14336
    vocabulary: int = 32000
    head_size: int = 128
    sequence: int = 4096

    @property
    def num_cut(self) -> int:
        """Parameters that tensor parallel cuts."""
        return self.layers * (4 * self.width**2 + 3 * self.width * self.hidden) + 2 * self.vocabulary * self.width

    @property
    def num_whole(self) -> int:
        """Parameters that it leaves whole: the norms."""
        return (2 * self.layers + 1) * self.width


class Block(nn.Module):
    """Attention and a gated network, each around a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.head_size = shape.width, shape.head_size
        self.before_attention, self.before_network = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before_attention(x)
        batch, length = normed.shape[:2]
        query, key, value = (
            each(normed).view(batch, length, -1, self.head_size).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(batch, length, -1))
        normed = self.before_network(x)
        result: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return result


class LanguageModel(nn.Module):
    """The model that is simulated; its plan cuts all but the norms."""

    tp_plan = {
        "embedding": "embedding_rowwise",
        **{f"layers.*.{name}": "colwise" for name in ("query", "key", "value", "gate", "up")},
        **{f"layers.*.{name}": "rowwise" for name in ("out", "down")},
        "head": "colwise_gather_output",
    }

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@dataclass
class Cost:
    """The work and memory of one process in one step.

    Attributes:
        parameters: numbers of its shards; all_parameters: of the whole model.
        weights, gradients, states: bytes of its shards, of their gradients, of the optimizer's two moments.
        collectives: "kind inside|across size" -> [calls, bytes of the whole messages of all calls]: in a group of that
            size, inside a machine or across machines.
    """

    parameters: int = 0
    all_parameters: int = 0
    weights: int = 0
    gradients: int = 0
    states: int = 0
    collectives: dict[str, list[int]] = field(default_factory=dict)


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is asked of the process group."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first, whose own operations are then seen here
        result = func(*args, **(kwargs or {}))
        kind = KINDS.get(func._schema.name.partition("::")[2]) if "c10d" in func.namespace else None
        if kind is not None:
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
            ranks = ranks_of(args)
            where = "inside" if max(ranks) // MACHINE == min(ranks) // MACHINE else "across"
            row = self.collectives.setdefault(f"{kind} {where} {len(ranks)}", [0, 0])
            row[0] += 1
            row[1] += max(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def ranks_of(args: Any) -> list[int]:
    """The processes that take part in a collective."""
    groups = [each for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())]
    group = distributed.ProcessGroup.unbox(groups[0]) if groups else _resolve_process_group(args[-1])
    return list(distributed.get_process_group_ranks(group))


@contextmanager
def real_meshes() -> Iterator[None]:
    """Let meshes be made of real tensors: FakeTensor refuses to read the ranks in theirs."""

    def outside(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in ("__init__", "__getitem__", "_flatten", "size", "get_group"):
            stack.enter_context(mock.patch.object(DeviceMesh, name, outside(getattr(DeviceMesh, name))))
        joined = staticmethod(outside(DeviceMesh._concatenate))
        stack.enter_context(mock.patch.object(DeviceMesh, "_concatenate", joined))
        ranks: Any = DeviceMesh.mesh
        stack.enter_context(mock.patch.object(DeviceMesh, "mesh", property(outside(ranks.fget))))
        yield


def simulate(parallel: str, world_size: int, shape: Shape, rank: int = 0) -> Cost:
    """One process of `world_size`: sharding, one forward and backward pass, clipping, one step of AdamW.

    Connects this process to a group that is none, so it is called in a process made for that.

    Args:
        parallel: as the option takes it.
        shape: of the model.
        rank: of the process.
    """
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    args = TrainingArguments("simulated", use_cpu=True, parallel=parallel)
    world = World(torch.device("cpu"), world_size, rank, rank % MACHINE)
    precision = make_precision("full", world.device)
    mesh = resolve_mesh(args, world_size, MACHINE)
    kind = {"fsdp": FullyShardedData, "mesh": MeshParallel}[engine_of(mesh, args)]
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(MACHINE)):
        strategy = kind(world, precision, args)
    device_mesh = build_device_mesh(mesh, "cpu")
    counter = Counter()
    with FakeTensorMode(), real_meshes():
        model = LanguageModel(shape)
        strategy._shard(model, device_mesh)
        prepared = strategy.prepare(model, lambda model: torch.optim.AdamW(model.parameters(), foreach=True))
        tokens = torch.zeros(1, shape.sequence, dtype=torch.int64)
        with counter:
            strategy.backward(prepared.model(tokens))
            strategy.clip(1.0)
            strategy.step()
        return measure(model, prepared.optimizer, counter)


def measure(model: nn.Module, optimizer: Any, counter: Counter) -> Cost:
    """Returns the cost of a step, in plain numbers."""
    cost = Cost(collectives=counter.collectives)
    for parameter in model.parameters():
        cost.parameters += local(parameter).numel()
        cost.all_parameters += parameter.numel()
        cost.weights += num_bytes(parameter)
        cost.gradients += num_bytes(parameter.grad)
        cost.states += sum(num_bytes(value) for name, value in optimizer.state[parameter].items() if name != "step")
    return cost


def local(tensor: Tensor) -> Tensor:
    """The shard of a tensor that is here."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def num_bytes(tensor: Tensor | None) -> int:
    """Bytes of the shard that is here."""
    return 0 if tensor is None else local(tensor).numel() * tensor.element_size()


def run_simulations(jobs: list[dict[str, Any]]) -> list[Cost]:
    """`simulate` for each set of its arguments, each in a process of its own: torch keeps the names of groups."""

    def run(job: dict[str, Any]) -> Cost:
        plain = json.dumps([{**job, "shape": asdict(job["shape"])}])
        words = [sys.executable, __file__, "--simulate", plain]
        done = subprocess.run(words, capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        return Cost(**json.loads(done.stdout.splitlines()[-1]))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, jobs))


def extrapolate(one: Cost, two: Cost, layers: int) -> Cost:
    """Returns the cost of `layers` layers, extrapolated from one and two: every count is linear in the layers."""

    def grow(first: int, second: int) -> int:
        return first + (layers - 1) * (second - first)

    names = ("parameters", "all_parameters", "weights", "gradients", "states")
    numbers = {name: grow(getattr(one, name), getattr(two, name)) for name in names}
    rows = {
        name: [grow(*pair) for pair in zip(one.collectives[name], row, strict=True)]
        for name, row in two.collectives.items()
    }
    return Cost(**numbers, collectives=rows)


def memory_of(shape: Shape, shards: int, tp: int) -> int:
    """Bytes of weights, gradients and two moments on one process, where every matrix can be cut evenly."""
    return 4 * BYTES * (shape.num_cut // (shards * tp) + shape.num_whole // shards)


# ---- the page

# bytes a second for each process, and seconds until the first byte of a collective
INSIDE, ACROSS, LATENCY = 450e9, 50e9, 20e-6
FLOPS = 400e12  # a second for each process, of the 989e12 that an H100 has in bfloat16
STRATEGIES = {
    "shards over all": "dp_shard={all}",
    "shards on each machine, replicas": "dp_replicate={machines},dp_shard=8",
    "shards, replicas and tensor parallel on each machine": "dp_replicate={groups},dp_shard=8,tp=8",
}
SIZES = (64, 256, 1024)


def parallel_of(pattern: str, world_size: int) -> str:
    """The value of `parallel`."""
    return pattern.format(all=world_size, machines=world_size // 8, groups=world_size // 64)


def seconds_of(name: str, calls: int, moved: int) -> float:
    """Ring collectives, one after the other, none hidden behind computing."""
    kind, where, size = name.split()
    share = (int(size) - 1) / int(size) * (2 if kind == "all_reduce" else 1)
    return calls * LATENCY * int(size).bit_length() + share * moved / (INSIDE if where == "inside" else ACROSS)


def write_page() -> None:
    """Simulate what the page shows, and write it."""
    shape = Shape()
    total = shape.num_cut + shape.num_whole
    cases = [(title, size) for title in STRATEGIES for size in SIZES]
    found = run_simulations(
        [
            {"parallel": parallel_of(STRATEGIES[title], n), "world_size": n, "shape": replace(shape, layers=layers)}
            for title, n in cases
            for layers in (1, 2)
        ]
    )
    costs = {
        case: extrapolate(one, two, shape.layers) for case, one, two in zip(cases, found[::2], found[1::2], strict=True)
    }
    rows = [
        f"| {title} | {name} | {calls:,} | {moved / 1e9:,.2f} |"
        for title in STRATEGIES
        for name, (calls, moved) in sorted(costs[title, SIZES[-1]].collectives.items())
    ]
    times = []
    for title in STRATEGIES:
        cells = []
        for size in SIZES:
            cost = costs[title, size]
            cells.append(f"{sum(seconds_of(name, *row) for name, row in cost.collectives.items()):.2f}")
        computing = 6 * total * shape.sequence / (8 if "tensor" in title else 1) / FLOPS
        times.append(f"| {title} | {' | '.join(cells)} | {computing:.2f} |")
    memory = [
        f"| {title} | {' | '.join(f'{held(costs[title, size]) / 1e9:,.2f}' for size in SIZES)} |"
        for title in STRATEGIES
    ]
    PAGE.write_text(PAGE_TEXT.format(
        billions=f"{total / 1e9:.2f}",
        layers=shape.layers,
        width=shape.width,
        sequence=f"{shape.sequence:,}",
        collectives="\n".join(rows),
        times="\n".join(times),
        memory="\n".join(memory),
        gradients=f"{total * BYTES / 1e9:,.0f}",
        whole=f"{4 * BYTES * total / 1e9:,.0f}",
        ddp=f"{seconds_of('all_reduce across 1024', -(-total * BYTES // (25 << 20)), total * BYTES):.2f}",
        heads=" | ".join(f"{size:,}" for size in SIZES),
        lines="|".join("---" for _ in SIZES),
    ), encoding="utf-8")  # fmt: skip


def held(cost: Cost) -> int:
    """Bytes that stay from step to step, and gradients."""
    return cost.weights + cost.gradients + cost.states


PAGE_TEXT = """# At scale: what a step costs

This page is simulated, not measured; `python tools/scale_page.py` writes it. One process of a run takes an optimizer
step with torch's `fake` process group and FakeTensor. The strategy, `fully_shard`, DTensor, clipping and AdamW are
those of real training, and the collectives that they request are counted.
[A test](../tests/pytorch/distributed/test_scale.py) does this for a small model on 1,024 processes and compares
shards, memory and collectives with formulas; it also compares the samples assigned to each process.

The model: {billions} billion parameters ({layers} layers of width {width}), full precision, one sequence of {sequence}
tokens per process (per eight processes with tensor parallel), eight processes per machine. It is simulated with one
layer and with two, and the difference is extrapolated to all layers; the test compares this with four layers.

## Collectives of one step, on 1,024 processes

Bytes are those of the whole message: the output of an `all_gather`, the input of a `reduce_scatter`. `inside 8` is a
group of eight processes on one machine, `across 8` one on several machines.

| strategy | collective | calls | GB |
|---|---|---|---|
{collectives}

With a replica on every process (`parallel="ddp"`), {gradients} GB of gradients are all-reduced in buckets of 25 MB.

## Seconds of communication in a step

Assumes ring collectives, 450 GB/s per process within a machine and 50 GB/s across machines, and a latency of 20
microseconds per call and doubling of the group. No communication overlaps with computation, so this is an upper bound:
`fully_shard` gathers a layer while the previous one computes. The last column is the computation at 400 TFLOP/s.

| strategy | {heads} processes | computation |
|---|{lines}|---|
{times}

With a replica on every process: {ddp} on 1,024. With `bf16=True` activations take half the bytes;
weights and gradients are stored and communicated in float32.

## Memory of a process, in GB

Weights, gradients and the two moments of AdamW, as counted with FakeTensor, without activations. On one process it
would be {whole} GB.

| strategy | {heads} processes |
|---|{lines}|
{memory}

## What is not simulated

- Device meshes: FakeTensor has no values, and torch's DeviceMesh reads the ranks in its tensor, so meshes are made of
  real tensors (`real_meshes` in the tool). No operation of the step is left out.
- DistributedDataParallel, whose buckets are C++ over real memory: its figures are computed.
- The memory of activations, and of the buffers that a layer is gathered into.
- Loading, evaluation and checkpoints; contention in the network; stragglers.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--simulate")
    words = parser.parse_args()
    if words.simulate is not None:
        for job in json.loads(words.simulate):
            print(json.dumps(asdict(simulate(**{**job, "shape": Shape(**job.get("shape", {}))}))), flush=True)
    else:
        write_page()


if __name__ == "__main__":
    main()
