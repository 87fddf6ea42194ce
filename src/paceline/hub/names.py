"""The hub's methods of a Trainer, the same words in every framework."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.trainer_names import TrainerNames
from paceline.hub import publishing
from paceline.hub.card import CardOptions, write_card
from paceline.hub.described import CardFacts, CheckpointForm


class HubNames(TrainerNames):
    """A Trainer that pushes to the hub. A framework brings `_card_facts` and `_checkpoint_form`, and `save_model`.

    Attributes:
        hub_model_id: the repository that is pushed to, once there is one.
        push_in_progress: a push that is under way, or None.
    """

    hub_model_id: str | None = None
    push_in_progress: Any = None
    train_dataset: Any
    is_in_train: bool

    if TYPE_CHECKING:

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None: ...

    def _card_facts(self) -> CardFacts:
        raise NotImplementedError

    def _checkpoint_form(self) -> CheckpointForm:
        raise NotImplementedError

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository that `hub_model_id` names, where there is none; `self.hub_model_id` is then its full id.

        Raises: HubError, when that fails; the message says what to do.
        """
        publishing.init_repository(self, token, private)

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
        """Write `README.md` into the output folder: data, hyper-parameters, results and versions of the run.

        Args:
            language, license, tags: metadata of the hub.
            model_name: the title; None: the name of the output folder.
            finetuned_from: the id of the model that training started from; None: as the model's config says.
            tasks: ids of the hub such as "text-classification"; None: read off the model's class.
            dataset_tags: ids of data sets of the hub.
            dataset, dataset_args: names of the data, and what they were loaded with.
        """
        options = CardOptions(
            language, license, tags, model_name, finetuned_from, tasks, dataset_tags, dataset, dataset_args
        )
        write_card(self, options, self._card_facts)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model and its card, and upload the output folder without its checkpoints in one commit.

        Args:
            commit_message: of the commit.
            blocking: wait for it; False: behind what comes next, which must leave the folder as it is until then.
            token, revision, private: instead of hub_token, hub_revision and hub_private_repo.
            kwargs: for `create_model_card`.

        Returns: huggingface_hub's CommitInfo, or a Future of it; None on other processes than the first.
        """
        return publishing.push_to_hub(
            self,
            commit_message,
            is_blocking=blocking,
            token=token,
            revision=revision,
            private=private,
            card=kwargs,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push what a published checkpoint holds, as `hub_strategy` says."""
        publishing.push_checkpoint(self, Path(checkpoint_folder))

    def _finish_current_push(self) -> None:
        """Wait for the pushes under way."""
        publishing.finish_push(self)
