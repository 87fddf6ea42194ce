"""A token budget on two processes: the numbers of one, and resumes on as many processes and on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import processes
import pytest
import token_job
import torch

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    trainer = token_job.trainer_in(folder / "one")
    trainer.train()
    return token_job.found(trainer)


@pytest.fixture(scope="module")
def of_two(folder: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    processes.run("token_job.py", 2, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("name", token_job.BUDGETS)
def test_two_resume_to_the_same_bits(of_two: list[dict[str, Any]], name: str) -> None:
    for result in of_two:
        whole, again = result[name]["whole"], result[name]["again"]
        assert torch.equal(whole["weights"], again["weights"])
        assert torch.equal(whole["weights"], of_two[0][name]["whole"]["weights"])
        assert whole["step"] == whole["max_steps"] > 2 * token_job.CUT
        assert (whole["step"], whole["loss"], whole["epoch"]) == (again["step"], again["loss"], 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", token_job.PARALLEL)
def test_samples_of_one_window_give_the_numbers_of_one_process(
    of_two: list[dict[str, Any]], tmp_path: Path, parallel: str
) -> None:
    by_samples = {"per_device_train_tokens": None, "per_device_train_batch_size": 4}
    expected = token_job.found(token_job.one_window(tmp_path, **by_samples))
    for result in of_two:
        assert result[parallel]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert result[parallel]["norm"] == pytest.approx(expected["norm"], rel=1e-5)


def test_a_run_of_one_goes_on_with_its_optimizer_steps_on_two(
    of_two: list[dict[str, Any]], one: dict[str, Any], folder: Path
) -> None:
    more = of_two[0]["more"]
    assert (more["step"], more["max_steps"], more["epoch"]) == (one["step"], one["max_steps"], 1.0)
    assert more["loss"] == pytest.approx(one["loss"], rel=1e-4)
    torch.testing.assert_close(more["weights"], one["weights"], rtol=1e-3, atol=1e-4)
    assert token_job.windows(folder / "more") == token_job.windows(folder / "one")[token_job.CUT :]


def test_a_run_of_two_goes_on_with_its_optimizer_steps_on_one(
    of_two: list[dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    trainer = token_job.trainer_in(tmp_path)
    trainer.train(resume_from_checkpoint=str(folder / "two" / f"checkpoint-{token_job.CUT}"))
    assert trainer.state.epoch == 1.0
    assert token_job.windows(tmp_path) == token_job.windows(folder / "two")[token_job.CUT :]
