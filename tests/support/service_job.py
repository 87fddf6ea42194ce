"""Trains twice with the client of a tracking service in this process: four steps, then a resume from the second to six.

Arguments: the value of `report_to`, and a folder. Prints the rows of both trainings as JSON in the last line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
from small_models import Classifier, classification, make_trainer

from paceline import TrainerCallback
from paceline.callbacks.reporters import find_reporters
from paceline.core.signals import StopSignals

SECRET = "hf_" + "secret" * 5  # not in one piece, because some clients upload this file


TAG = "-".join(("small", "letters"))  # likewise


class HandlersAreOurs(TrainerCallback):
    """Checks at every step that no client has taken the signals that stop the run."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            assert isinstance(getattr(signal.getsignal(number), "__self__", None), StopSignals), number


class Shows(TrainerCallback):
    """Records a figure and a table at each evaluation."""

    trainer: Any = None

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.log_figure("eval/picture", np.eye(8))
        self.trainer.log_table("eval/samples", ["text", "label"], [["first | sample", 1], [SECRET, 0]])


def train(name: str, folder: Path, resume: str | None, **changes: Any) -> Any:
    options: dict[str, Any] = {"logging_steps": 1, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    data = classification(16)
    trainer = make_trainer(
        folder,
        Classifier(),
        data,
        eval_dataset=data,
        save_strategy="steps",
        report_to=name,
        run_name="first",
        project="letters",
        hub_token=SECRET,
        callbacks=[HandlersAreOurs(), Shows()],
        **{**options, **changes},
    )
    Shows.trainer = trainer
    trainer.model.model_tags = [TAG]
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == trainer.args.max_steps
    return trainer


def end(name: str, trainer: Any) -> None:
    """Ends the runs that stay open after a training, as the end of a process does."""
    if name == "comet_ml":
        sys.modules["comet_ml"].get_running_experiment().end()
    elif name == "swanlab":
        sys.modules["swanlab"].finish()
    elif name == "neptune":
        find_reporters("neptune")[0].get_run(trainer).stop()


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    os.chdir(folder)
    first = train(name, folder / "out", None, max_steps=4)
    end(name, first)
    second = train(name, folder / "out", str(folder / "out" / "checkpoint-2"), max_steps=6)
    second.evaluate()
    end(name, second)
    rows = [first.state.log_history, [row for row in second.state.log_history if row["step"] > 2]]
    print(json.dumps({"rows": rows, "parameters": first.get_num_trainable_parameters()}), flush=True)


if __name__ == "__main__":
    main()
