"""Memory that runs out on one of two processes with shards of a model: both go on with smaller micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memory_job
import processes
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from paceline import TrainingArguments, UnsupportedOption
from paceline.args.plan import resolve
from paceline.pytorch.distributed import memory_gate

Found = list[dict[Any, Any]]


def results_in(folder: Path) -> Found:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("few")
    processes.run("memory_job.py", 2, str(folder))
    return results_in(folder)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, list[str]]:
    """Returns the results, and what each process wrote to standard error; the last scenario fails."""
    folder = tmp_path_factory.mktemp("more")
    started = processes.start("memory_job.py", 2, str(folder), "more")
    texts = processes.finish(started, codes=(1,))
    return results_in(folder), texts


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return memory_job.run(tmp_path_factory.mktemp("alone"), 1, "fsdp", "forward")


def check_case(found: Found, case: memory_job.Case, alone: dict[str, Any]) -> None:
    """The numbers are those of one process without a shortage, and both have the same micro-batches."""
    for result in (each[case] for each in found):
        torch.testing.assert_close(result["weights"], alone["weights"], rtol=1e-5, atol=1e-6)
        assert result["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert (result["step"], result["micro_batch"]) == (alone["step"], 1)
    assert [each[case]["failures"] for each in found] == [0, 2 if case[0] == "tp" else 1]


@pytest.mark.slow
@pytest.mark.parametrize("case", memory_job.FEW)
def test_both_go_on_with_smaller_micro_batches(few: Found, case: memory_job.Case, alone: dict[str, Any]) -> None:
    check_case(few, case, alone)


def check_search(found: Found, name: str) -> None:
    """Only the second process has memory for two samples alone."""
    first, second = (each[name] for each in found)
    assert first == second
    assert (first["sizes"], first["largest"]) == ([1, 2, 4], 2)
    assert first["rates"][2] is None
    assert first["is_alike"], "a run after the search has other numbers than without it"


@pytest.mark.slow
def test_both_find_the_size_that_fits_on_both(few: Found) -> None:
    check_search(few, "fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("case", memory_job.MORE)
def test_wherever_the_pass_fails(more: tuple[Found, list[str]], case: memory_job.Case, alone: dict[str, Any]) -> None:
    check_case(more[0], case, alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in memory_job.MORE_SEARCHES])
def test_searches_of_other_meshes(more: tuple[Found, list[str]], name: str) -> None:
    check_search(more[0], name)


@pytest.mark.slow
def test_both_try_the_larger_size_again(more: tuple[Found, list[str]], tmp_path: Path) -> None:
    alone = memory_job.run(tmp_path, 1, "fsdp", "forward", max_steps=110)
    for result in (each["again"] for each in more[0]):
        torch.testing.assert_close(result["weights"], alone["weights"], rtol=1e-4, atol=1e-5)
        assert (result["step"], result["micro_batch"]) == (110, 2)


@pytest.mark.slow
def test_an_update_that_one_process_lost_is_an_error(more: tuple[Found, list[str]]) -> None:
    """The first process has made the step: nothing can be repeated. Neither process hangs."""
    first, second = more[1]
    assert "Connection closed by peer" in first or "Process 0, waiting for the others" in first
    assert "memory ran out on this process, outside of the forward" in second


@pytest.mark.parametrize(
    "options",
    [{"parallel": {"cp": 2}}, {"parallel": {"sp": 2}}, {"parallel": {"pp": 2}}],
    ids=lambda options: next(iter(options["parallel"])),
)
def test_meshes_that_cannot_agree_are_refused(options: dict[str, Any]) -> None:
    args = TrainingArguments("x", auto_find_batch_size=True, **options)
    with pytest.raises(UnsupportedOption, match=r"auto_find_batch_size=True with parallel=.*works with ddp, fsdp"):
        resolve(args, world_size=2, micro_batches_per_epoch=3)


def test_a_torch_that_cannot_recover_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_gate.check_recovery()
    monkeypatch.delattr(FSDPModule, "reset_iter_state")
    with pytest.raises(UnsupportedOption, match=r"auto_find_batch_size=True.*torch 2.13 or later"):
        memory_gate.check_recovery()
