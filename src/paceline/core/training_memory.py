"""The memory that training takes on one process, and how it is written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """Memory on one process, in bytes.

    Attributes:
        parameters: size of the model's parameters and buffers.
        gradients: size of the gradients of the trained parameters, once they exist; of the largest one only, if the
            optimizer steps inside the backward pass.
        optimizer: size of the optimizer's state after its first step; None if unknown before.
        largest_gradient: size of the largest gradient.
    """

    parameters: int
    gradients: int
    optimizer: int | None
    largest_gradient: int

    def describe(self) -> str:
        """Returns the sizes as a line of text."""
        state = "of a size known after the first optimizer step" if self.optimizer is None else as_text(self.optimizer)
        return (
            f"{as_text(self.parameters)} of parameters, {as_text(self.gradients)} of gradients, "
            f"optimizer state {state}; activations not included"
        )


def as_text(size: int) -> str:
    """Returns a size with its unit."""
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"
