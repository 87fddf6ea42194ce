"""Compilation: what is compiled, how often and why again, the cache, budgets of activations, and CUDA graphs."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_job import Layer, Layered
from compilers import needs_compiler
from small_models import make_trainer, tagging, weights
from torch import Tensor, nn

from paceline import TrainerCallback, TrainingArguments, UnsupportedOption
from paceline.pytorch.model import cuda_graphs
from paceline.pytorch.model.compilation import compile_model, find_regions, settings_of, undo_compilation
from paceline.pytorch.model.compile_cache import CompileCache, file_name
from paceline.pytorch.model.compile_watch import CompileWatch, shortened

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), torch_compile=True, use_cpu=True, **options)


# ---- what is compiled


class Trunk(nn.Module):
    """Most of it is outside of its repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(nn.Linear(12, 12) for _ in range(20)))
        self.heads = nn.ModuleList(Layer() for _ in range(2))


class Stages(nn.Module):
    """Each block has a size of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(nn.Linear(n, n + 1), nn.Tanh()) for n in range(2, 6))


@pytest.mark.parametrize(
    ("model", "number"), [(Layered(), 4), (Trunk(), 0), (Stages(), 0), (nn.Linear(2, 2), 0), (Layered(1), 0)]
)
def test_blocks_are_compiled_if_they_are_alike_and_most_of_the_model(model: nn.Module, number: int) -> None:
    assert len(find_regions(model, None)) == number
    assert find_regions(model, False) == []


def test_a_model_of_transformers_is_compiled_by_blocks() -> None:
    import transformers_models

    assert len(find_regions(transformers_models.gpt2(), None)) == 2
    assert len(find_regions(transformers_models.bert(), None)) == 2


def test_a_part_of_a_pipeline_is_compiled_by_blocks() -> None:
    model = Trunk()
    model.trunk.to("meta")
    assert len(find_regions(model, None)) == 2
    with pytest.raises(ValueError, match=r"with a pipeline .* has no repeated blocks.*leave torch_compile out"):
        find_regions(nn.Linear(2, 2, device="meta"), None)


def test_a_copy_of_a_compiled_model_is_compiled_again(tmp_path: Path) -> None:
    args = arguments(tmp_path, torch_compile_backend="eager", compile_cache_dir=None)
    model = compile_model(Layered(), args)
    copied = compile_model(pickle.loads(pickle.dumps(copy.deepcopy(model))), args)
    assert all(layer._compiled_call_impl is not None for layer in copied.layers)
    undo_compilation(copied)
    assert all(layer._compiled_call_impl is None for layer in copied.layers)


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_torch_is_given_the_options(tmp_path: Path, backend: str) -> None:
    args = arguments(tmp_path, torch_compile_backend=backend, torch_compile_mode="default", torch_compile_dynamic=True)
    limit = torch._dynamo.config.recompile_limit
    expected = {"backend": backend, "mode": "default", "dynamic": True}
    assert settings_of(args, 1) == expected
    assert settings_of(args, 4) in (expected, {**expected, "recompile_limit": 4 * limit})  # by release of torch


# ---- how often


class Rows(TrainerCallback):
    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.found.append(logs)


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def train_ragged(folder: Path, **options: Any) -> tuple[Any, list[int]]:
    """Trains on 30 batches of 30 lengths; returns the Trainer and the recompilations so far at each log."""
    lengths = torch.randperm(30, generator=torch.Generator().manual_seed(0)) + 2
    ids = [torch.arange(int(length)) % 11 for length in lengths for _ in range(2)]
    rows = Rows()
    trainer = make_trainer(
        folder,
        Layered(),
        [{"input_ids": each, "labels": each} for each in ids],
        data_collator=stacked,
        per_device_train_batch_size=2,
        train_sampling_strategy="sequential",
        num_train_epochs=1,
        logging_steps=5,
        callbacks=[rows],
        **options,
    )
    trainer.train()
    return trainer, [row["compile/recompiles"] for row in rows.found if "compile/recompiles" in row]


@pytest.mark.slow
@pytest.mark.parametrize("regions", [None, pytest.param(False, marks=pytest.mark.slow)], ids=["blocks", "whole"])
@pytest.mark.parametrize(("dynamic", "most"), [(None, 1), (True, 0)])
def test_ragged_batches_compile_a_bounded_number_of_times(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, regions: bool | None, dynamic: bool | None, most: int
) -> None:
    plain, counts = train_ragged(tmp_path / "plain")
    assert counts == []
    with caplog.at_level(logging.INFO, "paceline"):
        compiled, counts = train_ragged(
            tmp_path / "compiled",
            torch_compile=True,
            torch_compile_backend="aot_eager",
            torch_compile_dynamic=dynamic,
            compile_regions=regions,
        )
    assert counts[-1] <= most
    told = [record.message for record in caplog.records if record.message.startswith("Recompiled")]
    assert len(told) == counts[-1]
    assert all("size mismatch at index 1" in line for line in told)
    assert any(record.message.startswith("torch.compile: ") for record in caplog.records)
    torch.testing.assert_close(list(compiled.model.parameters()), list(plain.model.parameters()), rtol=1e-5, atol=1e-6)
    assert not torch._dynamo.callback.callback_handler.start_callbacks


@pytest.mark.slow
def test_recompiling_for_each_shape_ends_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline"):
        _, counts = train_ragged(
            tmp_path,
            torch_compile=True,
            torch_compile_backend="eager",
            torch_compile_dynamic=False,
            compile_regions=False,
        )
    assert counts[-1] == torch._dynamo.config.recompile_limit - 1
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len([line for line in warned if "Leave torch_compile_dynamic=False out" in line]) == 1


def test_cuda_graphs_of_varying_shapes_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = CompileWatch("reduce-overhead")
    try:
        double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
        for size in range(2, 6):
            double(torch.ones(size))
    finally:
        watch.close()
    watch.close()
    assert (watch.num_compilations, watch.num_recompilations) == (4, 3)
    assert caplog.text.count("CUDA graphs") == 1
    double(torch.ones(9))
    assert watch.row({}) == {"compile/recompiles": 3}


def test_reasons_are_short() -> None:
    assert shortened("0/1: tensor 'x' size mismatch\nUser stack trace:") == "tensor 'x' size mismatch"
    assert shortened("0/0: 2 <= x.size()[1]  # f(x)  # a.py:1 in f (user code shown is ...") == (
        "2 <= x.size()[1] # f(x) # a.py:1 in f"
    )
    assert len(shortened("a: " + "x" * 900)) < 220


# ---- activations


def activation_bytes(model: nn.Module, args: TrainingArguments) -> tuple[int, list[Tensor]]:
    """Returns the bytes that a forward pass saves apart from parameters, and the gradients."""
    torch._dynamo.reset()
    saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        base = tensor if tensor._base is None else tensor._base
        saved += 0 if isinstance(base, nn.Parameter) else tensor.nbytes
        return tensor

    compile_model(model, args)
    ids = (torch.arange(64) % 11).view(4, 16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, ids)["loss"]
    loss.backward()
    undo_compilation(model)
    return saved, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.slow
def test_a_memory_budget_keeps_fewer_activations_and_the_gradients(tmp_path: Path) -> None:
    before = torch._functorch.config.activation_memory_budget
    found = [
        activation_bytes(Layered(), arguments(tmp_path, torch_compile_backend="aot_eager", **options))
        for options in ({}, {"activation_memory_budget": 0.8}, {"activation_memory_budget": 0.0})
    ]
    assert found[0][0] > found[1][0] > found[2][0]
    for _, gradients in found[1:]:
        torch.testing.assert_close(gradients, found[0][1], rtol=1e-5, atol=1e-7)
    assert torch._functorch.config.activation_memory_budget == before


class StopAt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"activation_memory_budget": 0.0}], ids=["compiled", "recomputed"])
def test_a_run_has_the_numbers_without_compilation_and_is_resumed_bit_for_bit(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    def train(name: str, *, callbacks: Any = None, resume: bool = False, **chosen: Any) -> Any:
        torch._dynamo.reset()
        trainer = make_trainer(
            tmp_path / name, Layered(), tagging(24), eval_dataset=tagging(8, seed=5), max_steps=4, logging_steps=1,
            per_device_train_batch_size=4, save_strategy="steps", save_steps=2, callbacks=callbacks or [], **chosen,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    options |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    plain, whole = train("plain"), train("whole", **options)
    for name in ("loss", "grad_norm"):
        values = [[row[name] for row in each.state.log_history if name in row] for each in (plain, whole)]
        assert values[1] == pytest.approx(values[0], rel=1e-5)
    assert whole.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    train("parts", callbacks=[StopAt()], **options)
    resumed = train("parts", resume=True, **options)
    assert resumed.state.global_step == 4
    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_offload_needs_compiled_blocks(tmp_path: Path) -> None:
    args = arguments(tmp_path, torch_compile_backend="eager")
    args.activation_offload = True
    with pytest.raises(
        UnsupportedOption, match=r"activation_offload=True with torch_compile=True .* leave one of them"
    ):
        compile_model(nn.Linear(2, 2), args)


# ---- the cache

CACHED = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from compile_job import Layered
from small_models import make_trainer, tagging
from torch._dynamo.utils import counters
options = dict(torch_compile=True, compile_cache_dir=sys.argv[2], max_steps=1, activation_memory_budget=0.5)
make_trainer(Path(sys.argv[3]), Layered(), tagging(8), **options).train()
print("cache", counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"])
"""


@pytest.mark.slow
@needs_compiler
@pytest.mark.nightly
def test_a_second_process_finds_the_compiled_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the processes, which share no other folder: torch's own cache is in a new one for each."""
    found = []
    for number in range(2):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"torch-{number}"))
        support = Path(__file__).resolve().parents[2] / "support"
        words = [sys.executable, "-c", CACHED, str(support), str(tmp_path / "kept"), str(tmp_path / "out")]
        result = subprocess.run(words, check=True, capture_output=True, text=True)
        line = next(line for line in result.stdout.splitlines() if line.startswith("cache "))
        found.append(tuple(map(int, line.split()[1:])))
        (tmp_path / "kept" / file_name(Layered())).stat()
    assert found[0][0] == 0 < found[0][1]
    assert found[1] == (found[0][1], 0)


def test_a_broken_cache_is_compiled_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = CompileCache(str(tmp_path), Layered())
    cache.load()
    assert not caplog.records
    cache.path.write_bytes(b"no artifacts")
    cache.load()
    assert "torch cannot use" in caplog.text
    cache.path.unlink()
    cache.path.mkdir()
    cache.load()
    assert "cannot be read" in caplog.text


def test_models_have_files_of_their_own() -> None:
    assert file_name(Layered()) == file_name(Layered())
    assert len({file_name(model) for model in (Layered(), Layered(2), Layered().double(), Trunk())}) == 4
    assert "/" not in file_name(Layered())


# ---- CUDA graphs, whose hooks run on any device


def test_outputs_of_a_whole_model_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: steps.append(1))
    memory = {"loss": torch.zeros(()), "logits": torch.zeros(2, 2)}
    model = nn.Linear(2, 2)
    model._compiled_call_impl = lambda: memory
    cuda_graphs.keep_outputs(model)
    in_training = model()
    with torch.no_grad():
        in_evaluation = model()
    memory["loss"].fill_(1)
    memory["logits"].fill_(1)
    assert in_training["loss"] == 0
    assert in_training["logits"] is memory["logits"]
    assert in_evaluation["loss"] == 0
    assert not in_evaluation["logits"].any()
    assert len(steps) == 2


def test_steps_are_marked_only_where_graphs_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: steps.append(1))
    model, ids = Layered(), torch.ones(2, 3, dtype=torch.long)
    handle = cuda_graphs.mark_steps(model)
    model(ids, ids)
    handle.remove()
    compile_model(model, arguments(tmp_path, torch_compile_mode="reduce-overhead"))  # on a CPU
    assert not model._forward_pre_hooks
    assert len(steps) == 1
