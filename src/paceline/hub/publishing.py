"""Pushes a run to the repository of its model, by the hub options.

The push of a checkpoint starts when the checkpoint is published, on rank 0 only. Its files are hard-linked, so that
rotation and the next save do not affect the upload. Each push is one commit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.args.choices import HubStrategy, SaveStrategy
from paceline.checkpoint.resuming import STATE_FILE
from paceline.hub.contents import LAST_CHECKPOINT, Staged, clear_staged, files_of_output
from paceline.hub.described import CardFacts, CheckpointForm
from paceline.hub.pushes import Push, Pushes
from paceline.hub.repository import commit, make_branch, open_repository

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubSettings:
    """The hub options of a run.

    Attributes:
        is_enabled: True if saves are pushed.
        name: the repository, as "name" or "owner/name"; None takes the name of the output folder.
        strategy: a HubStrategy: content and interval of the pushes.
        always_push: True if no push is skipped in favour of a newer one.
        token: the hub token; None takes the token of the login.
        is_private: visibility of a new repository; None takes the owner's default.
        revision: the branch; None for main.
        save_strategy: a SaveStrategy: the interval of checkpoints.
    """

    is_enabled: bool
    name: str | None
    strategy: str
    always_push: bool
    token: str | None = field(repr=False)
    is_private: bool | None
    revision: str | None
    save_strategy: str


@dataclass(frozen=True)
class HubHooks:
    """Methods of a Trainer that pushes call. They are bound from the instance, so that overrides are used.

    Attributes:
        init_hf_repo: creates the repository.
        create_model_card: writes the card into the output folder; its arguments are those of CardOptions.
        save_model: saves the model to the output folder, on all ranks.
        push_to_hub: pushes the current model.
        finish_current_push: waits for the pushes in progress.
        fire_push_begin: notifies the callbacks that a push starts.
        card_facts: returns the facts of the model for its card.
        checkpoint_form: returns the structure of the checkpoints.
    """

    init_hf_repo: Callable[..., None]
    create_model_card: Callable[..., None]
    save_model: Callable[..., None]
    push_to_hub: Callable[..., Any]
    finish_current_push: Callable[[], None]
    fire_push_begin: Callable[[], None]
    card_facts: Callable[[], CardFacts]
    checkpoint_form: Callable[[], CheckpointForm]


class PushTarget:
    """The target repository and the pushes in progress.

    Attributes:
        repo_id: the full id of the repository, "owner/name"; None until it is created.
        pushes: the pushes to the repository; None before the first push.
    """

    def __init__(self) -> None:
        self.repo_id: str | None = None
        self.pushes: Pushes | None = None

    def create(self, name: str, *, token: str | None, private: bool | None, revision: str | None) -> None:
        """Creates the repository and the branch if missing. Raises: HubError."""
        self.repo_id = open_repository(name, token=token, private=private, revision=revision)

    def queue(self, finish: Callable[[], None]) -> Pushes:
        """Returns the pushes to the repository. If it has changed, first waits, by `finish`, for the earlier pushes."""
        assert self.repo_id is not None
        if self.pushes is None or self.pushes.repo_id != self.repo_id:
            finish()
            self.pushes = Pushes(self.repo_id)
        return self.pushes

    def wait(self) -> None:
        """Waits for the pushes in progress."""
        if self.pushes is not None:
            self.pushes.wait_until_done()


@dataclass(eq=False)
class Publisher:
    """Pushes an output folder and its checkpoints. A Publisher has no state and is created for each use.

    Args:
        target: the repository and the pushes in progress.
        settings: the hub options.
        output_dir: the absolute path of the output folder, which is pushed and holds the card.
        is_main_process: True on rank 0, the only rank that pushes.
        hooks: the methods that a user may override.
    """

    target: PushTarget
    settings: HubSettings
    output_dir: Path
    _: KW_ONLY
    is_main_process: bool
    hooks: HubHooks

    # ---- the repository

    def prepare(self) -> None:
        """Creates the repository if pushes are enabled, so that problems with it are reported before training.

        Raises: HubError, ImportError.
        """
        if self.settings.is_enabled:
            self.hooks.init_hf_repo()
        elif self.settings.always_push or self.settings.strategy != HubStrategy.EVERY_SAVE:
            logger.warning(
                "hub_strategy='%s' and hub_always_push=%s have no effect with push_to_hub=False: nothing is pushed "
                "unless you call push_to_hub().",
                self.settings.strategy,
                self.settings.always_push,
            )

    def init_repository(self, token: str | None, private: bool | None) -> None:
        """Creates the repository and the branch if missing, and removes staging folders that a killed run left.

        Args:
            token, private: override the values of the settings.

        Raises: HubError.
        """
        if not self.is_main_process:
            return
        self.target.create(
            self.settings.name or self.output_dir.name,
            token=token if token is not None else self.settings.token,
            private=private if private is not None else self.settings.is_private,
            revision=self.settings.revision,
        )
        clear_staged(self.output_dir)

    # ---- pushes on request

    def push_model(
        self,
        message: str | None,
        *,
        is_blocking: bool,
        token: str | None,
        revision: str | None,
        private: bool | None,
        card: dict[str, Any],
    ) -> Any:
        """Saves the model and its card, and uploads the output folder without its checkpoints in one commit.

        Args:
            message: the commit message; None for "End of training".
            is_blocking: True waits for the commit.
            token, revision, private: override the values of the settings.
            card: arguments of `create_model_card`.

        Returns: huggingface_hub's CommitInfo, or a Future of it; None on ranks other than 0.
        """
        token = token if token is not None else self.settings.token
        self.hooks.fire_push_begin()
        if self.target.repo_id is None:
            self.hooks.init_hf_repo(token=token, private=private)
        self.hooks.save_model(_internal_call=True)
        if not self.is_main_process:
            return None
        assert self.target.repo_id is not None
        self._write_card(card)
        if revision is not None and revision != self.settings.revision:
            make_branch(self.target.repo_id, revision, token)
        send = partial(
            commit,
            self.target.repo_id,
            files_of_output(self.output_dir),
            message or "End of training",
            token=token,
            revision=revision if revision is not None else self.settings.revision,
        )
        if not is_blocking:
            return self._queue().start(Push("the model", send, can_be_skipped=False))
        self.hooks.finish_current_push()
        return send()

    def push_saved_model(self, message: str = "Model save") -> None:
        """Pushes after an explicit save. A failure is logged, because the save itself has succeeded."""
        try:
            self.hooks.push_to_hub(commit_message=message, revision=self.settings.revision)
        except Exception as error:
            self._queue().report("the saved model", error)

    def _write_card(self, options: dict[str, Any]) -> None:
        """Writes the card with the given options, the name of the repository, and the model's own tags."""
        name = str(self.target.repo_id or self.settings.name or self.output_dir.name).rpartition("/")[2]
        options = {**options, "model_name": options.get("model_name") or name}
        own = getattr(self.hooks.card_facts().model, "model_tags", None)
        if own:
            tags = options.get("tags") or []
            tags = [tags] if isinstance(tags, str) else list(tags)
            options["tags"] = [*tags, *(tag for tag in own if tag not in tags)]
        self.hooks.create_model_card(**options)

    def _queue(self) -> Pushes:
        return self.target.queue(self.hooks.finish_current_push)

    # ---- pushes during training

    def push_checkpoint(self, folder: Path) -> None:
        """Pushes the model of a published checkpoint, and the checkpoint itself by the strategy, asynchronously."""
        settings = self.settings
        if not settings.is_enabled or settings.strategy == HubStrategy.END or not self.is_main_process:
            return
        pushes = self._queue()
        self.hooks.fire_push_begin()
        try:
            self._write_card({})
            staged = Staged.take(folder, self.output_dir, self.hooks.checkpoint_form())
        except Exception as error:  # a failing card, perhaps of user code, must not stop the run
            pushes.report(folder.name, error)
            return
        in_repository: dict[str, str] = {
            HubStrategy.CHECKPOINT: LAST_CHECKPOINT,
            HubStrategy.ALL_CHECKPOINTS: folder.name,
        }
        send = partial(
            send_checkpoint,
            pushes.repo_id,
            staged,
            in_repository.get(settings.strategy),
            describe(folder, settings.save_strategy),
            token=settings.token,
            revision=settings.revision,
        )
        keeps_all = settings.always_push or settings.strategy == HubStrategy.ALL_CHECKPOINTS
        pushes.start(Push(folder.name, send, staged.drop, can_be_skipped=not keeps_all))

    def finish_training(self) -> None:
        """Waits for the pushes at the end of a training run, because an exiting interpreter cannot finish them."""
        if not self.settings.is_enabled or not self.is_main_process:
            return
        pushes = self.target.pushes
        if pushes is None:
            logger.info(
                "Training pushed nothing (hub_strategy='%s', save_strategy='%s'): save_model() and push_to_hub() do.",
                self.settings.strategy,
                self.settings.save_strategy,
            )
            return
        self.hooks.finish_current_push()
        if pushes.failure is not None:
            logger.error(
                "The last push to %s failed: trainer.push_to_hub() pushes the model as it is now.", pushes.repo_id
            )


def send_checkpoint(
    repo_id: str, staged: Staged, name: str | None, message: str, *, token: str | None, revision: str | None
) -> Any:
    """Commits the model and, if `name` is given, the checkpoint under that name. Runs on the pushing thread."""
    return commit(repo_id, staged.files(name), message, token=token, revision=revision, owned=name)


def describe(folder: Path, save_strategy: str) -> str:
    """Returns the commit message of a checkpoint, with its step or epoch."""
    step = folder.name.rpartition("-")[2]
    if save_strategy == SaveStrategy.EPOCH:
        epoch = json.loads((folder / STATE_FILE).read_text(encoding="utf-8")).get("epoch")
        if epoch is not None:
            return f"Training in progress, epoch {int(epoch)}"
    return f"Training in progress, step {step}"
