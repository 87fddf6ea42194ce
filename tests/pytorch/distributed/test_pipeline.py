"""Models in stages: what is a stage, what is refused, and the numbers of a pipeline against those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pipeline_job
import processes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipeline_job import Deep
from small_models import make_trainer, tagging
from torch import Tensor, nn

from paceline import Trainer, TrainingArguments
from paceline.args.errors import UnsupportedOption
from paceline.args.mesh import Mesh
from paceline.args.pipelining import Pipelining, read_pipelining
from paceline.args.plan import resolve
from paceline.pytorch.distributed.activation_meta import ActivationMeta
from paceline.pytorch.distributed.last_stage import LastStage
from paceline.pytorch.distributed.pipeline import Pipelined
from paceline.pytorch.distributed.pipeline_window import check_own
from paceline.pytorch.distributed.precision import make_precision
from paceline.pytorch.distributed.stages import make_stages, owners_of
from paceline.pytorch.distributed.world import World

Found = dict[str, Any]
CPU = torch.device("cpu")


def through(model: nn.Module, num_stages: int, batch: dict[str, Tensor]) -> Any:
    """Returns the output of a model's stages for a batch, one after another."""
    received: Sequence[Tensor] = ()
    for stage in make_stages(model, num_stages):
        outputs = stage(received, batch)
        received = () if stage.is_last else stage.hand_on(outputs)
    return outputs


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_stages_give_what_the_model_gives(num_stages: int) -> None:
    model, batch = Deep(), torch.utils.data.default_collate(tagging(3))
    expected, found = model(**batch), through(model, num_stages, batch)
    torch.testing.assert_close(found["logits"], expected["logits"])
    torch.testing.assert_close(found["loss"], expected["loss"])


def test_a_tied_parameter_belongs_to_each_stage_that_uses_it() -> None:
    model = Deep(tied=True)
    owners = owners_of(model, make_stages(model, 2))
    assert owners["embedding.weight"] == owners["head.weight"] == [0, 1]
    assert (owners["blocks.1.inner.weight"], owners["blocks.2.inner.weight"]) == ([0], [1])


def test_a_model_without_stages_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear offers no stages.*pipeline_stages\(num_stages\)"):
        make_stages(nn.Linear(2, 2), 2)


class Wrong(Deep):
    """Offers stages that cannot be had."""

    def __init__(self, stages: list[nn.Module]) -> None:
        super().__init__()
        self.offered = SimpleNamespace(stages=stages)  # no submodules

    def pipeline_stages(self, num_stages: int) -> list[nn.Module]:
        stages: list[nn.Module] = self.offered.stages
        return stages


def test_stages_that_are_not_the_models_are_refused() -> None:
    with pytest.raises(ValueError, match="returned 1 values: it must return 2 modules"):
        make_stages(Wrong([nn.Identity()]), 2)
    foreign = Wrong([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="'weight', which is no parameter of the model"):
        owners_of(foreign, make_stages(foreign, 1))
    lacking = Wrong([nn.Identity()])
    with pytest.raises(ValueError, match=r"No stage of Wrong holds the parameter 'embedding\.weight'"):
        owners_of(lacking, make_stages(lacking, 1))


@pytest.mark.parametrize("outputs", [{"a": torch.ones(1)}, (torch.ones(1), 2), torch.ones(1).long(), ()])
def test_what_cannot_be_handed_on_is_refused(outputs: Any) -> None:
    stage = make_stages(Deep(), 2)[0]
    with pytest.raises(ValueError, match="what a stage hands on is a tensor or a tuple"):
        stage.hand_on(outputs)


@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=3), room=st.integers(0, 5))
def test_tensors_come_out_of_a_buffer_as_they_went_in(shapes: list[list[int]], room: int) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    handed = ActivationMeta(tuple(tensor.shape for tensor in tensors), torch.float32)
    flat = handed.pack(tensors, handed.numel + room)
    assert flat.shape == (handed.numel + room,)
    for before, after in zip(tensors, handed.unpack(flat), strict=True):
        assert torch.equal(before, after)


def test_settings_are_read() -> None:
    assert read_pipelining(None) == Pipelining("1f1b", 1, 0)
    assert read_pipelining({"schedule": "GPipe", "micro_batches": 8}) == Pipelining("gpipe", 1, 8)
    assert read_pipelining({"schedule": "Interleaved1F1B"}) == Pipelining("interleaved_1f1b", 2, 0)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"schedul": "gpipe"}, "there is no setting 'schedul'"),
        ({"schedule": "gpip"}, "expected one of gpipe, 1f1b, interleaved_1f1b"),
        ({"schedule": "1f1b", "stages_per_process": 2}, "change schedule or stages_per_process"),
        ({"schedule": "interleaved_1f1b", "stages_per_process": 1}, "change schedule or stages_per_process"),
        ({"micro_batches": 0}, "micro_batches is a whole number of at least 1"),
        ("gpipe", "expected a dict"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, config: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TrainingArguments(output_dir=str(tmp_path), pipeline_config=config)


def test_a_schedule_that_is_not_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match=r"pipeline_config=.*'zb_v'.* choose one of gpipe"):
        TrainingArguments(output_dir=str(tmp_path), pipeline_config={"schedule": "zb_v"})


def strategy_of(tmp_path: Path, size: int = 2, **options: Any) -> Pipelined:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)
    precision = make_precision("fp16" if args.fp16 else "full", CPU)
    return Pipelined(World(CPU, size, 0, 0), precision, args)


def test_what_a_pipeline_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match=r"pp=2 with tp=2 is not supported: combine pp with dp_replicate"):
        strategy_of(tmp_path, 4, parallel={"pp": 2, "tp": 2})
    with pytest.raises(UnsupportedOption, match="fp16=True with a pipeline"):
        strategy_of(tmp_path, parallel="pipeline", fp16=True)
    with pytest.raises(UnsupportedOption, match="bf16_full_eval=True with a pipeline"):
        strategy_of(tmp_path, parallel="pipeline", bf16_full_eval=True)
    with pytest.raises(UnsupportedOption, match=r"checkpoint_format='sharded'.* with a pipeline"):
        strategy_of(tmp_path, parallel="pipeline", checkpoint_format="sharded")
    with pytest.raises(UnsupportedOption, match="optim='auto' with a pipeline"):
        strategy_of(tmp_path, parallel="pipeline", optim="auto")
    with pytest.raises(UnsupportedOption, match=r"compile_regions=False with a pipeline .* leave it out"):
        strategy_of(tmp_path, parallel="pipeline", torch_compile=True, compile_regions=False)
    with pytest.raises(UnsupportedOption, match=r"linear_cross_entropy=True with a pipeline .* leave it out"):
        strategy_of(tmp_path, parallel="pipeline", linear_cross_entropy=True)
    args = TrainingArguments(output_dir=str(tmp_path), parallel="pipeline")
    with pytest.raises(ValueError, match="needs several processes, and there is one"):
        resolve(args, world_size=1, micro_batches_per_epoch=1)


def test_an_own_training_step_is_refused(tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().training_step(*args, **kwargs)

    check_own(make_trainer(tmp_path, Deep(), tagging(4)).training_step)
    with pytest.raises(ValueError, match=r"Own\.training_step: training_step cannot be overridden with stages on"):
        check_own(make_trainer(tmp_path, Deep(), tagging(4), cls=Own).training_step)


def test_the_plan_tells_the_stages(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), parallel={"dp_replicate": 2, "pp": 2})
    plan = resolve(args, world_size=4, micro_batches_per_epoch=8)
    assert plan.mesh == Mesh(pp=2, dp_replicate=2)
    assert "some of the layers" in plan.describe()
    assert plan.global_batch_size == 2 * args.per_device_train_batch_size


def last_of(model: nn.Module, batch: dict[str, Tensor]) -> LastStage:
    stages = make_stages(model, 2)
    last = LastStage(model, {1: stages[1]}, lambda batch, finish: None)
    last.expect(batch)
    last.receive(stages[0].hand_on(stages[0]((), batch)))
    return last


def test_the_last_stage_is_called_once_and_with_the_batch() -> None:
    model, batch = Deep(), torch.utils.data.default_collate(tagging(3))
    last = last_of(model, batch)
    torch.testing.assert_close(last(**batch)["loss"], model(**batch)["loss"])
    last.check_called("compute_loss")
    with pytest.raises(RuntimeError, match="called the model 2 times"):
        last(**batch)
    with pytest.raises(RuntimeError, match="another 'input_ids' than the batch holds"):
        last_of(model, batch)(input_ids=batch["input_ids"].clone())
    with pytest.raises(RuntimeError, match="compute_loss called the model 0 times"):
        last_of(model, batch).check_called("compute_loss")


def test_batches_are_cut_into_as_many_as_there_are_stages(tmp_path: Path) -> None:
    split = pipeline_job.cut
    strategy = strategy_of(tmp_path, parallel="pipeline", pipeline_config={"micro_batches": 4})
    strategy.layout = SimpleNamespace(number=2)  # type: ignore[assignment]
    batch = torch.utils.data.default_collate(tagging(7))
    assert [len(part["labels"]) for part in strategy.divide([batch], split)] == [2, 2, 2, 1]
    assert len(strategy.divide([batch] * 5, split)) == 5


# ---- on several processes


def results_of(folder: Path, size: int, *names: str) -> list[dict[str, Found]]:
    processes.run("pipeline_job.py", size, str(folder), *names)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    folder = tmp_path_factory.mktemp("two")
    one = pipeline_job.SCENARIOS["saved"](folder / "one", 1)
    pipeline_job.saved(folder / "shards", 1, checkpoint_format="sharded")
    names = [name for name in pipeline_job.SCENARIOS if name != "replicas"]
    names += [f"from={folder / name / 'checkpoint-5'}" for name in ("one", "shards")]
    found = results_of(folder, 2, *names)
    return [{**each, "one": one, "folder": {"path": folder}} for each in found]


def check_same(several: list[Found], one: Found) -> None:
    gradients: dict[str, Tensor] = {}
    for found in several:
        gradients |= found["gradients"]
        for name in ("global_step", "epoch", "learning_rate", "num_input_tokens_seen"):
            assert found[name] == one[name], name
        for name, value in one["weights"].items():
            torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-6)
        for name in ("loss", "grad_norm", "eval_loss", "test"):
            assert found[name] == pytest.approx(one[name], rel=1e-5), name
        np.testing.assert_allclose(found["predictions"], one["predictions"], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(found["labels"], one["labels"])
    assert gradients.keys() == one["gradients"].keys()
    for name, value in one["gradients"].items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in pipeline_job.SCENARIOS if n not in ("resumed", "evaluated", "replicas")])
def test_the_numbers_of_one_process(tmp_path: Path, of_two: list[dict[str, Found]], name: str) -> None:
    check_same([found[name] for found in of_two], pipeline_job.SCENARIOS[name](tmp_path, 1))


@pytest.mark.slow
def test_two_pipelines_of_two_processes(tmp_path: Path) -> None:
    found = results_of(tmp_path, 4, "replicas")
    check_same([each["replicas"] for each in found], pipeline_job.SCENARIOS["replicas"](tmp_path / "one", 1))


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit(of_two: list[dict[str, Found]]) -> None:
    for found in (each["resumed"] for each in of_two):
        for name, value in found["whole"]["weights"].items():
            assert torch.equal(found["again"]["weights"][name], value), name
        assert found["again"]["loss"] == found["whole"]["loss"]
        losses = found["whole"]["eval_loss"]
        best = 5 * (losses.index(min(losses)) + 1)
        written = of_two[0]["resumed"][f"checkpoint-{best}"]
        assert written
        for name, value in written.items():
            assert torch.equal(found["best"]["weights"][name], value), name


@pytest.mark.slow
def test_evaluation_before_training_and_a_second_run(tmp_path: Path, of_two: list[dict[str, Found]]) -> None:
    one = pipeline_job.SCENARIOS["evaluated"](tmp_path, 1)
    for found in (each["evaluated"] for each in of_two):
        assert (found["before"], found["after"]) == pytest.approx((one["before"], one["after"]), rel=1e-5)
    written = of_two[0]["evaluated"]["saved"]
    assert written.keys() == one["saved"].keys()
    for name, value in one["saved"].items():
        torch.testing.assert_close(written[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_checkpoints_are_those_of_one_process(tmp_path: Path, of_two: list[dict[str, Found]]) -> None:
    """Written by a pipeline and gone on from by one process, and the other way round."""
    one, folder = of_two[0]["one"], of_two[0]["folder"]["path"]
    check_weights(pipeline_job.go_on(tmp_path, 1, str(folder / "saved" / "checkpoint-5")), one)
    for found in of_two:
        for name in ("one", "shards"):
            check_weights(found[f"from={folder / name / 'checkpoint-5'}"], one)


def check_weights(found: Found, expected: Found) -> None:
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-6)
