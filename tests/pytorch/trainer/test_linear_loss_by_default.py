"""`linear_cross_entropy="auto"`, the default: without logits where nothing reads them, else as with logits."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import linear_loss_job as job
import processes
import pytest
import torch
from linear_loss_job import LanguageModel, train
from small_models import RecordGradient, losses
from torch import Tensor, nn
from torch.nn import functional

from paceline import TrainerCallback, TrainingArguments
from paceline.args.parser import HfArgumentParser
from paceline.core.optional import is_installed
from paceline.pytorch.distributed.memory_report import Activations
from paceline.pytorch.model import lazy_logits, linear_loss


@pytest.fixture(autouse=True)
def large_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "CHUNK_BYTES", 1)


@pytest.fixture
def num_chunked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each loss that is computed by chunks."""
    calls, compute = [], lazy_logits.linear_cross_entropy

    def count(rows: Tensor, *rest: Any) -> Tensor:
        calls.append(len(rows))
        return compute(rows, *rest)

    monkeypatch.setattr(lazy_logits, "linear_cross_entropy", count)
    return calls


@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing_factor": 0.1}, {"gradient_accumulation_steps": 2, "bf16": True}, {"max_grad_norm": 0.2}],
    ids=str,
)
def test_it_is_used_and_has_the_numbers_of_the_logits(
    tmp_path: Path, options: dict[str, Any], num_chunked: list[int]
) -> None:
    assert TrainingArguments(str(tmp_path)).linear_cross_entropy == "auto"
    plain = train(tmp_path, LanguageModel(dropout=0.2), linear_cross_entropy=False, **options)
    assert not num_chunked
    found = train(tmp_path, LanguageModel(dropout=0.2), **options)
    assert len(num_chunked) >= job.STEPS
    rounding = 1e-2 if "bf16" in options else 1e-5
    assert losses(found) == pytest.approx(losses(plain), rel=rounding)
    for one, other in zip(found.gradients, plain.gradients, strict=True):
        assert (one - other).norm() <= rounding * other.norm()
    num_chunked.clear()
    assert found.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=rounding)
    for each in (plain, found):
        each.compute_metrics = lambda prediction: {"largest": prediction.predictions.max()}
    metrics = plain.evaluate()
    for name, value in found.evaluate().items():
        assert name not in ("eval_loss", "eval_largest") or value == pytest.approx(metrics[name], rel=10 * rounding)


def test_small_logits_are_those_of_the_head_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "CHUNK_BYTES", 2**25)
    plain, found = (train(tmp_path, LanguageModel(), **options) for options in ({"linear_cross_entropy": False}, {}))
    assert losses(found) == losses(plain)
    assert found.objective.linear_loss.is_right is None


class ReadsOutputs(RecordGradient):
    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        assert type(outputs["logits"]) is Tensor
        loss = loss + 0.1 * outputs["logits"].square().mean()
        return (loss, outputs) if return_outputs else loss


class CallsTheModel(RecordGradient):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        assert type(outputs["logits"]) is Tensor
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class WantsOutputs(TrainerCallback):
    wants = ("outputs",)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes the loop keep outputs."""

    def on_step_end(self, args: Any, state: Any, control: Any, outputs: Any = None, **kwargs: Any) -> None:
        assert all(type(each["logits"]) is Tensor for each in outputs)


def hooked() -> LanguageModel:
    model = LanguageModel()
    model.register_forward_hook(lambda module, inputs, outputs: {**outputs, "loss": outputs["loss"] * 2})
    return model


def replaced() -> LanguageModel:
    model = LanguageModel()
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)  # type: ignore[method-assign]
    return model


def unshifted(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


READERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "compute_loss reads outputs": (LanguageModel, {"cls": ReadsOutputs}),
    "compute_loss calls the model": (LanguageModel, {"cls": CallsTheModel}),
    "a callback wants outputs": (LanguageModel, {"callbacks": [WantsOutputs()]}),
    "a hook": (hooked, {}),
    "another forward": (replaced, {}),
    "data_map": (LanguageModel, {"data_map": True}),
    "mixup": (LanguageModel, {"regularizers": [{"mixup": {"on": "embeddings"}}], "compute_loss_func": unshifted}),
}


@pytest.mark.parametrize("name", READERS)
def test_the_numbers_of_a_reader_are_those_with_logits_bit_for_bit(
    tmp_path: Path, name: str, num_chunked: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    make, options = READERS[name]
    with caplog.at_level(logging.INFO, logger="paceline"):
        found = train(tmp_path / "auto", make(), **options)
    assert not num_chunked
    told = [each.getMessage() for each in caplog.records if "linear_cross_entropy='auto'" in each.getMessage()]
    assert len(told) <= 1
    assert "compute_loss" in name or name == "mixup" or told
    plain = train(tmp_path / "logits", make(), linear_cross_entropy=False, **options)
    assert losses(found) == losses(plain)
    assert all(torch.equal(one, other) for one, other in zip(found.gradients, plain.gradients, strict=True))


def test_logits_that_code_keeps_are_computed_before_the_weights_change(tmp_path: Path, num_chunked: list[int]) -> None:
    plain = train(tmp_path, LanguageModel(keeps_logits=True), linear_cross_entropy=False)
    found = train(tmp_path, LanguageModel(keeps_logits=True))
    assert len(num_chunked) == 1, "only until the logits were seen to be kept"
    assert found.kept_sums == pytest.approx(plain.kept_sums, rel=1e-5)
    assert losses(found) == pytest.approx(losses(plain), rel=1e-5)


def test_a_loss_function_that_stores_its_logits_gets_them(tmp_path: Path, num_chunked: list[int]) -> None:
    stored: list[Tensor] = []

    def compute(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        stored.append(outputs["logits"].detach())
        return functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())

    plain = train(tmp_path, LanguageModel(), linear_cross_entropy=False, compute_loss_func=compute)
    with_logits = torch.cat(stored)
    stored.clear()
    found = train(tmp_path, LanguageModel(), compute_loss_func=compute)
    assert len(num_chunked) <= 2
    torch.testing.assert_close(torch.cat(stored), with_logits, rtol=1e-4, atol=1e-5)
    assert losses(found) == pytest.approx(losses(plain), rel=1e-5)


@pytest.mark.parametrize("reads_from", [2, 3, 99])
def test_a_resumed_run_is_bit_identical(tmp_path: Path, reads_from: int, num_chunked: list[int]) -> None:
    """The model reads its logits from some step on: the run computes them from then on, resumed or not."""
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 9}
    whole = train(tmp_path / "one", LanguageModel(reads_from=reads_from, dropout=0.1), **options)
    model = LanguageModel(reads_from=reads_from, dropout=0.1)
    num_chunked.clear()
    resumed = train(tmp_path / "two", model, resume=str(tmp_path / "one" / "checkpoint-3"), **options)
    assert bool(num_chunked) == (reads_from == 99)
    assert resumed.objective.linear_loss.is_right == whole.objective.linear_loss.is_right == (reads_from == 99)
    assert losses(resumed)[-2:] == losses(whole)[-2:]
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_each_training_checks_anew(tmp_path: Path) -> None:
    trainer = train(tmp_path, LanguageModel(reads_from=3))
    assert trainer.objective.linear_loss.is_right is False
    trainer.model.reads_from = float("inf")
    trainer.train()
    assert trainer.objective.linear_loss.is_right is True


@pytest.mark.slow
def test_two_processes_decide_alike(tmp_path: Path) -> None:
    processes.run("linear_loss_job.py", 2, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    used = {"chunks": True, "unused parameters": True, "smoothed": False, "one rank keeps them": False, "fsdp": True}
    for name, is_used in used.items():
        base = "smoothed logits" if name == "smoothed" else "logits"
        for found in ranks:
            plain = ranks[0][base]
            assert found[name]["by_chunks"] is is_used, name
            assert found[name]["losses"] == pytest.approx(plain["losses"], rel=1e-5), name
            assert found[name]["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-5), name
            assert (found[name]["weights"] - plain["weights"]).norm() <= 1e-5 * plain["weights"].norm(), name
    options: dict[str, Any] = {"log_token_metrics": True, "z_loss_weight": 0.01, "max_grad_norm": 0.5}
    alone = train(tmp_path / "alone", LanguageModel(), per_device_train_batch_size=8, **options)
    evaluated = alone.evaluate()
    for found in ranks:  # the rows are of all processes, weighted by their targets
        assert found["terms"]["losses"] == pytest.approx(losses(alone), rel=1e-5)
        assert found["terms"]["rows"] == [pytest.approx(row, rel=1e-5) for row in job.rows_of(alone)]
        assert found["terms"]["rows"][0].keys() == set(job.METRICS)
        own = {name: evaluated[f"eval_{name}"] for name in job.METRICS[:3]}
        assert found["terms"]["evaluated"] == pytest.approx(own, rel=1e-4)
        sharded = found["terms, fsdp"]
        assert sharded["evaluated"]["perplexity"] == pytest.approx(math.exp(sharded["eval_loss"]), rel=1e-5)
        assert sharded["evaluated"] == ranks[0]["terms, fsdp"]["evaluated"]
        assert found["terms, fsdp"]["rows"][0]["perplexity"] == pytest.approx(found["terms"]["rows"][0]["perplexity"])


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("deepspeed"), reason="needs deepspeed")
def test_token_terms_with_deepspeed(tmp_path: Path) -> None:
    processes.run("linear_loss_job.py", 2, str(tmp_path), "terms", "terms, deepspeed")
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        plain, zero = found["terms"], found["terms, deepspeed"]
        assert zero["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert zero["rows"] == [pytest.approx(row, rel=1e-5) for row in plain["rows"]]
        assert zero["evaluated"] == pytest.approx(plain["evaluated"], rel=1e-5)


def test_it_is_set_from_the_command_line_and_from_a_file(tmp_path: Path) -> None:
    parser: Any = HfArgumentParser(TrainingArguments)
    for text, value in (("auto", "auto"), ("false", False), ("true", True), ("lm_head", "lm_head")):
        (args,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--linear_cross_entropy", text])
        assert args.linear_cross_entropy == value
        path = tmp_path / "options.yaml"
        path.write_text(f"output_dir: {tmp_path}\nlinear_cross_entropy: {text}\n")
        assert parser.parse_yaml_file(str(path))[0].linear_cross_entropy == value


def test_logits_that_are_not_computed_are_no_activations() -> None:
    found = Activations()
    for size, name, width in ((800, "head", 200), (64, "body", 16)):
        found.by_module[name] += size
        found.tensors.append((size, name, (1, width), torch.float32))
    assert found.without_width(200).total == 64
