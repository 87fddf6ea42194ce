"""Callbacks for Keras' own `fit`: metrics over whole predictions, and pushing the model to the hub."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.optional import require
from paceline.core.outputs import check_metrics
from paceline.core.rows import RowCollector
from paceline.tensorflow.checkpoint.model_files import save_model
from paceline.tensorflow.data.batches import map_leaves, separate, size_of, to_array
from paceline.tensorflow.data.sources import make_source
from paceline.tensorflow.framework import keras, tf

logger = logging.getLogger(__name__)


class FitCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """A base class for callbacks of `fit` in Keras 3 and tf_keras; tf_keras looks up the batch hooks of callbacks."""

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


class KerasMetricCallback(FitCallback):
    """Computes metrics over all predictions at the end of each epoch of `fit`, and adds them to the logs.

    Args:
        metric_fn: `(predictions, labels) -> dict`, both arrays (or nests of them) with one row per sample.
        eval_dataset: a tf.data.Dataset of (features, labels) batches, or arrays, which are split by `batch_size`.
        output_cols: keys to keep of outputs that are a dict; None: `logits` if present, else all.
        label_cols: keys of the labels in batches that are dicts; None: those known from transformers.
        batch_size: samples per batch; required for arrays.
        predict_with_generate: use the result of `model.generate` instead of the outputs.
        use_xla_generation: compile `generate` with XLA; requires batches of one shape.
        generate_kwargs: further arguments of `generate`.

    Raises:
        ValueError: arrays were given without a batch size.
    """

    def __init__(
        self,
        metric_fn: Callable[[Any, Any], dict[str, Any]],
        eval_dataset: Any,
        output_cols: Sequence[str] | None = None,
        label_cols: Sequence[str] | None = None,
        batch_size: int | None = None,
        predict_with_generate: bool = False,
        use_xla_generation: bool = False,
        generate_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.metric_fn = metric_fn
        self.output_cols = output_cols
        self.label_cols = label_cols
        if not isinstance(eval_dataset, tf.data.Dataset):
            if batch_size is None:
                raise ValueError("KerasMetricCallback: arrays need a batch_size; or pass a tf.data.Dataset of batches.")
            eval_dataset = make_source(eval_dataset, batch_size=batch_size, seed=None)
        self.eval_dataset = eval_dataset
        self.predict_with_generate = predict_with_generate
        self.use_xla_generation = use_xla_generation
        self.generate_kwargs = dict(generate_kwargs or {})
        self._generate: Any = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Predicts all batches, and adds the result of `metric_fn` to the logs.

        Raises:
            ValueError: the batches hold no labels.
        """
        predictions, labels = RowCollector(), RowCollector()
        for batch in self.eval_dataset:
            features, targets = separate(batch, self.label_cols)
            if targets is None:
                raise ValueError("KerasMetricCallback: the batches hold no labels; name them with label_cols=[...].")
            size = size_of(features)
            predictions.add(map_leaves(to_array, self.predict(features)), size)
            labels.add(map_leaves(to_array, targets), size)
        found = check_metrics(self.metric_fn(predictions.result(), labels.result()))
        if logs is not None:
            logs.update({name: float(value) if np.ndim(value) == 0 else value for name, value in found.items()})

    def predict(self, features: object) -> Any:
        """Returns the predictions for one batch."""
        if self.predict_with_generate:
            return self.generate(features)
        outputs = self.model(features, training=False)
        if not hasattr(outputs, "keys"):
            return outputs
        if self.output_cols is None:
            return outputs["logits"] if "logits" in outputs else dict(outputs)
        kept = {name: outputs[name] for name in self.output_cols}
        return next(iter(kept.values())) if len(kept) == 1 else kept

    def generate(self, features: Any) -> Any:
        """Returns the token ids that the model generates for one batch."""
        if self._generate is None:

            def generate(inputs: object, attention_mask: object) -> Any:
                return self.model.generate(inputs, attention_mask=attention_mask, **self.generate_kwargs)

            self._generate = tf.function(generate, jit_compile=True) if self.use_xla_generation else generate
        if not hasattr(features, "keys"):
            return self._generate(features, None)
        name = getattr(self.model, "main_input_name", "input_ids")
        return self._generate(features[name], features.get("attention_mask"))


class PushToHubCallback(FitCallback):
    """Saves the model during `fit` and uploads it to a hub repository in the background.

    Uploads run one at a time on a background thread; the next save waits for a running upload. A failed upload is
    logged and does not stop the training. At the end of training everything is uploaded; a failure then raises.

    Args:
        output_dir: folder that the model is written to.
        save_strategy: "epoch", "steps" (every `save_steps`), or "no" (only at the end).
        save_steps: number of batches between two saves.
        tokenizer: saved with the model.
        hub_model_id: repository, as "name" or "owner/name"; None: the folder's name.
        hub_token: access token of the hub; None: that of the hub's stored login.
        checkpoint: also upload `checkpoint/` with the optimizer's variables, to resume from.
        model_card_args: further entries of the README's header; an existing README.md is unchanged.

    Raises:
        ValueError: the strategy is unknown, "steps" lacks `save_steps`, or `checkpoint` is used without "epoch".
        ImportError: huggingface_hub is missing.
    """

    def __init__(
        self,
        output_dir: str | Path,
        save_strategy: str = "epoch",
        save_steps: int | None = None,
        tokenizer: Any = None,
        hub_model_id: str | None = None,
        hub_token: str | None = None,
        checkpoint: bool = False,
        **model_card_args: Any,
    ) -> None:
        super().__init__()
        self.save_strategy = str(getattr(save_strategy, "value", save_strategy))
        if self.save_strategy not in ("no", "epoch", "steps"):
            raise ValueError(f"save_strategy={save_strategy!r}: one of 'epoch', 'steps', 'no' is possible.")
        if self.save_strategy == "steps" and (save_steps is None or save_steps < 1):
            raise ValueError(f"save_strategy='steps' needs save_steps of at least 1, not {save_steps!r}.")
        if checkpoint and self.save_strategy != "epoch":
            raise ValueError("checkpoint=True needs save_strategy='epoch': Keras resumes at the start of an epoch.")
        self.output_dir = Path(output_dir)
        self.save_steps = save_steps
        self.tokenizer = tokenizer
        self.checkpoint = checkpoint
        self.model_card_args = model_card_args
        self.hub: Any = require("huggingface_hub", "hub").HfApi(token=hub_token)
        self.hub_model_id = hub_model_id or self.output_dir.absolute().name
        self.repository: str | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Creates the repository if it does not exist."""
        self.repository = str(self.hub.create_repo(self.hub_model_id, exist_ok=True).repo_id)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves and uploads, if `save_strategy` is "steps"."""
        if self.save_strategy == "steps" and (batch + 1) % (self.save_steps or 1) == 0:
            self.save()
            self.upload(f"Training in progress, batch {batch + 1}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves and uploads, if `save_strategy` is "epoch"."""
        if self.save_strategy == "epoch":
            self.save(epoch)
            self.upload(f"Training in progress, epoch {epoch + 1}")

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Saves the finished model, and waits until it is uploaded.

        Raises: the error of the last upload.
        """
        self.wait()
        self.save()
        self._failure = None
        self._upload("End of training")
        if self._failure is not None:
            raise self._failure

    def save(self, epoch: int | None = None) -> None:
        """Writes model, tokenizer, checkpoint and README into the folder, after a running upload has read it."""
        self.wait()
        save_model(self.model, self.output_dir)
        if callable(getattr(self.tokenizer, "save_pretrained", None)):
            self.tokenizer.save_pretrained(str(self.output_dir))
        if self.checkpoint and epoch is not None:
            folder = self.output_dir / "checkpoint"
            folder.mkdir(exist_ok=True)
            state = tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer)
            state.write(str(folder / "variables"))
            (folder / "epoch.txt").write_text(f"{epoch + 1}\n", encoding="utf-8")
        card = self.output_dir / "README.md"
        if not card.exists():
            lines = [f"{name}: {value}" for name, value in {"library_name": "keras", **self.model_card_args}.items()]
            card.write_text("\n".join(["---", *lines, "---", "", f"# {self.hub_model_id}", ""]), encoding="utf-8")

    def upload(self, message: str) -> None:
        """Uploads the folder on a background thread."""
        self.wait()
        self._thread = threading.Thread(target=self._upload, args=(message,), name="paceline-upload", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits for the running upload, if any."""
        if self._thread is not None:
            begin = time.monotonic()
            self._thread.join()
            self._thread = None
            if time.monotonic() - begin > 1:
                logger.info("Waited %.1f s for the upload before.", time.monotonic() - begin)

    def _upload(self, message: str) -> None:
        try:
            self.hub.upload_folder(
                repo_id=self.repository,
                folder_path=str(self.output_dir),
                commit_message=message,
                ignore_patterns=[".*"],
            )
        except Exception as error:  # network or hub errors: the next upload includes everything
            self._failure = error
            logger.warning("The model could not be uploaded to %s: %s", self.repository, error)
