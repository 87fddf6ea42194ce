"""The Checkpointer: saves and restores the items of a run, through methods that a subclass may override.

Checkpoints are copied to host memory and written asynchronously, one at a time, unless something needs the files
immediately (`Checkpointer.why_at_once`). If the disk refuses a save, it is abandoned with a warning, earlier
checkpoints stay intact, and training continues. A best model that could not be written is kept in memory and retried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint import folders
from paceline.checkpoint.layout import DATA, OPTIMIZER, OPTIMIZER_FOLDER, PRECISION, RNG, SCHEDULER, is_sharded
from paceline.checkpoint.log_blocks import StateFile, is_last_checkpoint
from paceline.checkpoint.resuming import (
    STATE_FILE,
    announce_resume,
    forget_other_best,
    forget_other_count,
    report_changes,
)
from paceline.checkpoint.retention import Retention, rotate
from paceline.core.byte_sizes import format_bytes
from paceline.core.callback_states import restore_callback_states
from paceline.core.events import CallbackHandler
from paceline.core.lineage import PROGRESS_FILE, RunMark, is_part, mark_of
from paceline.core.log_text import LogText
from paceline.core.methods import is_ours
from paceline.core.state import TrainerControl, TrainerState
from paceline.pytorch.checkpoint import files
from paceline.pytorch.checkpoint.background import available_host_memory, writes_itself_safely
from paceline.pytorch.checkpoint.fqn_state import load_foreign_optimizer, load_optimizer_shards
from paceline.pytorch.checkpoint.items import Contents, Format, file_of, further
from paceline.pytorch.checkpoint.resume_state import CALLBACKS_FILE, describe_progress, read_progress, saved_callbacks
from paceline.pytorch.checkpoint.saves import Job, Saves
from paceline.pytorch.checkpoint.validate_state import wrap_load_error
from paceline.pytorch.data.feed import StatefulDataIterator
from paceline.pytorch.distributed.collectives import gather_objects, share_object
from paceline.pytorch.distributed.random import separate_streams
from paceline.pytorch.optim.groups import group_settings, overridden_options

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveHooks:
    """The methods that write and read the parts of a checkpoint, bound to the Trainer, so that overrides are called.

    Attributes:
        owner: the name of the Trainer's class, for messages.
        save_checkpoint, save: not called here; an override of them needs the folder.
        save_model, save_optimizer_and_scheduler, save_scaler, save_rng_state: write their part into a folder.
        load_optimizer_and_scheduler, load_scaler, load_rng_state: read that part back.
        load_best_model: loads the weights of the best checkpoint.
        name_checkpoint: returns the text of a checkpoint's folder in the state: relative if `output_dir` is.
        store_flos: adds the floating-point operations counted so far to the state.
        push: uploads a published checkpoint to the hub.
        fire_saved: fires `on_save`.
    """

    owner: str
    save_checkpoint: Callable[..., Any]
    save_model: Callable[..., Any]
    save: Callable[..., Any]
    save_optimizer_and_scheduler: Callable[[str], Any]
    save_scaler: Callable[[str], Any]
    save_rng_state: Callable[[str], Any]
    load_optimizer_and_scheduler: Callable[[str], Any]
    load_scaler: Callable[[str], Any]
    load_rng_state: Callable[[str], Any]
    load_best_model: Callable[[], Any]
    name_checkpoint: Callable[[Path], str]
    store_flos: Callable[[], None]
    push: Callable[[str], Any]
    fire_saved: Callable[[], None]

    def overridden(self) -> str | None:
        """Returns the name of a method that user code overrides, and that may read the folder; None if there is none.

        Such a method may rely on all earlier files being written when it is called.
        """
        methods = {
            "_save_checkpoint": self.save_checkpoint,
            "save_model": self.save_model,
            "_save": self.save,
            "_save_optimizer_and_scheduler": self.save_optimizer_and_scheduler,
            "_save_scaler": self.save_scaler,
            "_save_rng_state": self.save_rng_state,
        }
        return next((name for name, method in methods.items() if not is_ours(method)), None)


@dataclass(frozen=True)
class SaveSettings:
    """The options of saving and restoring.

    Attributes:
        should_save: this process writes files, in formats in which not all processes write.
        push_to_hub: published checkpoints are uploaded.
        in_background: `save_in_background`.
        all_rows: `save_full_log_history`.
        retention: decides which checkpoints are kept.
        describe_arguments: returns the arguments as plain values.
        restores_arguments: `restore_callback_states_from_checkpoint`.
        reports_changes: log the arguments that differ from those of the restored checkpoint.
    """

    should_save: bool
    push_to_hub: bool
    in_background: bool
    all_rows: bool
    retention: Retention
    describe_arguments: Callable[[], Mapping[str, Any]]
    restores_arguments: bool
    reports_changes: bool


@dataclass(eq=False, kw_only=True)
class Checkpointer:
    """Saves the items of a run, and restores them.

    Args:
        contents: the items, and how their tensors are placed.
        format: the form in which model and optimizer are stored.
        saves: the state of the run's saves; a separate one outside of a run.
        in_run: a run is in progress; outside of a run checkpoints are written synchronously.
        state: the Trainer's state.
        log_text: the log of the run; empty outside of a run.
        handler: the callbacks.
        read_control: returns the current control.
        read_mark: returns the current mark of the run, None before the first run.
        mark_saved: returns the mark for a checkpoint written now; None outside of a run.
        hooks: the methods that write and read the parts of a checkpoint.
        settings: the options.
    """

    contents: Contents
    format: Format
    saves: Saves
    in_run: bool
    state: TrainerState
    log_text: LogText
    handler: CallbackHandler
    read_control: Callable[[], TrainerControl]
    read_mark: Callable[[], RunMark | None]
    mark_saved: Callable[[], RunMark] | None
    hooks: SaveHooks
    settings: SaveSettings

    def __post_init__(self) -> None:
        self.items = self.contents.items
        self.world = self.contents.world

    # ---- one checkpoint

    def save(self, output_dir: Path) -> None:
        """Writes one checkpoint into a hidden folder, which one rename publishes. The body of `_save_checkpoint`.

        In the full format all processes contribute their shards, one process writes (one on each machine with
        `save_on_each_node`), and the first process decides the outcome. In the sharded format each process writes its
        own shards.
        """
        saves, world, state = self.saves, self.world, self.state
        saves.begin()
        self.hooks.store_flos()
        folder = output_dir / folders.checkpoint_name(state.global_step)
        logger.info("Saving model checkpoint to %s", folder)
        best_before = state.best_model_checkpoint
        is_best = self._point_to_best(folder, is_coming=True)
        random = gather_objects(world, self.items[RNG].state_dict())
        with saves.gathered(random, self._gather_positions(), self.format.gather()):
            if self.settings.should_save or self.format.all_write:
                self._write(folder, is_best, best_before)
        if world.is_distributed and not self.format.all_write:
            has_failed, best = share_object(world, (folder.name in saves.failed, state.best_model_checkpoint))
            state.record_best(best)
            if not self.settings.should_save and not has_failed:
                saves.published_elsewhere()

    def _gather_positions(self) -> list[Any] | None:
        """Returns the position in the data of each data shard; None if one position suffices."""
        feed = self.items.get(DATA)
        if not isinstance(feed, StatefulDataIterator) or not self.world.is_distributed or feed.is_common:
            return None
        mesh = self.contents.strategy.mesh
        positions = gather_objects(self.world, feed.state_dict())
        return [position for rank, position in enumerate(positions) if mesh.is_data_leader(rank)]

    def _write(self, folder: Path, is_best: bool, best_before: str | None) -> None:
        """Collects the contents of the checkpoint, and writes them now or asynchronously."""
        try:
            job = self.format.take(folder, is_best, self.fill, self.why_at_once)
        except OSError as error:
            self._report_failure(folder, best_before, error)
            return
        ended = partial(self._settle, job, best_before)
        work = partial(self._publish, job)
        if job.copy is not None:
            self.saves.writer.start(work, ended)
            return
        try:
            work()
        except OSError as error:
            ended(error)
        except BaseException:
            job.drop()
            raise
        else:
            self.saves.published()
            self._push(folder)

    def fill(self, job: Job) -> None:
        """Calls the methods that write the parts of a checkpoint, each of which a subclass may override."""
        path, hooks = str(job.temporary), self.hooks
        hooks.save_model(path, _internal_call=True)
        if not self.contents.save_only_model:
            hooks.save_optimizer_and_scheduler(path)
            hooks.save_scaler(path)
            hooks.save_rng_state(path)
            self.write_items(path, further(self.items))
        self.state.record_callbacks([*self.handler.callbacks, self.read_control()])
        is_whole = self.settings.all_rows or not self.in_run or is_last_checkpoint(self.state, self.read_control())
        state_file = StateFile(self.state.text(self.log_text), self.log_text, job.folder, is_whole=is_whole)
        job.later(partial(state_file.write, job.temporary, job.known))
        text, states = describe_progress(
            self.items,
            mark=self.mark_saved() if self.mark_saved is not None else None,
            positions=self.saves.positions,
            arguments=self.settings.describe_arguments(),
            world_size=self.world.world_size,
            data_size=self.contents.strategy.mesh.data_size,
        )
        if states:
            self.saves.put(states, path, CALLBACKS_FILE)
        job.later(partial((job.temporary / PROGRESS_FILE).write_text, text, encoding="utf-8"))

    def _publish(self, job: Job) -> None:
        """Writes a postponed checkpoint, then writes and publishes this one, and deletes old ones; on either thread."""
        self.saves.retry_postponed()
        job.run()
        self.saves.frozen.published(job.folder)
        self._tidy(job.folder.parent)

    def _settle(self, job: Job, best_before: str | None, error: BaseException | None) -> None:
        """Handles the outcome of a checkpoint on the main thread, after it was written or failed."""
        saves = self.saves
        if error is None:
            saves.failed.clear()
            saves.buffers.give_back()
            self._push(job.folder)
            self.hooks.fire_saved()
            return
        if not isinstance(error, OSError):
            job.drop()
            saves.write_in_front(f"writing {job.folder.name} behind it ended with {type(error).__name__}: {error}")
        elif job.is_best and job.can_be_written:
            saves.postpone(job)
        else:
            job.drop()
            saves.buffers.give_back()
        self._report_failure(job.folder, best_before, error)

    def _push(self, folder: Path) -> None:
        if self.settings.push_to_hub and self.settings.should_save:
            self.hooks.push(str(folder))

    def _report_failure(self, folder: Path, best_before: str | None, error: BaseException) -> None:
        """Logs that a checkpoint was not written, and restores the previous best checkpoint in the state."""
        saves = self.saves
        if self.state.best_model_checkpoint == self.hooks.name_checkpoint(folder) and not folder.is_dir():
            self.state.record_best(best_before)
        saves.failed.append(folder.name)
        kept = saves.postponed is not None and saves.postponed.folder == folder
        logger.warning(
            "%s could not be written: %s. Training continues; earlier checkpoints are intact. %s",
            folder,
            error,
            "It holds the best model, so it stays in memory and is tried again with the next save."
            if kept
            else "The next save is tried when it is due.",
            exc_info=None if isinstance(error, OSError) else error,
        )

    # ---- retention

    def _point_to_best(self, folder: Path, *, is_coming: bool) -> bool:
        """Sets the best checkpoint in the state, if its folder exists, or if it is `folder` and is about to be written.

        Returns: True if `folder` is the best.
        """
        if not self.state.best_global_step:
            return False
        best = folder.with_name(folders.checkpoint_name(self.state.best_global_step))
        if (best == folder and is_coming) or (best.is_dir() and is_part(self.read_mark(), best.name, mark_of(best))):
            self.state.record_best(self.hooks.name_checkpoint(best))
        return best == folder

    def _tidy(self, output_dir: Path) -> None:
        """Deletes the checkpoints that no policy keeps. Runs on the writing thread, since deleting takes time too."""
        state = self.state
        self._point_to_best(output_dir / folders.checkpoint_name(state.global_step), is_coming=False)
        if not self.settings.should_save:
            return
        try:
            history, best = list(state.log_history), state.best_model_checkpoint
            for path in rotate(output_dir, self.settings.retention, history, best, run=self.read_mark()):
                logger.info("Deleting older checkpoint [%s] due to args.save_total_limit", path)
        except OSError as error:
            logger.warning("Old checkpoints in %s could not be deleted: %s", output_dir, error)

    def finish(self, output_dir: Path) -> None:
        """Waits for pending writes at the end of a run, retries a postponed one once, and deletes old checkpoints.

        Other processes wait for the first, and adopt its best checkpoint.
        """
        self.saves.writer.join()
        written = self.saves.finish_postponed()
        if written is not None:
            self.state.record_best(self.hooks.name_checkpoint(written))
        if self.saves.failed:
            logger.error("The run ends without %s: see the warnings above.", ", ".join(self.saves.failed))
        self._tidy(output_dir)
        self.state.record_best(share_object(self.world, self.state.best_model_checkpoint))

    # ---- synchronous or asynchronous

    def why_at_once(self, num_bytes: int) -> str | None:
        """Returns the reason for writing this checkpoint synchronously; None to write it asynchronously.

        The text is empty if the user requested synchronous writing.
        """
        saves = self.saves
        if not self.in_run or not self.settings.in_background:
            return ""
        if saves.whole is not None:
            return "the weights are gathered from shards"
        readers = [c for c in self.handler.listening("on_save") if getattr(c, "reads_checkpoint", True)]
        if readers:
            name = type(readers[0]).__name__
            return f"{name} listens to on_save (reads_checkpoint = False says that it needs no files)"
        own = self.hooks.overridden()
        if own is not None:
            return f"{self.hooks.owner} has its own {own}"
        if saves.obstacle is not None:
            return saves.obstacle
        model = self.contents.model
        if callable(getattr(model, "save_pretrained", None)) and not writes_itself_safely(model):
            return f"{type(model).__name__} has its own save_pretrained"
        available = available_host_memory()
        needed = num_bytes - saves.buffers.num_bytes
        if available is not None and 1.25 * needed > available:
            return f"a copy needs {format_bytes(needed)} of host memory, and {format_bytes(available)} are available"
        return None

    # ---- parts of a checkpoint

    def write_items(self, folder: str, names: Iterable[str]) -> None:
        """Writes the files of the named items that exist. Empty states get no file, except optimizer and scheduler."""
        for name in names:
            job = self.saves.job
            if name not in self.items or (name == OPTIMIZER and job is not None and job.in_shards):
                continue  # all processes write their shards of it
            whole = self.saves.whole
            state = whole[name] if whole is not None and name in whole else self.items[name].state_dict()
            if state or name in (OPTIMIZER, SCHEDULER):
                self.saves.put(state, folder, file_of(name))

    def write_random_states(self, folder: str) -> None:
        """Writes the random states of all processes during a checkpoint; otherwise only those of this process."""
        states = dict(enumerate(self.saves.random or []))
        if not states:
            states = {self.world.process_index: self.items[RNG].state_dict()}
        for rank, state in states.items():
            self.saves.put(state, folder, files.rng_name(rank, self.world.world_size))

    # ---- restoring

    def restore(self, checkpoint: Path) -> dict[str, Any] | None:
        """Restores everything except weights and position, which were restored before the strategy prepared the model.

        Returns: the contents of `progress.json`, for the loop; None if another library wrote the checkpoint.
        """
        before = group_settings(self.contents.optimizer)
        self.hooks.load_optimizer_and_scheduler(str(checkpoint))
        overridden = overridden_options(before, group_settings(self.contents.optimizer))
        self.hooks.load_scaler(str(checkpoint))
        self.load_items(checkpoint, further(self.items))
        progress = read_progress(checkpoint)
        self._restore_callbacks(checkpoint, progress)
        arguments = self.settings.describe_arguments()
        forget_other_best(self.state, progress, arguments)
        forget_other_count(self.state, progress, arguments)
        if self.settings.reports_changes and self.state.is_world_process_zero:
            report_changes(checkpoint, progress, arguments, overridden)
        self.hooks.load_rng_state(str(checkpoint))
        announce_resume(self.state, checkpoint)
        return progress

    def _restore_callbacks(self, checkpoint: Path, progress: Mapping[str, Any] | None) -> None:
        """Restores the callbacks' states from a checkpoint of paceline or of transformers."""
        exported = self.state.stateful_callbacks or {}
        states, sources = saved_callbacks(checkpoint, progress, exported)
        if progress is not None:
            with wrap_load_error(checkpoint / STATE_FILE):
                self.read_control().resume(exported.get("TrainerControl", {}).get("args", {}))
        if states or progress is not None:
            with wrap_load_error(checkpoint / " or ".join(sources)):
                restore_callback_states(self.handler, states, with_arguments=self.settings.restores_arguments)

    def load_items(self, checkpoint: Path, names: Iterable[str]) -> None:
        """Restores the named items that exist; an item without a file (`save_only_model`) starts anew."""
        for name in names:
            item = self.items.get(name)
            if item is not None and name == OPTIMIZER and self._load_named_optimizer(checkpoint):
                continue
            path = checkpoint / file_of(name)
            if not path.is_file():
                logger.warning("%s holds no %s: that state is initialized anew.", checkpoint, path.name)
                continue
            if item is None:
                logger.warning("%s is not loaded: there is no %s yet.", path, name)
                continue
            files.load_state(item, path)
            if name == OPTIMIZER:
                self.contents.strategy.shard_state(self.contents.optimizer)

    def _load_named_optimizer(self, checkpoint: Path) -> bool:
        """Restores the optimizer from files keyed by parameter names: shards, or files of another library.

        Returns: False, with nothing changed, if the checkpoint has no such files.
        """
        model, optimizer = self.contents.model, self.contents.optimizer
        if is_sharded(checkpoint / OPTIMIZER_FOLDER):
            load_optimizer_shards(model, optimizer, checkpoint)
        elif not load_foreign_optimizer(model, optimizer, checkpoint):
            return False
        self.contents.strategy.shard_state(optimizer)
        return True

    def load_scaler(self, checkpoint: Path) -> None:
        """Restores the gradient scaler of float16, if the checkpoint holds one."""
        if (checkpoint / file_of(PRECISION)).is_file():
            self.load_items(checkpoint, (PRECISION,))

    def load_random_states(self, checkpoint: Path) -> None:
        """Restores the random states; without them (`save_only_model`) the run keeps its current ones."""
        # a run on another mesh may have saved different states for ranks that share a random stream on this one
        mesh, size = self.contents.strategy.mesh, self.world.world_size
        rank = mesh.first_of_stream(self.world.process_index)
        state = files.load_rng(checkpoint, rank, size)
        if state is None:
            logger.warning("%s holds no random state: the run resumes, but not bit for bit.", checkpoint)
        else:
            with wrap_load_error(checkpoint / files.rng_name(rank, size)):
                self.items[RNG].load_state_dict(state)
        separate_streams(self.world, mesh.rng_rank(self.world.process_index))

    def load_best(self, checkpoint: Path) -> bool:
        """Loads the best checkpoint; if it is damaged, logs an error, keeps the last weights and returns False."""
        problems = folders.verify(checkpoint)
        if problems:
            reason = "; ".join(problems[:3])
            logger.error("The best model was not loaded, the final weights are kept: %s: %s.", checkpoint, reason)
            return False
        self.hooks.load_best_model()
        return True
