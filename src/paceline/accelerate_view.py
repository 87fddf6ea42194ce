"""`trainer.accelerator`: the members of accelerate's Accelerator that subclasses use, told of our world and strategy.

A view for code written for transformers; nothing of paceline uses it. Where accelerate can be imported, making the
view starts its process state, which its loggers and its collective functions need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from paceline.args.accelerator_config import batch_of_all, check_batch, is_on
from paceline.args.errors import UnsupportedOption
from paceline.checkpoint.weights import alias_groups
from paceline.core.optional import is_installed, require
from paceline.data.loading import is_stream, split_loader
from paceline.data.sampling import random_sampler
from paceline.data.shares import Shares
from paceline.distributed.collectives import gather_nest, gather_objects, holds_tensor, sum_tensor
from paceline.distributed.strategy import put_on_device
from paceline.distributed.world import first_before_others, process_state, wait_for_all
from paceline.loaders import deal_of

if TYPE_CHECKING:
    from paceline.trainer import Trainer


def start_states(trainer: Trainer) -> Any:
    """Start what accelerate's functions look at: the state of the process, returned, and that of its Accelerator."""
    use_cpu = trainer.world.device.type == "cpu"
    found = process_state(use_cpu)
    if found is None:
        return None
    kind = require("accelerate.state", "libraries").AcceleratorState
    wanted = trainer.args.mixed_precision
    if kind._shared_state and kind().mixed_precision != wanted:
        kind._reset_state()
    if not kind._shared_state:
        no_compiler = require("accelerate.utils", "libraries").TorchDynamoPlugin(backend="NO")
        kind(mixed_precision=wanted, cpu=use_cpu, dynamo_plugin=no_compiler, _from_accelerator=True)
    return found


class State:
    """`accelerator.state`: what accelerate's process state says, and that none of its plugins is in use."""

    deepspeed_plugin = None
    fsdp_plugin = None
    megatron_lm_plugin = None

    def __init__(self, view: AcceleratorView, process_state: Any) -> None:
        self._view, self._process_state = view, process_state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in MEMBERS_OF_STATE:
            return getattr(self._view, name)
        return getattr(self._process_state, name)


MEMBERS_OF_STATE = frozenset({
    "device", "num_processes", "process_index", "local_process_index", "is_main_process", "is_local_main_process",
    "distributed_type", "mixed_precision", "parallelism_config",
})  # fmt: skip


class AcceleratorView:
    """Reads and forwards; holds no state of its own but what a subclass sets on it.

    Attributes:
        gradient_accumulation_steps: 1: what `backward` divides by. The Trainer weighs the losses itself.
        even_batches: may be set, as with an Accelerator; one process has nothing to even out.
    """

    gradient_accumulation_steps = 1

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.state = State(self, start_states(trainer))
        self.dataloader_config = trainer.args.accelerator_config
        self.even_batches = getattr(self.dataloader_config, "even_batches", True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"trainer.accelerator has no {name!r}: it is a view over paceline's Trainer, with "
            f"{', '.join(member for member in dir(type(self)) if not member.startswith('_'))}. Use the Trainer's own "
            "methods for the rest (docs/migration.md)."
        )

    # ---- the world

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._trainer.world.device

    @property
    def num_processes(self) -> int:
        """Processes that train together."""
        return self._trainer.world.world_size

    @property
    def process_index(self) -> int:
        """Rank among all processes."""
        return self._trainer.world.process_index

    @property
    def local_process_index(self) -> int:
        """Rank on this machine."""
        return self._trainer.world.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process of all."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process on its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of all."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.num_processes > 1

    @property
    def distributed_type(self) -> Any:
        """accelerate's DistributedType where it is installed, else its value, a string."""
        name = "NO"
        if self.use_distributed:
            kinds = {"cpu": "CPU", "cuda": "GPU"}
            name = f"MULTI_{kinds.get(self.device.type, self.device.type.upper())}"
            if self._trainer.strategy.is_sharded:
                name = "FSDP"
        if self._trainer.is_deepspeed_enabled:
            name = "DEEPSPEED"
        if not is_installed("accelerate"):
            return name
        return require("accelerate.utils", "libraries").DistributedType[name]

    @property
    def mixed_precision(self) -> str:
        """`no`, `fp16` or `bf16`."""
        return self._trainer.args.mixed_precision

    @property
    def parallelism_config(self) -> Any:
        """The arguments' `parallelism_config`; None without one."""
        return getattr(self._trainer.args, "parallelism_config", None)

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batches are cut among the processes."""
        return bool(getattr(self.dataloader_config, "split_batches", False))

    # ---- between processes

    def gather(self, tensor: Any) -> Any:
        """The tensors of all processes, joined along the first dimension, in which their sizes may differ."""
        return gather_nest(self._trainer.world, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, but of those only that read different data: no sample comes twice.

        What holds no tensor is gathered as objects, one list joined of all.
        """
        world = self._trainer.world
        if not world.is_shared:
            return input_data
        if use_gather_object or not holds_tensor(input_data):
            parts = gather_objects(world, input_data)
            return [item for rank, part in enumerate(parts) if self._speaks(rank) for item in part]
        return gather_nest(world, input_data, self._speaks)

    def _speaks(self, rank: int) -> bool:
        """Whether a process is the first of those that read the same data."""
        return bool(self._trainer.strategy.mesh.speaks(rank))

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean over the processes, times `scale` where it is a mean; `none`: as it is."""
        world = self._trainer.world

        def reduced(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if world.is_shared and reduction != "none":
                value = sum_tensor(value)
            factor = scale / world.world_size if reduction == "mean" else 1.0
            return value * factor if factor != 1.0 else value

        return tree_map(reduced, tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Padded to the greatest size along `dim` that any process has."""
        world = self._trainer.world

        def padded(value: Any) -> Any:
            if not isinstance(value, Tensor) or not world.is_shared or dim >= value.dim():
                return value
            missing = max(gather_objects(world, value.shape[dim])) - value.shape[dim]
            if missing == 0:
                return value
            filler = value.new_full((*value.shape[:dim], missing, *value.shape[dim + 1 :]), pad_index)
            return torch.cat([filler, value] if pad_first else [value, filler], dim)

        return tree_map(padded, tensor)

    def wait_for_everyone(self) -> None:
        """Wait until all processes are here."""
        wait_for_all(self._trainer.world)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """`function`, doing nothing on the other processes, where it returns None. For use as a decorator."""
        if function is None:
            return self.on_main_process

        @wraps(function)
        def called(*values: Any, **options: Any) -> Any:
            return function(*values, **options) if self.is_main_process else None

        return called

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The first process goes through the block before the others."""
        with first_before_others(self._trainer.world, self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The first process of each machine goes through the block before the others on it."""
        with first_before_others(self._trainer.world, self.is_local_main_process):
            yield

    def print(self, *values: Any, **options: Any) -> None:
        """Print, on the first process of the machine."""
        if self.is_local_main_process:
            print(*values, **options)

    # ---- one step

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """The precision that losses are computed in."""
        return self._trainer.strategy.forward_context()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Accumulate the gradients of `loss`, as it is: no factor is put on it."""
        self._trainer.strategy.backward(loss)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip gradients to a total norm; returns the norm before."""
        precision, optimizer = self._trainer.strategy.precision, self._trainer.optimizer
        if precision.scales and optimizer is not None:
            precision.unscale(optimizer)
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    @property
    def sync_gradients(self) -> bool:
        """Whether this is the last micro-batch of an update."""
        run = self._trainer.run
        return run is None or run.engine.is_last_micro_step

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last update was left out (float16: its gradients overflowed)."""
        run = self._trainer.run
        return run is not None and not run.engine.is_applied

    def no_sync(self, model: Any = None) -> AbstractContextManager[Any]:
        """The context in which gradients are not exchanged."""
        return self._trainer.strategy.micro_step(False)

    def accumulate(self, *models: Any) -> AbstractContextManager[Any]:
        """The context of one micro-batch: the Trainer sees to the accumulation itself."""
        return nullcontext()

    # ---- models and loaders

    def prepare(self, *items: Any, **options: Any) -> Any:
        """Models on the device; loaders whose random order is a function of the seed and the epoch; the rest as is."""
        prepared = tuple(self._prepare(item) for item in items)
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """A model beside the one that is trained (a reference, a teacher), on the device."""
        has_own_devices = bool(getattr(model, "hf_device_map", None)) or getattr(model, "quantization_method", None)
        if device_placement is not False and not has_own_devices:
            put_on_device(model, self.device)
        return model

    def prepare_data_loader(self, data_loader: Any, **options: Any) -> Any:
        """The loader, its random order a function of the seed and the epoch."""
        return self._prepare_loader(data_loader)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The module as the user gave it, of whatever was put around it for training."""
        strategy = self._trainer.strategy
        return model if keep_torch_compile and hasattr(model, "_orig_mod") else strategy.unwrap(model)

    @property
    def scaler(self) -> Any:
        """The torch GradScaler of float16 training; None in other precisions."""
        return getattr(self._trainer.strategy.precision, "scaler", None)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole weights of a model. Where processes hold shards, all of them call it.

        `unwrap=False` keeps the names of what was put around the model for training.
        """
        strategy = self._trainer.strategy
        return strategy.full_weights(strategy.unwrap(model) if unwrap else model)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object once: on the first process, or that of each machine where `save_on_each_node` asks for it.

        Args:
            f: a path, or a file opened for writing bytes.
            safe_serialization: write tensors by name as safetensors rather than with torch.save; tied ones once.
        """
        if not (self.is_local_main_process if self._trainer.args.save_on_each_node else self.is_main_process):
            return
        if not safe_serialization:
            torch.save(obj, f)
            return
        aliases = alias_groups(obj)
        tensors = {name: tensor.contiguous() for name, tensor in obj.items() if name not in aliases}
        data = safetensors.torch.save(tensors, metadata={"format": "pt"})
        if hasattr(f, "write"):
            f.write(data)
        else:
            Path(f).write_bytes(data)

    def free_memory(self, *objects: Any) -> Any:
        """Nothing is held here; returns one None for each object."""
        return tuple(None for _ in objects)

    def _prepare(self, item: Any) -> Any:
        if isinstance(item, DataLoader):
            return self._prepare_loader(item)
        return self.prepare_model(item) if isinstance(item, nn.Module) else item

    def _prepare_loader(self, loader: Any) -> Any:
        """Put a sampler that is told the epoch in the place of a RandomSampler, as accelerate does by default."""
        if not getattr(self.dataloader_config, "use_seedable_sampler", True):
            return self._split(loader)
        holder, inner = loader, getattr(loader, "sampler", None)
        if type(inner) is not RandomSampler:  # a batch sampler's own
            holder = getattr(loader, "batch_sampler", None)
            inner = getattr(holder, "sampler", None)
        if type(inner) is RandomSampler and not inner.replacement and inner.num_samples == len(inner.data_source):
            ordered = random_sampler(len(inner.data_source), self._trainer._data_seed)
            for owner in (holder, getattr(loader, "batch_sampler", None)):
                if getattr(owner, "sampler", None) is inner:
                    vars(owner)["sampler"] = ordered  # DataLoader refuses the assignment
        return self._split(loader)

    def _split(self, loader: Any) -> Any:
        """The part of the loader's data that this process reads."""
        (rank, size), config = self._trainer.strategy.data_coordinates(), self.dataloader_config
        asked = getattr(config, "dispatch_batches", None)
        deal = deal_of(self._trainer, is_stream(loader.dataset) if asked is None else asked)
        if size == 1 and deal is None:
            return loader
        if size > 1:
            check_own_loader(loader, config, size)
        at_once = batch_of_all(config, loader.batch_size or 1, size)
        shares = Shares(rank, size, (at_once,)) if size > 1 else None
        return split_loader(loader, shares, self._trainer._data_seed, deal)


def check_own_loader(loader: DataLoader[Any], config: Any, size: int) -> None:
    """That a loader of the user's own can be shared in the way that was asked for.

    Raises:
        ValueError: its batches are too small to be split.
        UnsupportedOption: it makes its batches, or chooses its samples, in a way that leaves nothing to share.
    """
    is_own = isinstance(loader.sampler, DistributedSampler)
    if is_on(config, "split_batches") and (loader.batch_size is None or is_own or is_stream(loader.dataset)):
        raise UnsupportedOption(
            "accelerator_config={'split_batches': True} with a loader of your own that has a batch sampler, a "
            "DistributedSampler or a stream is not supported: its batches are not cut. Leave split_batches out."
        )
    if is_on(config, "dispatch_batches") and is_own:
        raise UnsupportedOption(
            "accelerator_config={'dispatch_batches': True} with a DistributedSampler is not supported: the first "
            "process would read its own samples only. Give the loader another sampler, or leave dispatch_batches out."
        )
    if loader.batch_size is not None:
        check_batch(config, "batch_size", loader.batch_size, size)
