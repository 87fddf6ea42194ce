"""Models of transformers: trained, evaluated, saved for `from_pretrained`, resumed, any split alike."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import RecordGradient, losses, make_trainer, weights
from torch import nn

from paceline import TrainerCallback

pytest.importorskip("transformers")

from transformers_models import MODELS, gpt2, language

# a causal model of transformers computes its loss in float32 whatever the type of its logits
PRECISION = {"gpt2": 1e-6, "bert": 1e-10, "t5": 1e-10}


class StopAt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 4


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", MODELS)
def test_any_split_gives_the_same_gradient(tmp_path: Path, kind: str, smoothing: float) -> None:
    make_model, make_data = MODELS[kind]
    found = []
    for batch, accumulation in [(24, 1), (8, 3), (5, 5), (1, 24)]:
        trainer = make_trainer(
            tmp_path,
            make_model().double(),
            make_data(24),
            cls=RecordGradient,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            label_smoothing_factor=smoothing,
            max_steps=1,
            max_grad_norm=0,
        )
        trainer.train()
        found.append((trainer.gradients[0], losses(trainer)[0]))
    for gradient, loss in found[1:]:
        torch.testing.assert_close(gradient, found[0][0], rtol=1e-10, atol=1e-12)
        assert loss == pytest.approx(found[0][1], rel=PRECISION[kind])


def test_the_gradient_is_that_of_the_mean_over_targets(tmp_path: Path) -> None:
    """Against one forward pass over everything at once: the count leaves out what shifting leaves out."""
    data, plain = language(24), gpt2().double()
    batch = {name: torch.stack([sample[name] for sample in data]) for name in data[0]}
    logits = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss.backward()
    trainer = make_trainer(
        tmp_path,
        gpt2().double(),
        data,
        cls=RecordGradient,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=8,
        max_steps=1,
        max_grad_norm=0,
        eval_dataset=data,
    )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss.item(), rel=1e-6)
    trainer.train()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    torch.testing.assert_close(trainer.gradients[0], expected, rtol=1e-5, atol=1e-8)
    assert losses(trainer)[0] == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", MODELS)
def test_eval_loss_does_not_depend_on_the_batch_size(tmp_path: Path, kind: str, smoothing: float) -> None:
    make_model, make_data = MODELS[kind]
    found = []
    for batch in (1, 4, 16, 37):
        trainer = make_trainer(
            tmp_path,
            make_model().double(),
            eval_dataset=make_data(24),
            per_device_eval_batch_size=batch,
            label_smoothing_factor=smoothing,
        )
        found.append(trainer.evaluate()["eval_loss"])
    assert found == pytest.approx([found[0]] * 4, rel=PRECISION[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_trained_saved_loaded_resumed(tmp_path: Path, kind: str) -> None:
    make_model, make_data = MODELS[kind]
    data = make_data(24)

    def run(folder: Path, **options: Any) -> Any:
        resume = options.pop("resume", None)
        trainer = make_trainer(
            folder,
            make_model(),
            data,
            eval_dataset=data[:9],
            num_train_epochs=2,
            save_strategy="steps",
            save_steps=4,
            eval_strategy="epoch",
            learning_rate=1e-2,
            **options,
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole")
    rows = [row["eval_loss"] for row in whole.state.log_history if "eval_loss" in row]
    assert rows[-1] < rows[0]
    run(tmp_path / "parts", callbacks=[StopAt()])
    parts = run(tmp_path / "parts", resume=True)
    assert torch.equal(weights(whole.model), weights(parts.model))
    loaded = type(whole.model).from_pretrained(tmp_path / "whole" / "checkpoint-12")
    assert torch.equal(weights(loaded), weights(whole.model))
    assert loaded.config.use_cache is whole.model.config.use_cache is True or kind == "bert"
    whole.save_model(str(tmp_path / "final"))
    final = type(whole.model).from_pretrained(tmp_path / "final")
    assert torch.equal(weights(final), weights(whole.model))
    output = whole.predict(data[:9])
    first = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
    assert first.shape[0] == 9
    assert first.shape[-1] == (3 if kind == "bert" else 31)
    assert output.label_ids.shape[0] == 9
    assert output.metrics["test_loss"] == pytest.approx(rows[-1], rel=1e-5)


def test_metrics_over_a_classifier(tmp_path: Path) -> None:
    make_model, make_data = MODELS["bert"]
    seen: list[Any] = []

    def compute(prediction: Any) -> dict[str, float]:
        logits, labels = prediction
        seen.append((logits.shape, labels.shape))
        return {"accuracy": float((np.argmax(logits, -1) == labels).mean())}

    trainer = make_trainer(tmp_path, make_model(), eval_dataset=make_data(10), compute_metrics=compute)
    metrics = trainer.evaluate()
    assert seen == [((10, 3), (10,))]
    assert 0 <= metrics["eval_accuracy"] <= 1


def test_activation_checkpointing_by_the_models_own_method(tmp_path: Path) -> None:
    found = []
    for option in (False, True):
        model = gpt2(dropout=0.1)
        make_trainer(tmp_path, model, language(12), activation_checkpointing=option, learning_rate=1e-2).train()
        found.append(weights(model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_a_tokenizer_pads_and_is_saved(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, **{f"w{n}": n + 2 for n in range(29)}}
    raw = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")
    texts = [" ".join(f"w{(n * k) % 29}" for k in range(1, 3 + n % 5)) for n in range(12)]
    data = [{**tokenizer(text), "labels": n % 3} for n, text in enumerate(texts)]
    trainer = make_trainer(tmp_path, MODELS["bert"][0](), data, processing_class=tokenizer, eval_dataset=data)
    trainer.train()
    one = make_trainer(tmp_path, trainer.model, processing_class=tokenizer, per_device_eval_batch_size=1)
    assert one.evaluate(data)["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)
    trainer.save_model(str(tmp_path / "final"))
    assert (tmp_path / "final" / "tokenizer.json").is_file()
    assert trainer.tokenizer is tokenizer
