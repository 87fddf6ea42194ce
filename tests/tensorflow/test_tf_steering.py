"""Changes of the learning rate during a run with TensorFlow: schedules, resume, rewind, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_models import make_data, make_model, make_trainer

from paceline import TrainerCallback, UnsupportedOption
from paceline.core.journal import CHANGES_FILE, JOURNAL_FILE, read_changes, read_rows
from paceline.tensorflow.framework import keras, tf

OPTIONS = {"max_steps": 12, "save_strategy": "steps", "save_steps": 6, "logging_steps": 3, "learning_rate": 1e-3}


class Change(TrainerCallback):
    """Scales the rate after step 5, and sets it after step 8."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            control.scale_learning_rate(0.5)
        elif state.global_step == 8:
            control.learning_rate = 2e-3


def rates(folder: Path) -> list[float]:
    return [row.learning_rate for row in read_rows(folder / JOURNAL_FILE)]


EXPECTED = {
    "linear": [*(1e-3 * left / 12 for left in range(12, 7, -1)), *(5e-4 * left / 12 for left in (7, 6, 5))]
    + [2e-3 * left / 4 for left in (4, 3, 2, 1)],
    "constant": [1e-3] * 5 + [5e-4] * 3 + [2e-3] * 4,
    "reduce_lr_on_plateau": [1e-3] * 5 + [5e-4] * 3 + [2e-3] * 4,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["linear", *(pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED if name != "linear")]
)
def test_the_rest_of_the_schedule_is_scaled_and_resumed(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {**OPTIONS, "lr_scheduler_type": name}
    if name == "reduce_lr_on_plateau":
        options = {**options, "eval_strategy": "steps", "eval_steps": 6, "eval_dataset": make_data(20)}
    whole = make_trainer(tmp_path, make_model(), make_data(200), callbacks=[Change()], **options)
    whole.train(resume_from_checkpoint=False)
    assert rates(tmp_path) == pytest.approx(EXPECTED[name], rel=1e-6)
    again = make_trainer(tmp_path, make_model(), make_data(200), callbacks=[Change()], **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert rates(tmp_path) == pytest.approx(EXPECTED[name], rel=1e-6)
    for left, right in zip(whole.model.get_weights(), again.model.get_weights(), strict=True):
        np.testing.assert_array_equal(left, right)
    assert [change["step"] for change in read_changes(tmp_path / CHANGES_FILE)] == [5, 8]


class Ask(TrainerCallback):
    def __init__(self, name: str) -> None:
        self.name = name

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        setattr(control, self.name, 0.1)


@pytest.mark.parametrize("name", ["weight_decay", "max_grad_norm"])
def test_what_is_compiled_into_the_step_is_refused(tmp_path: Path, name: str) -> None:
    trainer = make_trainer(tmp_path, make_model(), make_data(20), callbacks=[Ask(name)], max_steps=2)
    with pytest.raises(UnsupportedOption, match=f"{name}: TensorFlow has compiled it"):
        trainer.train()


def test_a_schedule_of_keras_is_refused_by_name(tmp_path: Path) -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(1e-3, 5, 0.5)
    optimizers = (keras.optimizers.Adam(schedule), None)
    trainer = make_trainer(
        tmp_path, make_model(), make_data(20), callbacks=[Ask("learning_rate")], max_steps=2, optimizers=optimizers
    )
    with pytest.raises(UnsupportedOption, match="ExponentialDecay"):
        trainer.train()


class Break(TrainerCallback):
    """Makes one weight NaN once."""

    is_done = False

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 7 and not self.is_done:
            self.is_done = True
            kernel = model.trainable_variables[0]
            kernel.assign(tf.fill(kernel.shape, np.nan))


@pytest.mark.slow
def test_a_rewind_restores_the_rate(tmp_path: Path) -> None:
    """From step 8 to step 6; the change of step 5 stays, that of step 8 is made once."""
    options = {**OPTIONS, "lr_scheduler_type": "linear", "nonfinite_policy": "rollback", "max_steps": 12}
    trainer = make_trainer(tmp_path, make_model(), make_data(200), callbacks=[Change(), Break()], **options)
    trainer.train(resume_from_checkpoint=False)
    assert rates(tmp_path) == pytest.approx(EXPECTED["linear"], rel=1e-6)
