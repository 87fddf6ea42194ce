"""TFTrainingArguments: what they add, what they refuse, and that they cost no TensorFlow."""

import subprocess
import sys
from typing import Any

import pytest

from paceline import TFTrainingArguments, TrainingArguments, UnsupportedOption


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
        ("bf16_full_eval", True, "bf16=True"),
        ("average_tokens_across_devices", False, "leave it out"),
    ],
)
def test_what_only_torch_can_do_is_refused(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(UnsupportedOption, match=f"{name}=.*{remedy}"):
        TFTrainingArguments("out", **{name: value, "eval_strategy": "epoch"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"poly_power": 0.0}, "poly_power=0.0 is not possible"),
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
