"""Number formats of a sharded model: the numbers of one process that casts by hand, and float32 wherever it is kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import shard_precision_job as job
import torch
from safetensors.torch import load_file
from small_models import Classifier, make_trainer

from paceline.args.errors import UnsupportedOption
from paceline.args.shard_precision import ShardPrecision
from paceline.pytorch.distributed.fsdp import check_full_eval
from paceline.pytorch.distributed.precision import CastWeights, Float16, Precision, narrow
from paceline.pytorch.distributed.shard_precision import (
    UnitCast,
    cast_gathered,
    cast_outputs,
    precision_under,
    warn_of_short_weights,
)

CPU = torch.device("cpu")


def test_outputs_of_a_narrow_policy_are_widened_once() -> None:
    narrow_policy, wide = ShardPrecision("bfloat16"), ShardPrecision("float32", "bfloat16", "float32")
    full, scaled = Precision(CPU), Float16(CPU)
    assert precision_under(None, full) is full
    assert precision_under(wide, full) is full
    assert isinstance(precision_under(narrow_policy, full), CastWeights)
    assert precision_under(narrow_policy, scaled) is scaled


def test_losses_keep_their_digits_and_labels_theirs() -> None:
    loss, logits, ids = torch.tensor(5.5473), torch.ones(2, 3), torch.ones(2, dtype=torch.long)
    found = cast_outputs(torch.nn.Identity(), (), {"loss": loss, "logits": logits, "ids": ids}, torch.bfloat16)
    assert [found["loss"] is loss, found["ids"] is ids, found["logits"].dtype] == [True, True, torch.bfloat16]
    given = narrow({"x": logits, "labels": loss, "nested": [ids, logits]}, torch.bfloat16, ["labels"])
    assert [given["labels"] is loss, given["nested"][0] is ids] == [True, True]
    assert {given["x"].dtype, given["nested"][1].dtype} == {torch.bfloat16}


@pytest.mark.parametrize("by_module", [False, True])
def test_modules_see_copies_while_they_run_and_no_longer(by_module: bool) -> None:
    model = torch.nn.MultiheadAttention(8, 2) if not by_module else Classifier()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    x = torch.randn(3, 2, 8, dtype=torch.bfloat16)
    with cast_gathered(model, torch.bfloat16, by_module), torch.no_grad():
        outputs = model(x, x, x)[0] if not by_module else model(x[:, 0])
        assert outputs.dtype is torch.bfloat16
        with pytest.raises(TypeError):
            model()
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert not any(name in vars(module) for module in model.modules() for name in module._parameters)
    assert not {**model._forward_hooks, **model._forward_pre_hooks}


def test_a_shared_parameter_is_copied_once() -> None:
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    second.weight = first.weight
    cast = UnitCast(torch.nn.Sequential(first, second), [first, second], torch.bfloat16)
    cast.show(first, ())
    assert vars(first)["weight"] is vars(second)["weight"]


def test_weights_that_are_short_already_are_told(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_short_weights(Classifier())
    assert not caplog.records
    warn_of_short_weights(Classifier().bfloat16())
    assert "Parameters are in bfloat16, and so are their updates" in caplog.text


def test_full_eval_of_what_its_cast_would_not_reach_is_refused(tmp_path: Path) -> None:
    args = make_trainer(tmp_path, Classifier(), bf16_full_eval=True, torch_compile=True).args
    with pytest.raises(UnsupportedOption, match="bf16_full_eval=True and torch_compile=True are not supported"):
        check_full_eval(args)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("precision")
    processes.run("shard_precision_job.py", 2, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("name", job.POLICIES)
def test_a_policy_gives_the_numbers_of_casts_by_hand(tmp_path: Path, results: Any, name: str) -> None:
    """To rounding in float32 where sums are made in it; the last update is cut at other places, and rounds there."""
    one = job.run(tmp_path, 1, name)
    exact = job.POLICIES[name]["policy"] not in ("bf16", "fp16")
    for found in (result[name] for result in results):
        near = {"rtol": 1e-5, "atol": 1e-7} if exact else {"rtol": 1e-2, "atol": 1e-3}
        torch.testing.assert_close(found["gradient"], one["gradient"], **near)
        torch.testing.assert_close(found["weights"], one["weights"], rtol=2e-3, atol=2e-3)
        for row in ("loss", "grad_norm", "eval_loss"):
            assert found[row] == pytest.approx(one[row], rel=5e-3)
        assert found["kept"] == {torch.float32}
        assert torch.equal(found["weights"], results[0][name]["weights"])


@pytest.mark.slow
def test_the_plan_names_the_policy(results: Any) -> None:
    plan = results[0]["exchanged in float32"]["plan"]
    assert "numbers    mixed_precision_policy (weights are gathered in bf16, gradients reduced in fp32)" in plan
    assert "bf16 precision, mixed_precision_policy (weights are gathered in bf16" in results[0]["with autocast"]["plan"]


@pytest.mark.slow
def test_a_run_is_resumed_from_float32_files(results: Any) -> None:
    for found in (result["resume"] for result in results):
        assert torch.equal(found["resumed"], found["begun"])
    saved = load_file(Path(results[0]["resume"]["checkpoint"]) / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


@pytest.mark.slow
def test_inputs_are_cast_and_labels_are_not(results: Any) -> None:
    """In an evaluation before training too."""
    bf16 = torch.bfloat16
    for found in (result["measured"] for result in results):
        assert found["evaluated"] == found["trained"] == {(bf16, torch.float32, bf16, bf16)}
        assert math.isclose(found["loss"], 1000.3**2, rel_tol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", job.FULL_EVALS)
def test_an_evaluation_in_16_bits_leaves_the_weights(tmp_path: Path, results: Any, name: str) -> None:
    one = job.full_eval(tmp_path, 1, name)
    for found in (result[f"eval {name}"] for result in results):
        assert found["is_same"]
        torch.testing.assert_close(found["weights"], one["weights"], rtol=1e-4, atol=1e-6)
        assert found["predictions"].dtype == one["predictions"].dtype
        np.testing.assert_allclose(found["predictions"], one["predictions"], rtol=2e-2, atol=5e-3)
        assert found["loss"] == pytest.approx(one["loss"], rel=2e-3)
