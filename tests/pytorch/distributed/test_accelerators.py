"""Accelerators of any make, found through `torch.accelerator`; here a stand-in for those that are not at hand."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import distributed

from paceline.callbacks.memory import accelerator_bytes
from paceline.pytorch.data.prefetch import has_pinned_memory
from paceline.pytorch.distributed.random import capture_rng, restore_rng
from paceline.pytorch.distributed.world import choose_backend, choose_device
from paceline.pytorch.optim.choose import free_memory

KINDS = ("cuda", "xpu", "npu", "hpu", "tpu")


class Module(types.SimpleNamespace):
    """A module as a backend registers it as `torch.<type>`: two devices with a generator each, 100 bytes of memory."""

    def __init__(self) -> None:
        self.states = [torch.tensor([1]), torch.tensor([2])]
        super().__init__(
            device_count=lambda: 2,
            is_initialized=lambda: True,
            get_rng_state_all=lambda: [state.clone() for state in self.states],
            set_rng_state_all=self._set,
            mem_get_info=lambda device: (40, 100),
            memory_reserved=lambda device=None: 30,
            memory_allocated=lambda device=None: 10,
        )

    def _set(self, states: list[torch.Tensor]) -> None:
        self.states = states


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The type of the accelerator that torch finds."""
    name: str = request.param
    module = Module()
    chosen: list[int] = []
    device = types.SimpleNamespace(type=name)
    monkeypatch.setattr(torch, name, module, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda asked: module)
    for function, value in {
        "is_available": lambda: True,
        "current_accelerator": lambda: device,
        "current_device_index": lambda: 0,
        "device_count": lambda: 2,
        "set_device_index": chosen.append,
    }.items():
        monkeypatch.setattr(torch.accelerator, function, value)
    monkeypatch.setattr(torch, "device", lambda *words: types.SimpleNamespace(type=words[0], index=(*words, None)[1]))
    return name


def test_each_process_of_a_machine_takes_a_device(kind: str) -> None:
    assert choose_device(use_cpu=True).type == "cpu"
    alone, second = choose_device(use_cpu=False), choose_device(use_cpu=False, local_rank=1)
    assert (alone.type, alone.index) == (kind, 0)
    assert (second.type, second.index) == (kind, 1)
    with pytest.raises(ValueError, match="at most 2 processes"):
        choose_device(use_cpu=False, local_rank=2)


def test_memory_is_that_of_the_device(kind: str) -> None:
    device: Any = types.SimpleNamespace(type=kind)
    assert accelerator_bytes() == 10
    assert free_memory(device) == 40 + 30 - 10
    assert has_pinned_memory()


def test_random_states_of_all_devices_come_back(kind: str) -> None:
    state = capture_rng()
    module: Any = getattr(torch, kind)
    module.states = [torch.tensor([7]), torch.tensor([8])]
    restore_rng(state)
    assert [int(value) for value in module.states] == [1, 2]


@pytest.mark.parametrize(("kind_of_device", "backend"), [("cuda", "nccl"), ("xpu", "xccl"), ("npu", "hccl")])
def test_backends_are_those_that_torch_knows(
    kind_of_device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(distributed.Backend.default_device_backend_map, kind_of_device, backend)
    device: Any = types.SimpleNamespace(type=kind_of_device)
    monkeypatch.setattr(distributed, "get_default_backend_for_device", lambda asked: backend)
    assert choose_backend(None, device) == f"cpu:gloo,{kind_of_device}:{backend}"
    assert choose_backend("own", device) == f"cpu:gloo,{kind_of_device}:own"
