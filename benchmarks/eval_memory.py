"""Memory of evaluating a language model over N samples, and over 4 N.

Each contender evaluates once in a fresh process, after a warm-up on a few samples. A thread reads RssAnon, the memory
that is the process's own and cannot be dropped, from /proc/self/status (Linux) every two milliseconds; its peak counts,
and what the peak is above the level right before. Freed blocks above 1 MB go back to the system at once for everyone
(MALLOC_MMAP_THRESHOLD_), so that what the allocator keeps is not taken for data. The metric is the accuracy over all
tokens. `whole set` gets the predictions of all samples at once, as compute_metrics always did; `streaming` gets them
batch by batch.

    python benchmarks/eval_memory.py [--quick] [--samples 36] [--rounds 3] [--contenders ...]
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from measure import (
    choose_contenders,
    make_parser,
    report_from_child,
    run_child,
    summarize,
    take_turns,
    target,
    write_result,
)

SAMPLES, QUICK_SAMPLES, WARM_UP_SAMPLES, FACTOR = 36, 6, 8, 4
TOKENS, VOCABULARY, COMMON, HIDDEN, BATCH_SIZE = 128, 16_000, 20, 32, 4
LIMIT_GROWTH = 1.20
STATUS = Path("/proc/self/status")

NEEDS = {
    "paceline, streaming": "paceline",
    "paceline, whole set": "paceline",
    "paceline, loss only": "paceline",
    "transformers.Trainer, streaming": "transformers",
    "transformers.Trainer, whole set": "transformers",
    "transformers.Trainer, loss only": "transformers",
}


def make_model() -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    class LanguageModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
            self.head = nn.Linear(HIDDEN, VOCABULARY)
            with torch.no_grad():
                self.head.bias[:COMMON] += 5  # right now and then: an accuracy of 0 would compare nothing

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.head(torch.tanh(self.embedding(input_ids)))
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return {"loss": loss, "logits": logits}

    torch.manual_seed(0)
    return LanguageModel()


class Texts:
    """Samples made when they are asked for: the set itself takes no memory."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        ids = torch.randint(0, COMMON, (TOKENS,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


# ---- metrics


def whole_accuracy(prediction: Any) -> dict[str, float]:
    """Token accuracy over arrays of all samples."""
    found = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(found.mean())}


class BatchAccuracy:
    """Token accuracy as transformers' batch_eval_metrics takes it."""

    def __init__(self) -> None:
        self.right = self.number = 0

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        found = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
        self.right, self.number = self.right + int(found.sum()), self.number + found.numel()
        if not compute_result:
            return {}
        result = {"accuracy": self.right / self.number}
        self.right = self.number = 0
        return result


def metrics_of(name: str) -> dict[str, Any]:
    """The arguments that ask a contender for its metrics."""
    if name.endswith("loss only"):
        return {}
    if name.endswith("whole set"):
        return {"compute_metrics": whole_accuracy}
    if name.startswith("transformers"):
        return {"compute_metrics": BatchAccuracy(), "batch_eval_metrics": True}
    from paceline.core.streaming import Accuracy

    return {"compute_metrics": Accuracy(shifted=True)}


def make_evaluation(name: str, folder: str) -> Callable[[Any], dict[str, float]]:
    """A function that evaluates a dataset; the same code for both libraries."""
    if name.startswith("paceline"):
        import paceline as library
    else:
        import transformers as library  # type: ignore[no-redef]

    options = metrics_of(name)
    args = library.TrainingArguments(
        output_dir=folder,
        per_device_eval_batch_size=BATCH_SIZE,
        batch_eval_metrics=options.pop("batch_eval_metrics", False),
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = library.Trainer(model=make_model(), args=args, **options)
    return lambda dataset: trainer.evaluate(dataset)


# ---- memory


def own_bytes() -> int:
    """RssAnon of this process."""
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("eval_memory.py reads RssAnon from /proc/self/status, which only Linux has.")


class Watch:
    """The peak of `own_bytes` while it is entered."""

    def __enter__(self) -> Watch:
        self.peak = self.start = own_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, own_bytes())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, own_bytes())


def measure_contender(name: str, num_samples: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        evaluate = make_evaluation(name, folder)
        evaluate(Texts(WARM_UP_SAMPLES))
        with Watch() as watch:
            start = time.perf_counter()
            metrics = evaluate(Texts(num_samples))
            seconds = time.perf_counter() - start
    found = {key: metrics[key] for key in ("eval_loss", "eval_accuracy") if key in metrics}
    return {"peak_mb": watch.peak / 1e6, "added_mb": (watch.peak - watch.start) / 1e6, "seconds": seconds, **found}


def main() -> None:
    parser = make_parser(__doc__ or "", rounds=3)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="N; a sample's logits take 8.2 MB")
    arguments = parser.parse_args()
    if arguments.child:
        report_from_child(measure_contender(arguments.child, arguments.samples))
        return
    own_bytes()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # for the children
    if arguments.quick:
        arguments.rounds, arguments.samples = 1, QUICK_SAMPLES
    contenders = choose_contenders(NEEDS, arguments.contenders)
    sizes = (arguments.samples, FACTOR * arguments.samples)

    def measure(name: str) -> dict[str, Any]:
        runs = [run_child(__file__, ["--child", name, "--samples", str(size)], num_threads=1) for size in sizes]
        keys = ("peak_mb", "added_mb", "seconds")
        pairs = {f"{key}_{label}": run[key] for run, label in zip(runs, ("n", "4n"), strict=True) for key in keys}
        values = {key: value for key, value in runs[1].items() if key.startswith("eval_")}
        return {**pairs, "growth": runs[1]["peak_mb"] / runs[0]["peak_mb"], **values}

    measured = take_turns(contenders, arguments.rounds, measure)
    rows = {name: {key: summarize([run[key] for run in runs]) for key in runs[0]} for name, runs in measured.items()}
    limits = [
        target(
            f"growth of the peak from {sizes[0]} to {sizes[1]} samples, {name}",
            rows[name]["growth"]["median"],
            LIMIT_GROWTH,
            "x",
        )
        for name in contenders
        if name.startswith("paceline")
    ]
    settings = {
        "samples": sizes,
        "tokens": TOKENS,
        "vocabulary": VOCABULARY,
        "batch_size": BATCH_SIZE,
        "logits_mb": [size * TOKENS * VOCABULARY * 4 / 1e6 for size in sizes],
        "threads": 1,
    }
    write_result(
        arguments, "eval_memory", {"settings": settings, "rows": rows, "measured": measured, "targets": limits}
    )


if __name__ == "__main__":
    main()
