"""Quantized models: bitsandbytes on a CPU, with LoRA beside the frozen weights, as the reference trains them."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import losses
from transformers_models import ids

import paceline

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.23")

# of transformers, accelerate, peft and bitsandbytes
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
QUANTIZED: dict[str, dict[str, Any]] = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "8 bits": {"load_in_8bit": True},
}


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    yield
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A Llama in a folder, to be quantized where it is loaded."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def load(base: Path, bits: str) -> Any:
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(**QUANTIZED[bits])
    return transformers.LlamaForCausalLM.from_pretrained(base, quantization_config=config, device_map="cpu")


def with_lora(model: Any, dropout: float = 0.0) -> Any:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return get_peft_model(model, config)


def data(num_samples: int = 12) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    rows = [ids(generator, 8) for _ in range(num_samples)]
    return [{"input_ids": row, "labels": torch.cat([torch.tensor([-100]), row[1:]])} for row in rows]


class StopAt(paceline.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


def run(library: Any, folder: Path, model: Any, *, resume: bool = False, callbacks: Any = ()) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = library.TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            disable_tqdm=True,
            report_to="none",
            num_train_epochs=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_steps=3,
            eval_strategy="epoch",
        )
        rows = data()
        trainer = library.Trainer(model, args, train_dataset=rows, eval_dataset=rows[:8], callbacks=list(callbacks))
        trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def adapter(model: Any) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for name, value in model.named_parameters() if "lora_" in name])


@pytest.mark.parametrize("bits", QUANTIZED)
def test_the_losses_and_files_of_the_reference(tmp_path: Path, base: Path, bits: str) -> None:
    found = {lib.__name__: run(lib, tmp_path / lib.__name__, with_lora(load(base, bits)))
             for lib in (transformers, paceline)}  # fmt: skip
    theirs, ours = found.values()
    assert losses(ours) == pytest.approx(losses(theirs), rel=2e-3)
    names = [{path.name for path in (tmp_path / name / "checkpoint-6").iterdir()} for name in found]
    assert names[1] - names[0] == {"manifest.json", "progress.json"}
    assert names[0] - names[1] == set()
    assert "adapter_model.safetensors" in names[0]
    assert "model.safetensors" not in names[1]


@pytest.mark.parametrize("bits", QUANTIZED)
def test_trained_saved_loaded_resumed(tmp_path: Path, base: Path, bits: str) -> None:
    from peft import PeftModel

    whole = run(paceline, tmp_path / "whole", with_lora(load(base, bits), dropout=0.1))
    run(paceline, tmp_path / "parts", with_lora(load(base, bits), dropout=0.1), callbacks=[StopAt()])
    parts = run(paceline, tmp_path / "parts", with_lora(load(base, bits), dropout=0.1), resume=True)
    assert torch.equal(adapter(parts.model), adapter(whole.model))
    assert losses(parts) == losses(whole)
    loaded = PeftModel.from_pretrained(load(base, bits), str(tmp_path / "whole" / "checkpoint-6"))
    assert torch.equal(adapter(loaded), adapter(whole.model))
    inputs = data()[0]["input_ids"][None]
    with torch.no_grad():
        outputs = [model.eval()(input_ids=inputs).logits for model in (loaded, whole.model)]
    # bitsandbytes packs 4-bit weights anew for each evaluation on a CPU: a model that was evaluated is a little off
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=0.05 if bits == "4 bits" else 1e-4)


@pytest.mark.parametrize("bits", QUANTIZED)
def test_without_an_adapter_it_is_refused(tmp_path: Path, base: Path, bits: str) -> None:
    with pytest.raises(ValueError, match=r"quantised.*adapter"):
        run(paceline, tmp_path / "run", load(base, bits))
    model = load(base, bits)  # which can still be evaluated
    args = paceline.TrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none")
    assert paceline.Trainer(model, args, eval_dataset=data()).evaluate()["eval_loss"] > 0
