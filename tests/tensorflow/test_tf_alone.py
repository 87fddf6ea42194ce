"""An environment with `paceline[tf]` in it and nothing else: no torch."""

import sys
from pathlib import Path

import pytest
from tf_environments import make_environment, run_in

JOB = """
import importlib.util, sys
from pathlib import Path
assert importlib.util.find_spec("torch") is None and importlib.util.find_spec("transformers") is None
from tf_models import losses, make_data, make_model, make_trainer, values, weights
folder = Path(sys.argv[1])
options = dict(save_strategy="steps", save_steps=3, eval_strategy="epoch", eval_dataset=make_data(6),
               report_to=["tensorboard", "jsonl"], logging_dir=str(folder / "logs"))
first = make_trainer(folder, make_model(dropout=0.2), make_data(20), **options)
first.train()
for path in folder.glob("checkpoint-5"):
    path.rename(folder / "aside")
second = make_trainer(folder, make_model(dropout=0.2, seed=1), make_data(20), **options)
second.train()
assert values(first.state.log_history)[:-1] == values(second.state.log_history)[:-1]
assert (weights(first.model) == weights(second.model)).all()
from paceline.cli.main import main
assert main(["verify", str(folder)]) == 0
job = folder / "job.yaml"
(folder / "own.py").write_text("import tf_models\\ndef data(): return {'train': tf_models.make_data(20)}")
job.write_text("{framework: tf, model: tf_models:make_model, data: own:data, max_steps: 4, report_to: jsonl}")
assert main(["train", str(job), "--output_dir", str(folder / "job")]) == 0
assert main(["train", str(job), "--output_dir", str(folder / "other"), "--framework", "torch"]) == 2
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
read = EventAccumulator(str(folder / "logs"))
read.Reload()
found = [(event.step, round(event.value, 5)) for event in read.Scalars("train/loss")]
assert found == [(step, round(loss, 5)) for step, loss in enumerate(losses(first), 1)], found
assert sorted(read.Tags()["tensors"]) == ["args/text_summary", "model_card/text_summary"]
assert not {"torch", "transformers", "datasets"} & set(sys.modules)
print("trained without torch")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs links")
def test_it_works_without_torch(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environment")
    assert "trained without torch" in run_in(python, JOB, str(tmp_path / "run"))
