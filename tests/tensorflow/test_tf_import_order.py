"""torch and TensorFlow in one process, whichever is there first, and a run of each after the other."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1300)]

RUN = """
import sys
from pathlib import Path

def train_tf():
    from tf_models import losses, make_data, make_model, make_trainer
    trainer = make_trainer(Path(sys.argv[1]) / "tf", make_model(), make_data(32), save_strategy="epoch")
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]
    print("tf trained", [round(loss, 5) for loss in losses(trainer)])

def train_torch():
    from small_models import Classifier
    import torch
    from paceline import Trainer, TrainingArguments
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    data = [{"x": row, "labels": int(row[0] > 0)} for row in x]
    args = TrainingArguments(str(Path(sys.argv[1]) / "torch"), num_train_epochs=4, learning_rate=0.05,
                             per_device_train_batch_size=8, logging_steps=1, save_strategy="epoch", disable_tqdm=True)
    trainer = Trainer(Classifier(), args, train_dataset=data)
    trainer.train()
    found = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert found[-1] < found[0]
    print("torch trained", [round(loss, 5) for loss in found])

"""
ORDERS = {
    "torch, tensorflow": "import torch, tensorflow; train_torch(); train_tf()",
    "tensorflow, torch": "import tensorflow, torch; train_torch(); train_tf()",
    "TFTrainer, Trainer": "train_tf(); train_torch()",
}


@pytest.mark.nightly
def test_both_orders_train_alike(tmp_path: Path) -> None:
    """In processes of their own; both libraries give the same losses in every order."""
    paths = [*map(str, Path(__file__).parents[1].glob("support")), *sys.path]
    said = {}
    for number, (name, lines) in enumerate(ORDERS.items()):
        job = f"import sys\nsys.path[:] = {paths!r}\n{RUN}\n{lines}"
        command = [sys.executable, "-c", job, str(tmp_path / str(number))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{name}:\n{done.stderr[-3000:]}"
        said[name] = sorted(line for line in done.stdout.splitlines() if " trained [" in line)
    assert all(len(lines) == 2 for lines in said.values()), said
    assert len({tuple(lines) for lines in said.values()}) == 1, said
