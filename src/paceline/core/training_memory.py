"""The memory that training takes on one process."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.byte_sizes import format_mib


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
        state = (
            "of a size known after the first optimizer step" if self.optimizer is None else format_mib(self.optimizer)
        )
        return (
            f"{format_mib(self.parameters)} of parameters, {format_mib(self.gradients)} of gradients, "
            f"optimizer state {state}; activations not included"
        )
