"""Tensor parallelism: a model's matrices are split over processes that compute on the same data (arXiv:1909.08053).

A plan maps module names to styles. Modules outside the plan stay whole on every process, but their parameters become
DTensors too, so that optimizers and clipping see tensors of one mesh.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from paceline.args.errors import UnsupportedOption, did_you_mean

Plan = Mapping[str, Any]
WHOLE, SUMMED = "replicate", "replicated_with_grad_allreduce"
# the styles of transformers' plans -> torch's styles
STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "colwise_rep": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    "rowwise_rep": partial(RowwiseParallel, input_layouts=Replicate()),
    "embedding_rowwise": partial(RowwiseParallel, input_layouts=Replicate()),
    "embedding_colwise": partial(ColwiseParallel, output_layouts=Replicate()),
}
HEADS = ("num_attention_heads", "num_key_value_heads")


def plan_of(model: nn.Module, given: Plan | None) -> Plan:
    """Returns the plan to apply: the user's, else the model's own.

    Raises:
        ValueError: there is no plan.
    """
    plan = given or getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not plan:
        raise ValueError(
            f"parallel={{'tp': ...}}: {type(model).__name__} has no plan of its own. Say with tp_plan which modules "
            f"are cut and how, as in tp_plan={{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}}; the styles are "
            f"{', '.join((*STYLES, WHOLE, SUMMED))}."
        )
    return dict(plan)


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> int:
    """Splits the model in place. Returns the number of modules that were split.

    Args:
        model: the whole model, on every process; the weights of the first process of each group are used.
        mesh: a device mesh with one axis.
        plan: maps patterns of module names, in which `*` stands for one part of a name, to the name of a style or a
            ParallelStyle of torch.

    Raises:
        ValueError: the plan names modules that the model lacks, or that are not evenly divisible.
        UnsupportedOption: a style or a kind of module is not supported.
    """
    check_heads(model, mesh.size())
    tied = tied_names(model)
    styles = add_tied(model, styles_of(model, plan), tied)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    summed = {name for name, style in styles.items() if style == SUMMED}
    num_cut = 0
    for name, style in styles.items():
        if style not in (WHOLE, SUMMED):
            module = model.get_submodule(name)
            check_module(name, module, style, mesh.size())
            earlier = list(module._forward_hooks) if isinstance(module, nn.Embedding) else []
            parallelize_module(module, mesh, STYLES[style]() if isinstance(style, str) else style)
            for key in earlier:  # which change the output, as NEFTune does: it is whole after torch's own hook
                module._forward_hooks[key] = module._forward_hooks.pop(key)
            num_cut += 1
    for names in tied:
        tie_again(model, names, mesh)
    keep_whole(model, mesh, summed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])
    return num_cut


def styles_of(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """Returns the style of each module that the plan names.

    Raises:
        ValueError: a pattern of a user's plan matches no module, or no pattern matches at all.
        UnsupportedOption: a style is unknown.
    """
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, Any] = {}
    is_own = any(plan == dict(getattr(model, attribute, None) or {}) for attribute in ("tp_plan", "_tp_plan"))
    for pattern, style in plan.items():
        fits = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        hits = [name for name in names if fits.fullmatch(name)]
        if not hits and not is_own:  # a model's own plan may name parts that this model size lacks
            hint = near(pattern, names)
            raise ValueError(f"tp_plan: no module of {type(model).__name__} is called {pattern!r}{hint}.")
        known = (*STYLES, WHOLE, SUMMED)
        if hits and not isinstance(style, ParallelStyle) and style not in known:
            raise UnsupportedOption(
                f"tp_plan={{{pattern!r}: {style!r}}} is not supported: use {', '.join(known)}, or a ParallelStyle of "
                "torch; a tp_plan of your own replaces the model's."
            )
        found.update(dict.fromkeys(hits, style))
    if not found:
        raise ValueError(f"tp_plan names no module of {type(model).__name__}: {', '.join(plan)}.")
    return found


def near(pattern: str, names: list[str]) -> str:
    """Returns a hint that names the most similar module; "" if there is none."""
    return did_you_mean(pattern, {re.sub(r"\.\d+", ".*", name) for name in names}).rstrip(".")


def check_heads(model: nn.Module, size: int) -> None:
    """Checks that the numbers of attention heads are divisible by the tensor-parallel size.

    Raises:
        ValueError: a number of heads is not divisible.
    """
    config = getattr(model, "config", None)
    for name in HEADS:
        number = getattr(config, name, None)
        if isinstance(number, int) and number % size:
            raise ValueError(
                f"parallel={{'tp': {size}}}: the model's {name}={number} cannot be divided by {size}: make tp a "
                "divisor."
            )


def check_module(name: str, module: nn.Module, style: object, size: int) -> None:
    """Checks that a style can split a module into equal parts.

    Raises:
        ValueError: the split dimension is not divisible.
        UnsupportedOption: the module is not a plain linear layer or embedding.
    """
    if not isinstance(style, str):
        return
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Linear | nn.Embedding) or weight is None or not weight.is_floating_point():
        raise UnsupportedOption(
            f"tp_plan={{{name!r}: {style!r}}} is not supported for a {type(module).__name__}: linear layers and "
            "embeddings are cut, as torch has them (no adapters, no quantised weights); leave it out."
        )
    dimension = 0 if cuts_rows(module, style) else 1
    if weight.shape[dimension] % size:
        raise ValueError(
            f"tp_plan={{{name!r}: {style!r}}}: its weight of shape {tuple(weight.shape)} cannot be cut into {size} "
            f"equal parts along dimension {dimension}; leave it out, or make tp a divisor."
        )


def cuts_rows(module: nn.Module, style: str) -> bool:
    """True if a style splits the first dimension of a module's weight."""
    if isinstance(module, nn.Embedding):
        return not style.startswith(("colwise", "embedding_colwise"))
    return style.startswith("colwise")


# ---- weights that two modules share


def tied_names(model: nn.Module) -> list[list[str]]:
    """Returns, for each parameter with several names, the list of its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def add_tied(model: nn.Module, styles: dict[str, Any], tied: list[list[str]]) -> dict[str, Any]:
    """Returns the styles, plus a style for each embedding or head that is tied to a weight split by rows."""
    more: dict[str, Any] = {}
    for names in tied:
        owners = {name.rpartition(".")[0]: model.get_submodule(name.rpartition(".")[0]) for name in names}
        cut = [o for o, m in owners.items() if isinstance(styles.get(o), str) and cuts_rows(m, styles[o])]
        for owner, module in owners.items() if cut else ():
            if owner not in styles:
                is_embedding = isinstance(module, nn.Embedding)
                more[owner] = "embedding_rowwise" if is_embedding else "colwise_gather_output"
    return {**styles, **more}


def tie_again(model: nn.Module, names: list[str], mesh: DeviceMesh) -> None:
    """Ties modules to one parameter again, after each was split.

    Raises:
        ValueError: the modules were split in different ways.
    """
    owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    parameters: list[Any] = [getattr(module, last) for module, last in owners]
    cuts = {tuple(p.placements) if isinstance(p, DTensor) else (Replicate(),) for p in parameters}
    if len(cuts) > 1:
        raise ValueError(f"tp_plan cuts the tied weights {' and '.join(names)} in different ways: cut both by rows.")
    shared = parameters[0]
    for module, last in owners:
        module.register_parameter(last, shared)


# ---- unsplit parameters


def keep_whole(model: nn.Module, mesh: DeviceMesh, summed: set[str]) -> None:
    """Makes the unsplit parameters DTensors, which forward passes see as plain tensors.

    Args:
        model: its split parameters are DTensors already.
        mesh: a device mesh with one axis.
        summed: modules that see only a part of the activations (some of the heads), so that gradients must be summed
            over the processes.
    """
    made: dict[int, nn.Parameter] = {}  # by the id of the original parameter, which several modules may share
    before = []  # keeps the original parameters alive, so that no id is reused
    for module_name, module in model.named_modules():
        own = []
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if isinstance(parameter, DTensor):
                continue
            if id(parameter) not in made:
                whole = distribute_tensor(parameter.detach(), mesh, [Replicate()])
                made[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            before.append(parameter)
            own.append(name)
        for name in own:
            module.register_parameter(name, made[id(module._parameters[name])])
        if own:
            group = mesh.get_group() if module_name in summed else None
            module.register_forward_pre_hook(partial(show_local, names=own, group=group))
            module.register_forward_hook(partial(hide_local, names=own), always_call=True)


def show_local(module: nn.Module, args: Any, names: list[str], group: object) -> None:
    """Sets the parameters as plain tensors, over the registered ones; called before a forward pass."""
    for name in names:
        local = module._parameters[name].to_local(grad_placements=(Replicate(),))  # type: ignore[union-attr, operator]
        vars(module)[name] = local if group is None else SumGradient.apply(local, group)  # type: ignore[no-untyped-call]


def hide_local(module: nn.Module, args: Any, output: object, names: list[str]) -> None:
    """Restores the registered parameters after a forward pass."""
    for name in names:
        vars(module).pop(name, None)


class SumGradient(torch.autograd.Function):
    """Returns the tensor unchanged in forward; backward sums its gradient over a group of processes."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        context.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return functional.all_reduce(gradient.contiguous(), "sum", context.group), None
