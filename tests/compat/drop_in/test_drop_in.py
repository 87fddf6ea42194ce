"""The names of `transformers` while paceline is installed over it, and afterwards."""

import inspect
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from small_models import Classifier, classification, losses, make_trainer

import paceline
from paceline import drop_in

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers", minversion="5.23")

# of transformers, accelerate and what they import
pytestmark = pytest.mark.filterwarnings("ignore")
PAIRS = drop_in.find_pairs()


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    yield
    drop_in.uninstall()
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


def test_the_table_is_what_both_have() -> None:
    assert {"Trainer", "TrainingArguments", "TrainerCallback", "EvalPrediction", "set_seed"} <= PAIRS.keys()
    assert {"get_linear_schedule_with_warmup", "DataCollatorWithPadding", "IntervalStrategy"} <= PAIRS.keys()
    assert set(paceline.__all__) - PAIRS.keys() == {
        "CutMix", "DPSGD", "DataCollatorForSOP", "DataCollatorForWholeWordMask", "EvaluationHarness",
        "EvaluationSamples", "EvaluationTools", "Member", "MembersTrainer", "MixedDataset", "MixedStream", "Mixup",
        "NotebookProgressCallback", "Phase", "Plan", "Pruning", "Regularizer", "ReportCallback", "SAM",
        "ShuffleBuffer", "SnapshotEnsemble", "StreamingMetric", "TestTimeAugmentation", "UnsupportedOption",
        "check_targets", "ensemble_predict", "replay", "simulated_processes",
    }  # fmt: skip
    for name, (theirs, ours) in PAIRS.items():
        assert ours is getattr(paceline, name)
        assert theirs.__module__.startswith("transformers")


def test_names_are_ours_while_installed() -> None:
    places = [(sys.modules[theirs.__module__], name) for name, (theirs, _) in PAIRS.items()]
    places += [(transformers, name) for name in PAIRS if hasattr(transformers, name)]
    with drop_in.installed():
        while_installed = {(home.__name__, name): getattr(home, name) for home, name in places}
    assert [place for place, found in while_installed.items() if found is not PAIRS[place[1]][1]] == []
    assert [(home.__name__, name) for home, name in places if getattr(home, name) is not PAIRS[name][0]] == []


def test_no_module_of_theirs_shows_a_class_that_was_replaced() -> None:
    with drop_in.installed():
        replaced = {id(theirs): name for name, (theirs, _) in PAIRS.items()}
        left = [
            (name, key)
            for name, module in list(sys.modules.items())
            if name.startswith("transformers") and isinstance(module, ModuleType)
            for key, value in list(vars(module).items())
            if id(value) in replaced
        ]
    assert not left


def test_contexts_nest_and_a_second_install_changes_nothing() -> None:
    with drop_in.installed():
        drop_in.install()
        with drop_in.installed():
            assert drop_in.is_installed()
        assert transformers.Trainer is paceline.Trainer
    assert not drop_in.is_installed()
    drop_in.uninstall()
    assert transformers.Trainer is PAIRS["Trainer"][0]


def test_a_script_of_theirs_trains_here(tmp_path: Path) -> None:
    with drop_in.installed():
        from transformers import Trainer, TrainingArguments

        args = TrainingArguments(str(tmp_path), report_to="none", logging_steps=1, per_device_train_batch_size=4)
        trainer = Trainer(model=Classifier(), args=args, train_dataset=classification(24))
        trainer.train()
    assert type(trainer) is paceline.Trainer
    assert len(losses(trainer)) == 18


# ---- what was imported before


@pytest.fixture
def library() -> Iterator[Any]:
    """A library that was imported before: it took names, and made classes below theirs."""
    module = ModuleType("some_library")
    source = """
import transformers
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import set_seed as seeded

class LibraryTrainer(Trainer):
    def compute_loss(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return super().compute_loss(*args, **kwargs)

class LibraryCallback(TrainerCallback):
    steps = 0
    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
"""
    exec(source, vars(module))
    for name in ("LibraryTrainer", "LibraryCallback"):
        getattr(module, name).__module__ = "some_library"
    sys.modules["some_library"] = module
    yield module
    del sys.modules["some_library"]


def test_a_library_imported_before_is_moved_over(library: Any, tmp_path: Path, caplog: Any) -> None:
    bases = library.LibraryTrainer.__bases__, library.LibraryCallback.__bases__
    with drop_in.installed():
        assert library.Trainer is paceline.Trainer
        assert library.seeded is paceline.set_seed
        assert issubclass(library.LibraryTrainer, paceline.Trainer)
        callback = library.LibraryCallback()
        assert isinstance(callback, transformers.TrainerCallback)
        trainer = make_trainer(
            tmp_path, Classifier(), classification(24), cls=library.LibraryTrainer, callbacks=[callback]
        )
        trainer.train()
        assert trainer.calls == callback.steps == 6
    assert not [r for r in caplog.records if r.name == "paceline.compat.drop_in" and r.levelno >= logging.WARNING]
    assert (library.LibraryTrainer.__bases__, library.LibraryCallback.__bases__) == bases
    assert library.Trainer is PAIRS["Trainer"][0]


def test_its_arguments_are_taken_over(library: Any, tmp_path: Path) -> None:
    from dataclasses import dataclass

    @dataclass
    class LibraryArguments(PAIRS["TrainingArguments"][0]):  # type: ignore[misc]
        sharpness: float = 0.5

    options: dict[str, Any] = {"report_to": "none", "use_cpu": True, "learning_rate": 1e-3, "sharpness": 2.0}
    before = LibraryArguments(str(tmp_path), **options)
    with drop_in.installed():
        args = LibraryArguments(str(tmp_path), **options)  # their class goes on working
        assert {**args.to_dict(), "accelerator_config": {}} == {**before.to_dict(), "accelerator_config": {}}
        trainer = library.LibraryTrainer(model=Classifier(), args=args, train_dataset=classification(8))
    assert trainer.args.learning_rate == 1e-3
    assert trainer.args.sharpness == 2.0


def test_what_cannot_be_moved_is_said(library: Any, caplog: Any) -> None:
    alive = object.__new__(library.LibraryTrainer)
    before = type(alive).__mro__
    with drop_in.installed():
        assert type(alive).__mro__ == before
        (warning,) = [r.getMessage() for r in caplog.records if r.name == "paceline.compat.drop_in"]
    assert "some_library.LibraryTrainer (objects of it exist already)" in warning
    assert "python -m paceline.drop_in" in warning


# ---- python -m paceline.drop_in


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(Path(paceline.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "paceline.drop_in", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
    )


SCRIPT = """
import json, sys
import beside
from transformers import Trainer, TrainerCallback
from transformers.trainer import Trainer as Inner
from paceline import drop_in
shown = [Trainer.__module__, Inner.__module__, TrainerCallback.__module__, __name__, sys.argv, drop_in.is_installed()]
drop_in.uninstall()
from transformers import Trainer
print(json.dumps([*shown, Trainer.__module__]))
sys.exit(3)
"""


@pytest.mark.slow
def test_a_script_is_run_as_python_would(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "beside.py").write_text("")
    script = tmp_path / "code" / "job.py"
    script.write_text(SCRIPT)
    done = run("code/job.py", "--lr", "1", folder=tmp_path)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout) == [
        "paceline.pytorch.trainer", "paceline.pytorch.trainer", "paceline.core.events", "__main__",
        ["code/job.py", "--lr", "1"], True, "transformers.trainer",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_module_is_run_too(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys, transformers\nprint(transformers.Trainer.__module__, sys.argv[1:])\n")
    done = run("-m", "job", "a", folder=tmp_path)
    assert done.stdout == "paceline.pytorch.trainer ['a']\n", done.stderr


def test_what_was_mistyped(capsys: Any) -> None:
    assert drop_in.main([]) == drop_in.main(["-m"]) == 2
    assert drop_in.main(["--help"]) == 0
    assert "usage" in capsys.readouterr().out
    assert drop_in.main(["no-such-script.py"]) == 2
    assert "there is no such script" in capsys.readouterr().err
    assert not drop_in.is_installed()


def test_it_is_reached_through_the_package() -> None:
    assert vars(paceline).get("drop_in") is drop_in
    assert paceline.__getattr__("drop_in") is drop_in


# ---- names of version 4, and methods patched by their source


OLDER_IMPORTS = """
from transformers import AdamW, DataCollatorForWholeWordMask
from transformers.data.data_collator import DataCollatorForSOP, DataCollatorMixin
from transformers.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations import default_logdir
from transformers.optimization import AdamW as optimization_AdamW
from transformers.pytorch_utils import ALL_LAYERNORM_LAYERS as layers
from transformers.trainer import (
    ALL_LAYERNORM_LAYERS, TRAINING_ARGS_NAME, TRAINER_STATE_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, PREFIX_CHECKPOINT_DIR,
    AdamW as trainer_AdamW, EvalLoopContainer, FSDPOption, LabelSmoother, ParallelMode, ShardedDDPOption, Trainer,
    TrainerCallback, TrainerState, TrainOutput, _is_peft_model, check_target_module_exists, deepspeed_init,
    denumpify_detensorize, distributed_concat, find_batch_size, get_dataloader_sampler, get_model_param_count,
    get_module_class_from_name, get_parameter_names, get_reporting_integration_callbacks, get_scheduler, has_length,
    hp_params, is_apex_available, is_datasets_available, is_deepspeed_zero3_enabled as zero3, is_sagemaker_mp_enabled,
    is_torch_tpu_available, is_torch_xla_available, logger, nested_concat, nested_detach, nested_numpify,
    nested_xla_mesh_reduce, reissue_pt_warnings, seed_worker, speed_metrics, unwrap_model,
)
from transformers.trainer_pt_utils import IterableDatasetShard, LengthGroupedSampler, get_length_grouped_indices
from transformers.trainer_utils import EvaluationStrategy, neftune_post_forward_hook
from transformers.training_args import default_logdir as logdir
"""


def test_imports_of_version_4() -> None:
    before = {name: set(vars(sys.modules[name])) for name in ("transformers.trainer", "transformers.trainer_utils")}
    found: dict[str, Any] = {}
    with drop_in.installed():
        exec(OLDER_IMPORTS, found)
        assert found["AdamW"] is found["optimization_AdamW"] is found["trainer_AdamW"]
        assert found["ALL_LAYERNORM_LAYERS"] is found["layers"]
        assert found["Trainer"] is paceline.Trainer
        assert found["LabelSmoother"] is paceline.LabelSmoother
        assert found["DataCollatorMixin"] is paceline.DataCollatorMixin
        assert found["LabelSmoother"].ignore_index == -100
    assert {name: set(vars(sys.modules[name])) for name in before} == before
    assert not hasattr(transformers, "AdamW")
    with pytest.raises(ImportError):
        exec("import transformers.deepspeed", {})


def run_source_anew(method: Any) -> Any:
    """A method made of its source, as libraries do that change some lines of it.

    They import the names that they find in the text from transformers.trainer.
    """
    source = textwrap.dedent(inspect.getsource(method))
    module = sys.modules["transformers.trainer"]
    names = {name: getattr(module, name) for name in dir(module) if name in source}
    exec(source, names)
    return names[method.__name__]


def test_methods_run_from_their_source(tmp_path: Path, monkeypatch: Any) -> None:
    names = (
        "__init__", "train", "training_step", "compute_loss", "get_batch_samples", "_inner_training_loop", "_save",
        "_maybe_log_save_evaluate", "evaluation_loop", "prediction_step", "create_optimizer", "_evaluate",
        "_save_checkpoint",
    )  # fmt: skip
    data = classification(24)
    options: dict[str, Any] = {
        "eval_dataset": data, "eval_strategy": "epoch", "save_strategy": "epoch", "gradient_accumulation_steps": 2,
    }  # fmt: skip
    plain = make_trainer(tmp_path / "plain", Classifier(), data, **options)
    plain.train()
    with drop_in.installed():
        for name in names:
            monkeypatch.setattr(paceline.Trainer, name, run_source_anew(getattr(paceline.Trainer, name)))
        trainer = make_trainer(tmp_path / "anew", Classifier(), data, **options)
        trainer.train()
        trainer.evaluate()
    assert losses(trainer) == losses(plain)
    assert (tmp_path / "anew" / "checkpoint-3" / "model.safetensors").is_file()
