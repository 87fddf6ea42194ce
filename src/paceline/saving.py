"""Writing checkpoints: what goes into one, when it is written, which stay.

A checkpoint is copied to host memory and written behind the training, one at a time, unless something needs its folder
at once (`why_at_once`). A save that the disk refuses is given up with a warning, the checkpoints before it stay whole,
and training goes on; a best model that could not be written is kept in memory and tried again.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from paceline.checkpoint import files
from paceline.checkpoint.adapters import has_adapters
from paceline.checkpoint.background import (
    HostBuffers,
    HostCopy,
    NotCopyable,
    Writer,
    available_host_memory,
    size_of,
    writes_itself_safely,
)
from paceline.checkpoint.frozen import FrozenPart
from paceline.checkpoint.named import load_model_in_place, read_any_weights
from paceline.checkpoint.shards import MODEL_FOLDER, is_sharded
from paceline.core import folders
from paceline.core.manifest import KnownFile
from paceline.core.resuming import PROGRESS_FILE, STATE_FILE
from paceline.core.retention import retention_of, rotate
from paceline.core.space import Place, in_words
from paceline.core.state import export_states, write_values
from paceline.distributed.collectives import gather_objects, share_object
from paceline.distributed.random import capture_rng
from paceline.optim.modes import evaluation_weights
from paceline.progress import CALLBACKS_FILE, describe_progress
from paceline.sharded_saving import ShardedJob, ShardedSaves, save_description, take_shards, writes_shards

if TYPE_CHECKING:
    from paceline.trainer import Trainer

logger = logging.getLogger(__name__)


# a method that a subclass has its own of may read what is in the folder: it is called when all before it is there
_FILLING_METHODS = (
    "_save_checkpoint",
    "save_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
)


@dataclass
class Job:
    """One checkpoint on its way to the disk; `run` may fail and be done again.

    Attributes:
        folder: where it will be.
        temporary: the hidden folder that it is written in.
        place: asked for room first.
        num_bytes: what it will take.
        copy: what is still to be written; None: everything has been.
        known: files whose hash is known.
        is_best: whether it holds the best model so far.
    """

    folder: Path
    temporary: Path
    place: Place
    num_bytes: int = 0
    copy: HostCopy | None = None
    known: dict[str, KnownFile] = field(default_factory=dict)
    is_best: bool = False

    def run(self) -> None:
        """Write and publish. Raises: OSError, when the disk refuses."""
        if self.copy is not None:
            self.place.check(self.num_bytes)
            self.copy.write()
        folders.publish(self.temporary, self.folder, self.known)

    def later(self, write: Callable[[], Any]) -> None:
        """Write something with the rest, or at once where nothing is put off."""
        if self.copy is None:
            write()
        else:
            self.copy.add(write)

    def drop(self) -> None:
        """Leave nothing of it."""
        shutil.rmtree(self.temporary, ignore_errors=True)


@dataclass
class Saves:
    """The saves of one run.

    Attributes:
        writer: the thread that writes, and what has ended on it.
        buffers: the host memory of the copies.
        frozen: where the weights that do not train are stored.
        job: the checkpoint being taken now.
        postponed: a best model that could not be written yet.
        failed: names of the checkpoints that could not be written since the last that could.
        is_published: whether the last checkpoint was there when the save returned.
        random: the random states of all processes at the moment of the save, by rank; None between saves.
        positions: their places in the data, where they are not the same.
        whole: model and optimizer state put together from the shards of all processes; None where there are no shards.
        sharded: what checkpoints in shards keep from one to the next.
    """

    writer: Writer = field(default_factory=Writer)
    buffers: HostBuffers = field(default_factory=HostBuffers)
    frozen: FrozenPart = field(default_factory=FrozenPart)
    job: Job | ShardedJob | None = None
    postponed: Job | None = None
    failed: list[str] = field(default_factory=list)
    is_published: bool = True
    random: list[Any] | None = None
    positions: list[Any] | None = None
    whole: dict[str, Any] | None = None
    sharded: ShardedSaves = field(default_factory=ShardedSaves)
    _place: Place | None = None
    _obstacle: str | None = None  # why copies of this run cannot be written later
    _said: set[str] = field(default_factory=set)

    def place_of(self, output_dir: Path) -> Place:
        """The place of the run's checkpoints, as it was at its first save."""
        if self._place is None or self._place.folder != output_dir:
            self._place = Place(output_dir)
        return self._place

    def say_once(self, sentence: str) -> None:
        """Log a sentence that is true of every save, at the first."""
        if sentence not in self._said:
            self._said.add(sentence)
            logger.info(sentence)

    def close(self, folder: Path | None) -> None:
        """Wait for what is being written, and free the memory of the copies. Raises nothing: another error may be.

        Args:
            folder: of the run; a save that an error cut off at any line (torch raises in a signal handler, when a
                worker dies) is cleared from it. None: this process writes nothing there.
        """
        try:
            self.writer.join()
        except Exception:
            logger.exception("A callback failed when it was told of the last checkpoint.")
        if self.postponed is not None:
            self.postponed.drop()
            self.postponed = None
        self.buffers.clear()
        self.sharded.close()
        if folder is not None:
            folders.recover(folder, logger.info)


# ---- one checkpoint


def save_checkpoint(trainer: Trainer, trial: Any) -> None:
    """Write one checkpoint: into a hidden folder first, published by one rename. The body of `_save_checkpoint`.

    Of several processes each gives its part, and one writes (one of each machine, with `save_on_each_node`). What
    became of it is what the first process says. In shards, each writes its own.
    """
    saves, world = trainer.run.saves if trainer.run is not None else Saves(), trainer.world
    saves.writer.join()  # one at a time, and its memory is needed
    saves.is_published = False
    trainer.store_flos()
    folder = Path(trainer._get_output_dir(trial)) / folders.checkpoint_name(trainer.state.global_step)
    best_before = trainer.state.best_model_checkpoint
    is_best = point_to_best(trainer, folder, is_coming=True)
    saves.random = gather_objects(world, capture_rng())
    saves.positions = gather_positions(trainer)
    all_write = writes_shards(trainer)
    saves.whole = None if all_write else gather_shards(trainer)
    try:
        if trainer.args.should_save or all_write:
            write_checkpoint(trainer, saves, folder, is_best, best_before)
    finally:
        saves.random = saves.positions = saves.whole = None
    if world.is_shared and not all_write:
        has_failed, best = share_object(world, (folder.name in saves.failed, trainer.state.best_model_checkpoint))
        trainer.state.best_model_checkpoint = best
        if not trainer.args.should_save:  # nobody waits for the files where they are written behind the training
            saves.is_published = not has_failed


def gather_positions(trainer: Trainer) -> list[Any] | None:
    """Where each of several processes stands in its own part of the data; None where one position says it."""
    run = trainer.run
    if run is None or not trainer.world.is_shared or run.feed.is_common:
        return None
    mesh, positions = trainer.strategy.mesh, gather_objects(trainer.world, run.feed.state_dict())
    return [position for rank, position in enumerate(positions) if mesh.speaks(rank)]


def gather_shards(trainer: Trainer) -> dict[str, Any] | None:
    """Model and optimizer state whole, where processes hold shards of them; all of these take part."""
    strategy = trainer.strategy
    if not (strategy.is_sharded or strategy.is_opaque):
        return None
    with evaluation_weights(trainer.optimizer, trainer.is_in_train):
        model = strategy.full_weights(strategy.unwrap(trainer.model))
        has_state = trainer.optimizer is not None and not trainer.args.save_only_model
        return {"model": model, "optimizer": strategy.full_state(trainer.optimizer.state_dict()) if has_state else None}


def whole_weights(trainer: Trainer) -> dict[str, Tensor] | None:
    """The model's weights put together from shards: gathered for the checkpoint being written, or now; None: no need.

    Gathering takes all processes.
    """
    saves = trainer.run.saves if trainer.run is not None else None
    if saves is not None and isinstance(saves.job, ShardedJob):
        return None  # every process writes its own
    if saves is not None and saves.whole is not None:
        return dict(saves.whole["model"])
    strategy = trainer.strategy
    needs_copy = strategy.is_sharded or strategy.is_opaque
    return strategy.full_weights(strategy.unwrap(trainer.model)) if needs_copy else None


def load_weights(trainer: Trainer, model: nn.Module, folder: str) -> list[str]:
    """The body of `_load_from_checkpoint`; returns a sentence for each thing worth knowing."""
    if is_sharded(Path(folder, MODEL_FOLDER)) and load_model_in_place(files.without_compile(model), Path(folder)):
        return []
    has_part = trainer.strategy.holds_part_of(model)
    weights = read_any_weights(Path(folder), has_part)
    if weights is None or not has_part:
        return files.load_model(model, folder, weights)
    missing, unexpected = trainer.strategy.load_full(model, weights)
    return [f"{folder}: {', '.join(names)} {what}" for names, what in
            ((missing, "are missing"), (unexpected, "are not known")) if names]  # fmt: skip


def write_checkpoint(trainer: Trainer, saves: Saves, folder: Path, is_best: bool, best_before: str | None) -> None:
    """Take what belongs into the checkpoint, and write it now or behind the training."""
    try:
        if writes_shards(trainer):
            job: Any = take_shards(trainer, saves, folder, fill=fill, why_at_once=why_at_once)
        else:
            job = take(trainer, saves, folder, is_best)
    except OSError as error:
        give_up(trainer, saves, folder, best_before, error)
        return
    ended = partial(settle, trainer, saves, job, best_before)
    work = partial(write, saves, job, partial(tidy, trainer, folder.parent))
    if job.copy is not None:
        saves.writer.start(work, ended)
        return
    try:
        work()
    except OSError as error:
        ended(error)
    except BaseException:
        job.drop()
        raise
    else:
        saves.failed.clear()
        saves.is_published = True
        if trainer.args.push_to_hub and trainer.args.should_save:
            trainer._push_from_checkpoint(str(folder))


def point_to_best(trainer: Trainer, folder: Path, *, is_coming: bool) -> bool:
    """Let the state name the best checkpoint, where that is there, or is this one and about to be.

    Returns: whether `folder` is the best.
    """
    state = trainer.state
    if not state.best_global_step:
        return False
    best = folder.with_name(folders.checkpoint_name(state.best_global_step))
    if (best == folder and is_coming) or best.is_dir():
        state.best_model_checkpoint = str(best)
    return best == folder


def take(trainer: Trainer, saves: Saves, folder: Path, is_best: bool) -> Job:
    """Everything that belongs into the checkpoint: copied to be written later, or written now.

    Raises: OSError, when there is no room, or the disk refuses.
    """
    place = saves.place_of(folder.parent)
    sizes = sizes_of(trainer, saves)
    reason = why_at_once(trainer, saves, sum(sizes))
    try:
        place.check(sum(sizes) - (sizes[1] if saves.frozen.stored is not None else 0))
    except OSError:
        if reason is not None or not is_best:
            raise  # a best model is copied all the same: there may be room for it later
    if reason:
        saves.say_once(f"Training waits for each checkpoint to be written: {reason}.")
    job = Job(folder, folders.begin(folder), place, num_bytes=sum(sizes), is_best=is_best)
    job.copy = HostCopy(saves.buffers) if reason is None else None
    saves.job = job
    try:
        with evaluation_weights(trainer.optimizer, trainer.is_in_train):
            fill(trainer, job)
        saves.buffers.finish()
    except NotCopyable as error:
        job.drop()
        saves.buffers.clear()
        saves._obstacle = str(error)
        return take(trainer, saves, folder, is_best)
    except BaseException:
        job.drop()
        saves.buffers.give_back()
        raise
    finally:
        saves.job = None
    return job


def fill(trainer: Trainer, job: Job | ShardedJob) -> None:
    """Call the methods that write the parts, each of which a subclass may have its own of."""
    state, path = trainer.state, str(job.temporary)
    trainer.save_model(path, _internal_call=True)
    if not trainer.args.save_only_model:
        trainer._save_optimizer_and_scheduler(path)
        trainer._save_scaler(path)
        trainer._save_rng_state(path)
    exporting = [*trainer.callback_handler.callbacks, trainer.control]
    state.stateful_callbacks = export_states([item for item in exporting if callable(getattr(item, "state", None))])
    job.later(partial(write_values, state.plain_values(), job.temporary / STATE_FILE))
    text, states = describe_progress(trainer)
    if states:
        put(trainer, states, path, CALLBACKS_FILE)
    job.later(partial((job.temporary / PROGRESS_FILE).write_text, text, encoding="utf-8"))


def write(saves: Saves, job: Job | ShardedJob, then: Callable[[], None]) -> None:
    """Write and publish, on whichever thread; a postponed one first."""
    if saves.postponed is not None:
        try:
            saves.postponed.run()
        except OSError as error:
            logger.warning("%s could not be written yet either: %s", saves.postponed.folder, error)
            if not saves.postponed.temporary.is_dir():
                saves.postponed = None
        else:
            logger.warning("%s, the best model when it was taken, has been written now.", saves.postponed.folder)
            saves.postponed = None
    job.run()
    saves.frozen.published(job.folder)
    then()


def settle(trainer: Trainer, saves: Saves, job: Any, best_before: str | None, error: BaseException | None) -> None:
    """What is left to do on the main thread when a checkpoint has been written, or could not be."""
    if error is None:
        saves.failed.clear()
        saves.buffers.give_back()
        if trainer.args.push_to_hub and trainer.args.should_save:
            trainer._push_from_checkpoint(str(job.folder))
        fire_saved(trainer)
    elif isinstance(error, OSError):
        if job.copy is not None and job.is_best and job.temporary.is_dir():
            if saves.postponed is not None:
                saves.postponed.drop()  # it is the best no more
            saves.postponed, saves.buffers = job, HostBuffers()
        else:
            job.drop()
            saves.buffers.give_back()
        give_up(trainer, saves, job.folder, best_before, error)
    else:
        job.drop()
        saves.buffers.clear()
        saves._obstacle = f"writing {job.folder.name} behind it ended with {type(error).__name__}: {error}"
        give_up(trainer, saves, job.folder, best_before, error)


def give_up(trainer: Trainer, saves: Saves, folder: Path, best_before: str | None, error: BaseException) -> None:
    """Say that a checkpoint was not written, and let the best be the one that it was before."""
    state = trainer.state
    if state.best_model_checkpoint == str(folder) and not folder.is_dir():
        state.best_model_checkpoint = best_before
    saves.failed.append(folder.name)
    kept = saves.postponed is not None and saves.postponed.folder == folder
    logger.warning(
        "%s could not be written: %s. Training goes on; the checkpoints before it are whole. %s",
        folder,
        error,
        "It holds the best model, so it stays in memory and is tried again with the next save."
        if kept
        else "The next save is tried when it is due.",
        exc_info=None if isinstance(error, OSError) else error,
    )


def fire_saved(trainer: Trainer) -> None:
    """Tell the callbacks that a checkpoint has been published."""
    loop = trainer.run.loop if trainer.run is not None else None
    control = loop.control if loop is not None else trainer.control
    trainer.control = trainer.callback_handler.fire("on_save", trainer.args, trainer.state, control)
    trainer._share_control()


def tidy(trainer: Trainer, output_dir: Path) -> None:
    """Delete the checkpoints that no policy keeps. On the thread that writes: deleting takes its time too."""
    state = trainer.state
    point_to_best(trainer, output_dir / folders.checkpoint_name(state.global_step), is_coming=False)
    if trainer.args.should_save:
        try:
            rotate(output_dir, retention_of(trainer.args), list(state.log_history), state.best_model_checkpoint)
        except OSError as error:
            logger.warning("Old checkpoints in %s could not be deleted: %s", output_dir, error)


def finish(trainer: Trainer, output_dir: Path) -> None:
    """At the end of a run: wait for what is being written, try once more what was not, and tidy up.

    Of several processes all go on when the first has done so, and know what it says is the best.
    """
    assert trainer.run is not None
    saves = trainer.run.saves
    saves.writer.join()
    job = saves.postponed
    if job is not None:
        try:
            job.run()
        except OSError as error:
            logger.error("%s, the best model, could not be written and is lost: %s", job.folder, error)
            job.drop()
        else:
            trainer.state.best_model_checkpoint = str(job.folder)
        saves.postponed = None
    if saves.failed:
        logger.error("The run ends without %s: see the warnings above.", ", ".join(saves.failed))
    tidy(trainer, output_dir)
    state = trainer.state
    state.best_model_checkpoint = share_object(trainer.world, state.best_model_checkpoint)


# ---- at once or behind the training


def why_at_once(trainer: Trainer, saves: Saves, num_bytes: int) -> str | None:
    """Why training must wait until this checkpoint is written, in words; None where it need not.

    An empty text where the user asked for that.
    """
    if trainer.run is None or not trainer.args.save_in_background:
        return ""
    if saves.whole is not None:
        return "the weights are put together from shards"
    readers = [c for c in trainer.callback_handler.listening("on_save") if getattr(c, "reads_checkpoint", True)]
    if readers:
        return f"{type(readers[0]).__name__} listens to on_save (reads_checkpoint = False says that it needs no files)"
    own = next(kind for kind in type(trainer).__mro__ if kind.__module__ == "paceline.trainer")
    for name in _FILLING_METHODS:
        if getattr(getattr(trainer, name), "__func__", None) is not getattr(own, name):
            return f"{type(trainer).__name__} has its own {name}"
    if saves._obstacle is not None:
        return saves._obstacle
    model = trainer.strategy.unwrap(trainer.model)
    if callable(getattr(model, "save_pretrained", None)) and not writes_itself_safely(model):
        return f"{type(model).__name__} has its own save_pretrained"
    available = available_host_memory()
    needed = num_bytes - saves.buffers.num_bytes
    if available is not None and 1.25 * needed > available:
        return f"a copy needs {in_words(needed)} of host memory, and {in_words(available)} are available"
    return None


def sizes_of(trainer: Trainer, saves: Saves) -> tuple[int, int]:
    """Bytes of the weights that train and of the optimizer's state; and of the weights that do not train."""
    model = trainer.strategy.unwrap(trainer.model)
    trained: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen: list[Tensor] = []
    if not has_adapters(model):  # which are saved without the model that they adapt
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        trained += model.buffers()
    states: Any = {} if trainer.args.save_only_model else getattr(trainer.optimizer, "state", {})
    tensors = chain.from_iterable(entry.values() for entry in states.values() if isinstance(entry, Mapping))
    state_tensors = (value for value in tensors if isinstance(value, Tensor))
    return size_of(chain(trained, state_tensors)), size_of(frozen)


# ---- its parts


def put(trainer: Trainer, state: Any, folder: str, name: str) -> None:
    """Write a file of tensors and plain values, or copy them to be written later."""
    job = trainer.run.saves.job if trainer.run is not None else None
    if job is not None and job.copy is not None and Path(folder) == job.temporary:
        job.copy.add_tensors(state, Path(folder, name))
    else:
        files.save_tensors(state, Path(folder, name))


def save_weights(trainer: Trainer, folder: Path, state_dict: Mapping[str, Tensor] | None) -> None:
    """The body of `_save`: the model, the processing class, and the arguments for people to read."""
    saves = trainer.run.saves if trainer.run is not None else None
    job = saves.job if saves is not None and saves.job is not None and saves.job.temporary == folder else None
    model = trainer.strategy.unwrap(trainer.model)
    with trainer.edits.as_given() if trainer.edits is not None else nullcontext():
        if isinstance(job, ShardedJob):
            save_description(model, folder)
        elif saves is None or job is None or state_dict is not None:
            files.save_model(model, folder, state_dict=state_dict)
        elif callable(getattr(model, "save_pretrained", None)):
            if job.copy is None:
                files.save_model(model, folder)
            else:
                job.copy.add_model(model, folder)
        else:
            job.known.update(files.store_weights(model, folder, saves.frozen, job.copy))
    save_beside(trainer, folder)


def save_beside(trainer: Trainer, folder: Path) -> None:
    """The processing class, and the arguments for people to read."""
    processing_class = trainer.processing_class
    if processing_class is None:  # the one that the batches are made with
        processing_class = getattr(trainer.data_collator, "tokenizer", None)
    if hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(str(folder))
    put(trainer, files.showable_arguments(trainer.args.to_sanitized_dict()), str(folder), files.TRAINING_ARGS_NAME)


def save_optimizer_and_scheduler(trainer: Trainer, folder: str) -> None:
    """The body of `_save_optimizer_and_scheduler`."""
    saves = trainer.run.saves if trainer.run is not None else None
    if trainer.optimizer is not None and not (saves is not None and isinstance(saves.job, ShardedJob)):
        whole = saves.whole if saves is not None else None
        state = whole["optimizer"] if whole is not None else trainer.optimizer.state_dict()
        put(trainer, state, folder, files.OPTIMIZER_NAME)
    if trainer.lr_scheduler is not None:
        put(trainer, trainer.lr_scheduler.state_dict(), folder, files.SCHEDULER_NAME)


def save_scaler(trainer: Trainer, folder: str) -> None:
    """The body of `_save_scaler`: the gradient scaler of float16, if there is one."""
    state = trainer.strategy.precision.state_dict()
    if state:
        put(trainer, state, folder, files.SCALER_NAME)


def save_rng_state(trainer: Trainer, folder: str) -> None:
    """The body of `_save_rng_state`: those of all processes in a checkpoint, else that of this one."""
    world = trainer.world
    gathered = trainer.run.saves.random if trainer.run is not None else None
    for rank, state in enumerate(gathered) if gathered is not None else [(world.process_index, capture_rng())]:
        put(trainer, state, folder, files.rng_name(rank, world.world_size))
