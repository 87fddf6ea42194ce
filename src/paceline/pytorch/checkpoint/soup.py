"""Model soups: the mean of the weights of several checkpoints of one architecture, tensor by tensor.

A uniform soup is the mean of all; a greedy one takes a further model only if the mean with it is better (Wortsman et
al., 2022, arXiv:2203.05482). The models must descend from one pretrained model, or be checkpoints of one run.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint import folders
from paceline.checkpoint.beside import chosen_files
from paceline.checkpoint.manifest import MANIFEST_NAME
from paceline.pytorch.checkpoint import streaming
from paceline.pytorch.checkpoint.files import DEFAULT_SHARD_BYTES
from paceline.pytorch.checkpoint.tensors import CheckpointError
from paceline.pytorch.checkpoint.weights import few

SOUP_NAME = "soup.json"  # provenance: the folders, and their metrics if known
BATCH_COUNT = "num_batches_tracked"  # the counter of torch's batch norm


@dataclass(frozen=True)
class Soup:
    """The result of a greedy soup.

    Attributes:
        metric: the metric of the mean.
        chosen: the folders in the mean, the best first.
        metrics: the metric of each model alone, by folder.
    """

    metric: float
    chosen: list[str]
    metrics: dict[str, float]


def average_checkpoints(
    checkpoints: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes the mean of the weights of several checkpoints to a folder, atomically.

    Floating-point tensors are averaged in double precision and rounded to their dtype once. All others must be equal,
    but for the counters of batch norm, which become the largest. Its running statistics are averaged too; those of the
    averaged weights are others (`torch.optim.swa_utils.update_bn` computes them from training data). The files beside
    the weights are those of the first checkpoint. Takes the memory of a few of the largest tensors.

    Args:
        checkpoints: two or more folders, with whole or sharded weights.
        output: the folder to write.
        overwrite: replace the folder if it exists.
        max_shard_bytes: maximum bytes of one file.

    Raises:
        FileExistsError: the output exists and is not empty.
        ValueError: there are fewer than two checkpoints, or the output is one of them.
        CheckpointError: weights are missing, damaged or NaN, or differ in names, shapes, dtypes or integer values.
        OSError: writing fails.
    """
    places, target = [Path(each) for each in checkpoints], Path(output)
    if len(places) < 2:
        raise ValueError(f"an average needs two checkpoints or more, not {len(places)}")
    if target.resolve() in [place.resolve() for place in places]:
        raise ValueError(f"{target} is one of the checkpoints: name another folder for the average")
    is_there = os.path.lexists(target) and (not target.is_dir() or any(target.iterdir()))
    if is_there and not (overwrite and target.is_dir()):
        raise FileExistsError(f"{target} already exists: name a folder that is new or empty, or overwrite it")
    _write_mean(places, target, {"method": "uniform"}, max_shard_bytes)


def greedy_soup(
    checkpoints: Sequence[str | os.PathLike[str]],
    evaluate: Callable[[str], float],
    output: str | os.PathLike[str],
    *,
    greater_is_better: bool = True,
) -> Soup:
    """Averages checkpoints greedily: from the best on, each is kept if the mean with it is not worse.

    Args:
        checkpoints: the folders.
        evaluate: `(folder) -> metric` on held-out data; called once for each checkpoint and for each mean.
        output: the folder to write; must be new or empty.
        greater_is_better: the direction of the metric.

    Returns:
        The metric of the soup, and the folders in it. A soup of one checkpoint is a copy of its weights.

    Raises:
        FileExistsError, CheckpointError, OSError: see `average_checkpoints`.
        ValueError: there is no checkpoint, or a metric is not a number.
    """
    target = Path(output)
    if not checkpoints:
        raise ValueError("a soup needs at least one checkpoint")
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} already exists: name a folder that is new or empty")
    places = [Path(each) for each in checkpoints]
    sign = 1.0 if greater_is_better else -1.0

    def measure(folder: Path) -> float:
        value = float(evaluate(str(folder)))
        if math.isnan(value):
            raise ValueError(f"the metric of {folder} is not a number")
        return value

    metrics = {str(place): measure(place) for place in places}
    ordered = sorted(dict.fromkeys(places), key=lambda place: -sign * metrics[str(place)])
    chosen, best = [ordered[0]], metrics[str(ordered[0])]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".soup-", dir=target.parent) as aside:
        for place in ordered[1:]:
            mean = Path(aside, "mean")
            _write_mean([*chosen, place], mean, {"method": "greedy"}, DEFAULT_SHARD_BYTES)
            value = measure(mean)
            if sign * value >= sign * best:
                chosen, best = [*chosen, place], value
            shutil.rmtree(mean)
    notes = {"method": "greedy", "metric": best, "metrics": metrics}
    _write_mean(chosen, target, notes, DEFAULT_SHARD_BYTES)
    return Soup(best, [str(place) for place in chosen], metrics)


def _write_mean(places: Sequence[Path], target: Path, notes: dict[str, object], max_shard_bytes: int) -> None:
    """Writes the mean of checkpoints, the files beside the first one's weights, and the provenance."""
    for place in places:
        problems = folders.verify(place) if (place / MANIFEST_NAME).is_file() else []
        if problems:
            raise CheckpointError(f"{place} is damaged: {'; '.join(problems[:3])}")
    source = mean_of([streaming.open_weights(place) for place in places])
    target.parent.mkdir(parents=True, exist_ok=True)
    with folders.staged(target) as temporary:
        for path in chosen_files(places[0], None):
            shutil.copyfile(path, temporary / path.name)
        streaming.write_stream(source, temporary, max_shard_bytes=max_shard_bytes)
        text = json.dumps({**notes, "checkpoints": [str(place.resolve()) for place in places]}, indent=1)
        (temporary / SOUP_NAME).write_text(text, encoding="utf-8")


def check_alike(first: streaming.Source, other: streaming.Source) -> None:
    """Checks that two models have the same tensors.

    Raises:
        CheckpointError: names, shapes, dtypes or ties differ.
    """
    names = [name for name in (*first.forms, *other.forms) if name not in first.forms or name not in other.forms]
    if names:
        raise CheckpointError(f"{first.what} and {other.what} have different tensors: {few(names)}")
    for name, form in first.forms.items():
        if other.forms[name] != form:
            shapes = " and ".join(f"{tuple(shape)} {dtype}" for shape, dtype in (form, other.forms[name]))
            raise CheckpointError(f"{name} differs in {first.what} and {other.what}: {shapes}")
    if other.tied != first.tied:
        tied = few({**first.tied, **other.tied})
        raise CheckpointError(f"{first.what} and {other.what} tie different tensors: {tied}")


def mean_of(sources: Sequence[streaming.Source]) -> streaming.Source:
    """Returns the mean of weights, computed when a tensor is read.

    Raises:
        CheckpointError: the models differ, or have values that are not plain tensors.
    """
    first = sources[0]
    for source in sources:
        check_alike(first, source)
        if source.extra:
            raise CheckpointError(f"{source.what} holds values that have no mean: {few(source.extra)}")

    def read(name: str) -> Tensor:
        tensor = first.read(name)
        if len(sources) == 1:
            return tensor
        if name.rpartition(".")[2] == BATCH_COUNT:
            return torch.stack([source.read(name) for source in sources]).amax(0)
        if not tensor.is_floating_point():
            for other in sources[1:]:
                if not torch.equal(other.read(name), tensor):
                    raise CheckpointError(f"{name} is not floating-point and differs in {first.what} and {other.what}")
            return tensor
        total = tensor.double()
        for other in sources[1:]:
            total += other.read(name)
        if total.isnan().any():
            damaged = next((each.what for each in sources if each.read(name).isnan().any()), "their sum")
            raise CheckpointError(f"{name} holds NaN in {damaged}: leave that checkpoint out")
        return total.div_(len(sources)).to(tensor.dtype)

    return replace(first, what=f"the mean of {len(sources)} checkpoints", read=read)
