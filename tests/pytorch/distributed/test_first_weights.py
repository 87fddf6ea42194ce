"""Values that only the first process has: the numbers of one process, and never a whole model on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import first_weights_job as job
import processes
import pytest
import torch
from invariance import check_same
from small_models import Tagger, tagging

from paceline.args.errors import UnsupportedOption
from paceline.args.sharding import read_sharding


def test_either_setting_asks_for_the_first_process() -> None:
    assert not read_sharding(True, None).from_first
    assert not read_sharding(True, {"cpu_ram_efficient_loading": "false"}).from_first
    assert read_sharding(True, {"fsdp_cpu_ram_efficient_loading": "true"}).from_first
    assert read_sharding(True, {"sync_module_states": True}).from_first


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="contradicts fsdp_config\\['sync_module_states'\\]=False"):
        read_sharding(True, {"cpu_ram_efficient_loading": True, "sync_module_states": False})
    with pytest.raises(ValueError, match="='often' is invalid"):
        read_sharding(True, {"cpu_ram_efficient_loading": "often"})
    with pytest.raises(UnsupportedOption, match=r"cpu_ram_efficient_loading.*not supported on XLA"):
        read_sharding(True, {"xla": True, "xla_fsdp_v2": True, "cpu_ram_efficient_loading": True})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("first")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "pretrained")
    modes = ["meta", "other values", "offloaded", "evaluated", "resumed", "memory", "pretrained", "refused"]
    modes += ["fsdp", "pipeline"]  # nothing is asked for there
    processes.run("first_weights_job.py", 2, str(folder), *modes)
    return folder


def results(folder: Path, mode: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{mode}-{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["meta", "other values", "offloaded"])
def test_the_numbers_are_those_of_one_process(tmp_path: Path, folder: Path, mode: str) -> None:
    """With parameters and buffers without values on the second, or with others."""
    several = results(folder, mode)
    check_same(several, job.begin(tmp_path, job.Tied(seed=0), 1))
    assert all(result["is_tied"] for result in several)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp", "pipeline"])
def test_models_made_with_other_seeds_start_alike(tmp_path: Path, folder: Path, engine: str) -> None:
    torch.manual_seed(0)
    check_same(results(folder, engine), job.begin(tmp_path, Tagger(), 1))


@pytest.mark.slow
def test_it_can_be_evaluated_before_training(tmp_path: Path, folder: Path) -> None:
    one = job.make_trainer(tmp_path, job.Tied(seed=0), tagging(8), eval_dataset=tagging(17, seed=3)).evaluate()
    for found in results(folder, "evaluated"):
        assert found["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_run_is_resumed(folder: Path) -> None:
    """The first process reads the checkpoint, whatever values it had."""
    for found in results(folder, "resumed"):
        last = torch.cat([found["weights"][name].flatten() for name, _ in job.Tied(seed=0).named_parameters()])
        assert torch.equal(last, results(folder, "meta")[0]["weights"])


@pytest.mark.slow
def test_a_process_never_holds_the_whole_model(folder: Path) -> None:
    layer = 4 * job.WIDTH**2
    first, second = results(folder, "memory")
    assert first["sums"] == second["sums"]
    assert all(value.abs() > 0 for value in first["sums"])
    shards = layer * job.NUM_LAYERS / 2
    assert shards * 0.9 < second["left"] < shards * 1.2
    assert second["peak"] < shards + 3 * layer  # one layer whole, and what the exchange needs


@pytest.mark.slow
def test_a_pretrained_model_is_loaded_by_the_first_process(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "pretrained").symlink_to(folder / "pretrained")
    one, several = job.pretrained(tmp_path, 1), results(folder, "pretrained")
    assert [found["devices"] for found in several] == [{"cpu"}, {"meta"}]
    check_same(several, one)
    assert all(torch.equal(found["frequencies"], one["frequencies"]) for found in several)


@pytest.mark.slow
def test_what_cannot_be_sent_is_refused_on_every_process(folder: Path) -> None:
    for said in results(folder, "refused"):
        assert "'embedding.weight' has no values on process 0 either" in said["empty"]
        assert "the model of process 1 has other names, shapes, types" in said["different"]
        assert "set fsdp_config={'cpu_ram_efficient_loading': True}" in said["unasked"]
