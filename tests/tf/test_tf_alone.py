"""An environment with `paceline[tf]` in it and nothing else: no torch."""

import os
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
JOB = '''
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
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
read = EventAccumulator(str(folder / "logs"))
read.Reload()
found = [(event.step, round(event.value, 5)) for event in read.Scalars("train/loss")]
assert found == [(step, round(loss, 5)) for step, loss in enumerate(losses(first), 1)], found
assert read.Tags()["tensors"] == ["args/text_summary"]
assert not {"torch", "transformers", "datasets"} & set(sys.modules)
print("trained without torch")
'''


def closure(*names: str) -> set[str]:
    """The distributions that these need, and they themselves."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # needed on another system only
        if name.lower() in found:
            continue
        found.add(name.lower())
        wanted = [Requirement(text) for text in needs]
        pending += [need.name for need in wanted if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def make_environment(folder: Path) -> str:
    """A virtual environment with links to the files of `paceline[tf]`'s requirements. Returns its Python."""
    venv.create(folder, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for name in closure("tensorflow", "tensorboard", "numpy", "safetensors", "PyYAML", "tqdm"):
        package = distribution(name)
        for top in {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(package.locate_file(top))
    return str(folder / "bin" / "python")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs links")
def test_it_works_without_torch(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "environment")
    places = [str(ROOT / "src"), str(ROOT / "tests" / "support")]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(places), TF_CPP_MIN_LOG_LEVEL="3")
    command = [python, "-c", JOB, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained without torch" in done.stdout
