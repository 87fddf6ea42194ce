"""1,024 processes without 1,024 processes: the plan, every sampler's share, and one step of some of them, simulated."""

from __future__ import annotations

from typing import Any

import pytest

import scale_page
from paceline import TrainingArguments
from paceline.args.mesh import resolve_mesh
from paceline.args.plan import resolve
from paceline.pytorch.data.data_shard import DataShard
from scale_page import BYTES, Cost, Shape, run_simulations

SIZE = 1024
PARALLEL = "dp_replicate=16,dp_shard=8,tp=8"
SHAPE: dict[str, Any] = {"width": 256, "hidden": 512, "vocabulary": 1024, "head_size": 16, "sequence": 64}


def arguments(**options: Any) -> TrainingArguments:
    return TrainingArguments("simulated", use_cpu=True, parallel=PARALLEL, **options)


def test_the_plan_of_1024_processes() -> None:
    args = arguments(per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=10)
    plan = resolve(args, world_size=SIZE, micro_batches_per_epoch=100, samples_per_epoch=100 * 4 * 128)
    mesh = resolve_mesh(args, SIZE)
    assert (mesh.dp_replicate, mesh.dp_shard, mesh.tp, mesh.data_size) == (16, 8, 8, 128)
    assert "1,024 per step" in plan.describe()  # 4 x 2 x 128: processes of one tp group read the same
    assert mesh.describe() in plan.describe()


@pytest.mark.parametrize("num_samples", [1_000_003, 511, 128, 5])
def test_every_sample_is_in_the_share_of_one_group(num_samples: int) -> None:
    mesh = resolve_mesh(arguments(), SIZE)
    coordinates = [mesh.data_coordinates(rank) for rank in range(SIZE)]
    assert all(coordinates[rank] == coordinates[rank - rank % mesh.tp] for rank in range(SIZE))
    assert sorted({part for part, _ in coordinates}) == list(range(128))
    speakers = [rank for rank in range(SIZE) if mesh.is_data_leader(rank)]
    shares = [DataShard.even(*coordinates[rank], batch_size=4) for rank in speakers]
    start, read = 0, 0
    while start < num_samples:
        length = min(shares[0].left_in_slot(start), num_samples - start)
        bounds = [share.bounds(length) for share in shares]
        assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
        assert bounds[-1][1] == length
        assert max(end - begin for begin, end in bounds) <= 4
        start, read = start + length, read + sum(end - begin for begin, end in bounds)
    assert read == num_samples


@pytest.fixture(scope="module")
def found() -> list[Cost]:
    """Of one, two and four layers, and of the last process with one layer."""
    cases = [(1, 0), (2, 0), (4, 0), (1, SIZE - 1)]
    return run_simulations(
        [
            {"parallel": PARALLEL, "world_size": SIZE, "shape": Shape(layers=layers, **SHAPE), "rank": rank}
            for layers, rank in cases
        ]
    )


@pytest.fixture(scope="module")
def costs(found: list[Cost]) -> dict[int, Cost]:
    return dict(zip((1, 2, 4), found, strict=False))


@pytest.mark.slow
@pytest.mark.nightly
def test_shards_and_memory_of_a_process_are_as_computed(costs: dict[int, Cost]) -> None:
    for layers, cost in costs.items():
        shape = Shape(layers=layers, **SHAPE)
        assert cost.all_parameters == shape.num_cut + shape.num_whole
        assert cost.parameters == shape.num_cut // 64 + shape.num_whole // 8
        assert cost.weights == cost.gradients == cost.parameters * BYTES
        assert cost.states == 2 * cost.weights
        assert scale_page.memory_of(shape, shards=8, tp=8) == cost.weights + cost.gradients + cost.states


@pytest.mark.slow
def test_collectives_of_a_step_are_as_computed(costs: dict[int, Cost]) -> None:
    for layers, cost in costs.items():
        units, cut = layers + 1, cost.parameters * BYTES  # a unit for each layer, and one for what is left
        activation = SHAPE["sequence"] * SHAPE["width"] * BYTES
        calls = {name: row[0] for name, row in cost.collectives.items() if row[1] > 1000}  # less those of the norm
        assert calls == {
            "all_gather across 8": 2 * units,  # before the forward and the backward pass of each unit
            "reduce_scatter across 8": units,
            "all_reduce across 16": units,
            "all_reduce inside 8": pytest.approx(7 * layers + 2, abs=1),  # with embedding and head, perhaps the norm
            "all_gather inside 8": 1,  # the logits
        }
        moved = {name: row[1] for name, row in cost.collectives.items()}
        assert moved["all_gather across 8"] == 2 * 8 * cut
        assert moved["reduce_scatter across 8"] == 8 * cut
        assert moved["all_reduce across 16"] == cut
        assert moved["all_gather inside 8"] == SHAPE["sequence"] * SHAPE["vocabulary"] * BYTES
        norms = moved["all_reduce inside 8"] - (7 * layers + 2) * activation
        assert 0 <= norms < 1000


@pytest.mark.slow
def test_every_process_does_the_same(found: list[Cost]) -> None:
    assert found[-1] == found[0]


@pytest.mark.slow
def test_costs_grow_with_the_layers_alone(costs: dict[int, Cost]) -> None:
    grown = scale_page.extrapolate(costs[1], costs[2], 4)
    assert (grown.parameters, grown.weights, grown.states) == (
        costs[4].parameters,
        costs[4].weights,
        costs[4].states,
    )
    for name, (calls, moved) in costs[4].collectives.items():
        if moved > 1000:  # the norm's are a few numbers for each tensor of the first layers
            assert grown.collectives[name] == pytest.approx([calls, moved], rel=1e-4)
