"""Training in the kernel of a notebook: one table and one curve, interrupts, and cells that run again."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

HAS_KERNEL = all(importlib.util.find_spec(name) for name in ("nbclient", "ipykernel"))
SUPPORT = Path(__file__).parents[1] / "support"
SETUP = f"""
import sys, time
sys.path.insert(0, {str(SUPPORT)!r})
from small_models import Classifier, classification
from paceline import Trainer, TrainerCallback, TrainingArguments

class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.02)
        if state.max_steps > 100 and state.global_step == 50:
            open("is-training", "w").close()

class Broken(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 25:
            raise RuntimeError("broken")

def make(*callbacks, max_steps=40):
    args = TrainingArguments(
        "run", max_steps=max_steps, logging_steps=5, eval_strategy="steps", eval_steps=20, use_cpu=True,
        save_strategy="no", report_to="none",
    )
    data = classification(64)
    return Trainer(Classifier(), args, train_dataset=data, eval_dataset=data, callbacks=[Slow(), *callbacks])

trainer = make()
"""
CELLS = {
    "setup": SETUP,
    "first": "trainer.train();",
    "again": "trainer.train();",
    "interrupted": "trainer = make(max_steps=100000); trainer.train()",
    "after the interrupt": "trainer.evaluate();",
    "broken": "trainer = make(Broken()); trainer.train()",
    "after the error": "trainer.evaluate();",
}


# in a process of its own: jupyter_client leaves sockets and event loops open, of which Python warns
CLIENT = """
import asyncio, json, os, sys, threading, time
import nbclient, nbformat
from jupyter_client import AsyncKernelManager

def interrupt_when_it_trains():  # as the button of a notebook does
    for _ in range(600):
        if os.path.exists("is-training"):
            break
        time.sleep(0.1)
    asyncio.run(manager.interrupt_kernel())

sources = json.loads(sys.stdin.read())
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources.values()])
manager = AsyncKernelManager(kernel_name="python3")
manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
client = nbclient.NotebookClient(book, km=manager, timeout=120, allow_errors=True)
with client.setup_kernel(env=dict(os.environ)):
    for index, (name, cell) in enumerate(zip(sources, book.cells)):
        if name == "interrupted":
            threading.Thread(target=interrupt_when_it_trains, daemon=True).start()
        client.execute_cell(cell, index)
with open("outputs.json", "w") as file:
    json.dump({name: cell.outputs for name, cell in zip(sources, book.cells)}, file)
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The outputs of each cell, executed in order."""
    if not HAS_KERNEL:
        pytest.skip("needs nbclient and ipykernel")
    folder = tmp_path_factory.mktemp("notebook")
    command = [sys.executable, "-c", CLIENT]
    done = subprocess.run(command, cwd=folder, input=json.dumps(CELLS), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "outputs.json").read_text())


def displays(outputs):
    return [output["data"]["text/html"] for output in outputs if output["output_type"] == "display_data"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first", "again"])
def test_one_display_with_a_curve_and_a_table(outputs, name):
    (drawn,) = displays(outputs[name])
    assert drawn.count("<table") == drawn.count("<progress") == drawn.count("<svg") == 1
    assert drawn.count("<tr>") == 3  # head, steps 20 and 40
    assert "value='40' max='40'" in drawn
    assert "Steps 5 to 40: training loss" in drawn
    assert not any(output["output_type"] == "error" for output in outputs[name])


@pytest.mark.slow
def test_an_interrupt_ends_a_cell_in_one_line(outputs):
    (drawn,) = displays(outputs["interrupted"])
    assert drawn.count("<table") == 1
    texts = [line for output in outputs["interrupted"] for line in output.get("text", "").splitlines()]
    assert sum(line.startswith("Stopped at step ") for line in texts) == 1
    (error,) = [output for output in outputs["interrupted"] if output["output_type"] == "error"]
    assert len(error["traceback"]) == 1
    assert error["traceback"][0].startswith("KeyboardInterrupt: stopped at step ")


@pytest.mark.slow
@pytest.mark.parametrize("before", ["interrupted", "broken"])
def test_a_later_cell_draws_in_its_own_output(outputs, before):
    after = {"interrupted": "after the interrupt", "broken": "after the error"}[before]
    assert len(displays(outputs[before])) == 1
    assert before != "broken" or displays(outputs[before])[0].count("<tr>") == 2  # head, step 20
    tables = [drawn for drawn in displays(outputs[after]) if "<table" in drawn]
    assert len(tables) == 1
