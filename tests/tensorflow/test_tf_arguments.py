"""TFTrainingArguments: what they add, what they refuse, and that they cost no TensorFlow."""

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import TFTrainingArguments, TrainingArguments, UnsupportedOption
from paceline.args.redeclared import OWN
from paceline.tensorflow import devices
from paceline.tensorflow.arguments import UNSUPPORTED


def test_defaults_are_those_of_the_reference() -> None:
    args = TFTrainingArguments("out")
    assert (args.tpu_name, args.tpu_zone, args.gcp_project, args.poly_power, args.xla) == (None, None, None, 1.0, False)
    extra = {"tpu_name", "tpu_zone", "gcp_project", "poly_power", "xla"}
    assert set(args.to_dict()) == set(TrainingArguments("out").to_dict()) | extra
    assert TFTrainingArguments.from_dict(args.to_dict()).to_dict() == args.to_dict()


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("torch_compile", True, "xla=True"),
        ("dataloader_num_workers", 2, "tf.data"),
        ("activation_checkpointing", True, "recompute_grad"),
        ("neftune_noise_alpha", 5.0, "in the model"),
        ("train_sampling_strategy", "batch_rebalance", "'sequential' or 'group_by_length'"),
        ("average_tokens_across_devices", False, "leave it out"),
    ],
)
def test_what_only_torch_can_do_is_refused(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(UnsupportedOption, match=f"{name}=.*{remedy}"):
        TFTrainingArguments("out", **{name: value, "eval_strategy": "epoch"})


ONLY_TORCH: dict[str, Any] = {
    "activation_checkpointing_kwargs": {"use_reentrant": True},
    "dataloader_in_order": False,
    "dataloader_multiprocessing_context": "spawn",
    "dataloader_persistent_workers": True,
    "dataloader_prefetch_factor": 2,
    "ddp_backend": "gloo",
    "ddp_broadcast_buffers": False,
    "ddp_bucket_cap_mb": 5,
    "ddp_comm_hook": "bf16",
    "ddp_find_unused_parameters": True,
    "ddp_static_graph": True,
    "ddp_timeout": 60,
    "eval_use_gather_object": True,
    "fp16_opt_level": "O2",
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "liger_kernel_config": {"rope": True},
    "parallel": "ddp",
    "pipeline_config": {"schedule": "gpipe"},
    "torch_compile_backend": "inductor",
    "torch_compile_mode": "default",
    "tp_plan": {"layer": "colwise"},
    "tpu_num_cores": 8,
    "use_cache": True,
}
# for scripts (do_*), of older launchers and documented to change nothing, or how it is here anyway
READ_ELSEWHERE = {"do_train", "do_eval", "do_predict", "local_rank", "dataloader_pin_memory"}


@pytest.mark.parametrize("name", ONLY_TORCH)
def test_an_option_that_nothing_reads_is_refused(name: str) -> None:
    shown = {"gradient_checkpointing": "activation_checkpointing"}.get(name, name)
    shown = {"gradient_checkpointing_kwargs": "activation_checkpointing_kwargs"}.get(name, shown)
    shown = "torch_compile" if name.startswith("torch_compile_") else shown
    with pytest.raises(ValueError, match=f"{shown}=.*(leave it out|or leave|set |use )"):
        TFTrainingArguments("out", **{name: ONLY_TORCH[name]})


@pytest.mark.slow
def test_every_other_option_is_read() -> None:
    """By TensorFlow's side, by what it shares with torch's, or by its list of what it refuses."""
    package = Path(str(paceline.__file__)).parent
    folders = ("tensorflow", "core", "checkpoint", "hub", "callbacks")
    files = [*(path for name in folders for path in (package / name).rglob("*.py")), package / "args" / "training.py"]
    files += [
        package / "args" / "averages.py",
        package / "args" / "adopt.py",
        package / "args" / "plan.py",
        package / "compat" / "hub_names.py",
    ]
    read: set[str] = set()
    for path in files:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        read |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names = {field.name for field in dataclasses.fields(TFTrainingArguments)}
    assert names - read - set(UNSUPPORTED) - set(ONLY_TORCH) == READ_ELSEWHERE
    TFTrainingArguments("out", ddp_find_unused_parameters=False, gradient_checkpointing_kwargs={"use_reentrant": False})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"poly_power": 0.0}, "poly_power=0.0 is invalid: expected a value above 0"),
        ({"poly_power": 2.0, "lr_scheduler_type": "cosine"}, "poly_power=2.0 belongs to a polynomial decay"),
        ({"tpu_zone": "here"}, "set tpu_name too"),
    ],
)
def test_impossible_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TFTrainingArguments("out", **options)


def test_arguments_load_no_framework() -> None:
    code = (
        "import sys, paceline; paceline.TFTrainingArguments('out', xla=True); "
        "assert not {'torch', 'tensorflow', 'keras', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_tensorflow_is_said() -> None:
    code = (
        "import sys; sys.modules['tensorflow'] = None\n"
        "from paceline import TFTrainingArguments\n"
        "args = TFTrainingArguments('out')\n"
        "for ask in (lambda: __import__('paceline').TFTrainer, lambda: args.strategy):\n"
        "    try: ask()\n"
        "    except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.count('pip install "paceline[tf]"') == 2


def test_a_process_has_one_mirrored_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.tf.config, "list_logical_devices", lambda kind: [object(), object()])
    monkeypatch.setattr(devices.tf.distribute, "MirroredStrategy", object)
    try:
        first, second = (devices.make_strategy(TFTrainingArguments(str(tmp_path), use_cpu=False)) for _ in range(2))
    finally:
        devices.the_only.cache_clear()
    assert first is second


def test_options_that_a_subclass_declares_for_itself_are_unset(tmp_path: Path) -> None:
    from tf_models import losses, make_data, make_model

    from paceline import TFTrainer

    def train(kind: type[TFTrainingArguments], folder: Path) -> list[float]:
        args = kind(str(folder), max_steps=2, logging_steps=1, save_steps=2, report_to="jsonl", disable_tqdm=True)
        trainer = TFTrainer(make_model(), args, make_data(8), make_data(4))
        trainer.train()
        trainer.evaluate()
        return losses(trainer)

    plain = train(TFTrainingArguments, tmp_path / "plain")
    for value in ("a text of another library", 7):
        fields = [(name, Any, dataclasses.field(default=value)) for name in sorted(OWN)]
        kind = dataclasses.make_dataclass("TheirConfig", fields, bases=(TFTrainingArguments,), repr=False, eq=False)
        assert train(kind, tmp_path / str(value)) == plain
