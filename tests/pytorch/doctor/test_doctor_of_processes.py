"""`Trainer.doctor` on two processes: the gradient is compared with that of one."""

from __future__ import annotations

import json

import doctor_job
import processes
import pytest


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    folder = tmp_path_factory.mktemp("doctor")
    processes.run("doctor_job.py", 2, str(folder))
    ranks = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0] == ranks[1]
    result: dict[str, dict[str, list[str]]] = ranks[0]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in doctor_job.CASES if not name.startswith("wrong")])
def test_a_sound_run_raises_no_alarm(name: str, found: dict[str, dict[str, list[str]]]) -> None:
    assert found[name]["errors"] == []
    assert "parallel gradient" in found[name]["checks"]
    assert "gradients" in found[name]["checks"]  # those of one process ran too
    assert found[name]["is_unchanged"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in doctor_job.CASES if name.startswith("wrong")])
def test_a_wrong_gradient_is_found(name: str, found: dict[str, dict[str, list[str]]]) -> None:
    assert [text for text in found[name]["errors"] if text.startswith("parallel gradient: the gradient of 2 processes")]
