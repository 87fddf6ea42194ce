"""Findings of the checks, and the case that they examine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

ERROR, WARNING, NOTE = "error", "warning", "note"
IGNORED = -100


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        severity: `error`, `warning` or `note`.
        seen: what was seen, with the number.
        remedy: what to do about it; empty for a note that needs nothing.
        check: the name of the check.
    """

    severity: str
    seen: str
    remedy: str = ""
    check: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The findings of all checks.

    Attributes:
        findings: in the order of the checks.
        checks: names of the checks that ran to their end.
    """

    findings: tuple[Finding, ...]
    checks: tuple[str, ...]

    @property
    def has_errors(self) -> bool:
        """Returns True if a finding is an error."""
        return any(finding.severity == ERROR for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Returns the findings in JSON types."""
        findings = [asdict(finding) for finding in self.findings]
        return {"has_errors": self.has_errors, "findings": findings, "checks": list(self.checks)}

    def __str__(self) -> str:
        lines = []
        for severity in (ERROR, WARNING, NOTE):
            for finding in self.findings:
                if finding.severity == severity:
                    lines.append(f"{severity:<8} {finding.check}: {finding.seen}")
                    lines += [f"         {finding.remedy}"] if finding.remedy else []
        findings = "1 finding" if len(self.findings) == 1 else f"{len(self.findings)} findings"
        return "\n".join([*lines, f"{len(self.checks)} checks, {findings}"])


@dataclass(eq=False)
class Case:
    """The run that the checks examine. They may change the copies, not the Trainer's own objects.

    Attributes:
        copy_model: returns a copy of the model, in training mode.
        batches: the first micro-batches, on the device.
        label_names: names of the targets in a batch.
        compute_loss: `(model, batch) -> (loss, outputs)`, as the Trainer computes it.
        make_optimizer: `(model) -> optimizer` of the run, at its peak learning rate.
        gradient_of: `(micro-batch size, accumulation) -> gradient` of the run's first optimizer step; None where the
            run accumulates nothing.
        targets: checks the shift of a language model's targets; None where that does not apply.
        max_steps: optimizer steps of the run.
        tokenizer: or None.
        train_rows, eval_rows: hashes of rows, evenly spread; empty for streams.
        num_rows: training samples; None if unknown.
    """

    copy_model: Callable[[], nn.Module]
    batches: Sequence[Any]
    label_names: Sequence[str]
    compute_loss: Callable[[nn.Module, Any], tuple[Tensor, Any]]
    make_optimizer: Callable[[nn.Module], Any]
    gradient_of: Callable[[int, int], Tensor] | None
    targets: Callable[[], Any]
    micro_batch_size: int
    accumulation: int
    max_steps: int
    tokenizer: Any
    train_rows: Sequence[str]
    eval_rows: Sequence[str]
    num_rows: int | None
    seconds: float = 40.0
    outputs: list[Any] = field(default_factory=list)  # of the first batch, once a pass has succeeded

    @property
    def batch(self) -> Mapping[str, Any]:
        """Returns the first micro-batch."""
        first: Mapping[str, Any] = self.batches[0]
        return first

    def labels(self, batch: Mapping[str, Any] | None = None) -> Tensor | None:
        """Returns the targets of a batch, the first by default; None if it has none under a known name."""
        found = self.batch if batch is None else batch
        for name in self.label_names:
            value = found.get(name)
            if isinstance(value, Tensor):
                return value
        return None

    def classes(self) -> Tensor | None:
        """Returns the class targets of all examined batches, without ignored ones; None if they are no classes."""
        found = [labels for labels in map(self.labels, self.batches) if labels is not None]
        if not found or any(labels.is_floating_point() for labels in found):
            return None
        joined = tensor_of(found)
        return joined[joined != IGNORED]

    def logits(self) -> Tensor | None:
        """Returns the logits of the first batch: (..., classes), with the targets' leading dimensions."""
        labels = self.labels()
        if labels is None or labels.is_floating_point():
            return None
        for value in leaves_of(self.outputs):
            if value.is_floating_point() and value.dim() == labels.dim() + 1 and value.shape[:-1] == labels.shape:
                return value
        return None


def leaves_of(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested mappings and sequences."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves_of(item)


def tensor_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the values of integer tensors in one dimension."""
    first, *rest = [tensor.flatten().long() for tensor in tensors]
    return first.new_tensor([value for tensor in (first, *rest) for value in tensor.tolist()])
