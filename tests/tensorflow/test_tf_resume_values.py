"""`resume_from_checkpoint` means the same for Trainer and TFTrainer; without it, each says which way it goes."""

import pytest
from small_models import Classifier, classification
from tf_models import make_data, make_model, make_trainer

from paceline import Trainer, TrainingArguments

OPTIONS = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "report_to": "none", "disable_tqdm": True}
VALUES = [True, "true", "auto", False, "false"]
EXPECTED = {  # the step at which the second run starts; without a checkpoint
    True: (2, ValueError),
    "true": (2, ValueError),
    "auto": (2, 0),
    False: (0, 0),
    "false": (0, 0),
}


def torch_trainer(folder, max_steps):
    args = TrainingArguments(str(folder), use_cpu=True, **{**OPTIONS, "max_steps": max_steps})
    return Trainer(Classifier(), args, train_dataset=classification(16))


def tf_trainer(folder, max_steps):
    return make_trainer(folder, make_model(), make_data(16), **{**OPTIONS, "max_steps": max_steps})


@pytest.fixture(scope="module", params=[torch_trainer, tf_trainer])
def make(request):
    return request.param


def first_step(trainer, *value):
    """The step at which a run starts, or the kind of error."""
    try:
        trainer.train(*value)
    except ValueError:
        return ValueError
    return trainer.run_mark.starts[-1][1]


@pytest.mark.slow
@pytest.mark.parametrize("value", VALUES)
def test_the_values_mean_the_same(tmp_path, make, value):
    assert first_step(make(tmp_path / "empty", 1), value) == EXPECTED[value][1]
    make(tmp_path / "run", 2).train(False)
    assert first_step(make(tmp_path / "run", 3), value) == EXPECTED[value][0]


@pytest.mark.slow
def test_a_folder_with_checkpoints_is_mentioned_in_one_line(tmp_path, make, caplog):
    """As their counterparts in transformers, a Trainer starts over and a TFTrainer resumes."""
    make(tmp_path, 2).train(False)
    caplog.clear()
    started = first_step(make(tmp_path, 3))
    said = [record.getMessage() for record in caplog.records if str(tmp_path) in record.getMessage()]
    (line,) = [text for text in said if "resume_from_checkpoint=" in text]
    assert "\n" not in line
    checkpoint = str(tmp_path / "checkpoint-2")
    if make is torch_trainer:
        assert started == 0
        assert line.startswith(f"Training starts over; train(resume_from_checkpoint={checkpoint!r}) resumes.")
    else:
        assert started == 2
        assert line.startswith(f"Resuming from {checkpoint}. train(resume_from_checkpoint=False) begins anew")
