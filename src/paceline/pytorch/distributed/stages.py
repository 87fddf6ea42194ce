"""Pipeline stages of a model: the interfaces that a model offers, and the stage that owns each part of its state.

A model offers stages in one of two ways:

- A method `pipeline_stages(num_stages)` that returns that many modules made of the model's own submodules. The first
  stage is called with the batch entries that its `forward` names. Each later stage is called with the tensors that the
  previous stage returned, in order, followed by the batch entries that its own `forward` names. A stage returns a
  tensor or a tuple of tensors, all of one floating-point dtype. The last stage returns the model's outputs, including
  the loss if it takes the labels.
- A causal language model of transformers whose configuration has a `base_model_pp_plan`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

HOW_TO_OFFER = (
    "give the model a method pipeline_stages(num_stages) that returns its parts, or share the work in another way "
    "(parallel='fsdp')"
)
SAMPLE_SHAPE = (2, 8)  # (batch, tokens) of the token ids for comparing a transformers model with its stages


class Stage(nn.Module):
    """One part of a model, called with the outputs of the previous part and the batch entries that it names.

    Args:
        module: the part.
        index: index of this stage.
        number: number of all stages.
    """

    def __init__(self, module: nn.Module, index: int, number: int) -> None:
        super().__init__()
        self.module = module
        self.index = index
        self.number = number
        parameters = inspect.signature(module.forward).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._positional = [p.name for p in parameters if p.kind in positional]
        self._keywords = {p.name for p in parameters if p.kind == inspect.Parameter.KEYWORD_ONLY}
        self._takes_all = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters)
        self._takes_any = any(p.kind == inspect.Parameter.VAR_POSITIONAL for p in parameters)

    @property
    def is_last(self) -> bool:
        return self.index == self.number - 1

    def taken(self, batch: Mapping[str, Any], num_received: int) -> dict[str, Any]:
        """Returns the batch entries that the stage takes in addition to its received tensors."""
        if self._takes_all:
            own = set(self._positional[:num_received])
            return {name: value for name, value in batch.items() if name not in own}
        named = self._positional[0 if self._takes_any else num_received :]
        return {name: batch[name] for name in (*named, *self._keywords) if name in batch}

    def forward(self, received: Sequence[Tensor], batch: Mapping[str, Any]) -> Any:
        return self.module(*received, **self.taken(batch, len(received)))

    def hand_on(self, outputs: object) -> tuple[Tensor, ...]:
        """Returns the tensors to send to the next stage. Raises ValueError if they cannot be sent."""
        tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
        kinds = {(value.dtype, value.is_floating_point()) if isinstance(value, Tensor) else None for value in tensors}
        if len(kinds) != 1 or None in kinds or not next(iter(kinds), (None, False))[1]:  # type: ignore[index]
            shown = ", ".join(str(getattr(value, "dtype", type(value).__name__)) for value in tensors)
            raise ValueError(
                f"Stage {self.index} of {self.number} ({type(self.module).__name__}) returned ({shown}): what a stage "
                "hands on is a tensor or a tuple of tensors, of floating point and of one type. The next stage takes "
                "anything else from the batch, by the names of its forward's parameters."
            )
        return tuple(tensors)


def make_stages(model: nn.Module, num_stages: int) -> list[Stage]:
    """Returns all stages of a model.

    Raises:
        ValueError: the model offers no stages, or another number of them.
    """
    offer = getattr(model, "pipeline_stages", None)
    if callable(offer):
        parts = list(offer(num_stages))
        if len(parts) != num_stages or not all(isinstance(part, nn.Module) for part in parts):
            raise ValueError(
                f"{type(model).__name__}.pipeline_stages({num_stages}) returned {len(parts)} values: it must return "
                f"{num_stages} modules. Change it, or the number of processes (pp in parallel)."
            )
    elif has_plan(model):
        parts = decoder_stages(model, num_stages)
    else:
        raise ValueError(f"{type(model).__name__} offers no stages for a pipeline: {HOW_TO_OFFER}.")
    return [Stage(part, index, num_stages) for index, part in enumerate(parts)]


def owners_of(model: nn.Module, stages: Sequence[Stage]) -> dict[str, list[int]]:
    """Returns the stages that hold each parameter and buffer, by its name in the model; a tied parameter has several.

    A buffer that no stage holds, such as one used by the model's own forward, belongs to the first stage.

    Raises:
        ValueError: stages hold parameters that are not the model's, or leave some out.
    """
    holders: dict[int, list[int]] = {}
    for stage in stages:
        for tensor in (*stage.parameters(), *stage.buffers()):
            holders.setdefault(id(tensor), []).append(stage.index)
    own = {id(parameter) for parameter in model.parameters()}
    for stage in stages:
        foreign = [name for name, parameter in stage.module.named_parameters() if id(parameter) not in own]
        if foreign:
            raise ValueError(
                f"Stage {stage.index} of {type(model).__name__} holds {foreign[0]!r}, which is no parameter of the "
                "model: stages are made of the model's own submodules."
            )
    names = {}
    for name, tensor in (*named(model, "parameters"), *named(model, "buffers")):
        names[name] = sorted(set(holders.get(id(tensor), ())))
        if not names[name]:
            if isinstance(tensor, nn.Parameter):
                raise ValueError(
                    f"No stage of {type(model).__name__} holds the parameter {name!r}: every one must be in a stage."
                )
            names[name] = [0]
    return names


def named(model: nn.Module, kind: str) -> list[tuple[str, Tensor]]:
    """Returns all parameters or buffers under each of their names."""
    return list(getattr(model, f"named_{kind}")(remove_duplicate=False))


# ---- causal language models of transformers


class Skipped(nn.Module):
    """Replaces a layer that belongs to another stage; returns its first input."""

    def forward(self, hidden_states: object, *others: Any, **named: Any) -> Any:
        return hidden_states


class DecoderPart(nn.Module):
    """A causal language model of transformers with some of its layers.

    The model's own forward runs in each stage and recomputes masks and positions; layers of other stages return their
    input. The previous stage's output is passed as `inputs_embeds`.
    """

    def __init__(self, model: nn.Module, inner: nn.Module, is_last: bool) -> None:
        super().__init__()
        self.inner = inner
        self.is_last = is_last
        # the full model is not a submodule, because it also holds the layers of the other stages
        self.head = replaced(model, {base_name(model): inner}) if is_last else None

    def forward(self, *received: Tensor, **batch: Any) -> Any:
        if received:
            batch = {**{name: value for name, value in batch.items() if name != "input_ids"}}
            batch["inputs_embeds"] = received[0]
        batch.setdefault("use_cache", False)
        if self.head is not None:
            return self.head(**batch)
        batch = {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}
        return self.inner(**batch).last_hidden_state


def base_name(model: object) -> str:
    """Returns the name of the attribute that holds a model's body."""
    return str(getattr(model, "base_model_prefix", ""))


def has_plan(model: object) -> bool:
    """True if a model of transformers has a pipeline plan."""
    return bool(getattr(getattr(model, "config", None), "base_model_pp_plan", None))


def split_decoder(model: Any, inner: nn.Module, layers: str, num_stages: int) -> list[nn.Module]:
    """Returns the stages of a decoder.

    Modules that its plan names before the layers are on the first stage, those named after them on the last.

    Args:
        model: the model with its head.
        inner: the model without its head.
        layers: name of the module list of the layers.
    """
    plan = list(model.config.base_model_pp_plan)
    before = plan[: plan.index(layers)]
    all_layers = getattr(inner, layers)
    bounds = [round(place * len(all_layers) / num_stages) for place in range(num_stages + 1)]
    parts: list[nn.Module] = []
    for index in range(num_stages):
        own = range(bounds[index], bounds[index + 1])
        changes: dict[str, nn.Module] = {
            layers: nn.ModuleList(layer if i in own else Skipped() for i, layer in enumerate(all_layers))
        }
        for name in plan:
            is_here = index == (0 if name in before else num_stages - 1)
            if name != layers and not is_here:
                changes[name] = Skipped()
        parts.append(DecoderPart(model, replaced(inner, changes), index == num_stages - 1))
    return parts


def decoder_stages(model: Any, num_stages: int) -> list[nn.Module]:
    """Returns the stages of a causal language model of transformers, with about equal numbers of layers.

    Raises:
        ValueError: the model is of another kind, has fewer layers than stages, or its stages compute other outputs.
    """
    plan = dict(model.config.base_model_pp_plan)
    inner = getattr(model, base_name(model), None)
    heads = dict(model.named_children())
    heads.pop(base_name(model), None)
    missing = sorted(set(heads) - set(getattr(model, "_pp_plan", None) or ()))
    layers = [name for name, child in inner.named_children() if isinstance(child, nn.ModuleList)] if inner else []
    if inner is None or missing or len(layers) != 1 or layers[0] not in plan:
        raise ValueError(
            f"{type(model).__name__} has a plan for a pipeline that leaves out {', '.join(missing) or 'its layers'}: "
            f"{HOW_TO_OFFER}."
        )
    all_layers = getattr(inner, layers[0])
    if len(all_layers) < num_stages:
        raise ValueError(
            f"{type(model).__name__} has {len(all_layers)} layers, too few for {num_stages} stages: start fewer "
            "processes, or lower pp in parallel or stages_per_process in pipeline_config."
        )
    parts = split_decoder(model, inner, layers[0], num_stages)
    if not any(parameter.is_meta for parameter in model.parameters()):
        compare(model, parts)
    return parts


def replaced(module: nn.Module, changes: Mapping[str, nn.Module]) -> nn.Module:
    """Returns a shallow copy of a module with some children replaced; it shares parameters, buffers and all else."""
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__ = dict(module.__dict__)
    twin._modules = {**module._modules, **changes}
    return twin


def compare(model: Any, parts: Sequence[nn.Module]) -> None:
    """Runs some tokens through the model and through its stages. Raises ValueError if the outputs differ.

    This detects a model whose own forward does more than its plan describes.
    """
    device = next(model.parameters()).device
    tokens = torch.arange(SAMPLE_SHAPE[0] * SAMPLE_SHAPE[1], device=device).reshape(SAMPLE_SHAPE)
    tokens = tokens % int(model.config.get_text_config().vocab_size)
    modules = {module for root in (model, *parts) for module in root.modules()}
    training = {module: module.training for module in modules}
    devices = [] if device.type in ("cpu", "mps") else [device]
    try:
        for module in modules:
            module.training = False
        with torch.no_grad(), torch.random.fork_rng(devices=devices, device_type=devices[0].type if devices else "cpu"):
            expected = model(input_ids=tokens, use_cache=False).logits
            handed = parts[0](input_ids=tokens)
            for part in parts[1:]:
                handed = part(handed, input_ids=tokens)
        found = getattr(handed, "logits", None)
    finally:
        for module, mode in training.items():
            module.training = mode
    if found is None or not torch.allclose(found.float(), expected.float(), rtol=1e-3, atol=1e-4):
        raise ValueError(
            f"{type(model).__name__} in stages gives other numbers than as a whole, so its plan for a pipeline leaves "
            f"something out: {HOW_TO_OFFER}."
        )
