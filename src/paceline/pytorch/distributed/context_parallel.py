"""Context and sequence parallelism: each process holds a shard of every sequence, and attends to the whole sequence.

The batch is whole on each process until the model is called. Then each process takes its shard, and the outputs are
gathered: the loss is exactly that of the whole sequences, with gradients for the shards.

With context parallelism a differentiable collective gathers keys and values, so that activation memory falls with the
number of shards, except for the keys and values of one layer. With sequence parallelism an all-to-all exchanges tokens
for heads: see `ulysses`. Before the first pass a sample runs through the model whole and sharded, and the results must
be equal: this detects models that mix tokens outside attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from paceline.args.errors import UnsupportedOption
from paceline.core.optional import require
from paceline.pytorch.distributed.context_link import context_of, set_context
from paceline.pytorch.distributed.last_stage import Looking
from paceline.pytorch.distributed.parts_check import IGNORED, Sample, difference, formats_within
from paceline.pytorch.distributed.sequence_checks import check_model, parameter_names, title_of
from paceline.pytorch.distributed.sequence_masks import is_plain, mask_of, narrowest_window, with_itself, within
from paceline.pytorch.distributed.simulated import is_simulated
from paceline.pytorch.distributed.ulysses import attend_by_heads

GATHER = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
NAME = "paceline_context"  # the attention function that models of transformers are given
INPUTS = ("input_ids", "inputs_embeds")


@dataclass
class Pass:
    """The state of a forward pass on sequence shards.

    Attributes:
        length: tokens of the whole sequences, without the padding that makes them divisible.
        own: number of tokens on this process.
        offset: index of the first token on this process.
        total: tokens of the whole sequences with that padding.
        targets: the targets on this process; None if the model does not compute the loss.
        is_scaled: the model divides the loss by the number of targets of the whole optimizer step.
        has_gradient: the pass records gradients.
        num_attended: number of attention calls.
        mask: mask of all tokens, if attention is by heads and not plainly causal.
        has_window: a layer used sliding-window attention.
        windows: masks of such layers, by window size in tokens.
        mode: the `GatheredAttention` in effect, if any.
        has_ended: the model has returned, and code that runs now has its whole outputs.
    """

    length: int
    own: int
    offset: int
    total: int
    targets: Tensor | None = None
    is_scaled: bool = False
    has_gradient: bool = False
    num_attended: int = 0
    mask: Tensor | None = field(default=None, repr=False)
    has_window: bool = False
    windows: dict[int, Tensor] = field(default_factory=dict, repr=False)
    mode: Any = field(default=None, repr=False)
    has_ended: bool = False


class ContextParallel:
    """Runs a model on shards of its sequences.

    Args:
        model: as the user gave it, or sharded; hooks are registered on it.
        mesh: a device mesh with one axis.
        checkpoints: True if activations are recomputed in the backward pass.
        by_heads: True exchanges tokens for heads (`sp`); False gathers keys and values (`cp`).
        reads_outputs: True if a loss is computed of the outputs, although the model gets the labels.

    Raises:
        UnsupportedOption: the model would give wrong results on shards.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, checkpoints: bool, by_heads: bool = False, reads_outputs: bool = False
    ) -> None:
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.group = mesh.get_group()
        self.by_heads, self.reads_outputs = by_heads, reads_outputs
        self.axis = "sp" if by_heads else "cp"
        self.said = f"parallel={{{self.axis!r}: {self.size}}}"
        self.model = model
        self.now = Pass(0, 0, 0, 0, has_ended=True)
        self.names = parameter_names(model)
        check_model(model, self.names, self.said)
        set_context(model, self)
        self.is_of_transformers = hasattr(model, "set_attn_implementation")
        self.is_whole = False  # the current pass runs whole sequences
        self.is_comparing = False  # the current pass runs a sample
        self.counts_present = False  # position_ids count attended tokens only
        self._compared: set[bool] = set()  # with and without an attention_mask
        self._usual_attention = ""
        if self.is_of_transformers:
            self._replace_attention()
        elif checkpoints:
            raise UnsupportedOption(
                f"activation_checkpointing=True with {self.said} is not supported for a model that is not of "
                "transformers: leave it out."
            )
        # before the hook that gathers shards, which is not reentrant
        model.register_forward_pre_hook(self._compare_once, with_kwargs=True, prepend=True)
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)
        model.register_forward_hook(self._leave, always_call=True)
        self._num_hooks = len(model._forward_hooks)  # if there are more later, a user's hook reads the outputs

    def _replace_attention(self) -> None:
        registry: Any = require("transformers", "transformers").AttentionInterface
        masks: Any = require("transformers.masking_utils", "transformers")
        registry.register(NAME, attend_for_transformers)
        masks.AttentionMaskInterface.register(NAME, masks.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        for module in self.model.modules():
            set_context(module, self)
        self._usual_attention = str(self.model.config._attn_implementation)  # type: ignore[union-attr]
        self.model.set_attn_implementation(NAME)  # type: ignore[operator]

    # ---- before the first pass

    def _compare_once(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Compares the outputs of a whole and a sharded sample, once with an attention_mask and once without.

        Collective: all processes compare at the same time and get the same result.

        Raises:
            UnsupportedOption: the outputs differ.
        """
        inputs = {**dict(zip(self.names, args, strict=False)), **kwargs}
        has_mask = isinstance(inputs.get("attention_mask"), Tensor)
        if self.is_whole or has_mask in self._compared or is_simulated():  # a plan has no values to compare
            return
        self._compared.add(has_mask)
        found = next((value for name in INPUTS if isinstance(value := inputs.get(name), Tensor)), None)
        if found is None or found.dim() < 2:
            return  # `_before` refuses these inputs
        positions = inputs.get("position_ids")
        positions = self._positions(found, None) if positions is None else positions
        self._check(inputs, inputs.get("labels"), positions, (found.shape[0], found.shape[1]))
        sample = Sample.of(inputs, found, self.size)
        with Looking(self.model, found.device), self._comparing(), formats_within(self.model) as formats:
            in_parts = self.model(**sample.inputs)  # first: inputs that cannot be sharded are refused by name
            as_whole = self._run_whole(sample)
            wrong = difference(as_whole, in_parts, sample.present, formats)
            if wrong and has_mask and "position_ids" not in inputs and has_place_of_padding(self.model):
                self.counts_present = True
                wrong = difference(as_whole, self.model(**sample.inputs), sample.present, formats)
        if wrong:
            raise UnsupportedOption(
                f"{self.said}: {title_of(self.model)} gives other {wrong} for a sequence in "
                "parts than for the whole. Tokens may meet elsewhere than in attention (convolutions, recurrent "
                "layers, attention written by hand), places may come from elsewhere than position_ids, or the loss may "
                "be no mean over shift_labels. Change the model, or leave it out and share the work in another way "
                "(parallel='fsdp')."
            )

    @contextmanager
    def _comparing(self) -> Iterator[None]:
        self.is_comparing = True
        try:
            yield
        finally:
            self.is_comparing = False

    def _run_whole(self, sample: Sample) -> Any:
        """Returns the outputs of the unmodified model for the sample."""
        inputs = dict(sample.inputs)
        if "use_cache" in self.names:
            inputs["use_cache"] = False
        if not self.is_of_transformers:
            self._fill_in(inputs, sample)
        with self.uncut():
            return self.model(**inputs)

    @contextmanager
    def uncut(self) -> Iterator[None]:
        """Returns a context in which the model takes whole sequences, as generation does."""
        self.is_whole = True
        try:
            if self._usual_attention == "eager":
                self.model.set_attn_implementation("eager")  # type: ignore[operator]
            yield
        finally:
            self.is_whole = False
            if self._usual_attention == "eager":
                self.model.set_attn_implementation(NAME)  # type: ignore[operator]

    def _fill_in(self, inputs: dict[str, Any], sample: Sample) -> None:
        """Adds the inputs that a custom module needs: its mask has the shape (batch, 1, own, all)."""
        number, length = sample.main.shape[:2]
        positions = torch.arange(length, device=sample.main.device)[None].expand(number, length)
        if "attention_mask" in self.names:
            self.now = Pass(length, length, 0, length)
            told = inputs.get("position_ids")
            told = positions if told is None else told
            inputs["attention_mask"] = self._mask(inputs.get("attention_mask"), told, (number, length))
        own: dict[str, Any] = {"position_ids": positions}
        if isinstance(inputs.get("labels"), Tensor):
            own["shift_labels"] = shifted(inputs["labels"])
        for name, parameter in inspect.signature(self.model.forward).parameters.items():
            if name in own and parameter.default is inspect.Parameter.empty:
                inputs.setdefault(name, own[name])

    # ---- around a forward pass

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns this process's shard of the inputs."""
        if self.is_whole:
            return args, kwargs
        inputs = {**dict(zip(self.names, args, strict=False)), **kwargs}
        main = next((inputs[name] for name in INPUTS if isinstance(inputs.get(name), Tensor)), None)
        if main is None or main.dim() < 2:
            raise UnsupportedOption(
                f"{self.said}: the batches hold no {' or '.join(INPUTS)} whose second dimension "
                "could be cut; leave it out."
            )
        number, length = main.shape[:2]
        own = -(-length // self.size)
        self.now = now = Pass(length, own, own * self.rank, own * self.size, has_gradient=torch.is_grad_enabled())
        labels, positions = inputs.get("labels"), inputs.get("position_ids")
        if positions is None:
            positions = self._positions(main, inputs.get("attention_mask"))
        self._check(inputs, labels, positions, (number, length))
        if isinstance(labels, Tensor):
            inputs.setdefault("shift_labels", shifted(labels))
            now.is_scaled = inputs.get("num_items_in_batch") is not None
        mask = self._passed_mask(inputs.get("attention_mask"), positions, (number, length))
        targets = inputs.get("shift_labels")
        inputs = {name: self._part(name, value, length) for name, value in inputs.items()}
        inputs["position_ids"] = self._cut(positions, 1, 0)
        if "attention_mask" in self.names:
            inputs["attention_mask"] = mask
        if "use_cache" in self.names:
            inputs["use_cache"] = False
        if isinstance(targets, Tensor):
            now.targets = inputs["shift_labels"]
            inputs["shift_labels"] = with_target(inputs["shift_labels"], targets)
        if not self.is_of_transformers:
            now.mode = GatheredAttention(self)
            now.mode.__enter__()
        return (), inputs

    def _positions(self, main: Tensor, mask: object) -> Tensor:
        """Returns the positions of tokens that come without position_ids: (batch, tokens)."""
        number, length = main.shape[:2]
        if self.counts_present and isinstance(mask, Tensor) and mask.dim() == 2:
            return mask.long().cumsum(1) * mask.long() - 1
        return torch.arange(length, device=main.device)[None].expand(number, length)

    def _check(self, inputs: Mapping[str, Any], labels: object, positions: Tensor, shape: tuple[int, int]) -> None:
        """Refuses inputs without an entry for each token, and a pass that continues from a cache.

        Raises:
            UnsupportedOption: names the input.
        """
        if isinstance(labels, Tensor) and labels.shape != shape:
            raise UnsupportedOption(
                f"{self.said}: labels of shape {tuple(labels.shape)} for inputs of {shape} are not supported: give a "
                "target for each token, or leave it out."
            )
        if positions.dim() != 2 or positions.shape[1] != shape[1]:
            raise UnsupportedOption(
                f"{self.said}: position_ids of shape {tuple(positions.shape)} for inputs of {shape} are not supported; "
                "leave it out."
            )
        if inputs.get("past_key_values") is not None:
            raise UnsupportedOption(
                f"{self.said}: a pass that goes on from past_key_values is not supported; leave it out, or generate by "
                "predict_with_generate=True, which cuts no sequence."
            )

    def _part(self, name: str, value: object, length: int) -> Any:
        """Returns the shard of an input that has an entry for each token; other inputs unchanged."""
        if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != length:
            return value
        return self._cut(value, 1, IGNORED if name in ("labels", "shift_labels") else 0)

    def _cut(self, tensor: Tensor, dimension: int, dummy_batch: int) -> Tensor:
        """Returns this process's shard of a tensor, padded with `dummy_batch`."""
        missing = self.now.total - tensor.shape[dimension]
        if missing:
            shape = [missing if place == dimension else size for place, size in enumerate(tensor.shape)]
            tensor = torch.cat([tensor, tensor.new_full(shape, dummy_batch)], dimension)
        return tensor.narrow(dimension, self.now.offset, self.now.own).contiguous()

    def _passed_mask(self, given: object, positions: Tensor, shape: tuple[int, int]) -> Tensor:
        """Returns the mask that the model is called with: (batch, 1, own, all)."""
        now = self.now
        if not (self.by_heads and self.is_of_transformers):
            return self._mask(given, positions, shape)
        # only the shape of the returned mask matters: attention uses `now.mask`, or none, for which torch has its
        # fastest kernels. Reading the given mask waits for the device once per pass
        if not is_plain(given, positions):
            now.mask = mask_of(given, positions, now.total, (0, now.total), self.said)
        return positions.new_ones((), dtype=torch.bool).expand(shape[0], 1, now.own, now.total)

    def _mask(self, given: object, positions: Tensor, shape: tuple[int, int]) -> Tensor:
        """Returns the attention mask of this shard's tokens over all: (batch, 1, own, all), True where they attend."""
        rows = (self.now.offset, self.now.own)
        mask = mask_of(given, positions, self.now.total, rows, self.said)
        if not self.is_of_transformers:
            # left padding attends to itself, and its output is unused. Models of transformers may use it in the loss,
            # so there it has nothing to attend to, as without context parallelism
            mask = with_itself(mask, rows)
        return mask.expand(shape[0], -1, -1, -1)

    def _after(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        """Returns the outputs with the loss of the whole sequences; other outputs are gathered if they are read.

        Raises:
            UnsupportedOption: the model does not use torch's attention, or does not pass its sliding window on.
        """
        now = self.now
        if self.is_whole:
            return outputs
        if now.num_attended == 0:
            raise UnsupportedOption(
                f"{self.said}: {title_of(self.model)} did not call "
                "torch.nn.functional.scaled_dot_product_attention, so its tokens would see their own part of a "
                "sequence only; leave it out."
            )
        if not now.has_window and now.length > narrowest_window(getattr(self.model, "config", None)):
            raise UnsupportedOption(
                f"{self.said}: {title_of(self.model)} has a sliding_window in its configuration, and does not hand it "
                "to its attention: set it to None there if its tokens attend to all before them, or leave it out."
            )
        makes_loss = now.targets is not None
        if isinstance(outputs, MutableMapping):
            for name, value in list(outputs.items()):
                outputs[name] = self._whole_loss(value) if makes_loss and name == "loss" else self._together(value)
            return outputs
        if makes_loss and isinstance(outputs, tuple):
            return (self._whole_loss(outputs[0]), *self._together(outputs[1:]))
        return self._whole_loss(outputs) if makes_loss else self._together(outputs)

    def _together(self, nest: object) -> Any:
        """Gathers the outputs that have an entry for each token from all shards, for callers or for a loss."""
        now, makes_loss = self.now, self.now.targets is not None and not self.reads_outputs
        if now.has_gradient and makes_loss and len(self.model._forward_hooks) == self._num_hooks:
            return nest

        def whole(value: object) -> Any:
            if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != now.own:
                return value
            differentiates = now.has_gradient and not makes_loss
            if differentiates:
                return GatherOutputs.apply(value, self)[:, : now.length]  # type: ignore[no-untyped-call]
            return self.gather(value.detach(), 1)[:, : now.length]

        return tree_map(whole, nest)

    def _leave(self, module: nn.Module, args: Any, outputs: object) -> None:
        self.now.has_ended = True
        if self.now.mode is not None:
            self.now.mode.__exit__(None, None, None)
            self.now.mode = None

    def _whole_loss(self, loss: Tensor) -> Tensor:
        """Returns the loss of all shards, with the gradient of this shard's contribution.

        The gradient is multiplied by the number of shards, since gradients are averaged over their processes.
        """
        now = self.now
        assert now.targets is not None
        number = (now.targets != IGNORED).sum()
        # a shard without targets has the loss of a dummy target: its weight is 0, and its gradient is finite
        share = torch.where(number > 0, loss, 0.0)
        if not now.is_scaled:
            total = number.clone()
            distributed.all_reduce(total, group=self.group)
            share = share * (number / total.clamp(min=1))
        whole = share.detach().clone()
        distributed.all_reduce(whole, group=self.group)
        return whole + self.size * (share - share.detach())

    def whole_sums(self, own: Tensor) -> Tensor:
        """Returns sums over the targets of all shards, given those of a cross-entropy on this process.

        A collective within a pass on shards. Code that runs after it has the outputs of all shards, and so the sums.
        The targets of the sample that is compared, and the dummy target of a shard without any, count nothing.
        """
        targets = self.now.targets
        if self.is_comparing:
            return torch.zeros_like(own)
        if self.now.has_ended or self.is_whole or targets is None:
            return own
        whole = torch.where((targets != IGNORED).any(), own, 0.0)
        distributed.all_reduce(whole, group=self.group)
        return whole

    def whole_length(self, own: int) -> int:
        """Returns the tokens of the whole sequences in the latest pass, of which modules see `own` tokens each."""
        return own if self.is_whole else self.now.length or own

    # ---- attention

    def gather(self, tensor: Tensor, dimension: int) -> Tensor:
        """Gathers the shards of all processes, in order; differentiable."""
        whole = GATHER(tensor.contiguous(), dimension, self.group)
        waited: Tensor = functional.wait_tensor(whole)  # type: ignore[no-untyped-call]
        return waited

    def attend(self, attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
        """Runs attention of the queries here over the keys and values of all shards: (..., tokens, features)."""
        return attention(query, self.gather(key, key.dim() - 2), self.gather(value, value.dim() - 2), mask)

    def attend_for_transformers(
        self,
        attention: Any,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        options: Mapping[str, Any],
    ) -> Any:
        """Runs transformers' attention function `attention` on shards; the model has passed on `attention_mask`.

        Raises:
            UnsupportedOption: the layer uses an option that is not supported, or its own mask.
        """
        refused = [n for n in ("softcap", "s_aux", "position_bias") if options.get(n) is not None]
        if refused or attention_mask is None or attention_mask.shape[-1] != self.now.total:
            what = refused[0] if refused else "masks of its own"
            raise UnsupportedOption(
                f"{self.said}: {type(module).__name__} attends with {what}, which is not supported; leave it out."
            )

        self.now.num_attended += 1
        mask, window = self.now.mask if self.by_heads else attention_mask, options.get("sliding_window")
        self.now.has_window |= window is not None
        if window is not None and mask is not None:
            mask = self._within(mask, window)
        if self.by_heads:
            drawn = {"dropout_p": options.get("dropout", 0.0), "scale": options.get("scaling")}
            window = window if window is not None and window < self.now.total else None  # a wider window masks nothing
            seen = attend_by_heads(query, key, value, mask, self.size, self.group, window, **drawn)
            return seen.transpose(1, 2).contiguous(), None

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
            return attention(module, query, key, value, mask, **{**options, "is_causal": False})

        return self.attend(attend, query, key, value, mask)

    def _within(self, mask: Tensor, window: int) -> Tensor:
        """Returns the mask of a layer with a sliding window; made once per pass."""
        now = self.now
        if window not in now.windows:
            now.windows[window] = within(mask, (0, now.total) if self.by_heads else (now.offset, now.own), window)
        return now.windows[window]


def attend_for_transformers(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Any:
    """Replaces transformers' attention function: sharded inside a context-parallel pass, else unchanged."""
    attention: Any = require("transformers.integrations.sdpa_attention", "transformers").sdpa_attention_forward
    context = context_of(module)
    if context is None or context.is_whole:
        return attention(module, query, key, value, attention_mask, **options)
    return context.attend_for_transformers(attention, module, query, key, value, attention_mask, options)


def has_place_of_padding(model: nn.Module) -> bool:
    """True if a model's position embeddings start at an offset, with -1 for padding, as in OPT."""
    return any(isinstance(each, nn.Embedding) and bool(getattr(each, "offset", 0)) for each in model.modules())


def shifted(labels: Tensor) -> Tensor:
    """Returns the target of each token: the label of the next token, and no target for the last."""
    return nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def with_target(part: Tensor, whole: Tensor) -> Tensor:
    """Returns the targets of a shard. If it has none, its first becomes a dummy target, so that a mean is finite."""
    part = part.clone()
    part[0, 0] = torch.where((part != IGNORED).any(), part[0, 0], whole.max().clamp(min=0))
    return part


class GatheredAttention(TorchFunctionMode):
    """A context in which torch's attention runs over the keys and values of all shards."""

    def __init__(self, context: ContextParallel) -> None:
        self.context = context

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is not nn.functional.scaled_dot_product_attention:
            return function(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value = (given.pop(name) for name in names[:3])
        mask, is_causal = given.pop("attn_mask", None), given.pop("is_causal", False)
        context, now = self.context, self.context.now
        now.num_attended += 1
        if is_causal and context.by_heads:
            mask = None
        elif is_causal:
            keys = torch.arange(now.total, device=query.device)
            mask = keys[None, :] <= keys.narrow(0, now.offset, now.own)[:, None]
        elif mask is None or mask.shape[-1] != now.total:
            raise UnsupportedOption(
                f"{context.said}: attention that is not causal needs the attention_mask that the "
                "model is called with, (batch, 1, own tokens, all tokens): pass it on, set is_causal=True, or leave it "
                "out."
            )

        if context.by_heads:
            if mask is not None:  # gather the rows of all processes; as bytes, since booleans have no gradient
                mask = context.gather(mask.byte() if mask.dtype == torch.bool else mask, mask.dim() - 2).to(mask.dtype)
            return attend_by_heads(query, key, value, mask, context.size, context.group, **given)

        def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
            return function(query, key, value, attn_mask=mask, **given)

        return context.attend(attention, query, key, value, mask)


class GatherOutputs(torch.autograd.Function):
    """Gathers the outputs of all shards, for a loss over the whole on every process; backward keeps this shard's
    gradient.
    """

    @staticmethod
    def forward(saved: Any, value: Tensor, context: ContextParallel) -> Tensor:  # type: ignore[override]
        saved.context, saved.now = context, context.now
        return context.gather(value.detach(), 1)

    @staticmethod
    def backward(saved: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        part = gradient.narrow(1, saved.now.offset, saved.now.own)
        return part * saved.context.size, None  # gradients are averaged over the processes of the shards
