"""torch.compile and activation checkpointing change the speed and the memory of a run, not its numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compilers import needs_compiler
from small_models import classification, losses, make_trainer, weights
from torch import Tensor, nn
from torch.nn import functional

DATA = classification(16)
# of torch's compiler itself
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


class Block(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            Block.calls += 1
        result: Tensor = x + self.drop(torch.tanh(self.layer(x)))
        return result


class Deep(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if labels is None else (functional.cross_entropy(logits, labels), logits)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    yield
    torch._dynamo.reset()


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


BACKENDS = ["eager", pytest.param("inductor", marks=[pytest.mark.slow, needs_compiler])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("regions", [False, True], ids=["whole", "regions"])
def test_a_compiled_run_equals_the_plain_one(tmp_path: Path, regions: bool, backend: str) -> None:
    options: dict[str, Any] = {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "epoch",
        "eval_dataset": DATA[:8],
        "save_strategy": "epoch",
        "learning_rate": 1e-3,
    }
    plain = make_trainer(tmp_path / "plain", without_dropout(Deep()), DATA, **options)
    plain.train()
    compiled = make_trainer(
        tmp_path / "compiled",
        without_dropout(Deep()),
        DATA,
        torch_compile=True,
        torch_compile_backend=backend,
        compile_regions=regions,
        **options,
    )
    Block.calls = 0
    compiled.train()
    assert Block.calls == 0  # compiled, each of them, in training and evaluation
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)
    torch.testing.assert_close(weights(compiled.model), weights(plain.model), rtol=1e-5, atol=1e-6)
    names = [set(trainer.model.state_dict()) for trainer in (plain, compiled)]
    assert names[0] == names[1]
    (tmp_path / "compiled" / "checkpoint-4" / "model.safetensors").stat()
    compiled.predict(DATA[:4])
    assert Block.calls == 0
    compiled.model(DATA[0]["x"][None])
    assert Block.calls > 0  # nothing is left compiled afterwards


@pytest.mark.parametrize("is_trained", [False, True])
def test_evaluation_outside_of_training_is_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_trained: bool
) -> None:
    graphs: list[Any] = []

    def count(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, **settings: compile_module(module, backend=count))
    trainer = make_trainer(tmp_path, Deep(), DATA, eval_dataset=DATA, torch_compile=True, torch_compile_backend="eager")
    if is_trained:
        trainer.train()
    num_graphs = len(graphs)
    assert (num_graphs > 0) == is_trained
    Block.calls = 0
    found = [trainer.evaluate()["eval_loss"]]
    assert len(graphs) > num_graphs
    num_graphs = len(graphs)
    found += [trainer.evaluate()["eval_loss"], trainer.predict(DATA).metrics["test_loss"]]
    assert len(graphs) == num_graphs
    assert Block.calls == 0
    plain = make_trainer(tmp_path, trainer.model, eval_dataset=DATA).evaluate()["eval_loss"]
    assert found == [pytest.approx(plain, rel=1e-6)] * 3
    assert Block.calls > 0
    assert trainer.model._compiled_call_impl is None


def test_regions_need_blocks(tmp_path: Path) -> None:
    from small_models import Classifier

    with pytest.raises(ValueError, match=r"compile_regions=True: Classifier has no repeated blocks"):
        make_trainer(tmp_path, Classifier(), DATA, torch_compile=True, compile_regions=True).train()


@pytest.mark.parametrize("backend", ["eager"])
def test_a_compiled_run_resumes(tmp_path: Path, backend: str) -> None:
    options: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": backend, "save_strategy": "epoch"}
    whole = make_trainer(tmp_path, Deep(), DATA, num_train_epochs=2, **options)
    whole.train()
    parts = make_trainer(tmp_path, Deep(), DATA, num_train_epochs=2, **options)
    parts.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert torch.equal(weights(parts.model), weights(whole.model))


KINDS: dict[str, dict[str, Any]] = {
    "non-reentrant": {"activation_checkpointing": True},
    "reentrant": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
    "older name": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "every second": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_activations_give_the_same_weights(tmp_path: Path, kind: str) -> None:
    """With dropout: the masks of the second forward are those of the first."""
    found, calls = [], []
    for options in ({}, KINDS[kind]):
        Block.calls = 0
        trainer = make_trainer(tmp_path, Deep(4).double(), double(DATA), num_train_epochs=2, **options)
        trainer.train()
        found.append((weights(trainer.model), losses(trainer)))
        calls.append(Block.calls)
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)
    assert calls == [4 * 8, 6 * 8 if kind == "every second" else 8 * 8]
    Block.calls = 0
    make_trainer(tmp_path, trainer.model, eval_dataset=double(DATA[:4])).evaluate()
    assert Block.calls == 4


def double(data: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{"x": sample["x"].double(), "labels": sample["labels"]} for sample in data]


def test_noise_on_the_embeddings_ends_with_training(tmp_path: Path) -> None:
    from small_models import Tagger, tagging

    plain, noisy = Tagger(), Tagger()
    make_trainer(tmp_path, plain, tagging(8)).train()
    trainer = make_trainer(tmp_path, noisy, tagging(8), neftune_noise_alpha=5.0)
    trainer.train()
    assert not torch.equal(weights(plain), weights(noisy))
    assert len(noisy.embedding._forward_hooks) == 0


@pytest.mark.slow
@pytest.mark.parametrize("regions", [False, True])
def test_a_compiled_model_gives_a_loss_function_full_precision(tmp_path: Path, regions: bool) -> None:
    seen: set[torch.dtype] = set()

    def compute_loss(outputs: Tensor, labels: Tensor) -> Tensor:
        seen.add(outputs.dtype)
        return functional.cross_entropy(outputs, labels)

    make_trainer(
        tmp_path,
        Deep(),
        DATA,
        eval_dataset=DATA,
        compute_loss_func=compute_loss,
        bf16=True,
        eval_strategy="epoch",
        torch_compile=True,
        torch_compile_backend="eager",
        compile_regions=regions,
    ).train()
    assert seen == {torch.float32}
