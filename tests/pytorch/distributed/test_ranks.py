"""Errors and events on one of two processes are handled by both, as by one process alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import processes
import pytest
import ranks_job
import torch
from safetensors.torch import load_file

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def of_two(folder: Path) -> Found:
    """Returns the results of each of two processes that go through all scenarios."""
    ranks_job.prepare_resumes(folder / "checkpoints")
    processes.run("ranks_job.py", 2, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("name", ranks_job.SCENARIOS)
def test_both_do_what_one_process_does(tmp_path: Path, of_two: Found, name: str) -> None:
    one = ranks_job.SCENARIOS[name](tmp_path, 1)
    for found in (result[name] for result in of_two):
        tolerance = 1e-3 if name.startswith("fp16") else 1e-5
        torch.testing.assert_close(found.pop("weights"), one["weights"], rtol=1e-4, atol=tolerance, equal_nan=True)
        for key in found.keys() & {"loss", "evals"}:
            assert found.pop(key) == pytest.approx(one[key], rel=1e-3, nan_ok=True)
        if name == "memory":
            assert found.pop("micro_batch") == 1  # on the process too that had memory for more
        if "raise" in name:
            assert "step 2" in found["error"]
        assert found == {key: one[key] for key in found}


def test_no_sample_is_lost_or_taken_twice_when_a_resume_falls_into_a_slot(of_two: Found) -> None:
    for name in ranks_job.RESUMES:
        rows = of_two[0]["slots"][name]["rows"]
        seen = [result["slots"][name]["seen"] for result in of_two]
        window = 16 if name == "accumulated" else 8
        start = 18 if name == "accumulated" else 9  # samples of three updates of one process
        first = [row for row in rows if row[1] == 0]
        assert first[0][2:4] == (start, window - start % window)  # to the end of the window that it fell into
        ends = [row[2] + row[3] for row in first]
        assert ends[:-1] == [row[2] for row in first[1:]]  # each update begins where the one before it ended
        is_dropping = name in ("drop_last", "accumulated")
        assert ends[-1] <= 38 if is_dropping else ends[-1] == 38, name
        assert 38 - ends[-1] < window
        taken = sum(len(each) for each in seen)
        assert taken == sum(row[3] for row in rows), name
        both = sorted(seen[0] + seen[1])
        number = {index: both.count(index) for index in both}
        in_order = name != "shuffled"
        if in_order:  # the rest of the first epoch and all of the second: nothing before the start comes twice
            assert all(number.get(index, 0) <= (1 if index < start else 2) for index in range(38)), name
        assert {index for index in number if number[index] > 2} == set(), name


def test_a_stream_that_has_just_ended_is_gone_on_from_to_the_bit(of_two: Found) -> None:
    for result in of_two:
        whole = result["ends"]["whole"]
        assert whole["step"] == 6
        for step in (2, 3, 4):
            resumed = result["ends"][f"from {step}"]
            assert torch.equal(resumed["weights"], whole["weights"]), step
            assert (resumed["step"], resumed["epoch"], resumed["loss"]) == (6, whole["epoch"], whole["loss"]), step
        assert torch.equal(result["ends"]["after the end"]["weights"], whole["weights"])


def test_masks_of_dropout_on_another_mesh(of_two: Found) -> None:
    """The processes of a tensor-parallel group have saved one random state, with which replicas do not go on."""
    for kind, are_alike in (("tp", True), ("ddp", False)):
        masks = [torch.stack(result["masks"][kind]) for result in of_two]
        assert torch.equal(*masks) is are_alike, kind


def test_an_evaluation_is_that_of_the_model_that_is_saved(of_two: Found) -> None:
    """Of a sharded model with batch norm, whose statistics are those of each process's own batches in training."""
    saved, batch = ranks_job.Normed().eval(), torch.utils.data.default_collate(ranks_job.DATA)
    saved.load_state_dict(load_file(of_two[0]["normed"]["folder"] / "model.safetensors"))
    for result in of_two:
        assert result["normed"]["loss"] == pytest.approx(float(saved(**batch)[0].detach()), rel=1e-5)
