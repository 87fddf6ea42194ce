"""Models in a mesh of processes (tensor parallel, sharded beside it): numbers, checkpoints, and what is refused.

With PACELINE_WRITE_DOCS=1 the nightly test writes the tables of docs/invariance.md on models with attention.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mesh_job
import processes
import pytest
import torch
from invariance import Matrix, check_complete, check_same
from safetensors.torch import load_file

from paceline.args.mesh import Mesh
from paceline.checkpoint.folders import verify

Found = dict[str, Any]
Runs = tuple[Path, dict[str, list[Any]]]
HEADING = "Models with attention"
COLUMNS = {
    ("ddp", 2): "dp_replicate=2",
    ("fsdp", 2): "dp_shard=2",
    ("tp", 2): "tp=2",
    ("cp", 2): "cp=2",
    ("sp", 2): "sp=2",
    ("tp+fsdp", 4): "dp_shard=2,tp=2",
    ("cp+ddp", 4): "dp_replicate=2,cp=2",
    ("cp+fsdp", 4): "dp_shard=2,cp=2",
    ("cp+tp", 4): "cp=2,tp=2",
    ("sp+tp", 4): "sp=2,tp=2",
}

pytestmark = pytest.mark.timeout(900)  # four processes on a busy machine


def results_of(folder: Path, size: int, *words: str) -> dict[str, list[Any]]:
    """Returns the results of each process by name, with those of the table."""
    words = (*(word for (_, number), word in COLUMNS.items() if number == size), *words)
    processes.finish(processes.start("mesh_job.py", size, str(folder), *words), timeout=600)
    names = [word if "@" not in word or word.endswith("@start") else word.partition("@")[0] + "@from" for word in words]
    return {name: [torch.load(folder / f"{name}-{r}.pt", weights_only=False) for r in range(size)] for name in names}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("two")
    return folder, results_of(folder, 2, "tp=2@start", f"tp=2@{folder}/tp=2@start/checkpoint-4")


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory, of_two: Runs) -> Runs:
    """Four processes, one run of which goes on from the checkpoint of two."""
    folder, checkpoint = tmp_path_factory.mktemp("four"), of_two[0] / "tp=2@start" / "checkpoint-4"
    return folder, results_of(folder, 4, "sp=4", f"dp_shard=2,tp=2@{checkpoint}")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in mesh_job.MODELS if name not in mesh_job.FEW])
def test_matrices_or_sequences_cut_in_two_have_the_numbers_of_one_process(
    tmp_path: Path, of_two: Runs, name: str
) -> None:
    one = mesh_job.run(tmp_path, name, Mesh())
    for said in ("tp=2", "cp=2", "sp=2"):
        check_same([found[name] for found in of_two[1][said]], one)


@pytest.mark.slow
@pytest.mark.parametrize("name", mesh_job.IN_PARTS)
def test_places_from_the_first_token_and_texts_in_one_row(tmp_path: Path, of_two: Runs, name: str) -> None:
    one = mesh_job.run(tmp_path, name, Mesh())
    for said in ("cp=2", "sp=2"):
        check_same([found[name] for found in of_two[1][said]], one)


@pytest.mark.nightly
def test_every_mesh_and_the_tables_of_the_docs(tmp_path: Path, of_two: Runs, of_four: Runs) -> None:
    found, matrix = {**of_two[1], **of_four[1]}, Matrix(HEADING, COLUMNS)
    for name in mesh_job.FEW:
        one = mesh_job.run(tmp_path, name, Mesh())
        if name in mesh_job.LONG:
            check_complete(one)
        matrix.add(name, [[each[name] for each in found[said]] for said in COLUMNS.values()], one)
        if name in found["sp=4"][0]:
            check_same([each[name] for each in found["sp=4"]], one)
    if os.environ.get("PACELINE_WRITE_DOCS"):
        matrix.write()


def test_the_page_has_every_mesh() -> None:
    Matrix(HEADING, COLUMNS).check_page(mesh_job.FEW)


@pytest.mark.slow
def test_models_with_other_numbers_in_parts_are_refused_on_all_processes(of_two: Runs) -> None:
    for axis in ("cp", "sp"):
        for found in of_two[1][f"{axis}=2"]:
            said = found["refused"]
            assert said["convolved"].startswith(f"parallel={{'{axis}': 2}}: Convolved gives other outputs")
            assert said["sum of losses"].startswith(f"parallel={{'{axis}': 2}}: SumOfLosses gives other losses")


@pytest.mark.slow
def test_a_run_is_resumed_bit_for_bit(of_two: Runs) -> None:
    folder, found = of_two
    assert not verify(folder / "tp=2@start" / "checkpoint-4")
    for whole, resumed in zip(found["tp=2@start"], found["tp=2@from"], strict=True):
        assert torch.equal(whole["weights"], resumed["weights"])
        assert whole["loss"][4:] == resumed["loss"][4:]


@pytest.mark.nightly
def test_a_run_goes_on_in_another_mesh_and_back_on_one(tmp_path: Path, of_two: Runs, of_four: Runs) -> None:
    folder, found = of_four
    expected = of_two[1]["tp=2@start"][0]
    for resumed in found["dp_shard=2,tp=2@from"]:
        torch.testing.assert_close(resumed["weights"], expected["weights"], rtol=1e-4, atol=1e-6)
    written = folder / "dp_shard=2,tp=2@from" / "checkpoint-6"
    assert not verify(written)
    alone = mesh_job.go_on(tmp_path / "alone", Mesh(), None, written)
    torch.testing.assert_close(alone["weights"], expected["weights"], rtol=1e-4, atol=1e-6)
    saved = load_file(of_two[0] / "tp=2@start" / "model" / "model.safetensors")
    model = mesh_job.MODELS["tied llama"]()
    assert not set(saved) - set(model.state_dict())
    model.load_state_dict(saved, strict=False)
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), expected["weights"])
