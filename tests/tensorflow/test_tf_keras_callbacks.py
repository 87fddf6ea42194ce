"""Callbacks for Keras' `fit`: metrics over whole predictions, and pushes to a hub on loopback."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_server import Hub
from tf_models import make_data, make_model

from paceline import KerasMetricCallback, PushToHubCallback
from paceline.tensorflow.framework import keras, tf

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


@pytest.mark.slow
def test_the_model_is_pushed(tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    commits: list[str] = []

    def refuse_the_first(method: str, path: str) -> int | None:
        if "/commit/" in path:
            commits.append(path)
        return 403 if "/commit/" in path and len(commits) == 1 else None

    hub.answer = refuse_the_first
    callback = PushToHubCallback(tmp_path / "model", checkpoint=True, hub_token="hf_tests", license="mit")
    history = fit(callback, epochs=2)
    assert callback.repository == "somebody/model"
    assert "could not be uploaded to somebody/model: " in caplog.text
    pushed = hub["somebody/model"]
    messages = ["Training in progress, epoch 2", "End of training"]
    assert pushed.messages() in (messages, messages[:1])  # the hub's client leaves out a commit that changes nothing
    writing = [token for _, path, token in hub.requests if "/commit/" in path or path.endswith("/create")]
    assert set(writing) == {"Bearer hf_tests"}
    copy = tmp_path / "copy.keras"
    copy.write_bytes(pushed.files["model.keras"])
    assert np.array_equal(keras.saving.load_model(copy)(DATA[0]), history.model(DATA[0]))
    assert pushed.files["checkpoint/epoch.txt"] == b"2\n"
    assert "checkpoint/variables.index" in pushed.files
    assert b"license: mit" in pushed.files["README.md"]


def test_wrong_intervals(tmp_path: Path) -> None:
    for options in ({"save_strategy": "steps"}, {"save_strategy": "often"}):
        with pytest.raises(ValueError, match="save_strategy="):
            PushToHubCallback(tmp_path / "model", **options)  # type: ignore[arg-type]


def test_a_push_that_fails_at_the_end_is_raised(tmp_path: Path, hub: Hub) -> None:
    hub.answer = lambda method, path: 403 if "/commit/" in path else None
    with pytest.raises(OSError, match="403"):
        fit(PushToHubCallback(tmp_path / "model", save_strategy="steps", save_steps=2, hub_token="hf_tests"))
