"""Counts the compilations of a run, and logs each recompilation with its reason."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch._dynamo import callback
from torch._dynamo.utils import get_compilation_metrics

from paceline.core.ledger import COMPILE_PREFIX
from paceline.pytorch.model.compilation import records_cuda_graphs

logger = logging.getLogger(__name__)

MAX_LOGGED = 30  # a run that recompiles for ever does not fill its log
MAX_REASON = 200  # characters; torch adds the stack of the user's code


class CompileWatch:
    """Counts compilations while it exists and is not closed, in the whole process.

    Torch keeps the metrics of its last 64 compilations. They are read when a compilation starts and when a row is
    logged, so a recompilation is reported before the next one, and at the next log at the latest.

    Args:
        mode: `torch_compile_mode`.

    Attributes:
        num_compilations: graphs of the forward pass that were compiled.
        num_recompilations: those of code that was compiled before, for other shapes, types or settings.
        seconds: the time that all compilations took, those of backward passes included.
    """

    def __init__(self, mode: str | None = None) -> None:
        self.num_compilations = self.num_recompilations = 0
        self.seconds = 0.0
        self._records_graphs = records_cuda_graphs(mode)
        self._is_closed = False
        self._last: Any = next(iter(reversed(get_compilation_metrics())), None)
        callback.callback_handler.register_start_callback(self._on_start)

    def close(self) -> None:
        """Stops counting. A second call does nothing."""
        if not self._is_closed:
            self.update()
            self._is_closed = True
            callback.callback_handler.remove_start_callback(self._on_start)

    def update(self) -> None:
        """Reads the compilations since the last call, and logs those that were made again."""
        if self._is_closed:
            return
        fresh = []
        for metrics in reversed(get_compilation_metrics()):
            if metrics is self._last:
                break
            fresh.append(metrics)
        for metrics in reversed(fresh):
            self._last = metrics
            self._count(metrics)

    def row(self, times: Mapping[str, float]) -> dict[str, float]:
        """Returns the entries of a log row: the recompilations since the start of the run."""
        self.update()
        return {f"{COMPILE_PREFIX}recompiles": self.num_recompilations}

    def describe(self) -> str:
        """Returns the compilations of the run as a sentence."""
        self.update()
        if not self.num_compilations:
            return ""
        again = f"{self.num_recompilations} of them again for other inputs"
        return f"torch.compile: {self.num_compilations} graphs in {self.seconds:.1f} s, {again}"

    def _on_start(self, args: object) -> None:
        self.update()

    def _count(self, metrics: Any) -> None:
        self.seconds += ((metrics.end_time_us or 0) - (metrics.start_time_us or 0)) / 1e6
        reason, place = metrics.recompile_reason, str(metrics.co_name)
        if metrics.fail_type is not None:
            if "limit exceeded" in str(metrics.fail_reason):
                logger.warning(
                    "torch.compile gave up on a function after too many recompilations, and runs it uncompiled for "
                    "new inputs; the last reason: %s. Leave torch_compile_dynamic=False out, pad batches to lengths of "
                    "a few sizes (pad_to_multiple_of), or raise torch._dynamo.config.recompile_limit.",
                    shortened(reason),
                )
            return
        if metrics.co_name is None:  # a backward pass
            return
        self.num_compilations += 1
        if reason is None:
            return
        self.num_recompilations += 1
        if self.num_recompilations <= MAX_LOGGED:
            logger.info(
                "Recompiled %s (%s:%s): %s.", place, metrics.co_filename, metrics.co_firstlineno, shortened(reason)
            )
        if self.num_recompilations == MAX_LOGGED:
            logger.info("Further recompilations are counted, and not logged.")
        if self._records_graphs and "size" in reason:
            self._records_graphs = False
            logger.warning(
                "torch_compile_mode records CUDA graphs for one shape each, and shapes vary: pad batches to one "
                "length, set dataloader_drop_last=True, or set torch_compile_mode='max-autotune-no-cudagraphs'."
            )


def shortened(reason: str | None) -> str:
    """Returns the first line of torch's reason, without the number of the compiled code and the hints."""
    line = str(reason).strip().partition("\n")[0]
    number, _, rest = line.partition(": ")
    line = rest if "/" in number and rest else line
    line = " ".join(line.partition("(user code shown")[0].split())
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]} ..."
