"""Runs on DeepSpeed's engines: resumed, killed, saved, loaded elsewhere. The numbers are in test_shared_numbers.py."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import ranks_job
import shared_runs
import torch
import transformers
import zero_reference
from safetensors.torch import load_file
from small_models import Classifier, Tagger, classification, make_trainer

import paceline
from paceline.args.errors import UnsupportedOption
from paceline.checkpoint.folders import verify
from paceline.cli.main import main
from paceline.core.journal import read_rows
from paceline.pytorch.checkpoint.zero_files import read_zero_files
from paceline.pytorch.distributed.deepspeed import DeepSpeed
from paceline.pytorch.distributed.deepspeed_state import PartitionedOptimizer, Partitions

STAGES = ("zero1_bf16", "zero2_offload", "zero3", "zero3_offload_bf16")
TIMEOUT = 400  # s; DeepSpeed compiles a part of itself when it is used for the first time


def ended(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}-{rank}.json").read_text())
    return found


def weights(folder: Path, name: str, rank: int = 0) -> torch.Tensor:
    tensor: torch.Tensor = torch.load(folder / f"{name}-{rank}.pt")
    return tensor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of whole runs, their resumption, one that a signal ended, one that loads its best model."""
    folder = tmp_path_factory.mktemp("zero")
    modes = [mode for name in STAGES for mode in (name, f"{name}_from={folder}/{name}/checkpoint-8")]
    modes += ["zero3_terminated", f"zero3_again={folder}/zero3_terminated/checkpoint-6", "zero3_best", "zero2_best"]
    processes.finish(processes.start("shared_runs.py", 2, str(folder), *modes), timeout=TIMEOUT)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", STAGES)
def test_a_resumed_run_is_bit_exact(folder: Path, name: str) -> None:
    for rank in (0, 1):
        assert torch.equal(weights(folder, f"{name}_from", rank), weights(folder, name, 0))
        assert ended(folder, f"{name}_from", rank) == ended(folder, name, rank)


@pytest.mark.slow
def test_a_signal_stops_all_and_the_run_goes_on(folder: Path) -> None:
    assert [ended(folder, "zero3_terminated", rank)["global_step"] for rank in (0, 1)] == [6, 6]
    assert torch.equal(weights(folder, "zero3_again"), weights(folder, "zero3"))


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_checkpoints_are_whole(folder: Path, tmp_path: Path, name: str) -> None:
    """Those of one process: loaded by one, without DeepSpeed, which sees the same samples."""
    checkpoint = folder / name / "checkpoint-8"
    assert not verify(checkpoint)
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    shapes = [tuple(entry["exp_avg"].shape) for entry in state.values()]
    assert shapes == [tuple(parameter.shape) for parameter in Tagger().parameters()]
    saved = load_file(folder / f"{name}-model" / "model.safetensors")
    assert torch.equal(torch.cat([saved[key].flatten() for key in Tagger().state_dict()]), weights(folder, name))
    shared_runs.run(tmp_path, f"from={checkpoint}")
    before, after = (read_rows(path / "journal.bin") for path in (folder / name, tmp_path / "from"))
    assert [row[:4] for row in after] == [row[:4] for row in before[8:]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2_best", "zero3_best"])
def test_the_best_model_is_loaded_into_the_engine(folder: Path, name: str) -> None:
    best = json.loads((folder / name / "checkpoint-15" / "trainer_state.json").read_text())
    saved = load_file(Path(best["best_model_checkpoint"]) / "model.safetensors")
    expected = torch.cat([saved[key].flatten() for key in Tagger().state_dict()])
    for rank in (0, 1):
        assert torch.equal(weights(folder, name, rank), expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_numbers_stay_on_another_number_of_processes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process -> two with ZeRO 3: the same samples in each update, the same weights in the end."""
    monkeypatch.setenv("DROPOUT", "0")
    shared_runs.run(tmp_path, "whole")
    words = (str(tmp_path), f"zero3_from={tmp_path}/whole/checkpoint-8")
    processes.finish(processes.start("shared_runs.py", 2, *words), timeout=TIMEOUT)
    before, after = (read_rows(tmp_path / name / "journal.bin") for name in ("whole", "zero3_from"))
    assert [row[:4] for row in after] == [row[:4] for row in before[8:]]
    torch.testing.assert_close(weights(tmp_path, "zero3_from"), weights(tmp_path, "whole"), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_a_killed_process_is_restarted_from_the_last_checkpoint(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", str(processes.SUPPORT / "shared_runs.py"), str(tmp_path), "zero3_killed"]
    environment = processes.environment_of(0, 2, 0)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del environment[name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    assert torch.equal(weights(tmp_path, "zero3_killed"), weights(folder, "zero3"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_evaluation_is_that_of_the_model_that_is_saved(tmp_path: Path) -> None:
    """Each process follows the statistics of its own batches in training."""
    processes.finish(processes.start("normed_under_zero.py", 2, str(tmp_path)), timeout=TIMEOUT)
    saved, batch = ranks_job.Normed().eval(), torch.utils.data.default_collate(ranks_job.DATA)
    saved.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    for rank in (0, 1):
        loss = json.loads((tmp_path / f"loss-{rank}.json").read_text())
        assert loss == pytest.approx(float(saved(**batch)[0].detach()), rel=1e-5)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that transformers made on DeepSpeed, and that paceline went on from."""
    folder = tmp_path_factory.mktemp("reference")
    modes = ["zero2", "zero3", *(f"zero{stage}={folder}/zero{stage}/checkpoint-3" for stage in (2, 3))]
    processes.finish(processes.start("zero_reference.py", 2, str(folder), *modes), timeout=TIMEOUT)
    return folder


def logged(checkpoint: Path) -> list[float]:
    rows = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_of_transformers_is_gone_on_from(reference: Path, stage: int) -> None:
    """Optimizer and all; and what `save_model` wrote is loaded by transformers."""
    whole = reference / f"zero{stage}" / "checkpoint-8"
    assert torch.load(reference / f"zero{stage}-from.pt") == pytest.approx(logged(whole), rel=1e-5)
    saved = transformers.AutoModelForCausalLM.from_pretrained(reference / f"zero{stage}-saved").state_dict()
    for name, expected in read_zero_files(whole).weights().items():
        torch.testing.assert_close(saved[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_of_transformers_is_gone_on_from_without_deepspeed(reference: Path, tmp_path: Path, stage: int) -> None:
    checkpoint = reference / f"zero{stage}" / "checkpoint-3"
    trainer = zero_reference.trained(paceline, tmp_path, None, str(checkpoint), batch_size=6)
    found = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert found == pytest.approx(logged(reference / f"zero{stage}" / "checkpoint-8"), rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [2, 3])
def test_the_universal_form_is_gone_on_from_and_exported(reference: Path, tmp_path: Path, stage: int) -> None:
    """Made by DeepSpeed's own tool; neither needs DeepSpeed then. The parts themselves are exported too."""
    checkpoint = tmp_path / "checkpoint-3"
    shutil.copytree(reference / f"zero{stage}" / "checkpoint-3", checkpoint)
    parts = checkpoint / "global_step3"
    words = ["--input_folder", str(parts), "--output_folder", f"{parts}_universal", "--inject_missing_state"]
    words += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    environment = {**processes.environment_of(0, 1, 0), "WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    (checkpoint / "model.safetensors").unlink(missing_ok=True)
    expected = read_zero_files(checkpoint)
    weights, state = expected.weights(), expected.optimizer()
    assert main(["export", str(checkpoint), str(tmp_path / "of-parts")]) == 0
    del expected
    shutil.rmtree(parts)
    found = read_zero_files(checkpoint)
    for name, entry in found.optimizer()["state"].items():
        assert all(torch.equal(value, state["state"][name][key]) for key, value in entry.items())
        assert entry.keys() == state["state"][name].keys()
    assert found.optimizer()["param_groups"] == state["param_groups"]
    assert main(["export", str(checkpoint), str(tmp_path / "of-universal")]) == 0
    for name in ("of-parts", "of-universal"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    trainer = zero_reference.trained(paceline, tmp_path / "run", None, str(checkpoint), batch_size=6)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses == pytest.approx(logged(reference / f"zero{stage}" / "checkpoint-8"), rel=1e-4)


def test_a_parameter_that_the_optimizer_lacks_keeps_its_values() -> None:
    """ZeRO holds what the optimizer trains; of the rest there is no part to gather."""
    strategy, model = DeepSpeed.__new__(DeepSpeed), Classifier()
    strategy.stage = 2
    engine = SimpleNamespace(device=torch.device("cpu"), optimizer=SimpleNamespace(single_partition_of_fp32_groups=[]))
    strategy._partitions = partitions = Partitions(engine, strategy.stage)
    assert not partitions.holds(model.first.weight)
    found = strategy.whole_tensor("first.weight", model.first.weight)
    assert torch.equal(found, model.first.weight)
    partitions.scatter(model.first.weight, torch.zeros(16, 8), lambda flat: flat)  # there is nothing to change
    assert torch.equal(found, model.first.weight)


def test_parameters_that_join_later_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    partitions: Any = SimpleNamespace()
    optimizer = PartitionedOptimizer(torch.optim.SGD([parameter], lr=0.1), [[parameter]], partitions)
    with pytest.raises(UnsupportedOption, match=r"add_param_group with deepspeed \(ZeRO\) is not supported"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_checkpoint_has_the_parameters_that_the_optimizer_lacks(tmp_path: Path) -> None:
    processes.finish(processes.start("zero_part_job.py", 1, str(tmp_path)), timeout=TIMEOUT)
    before = Classifier().state_dict()
    for stage in (1, 2, 3):
        saved = load_file(tmp_path / f"zero{stage}" / "checkpoint-2" / "model.safetensors")
        assert torch.equal(saved["first.weight"], before["first.weight"]), stage
        assert not torch.equal(saved["second.weight"], before["second.weight"]), stage


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match=r'pip install "paceline\[deepspeed\]"'):
        make_trainer(tmp_path, Classifier(), classification(8), deepspeed={"zero_optimization": {"stage": 1}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonfinite_policy": "rollback"}, "nonfinite_policy='rollback' is not supported with deepspeed"),
        ({"bf16_full_eval": True}, "not supported with deepspeed"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, Classifier(), classification(8), deepspeed={"gradient_clipping": "auto"}, **options)
