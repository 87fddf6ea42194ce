"""XLA devices: their numbers are those of a CPU, a resumed run is the same bits, and nothing is compiled twice.

Runs in an environment of its own, by `make test-xla`: torch_xla needs the torch it was built for. Each of XLA's modes
is one process (`tests/support/xla_job.py`) on XLA's own CPU device, both started at once.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
import shared_job
import torch
import xla_job
from invariance import Matrix, check_complete, check_same

if importlib.util.find_spec("torch_xla") is None:
    pytest.skip("needs torch_xla", allow_module_level=True)

# compiling is slow on a busy machine
pytestmark = [pytest.mark.xla, pytest.mark.timeout(900)]

LAYOUTS = ("single", "data", "fsdp")
Found = dict[str, dict[str, Any]]


def start(devices: int, *words: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{processes.SOURCES}{os.pathsep}{processes.SUPPORT}",
        "OMP_NUM_THREADS": "1",
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(devices),
    }
    return subprocess.Popen(
        [sys.executable, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def on_devices(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Returns the results by layout and scenario."""
    script = str(processes.SUPPORT / "xla_job.py")
    files = [tmp_path_factory.mktemp(name) / "found.pt" for name in ("one", "two")]
    jobs = [start(1, script, str(files[0]), "single"), start(2, script, str(files[1]), "data", "fsdp", "checkpointed")]
    processes.finish(jobs, timeout=800)
    return {name: each for file in files for name, each in torch.load(file, weights_only=False).items()}


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("cpu")
    shared_job.in_force.clear()
    found = {name: shared_job.SCENARIOS[name](folder / name, 1) for name in xla_job.SCENARIOS}
    return {**found, "steady": xla_job.steady(folder / "steady")}


def test_numbers_are_those_of_a_cpu(on_devices: Found, on_cpu: dict[str, Any]) -> None:
    matrix = Matrix(xla_job.HEADING, xla_job.COLUMNS.values(), xla_job.LIMITS)
    for name, layouts in xla_job.SCENARIOS.items():
        columns = [[on_devices[each][name]] if each in layouts else [] for each in xla_job.COLUMNS]
        matrix.add(name, columns, on_cpu[name])
    check_complete(on_cpu["twenty_updates"])
    if os.environ.get("PACELINE_WRITE_DOCS"):
        matrix.write()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_updates_of_one_shape_have_the_numbers_of_a_cpu(
    on_devices: Found, on_cpu: dict[str, Any], layout: str
) -> None:
    check_same([on_devices[layout]["steady"]], on_cpu["steady"], xla_job.LIMITS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_the_second_update_nothing_is_compiled_and_nothing_is_read(on_devices: Found, layout: str) -> None:
    steady = on_devices[layout]["steady"]
    assert len(steady["compiled"]) == steady["global_step"] == 30
    assert len(set(steady["compiled"][1:])) == 1, steady["compiled"]
    assert len(set(steady["on_host"][1:])) == 1, steady["on_host"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_is_the_same_to_the_last_bit(on_devices: Found, layout: str) -> None:
    whole, resumed = on_devices[layout]["resumed"]["whole"], on_devices[layout]["resumed"]["resumed"]
    assert torch.equal(whole["weights"], resumed["weights"])
    assert whole["loss"] == resumed["loss"]


def test_bf16_is_autocast(on_devices: Found, on_cpu: dict[str, Any]) -> None:
    for layout in LAYOUTS:
        losses = on_devices[layout]["halves"]["loss"]
        assert losses == pytest.approx(on_cpu["accumulated"]["loss"], rel=0.02)
        assert losses != on_devices[layout]["accumulated"]["loss"]


def test_the_optimizer_of_torch_xla(on_devices: Found, on_cpu: dict[str, Any]) -> None:
    for layout in LAYOUTS:
        found = on_devices[layout]["own optimizer"]
        assert found["optimizer"].startswith("torch_xla.")
        assert found["loss"] == pytest.approx(on_cpu["accumulated"]["loss"], rel=1e-4)


def test_weights_and_moments_are_cut_where_that_is_asked(on_devices: Found) -> None:
    for kind in ("weights", "moments"):
        assert set(on_devices["single"]["placed"][kind]) == {""}
        assert set(on_devices["data"]["placed"][kind]) == {"{replicated}"}
        assert all("devices=" in spec for spec in on_devices["fsdp"]["placed"][kind])


CHECKS = """
import os, sys, tempfile
import torch
from paceline import Trainer, TrainingArguments
from paceline.pytorch.distributed.world import current_world
from small_models import Tagger, tagging

def arguments(**options):
    return TrainingArguments(tempfile.mkdtemp(), report_to="none", save_strategy="no", disable_tqdm=True, **options)

def refuses(words, **options):
    try:
        Trainer(Tagger(), arguments(**options))
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(options)
"""


def check(code: str, **environment: str) -> str:
    """Run code in a process with one XLA device; its output."""
    job = start(1, "-c", f"import os\nos.environ.update({environment!r})\n{CHECKS}\n{code}")
    output, errors = job.communicate(timeout=300)
    assert job.returncode == 0, errors
    return output


def test_who_merely_has_it_installed_stays_on_the_cpu() -> None:
    # PJRT_DEVICE=CPU is what torch_xla itself sets where a library asks it for a device
    check("assert arguments().device.type == 'cpu'\nassert 'torch_xla' not in sys.modules")


def test_the_environment_chooses_it(tmp_path: Path) -> None:
    check(
        "import paceline.pytorch.distributed.xla_runtime as runtime\n"
        "os.environ['PJRT_DEVICE'] = 'TPU'\n"
        "assert runtime.wants_xla(arguments())\n"
        "assert not runtime.wants_xla(arguments(use_cpu=True))"
    )


def test_refusals_name_option_and_remedy() -> None:
    check(
        "refuses('set bf16=True', parallel='xla', fp16=True)\n"
        "refuses('bf16_full_eval=True', parallel='xla', bf16_full_eval=True)\n"
        "refuses('leave it out', parallel='xla', torch_compile=True)\n"
        "refuses('xla_fsdp_grad_ckpt', parallel='xla', activation_checkpointing=True)\n"
        "refuses('there are 1 XLA devices', parallel='xla', tpu_num_cores=3)\n"
        "refuses(\"TPU_NUM_CORES='many'\", parallel='xla') if os.environ.update(TPU_NUM_CORES='many') is None else 0\n"
    )


def test_metrics_are_printed_and_a_bad_update_is_left_out(tmp_path: Path) -> None:
    output = check(
        "data = tagging(16)\n"
        "class Bad(Tagger):\n"
        "    calls = 0\n"
        "    def forward(self, **inputs):\n"
        "        Bad.calls += 1\n"
        "        found = super().forward(**inputs)\n"
        "        return {**found, 'loss': found['loss'] * (float('nan') if Bad.calls == 2 else 1.0)}\n"
        f"args = arguments(parallel='xla', debug='tpu_metrics_debug', nonfinite_policy='skip', num_train_epochs=1,\n"
        "    per_device_train_batch_size=4, logging_steps=1)\n"
        "trainer = Trainer(Bad(), args, train_dataset=data)\n"
        "trainer.train()\n"
        "assert all(torch.isfinite(p.cpu()).all() for p in trainer.model.parameters())\n"
        f"trainer.save_model({str(tmp_path)!r})\n"
        "from safetensors.torch import load_file\n"
        f"saved = load_file({str(tmp_path / 'model.safetensors')!r})\n"
        "assert all(torch.equal(saved[n], p.detach().cpu()) for n, p in trainer.model.named_parameters())\n"
    )
    assert output.count("Metric: CompileTime") == 1
