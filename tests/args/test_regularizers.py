"""`regularizers`: every form of the option, its order, its files, and what contradicts what."""

from pathlib import Path
from typing import Any

import pytest

from paceline import DPSGD, SAM, CutMix, Mixup, TrainingArguments, UnsupportedOption
from paceline.args.plan import resolve
from paceline.args.regularizers import regularizers_of


def arguments(**options: Any) -> TrainingArguments:
    return TrainingArguments("out", use_cpu=True, **options)


FORMS: list[Any] = [
    [Mixup(0.4), CutMix(), SAM(adaptive=True)],
    [Mixup(0.4), CutMix, SAM(adaptive=True)],
    [{"mixup": {"alpha": "4e-1"}}, "cutmix", {"sam": {"adaptive": True}}],
    {"mixup": {"alpha": 0.4}, "cutmix": None, "sam": {"adaptive": True}},
    '[{"mixup": {"alpha": 0.4}}, "cutmix", {"sam": {"adaptive": true}}]',
]


@pytest.mark.parametrize("form", FORMS, ids=["objects", "class", "names", "mapping", "json"])
def test_all_forms_are_the_same(form: Any) -> None:
    assert arguments(regularizers=form).regularizers == FORMS[0]


def test_words_and_nothing() -> None:
    assert arguments(regularizers="mixup, sam").regularizers == [Mixup(), SAM()]
    assert arguments(regularizers=Mixup()).regularizers == [Mixup()]
    for empty in (None, "", [], {}):
        assert arguments(regularizers=empty).regularizers is None


def test_files_keep_them(tmp_path: Path) -> None:
    given = arguments(regularizers=FORMS[0])
    given.to_yaml(tmp_path / "job.yaml")
    given.to_json(tmp_path / "job.json")
    assert given.to_dict()["regularizers"] == [{"mixup": {"alpha": 0.4}}, {"cutmix": {}}, {"sam": {"adaptive": True}}]
    assert TrainingArguments.from_yaml(tmp_path / "job.yaml").regularizers == FORMS[0]
    assert TrainingArguments.from_json(tmp_path / "job.json").regularizers == FORMS[0]


def test_the_order_is_in_the_plan() -> None:
    args = arguments(regularizers="sam,mixup", neftune_noise_alpha=5.0, label_smoothing_factor=0.1)
    assert [each.name for each in regularizers_of(args)] == ["mixup", "sam"]
    plan = resolve(args, micro_batches_per_epoch=4)
    order = "batch: mixup -> inputs: neftune(alpha=5) -> loss: label smoothing(0.1) -> gradient: sam"
    assert f"regularizers: {order}." in plan.describe()
    assert "regularizers" not in resolve(arguments(neftune_noise_alpha=5.0), micro_batches_per_epoch=4).describe()


WRONG: dict[str, tuple[Any, str]] = {
    "unknown": ("mixupp", "did you mean 'mixup'"),
    "unknown setting": ([{"sam": {"roh": 1}}], "sam has no setting 'roh'.*did you mean 'rho'"),
    "value": ([Mixup(-1.0)], r"regularizers: mixup\(alpha\)=-1.0 is invalid"),
    "text": ([{"mixup": {"alpha": "much"}}], r"mixup\(alpha\)='much' is invalid"),
    "place": ([{"mixup": {"on": "labels"}}], "choose 'inputs' or 'embeddings'"),
    "no mapping": ([{"sam": 0.05}], "expected the settings of sam by name"),
    "two names": ([{"sam": {}, "mixup": {}}], "one name with its settings"),
    "number": (3, "expected a list of regularizers"),
    "no such module": (["nowhere:Thing"], "could not be imported"),
    "no regularizer": (["paceline.args.plan:Plan"], "no subclass of paceline.Regularizer"),
    "no noise": ([DPSGD(delta=1e-5)], "give either noise_multiplier or target_epsilon"),
    "two noises": ([DPSGD(noise_multiplier=1.0, target_epsilon=3.0, delta=1e-5)], "give either"),
    "no such sampling": ([DPSGD(noise_multiplier=1.0, delta=1e-5, sampling="none")], r"dp_sgd\(sampling\)='none'"),
    "no delta": ([DPSGD(noise_multiplier=1.0)], r"dp_sgd\(delta\)=None is invalid"),
    "accountant": ([{"dp_sgd": {"noise_multiplier": 1, "delta": 1e-5, "accountant": "gdp"}}], "'rdp' or 'prv'"),
    "twice": ([SAM(), SAM(0.1)], "sam is given 2 times"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values(case: str) -> None:
    value, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        arguments(regularizers=value)


CONFLICTS: dict[str, dict[str, Any]] = {
    "sam and optimizer_in_backward=True": {"regularizers": "sam", "optimizer_in_backward": True},
    "sam and gradient_noise_scale=True": {
        "regularizers": "sam",
        "gradient_noise_scale": True,
        "gradient_accumulation_steps": 2,
    },
    "sam and fp16=True": {"regularizers": "sam", "fp16": True},
    "sam and deepspeed=": {"regularizers": "sam", "deepspeed": {"zero_optimization": {"stage": 1}}},
    "mixup and linear_cross_entropy=True": {"regularizers": "mixup", "linear_cross_entropy": True},
    "dp_sgd and phases=": {
        "regularizers": [DPSGD(noise_multiplier=1.0, delta=1e-5)],
        "phases": [{"name": "head", "until": 2, "freeze": ["body.*"]}, {"name": "all"}],
        "max_steps": 4,
    },
    "dp_sgd and mixup": {"regularizers": [Mixup(), DPSGD(noise_multiplier=1.0, delta=1e-5)]},
    "dp_sgd and sam": {"regularizers": [SAM(), DPSGD(noise_multiplier=1.0, delta=1e-5)]},
    "dp_sgd and nonfinite_policy='rollback'": {
        "regularizers": {"dp_sgd": {"target_epsilon": 3, "delta": "1e-5"}},
        "nonfinite_policy": "rollback",
    },
    "dp_sgd and train_sampling_strategy='sequential'": {
        "regularizers": [DPSGD(noise_multiplier=1.0, delta=1e-5)],
        "train_sampling_strategy": "sequential",
    },
    "dp_sgd and per_device_train_tokens=64": {
        "regularizers": [DPSGD(noise_multiplier=1.0, delta=1e-5)],
        "per_device_train_tokens": 64,
    },
    "dp_sgd and activation_checkpointing=True": {
        "regularizers": {"dp_sgd": {"target_epsilon": 3, "delta": "1e-5"}},
        "activation_checkpointing": True,
    },
    "cutmix and packing='pack'": {"regularizers": "cutmix", "packing": "pack"},
}


@pytest.mark.parametrize("pair", CONFLICTS)
def test_conflicts_name_both_options(pair: str) -> None:
    with pytest.raises(UnsupportedOption, match=f"regularizers: {pair}.* exclude each other"):
        arguments(**CONFLICTS[pair])


def test_a_conflict_that_is_assigned_later_is_found_before_the_first_step() -> None:
    args = arguments(regularizers="sam")
    args.gradient_noise_scale = True
    with pytest.raises(UnsupportedOption, match="sam and gradient_noise_scale"):
        resolve(args, micro_batches_per_epoch=4)
