"""The last stage of a pipeline, used as the model: the object that `compute_loss` and `prediction_step` call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.pytorch.distributed.stages import Stage


class LastStage(nn.Module):
    """Returns the model's outputs for a batch, from the previous stages' outputs for the same batch.

    Args:
        model: the whole model; other processes hold its other stages.
        stages: the stages of this process.
        run: `(batch, finish) -> result`, runs a batch through all stages, forward only.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Mapping[int, Stage],
        run: Callable[[Mapping[str, Any], Callable[[tuple[Tensor, ...]], Any]], Any],
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(stages.values())
        self.whole = model  # after its parts, so that train and eval modes that the model sets for its modules persist
        self.run = run
        self.stage = next((stage for stage in stages.values() if stage.is_last), None)
        self.main_input_name = getattr(model, "main_input_name", "input_ids")
        self._received: tuple[Tensor, ...] | None = None
        self._batch: Mapping[str, Any] = {}
        self._num_calls = 0

    def expect(self, batch: Mapping[str, Any]) -> None:
        """Sets the batch that is passing through the stages."""
        self._batch, self._num_calls = batch, 0

    def receive(self, tensors: tuple[Tensor, ...] | None) -> None:
        """Sets the outputs of the previous stage; with None, calling this module runs all stages."""
        self._received = tensors

    def check_called(self, who: str) -> None:
        """Raises RuntimeError unless the model was called exactly once: the other processes ran their stages once."""
        if self._num_calls != 1:
            raise RuntimeError(
                f"{who} called the model {self._num_calls} times. Its stages run once for each batch in a pipeline: "
                "call it once, with the batch as it is."
            )

    def forward(self, **inputs: Any) -> Any:
        """Returns the model's outputs for the expected batch.

        Raises:
            RuntimeError: the model was called with another batch, or a second time.
        """
        self._num_calls += 1
        if self._num_calls > 1:
            self.check_called("compute_loss or prediction_step")
        for name, value in inputs.items():
            if isinstance(value, Tensor) and name in self._batch and self._batch[name] is not value:
                raise RuntimeError(
                    f"The model was called with another {name!r} than the batch holds. In a pipeline other processes "
                    "run their stages on the batch as it is: change it in the data collator."
                )
        if self._received is None:
            return self.run(self._batch, lambda received: self._finish(received, inputs))
        received, self._received = self._received, None
        return self._finish(received, inputs)

    def _finish(self, received: tuple[Tensor, ...], inputs: Mapping[str, Any]) -> Any:
        assert self.stage is not None
        return self.stage(received, inputs)


class Looking:
    """A context with evaluation mode and no gradients, which restores modes and random state afterwards."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        devices = [] if device.type in ("cpu", "mps") else [device]
        self._random = torch.random.fork_rng(devices, device_type=device.type) if devices else torch.random.fork_rng([])
        self._no_grad = torch.no_grad()

    def __enter__(self) -> None:
        self._training = {module: module.training for module in self.model.modules()}
        self.model.eval()
        self._random.__enter__()
        self._no_grad.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._no_grad.__exit__(*error)
        self._random.__exit__(*error)
        for module, mode in self._training.items():
            module.training = mode
