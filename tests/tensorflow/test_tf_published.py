"""TFTrainer pushes to a hub on loopback: what each strategy uploads, the card, failures, resuming from the hub."""

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hub_server import USER, Hub
from tf_models import Linear, make_data, make_model, make_trainer, weights

from paceline import TFTrainer, TFTrainingArguments, TrainerCallback
from paceline.hub.repository import HubError
from paceline.tensorflow.framework import keras, tf

huggingface_hub = pytest.importorskip("huggingface_hub")

# of huggingface_hub, which sends large files in an older way of its HTTP client
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")
DATA = make_data(24)
TOKEN = "hf_" + "s3cret" * 5
STEPS = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "lr_scheduler_type": "constant", "optim": "sgd"}
MODEL = {"model.keras"}
RUN = {"README.md", "journal.bin", "run.json"}
CHECKPOINT = {
    "manifest.json", "progress.json", "trainer_state.json", "variables.index", "variables.data-00000-of-00001",
}  # fmt: skip


def make(folder: Path, model: Any = None, **options: Any) -> TFTrainer:
    options = {"push_to_hub": True, "hub_token": TOKEN, **STEPS, **options}
    return make_trainer(folder, make_model() if model is None else model, DATA, **options)


def load(content: bytes, folder: Path) -> Any:
    path = folder / "loaded.keras"
    path.write_bytes(content)
    return keras.saving.load_model(path)


class LauncherConfig(TrainerCallback):
    """Notes when pushes begin and checkpoints are there, and what the model was then."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.weights: dict[int, Any] = {}

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.told.append(("on_push_begin", state.global_step))
        self.weights[state.global_step] = weights(kwargs["model"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.told.append(("on_save", state.global_step))


@pytest.mark.slow
def test_every_save_pushes_the_model_of_that_step(tmp_path: Path, hub: Hub) -> None:
    told = LauncherConfig()
    trainer = make(tmp_path / "mine", hub_always_push=True, callbacks=[told])
    assert trainer.hub_model_id == f"{USER}/mine"
    trainer.train()
    repository = hub[f"{USER}/mine"]
    assert repository.messages() == ["Training in progress, step 2", "Training in progress, step 4"]
    assert set(repository.files) == MODEL | RUN
    assert told.told == [(name, step) for step in (2, 4) for name in ("on_push_begin", "on_save")]
    for step, commit in zip((2, 4), repository.branches["main"][1:], strict=True):
        assert np.array_equal(weights(load(commit.files["model.keras"], tmp_path)), told.weights[step])
    assert [path.name for path in (tmp_path / "mine").iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
def test_the_last_checkpoint_can_be_resumed_from(tmp_path: Path, hub: Hub) -> None:
    whole = make(tmp_path / "whole", push_to_hub=False, save_strategy="no", max_steps=6)
    whole.train()
    make(tmp_path / "first", hub_model_id="team/model", hub_strategy="checkpoint", save_total_limit=1).train()
    files = hub["team/model"].files
    assert {name.partition("/")[2] for name in files if name.startswith("last-checkpoint/")} == CHECKPOINT
    assert {name for name in files if "/" not in name} == MODEL | RUN
    fetched = huggingface_hub.snapshot_download("team/model", local_dir=tmp_path / "fetched", token=TOKEN)
    second = make(tmp_path / "second", push_to_hub=False, max_steps=6)
    second.train(resume_from_checkpoint=str(Path(fetched) / "last-checkpoint"))
    assert second.state.global_step == 6
    assert np.array_equal(weights(second.model), weights(whole.model))


@pytest.mark.slow
def test_the_other_strategies(tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path / "all", Linear(), hub_strategy="all_checkpoints", hub_revision="tries").train()
    pushed = hub[f"{USER}/all"].branches["tries"][-1].files
    assert {f"checkpoint-{step}/{name}" for step in (2, 4) for name in CHECKPOINT} <= set(pushed)
    assert "saved_model.pb" in pushed  # a tf.Module
    caplog.set_level(logging.INFO)
    trainer = make(tmp_path / "end", hub_strategy="end")
    trainer.train()
    assert "Training pushed nothing" in caplog.text
    assert hub[f"{USER}/end"].messages() == []
    trainer.save_model()
    trainer.push_to_hub("Done", tags="tests")
    repository = hub[f"{USER}/end"]
    assert repository.messages() == ["Model save", "Done"]
    assert set(repository.files) == MODEL | RUN
    assert np.array_equal(weights(load(repository.files["model.keras"], tmp_path)), weights(trainer.model))


def test_the_card(tmp_path: Path, hub: Hub) -> None:
    options: dict[str, Any] = {"push_to_hub": False, "eval_strategy": "steps", "eval_steps": 2, "optim": "adamw_torch"}
    trainer = make(tmp_path / "mine", eval_dataset=make_data(12, seed=1), **options)
    trainer.train()
    trainer.create_model_card(license="mit", tags="tests", dataset="digits")
    text = (tmp_path / "mine" / "README.md").read_text()
    metadata = yaml.safe_load(text.split("---")[1])
    assert metadata["library_name"] == "keras"
    assert metadata["license"] == "mit"
    assert metadata["tags"] == ["tests", "generated_from_trainer", "paceline"]
    assert metadata["model-index"][0]["results"][0]["metrics"][0]["type"] == "loss"
    for line in (
        "It has 195 parameters.",
        "- training: 24 samples",
        "- evaluation: 12 samples",
        "- global batch size: 4 = 4 per device x 1 accumulated x 1 replica\n",
        "(optim=adamw_torch), betas=(0.9, 0.999), eps=1e-08\n",
        "- precision: float32\n",
        f"- TensorFlow {tf.__version__}",
        "- Keras 3",
    ):
        assert line in text, line


@pytest.mark.slow
def test_a_hub_that_fails_costs_that_push(tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.answer = lambda method, path: 403 if "/commit/" in path else None
    trainer = make(tmp_path / "mine")
    trainer.train()
    assert trainer.state.global_step == 4
    assert "could be pushed" not in caplog.text
    assert caplog.text.count("Training continues") == 1
    assert "The last push to somebody/mine failed" in caplog.text
    hub.answer = lambda method, path: None
    trainer.push_to_hub()
    assert set(hub[f"{USER}/mine"].files) == MODEL | RUN
    assert TOKEN not in "".join(path.read_text(errors="replace") for path in (tmp_path / "mine").glob("*.json"))
    hub.answer = lambda method, path: 401
    with pytest.raises(HubError, match="hub_token"):
        make(tmp_path / "other")


def test_the_options_of_the_hub_are_taken(tmp_path: Path) -> None:
    args = TFTrainingArguments(
        output_dir=str(tmp_path), push_to_hub=True, hub_model_id="a/b", hub_strategy="end", hub_always_push=True,
        hub_private_repo=True, hub_revision="main", hub_token=TOKEN,
    )  # fmt: skip
    assert args.hub_model_id == "a/b"
