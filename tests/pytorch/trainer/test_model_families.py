"""A model of each family: the losses of the reference, a folder that `from_pretrained` loads, exact resume."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow_but
from small_models import losses, weights

import paceline

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.23")

from model_families import FAMILIES  # noqa: E402

# of transformers, accelerate and what they import
pytestmark = pytest.mark.filterwarnings("ignore")
NUM_STEPS = 6
# one of each kind of input; the others are compared with the reference in the slow lane
QUICK = ("GPT-2", "T5", "ViT", "Wav2Vec2 for CTC", "CLIP")


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    yield
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


class StopAt(paceline.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


def make(library: Any, folder: Path, name: str, **options: Any) -> Any:
    family = FAMILIES[name]
    kind = "Seq2SeqTrainer" if family.generates else "Trainer"
    generation = {"predict_with_generate": True, "generation_max_length": 6} if family.generates else {}
    callbacks = options.pop("callbacks", [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = getattr(library, f"{kind.removesuffix('Trainer')}TrainingArguments")(
            output_dir=str(folder),
            use_cpu=True,
            disable_tqdm=True,
            report_to="none",
            max_steps=NUM_STEPS,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=4,
            learning_rate=1e-2,
            logging_steps=1,
            save_steps=3,
            eval_strategy="steps",
            eval_steps=3,
            **generation,
            **options,
        )
        data = family.data()
        return getattr(library, kind)(
            model=family.make(),
            args=args,
            train_dataset=data,
            eval_dataset=data[:4],
            data_collator=family.collate,
            callbacks=callbacks,
        )


@pytest.mark.parametrize("name", slow_but(QUICK, FAMILIES))
def test_the_losses_of_the_reference(tmp_path: Path, name: str) -> None:
    rows = []
    for library in (transformers, paceline):
        trainer = make(library, tmp_path / library.__name__, name)
        trainer.train()
        rows.append([row for row in trainer.state.log_history if "loss" in row or "eval_loss" in row])
    for expected, found in zip(*rows, strict=True):
        for key in ("loss", "eval_loss", "grad_norm"):
            assert (key in found) == (key in expected), key
            assert found.get(key, 0.0) == pytest.approx(expected.get(key, 0.0), rel=2e-3), (key, expected, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(QUICK, FAMILIES))
def test_trained_saved_loaded_resumed(tmp_path: Path, name: str) -> None:
    whole = make(paceline, tmp_path / "whole", name)
    whole.train()
    assert all(torch.isfinite(torch.tensor(losses(whole))))
    make(paceline, tmp_path / "parts", name, callbacks=[StopAt()]).train()
    parts = make(paceline, tmp_path / "parts", name)
    parts.train(resume_from_checkpoint=True)
    assert torch.equal(weights(parts.model), weights(whole.model))
    assert losses(parts) == losses(whole)

    whole.save_model(str(tmp_path / "final"))
    for folder in (tmp_path / "final", tmp_path / "whole" / f"checkpoint-{NUM_STEPS}"):
        loaded = type(whole.model).from_pretrained(folder, attn_implementation=whole.model.config._attn_implementation)
        assert_same_outputs(loaded, whole.model, FAMILIES[name].data(seed=2))


def assert_same_outputs(loaded: Any, trained: Any, data: list[dict[str, Any]]) -> None:
    batch = {key: torch.stack([sample[key] for sample in data]) for key in data[0]}
    found = []
    for model in (loaded, trained):
        with torch.no_grad():
            output = model.eval()(**batch)
        found.append(output.logits if "logits" in output else output.logits_per_image)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.generates])
def test_generates_as_the_reference(tmp_path: Path, name: str) -> None:
    """After training: the same sequences, and what `generate` gives when it is called by hand."""
    found = []
    for library in (transformers, paceline):
        trainer = make(library, tmp_path / library.__name__, name)
        trainer.train()
        found.append(trainer.predict(FAMILIES[name].data()[:4]).predictions)
    assert found[0].tolist() == found[1].tolist()


def test_a_loss_that_is_asked_for_in_the_batch(tmp_path: Path) -> None:
    """CLIP has no labels: `return_loss` in the batch asks for a loss, in evaluation too."""
    found = [make(library, tmp_path, "CLIP").evaluate()["eval_loss"] for library in (transformers, paceline)]
    assert found[1] == pytest.approx(found[0], rel=1e-5)
