"""Mixins for optimizer classes of other packages that would otherwise not train or resume correctly.

`get_optimizer_cls_and_kwargs` returns a package's own class; `adapted` adds the mixins when the optimizer is created.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.optional import require
from paceline.pytorch.distributed.random import preserved_rng
from paceline.pytorch.distributed.world import has_group
from paceline.pytorch.optim.lomo import LomoState
from paceline.pytorch.optim.states import ExactState, with_mixins

if TYPE_CHECKING:
    _Base = ExactState
else:
    _Base = object


class EmbeddingsIn32Bits(_Base):
    """For bitsandbytes: keeps the state of embeddings in 32 bits in 8-bit optimizers, as their gradients require.

    Embeddings are registered with bitsandbytes' `GlobalOptimManager`, of which there is one per process. Its table by
    position would also affect the optimizer of another model, and its list of modules would keep modules alive.
    Therefore positions apply to this optimizer's parameters only, and entries are removed with the optimizer.
    """

    def adapt_to(self, model: nn.Module) -> None:
        """Registers the embeddings of the model that this optimizer trains."""
        manager = self.mng  # type: ignore[attr-defined]
        before = len(manager.module_weight_config_triple)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                for name, _ in module.named_parameters(recurse=False):
                    manager.register_module_override(module, name, {"optim_bits": 32})
        weakref.finalize(self, forget_overrides, manager, manager.module_weight_config_triple[before:])

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Returns bitsandbytes' settings for one parameter."""
        manager = self.mng  # type: ignore[attr-defined]
        own = manager.pid2config.get(id(group["params"][pindex]))
        if manager.index2config.get((gindex, pindex)) is not own:
            manager.index2config.pop((gindex, pindex), None)  # the entry is for another optimizer's parameter
        return super().get_config(gindex, pindex, group)  # type: ignore[misc, no-any-return]


def forget_overrides(manager: Any, entries: list[Any]) -> None:
    """Removes modules from bitsandbytes' manager, with the settings of their parameters."""
    gone = {id(entry) for entry in entries}
    kept = [entry for entry in manager.module_weight_config_triple if id(entry) not in gone]
    manager.module_weight_config_triple[:] = kept
    configs = {id(config) for _, _, config in entries}
    for table in (manager.pid2config, manager.index2config):
        for key in [key for key, config in table.items() if id(config) in configs]:
            del table[key]


class WithoutUpdateNorm(_Base):
    """For galore-torch's 8-bit AdamW, which passes the former percentile clipping by position.

    Since bitsandbytes 0.49, these positions are `max_unorm` and `skip_zeros`, which would limit each step.
    """

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Returns bitsandbytes' settings for one parameter."""
        config: dict[str, Any] = super().get_config(gindex, pindex, group)  # type: ignore[misc]
        config.update(max_unorm=0.0, skip_zeros=False)
        return config


class StateInGroups(_Base):
    """For GrokAdamW, which stores its state by parameter inside the parameter groups, where it cannot be saved."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state by parameter index, as torch does."""
        own = {parameter: entry for group in self.param_groups for parameter, entry in group.get("state", {}).items()}
        numbers: dict[Any, int] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                numbers.setdefault(parameter, len(numbers))
        saved = super().state_dict()
        saved["state"] = {numbers[parameter]: entry for parameter, entry in own.items()}
        for group in saved["param_groups"]:
            group.pop("state", None)
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a saved state.

        A state saved by the original class, as transformers does, is matched by the order of the parameters.

        Raises:
            ValueError: such a state has another number of parameters; or see `ExactState.load_state_dict`.
        """
        super().load_state_dict(state_dict)
        loaded = self.state
        for group in self.param_groups:
            parameters = group["params"]
            theirs = list(group.pop("state", {}).values())
            if theirs and len(theirs) != len(parameters):
                raise ValueError(f"a saved group has a state for {len(theirs)} of {len(parameters)} parameters")
            found = dict(zip(parameters, theirs, strict=False))
            loaded.update(found)  # the same dicts as in the group: a strategy shards the tensors in `state`
            group["state"] = {each: loaded[each] for each in parameters if each in loaded}


class Quietly(ExactState):
    """For GrokAdamW: suppresses the two warnings about the outdated autocast that it enters for each parameter."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Takes one optimizer step."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*torch\.cuda\.amp\.autocast.*")
            warnings.filterwarnings("ignore", message="CUDA is not available.*autocast")
            return super().step(closure)


class RoundsAlike(_Base):
    """For torchao with `bf16_stochastic_round`: all processes round with the same random numbers, given by the step.

    Each process has its own random state, so that its copies of the weights would leave those of the others.
    """

    bf16_stochastic_round: bool

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Takes one optimizer step."""
        if not (self.bf16_stochastic_round and has_group()):
            return super().step(closure)
        with preserved_rng():
            torch.manual_seed(next((int(entry["step"]) for entry in self.state.values() if "step" in entry), 0))
            return super().step(closure)


# ---- mixins by class


def adapt_bitsandbytes(base: type) -> type:
    """Returns a class of bitsandbytes that keeps the state of embeddings in 32 bits."""
    return with_mixins(base, EmbeddingsIn32Bits, ExactState)


def adapt_torchao(base: type) -> type:
    """Returns a class of torchao, whose states are tensor subclasses."""
    kinds = (require(f"torchao.optim.subclass_{bits}bit", "torchao") for bits in (4, 8))
    parts = tuple(getattr(kind, f"OptimState{bits}bit") for kind, bits in zip(kinds, (4, 8), strict=True))
    return with_mixins(base, RoundsAlike, ExactState, parts=parts)


def adapt_galore(base: type) -> type:
    """Returns a class of galore-torch, which stores projectors."""
    mixins = (WithoutUpdateNorm, ExactState) if base.__name__.endswith("8bit") else (ExactState,)
    projector = require("galore_torch.galore_projector", "galore").GaLoreProjector
    return with_mixins(base, *mixins, parts=(projector,))


def adapt_apollo(base: type) -> type:
    """Returns APOLLO's AdamW, which stores projectors."""
    parts = (
        require("apollo_torch.random_projector", "apollo").GradientProjector,
        require("apollo_torch.svd_projector", "apollo").GaLoreProjector,
    )
    return with_mixins(base, ExactState, parts=parts)


def adapt_lomo(base: type) -> type:
    """Returns Lomo or AdaLomo."""
    return with_mixins(base, LomoState, ExactState)


def adapt_grokadamw(base: type) -> type:
    """Returns GrokAdamW."""
    return with_mixins(base, Quietly, StateInGroups, ExactState)


def adapt_state(base: type) -> type:
    """Returns a class whose state torch would cast to the dtype of the weights."""
    return with_mixins(base, ExactState)


ADAPTERS: Mapping[str, Callable[[type], type]] = {
    "apex": adapt_state,
    "apollo_torch": adapt_apollo,
    "bitsandbytes": adapt_bitsandbytes,
    "galore_torch": adapt_galore,
    "grokadamw": adapt_grokadamw,
    "lomo_optim": adapt_lomo,
    "torch_npu": adapt_state,
    "torch_xla": adapt_state,
    "torchao": adapt_torchao,
    "torchdistx": adapt_state,
}
"""Import name of a package -> function from one of its classes to a subclass with mixins."""


def adapted(optimizer_class: object) -> Any:
    """Returns the class to construct: a subclass of the same name for packages in `ADAPTERS`, else the class itself."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        return optimizer_class
    adapt = ADAPTERS.get(optimizer_class.__module__.split(".")[0])
    if adapt is None or issubclass(optimizer_class, ExactState):
        return optimizer_class
    return adapt(optimizer_class)
