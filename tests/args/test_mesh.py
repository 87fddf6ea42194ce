"""Sizes of the mesh: how they are said, what they come to, and which processes read the same data."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import TrainingArguments
from paceline.args.mesh import Mesh, resolve_mesh
from paceline.args.plan import resolve

meshes = st.builds(Mesh, *[st.integers(1, 3)] * 5)


def options(**values: Any) -> TrainingArguments:
    return TrainingArguments("x", **values)


SAID: list[tuple[dict[str, Any], int, Mesh]] = [
    ({}, 4, Mesh(dp_replicate=4)),
    ({"parallel": "fsdp"}, 4, Mesh(dp_shard=4)),
    ({"fsdp": "hybrid_shard", "fsdp_config": {"replicate": 2}}, 8, Mesh(dp_replicate=2, dp_shard=4)),
    ({"parallel": {"dp_shard": 2, "tp": 2}}, 4, Mesh(dp_shard=2, tp=2)),
    ({"parallel": "dp_shard=2,tp=2"}, 4, Mesh(dp_shard=2, tp=2)),
    ({"parallel": '{"dp_replicate": 2, "cp": "2"}'}, 4, Mesh(dp_replicate=2, cp=2)),
    ({"parallel": "dp_shard=-1 tp=2"}, 8, Mesh(dp_shard=4, tp=2)),
    ({"parallelism_config": {"dp_shard_size": 2, "tp_size": 2}}, 4, Mesh(dp_shard=2, tp=2)),
    ({"parallelism_config": {"dp_replicate_size": 2, "sp_size": 2}}, 4, Mesh(dp_replicate=2, sp=2)),
    ({"parallel": "dp_shard=2,sp=2"}, 4, Mesh(dp_shard=2, sp=2)),
    ({"parallelism_config": '{"dp_replicate_size": 1}'}, 4, Mesh(dp_replicate=4)),
    ({"parallel": {"dp_shard": 2, "cp": 2}, "fsdp_config": {"min_num_params": 5}}, 4, Mesh(dp_shard=2, cp=2)),
]


@pytest.mark.parametrize(("said", "world_size", "mesh"), SAID)
def test_what_is_said_and_what_it_comes_to(said: dict[str, Any], world_size: int, mesh: Mesh) -> None:
    args = options(**said)
    assert resolve_mesh(args, world_size) == mesh
    again = TrainingArguments.from_dict(args.to_dict()) if hasattr(args, "from_dict") else options(**said)
    assert resolve_mesh(again, world_size) == mesh


def test_accelerates_object_is_read() -> None:
    kind = pytest.importorskip("accelerate.parallelism_config").ParallelismConfig
    args = options(parallelism_config=kind(dp_replicate_size=2, dp_shard_size=2, tp_size=2))
    assert resolve_mesh(args, 8) == Mesh(dp_replicate=2, dp_shard=2, tp=2)
    assert args.to_dict()["parallelism_config"]["tp_size"] == 2


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"parallel": {"tp": 3}}, "is a mesh of 3 processes, and there are 4"),
    ({"parallel": {"tp": 3, "dp_shard": -1}}, "4 processes cannot be divided by 3"),
    ({"parallel": {"tp": -1, "dp_shard": -1}}, "both -1"),
    ({"parallel": {"tpp": 2}}, "'tpp' is no axis of the mesh.* did you mean 'tp'"),
    ({"parallel": {"tp": 0}}, "whole number of at least 1"),
    ({"parallel": {"tp": 1.5}}, "whole number of at least 1"),
    ({"parallel": "tensor"}, "expected one of ddp"),
    ({"parallel": {"tp": 2}, "parallelism_config": {"tp_size": 2}}, "both set the parallelism"),
    ({"parallel": "ddp", "parallelism_config": {"tp_size": 2}}, "both set the parallelism"),
    ({"parallel": {"cp": 2, "sp": 2}}, "cp and sp both shard the sequences"),
    ({"parallelism_config": {"tensor": 2}}, "no setting 'tensor'"),
    ({"parallelism_config": 7}, "ParallelismConfig"),
    ({"parallel": {"tp": 4}, "fsdp": True}, "fsdp=True shards parameters"),
    ({"parallel": {"tp": 4}, "fsdp_config": {"min_num_params": 3}}, "shards parameters"),
    ({"parallel": {"dp_shard": 4}, "fsdp": True, "fsdp_config": {"replicate": 2}}, "asks for replicas"),
]


@pytest.mark.parametrize(("said", "problem"), WRONG)
def test_contradictions_are_errors(said: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        resolve_mesh(options(**said), 4)


def test_a_plan_is_text_or_a_dict() -> None:
    assert options(tp_plan='{"a.*.b": "colwise"}').tp_plan == {"a.*.b": "colwise"}


def test_the_plan_counts_what_reads_different_data() -> None:
    args = options(parallel={"dp_shard": 2, "tp": 2}, per_device_train_batch_size=3, gradient_accumulation_steps=5)
    plan = resolve(args, world_size=4, micro_batches_per_epoch=10)
    assert (plan.global_batch_size, plan.world_size, plan.parallel) == (30, 4, "mesh")
    assert "30 per step = 3 x 5 micro-batches x 2 data-parallel ranks" in plan.describe()
    assert "mesh dp_shard 2 x tp 2" in plan.describe()


@given(meshes)
def test_each_part_of_the_data_is_counted_once(mesh: Mesh) -> None:
    ranks = range(mesh.size)
    assert len({tuple(mesh.coordinates(rank).values()) for rank in ranks}) == mesh.size
    speakers = [rank for rank in ranks if mesh.is_data_leader(rank)]
    assert [mesh.data_coordinates(rank) for rank in speakers] == [(n, mesh.data_size) for n in range(mesh.data_size)]
    assert {mesh.rng_rank(rank) for rank in ranks} == set(range(mesh.pp * mesh.data_size * mesh.num_parts))
    assert mesh.rng_rank(0) == 0
    streams = [mesh.rng_rank(rank) for rank in ranks]
    assert [mesh.first_of_stream(rank) for rank in ranks] == [streams.index(stream) for stream in streams]


def test_what_accelerate_says_of_its_exchange_of_heads_is_noted() -> None:
    said = {"sp_size": 2, "sp_backend": "deepspeed"}
    plan = resolve(options(parallelism_config=said), world_size=2, micro_batches_per_epoch=10)
    assert any("sp_backend have no effect" in note for note in plan.notes)
