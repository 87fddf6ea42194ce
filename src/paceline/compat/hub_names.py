"""The hub-related methods of a Trainer, shared by all frameworks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.args.training import TrainingArguments
from paceline.compat.trainer_names import TrainerNames
from paceline.core.events import call_each
from paceline.core.optional import LateModule

if TYPE_CHECKING:
    from paceline.hub import card, described, publishing
    from paceline.hub.described import CardFacts, CheckpointForm
else:
    card = LateModule("paceline.hub.card")
    described = LateModule("paceline.hub.described")
    publishing = LateModule("paceline.hub.publishing")


class HubNames(TrainerNames):
    """A Trainer that pushes to the hub. A framework supplies `_card_facts`, `_checkpoint_form` and `save_model`."""

    _own_push_target: publishing.PushTarget | None = None
    _is_best_loaded = False  # the last training has ended with the best model
    train_dataset: Any

    if TYPE_CHECKING:

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None: ...

    def _card_facts(self) -> CardFacts:
        raise NotImplementedError

    def _checkpoint_form(self) -> CheckpointForm:
        raise NotImplementedError

    # ---- the parts of the hub

    @property
    def _push_target(self) -> publishing.PushTarget:
        if self._own_push_target is None:
            self._own_push_target = publishing.PushTarget()
        return self._own_push_target

    def _make_publisher(self) -> publishing.Publisher:
        return publishing.Publisher(
            self._push_target,
            hub_settings(self.args),
            self._absolute_output_dir(),
            is_main_process=self.is_world_process_zero(),
            hooks=publishing.HubHooks(
                init_hf_repo=self.init_hf_repo,
                create_model_card=self.create_model_card,
                save_model=self.save_model,
                push_to_hub=self.push_to_hub,
                finish_current_push=self._finish_current_push,
                fire_push_begin=self._fire_push_begin,
                card_facts=self._card_facts,
                checkpoint_form=self._checkpoint_form,
            ),
        )

    def _card_run(self) -> described.CardRun:
        options = {one.name: getattr(self._own_options, one.name) for one in fields(described.Hyperparameters)}
        return described.CardRun(
            options=described.Hyperparameters(**options),
            state=self.state,
            train_dataset=self.train_dataset,
            is_training=self.is_in_train,
            is_best_loaded=self._is_best_loaded,
        )

    def _tell_card(self) -> None:
        """Offers the text of the model card to the callbacks, before `on_train_end`; it is made if one requests it.

        A callback that raises is named in a warning: the training has its result, and the card is not part of it.
        """

        @cache
        def make_card() -> str:
            folder = self._absolute_output_dir()
            run = replace(self._card_run(), is_training=False)
            return card.card_text(run, self._card_facts(), (self.hub_model_id or folder.name).rpartition("/")[2])

        call_each(self.callback_handler, "on_model_card", self.args, self.state, self.control, make_card=make_card)

    def _absolute_output_dir(self) -> Path:
        return self._output_folder()

    def _fire_push_begin(self) -> None:
        control = self.run.loop.control if self.run is not None and self.run.loop is not None else self.control
        self.control = self.callback_handler.on_push_begin(self.args, self.state, control)
        self._share_control()

    @contextmanager
    def _finished_pushes(self) -> Iterator[None]:
        """Waits for the pushes at the end of a training run, also after an error."""
        try:
            yield
        except Exception:
            self._finish_current_push()
            raise
        self._make_publisher().finish_training()

    # ---- public members, and private ones that subclasses override

    @property
    def hub_model_id(self) -> str | None:
        """Returns the full id of the target repository; None until it is created."""
        return self._push_target.repo_id

    @hub_model_id.setter
    def hub_model_id(self, value: str | None) -> None:
        self._push_target.repo_id = value

    @property
    def push_in_progress(self) -> Any:
        """Returns the pushes in progress, with `is_done()` and `wait_until_done()`; None before the first push."""
        return self._push_target.pushes

    @push_in_progress.setter
    def push_in_progress(self, value: Any) -> None:
        self._push_target.pushes = value

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Creates the repository of `hub_model_id` if missing; `self.hub_model_id` is then its full id.

        Raises: HubError, if that fails; the message names the remedy.
        """
        self._make_publisher().init_repository(token, private)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Writes `README.md` into the output folder: data, hyperparameters, results and versions of the run.

        Args:
            language, license, tags: hub metadata.
            model_name: the title; None for the name of the output folder.
            finetuned_from: the id of the model that training started from; None takes it from the model's config.
            tasks: hub task ids such as "text-classification"; None infers one from the model's class.
            dataset_tags: hub ids of datasets.
            dataset, dataset_args: names of the datasets, and their load arguments.
        """
        if not self.is_world_process_zero():
            return
        options = card.CardOptions(
            language, license, tags, model_name, finetuned_from, tasks, dataset_tags, dataset, dataset_args
        )
        card.write_card(self._absolute_output_dir(), self._card_run(), self._card_facts(), options)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Saves the model and its card, and uploads the output folder without its checkpoints in one commit.

        Args:
            commit_message: the commit message.
            blocking: True waits for the commit; False pushes asynchronously: the folder must not change until then.
            token, revision, private: override hub_token, hub_revision and hub_private_repo.
            kwargs: arguments of `create_model_card`.

        Returns: huggingface_hub's CommitInfo, or a Future of it; None on ranks other than 0.
        """
        return self._make_publisher().push_model(
            commit_message,
            is_blocking=blocking,
            token=token,
            revision=revision,
            private=private,
            card=kwargs,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes a published checkpoint by `hub_strategy`."""
        self._make_publisher().push_checkpoint(Path(checkpoint_folder))

    def _finish_current_push(self) -> None:
        """Waits for the pushes in progress."""
        self._push_target.wait()


def hub_settings(args: TrainingArguments) -> publishing.HubSettings:
    """Returns the hub options among a run's arguments."""
    return publishing.HubSettings(
        is_enabled=args.push_to_hub,
        name=args.hub_model_id,
        strategy=str(args.hub_strategy),
        always_push=args.hub_always_push,
        token=args.hub_token,
        is_private=args.hub_private_repo,
        revision=args.hub_revision,
        save_strategy=str(args.save_strategy),
    )
