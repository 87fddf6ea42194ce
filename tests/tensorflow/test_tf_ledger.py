"""The time ledger of a TFTrainer, and the options of torch that it refuses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tf_models import make_data, make_model, make_trainer

from paceline import TFTrainingArguments, TrainerCallback, UnsupportedOption


class Rows(TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.rows.append(logs)


class InParts(TrainerCallback):
    """Listens to an event inside a step, which is made in parts then."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("in_parts", [False, True])
def test_the_parts_are_the_wall_time(tmp_path: Path, in_parts: bool) -> None:
    rows = Rows()
    trainer = make_trainer(
        tmp_path,
        make_model(),
        make_data(16),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        logging_steps=2,
        eval_dataset=make_data(4, seed=1),
        callbacks=[rows, InParts()] if in_parts else [rows],
    )
    begun = time.perf_counter()
    trainer.train()
    wall = time.perf_counter() - begun
    spent = trainer.time_spent
    assert sum(spent.values()) == pytest.approx(wall, rel=0.1)
    assert set(spent) >= {"setup", "data", "transfer", "compute", "log", "evaluate", "save", "other"}
    assert ("optimizer" in spent) is in_parts, "else it is a part of one compiled function"
    assert spent["other"] >= (0.05 * trainer.state.global_step if in_parts else 0), "time of callbacks"
    assert any("time/compute" in row for row in rows.rows)
    assert not any(name.startswith("time/") for row in trainer.state.log_history for name in row)


@pytest.mark.parametrize(("name", "value"), [("profile", "steps=2"), ("log_flops", True)])
def test_options_of_torch_are_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(UnsupportedOption, match=f"^{name}=.* is not supported with TensorFlow: "):
        TFTrainingArguments(output_dir=str(tmp_path), **{name: value})
