"""The last stage of a pipeline in the place of the model: what `compute_loss` and `prediction_step` call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from paceline.distributed.stages import Stage


class LastStage(nn.Module):
    """Called with a batch, it gives what the model would: from what the stages before made of the same batch.

    Args:
        model: the whole model, of which other processes hold parts.
        stages: those of this process.
        run: `(batch, finish) -> result`: a batch through all stages, forward only.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Mapping[int, Stage],
        run: Callable[[Mapping[str, Any], Callable[[tuple[Tensor, ...]], Any]], Any],
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(stages.values())
        self.whole = model  # after its parts: a mode that the model gives to some of its modules is the one that stays
        self.run = run
        self.stage = next((stage for stage in stages.values() if stage.is_last), None)
        self.main_input_name = getattr(model, "main_input_name", "input_ids")
        self._received: tuple[Tensor, ...] | None = None
        self._batch: Mapping[str, Any] = {}
        self._num_calls = 0

    def expect(self, batch: Mapping[str, Any]) -> None:
        """From now on this batch is on its way through the stages."""
        self._batch, self._num_calls = batch, 0

    def receive(self, tensors: tuple[Tensor, ...] | None) -> None:
        """What the stage before made of it; None: the stages run when this is called."""
        self._received = tensors

    def check_called(self, who: str) -> None:
        """Raise: RuntimeError, where the model was not called: the other processes have run their stages."""
        if self._num_calls != 1:
            raise RuntimeError(
                f"{who} called the model {self._num_calls} times. Its stages run once for each batch in a pipeline: "
                "call it once, with the batch as it is."
            )

    def forward(self, **inputs: Any) -> Any:
        """The model's outputs for the batch that is expected. Raises: RuntimeError, for any other, or a second time."""
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
