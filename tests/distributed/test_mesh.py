"""Models in a mesh of processes (tensor parallel, sharded beside it): numbers, checkpoints, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mesh_job
import processes
import pytest
import torch
from safetensors.torch import load_file
from shared_job import check_same

from paceline.args.mesh import Mesh
from paceline.core.folders import verify

Found = dict[str, Any]


def results_of(folder: Path, size: int, *words: str) -> dict[str, list[Any]]:
    """What each process found, by word."""
    processes.run("mesh_job.py", size, str(folder), *words)
    names = [word if "@" not in word or word.endswith("@start") else word.partition("@")[0] + "@from" for word in words]
    return {name: [torch.load(folder / f"{name}-{r}.pt", weights_only=False) for r in range(size)] for name in names}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    folder = tmp_path_factory.mktemp("mesh")
    return folder, results_of(folder, 2, "tp=2", "cp=2", "sp=2", "tp=2@start", f"tp=2@{folder}/tp=2@start/checkpoint-4")


@pytest.mark.slow
@pytest.mark.parametrize("name", mesh_job.MODELS)
def test_matrices_or_sequences_cut_in_two_have_the_numbers_of_one_process(
    tmp_path: Path, of_two: tuple[Path, dict[str, list[Any]]], name: str
) -> None:
    one = mesh_job.run(tmp_path, name, Mesh())
    for said in ("tp=2", "cp=2", "sp=2"):
        check_same([found[name] for found in of_two[1][said]], one)


@pytest.mark.slow
@pytest.mark.parametrize("name", mesh_job.IN_PARTS)
def test_padding_on_the_left_and_parts_without_a_target(
    tmp_path: Path, of_two: tuple[Path, dict[str, list[Any]]], name: str
) -> None:
    one = mesh_job.run(tmp_path, name, Mesh())
    for said in ("cp=2", "sp=2"):
        check_same([found[name] for found in of_two[1][said]], one)


@pytest.mark.slow
def test_models_with_other_numbers_in_parts_are_refused_on_all_processes(
    of_two: tuple[Path, dict[str, list[Any]]],
) -> None:
    for axis in ("cp", "sp"):
        for found in of_two[1][f"{axis}=2"]:
            said = found["refused"]
            assert said["convolved"].startswith(f"parallel={{'{axis}': 2}}: Convolved gives other outputs")
            assert said["sum of losses"].startswith(f"parallel={{'{axis}': 2}}: SumOfLosses gives other losses")


@pytest.mark.slow
def test_a_run_is_resumed_bit_for_bit(of_two: tuple[Path, dict[str, list[Any]]]) -> None:
    folder, found = of_two
    assert not verify(folder / "tp=2@start" / "checkpoint-4")
    for whole, resumed in zip(found["tp=2@start"], found["tp=2@from"], strict=True):
        assert torch.equal(whole["weights"], resumed["weights"])
        assert whole["loss"][4:] == resumed["loss"][4:]


@pytest.mark.slow
def test_sharded_and_cut_and_resumed_on_other_meshes(
    tmp_path: Path, of_two: tuple[Path, dict[str, list[Any]]]
) -> None:
    """Four processes, then the checkpoint of two of them, and back on one."""
    checkpoint = of_two[0] / "tp=2@start" / "checkpoint-4"
    several = ("dp_shard=2,tp=2", "dp_replicate=2,cp=2", "cp=2,tp=2", "sp=4", "sp=2,tp=2")
    found = results_of(tmp_path, 4, *several, f"dp_shard=2,tp=2@{checkpoint}")
    for name in mesh_job.FEW:
        one = mesh_job.run(tmp_path / "one", name, Mesh())
        for said in several:
            if name in found[said][0]:
                check_same([each[name] for each in found[said]], one)
    expected = of_two[1]["tp=2@start"][0]
    for resumed in found["dp_shard=2,tp=2@from"]:
        torch.testing.assert_close(resumed["weights"], expected["weights"], rtol=1e-4, atol=1e-6)
    written = tmp_path / "dp_shard=2,tp=2@from" / "checkpoint-6"
    assert not verify(written)
    alone = mesh_job.go_on(tmp_path / "alone", Mesh(), None, written)
    torch.testing.assert_close(alone["weights"], expected["weights"], rtol=1e-4, atol=1e-6)
    saved = load_file(of_two[0] / "tp=2@start" / "model" / "model.safetensors")
    model = mesh_job.MODELS["tied llama"]()
    assert not set(saved) - set(model.state_dict())
    model.load_state_dict(saved, strict=False)
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), expected["weights"])
