import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.args.mesh import Mesh
from paceline.checkpoint.folders import newest_valid, staged, verify
from paceline.pytorch.checkpoint.checkpointer import Checkpointer
from paceline.pytorch.checkpoint.files import load_model, load_rng, load_state, save_model, showable_arguments
from paceline.pytorch.checkpoint.items import RandomStates
from paceline.pytorch.checkpoint.tensors import CheckpointError, load_tensors, save_tensors
from paceline.pytorch.distributed.random import capture_rng, set_seed
from paceline.pytorch.distributed.world import World

torch.set_num_threads(1)


class Tied(nn.Module):
    """A model whose output layer is its embedding, with a buffer and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.body = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)))
        self.scale = random.random()

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


class Bank(nn.Module):
    """A memory of as many rows as there were."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.rand(size, 2))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        rows = state_dict[f"{prefix}rows"]
        if not len(rows):
            raise ValueError("an empty bank")
        self.rows = torch.zeros_like(rows)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def mlp(width: int = 4) -> Any:
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))


class TestModel:
    @pytest.mark.parametrize("max_shard_bytes", [None, 100])
    def test_round_trip_keeps_ties_and_extra_state(self, tmp_path: Path, max_shard_bytes: int | None) -> None:
        model, other = Tied(), Tied()
        save_model(model, tmp_path, max_shard_bytes=max_shard_bytes)
        assert load_model(other, tmp_path) == []
        assert equal(weights_of(model), weights_of(other))
        assert other.head.weight is other.embed.weight
        assert other.scale == model.scale

    def test_untied_model_takes_the_weights_of_a_tied_one(self, tmp_path: Path) -> None:
        model, other = Tied(), Tied()
        other.head.weight = nn.Parameter(torch.zeros(7, 5))
        save_model(model, tmp_path)
        assert load_model(other, tmp_path) == []
        assert torch.equal(other.head.weight, model.embed.weight)

    def test_given_state_is_what_is_stored(self, tmp_path: Path) -> None:
        model = mlp()
        host = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        save_model(model, tmp_path, state_dict=host)
        load_model(model, tmp_path)
        assert all(not value.any() for value in model.state_dict().values())

    @pytest.mark.slow
    def test_compiled_model_stores_and_loads_the_names_inside(self, tmp_path: Path) -> None:
        model = mlp()
        save_model(cast(nn.Module, torch.compile(model, backend="eager")), tmp_path)
        other = mlp()
        assert load_model(other, tmp_path) == []
        assert load_model(cast(nn.Module, torch.compile(mlp(), backend="eager")), tmp_path) == []
        assert equal(weights_of(model), weights_of(other))

    def test_another_dtype_is_converted(self, tmp_path: Path) -> None:
        model = mlp()
        save_model(model.bfloat16(), tmp_path)
        other = mlp()
        load_model(other, tmp_path)
        assert other[0].weight.dtype == torch.float32
        assert torch.equal(other[0].weight, model[0].weight.float())

    def test_buffers_of_another_shape_where_the_module_takes_them(self, tmp_path: Path) -> None:
        """Its own `_load_from_state_dict`, or the model's own `load_state_dict`; elsewhere they are refused."""
        model, other = Bank(3), Bank(5)
        save_model(model, tmp_path)
        assert load_model(other, tmp_path) == []
        assert torch.equal(other.rows, model.rows)
        inside = nn.Sequential(nn.Linear(2, 2), Bank(5))
        save_model(nn.Sequential(nn.Linear(2, 2), model), tmp_path)
        load_model(inside, tmp_path)
        assert torch.equal(inside[1].rows, model.rows)
        plain = nn.Sequential(nn.Linear(2, 2), nn.Module())
        plain[1].register_buffer("rows", torch.ones(5, 2))
        before = {name: value.clone() for name, value in plain.state_dict().items()}
        with pytest.raises(CheckpointError, match=r"other shapes: 1.rows \(3, 2\) instead of \(5, 2\)"):
            load_model(plain, tmp_path)
        assert equal(plain.state_dict(), before)

    def test_a_module_that_refuses_leaves_the_model_as_it_was(self, tmp_path: Path) -> None:
        save_model(nn.Sequential(nn.Linear(2, 2), Bank(0)), tmp_path)
        model = nn.Sequential(nn.Linear(2, 2), Bank(5))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(CheckpointError, match="an empty bank"):
            load_model(model, tmp_path)
        assert equal(model.state_dict(), before)

    def test_missing_and_unexpected_weights_are_told(self, tmp_path: Path) -> None:
        save_model(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), tmp_path)
        notes = load_model(nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2)}), tmp_path)
        assert len(notes) == 2
        assert "lacks weights of the model, which keep their values: c.weight, c.bias" in notes[0]
        assert "does not know and that are left out: b.bias, b.weight" in notes[1]

    def test_other_shapes_are_an_error_and_change_nothing(self, tmp_path: Path) -> None:
        save_model(mlp(4), tmp_path)
        other = mlp(5)
        before = weights_of(other)
        with pytest.raises(CheckpointError, match=r"0\.weight \(4, 3\) instead of \(5, 3\), .*2\.weight"):
            load_model(other, tmp_path)
        assert equal(before, weights_of(other))

    def test_a_checkpoint_of_something_else_is_an_error(self, tmp_path: Path) -> None:
        save_model(nn.ModuleDict({"encoder": nn.Linear(2, 2)}), tmp_path)
        with pytest.raises(CheckpointError, match=r"the checkpoint has encoder\.bias, .*the model has 0\.weight"):
            load_model(mlp(), tmp_path)

    @pytest.mark.parametrize("damage", [b"", b"junk", None])
    def test_damage_is_an_error_and_changes_nothing(self, tmp_path: Path, damage: bytes | None) -> None:
        model = mlp()
        save_model(model, tmp_path)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
        before = weights_of(model)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            load_model(model, tmp_path)
        assert equal(before, weights_of(model))

    def test_no_weights_says_what_is_there(self, tmp_path: Path) -> None:
        (tmp_path / "readme.txt").touch()
        with pytest.raises(CheckpointError, match=r"no weights to load: .* found readme\.txt"):
            load_model(mlp(), tmp_path)
        with pytest.raises(CheckpointError, match="found nothing"):
            load_model(mlp(), tmp_path / "none")

    def test_a_model_that_renames_on_load_decides_itself(self, tmp_path: Path) -> None:
        save_model(nn.ModuleDict({"old": nn.Linear(2, 2)}), tmp_path)
        model: Any = nn.ModuleDict({"new": nn.Linear(2, 2)})

        def rename(_module: nn.Module, state: dict[str, Any], *_: Any) -> None:
            for name in [name for name in state if name.startswith("old.")]:
                state[name.replace("old.", "new.")] = state.pop(name)

        model.register_load_state_dict_pre_hook(rename)
        assert load_model(model, tmp_path) == []

    def test_lazy_modules_take_their_shape(self, tmp_path: Path) -> None:
        model: Any = nn.Sequential(nn.Linear(3, 4))
        save_model(model, tmp_path)
        other: Any = nn.Sequential(nn.LazyLinear(4))
        assert load_model(other, tmp_path) == []
        assert torch.equal(other[0].weight, model[0].weight)

    def test_hostile_pickled_weights_are_not_run(self, tmp_path: Path) -> None:
        torch.save({"0.weight": Hostile(tmp_path / "executed")}, tmp_path / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
            load_model(mlp(), tmp_path)
        assert not (tmp_path / "executed").exists()


class Hostile:
    """Leaves a folder behind when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


class SavesItself(nn.Linear):
    """A model of a library with its own files."""

    def save_pretrained(
        self, folder: str, state_dict: dict[str, Any] | None = None, max_shard_size: Any = "5GB"
    ) -> None:
        Path(folder, "own.txt").write_text(f"{sorted(state_dict or [])} {max_shard_size}")


class TestSavePretrained:
    def test_it_is_called_with_what_it_takes(self, tmp_path: Path) -> None:
        model = SavesItself(1, 1)
        save_model(model, tmp_path / "a")
        assert (tmp_path / "a" / "own.txt").read_text() == "[] 5GB"
        save_model(model, tmp_path / "a", state_dict=model.state_dict(), max_shard_bytes=7)
        assert (tmp_path / "a" / "own.txt").read_text() == "['bias', 'weight'] 7"
        assert os.listdir(tmp_path / "a") == ["own.txt"]

    def test_weights_that_it_cannot_take_are_not_dropped_in_silence(self, tmp_path: Path) -> None:
        class Narrow(nn.Linear):
            def save_pretrained(self, folder: str) -> None:
                Path(folder, "own.txt").touch()

        save_model(Narrow(1, 1), tmp_path)
        with pytest.raises(TypeError, match=r"Narrow\.save_pretrained takes no state_dict"):
            save_model(Narrow(1, 1), tmp_path, state_dict={})

    def test_processing_class_is_stored_beside(self, tmp_path: Path) -> None:
        class Tokenizer:
            def save_pretrained(self, folder: str) -> None:
                Path(folder, "tokenizer.json").touch()

        save_model(mlp(), tmp_path, processing_class=Tokenizer())
        save_model(mlp(), tmp_path, processing_class=lambda text: text)
        assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "tokenizer.json"]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, num_steps: int) -> list[float]:
    losses = []
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(8, 3, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True),
    lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
    lambda parameters: torch.optim.Adafactor(parameters, 0.01),
    lambda parameters: torch.optim.Adagrad(parameters, 0.01),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_training_goes_on_bit_by_bit(tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = mlp()
        optimizer = make(model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 20, cycle_momentum=False)

    torch.manual_seed(0)
    first = build()
    train(*first, 5)
    with staged(tmp_path / "checkpoint-5") as folder:
        save_model(first[0], folder)
        save_tensors(first[1].state_dict(), folder / "optimizer.pt")
        save_tensors(first[2].state_dict(), folder / "scheduler.pt")
    torch.manual_seed(1)
    second = build()
    assert newest_valid(tmp_path, pytest.fail) == tmp_path / "checkpoint-5"
    load_model(second[0], tmp_path / "checkpoint-5")
    load_state(second[1], tmp_path / "checkpoint-5" / "optimizer.pt")
    load_state(second[2], tmp_path / "checkpoint-5" / "scheduler.pt")
    assert train(*first, 5) == train(*second, 5)
    assert equal(weights_of(first[0]), weights_of(second[0]))


def test_scaler(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    save_tensors(scaler.state_dict(), tmp_path / "scaler.pt")
    other = torch.amp.GradScaler("cpu")
    load_state(other, tmp_path / "scaler.pt")
    assert other.get_scale() == 8.0


def test_random_states_go_on(tmp_path: Path) -> None:
    state = {"cpu": torch.get_rng_state(), "python": [3, list(random.getstate()[1]), None]}
    save_tensors(state, tmp_path / "rng_state.pth")
    save_tensors({"cpu": torch.zeros(3)}, tmp_path / "rng_state_1.pth")
    assert sorted(os.listdir(tmp_path)) == ["rng_state.pth", "rng_state_1.pth"]
    loaded = load_rng(tmp_path)
    assert loaded is not None
    assert torch.equal(loaded["cpu"], state["cpu"])  # type: ignore[arg-type]
    assert loaded["python"] == state["python"]


def test_missing_random_state_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_rng(tmp_path, rank=3, world_size=4) is None
    assert "rng_state_3.pth is missing" in caplog.text


@pytest.mark.parametrize(("mesh", "same"), [(Mesh(tp=2), True), (Mesh(dp_replicate=2), False)])
def test_ranks_that_compute_alike_go_on_with_one_random_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: Mesh, same: bool
) -> None:
    """Of a checkpoint whose ranks read different data: with tensor parallelism their masks of dropout must be equal."""
    monkeypatch.setattr("paceline.pytorch.distributed.random.gather_objects", lambda world, value: [value])
    drawn = []
    for rank in (0, 1):
        set_seed(rank)
        torch.save(capture_rng(), tmp_path / f"rng_state_{rank}.pth")
    for rank in (0, 1):
        set_seed(9)
        contents: Any = SimpleNamespace(strategy=SimpleNamespace(mesh=mesh))
        checkpointer: Any = SimpleNamespace(
            contents=contents, world=World(torch.device("cpu"), 2, rank), items={"rng": RandomStates()}
        )
        Checkpointer.load_random_states(checkpointer, tmp_path)
        drawn.append(torch.rand(4))
    assert torch.equal(*drawn) is same


def test_arguments_are_a_plain_dict(tmp_path: Path) -> None:
    save_tensors(
        showable_arguments({"lr": 0.1, "path": Path("x"), "nested": {"dtype": np.dtype("int8")}, "list": (1, None)}),
        tmp_path / "training_args.bin",
    )
    saved = load_tensors(tmp_path / "training_args.bin")
    assert saved == {"lr": 0.1, "path": "x", "nested": {"dtype": "int8"}, "list": [1, None]}


LOADERS: dict[str, Callable[[Path], Any]] = {
    "optimizer.pt": lambda folder: load_state(torch.optim.AdamW(mlp().parameters()), folder / "optimizer.pt"),
    "scheduler.pt": lambda folder: load_state(
        torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(mlp().parameters(), 0.1)), folder / "scheduler.pt"
    ),
    "scaler.pt": lambda folder: load_state(torch.amp.GradScaler("cpu"), folder / "scaler.pt"),
    "rng_state.pth": lambda folder: load_rng(folder),
}


@pytest.mark.parametrize("name", LOADERS)
def test_no_file_runs_code_and_errors_name_it(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "executed"
    torch.save({"state": Hostile(marker)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=name):
        LOADERS[name](tmp_path)
    assert not marker.exists()
    torch.save([1, 2], tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} holds a list"):
        LOADERS[name](tmp_path)
    (tmp_path / name).write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(CheckpointError, match=name):
        LOADERS[name](tmp_path)


def test_state_of_another_optimizer_is_an_error_that_changes_nothing(tmp_path: Path) -> None:
    save_tensors(torch.optim.AdamW(nn.Linear(2, 2).parameters()).state_dict(), tmp_path / "optimizer.pt")
    optimizer = torch.optim.AdamW(mlp().parameters())
    before = optimizer.state_dict()
    with pytest.raises(CheckpointError, match=r"optimizer\.pt does not fit this AdamW"):
        load_state(optimizer, tmp_path / "optimizer.pt")
    assert optimizer.state_dict() == before


def test_state_of_another_kind_of_optimizer_names_what_is_missing(tmp_path: Path) -> None:
    """`momentum` of torch's SGD is the whole number 0 by default."""
    model = mlp()
    save_tensors(torch.optim.AdamW(model.parameters()).state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"does not fit this SGD: group 0 has no momentum"):
        load_state(torch.optim.SGD(model.parameters()), tmp_path / "optimizer.pt")


PLAIN = st.recursive(
    st.none() | st.integers(-2, 2) | st.floats() | st.text(max_size=2) | st.just(torch.ones(2)),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["state", "param_groups", "params", "step", "exp_avg", "lr", 0]), inner)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_wrong_state_is_half_loaded(tmp_path: Path, data: st.DataObject) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer), 1)
    state = optimizer.state_dict()
    before = str(state)
    part = data.draw(st.sampled_from(["all", "state", "param_groups", "one"]))
    if part == "all":
        state = data.draw(st.dictionaries(st.sampled_from(["state", "param_groups"]), PLAIN))
    elif part == "one":
        state = {**state, "state": {**state["state"], 0: {"step": data.draw(PLAIN), "exp_avg": data.draw(PLAIN)}}}
    else:
        state = {**state, part: data.draw(PLAIN)}
    torch.save(state, tmp_path / "optimizer.pt")
    try:
        load_state(optimizer, tmp_path / "optimizer.pt")
    except CheckpointError:
        assert str(optimizer.state_dict()) == before


def test_a_state_that_could_not_be_loaded_again_is_refused_when_saved(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"schedule": lambda step: step}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    with pytest.raises(TypeError, match=r"scheduler\.pt\['schedule'\]"):
        save_tensors(Odd().state_dict(), tmp_path / "scheduler.pt")
    assert os.listdir(tmp_path) == []


def test_a_failed_save_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()

    def save() -> None:
        with staged(tmp_path / "checkpoint-1") as folder:
            save_model(model, folder)
            save_tensors(torch.optim.AdamW(model.parameters()).state_dict(), folder / "optimizer.pt")

    save()
    before = weights_of(model)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", refuse)
    nn.init.zeros_(model[0].weight)
    with pytest.raises(OSError, match="No space"):
        save()
    assert os.listdir(tmp_path) == ["checkpoint-1"]
    assert verify(tmp_path / "checkpoint-1") == []
    load_model(model, tmp_path / "checkpoint-1")
    assert equal(before, weights_of(model))
