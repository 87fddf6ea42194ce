"""Model cards: what they say, that the hub can read it whatever the names are, and what they keep of earlier ones."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hub_server import Hub
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import Classifier, classification, make_trainer

from paceline import Trainer, TrainerCallback
from paceline.hub.card import BEGIN, END, is_hub_id
from paceline.hub.history import evaluations_of
from paceline.pytorch.model_card import precision_of

huggingface_hub = pytest.importorskip("huggingface_hub")

DATA = classification(24)
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


def make(folder: Path, **options: Any) -> Trainer:
    return make_trainer(folder, Classifier(), DATA, eval_dataset=DATA[:8], **options)


def card_of(folder: Path) -> Any:
    return huggingface_hub.ModelCard((folder / "README.md").read_text("utf-8"))


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean()), "odd": math.nan}


def test_what_a_card_says(tmp_path: Path) -> None:
    trainer = make(
        tmp_path / "mine", compute_metrics=accuracy, gradient_accumulation_steps=3, seed=7, lr_scheduler_type="cosine",
        warmup_steps=1, optim="sgd", num_train_epochs=3, **EVALUATED,
    )  # fmt: skip
    trainer.train()
    trainer.create_model_card(
        language="en", license="mit", tags=["digits"], finetuned_from="team/base", tasks="text-classification",
        dataset_tags="team/data", dataset="The data", dataset_args="small",
    )  # fmt: skip
    card = card_of(tmp_path / "mine")
    data = card.data
    assert (data.language, data.license, data.base_model) == ("en", "mit", "team/base")
    assert data.tags == ["digits", "generated_from_trainer", "paceline"]
    assert data.datasets == ["team/data"]
    assert data.library_name is None
    assert data.pipeline_tag == "text-classification"
    results = {result.metric_type: result for result in data.eval_results}
    last = [row for row in trainer.state.log_history if "eval_loss" in row][-1]
    assert results["loss"].metric_value == last["eval_loss"]
    assert results["accuracy"].metric_value == last["eval_accuracy"]
    assert "odd" not in results  # no number
    assert results["loss"].dataset_name == "The data"
    assert results["loss"].dataset_args == "small"
    text = card.text
    for line in (
        "# mine",
        "- training: 24 samples",
        "- evaluation: 8 samples",
        "- global batch size: 12 = 4 per device x 3 accumulated x 1 process",
        "- lr_scheduler_type: cosine, warmup_steps: 1",
        "- steps: 6, epochs: 3",
        "- seed: 7, data_seed: 7",
        "- precision: float32",
        "| training loss | epoch | step | evaluation loss | evaluation accuracy | evaluation odd |",
        "- paceline 0.1.0",
    ):
        assert line in text.splitlines(), line
    assert "optimizer: SGD (optim=sgd)" in text
    assert "[team/base](https://huggingface.co/team/base)" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.endswith("| nan |")]
    assert [row[2] for row in rows if len(row) > 3] == ["2", "4", "6"]
    assert torch.__version__.split("+")[0] in text


def test_the_numbers_are_those_of_the_best_model_where_that_was_loaded(tmp_path: Path) -> None:
    trainer = make(
        tmp_path, load_best_model_at_end=True, learning_rate=0.2, optim="sgd", lr_scheduler_type="constant",
        greater_is_better=True, metric_for_best_model="loss", **EVALUATED,
    )  # fmt: skip
    trainer.train()
    trainer.create_model_card()
    assert trainer.state.best_global_step == 2  # the loss falls, and the greatest was asked for
    (result,) = card_of(tmp_path).data.eval_results
    assert result.metric_value == trainer.state.best_metric
    metrics = trainer.evaluate(DATA)  # a later evaluation is of this very model
    trainer.create_model_card()
    (result,) = card_of(tmp_path).data.eval_results
    assert result.metric_value == metrics["eval_loss"]


def test_the_numbers_are_those_of_the_last_weights_where_the_best_model_could_not_be_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Damage(TrainerCallback):
        """Damages the best checkpoint before it is loaded."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == state.max_steps:
                (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(b"nothing")

    trainer = make(
        tmp_path, load_best_model_at_end=True, learning_rate=0.2, optim="sgd", lr_scheduler_type="constant",
        greater_is_better=True, metric_for_best_model="loss", callbacks=[Damage()], **EVALUATED,
    )  # fmt: skip
    trainer.train()
    assert "The best model was not loaded" in caplog.text
    trainer.create_model_card()
    (result,) = card_of(tmp_path).data.eval_results
    assert result.metric_value == [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row][-1]


def test_a_model_that_was_neither_trained_nor_evaluated(tmp_path: Path) -> None:
    make(tmp_path).create_model_card()
    card = card_of(tmp_path)
    assert card.data.eval_results is None
    assert "It has not been evaluated." in card.text
    assert "Training results" not in card.text


def test_several_data_sets_are_one_evaluation() -> None:
    history = [
        {"loss": 1.0, "step": 2, "epoch": 0.5},
        {"eval_a_loss": 2.0, "eval_a_runtime": 1.0, "step": 2, "epoch": 0.5},
        {"eval_b_loss": 3.0, "step": 2, "epoch": 0.5},
        {"train_runtime": 1.0, "train_loss": 1.0, "step": 2},
        {"eval_a_loss": 4.0, "step": 2, "epoch": 0.5},
    ]
    first, second = evaluations_of(history)
    assert first.metrics == {"a_loss": 2.0, "b_loss": 3.0}
    assert (first.training_loss, first.is_of_training) == (1.0, True)
    assert second.metrics == {"a_loss": 4.0}
    assert not second.is_of_training


awkward = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=20)
nasty = st.sampled_from(
    ["---", "a\n---\nb", "x: [y", "- #", "'\"", "%TAG", "null", "1e3", "{{x}}", "<!--", "|", "*a", "\t"]
)


@pytest.mark.slow
@given(text=st.lists(awkward | nasty, min_size=5, max_size=5))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_gives_metadata_that_can_be_read(trainer: Trainer, text: list[str]) -> None:
    name, tag, dataset, argument, license = text
    path = Path(trainer.args.output_dir, "README.md")  # type: ignore[arg-type]
    path.unlink(missing_ok=True)
    trainer.create_model_card(model_name=name, tags=[tag], dataset=dataset, dataset_args=argument, license=license)
    content = path.read_text("utf-8")
    assert content.startswith("---\n")
    block = content[4:].partition("\n---\n")[0]
    assert yaml.safe_load(block)["tags"][0] == tag
    card = huggingface_hub.ModelCard(content)
    assert card.data.license == license
    assert tag in card.data.tags
    result = card.data.eval_results[0]
    assert (result.dataset_name, result.dataset_args) == (dataset, argument)
    before = content
    trainer.create_model_card(model_name=name, tags=[tag], dataset=dataset, dataset_args=argument, license=license)
    assert path.read_text("utf-8") == before  # written twice it is the same


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    made = make(tmp_path_factory.mktemp("cards"))
    made.evaluate()
    return made


# ---- what was there before


def test_what_a_person_wrote_stays(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    path = tmp_path / "README.md"
    path.write_text("---\nlibrary_name: mine\ntags: [old]\nthumbnail: a.png\n---\n\n# My words\n\nStay.\n", "utf-8")
    for _ in range(2):
        trainer.create_model_card(tags="new")
    card = card_of(tmp_path)
    assert card.data.library_name == "mine"
    assert card.data.thumbnail == "a.png"
    assert card.data.tags == ["old", "new", "generated_from_trainer", "paceline"]
    content = path.read_text("utf-8")
    assert content.count("# My words") == content.count(BEGIN) == content.count(END) == 1
    path.write_text(content + "\nAnd this.\n", "utf-8")
    trainer.evaluate()
    trainer.create_model_card()
    content = path.read_text("utf-8")
    assert content.index("Stay.") < content.index("| metric | value |") < content.index("And this.")


def test_a_card_whose_metadata_is_broken(tmp_path: Path, caplog: Any) -> None:
    trainer = make(tmp_path)
    (tmp_path / "README.md").write_text("---\ntags: [a\n---\n\nStay.\n", "utf-8")
    trainer.create_model_card()
    assert "Stay." in card_of(tmp_path).text
    assert any("could not be read" in record.getMessage() for record in caplog.records)


def test_names_that_the_hub_would_refuse(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    assert is_hub_id("team/model")
    assert is_hub_id(["gpt2", "team/model-1.5"])
    assert not any(map(is_hub_id, ("", None, "/home/me/model", "a/b/c", str(tmp_path / "local"), "has space")))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of PEFT and transformers
def test_an_adapter(tmp_path: Path, hub: Hub) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    config._name_or_path = str(tmp_path / "a folder")  # PEFT notes it, and the hub refuses it
    base = transformers.BertForSequenceClassification(config)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    data = [{"input_ids": torch.randint(0, 20, (6,)), "labels": torch.tensor(i % 2)} for i in range(8)]
    trainer = make_trainer(
        tmp_path / "out", model, data, push_to_hub=True, hub_model_id="a/b", hub_token="hf_x", max_steps=2,
        save_strategy="steps", save_steps=1,
    )  # fmt: skip
    trainer.train()
    for _ in range(2):
        trainer.push_to_hub()
    assert hub["a/b"].messages().count("End of training") == 1  # the second time there was nothing new
    files = hub["a/b"].files
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= files.keys()
    content = files["README.md"].decode()
    card = huggingface_hub.ModelCard(content)
    assert card.data.library_name == "peft"
    assert card.data.base_model is None
    assert card.data.pipeline_tag == "text-classification"
    assert "of them trained" in content
    assert content.count("### Framework versions") == 1
    assert "More Information Needed" not in content


@pytest.mark.parametrize(
    ("precision", "formats", "expected"),
    [
        ("full", None, "float32"),
        ("bf16", None, "mixed, bf16"),
        ("full", "outputs returned in bf16", "mixed (outputs returned in bf16)"),
        ("full", "outputs returned in fp32", "float32 (outputs returned in fp32)"),
        ("fp16", "outputs returned in fp16", "mixed, fp16 (outputs returned in fp16)"),
    ],
)
def test_the_formats_of_the_numbers(precision: str, formats: str | None, expected: str) -> None:
    plan: Any = SimpleNamespace(precision=precision, shard_precision=formats)
    assert precision_of(plan) == expected
