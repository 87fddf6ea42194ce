"""Optimizers of other packages, corrected where they would not train right or not resume: mixins for their classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from paceline.optim.states import ExactState

if TYPE_CHECKING:
    _Base = ExactState
else:
    _Base = object


class EmbeddingsIn32Bits(_Base):
    """For bitsandbytes: what 8-bit optimizers keep of embeddings stays in 32 bits, whose gradients need it.

    bitsandbytes has a global table for that, by position or address of a parameter, which would reach the optimizer
    of the next model in the same process too.
    """

    _in_32_bits: frozenset[int] = frozenset()

    def adapt_to(self, model: nn.Module) -> None:
        """Note the embeddings of the model whose parameters these are."""
        self._in_32_bits = frozenset(
            id(parameter)
            for module in model.modules()
            if isinstance(module, nn.Embedding)
            for parameter in module.parameters(recurse=False)
        )

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """bitsandbytes' settings for one parameter."""
        config: dict[str, Any] = super().get_config(gindex, pindex, group)  # type: ignore[misc]
        if id(group["params"][pindex]) in self._in_32_bits:
            config["optim_bits"] = 32
        return config


class WithoutUpdateNorm(_Base):
    """For galore-torch's 8-bit AdamW, which passes what was percentile clipping on by position.

    In bitsandbytes since 0.49 those places are `max_unorm` and `skip_zeros`, which would limit each update.
    """

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """bitsandbytes' settings for one parameter."""
        config: dict[str, Any] = super().get_config(gindex, pindex, group)  # type: ignore[misc]
        config.update(max_unorm=0.0, skip_zeros=False)
        return config


class StateInGroups(_Base):
    """For GrokAdamW, which keeps its state inside the parameter groups, by parameter: no file could hold that."""

    def state_dict(self) -> dict[str, Any]:
        """As torch's: the state by the parameter's number."""
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
        """Take up a saved state; raises as `ExactState.load_state_dict`.

        A state of the class itself, as transformers saves it, goes by the order of the parameters.

        Raises:
            ValueError: such a state is of another number of parameters.
        """
        super().load_state_dict(state_dict)
        loaded = self.state
        for group in self.param_groups:
            parameters = group["params"]
            theirs = list(group.pop("state", {}).values())
            if theirs and len(theirs) != len(parameters):
                raise ValueError(f"a saved group has a state for {len(theirs)} of {len(parameters)} parameters")
            found = dict(zip(parameters, theirs, strict=False))
            group["state"] = found or {each: loaded.pop(each) for each in parameters if each in loaded}
