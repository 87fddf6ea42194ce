"""PEFT's adapters on the head: the loss by chunks has the loss and the gradients of the logits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from linear_loss_job import LanguageModel, rows_of, texts, train
from small_models import losses
from torch import Tensor, nn

from paceline.pytorch.model import linear_loss
from paceline.pytorch.model.lazy_logits import LazyLogits
from paceline.pytorch.model.linear_loss import LinearLoss

peft = pytest.importorskip("peft")


def adapted(*configs: dict[str, Any], dtype: torch.dtype = torch.float32, with_bias: bool = False) -> Any:
    """A tied model with LoRA on its head, of which B is not zero."""
    model = LanguageModel(dropout=0.1).to(dtype)
    if with_bias:
        model.head.bias = nn.Parameter(torch.randn(model.head.out_features, dtype=dtype))
    wrapped: Any = None
    for number, config in enumerate(configs):
        setting = peft.LoraConfig(**{"target_modules": ["body", "head"], "r": 3, "lora_alpha": 5, **config})
        if wrapped is None:
            wrapped = peft.get_peft_model(model, setting, "adapter0")
        else:
            wrapped.add_adapter(f"adapter{number}", setting)
    wrapped.base_model.set_adapter([f"adapter{number}" for number in range(len(configs))])
    generator = torch.Generator().manual_seed(3)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return wrapped


def step(model: Any, part: LinearLoss | None, autocasts: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Returns the outputs and the gradients of one pass, from the same random state."""
    model = copy.deepcopy(model).train()
    torch.manual_seed(5)
    batch = {name: torch.stack([text[name] for text in texts(4)]) for name in ("input_ids", "labels")}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        if part is None:
            outputs = model(**batch)
        else:
            with part.applied(model):
                outputs = model(**batch)
    if outputs["loss"].requires_grad:
        outputs["loss"].backward()
    return outputs, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


SAVED = {"target_modules": ["body"], "modules_to_save": ["head"]}
HEADS: dict[str, tuple[Any, float]] = {
    "one adapter": (lambda: adapted({}), 1e-5),
    "dropout": (lambda: adapted({"lora_dropout": 0.3}), 1e-5),
    "two adapters of different ranks": (lambda: adapted({"lora_dropout": 0.2}, {"r": 2, "use_rslora": True}), 1e-5),
    "a bias of the adapter": (lambda: adapted({"lora_bias": True}, with_bias=True), 1e-5),
    "a trained bias": (lambda: adapted({"bias": "all"}, with_bias=True), 1e-5),
    "weights of 16 bits, adapters of 32": (lambda: adapted({}, {"r": 2}, dtype=torch.bfloat16), 2e-2),
    "the head trained whole": (lambda: adapted(SAVED), 1e-5),
}


@pytest.mark.parametrize("name", HEADS)
def test_loss_and_gradients_are_those_of_the_logits(name: str) -> None:
    make, rounding = HEADS[name]
    model = make()
    plain, gradients = step(model, None)
    part = LinearLoss(True)
    found, by_chunks = step(model, part)
    assert part.is_right
    assert isinstance(found["logits"], LazyLogits)
    assert found["loss"].item() == pytest.approx(plain["loss"].item(), rel=rounding)
    assert by_chunks.keys() == gradients.keys()
    assert any("head" in each for each in gradients)
    for each, gradient in gradients.items():
        assert by_chunks[each].dtype == gradient.dtype
        assert (by_chunks[each] - gradient).norm() <= rounding * gradient.norm(), each
    torch.testing.assert_close(found["logits"].detach(), plain["logits"].detach(), rtol=rounding, atol=rounding)


def test_autocast_is_that_of_the_head() -> None:
    model = adapted({"lora_dropout": 0.3})
    plain, gradients = step(model, None, autocasts=True)
    found, by_chunks = step(model, LinearLoss(True), autocasts=True)
    assert found["loss"].item() == pytest.approx(plain["loss"].item(), rel=1e-3)
    for each, gradient in gradients.items():
        assert (by_chunks[each] - gradient).norm() <= 2e-2 * gradient.norm(), each


def test_logits_that_are_read_have_their_gradients() -> None:
    class Reads(LanguageModel):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            outputs = super().forward(input_ids, labels)
            return {**outputs, "loss": outputs["loss"] + 0.01 * outputs["logits"].square().mean()}

    model = adapted({"lora_dropout": 0.3}, {"r": 2})
    model.base_model.model.__class__ = Reads
    plain, gradients = step(model, None)
    with pytest.raises(ValueError, match="is not possible"):
        step(model, LinearLoss(True))
    part = LinearLoss("auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_loss, "is_small", lambda head, rows: False)
        found, by_chunks = step(model, part)
    assert part.is_right is False
    assert found["loss"].item() == pytest.approx(plain["loss"].item(), rel=1e-5)
    for each, gradient in gradients.items():
        assert (by_chunks[each] - gradient).norm() <= 1e-5 * gradient.norm(), each


def test_adapters_that_are_off_or_merged_are_left_out() -> None:
    model = adapted({"lora_dropout": 0.3}, {"r": 2})
    plain, _ = step(model, None)
    merged = copy.deepcopy(model)
    merged.merge_adapter()
    with model.disable_adapter():
        assert step(model, LinearLoss(True))[0]["loss"].item() == pytest.approx(step(model, None)[0]["loss"].item())
        assert step(model, None)[0]["loss"].item() != pytest.approx(plain["loss"].item(), rel=1e-3)
    assert step(merged, LinearLoss(True))[0]["loss"].item() == pytest.approx(step(merged, None)[0]["loss"].item())
    model.base_model.set_adapter("adapter1")
    assert step(model, LinearLoss(True))[0]["loss"].item() == pytest.approx(step(model, None)[0]["loss"].item())
    saved = adapted(SAVED)
    saved.base_model.model.head.modules_to_save["adapter0"].weight.data.mul_(2)
    with saved.disable_adapter():
        assert step(saved, LinearLoss(True))[0]["loss"].item() == pytest.approx(step(saved, None)[0]["loss"].item())


def test_other_adapters_are_passed_over_by_name() -> None:
    dora, hooked, loha = adapted({"use_dora": True}), adapted({}), LanguageModel()
    hooked.base_model.model.head.lora_B["adapter0"].register_forward_hook(lambda module, inputs, output: output * 2)
    loha = peft.get_peft_model(loha, peft.LoHaConfig(target_modules=["head"], r=2))
    for model, reason in ((dora, "no plain LoRA.*Dora"), (hooked, "a hook on"), (loha, "no nn.Linear, plain or")):
        with pytest.raises(ValueError, match=reason):
            step(model, LinearLoss(True))
        plain, _ = step(model, None)
        found, _ = step(model, LinearLoss("auto"))
        assert torch.equal(plain["loss"], found["loss"])


def test_a_resumed_run_is_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "CHUNK_BYTES", 1)
    config = {"lora_dropout": 0.3}
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    options |= {"log_token_metrics": True, "z_loss_weight": 0.01}
    plain = train(tmp_path / "logits", adapted(config), linear_cross_entropy=False, **options)
    whole = train(tmp_path / "whole", adapted(config), **options)
    assert whole.objective.linear_loss.is_right
    assert losses(whole) == pytest.approx(losses(plain), rel=1e-5)
    assert rows_of(whole) == [pytest.approx(row, rel=1e-5) for row in rows_of(plain)]
    resumed = train(tmp_path / "resumed", adapted(config), resume=str(tmp_path / "whole" / "checkpoint-2"), **options)
    assert losses(resumed)[-3:] == losses(whole)[-3:]
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
