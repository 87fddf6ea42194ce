"""Finds the repeated blocks of a model, which are checkpointed or compiled separately."""

from __future__ import annotations

from torch import nn


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns (name, block) of the repeated blocks of `model`, in the order of registration, each once.

    A block is a module with submodules that is an entry of an `nn.ModuleList`, or one of several entries of an
    `nn.Sequential` that are all of one class. Blocks inside a block are not listed.
    """
    found: dict[int, tuple[str, nn.Module]] = {}

    def visit(prefix: str, module: nn.Module) -> None:
        blocks = _entries(module)
        for name, child in module.named_children():
            full_name = f"{prefix}.{name}" if prefix else name
            if any(child is block for block in blocks):
                found.setdefault(id(child), (full_name, child))
            else:
                visit(full_name, child)

    visit("", model)
    return list(found.values())


def _entries(module: nn.Module) -> list[nn.Module]:
    children = list(module.children())
    if isinstance(module, nn.ModuleList):
        return [child for child in children if _is_block(child)]
    is_stack = isinstance(module, nn.Sequential) and len(children) > 1 and len(set(map(type, children))) == 1
    return children if is_stack and all(map(_is_block, children)) else []


def _is_block(module: nn.Module) -> bool:
    # lists and dicts of modules cannot be called
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and next(module.children(), None) is not None
