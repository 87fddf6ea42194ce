"""Optimizers of other packages, without the packages: what is said where one is missing, and stand-ins for those that
cannot be had here. With the packages: tests/pytorch/trainer/test_library_optimizers.py."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from paceline.args.choices import OptimizerNames
from paceline.args.errors import UnsupportedOption
from paceline.core.apex import has_apex, require_apex
from paceline.pytorch.optim.adapted import RoundsAlike
from paceline.pytorch.optim.layerwise import LayerwiseOptimizer, check_run
from paceline.pytorch.optim.libraries import EXTRA_OF, FROM_LIBRARIES, projected
from paceline.pytorch.optim.low_rank import apply_targets, find_targets, low_rank_groups
from paceline.pytorch.optim.modes import evaluation_weights, switch_optimizer
from paceline.pytorch.optim.optimizers import OPTIMIZERS, create_optimizer, resolve_optimizer
from paceline.pytorch.optim.shards import check_shards
from paceline.pytorch.optim.states import ExactState, with_mixins

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    *("bitsandbytes", "torchao", "galore_torch", "apollo_torch", "lomo_optim", "grokadamw", "schedulefree", "optimi"),
    *("torch_xla", "torch_npu", "torchdistx", "apex"),
)
PLAN: dict[str, Any] = {
    "accumulation_steps": 1,
    "precision": "full",
    "nonfinite_policy": "warn",
    "world_size": 1,
    "max_grad_norm": 0,
}


def make_args(**changes: Any) -> SimpleNamespace:
    defaults = {
        "optim": "adamw_torch_fused",
        "optim_args": None,
        "optim_target_modules": None,
        "learning_rate": 1e-3,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "warmup_steps": 0,
        "max_steps": -1,
    }
    return SimpleNamespace(**{**defaults, **changes})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.self_attn = nn.ModuleDict({"q_proj": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
        self.mlp = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mlp(torch.tanh(self.self_attn["norm"](self.self_attn["q_proj"](x)))))


@pytest.mark.parametrize("name", FROM_LIBRARIES)
def test_a_missing_package_is_named_with_its_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES:
        for module in [key for key in sys.modules if key.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, package, None)
    entry = FROM_LIBRARIES[name]
    targets = ["mlp"] if entry.targets else None
    with pytest.raises(ImportError) as caught:
        resolve_optimizer(make_args(optim=name, optim_target_modules=targets), Block())
    message = str(caught.value)
    assert message.startswith(f"optim={name!r}: ")
    if entry.package in EXTRA_OF:
        assert f'pip install "paceline[{EXTRA_OF[entry.package]}]"' in message
    else:
        assert "install" in message or "build" in message
        assert "pip install" not in message


def test_extras_are_there_and_all_in_one() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for package, extra in EXTRA_OF.items():
        assert any(package in requirement for requirement in extras[extra])
    assert extras["optimizers"] == [f"paceline[{','.join(EXTRA_OF.values())}]"]


def test_every_name_of_the_arguments_has_an_entry() -> None:
    assert {member.value for member in OptimizerNames} == {*OPTIMIZERS, "auto"}


def test_the_page_of_optimizers_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("optimizers_tool", ROOT / "tools" / "optimizers.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.PAGE.read_text("utf-8")
    assert text == tool.with_table(text), "run python tools/optimizers.py"


# ---- stand-ins

MODULE = """
import torch
class {name}(torch.optim.AdamW):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0{more}):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.seen = dict({seen})
"""
FORMATS = ("use_kahan_summation", "momentum_dtype", "variance_dtype", "compensation_buffer_dtype")
STAND_INS = {
    "adamw_torch_xla": ("torch_xla/amp/syncfree.py", "AdamW", ()),
    "adamw_torch_npu_fused": ("torch_npu/optim.py", "NpuFusedAdamW", ()),
    "adamw_apex_fused": ("apex/optimizers.py", "FusedAdam", ()),
    "adamw_anyprecision": ("torchdistx/optimizers.py", "AnyPrecisionAdamW", FORMATS),
}


def forget_packages() -> None:
    """Take the packages, or their stand-ins, out of what was imported."""
    for module in [key for key in sys.modules if key.split(".")[0] in PACKAGES]:
        del sys.modules[module]


@pytest.fixture
def _stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for path, name, options in STAND_INS.values():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in [file.parent, *file.parent.parents]:
            if folder == tmp_path:
                break
            (folder / "__init__.py").touch()
        more = "".join(f", {option}=None" for option in options)
        file.write_text(MODULE.format(name=name, more=more, seen=", ".join(f"{each}={each}" for each in options)))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {key: module for key, module in sys.modules.items() if key.split(".")[0] in PACKAGES}
    forget_packages()
    yield
    forget_packages()
    sys.modules.update(before)


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_trains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = make_args(optim=name, adam_beta1=0.8)
    if OPTIMIZERS[name].devices:
        with pytest.raises(ValueError, match=f"optim='{name}' runs on .* only, and the model is on 'cpu'"):
            resolve_optimizer(args, Block())
        monkeypatch.setattr("paceline.pytorch.optim.optimizers._check_device", lambda *given: None)
    model = Block()
    before = model.mlp.weight.clone()
    optimizer: Any = create_optimizer(args, model)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.999)
    assert isinstance(optimizer, ExactState)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.mlp.weight)


@pytest.mark.usefixtures("_stand_ins")
@pytest.mark.parametrize("name", STAND_INS)
def test_the_class_that_is_named_is_the_packages_own(name: str) -> None:
    path, class_name, _ = STAND_INS[name]
    found, _ = resolve_optimizer(make_args(optim=name))
    own = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), class_name)
    assert found is own
    made = create_optimizer(make_args(), Block(), cls_and_kwargs=(own, {"lr": 0.1}))  # as a user hands it over
    assert isinstance(made, own)
    assert isinstance(made, ExactState)


def test_a_package_that_is_mocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in tests of code that never makes the optimizer."""
    mocked = Mock()
    for module, content in {"bitsandbytes": mocked, "bitsandbytes.optim": mocked.optim}.items():
        monkeypatch.setitem(sys.modules, module, content)
    found, settings = resolve_optimizer(make_args(optim="paged_adamw_8bit"))
    assert found is mocked.optim.AdamW
    assert settings == {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "optim_bits": 8, "is_paged": True}


@pytest.mark.usefixtures("_stand_ins")
def test_types_of_anyprecision() -> None:
    args = make_args(optim="adamw_anyprecision", optim_args="variance_dtype=bfloat16,use_kahan_summation=yes")
    optimizer: Any = create_optimizer(args, Block())
    assert optimizer.seen == {
        "use_kahan_summation": True,
        "momentum_dtype": torch.float32,
        "variance_dtype": torch.bfloat16,
        "compensation_buffer_dtype": torch.bfloat16,
    }
    with pytest.raises(ValueError, match=r"momentum_dtype='b16' is no torch dtype"):
        create_optimizer(make_args(optim="adamw_anyprecision", optim_args="momentum_dtype=b16"), Block())


def test_an_unrelated_package_named_apex_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [key for key in sys.modules if key.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, module)
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not has_apex("amp")
    with pytest.raises(ImportError, match="NVIDIA's source") as caught:
        require_apex("amp")
    assert "pip install" not in str(caught.value)


# ---- low rank


def test_targets_by_part_of_a_name_by_pattern_and_all() -> None:
    model = Block()

    def found(targets: Any) -> set[str]:
        return find_targets(model, make_args(optim="galore_adamw", optim_target_modules=targets))

    assert found(["attn", "mlp"]) == {"self_attn.q_proj.weight", "mlp.weight"}
    assert found(r".*\.q_proj") == {"self_attn.q_proj.weight"}
    assert found("all-linear") == found("all_linear") == {"self_attn.q_proj.weight", "mlp.weight", "head.weight"}
    with pytest.raises(ValueError, match=r"\['decoder'\] names no linear layer of Block; it has self_attn.q_proj, mlp"):
        found(["decoder"])
    with pytest.raises(ValueError, match="set optim_target_modules to a list of parts of module names"):
        found(None)
    with pytest.raises(TypeError, match="optim_target_modules=3 must be"):
        found(3)


def test_groups_with_and_without_decay() -> None:
    model = Block()
    args = make_args(optim="galore_adamw", optim_target_modules=["mlp"])
    plain = low_rank_groups(model, args, {"rank": 2}, 0.0)
    assert [(len(group["params"]), group.get("rank")) for group in plain] == [(6, None), (1, 2)]
    decayed = low_rank_groups(model, args, {"rank": 2}, 0.1)
    assert [(len(group["params"]), group["weight_decay"], group.get("rank")) for group in decayed] == [
        (2, 0.1, None),
        (4, 0.0, None),
        (1, 0.1, 2),
    ]
    _, kwargs = apply_targets(torch.optim.AdamW, {"weight_decay": 0.2}, model, args, {"rank": 2})  # of `optim_args`
    assert [group["weight_decay"] for group in kwargs["params"]] == [0.2, 0.0, 0.2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"proj_type": "up"}, "proj_type='up' is invalid; choose from std"),
        ({"rank": 0}, "rank=0 must be a whole number"),
        ({"update_proj_gap": 1.5}, "update_proj_gap=1.5"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    defaults = {"rank": 4, "update_proj_gap": 2, "proj_type": "std"}
    args = make_args(optim="galore_adamw", optim_target_modules=["mlp"])
    with pytest.raises(ValueError, match=words):
        projected(defaults, lambda args: {}, (torch.optim.SGD, {}), args, Block(), options)


# ---- steps inside backward


def inside(model: nn.Module, **settings: Any) -> LayerwiseOptimizer:
    return LayerwiseOptimizer([{"params": list(model.parameters())}], torch.optim.AdamW, **settings)


def test_layerwise_equals_one_optimizer_of_the_class() -> None:
    ours, theirs = Block(), Block()
    layerwise = inside(ours, lr=0.01)
    together = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    for step in range(4):
        for group in (*layerwise.param_groups, *together.param_groups):
            group["lr"] = 0.01 / (step + 1)
        layerwise.fused_backward(ours(x).square().sum(), 0.0)
        assert all(parameter.grad is None for parameter in ours.parameters())
        layerwise.step()
        theirs(x).square().sum().backward()
        together.step()
        together.zero_grad()
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    assert layerwise.state_dict()["state"].keys() == together.state_dict()["state"].keys()
    again = Block()
    again.load_state_dict(ours.state_dict())
    resumed = inside(again, lr=0.5)
    resumed.load_state_dict(copy.deepcopy(layerwise.state_dict()))
    for model, optimizer in ((ours, layerwise), (again, resumed)):
        optimizer.fused_backward(model(x).square().sum(), 0.0)
    assert all(map(torch.equal, ours.parameters(), again.parameters()))


def test_other_backward_passes_and_other_optimizers_are_left_alone() -> None:
    model = Block()
    first = inside(model, lr=0.1)
    before = [parameter.clone() for parameter in model.parameters()]
    model(torch.ones(2, 4)).sum().backward()
    assert all(map(torch.equal, before, model.parameters()))
    assert model.mlp.weight.grad is not None
    model.zero_grad()
    second = inside(model, lr=0.1)
    second.fused_backward(model(torch.ones(2, 4)).sum(), 0.1)
    assert len(first.state) == 0
    assert len(second.state) == 7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accumulation_steps": 2}, "gradient_accumulation_steps=2: optim='x' .LayerwiseOptimizer. updates"),
        ({"precision": "fp16"}, "fp16=True"),
        ({"precision": "apex-O1"}, "fp16=True"),
        ({"nonfinite_policy": "skip"}, "nonfinite_policy='skip'"),
        ({"world_size": 2}, "over 2 processes"),
        ({"max_grad_norm": 0.5}, "max_grad_norm=0.5.*set max_grad_norm=0"),
    ],
)
def test_what_needs_all_gradients_is_refused(changes: dict[str, Any], words: str) -> None:
    plan = SimpleNamespace(**{**PLAN, **changes})
    with pytest.raises(ValueError, match=words):
        check_run(inside(Block(), lr=0.1), "x", plan)
    check_run(torch.optim.SGD(Block().parameters()), "x", plan)


def test_the_default_norm_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    check_run(inside(Block(), lr=0.1), "x", SimpleNamespace(**{**PLAN, "max_grad_norm": 1.0}))
    assert "they are not clipped" in caplog.text
    caplog.clear()
    check_run(inside(Block(), lr=0.1), "x", SimpleNamespace(**PLAN))
    assert not caplog.text


# ---- states


class Rotation:
    """An object in an optimizer's state, as low-rank optimizers keep it."""

    def __init__(self, matrix: torch.Tensor, kind: str) -> None:
        self.matrix, self.kind = matrix, kind


class KeepsObjects(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("rotation", Rotation(torch.ones(2), "left"))
                self.state[parameter].setdefault("average", torch.full((3,), 1 / 3))


def test_states_are_plain_values_and_come_back_in_their_types() -> None:
    kept = with_mixins(KeepsObjects, ExactState, parts=(Rotation,))
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = kept([parameter], lr=0.5)
    optimizer.step()
    saved = optimizer.state_dict()
    assert isinstance(saved["state"][0]["rotation"], dict)
    other = kept([parameter], lr=0.1)
    other.load_state_dict(saved)
    entry = other.state[parameter]
    assert isinstance(entry["rotation"], Rotation)
    assert entry["rotation"].kind == "left"
    assert torch.equal(entry["average"], torch.full((3,), 1 / 3))  # float32: not rounded to the weights' type
    assert other.param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="keeps no 'Rotation' in its state"):
        with_mixins(KeepsObjects, ExactState)([parameter]).load_state_dict(saved)
    with pytest.raises(ValueError, match="parameter groups"):
        kept([{"params": [parameter]}, {"params": [nn.Parameter(torch.zeros(1))]}]).load_state_dict(saved)


class TwoSets(torch.optim.SGD):
    """Averages the weights while they are evaluated, with rounding on the way back."""

    mode = "train"

    def eval(self) -> None:
        if self.mode == "train":
            for parameter, entry in self.state.items():
                parameter.data.mul_(entry["factor"])
        self.mode = "eval"

    def train(self) -> None:
        if self.mode == "eval":
            for parameter, entry in self.state.items():
                parameter.data.div_(entry["factor"])
        self.mode = "train"


def test_weights_to_train_come_back_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(1000, generator=generator))
    optimizer = TwoSets([parameter], lr=0.1)
    optimizer.state[parameter]["factor"] = torch.tensor(0.3)
    before = parameter.detach().clone()
    with evaluation_weights(optimizer, is_training=True):
        shown, saved = parameter.detach().clone(), optimizer.state_dict()
        saved = {**saved, "state": {key: dict(entry) for key, entry in saved["state"].items()}}
    assert torch.equal(parameter, before)
    assert not torch.equal(shown, before)
    assert list(optimizer.state[parameter]) == ["factor"]

    resumed = nn.Parameter(shown)
    other = TwoSets([resumed], lr=0.1)
    other.mode = "eval"
    other.load_state_dict(saved)
    switch_optimizer(other, "train")
    assert torch.equal(resumed, before)


def test_warmup_as_a_share_needs_a_length(caplog: pytest.LogCaptureFixture) -> None:
    settings = OPTIMIZERS["schedule_free_sgd"].settings
    with pytest.raises(ValueError, match=r"warmup_steps=0.1 is a share"):
        settings(make_args(optim="schedule_free_sgd", warmup_steps=0.1))
    args = make_args(optim="schedule_free_sgd", warmup_steps=0.1, max_steps=50, lr_scheduler_type="linear")
    args.get_warmup_steps = lambda steps: 5
    assert settings(args)["warmup_steps"] == 5
    assert "lr_scheduler_type='constant'" in caplog.text


def test_steps_in_the_order_of_all_parameters_are_refused_in_a_stage() -> None:
    """The parameters of other stages of a pipeline have no values."""
    ordered: Any = type("GrokAdamW", (torch.optim.SGD,), {"__module__": "grokadamw.grokadamw"})
    here, elsewhere = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))
    for parameters in ([here], [elsewhere]):
        check_shards(ordered(parameters, lr=0.1), "grokadamw")
    check_shards(torch.optim.SGD([here, elsewhere], lr=0.1), "sgd")
    with pytest.raises(UnsupportedOption, match=r"optim='grokadamw' \(GrokAdamW\) in a pipeline is not supported"):
        check_shards(ordered([here, elsewhere], lr=0.1), "grokadamw")


class Rounding(torch.optim.SGD):
    """Moves its weights at random, as torchao rounds them."""

    bf16_stochastic_round = True

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] = self.state[parameter].get("step", torch.tensor(0.0)) + 1
            parameter.data.add_(torch.rand(3))


def test_weights_are_rounded_alike_on_all_processes() -> None:
    """Processes have other random states, and must have the same weights; one process rounds as torchao does."""
    kind = with_mixins(Rounding, RoundsAlike)

    def steps(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = kind([parameter], lr=0.1)
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        optimizer.step()
        first = parameter.detach().clone()
        optimizer.step()
        changes_state = not torch.equal(torch.get_rng_state(), state)
        assert changes_state is not torch.distributed.is_initialized()
        return first, parameter.detach() - first

    assert not torch.equal(steps(0)[0], steps(1)[0])
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        one, other = steps(0), steps(1)
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert not torch.allclose(one[0], one[1])
