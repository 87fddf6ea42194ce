"""Checks of the model: parameters, gradients, modes."""

from __future__ import annotations

import math
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from paceline.pytorch.doctor.findings import ERROR, NOTE, WARNING, Case, Finding, leaves_of

EXPLODING = 1e4  # norm of a gradient
MOST_UNUSED = 0.01  # share of the parameters of a library's model that it may leave unused


def find_failing_pass(case: Case) -> Iterator[Finding]:
    """A loss that cannot be computed, or is not finite."""
    model = case.copy_model()
    try:
        with torch.no_grad():
            loss, outputs = case.compute_loss(model, dict(case.batch))
    except Exception as error:  # user code
        text = str(error).strip() or "no message"
        seen = f"the loss cannot be computed: {type(error).__name__}: {text.splitlines()[0][:300]}"
        yield Finding(ERROR, seen, "Run the model on one batch of trainer.get_train_dataloader().")
        return
    if loss is None:
        yield Finding(
            ERROR,
            f"the model returns no loss of the inputs {', '.join(map(str, case.batch))}",
            "Add the labels to the data, or pass a collator or a compute_loss_func that makes them.",
        )
        return
    case.outputs.append(outputs)
    if not math.isfinite(float(loss)):
        yield Finding(ERROR, f"the first loss is {float(loss)}", "Look for logarithms, divisions and empty targets.")


def find_initial_loss(case: Case) -> Iterator[Finding]:
    """A first loss that is far above that of guessing, and outputs that are probabilities already."""
    logits, labels = case.logits(), case.labels()
    if logits is None or labels is None or not bool((labels >= 0).any()):
        return
    width = logits.shape[-1]
    if width > 1 and bool((logits >= 0).all()) and torch.allclose(logits.sum(-1), torch.ones_like(logits[..., 0])):
        yield Finding(
            ERROR, "the logits are probabilities: they sum to 1", "Remove the softmax: cross_entropy contains it."
        )
    with torch.no_grad():
        loss = float(case.compute_loss(case.copy_model(), dict(case.batch))[0])
    chance = math.log(width) if width > 1 else 0.0
    if chance and loss > 2 * chance:
        yield Finding(
            WARNING,
            f"the first loss is {loss:.3g}, that of guessing among {width} classes is {chance:.3g}",
            "Check the initialization of the last layer, the labels, and that the loss is a mean.",
        )


def is_unused_by_design(model: nn.Module, unused: Sequence[str]) -> bool:
    """True if an installed library wrote the model, and the unused parameters are a small part of it.

    Such are the mask tokens of image encoders in transformers, and the layers of a vision tower behind the one whose
    states are read: training the model cannot use them.
    """
    package = sys.modules.get(type(model).__module__.partition(".")[0])
    place = getattr(package, "__file__", None)
    if place is None or not Path(place).is_relative_to(sysconfig.get_path("purelib")):
        return False
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return sum(sizes[name] for name in unused) <= MOST_UNUSED * sum(sizes.values())


def find_bad_gradients(case: Case) -> Iterator[Finding]:
    """Parameters that are frozen, unused, or have a gradient of zero or a huge one."""
    model = case.copy_model()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    frozen = sum(1 for parameter in model.parameters() if not parameter.requires_grad)
    if not names:
        yield Finding(ERROR, f"all {frozen} parameters are frozen", "Set requires_grad of those to train.")
        return
    if frozen:
        yield Finding(NOTE, f"{frozen} of {frozen + len(names)} parameters are frozen")
    case.compute_loss(model, dict(case.batch))[0].backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad for name, parameter in model.named_parameters() if name in set(names)}
    unused = [name for name, gradient in found.items() if gradient is None]
    dead = [name for name, gradient in found.items() if gradient is not None and not bool(gradient.any())]
    known = {name: gradient for name, gradient in found.items() if gradient is not None}
    bad = [name for name, gradient in known.items() if not bool(torch.isfinite(gradient).all())]
    if unused:
        severity = NOTE if is_unused_by_design(model, unused) else WARNING
        yield Finding(
            severity, f"{len(unused)} parameters get no gradient: {', '.join(unused[:3])}", "Use or freeze them."
        )
    silent = [name for name in dead if "lora_" not in name]
    if silent:
        yield Finding(
            WARNING,
            f"the gradient of {len(silent)} parameters is 0: {', '.join(silent[:3])}",
            "Look for detach(), dead activations and weights that start at 0.",
        )
    if bad:
        yield Finding(ERROR, f"the gradient of {', '.join(bad[:3])} is not finite", "Check the loss and the inputs.")
    elif known and (norm := float(torch.stack([each.float().norm() for each in known.values()]).norm())) > EXPLODING:
        yield Finding(WARNING, f"the gradient norm is {norm:.3g}", "Normalize inputs, or lower the initial weights.")
    held = {id(each) for group in case.make_optimizer(model).param_groups for each in group["params"]}
    missing = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in held]
    if missing:
        yield Finding(
            ERROR, f"the optimizer lacks {len(missing)} trainable parameters: {missing[0]}", "Pass it all of them."
        )


def find_untied_weights(case: Case) -> Iterator[Finding]:
    """Input and output embeddings that should be one tensor, and are two."""
    model = case.copy_model()
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False) or not hasattr(model, "get_output_embeddings"):
        return
    first, last = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if last is not None and hasattr(first, "weight") and first.weight is not last.weight:
        yield Finding(ERROR, "tie_word_embeddings is set, and the embeddings are two tensors", "model.tie_weights()")


def find_wrong_modes(case: Case) -> Iterator[Finding]:
    """Modules that stay in evaluation mode, and dropout that stays on in it."""
    model = case.copy_model()
    model.eval()
    with torch.no_grad():
        runs = [list(leaves_of(case.compute_loss(model, dict(case.batch)))) for _ in range(2)]
    # kernels of accelerators may add in any order; dropout differs by far more
    if any(
        not torch.allclose(one.double(), other.double(), rtol=1e-3, atol=1e-5, equal_nan=True)
        for one, other in zip(*runs, strict=True)
    ):
        yield Finding(
            WARNING, "two passes in evaluation mode differ", "Pass training=self.training to functional.dropout."
        )
    model.train()
    with torch.no_grad():
        case.compute_loss(model, dict(case.batch))
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
    asleep = [
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds) and not module.training and not is_frozen(module)
    ]
    if asleep:
        yield Finding(
            WARNING,
            f"{len(asleep)} modules stay in evaluation mode during training: {asleep[0]}",
            "Remove eval() from forward, or call super().train(mode) in train().",
        )


def is_frozen(module: nn.Module) -> bool:
    """Returns True for a module with parameters of which none is trained, as normalization of a frozen backbone."""
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
