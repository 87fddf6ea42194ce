"""The bodies of the Trainer's hub methods: when something is pushed, and what.

A push of a checkpoint starts when that has been published, on the first process only. Its files are linked, so that
neither rotation nor the next save touches what is being sent. Each push is one commit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.args.choices import HubStrategy, SaveStrategy
from paceline.core.resuming import STATE_FILE
from paceline.hub.contents import LAST_CHECKPOINT, Staged, clear_staged, files_of_output, output_of
from paceline.hub.pushes import Push, Pushes
from paceline.hub.repository import commit, make_branch, open_repository

if TYPE_CHECKING:
    from paceline.hub.names import HubNames

logger = logging.getLogger(__name__)


def prepare(trainer: HubNames) -> None:
    """Where pushes are asked for, make the repository now: what is wrong with it is known before training.

    Raises: HubError, ImportError.
    """
    args = trainer.args
    if args.push_to_hub:
        trainer.init_hf_repo()
    elif args.hub_always_push or args.hub_strategy != HubStrategy.EVERY_SAVE:
        logger.warning(
            "hub_strategy='%s' and hub_always_push=%s say how training pushes, and push_to_hub=False: nothing is "
            "pushed unless you call push_to_hub().",
            args.hub_strategy,
            args.hub_always_push,
        )


def init_repository(trainer: HubNames, token: str | None, private: bool | None) -> None:
    """The body of `init_hf_repo`."""
    if not trainer.is_world_process_zero():
        return
    args = trainer.args
    trainer.hub_model_id = open_repository(
        args.hub_model_id or output_of(trainer).name,
        token=token if token is not None else args.hub_token,
        private=private if private is not None else args.hub_private_repo,
        revision=args.hub_revision,
    )
    clear_staged(output_of(trainer))


def pushes_of(trainer: HubNames) -> Pushes:
    """The pushes of a Trainer, made with the first of them."""
    assert trainer.hub_model_id is not None
    if trainer.push_in_progress is None or trainer.push_in_progress.repo_id != trainer.hub_model_id:
        trainer._finish_current_push()
        trainer.push_in_progress = Pushes(trainer.hub_model_id)
    pushes: Pushes = trainer.push_in_progress
    return pushes


def fire_push_begin(trainer: HubNames) -> None:
    """Tell the callbacks that a push starts."""
    loop = trainer.run.loop if trainer.run is not None else None
    control = loop.control if loop is not None else trainer.control
    trainer.control = trainer.callback_handler.on_push_begin(trainer.args, trainer.state, control)
    trainer._share_control()


def model_name(trainer: HubNames) -> str:
    """What the card calls the model, where the user does not say."""
    name = trainer.hub_model_id or trainer.args.hub_model_id or output_of(trainer).name
    return str(name).rpartition("/")[2]


def with_model_tags(trainer: HubNames, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a card with the tags that the model brings."""
    own = getattr(trainer._card_facts().model, "model_tags", None)
    if not own:
        return options
    tags = options.get("tags") or []
    tags = [tags] if isinstance(tags, str) else list(tags)
    return {**options, "tags": [*tags, *(tag for tag in own if tag not in tags)]}


# ---- what the user asks for


def push_to_hub(
    trainer: HubNames,
    message: str | None,
    *,
    is_blocking: bool,
    token: str | None,
    revision: str | None,
    private: bool | None,
    card: dict[str, Any],
) -> Any:
    """The body of `Trainer.push_to_hub`."""
    args = trainer.args
    token = token if token is not None else args.hub_token
    fire_push_begin(trainer)
    if trainer.hub_model_id is None:
        trainer.init_hf_repo(token=token, private=private)
    trainer.save_model(_internal_call=True)
    if not trainer.is_world_process_zero():
        return None
    assert trainer.hub_model_id is not None
    card = {**card, "model_name": card.get("model_name") or model_name(trainer)}
    trainer.create_model_card(**with_model_tags(trainer, card))
    if revision is not None and revision != args.hub_revision:
        make_branch(trainer.hub_model_id, revision, token)
    send = partial(
        commit,
        trainer.hub_model_id,
        files_of_output(output_of(trainer)),
        message or "End of training",
        token=token,
        revision=revision if revision is not None else args.hub_revision,
    )
    if not is_blocking:
        return pushes_of(trainer).start(Push("the model", send, can_be_skipped=False))
    trainer._finish_current_push()
    return send()


def push_saved_model(trainer: HubNames, message: str = "Model save") -> None:
    """Push after a save that was asked for, where push_to_hub=True: what was asked for is done, so failing is told."""
    try:
        trainer.push_to_hub(commit_message=message, revision=trainer.args.hub_revision)
    except Exception as error:
        pushes_of(trainer).report("the saved model", error)


# ---- what training pushes


def push_checkpoint(trainer: HubNames, folder: Path) -> None:
    """Push the model of a published checkpoint, and that itself where the strategy says so, behind the training."""
    args = trainer.args
    if not args.push_to_hub or args.hub_strategy == HubStrategy.END or not trainer.is_world_process_zero():
        return
    pushes = pushes_of(trainer)
    fire_push_begin(trainer)
    try:
        trainer.create_model_card(**with_model_tags(trainer, {"model_name": model_name(trainer)}))
        staged = Staged.take(folder, output_of(trainer), trainer._checkpoint_form())
    except Exception as error:  # a card, an own one perhaps, is no reason to stop
        pushes.report(folder.name, error)
        return
    in_repository = {HubStrategy.CHECKPOINT: LAST_CHECKPOINT, HubStrategy.ALL_CHECKPOINTS: folder.name}
    send = partial(
        send_checkpoint,
        pushes.repo_id,
        staged,
        in_repository.get(HubStrategy(args.hub_strategy)),
        describe(folder, args),
        token=args.hub_token,
        revision=args.hub_revision,
    )
    keeps_all = args.hub_always_push or args.hub_strategy == HubStrategy.ALL_CHECKPOINTS
    pushes.start(Push(folder.name, send, staged.drop, can_be_skipped=not keeps_all))


def send_checkpoint(
    repo_id: str, staged: Staged, name: str | None, message: str, *, token: str | None, revision: str | None
) -> Any:
    """On the thread that pushes: one commit with the model, and the checkpoint under `name`."""
    return commit(repo_id, staged.files(name), message, token=token, revision=revision, owned=name)


def describe(folder: Path, args: Any) -> str:
    """The message of a checkpoint's commit, with the step or epoch that it was taken at."""
    step = folder.name.rpartition("-")[2]
    if args.save_strategy == SaveStrategy.EPOCH:
        epoch = json.loads((folder / STATE_FILE).read_text(encoding="utf-8")).get("epoch")
        if epoch is not None:
            return f"Training in progress, epoch {int(epoch)}"
    return f"Training in progress, step {step}"


@contextmanager
def finished_pushes(trainer: HubNames) -> Iterator[None]:
    """Wait for the pushes when the run ends, also by an error: an interpreter on its way out cannot finish them."""
    try:
        yield
    except Exception:
        trainer._finish_current_push()
        raise
    if not trainer.args.push_to_hub or not trainer.is_world_process_zero():
        return
    pushes = trainer.push_in_progress
    if pushes is None:
        logger.info(
            "Training pushed nothing (hub_strategy='%s', save_strategy='%s'): save_model() and push_to_hub() do.",
            trainer.args.hub_strategy,
            trainer.args.save_strategy,
        )
        return
    trainer._finish_current_push()
    if pushes.failure is not None:
        logger.error("The last push to %s failed: trainer.push_to_hub() pushes the model as it is now.", pushes.repo_id)


def finish_push(trainer: HubNames) -> None:
    """The body of `_finish_current_push`."""
    if trainer.push_in_progress is not None:
        trainer.push_in_progress.wait_until_done()
