"""Edits of the model before training: what they change, what they leave, and that they can be taken back."""

from __future__ import annotations

import copy
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from paceline.pytorch.model.blocks import repeated_blocks
from paceline.pytorch.model.checkpointing import CheckpointedForward, CheckpointOptions, enable_checkpointing
from paceline.pytorch.model.prepare import compile_model, edited_for_evaluation, prepare_model, undo_compilation


def make_args(**changes):
    defaults = {
        "use_cache": False,
        "activation_checkpointing": False,
        "activation_checkpointing_kwargs": None,
        "neftune_noise_alpha": None,
        "use_liger_kernel": False,
        "liger_kernel_config": None,
        "torch_compile": False,
        "torch_compile_backend": None,
        "torch_compile_mode": None,
        "compile_regions": False,
        "torch_compile_dynamic": None,
        "compile_cache_dir": None,
        "activation_memory_budget": None,
        "activation_offload": False,
        "fp8": False,
        "debug": [],
    }
    return SimpleNamespace(**{**defaults, **changes})


class Block(nn.Module):
    calls = 0

    def __init__(self, width=6, norm=nn.LayerNorm):
        super().__init__()
        self.norm = norm(width)
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden, scale=None):
        Block.calls += 1
        hidden = hidden + self.dropout(torch.tanh(self.linear(self.norm(hidden))))
        return hidden if scale is None else hidden * scale


class Model(nn.Module):
    def __init__(self, norm=nn.LayerNorm, num_blocks=3):
        super().__init__()
        self.positions = nn.Embedding(4, 6)
        self.words = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(Block(norm=norm) for _ in range(num_blocks))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, words):
        hidden = self.words(words) + self.positions(torch.arange(words.shape[-1]))
        for block in self.blocks:
            hidden = block(hidden, scale=self.scale)
        return hidden.square().mean()


WORDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


def make_model(**options):
    torch.manual_seed(0)
    return Model(**options)


def gradients(model, seed=3):
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(WORDS)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def assert_same(mine, other):
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_blocks_of_lists_and_stacks():
    assert [name for name, _ in repeated_blocks(Model())] == ["blocks.0", "blocks.1", "blocks.2"]
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(Block(), Block()), nn.ModuleList([nn.ModuleList([Block()])]))
    assert [name for name, _ in repeated_blocks(net)] == ["1.0", "1.1", "2.0.0"]
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    shared = Block()
    assert [name for name, _ in repeated_blocks(nn.ModuleList([shared, shared]))] == ["0"]


@pytest.mark.parametrize(
    ("options", "num_recomputed"),
    [(None, 3), ({"every_n_layers": 2}, 2), ({"offload": True}, 3), ({"preserve_rng_state": True, "debug": False}, 3)],
)
def test_checkpointing_changes_no_gradient(options, num_recomputed):
    model = make_model()
    expected = gradients(model)
    prepared = prepare_model(model, make_args(activation_checkpointing=True, activation_checkpointing_kwargs=options))
    assert f"{num_recomputed} of 3 repeated blocks (Block)" in prepared.notes[0]
    Block.calls = 0
    assert_same(gradients(model), expected)
    assert Block.calls == 3 + num_recomputed
    assert set(model.state_dict()) == set(make_model().state_dict())
    prepared.undo()
    Block.calls = 0
    assert_same(gradients(model), expected)
    assert Block.calls == 3
    assert all("forward" not in vars(block) for block in model.blocks)


def test_checkpointing_twice_recomputes_once():
    model = make_model()
    enable_checkpointing(model)
    _, undo = enable_checkpointing(model)
    Block.calls = 0
    gradients(model)
    assert Block.calls == 6
    undo()
    assert isinstance(model.blocks[0].forward, CheckpointedForward)


def test_checkpointing_is_off_in_evaluation_and_without_gradients():
    model = make_model()
    enable_checkpointing(model)
    Block.calls = 0
    model.eval()(WORDS).backward()
    with torch.no_grad():
        model.train()(WORDS)
    assert Block.calls == 6


def test_offload_keeps_the_inputs_elsewhere():
    model = make_model()
    enable_checkpointing(model, {"offload": True})
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor
    ):
        model(WORDS)
    inside = len(packed)
    packed.clear()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor
    ):
        make_model()(WORDS)
    assert inside < len(packed)


def test_running_statistics_count_each_batch_once():
    class Norm(nn.BatchNorm1d):
        def forward(self, hidden):
            return super().forward(hidden.flatten(0, 1)).view_as(hidden)

    for momentum in (0.1, None):
        plain, checkpointed = make_model(norm=Norm), make_model(norm=Norm)
        for model in (plain, checkpointed):
            for block in model.blocks:
                block.norm.momentum = momentum
        enable_checkpointing(checkpointed)
        for step in range(3):
            assert_same(gradients(checkpointed, step), gradients(plain, step))
        assert_same(checkpointed.buffers(), plain.buffers())
        assert checkpointed.blocks[0].norm.momentum == momentum
        with pytest.raises(ValueError, match="running statistics"):
            enable_checkpointing(make_model(norm=Norm), {"use_reentrant": True})


def test_a_context_of_the_user_is_kept():
    entered = []

    class Context:
        def __enter__(self):
            entered.append(self)

        def __exit__(self, *_):
            return None

    model = make_model(norm=lambda width: nn.InstanceNorm1d(4, track_running_stats=True))
    enable_checkpointing(model, {"context_fn": lambda: (Context(), Context())})
    gradients(model)
    assert len(entered) == 6


def test_reentrant_refuses_to_lose_a_gradient():
    model = make_model()
    enable_checkpointing(model, {"use_reentrant": True})
    with pytest.raises(ValueError, match="Block is called with scale"):
        model(WORDS)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"every_n_layer": 2}, TypeError, "did you mean 'every_n_layers'"),
        ({"every_n_layers": 0}, ValueError, "every_n_layers=0"),
        ({"function": 1}, TypeError, "no key 'function'"),
    ],
)
def test_unknown_options_of_checkpointing(options, kind, words):
    with pytest.raises(kind, match=words):
        enable_checkpointing(make_model(), options)


def test_a_model_without_blocks_is_told_what_to_do():
    with pytest.raises(ValueError, match="activation_checkpointing_enable"):
        prepare_model(nn.Linear(2, 2), make_args(activation_checkpointing=True))


def test_copies_and_pickles_of_a_checkpointed_model_stand_alone():
    model = make_model()
    enable_checkpointing(model)
    expected = gradients(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            model.blocks[0].linear.weight.zero_()
        assert_same(gradients(twin), expected)
        assert twin.blocks[0].forward.block is twin.blocks[0]
        model = make_model()
        enable_checkpointing(model)


def test_a_forward_set_on_the_instance_is_kept():
    model = make_model()
    model.blocks[0].forward = own = lambda hidden, scale: hidden
    forward = CheckpointedForward(model.blocks[0], CheckpointOptions.read(None))
    forward.attach()
    assert torch.equal(model.blocks[0](torch.ones(2), scale=None), torch.ones(2))
    forward.detach()
    assert model.blocks[0].forward is own


class Asked(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = []

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        self.calls.append(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self):
        self.calls.append("off")


def test_a_model_with_its_own_method_is_asked():
    model = Asked()
    prepared = prepare_model(model, make_args(activation_checkpointing=True))
    assert "Asked.gradient_checkpointing_enable" in prepared.notes[0]
    prepared.undo()
    assert model.calls == [{"use_reentrant": False}, "off"]
    with pytest.raises(ValueError, match="takes no every_n_layers"):
        enable_checkpointing(model, {"every_n_layers": 2})


def tiny_gpt2(**options):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=4, n_embd=8, n_head=2, vocab_size=16, n_positions=8, **options)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def _is_checkpointed(model):
    return any(getattr(block, "gradient_checkpointing", False) for block in model.transformer.h)


def test_a_transformers_model_is_checkpointed_and_set_back():
    model = tiny_gpt2()
    inputs = {"input_ids": WORDS, "labels": WORDS}

    def grads():
        torch.manual_seed(1)
        model.zero_grad()
        model(**inputs).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = grads()
    prepared = prepare_model(
        model, make_args(activation_checkpointing=True, activation_checkpointing_kwargs={"every_n_layers": 2})
    )
    assert _is_checkpointed(model)
    assert sum(block.gradient_checkpointing for block in model.transformer.h) == 2
    assert not model.config.use_cache
    assert_same(grads(), expected)
    with prepared.as_given():
        assert model.config.use_cache
    assert not model.config.use_cache
    prepared.undo()
    assert model.config.use_cache
    assert not _is_checkpointed(model)
    assert not model.get_input_embeddings()._forward_hooks
    prepared.undo()


def test_the_cache_follows_the_argument():
    model = nn.Module()
    model.config = SimpleNamespace(use_cache=True, text_config=SimpleNamespace(use_cache=True))
    with edited_for_evaluation(model, make_args()):
        assert (model.config.use_cache, model.config.text_config.use_cache) == (False, False)
    assert (model.config.use_cache, model.config.text_config.use_cache) == (True, True)
    assert prepare_model(model, make_args(use_cache=True)).notes == []
    model.config = SimpleNamespace()
    prepare_model(model, make_args())
    assert vars(model.config) == {}
    model.config = {"use_cache": True}
    assert prepare_model(model, make_args()).notes == []


def test_neftune_adds_bounded_noise_to_the_words_while_training():
    model = make_model()
    clean = model.words(WORDS)
    prepared = prepare_model(model, make_args(neftune_noise_alpha=5.0))
    assert prepared.notes == ["NEFTune noise (alpha=5.0) on words."]
    noise = model.words(WORDS) - clean
    bound = 5.0 / (4 * 6) ** 0.5
    assert 0.5 * bound < noise.abs().max() <= bound
    assert torch.equal(model.eval().words(WORDS), clean)
    assert torch.equal(model.train().positions(torch.arange(4)), model.positions.weight)
    prepared.undo()
    assert torch.equal(model.words(WORDS), clean)
    with pytest.raises(ValueError, match="get_input_embeddings"):
        prepare_model(nn.Linear(2, 2), make_args(neftune_noise_alpha=5.0))


def test_neftune_equals_the_reference():
    neftune = pytest.importorskip("transformers.integrations.neftune")
    ours, theirs = tiny_gpt2(), tiny_gpt2()
    prepare_model(ours, make_args(neftune_noise_alpha=5.0))
    neftune.activate_neftune(theirs, 5.0)
    torch.manual_seed(4)
    mine = ours.transformer.wte(WORDS)
    torch.manual_seed(4)
    torch.testing.assert_close(mine, theirs.transformer.wte(WORDS))


def test_a_failure_takes_back_what_was_done():
    model = make_model()
    model.config = SimpleNamespace(use_cache=True)
    model.get_input_embeddings = lambda: None
    del model.words, model.positions
    with pytest.raises(ValueError, match="neftune_noise_alpha"):
        prepare_model(model, make_args(activation_checkpointing=True, neftune_noise_alpha=1.0))
    assert model.config.use_cache
    assert "forward" not in vars(model.blocks[0])


@pytest.fixture
def liger(monkeypatch):
    patched = []

    def apply_to_gpt2(rope=True, rms_norm=True, model=None):
        raise AssertionError("called through _apply_liger_kernel_to_instance")

    package, transformers, table = (ModuleType(name) for name in ("lk", "lk.t", "lk.t.m"))
    transformers._apply_liger_kernel_to_instance = lambda model, **options: patched.append((model, options))
    table.MODEL_TYPE_TO_APPLY_LIGER_FN = {"gpt2": apply_to_gpt2}
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", transformers)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", table)
    return patched


def test_liger_patches_the_instance(liger):
    model = nn.Module()
    model.config = SimpleNamespace(model_type="gpt2")
    prepared = prepare_model(model, make_args(use_liger_kernel=True, liger_kernel_config={"rope": False}))
    assert liger == [(model, {"rope": False})]
    assert prepared.notes == ["Liger kernels in Module (rope=False)."]
    adapted = nn.Module()
    adapted.peft_config, adapted.get_base_model = {}, lambda: model
    prepare_model(adapted, make_args(use_liger_kernel=True))
    assert liger[1] == (model, {})


def test_liger_says_what_it_cannot_do(liger):
    model = nn.Module()
    with pytest.raises(ValueError, match="no kernels for Module"):
        prepare_model(model, make_args(use_liger_kernel=True))
    model.config = SimpleNamespace(model_type="gpt2")
    with pytest.raises(TypeError, match="did you mean 'rms_norm'"):
        prepare_model(model, make_args(use_liger_kernel=True, liger_kernel_config={"rmsnorm": True}))


def test_liger_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ImportError, match="liger"):
        prepare_model(make_model(), make_args(use_liger_kernel=True))


# torch's own tracing looks at .grad of tensors that are not leaves; it hides the warning only from the default filter
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compilation_in_place_with_the_same_gradients(regions, checkpointing):
    model = make_model()
    for block in model.blocks:
        block.dropout.p = 0.0
    expected = gradients(model)
    args = make_args(
        torch_compile=True,
        torch_compile_backend="aot_eager",
        compile_regions=regions,
        activation_checkpointing=checkpointing,
    )
    prepared = prepare_model(model, args)
    assert compile_model(model, args) is model
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    assert compiled == ([f"blocks.{index}" for index in range(3)] if regions else [""])
    calls = [module._compiled_call_impl for module in model.modules()]
    compile_model(model, args)
    assert calls == [module._compiled_call_impl for module in model.modules()]
    for mine, other in zip(gradients(model), expected, strict=True):
        torch.testing.assert_close(mine, other)
    prepared.undo()
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_compilation_only_where_asked():
    model = make_model()
    assert compile_model(model, make_args()) is model
    assert model._compiled_call_impl is None
    with pytest.raises(ValueError, match="no repeated blocks"):
        compile_model(nn.Linear(2, 2), make_args(torch_compile=True, compile_regions=True))
    model.compile(backend="eager")
    undo_compilation(model)
    assert model._compiled_call_impl is not None
