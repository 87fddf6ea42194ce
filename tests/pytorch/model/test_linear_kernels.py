"""The loss of a linear head by Liger's kernel: the numbers of the logits, in Triton's interpreter; or a refusal."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Trainer, TrainingArguments
from paceline.args.errors import UnsupportedOption
from paceline.core.optional import is_installed
from paceline.pytorch.model.linear_cross_entropy import CrossEntropy, linear_cross_entropy
from paceline.pytorch.model.linear_head import Adapter, Cast, Head, Scale, Shift, Squash
from paceline.pytorch.model.linear_kernels import cap_of, find_loss_obstacle
from paceline.pytorch.model.linear_loss import LinearLoss
from paceline.pytorch.model.token_sums import TokenSums
from paceline.pytorch.model.vocabulary_shard import Shard

SUPPORT = Path(__file__).resolve().parents[2] / "support"
CLASSES, FEATURES = 7, 4


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the numbers of `liger_job.py`. Triton reads the variable when its kernels are defined: a new process."""
    if not (is_installed("liger_kernel") and is_installed("triton")):
        pytest.skip("needs liger-kernel")
    program = [sys.executable, str(SUPPORT / "liger_job.py"), str(tmp_path_factory.mktemp("liger"))]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    numbers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def test_losses_and_gradients_are_those_of_the_logits(found: dict[str, Any]) -> None:
    assert len(found["single"]) >= 48
    assert {name: error for name, error in found["single"].items() if not error <= 1e-6} == {}


def test_16_bits_are_within_their_rounding(found: dict[str, Any]) -> None:
    assert {name: error for name, error in found["half"].items() if not error <= 2e-2} == {}


def test_a_run_is_that_by_logits(found: dict[str, Any]) -> None:
    for name, run in found["runs"].items():
        assert run["calls"] >= 8, name
        assert run["weights"] <= 1e-5, name
        for row, plain in zip(run["liger"], run["plain"], strict=True):
            assert row == pytest.approx(plain, rel=1e-5), name


def test_the_check_of_other_chunks_is_not_that_of_the_kernel(found: dict[str, Any]) -> None:
    assert found["restored"] == [True] * 4


def test_errors_of_a_step(found: dict[str, Any]) -> None:
    errors = found["errors"]
    for case in ("scaled", "scaled, in a run"):
        assert "linear_cross_entropy='liger' is not possible: the logits are scaled" in errors[case]
        assert "Set linear_cross_entropy=True" in errors[case]
    assert "out of bounds" in errors["no class"]
    assert "'liger' is not possible: the head has double precision" in errors["double precision"]
    assert "differs from the model's own" in errors["a wrong gradient"]


# ---- refusals, which need neither the package nor a device


class LanguageModel(nn.Module):
    """Has a head, and makes no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.head(inputs), labels)}


def make_trainer(folder: Path) -> Trainer:
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", linear_cross_entropy="liger")
    data: Any = [{"inputs": torch.randn(FEATURES), "labels": torch.tensor(1)}] * 4
    return Trainer(LanguageModel(), args, train_dataset=data)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_no_device_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    message = r"linear_cross_entropy='liger' needs a CUDA device, .* Set linear_cross_entropy=True"
    with pytest.raises(UnsupportedOption, match=message):
        make_trainer(tmp_path)


@pytest.mark.skipif(is_installed("liger_kernel"), reason="liger-kernel is installed")
def test_a_missing_package_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ImportError, match=r"linear_cross_entropy='liger': .*pip install \"paceline\[liger\]\""):
        make_trainer(tmp_path)


def put_in_place(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """Puts modules in the place of Liger's, as if its function were this one, in Triton's interpreter."""
    fused = types.ModuleType("fused_linear_cross_entropy")
    monkeypatch.setattr(fused, "fused_linear_cross_entropy_forward", function, raising=False)
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_linear_cross_entropy", fused)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def present(
    *_: Any, token_grad_output: Any, compute_gradients: Any, weight_requires_grad: Any, accum_dtype: Any
) -> Any:
    """Has the arguments of Liger's function."""


def test_an_older_release_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, lambda rows, weight, target, accum_dtype=None: None)
    with pytest.raises(ImportError, match=r'lacks arguments of release .* pip install "liger-kernel>=0.8.5"'):
        LinearLoss("liger")


def test_a_head_on_another_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, present)
    model, part = LanguageModel(), LinearLoss("liger")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UnsupportedOption, match=r"'liger' is not possible: the head is on cpu"), part.applied(model):
        model(torch.randn(3, FEATURES), torch.arange(3))


def test_sharded_weights_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, present)
    part = LinearLoss("liger")
    part._shards = True
    with pytest.raises(UnsupportedOption, match="the kernel was not tested with FSDP"):
        part._permits(torch.randn(3, FEATURES), torch.arange(3), head_of(), CrossEntropy())


def test_token_terms_are_refused(tmp_path: Path) -> None:
    for options in ({"log_token_metrics": True}, {"z_loss_weight": 1e-4}):
        with pytest.raises(UnsupportedOption, match=r"is not supported with linear_cross_entropy='liger'"):
            TrainingArguments(str(tmp_path), linear_cross_entropy="liger", **options)


def head_of(weight: Tensor | None = None, **parts: Any) -> Head:
    return Head(torch.randn(CLASSES, FEATURES) if weight is None else weight, None, **parts)


SOFT_CAP = (Scale(1 / 30.0), Squash(), Scale(30.0))
REFUSED: dict[str, tuple[Head, CrossEntropy]] = {
    "LoRA": (head_of(adapters=(Adapter(torch.randn(CLASSES, 2), 1.0),)), CrossEntropy()),
    "tensor parallelism": (head_of(shard=Shard(None, 0, 2 * CLASSES)), CrossEntropy()),
    "scaled": (head_of(steps=(Scale(0.5),)), CrossEntropy()),
    "shifted": (head_of(steps=(Shift(torch.randn(CLASSES)),)), CrossEntropy()),
    "squashed": (head_of(steps=(Squash(),)), CrossEntropy()),
    "scaled otherwise": (head_of(steps=(Scale(1 / 30.0), Squash(), Scale(15.0))), CrossEntropy()),
    "z-loss": (head_of(), CrossEntropy(z_weight=1e-4)),
    "double precision": (head_of(torch.randn(CLASSES, FEATURES).double()), CrossEntropy()),
    "float16": (head_of(torch.randn(CLASSES, FEATURES).half()), CrossEntropy()),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_the_kernel_does_not_compute_is_refused(case: str) -> None:
    head, loss = REFUSED[case]
    words = {"LoRA": "LoRA", "tensor parallelism": "tensor parallelism", "z-loss": "z-loss", "float16": "float16"}
    expected = words.get(case, "double precision" if case == "double precision" else "otherwise than by a soft-cap")
    assert expected in str(find_loss_obstacle(head, loss))


def test_a_soft_cap_is_recognized() -> None:
    assert cap_of(SOFT_CAP) == 30.0
    assert cap_of((Cast(torch.float32), *SOFT_CAP, Cast(torch.float32))) == 30.0
    assert cap_of((Cast(torch.float32),)) is None
    for steps in ((), (Cast(torch.float32),), SOFT_CAP):
        assert find_loss_obstacle(head_of(steps=steps), CrossEntropy(label_smoothing=0.1)) is None


def test_sums_over_tokens_are_computed_by_chunks() -> None:
    def kernel(*_: Any) -> Any:
        raise AssertionError("a kernel is called that makes no sums")

    rows, targets, sums = torch.randn(5, FEATURES), torch.arange(5), TokenSums()
    head = head_of()
    value = linear_cross_entropy(rows, targets, head, CrossEntropy(), sums=sums, kernel=kernel)  # type: ignore[arg-type]
    torch.testing.assert_close(value, nn.functional.cross_entropy(head.logits(rows), targets))
    assert sums.total is not None


def test_other_values_have_no_kernel() -> None:
    for option in (True, "auto", "head"):
        assert LinearLoss(option)._kernel is None
