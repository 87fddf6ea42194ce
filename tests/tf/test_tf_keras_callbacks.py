"""Callbacks for Keras' `fit`: metrics over whole predictions, and a hub that is a folder."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tf_models import make_data, make_model

from paceline import KerasMetricCallback, PushToHubCallback
from paceline.tf import keras_callbacks
from paceline.tf.framework import keras, tf

DATA = make_data(10)


def fit(callback: Any, epochs: int = 1) -> Any:
    model = make_model()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model.fit(*DATA, batch_size=5, epochs=epochs, verbose=0, callbacks=[callback])


def accuracy(predictions: Any, labels: Any) -> dict[str, Any]:
    return {"accuracy": (predictions.argmax(-1) == labels).mean(), "rows": len(labels)}


def test_metrics_over_all_samples() -> None:
    batches = tf.data.Dataset.from_tensor_slices(DATA).batch(4)
    for callback in (KerasMetricCallback(accuracy, batches), KerasMetricCallback(accuracy, DATA, batch_size=4)):
        history = fit(callback)
        expected = (np.argmax(history.model(DATA[0]), -1) == DATA[1]).mean()
        assert history.history["accuracy"] == [expected]
        assert history.history["rows"] == [10]
    with pytest.raises(ValueError, match="need a batch_size"):
        KerasMetricCallback(accuracy, DATA)


class FolderHub:
    """What of `HfApi` is used, with a folder for the hub."""

    def __init__(self, folder: Path, fails: int = 0) -> None:
        self.folder, self.fails, self.messages = folder, fails, list[str]()

    def create_repo(self, repo_id: str, exist_ok: bool) -> Any:
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(self, repo_id: str, folder_path: str, commit_message: str, ignore_patterns: list[str]) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError("the hub is away")
        self.messages.append(f"{repo_id}: {commit_message}")
        shutil.copytree(folder_path, self.folder, dirs_exist_ok=True)


def test_the_model_is_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub = FolderHub(tmp_path / "hub", fails=1)
    monkeypatch.setattr(keras_callbacks, "require", lambda *names: SimpleNamespace(HfApi=lambda token: hub))
    history = fit(PushToHubCallback(tmp_path / "model", checkpoint=True, license="mit"), epochs=2)
    assert "could not be uploaded to me/model: the hub is away" in caplog.text
    assert hub.messages == ["me/model: Training in progress, epoch 2", "me/model: End of training"]
    pushed = keras.saving.load_model(tmp_path / "hub" / "model.keras")
    assert np.array_equal(pushed(DATA[0]), history.model(DATA[0]))
    assert (tmp_path / "hub" / "checkpoint" / "epoch.txt").read_text() == "2\n"
    assert "license: mit" in (tmp_path / "hub" / "README.md").read_text()
    for options in ({"save_strategy": "steps"}, {"save_strategy": "often"}):
        with pytest.raises(ValueError, match="save_strategy="):
            PushToHubCallback(tmp_path / "model", **options)  # type: ignore[arg-type]
