"""Compares the gradient of several processes with that of one, and runs the other checks on the first process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.args.errors import UnsupportedOption
from paceline.callbacks.flow import DefaultFlowCallback
from paceline.core.events import TrainerCallback
from paceline.pytorch.distributed.collectives import gather_objects, share_object
from paceline.pytorch.distributed.random import preserved_rng
from paceline.pytorch.distributed.world import World
from paceline.pytorch.doctor.findings import ERROR, NOTE, Diagnosis, Finding
from paceline.pytorch.model.tensor_parts import whole
from paceline.pytorch.parts import copy_of
from paceline.pytorch.short_runs import trial_run

if TYPE_CHECKING:
    from paceline.pytorch.trainer import Trainer

CHECK = "parallel gradient"
COMPARED = ("ddp", "fsdp", "mesh")
CLOSE = 1e-2  # relative difference of two gradients in single precision
CLOSE_IN_16_BITS = 5e-2
# the options of one process
ALONE: dict[str, Any] = {
    "parallel": None,
    "parallelism_config": None,
    "fsdp": None,
    "fsdp_config": None,
    "deepspeed": None,
    "pipeline_config": None,
    "tp_plan": None,
}
ONE_STEP: dict[str, Any] = {**trial_run.OPTIONS, "max_steps": 1, "max_grad_norm": 0.0, "bf16": False, "fp16": False}

Gradients = dict[str, Tensor]


class NamedGradients(TrainerCallback):
    """Keeps the gradients of the first optimizer step, without dropout: whole, on the host."""

    def __init__(self) -> None:
        self.found: Gradients = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for module in model.modules():
            if module is not model:
                module.eval()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.found[name] = whole(parameter.grad).detach().double().cpu()


def alone(trainer: Trainer, model: nn.Module) -> Trainer:
    """Returns a copy of a Trainer as for a single process, with a whole model."""
    single = copy.copy(trainer)
    single.world = World(trainer.world.device)
    single.args = replace(trainer.args, **ALONE)
    single.model = single.model_wrapped = model
    return copy_of(single, {}, [])


def diagnosis_of_processes(trainer: Trainer, examine: Callable[[Trainer], Diagnosis]) -> Diagnosis:
    """Returns the diagnosis of a run of several processes, the same on each. Collective.

    Args:
        trainer: is left as it is.
        examine: runs the checks of one process; called on the first one.

    Raises:
        UnsupportedOption: the model is sharded already.
    """
    if trainer.strategy.holds_part_of(trainer.model):
        raise UnsupportedOption("doctor: the model is sharded already. Call doctor() before train().")
    kind = trainer._plan().parallel
    gradients, windows = gradients_of_processes(trainer) if kind in COMPARED else ({}, [])
    batches = gather_objects(trainer.world, (trainer.strategy.data_coordinates(), windows))
    told: tuple[Diagnosis | None, str] = (None, "")
    failure: Exception | None = None
    if trainer.world.is_first:
        try:
            told = (joined(trainer, examine, kind, gradients, batches), "")
        except Exception as error:  # the other processes wait for it
            failure, told = error, (None, f"{type(error).__name__}: {error}")
    diagnosis, reason = share_object(trainer.world, told)
    if failure is not None:
        raise failure
    if diagnosis is None:
        raise RuntimeError(f"doctor failed on the first process: {reason}")
    found: Diagnosis = diagnosis
    return found


def joined(
    trainer: Trainer,
    examine: Callable[[Trainer], Diagnosis],
    kind: str | None,
    gradients: Gradients,
    batches: list[Any],
) -> Diagnosis:
    """Returns the findings of one process, and that of the comparison."""
    found = examine(alone(trainer, trainer.model))
    if kind not in COMPARED:
        seen = f"the gradient is not compared with that of one process under parallel={kind!r}"
        return Diagnosis((*found.findings, Finding(NOTE, seen, "", CHECK)), found.checks)
    try:
        wrong = compare(trainer, gradients, batches)
    except Exception as error:  # user code, or a model that does not fit on one device
        text = (str(error).strip() or "no message").splitlines()[0][:200]
        note = Finding(NOTE, f"could not be checked: {type(error).__name__}: {text}", "", CHECK)
        return Diagnosis((*found.findings, note), found.checks)
    return Diagnosis((*found.findings, *wrong), (*found.checks, CHECK))


def gradients_of_processes(trainer: Trainer) -> tuple[Gradients, list[Any]]:
    """Returns the gradients of the first step of all processes, and this process's micro-batches of it. Collective."""
    taken: list[Any] = []
    parallel = copy.copy(trainer)
    parallel.model = parallel.model_wrapped = copy.deepcopy(trainer.model)
    parallel.optimizer = None
    collect = trainer.get_batch_samples

    def recording(*args: Any, **kwargs: Any) -> Any:
        batches, count = collect(*args, **kwargs)
        if not taken:
            taken.extend(trial_run.on_host(batch) for batch in batches)
        return batches, count

    vars(parallel)["get_batch_samples"] = recording
    return gradients_of(parallel, {}), taken


def gradients_of(trainer: Trainer, options: Mapping[str, Any]) -> Gradients:
    """Returns the gradients of the first step of a Trainer, whose model is changed by it."""
    callback = NamedGradients()
    with TemporaryDirectory() as folder, preserved_rng():
        shared = share_object(trainer.world, folder)
        changed = {**ONE_STEP, **options, "output_dir": shared}
        copy_of(trainer, changed, [DefaultFlowCallback(), callback]).train()
        share_object(trainer.world, None)  # the folder is in use until all are done
    return callback.found


def compare(trainer: Trainer, gradients: Gradients, batches: list[Any]) -> list[Finding]:
    """Returns a finding if the gradients are not those of one process with the same micro-batches."""
    windows = {shard: window for (shard, _), window in batches}
    micro_batches = [batch for shard in sorted(windows) for batch in windows[shard]]
    number = max(len(window) for window in windows.values())
    if any(len(window) < number for window in windows.values()):
        return [Finding(NOTE, "the data has too few samples for a step of all processes", "", CHECK)]
    first, second = (of_one_process(trainer, micro_batches) for _ in range(2))
    if distance(first, second)[0] > CLOSE / 10:
        return [Finding(NOTE, "the gradient is random: two steps on the same samples differ", "", CHECK)]
    off, worst = distance(gradients, first)
    policy = getattr(getattr(trainer.strategy, "sharding", None), "precision", None)
    if off <= (CLOSE if policy is None else CLOSE_IN_16_BITS):
        return []
    kind, size = trainer._plan().parallel, trainer.world.world_size
    return [
        Finding(
            ERROR,
            f"the gradient of {size} processes ({kind}) differs by {off:.1%} from that of one process with the same "
            f"samples, most in {worst}",
            "Check tp_plan, a training_step or loss of your own, and code that runs on some processes only. A loss "
            "over the samples of all processes differs by design.",
            CHECK,
        )
    ]


@dataclass
class Collated:
    """Returns batches as they are.

    Attributes:
        data_collator: the collator that made them, which shows if they are packed; None if they are not.
    """

    data_collator: Any

    def __call__(self, batch: Any) -> Any:
        return batch


def of_one_process(trainer: Trainer, micro_batches: list[Any]) -> Gradients:
    """Returns the gradients of a step over these micro-batches on one process."""
    single = alone(trainer, copy.deepcopy(trainer.model))
    single.optimizer = None
    packing = single._find_packing()
    made: Any = Collated(None if packing is None else packing.collator(single.data_collator))
    loader: Any = DataLoader(micro_batches, batch_size=None, collate_fn=made)  # type: ignore[arg-type]
    vars(single)["get_train_dataloader"] = lambda: loader
    return gradients_of(single, {"gradient_accumulation_steps": len(micro_batches)})


def distance(one: Gradients, other: Gradients) -> tuple[float, str]:
    """Returns the norm of the difference relative to that of the second, and the name that differs the most.

    A gradient that only one of them has counts as zero in the other.
    """
    zero = torch.zeros(())
    squares = {name: float((one.get(name, zero) - other.get(name, zero)).square().sum()) for name in {**one, **other}}
    if not squares:
        return 0.0, ""
    size = sum(float(each.square().sum()) for each in other.values())
    return (sum(squares.values()) / max(size, 1e-24)) ** 0.5, max(squares, key=lambda name: squares[name])
