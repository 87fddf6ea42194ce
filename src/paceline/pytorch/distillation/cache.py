"""A cache of a teacher's logits on disk: made once, in a pass over the dataset before training, and read in each epoch.

The folder of a cache is named after what its values depend on: dataset, teacher, precision, and the number of classes
that are kept with their temperature. In training, the samples of a pass are compared with those that the teacher read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption
from paceline.args.sections import Options
from paceline.core.byte_sizes import format_bytes
from paceline.core.fingerprint import fingerprint
from paceline.core.signals import StopSignals
from paceline.pytorch.data.indexed import IndexedLoader
from paceline.pytorch.data.loading import batch_size_of
from paceline.pytorch.data.sources import KEY
from paceline.pytorch.data.window_ids import WindowIds, find_obstacle
from paceline.pytorch.distillation.loss import Distillation
from paceline.pytorch.distillation.store import LogitStore, Sample
from paceline.pytorch.distributed.collectives import gather_objects, share_object
from paceline.pytorch.distributed.random import preserved_rng
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.engine import Engine
from paceline.pytorch.model.row_checks import IGNORED, row_checks
from paceline.pytorch.model.signature import innermost
from paceline.pytorch.model.soft_targets import TopClasses, top_classes, widen

logger = logging.getLogger(__name__)

VERSION = 1
NUM_PROBED = 4  # samples of the first batch, which the teacher also reads alone
TOLERANCE = {2: 0.1, 4: 1e-3, 8: 1e-6}  # relative, by the bytes of a logit; far above rounding, far below other logits
NOT_OF_CONFIG = ("_name_or_path", "transformers_version")


class Stopped(Exception):
    """Raised if a signal stops the making of a cache."""


class CachedLogits:
    """The logits of the teacher for the passes of a run.

    Args:
        store: the files.
        ids: the samples of the current window.
        label_names: names of the targets.
        name: the name of the option, for errors.
    """

    def __init__(self, store: LogitStore, ids: WindowIds, label_names: Sequence[str], name: str) -> None:
        self._store, self._ids = store, ids
        self._label_names, self._name = tuple(label_names), name

    def find(
        self, inputs: Mapping[str, Any], labels: Tensor | None, logits: Tensor, engine: Engine
    ) -> Tensor | TopClasses:
        """Returns the teacher's logits for the pass that an engine runs, or its likeliest classes.

        Args:
            inputs: the batch.
            labels: its targets, or None.
            logits: the logits of the student, `(*labels.shape, num_classes)`.
            engine: the engine of the run, in a pass.

        Raises:
            UnsupportedOption: the samples are not those that the teacher read.
            ValueError: the teacher has another number of classes.
            CheckpointError: a file is damaged.
        """
        current = engine.current
        assert current is not None
        if current.is_dummy:  # its loss does not count
            return torch.zeros_like(logits)
        first = sum(map(batch_size_of, engine.batches[: current.index]))
        samples = self._ids.current[first : first + len(logits)]
        if len(samples) != len(logits) or len(logits) != batch_size_of(engine.batches[current.index]):
            raise UnsupportedOption(
                f"{self._name}: the loss is computed of {len(logits)} samples, and the loader drew {len(samples)} for "
                "this pass: compute it of whole batches, or leave distillation_cache out."
            )
        read = [self._store.read(index) for index in samples]
        found = [sample for sample, _ in read]
        rows = row_checks(inputs, self._label_names, len(logits)).tolist()
        for index, sample, row in zip(samples, found, rows, strict=True):
            if sample.row != row:
                raise UnsupportedOption(self._explain(index))
        num_classes = read[0][1]
        if num_classes != logits.shape[-1]:
            raise ValueError(f"The student has {logits.shape[-1]} classes and the teacher {num_classes}.")
        kept = stored_positions(labels, logits)
        values = {name: torch.cat([sample.values[name] for sample in found]) for name in found[0].values}
        if len(next(iter(values.values()))) != int(kept.sum()):
            raise UnsupportedOption(self._explain(samples[0]))
        placed = {name: place(value.to(logits.device, non_blocking=True), kept) for name, value in values.items()}
        if "logits" in placed:
            return placed["logits"]
        return TopClasses(placed["log_probabilities"], placed["indices"].long(), placed["rest"])

    def _explain(self, index: int) -> str:
        return (
            f"{self._name}: sample {index} of the dataset is not the one that the teacher has read: it is random (an "
            "augmentation, a collator that draws masks), or its values depend on the other samples of the batch. Leave "
            f"distillation_cache out; if the dataset has been changed, delete {self._store.folder}."
        )


def stored_positions(labels: Tensor | None, logits: Tensor) -> Tensor:
    """Returns a mask of the positions whose logits are kept: those of a target, and those before one.

    Whether the loss shifts its targets may not be known before training.

    Args:
        labels: `(samples, ...)`, or None for unlabelled data.
        logits: `(samples, ..., num_classes)`.
    """
    if labels is None or labels.dim() < 2:
        return torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    is_target = labels != IGNORED
    kept = is_target.clone()
    kept[:, :-1] |= is_target[:, 1:]
    return kept


def place(values: Tensor, kept: Tensor) -> Tensor:
    """Returns values `(items, ...)` at the positions of a mask `(samples, ...)`, and 0 elsewhere."""
    if kept.dim() == 1:
        return values
    placed = values.new_zeros((*kept.shape, *values.shape[1:]))
    placed[kept] = values
    return placed


class CacheMaker:
    """Makes the parts of a cache that are missing; each process makes every n-th.

    Args:
        distillation: computes the logits of the teacher.
        store: the files.
        strategy: the strategy of the run.
        loader: the loader of the training data.
        prepare: moves a batch to the device.
        signals: requests to stop.
        name: the name of the option, for errors.
    """

    def __init__(
        self,
        distillation: Distillation,
        store: LogitStore,
        strategy: SingleDevice,
        loader: IndexedLoader,
        prepare: Callable[[Any], Any],
        signals: StopSignals,
        name: str,
    ) -> None:
        self._distillation, self._store, self._strategy = distillation, store, strategy
        self._loader, self._prepare = loader, prepare
        self._signals, self._name = signals, name
        self._batch_size = max(int(loader.batch_size or 1), 1)

    def make(self) -> None:
        """Makes the missing parts, and checks the existing ones; collective.

        Raises:
            UnsupportedOption: the logits of a sample depend on other samples.
            KeyboardInterrupt, SystemExit: a signal asked to stop. Complete parts are kept.
        """
        world, store = self._strategy.world, self._store
        missing: list[int] = share_object(world, store.find_missing() if world.is_first else None)
        is_there = store.num_parts > 0 and 0 not in missing
        self._together(lambda: self._check_teacher(is_there))
        if not missing:
            logger.info("The logits of the teacher are read from %s.", store.folder)
            return
        logger.info("The teacher computes logits of %d samples for %s.", store.num_samples, store.folder)
        size, own = 0, missing[world.process_index :: world.world_size]
        with self._reading([batch for part in own for batch in self._batches_of(part)]) as batches:
            for number in range(-(-len(missing) // world.world_size)):
                part = own[number] if number < len(own) else None
                size += self._together(partial(self._make_part, part, batches))
        there = share_object(world, store.find_missing() if world.is_first else None)
        self._together(lambda: self._check_shared(there))
        logger.info("The logits of this process take %s.", format_bytes(size))

    def _together(self, action: Callable[[], Any]) -> Any:
        """Runs an action on each process; if it fails on one, all of them raise its error."""
        result: Any = None
        failure: tuple[type[Exception], str] | None = None
        try:
            result = action()
        except Stopped:
            failure = (Stopped, "")
        except Exception as error:
            if not self._strategy.world.is_distributed:
                raise
            kind = UnsupportedOption if isinstance(error, UnsupportedOption) else RuntimeError
            failure = (kind, str(error) if kind is UnsupportedOption else f"{type(error).__name__}: {error}")
        failures = [each for each in gather_objects(self._strategy.world, failure) if each is not None]
        if any(kind is Stopped for kind, _ in failures):
            raise self._stop()
        if failures:
            kind, text = failures[0]
            raise kind(text)
        return result

    def _stop(self) -> BaseException:
        noted = self._signals.noted
        if noted is None or noted == signal.SIGINT:
            return KeyboardInterrupt("while the logits of the teacher were computed; complete files are kept")
        return SystemExit(128 + noted)

    def _check_shared(self, missing: Sequence[int]) -> None:
        if missing or self._store.find_missing():
            raise UnsupportedOption(
                f"{self._name}: a process does not see the files of another: name a folder that all of them share."
            )

    # ---- the pass

    def _batches_of(self, part: int) -> Iterator[list[int]]:
        samples = self._store.samples_of(part)
        for first in range(0, len(samples), self._batch_size):
            yield list(samples[first : first + self._batch_size])

    @contextmanager
    def _reading(self, lists: Sequence[list[int]]) -> Iterator[Iterator[Any]]:
        """Reads batches of indices, with the workers of the loader."""
        reader = iter(self._loader.over(lists))
        try:
            yield reader
        finally:
            stop = getattr(reader, "_shutdown_workers", None)
            if callable(stop):
                stop()

    def _make_part(self, part: int | None, batches: Iterator[Any]) -> int:
        """Makes a part, or nothing, and returns its bytes."""
        if part is None:
            return 0
        samples: list[Sample] = []
        num_classes = 0
        for indices in self._batches_of(part):
            if self._signals.noted is not None:
                raise Stopped
            found, num_classes = self._ask(next(batches), len(indices))
            for index, sample in zip(indices, found, strict=True):
                check_values(sample, index, self._name)
            samples += found
        return self._store.write(part, samples, num_classes)

    def _ask(self, batch: Any, num_samples: int) -> tuple[list[Sample], int]:
        """Returns the values of the samples of a batch, and the number of classes."""
        if not isinstance(batch, Mapping):
            raise UnsupportedOption(f"{self._name}: the batches hold no named inputs; let the dataset return dicts.")
        inputs = self._prepare({name: value for name, value in batch.items() if name != KEY})
        taught = self._distillation
        labels = None if taught.is_unlabelled(inputs) else taught.labels_of(inputs)
        with self._strategy.forward_context():
            logits = taught.ask(inputs, labels)
            if len(logits) != num_samples:
                raise UnsupportedOption(
                    f"{self._name}: the collator made {len(logits)} rows of {num_samples} samples: leave it out."
                )
            values = kept_values(logits, taught.settings.top_k, taught.settings.temperature)
        kept = stored_positions(labels, logits)
        counts = kept.reshape(num_samples, -1).sum(1).tolist()
        rows = row_checks(inputs, taught.normalizer.label_names, num_samples).tolist()
        split = {name: torch.split(value[kept].cpu(), counts) for name, value in values.items()}
        samples = [Sample(row, {name: split[name][i].clone() for name in split}) for i, row in enumerate(rows)]
        return samples, logits.shape[-1]

    def _check_teacher(self, is_there: bool) -> None:
        """Checks on the first process that the values of a sample are the same alone and in a batch, and on disk.

        Raises:
            UnsupportedOption: they differ.
        """
        if not self._strategy.world.is_first:
            return
        batch = next(self._batches_of(0))
        alone = [[index] for index in batch[:NUM_PROBED]]
        with self._reading([batch, *alone, batch[:1]]) as batches:
            together, _ = self._ask(next(batches), len(batch))
            single = [self._ask(next(batches), 1)[0][0] for _ in alone]
            again = self._ask(next(batches), 1)[0][0]
        if again.row != single[0].row:
            raise UnsupportedOption(
                f"{self._name}: sample {batch[0]} was read twice with different contents: a dataset or a collator that "
                "draws random numbers has no logits that could be kept; leave distillation_cache out."
            )
        for index, one, other in zip(batch, together, single, strict=False):
            if one.row != other.row or not are_close(one, other):
                raise UnsupportedOption(
                    f"{self._name}: the teacher's logits of sample {index} differ alone and in a batch: they depend on "
                    "the padding or on the other samples. Pad on the right with an attention_mask, or to one length, "
                    "or leave distillation_cache out."
                )
        held = [self._store.read(index)[0] for index in batch] if is_there else []
        for index, sample, kept in zip(batch, together, held, strict=False):
            if sample.row == kept.row and not are_close(sample, kept):
                raise UnsupportedOption(
                    f"{self._name}: the teacher's logits of sample {index} are not those in {self._store.folder}: its "
                    "code has been changed. Delete this folder, or name another one."
                )


def kept_values(logits: Tensor, top_k: int | None, temperature: float) -> dict[str, Tensor]:
    """Returns what is kept of logits `(..., num_classes)`: all of them, or the likeliest classes."""
    if top_k is None or top_k >= logits.shape[-1]:
        return {"logits": logits}
    top = top_classes(logits, top_k, temperature)
    return {"log_probabilities": top.log_probabilities, "indices": top.indices.int(), "rest": top.rest}


def check_values(sample: Sample, index: int, name: str) -> None:
    """Checks that the logits of a sample are numbers; -inf excludes a class.

    Raises:
        UnsupportedOption: they are not.
    """
    for value in sample.values.values():
        if value.is_floating_point() and bool((value.isnan() | (value == math.inf)).any()):
            raise UnsupportedOption(
                f"{name}: the teacher's logits of sample {index} hold inf or NaN: nothing is kept of them. Check the "
                "weights of the teacher, or compute in full precision."
            )


def are_close(one: Sample, other: Sample) -> bool:
    """Returns True if the values of two passes over a sample differ by rounding only."""
    if set(one.values) != set(other.values):
        return False
    for name, value in one.values.items():
        if not value.is_floating_point():
            continue
        given = other.values[name]
        if value.shape != given.shape:
            return False
        # of the likeliest classes too: their order may change by rounding, their probabilities do not
        first, second = (torch.nan_to_num(widen(each), neginf=-100.0).double() for each in (value, given))
        scale = float(first.norm()) + math.sqrt(first.numel())
        if float((first - second).norm()) > TOLERANCE[value.element_size()] * scale:
            return False
    return True


def digest_of(teacher: nn.Module) -> str:
    """Returns a hash of a model's class, configuration, parameters and buffers."""
    model = innermost(teacher)
    digest = hashlib.blake2b(f"{type(model).__module__}.{type(model).__qualname__}".encode(), digest_size=16)
    config: Any = getattr(model, "config", None)
    if callable(getattr(config, "to_dict", None)):
        shown = {name: value for name, value in config.to_dict().items() if name not in NOT_OF_CONFIG}
        digest.update(json.dumps(shown, sort_keys=True, default=str).encode())
    for name, tensor in (*teacher.named_parameters(), *teacher.named_buffers()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def key_of(distillation: Distillation, dataset: Any, precision: str) -> str:
    """Returns the key of a cache: a hash of what its values depend on.

    Raises:
        UnsupportedOption: the rows of the dataset are random.
    """
    found = fingerprint(dataset, math.inf)
    if "random" in found.get("note", ""):
        raise UnsupportedOption(
            "distillation_cache: a row of the dataset was read twice with different contents, and random rows have no "
            "logits that could be kept: leave it out."
        )
    settings = distillation.settings
    facts = {
        "version": VERSION,
        "length": len(dataset),
        "rows": found.get("rows"),
        "teacher": digest_of(distillation.teacher),
        "precision": precision,
        "kept": None if settings.top_k is None else [settings.top_k, settings.temperature],
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def open_cache(
    distillation: Distillation,
    options: Options,
    *,
    precision: str,
    strategy: SingleDevice,
    loader: Any,
    ids: WindowIds,
    prepare: Callable[[Any], Any],
    signals: StopSignals,
) -> CachedLogits:
    """Returns the cache of a run, after its missing parts have been made; collective.

    Raises:
        UnsupportedOption: the samples of a pass are not known, or their logits depend on other samples.
    """
    name = f"distillation_cache={str(options.distillation_cache)!r}"
    obstacle = find_obstacle(options, loader)
    if obstacle is not None:
        raise UnsupportedOption(f"{name} {obstacle}")
    world = strategy.world
    with preserved_rng(), distillation.evaluating(), torch.no_grad():
        distillation.teacher.to(strategy.device)
        keys = gather_objects(world, key_of(distillation, loader.dataset, precision))
        if len(set(keys)) > 1:
            raise UnsupportedOption(f"{name}: the processes have different teachers or datasets: load the same ones.")
        folder = Path(str(options.distillation_cache)).expanduser() / keys[0]
        store = LogitStore(folder, keys[0], len(loader.dataset))
        CacheMaker(distillation, store, strategy, loader, prepare, signals, name).make()
    distillation.teacher.to("cpu")  # it computes no more logits
    return CachedLogits(store, ids, distillation.normalizer.label_names, name)
