"""The registries of implementations that options name."""

import pytest

from paceline.args.registry import SAMPLERS, STRATEGIES
from paceline.args.training import TrainingArguments
from paceline.core.optional import load
from paceline.pytorch.distributed.strategy import SingleDevice


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_order_of_samples_has_its_factory(name: str) -> None:
    assert TrainingArguments("out", train_sampling_strategy=name).train_sampling_strategy == name
    assert callable(load(SAMPLERS[name].factory))


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_has_its_class(name: str) -> None:
    assert issubclass(load(STRATEGIES[name].strategy), SingleDevice)


@pytest.mark.parametrize("name", STRATEGIES)
def test_parallel_takes_the_names_of_those_that_nothing_else_chooses(name: str) -> None:
    if STRATEGIES[name].is_option:
        assert TrainingArguments("out", parallel=name).parallel == name
    elif name != "pipeline":  # which stands for {"pp": -1}
        with pytest.raises(ValueError, match="parallel="):
            TrainingArguments("out", parallel=name)


def test_fsdp_beside_another_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel='ddp' and fsdp=.* are two ways to parallelize"):
        TrainingArguments("out", parallel="ddp", fsdp=True)
