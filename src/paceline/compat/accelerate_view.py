"""The members of accelerate's Accelerator that subclasses use on `trainer.accelerator`, over our world and strategy.

The view is for code written for transformers; paceline itself does not use it. If accelerate can be imported, creating
the view initializes accelerate's process state, which its loggers and collectives require.
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

from paceline.args.accelerator_config import check_batch, global_micro_batch_size, is_on
from paceline.args.errors import UnsupportedOption
from paceline.core.optional import is_installed, require
from paceline.pytorch.checkpoint.weights import alias_groups
from paceline.pytorch.data.data_shard import DataShard
from paceline.pytorch.data.loading import is_stream, split_loader
from paceline.pytorch.data.sampling import random_sampler
from paceline.pytorch.distributed.collectives import gather_nest, gather_objects, holds_tensor, sum_tensor
from paceline.pytorch.distributed.strategy import put_on_device
from paceline.pytorch.distributed.world import first_before_others, process_state, wait_for_all
from paceline.pytorch.loaders import dispatcher_of

if TYPE_CHECKING:
    from paceline.pytorch.trainer import Trainer


def start_states(use_cpu: bool, mixed_precision: str) -> Any:
    """Initializes accelerate's process state and Accelerator state. Returns the former; None without accelerate."""
    found = process_state(use_cpu)
    if found is None:
        return None
    kind = require("accelerate.state", "libraries").AcceleratorState
    if kind._shared_state and kind().mixed_precision != mixed_precision:
        kind._reset_state()
    if not kind._shared_state:
        no_compiler = require("accelerate.utils", "libraries").TorchDynamoPlugin(backend="NO")
        kind(mixed_precision=mixed_precision, cpu=use_cpu, dynamo_plugin=no_compiler, _from_accelerator=True)
    return found


class State:
    """The process state of accelerate, `accelerator.state`; all its plugins are None."""

    deepspeed_plugin = None
    fsdp_plugin = None
    megatron_lm_plugin = None

    def __init__(self, view: AcceleratorView, process_state: object) -> None:
        self._view = view
        self._process_state = process_state

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


class GradientState:
    """The position of the run in its data, `accelerator.gradient_state`, under accelerate's names.

    Attributes:
        num_steps: 1, equal to the view's `gradient_accumulation_steps`.
        remainder: -1, because no sample is duplicated, so none must be dropped.
    """

    num_steps = 1
    remainder = -1
    adjust_scheduler = False
    sync_with_dataloader = False

    def __init__(self, view: AcceleratorView) -> None:
        self._view = view
        self.plugin_kwargs: dict[str, Any] = {"num_steps": 1, "sync_with_dataloader": False}

    @property
    def sync_gradients(self) -> bool:
        """True in the last micro-batch of an optimizer step."""
        return self._view.sync_gradients

    @property
    def active_dataloader(self) -> Any:
        """Returns the training loader of the run in progress, or None."""
        run = self._view._trainer.run
        return run.feed.loader if run is not None else None

    @property
    def in_dataloader(self) -> bool:
        """True if a run is in progress."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """True in the last micro-batch of an epoch; False if the data has no length."""
        run = self._view._trainer.run
        per_epoch = run.plan.micro_batches_per_epoch if run is not None else None
        if run is None or per_epoch is None:
            return False
        return self.sync_gradients and run.feed.batches >= per_epoch


class AcceleratorView:
    """A view that forwards to the Trainer. It has no state except attributes that a subclass sets.

    Attributes:
        gradient_accumulation_steps: the divisor in `backward`; 1, because the Trainer weights the losses itself.
        even_batches: may be set, as with an Accelerator; has no effect.
    """

    gradient_accumulation_steps = 1

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.state = State(self, start_states(trainer.world.device.type == "cpu", trainer.args.mixed_precision))
        self.dataloader_config = trainer.args.accelerator_config
        self.even_batches = getattr(self.dataloader_config, "even_batches", True)
        self.gradient_state = GradientState(self)

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
        """Returns the device of this process."""
        return self._trainer.world.device

    @property
    def num_processes(self) -> int:
        """Returns the world size."""
        return self._trainer.world.world_size

    @property
    def process_index(self) -> int:
        """Returns the rank among all processes."""
        return self._trainer.world.process_index

    @property
    def local_process_index(self) -> int:
        """Returns the rank on this machine."""
        return self._trainer.world.local_process_index

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True on local rank 0."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """True on the last rank."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """True if there are several processes."""
        return self.num_processes > 1

    @property
    def distributed_type(self) -> Any:
        """Returns a member of accelerate's DistributedType if accelerate is installed, else the member's name."""
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
        """Returns `no`, `fp16` or `bf16`."""
        return self._trainer.args.mixed_precision

    @property
    def parallelism_config(self) -> Any:
        """Returns the arguments' `parallelism_config`, or None."""
        return getattr(self._trainer.args, "parallelism_config", None)

    @property
    def split_batches(self) -> bool:
        """True if a loader's batches are split among the processes."""
        return bool(getattr(self.dataloader_config, "split_batches", False))

    @property
    def dispatch_batches(self) -> bool | None:
        """True if rank 0 reads the data for all ranks; None if it does so only for a stream in a user's loader."""
        asked: bool | None = getattr(self.dataloader_config, "dispatch_batches", None)
        return asked

    # ---- between processes

    def gather(self, tensor: object) -> Any:
        """Gathers tensors from all ranks, concatenated along the first dimension, in which their sizes may differ."""
        return gather_nest(self._trainer.world, tensor)

    def gather_for_metrics(self, input_data: object, use_gather_object: bool = False) -> Any:
        """Gathers as `gather` does, but only from ranks that read different data, so that no sample is duplicated.

        Data without tensors is gathered as objects and concatenated to one list.
        """
        world = self._trainer.world
        if not world.is_distributed:
            return input_data
        if use_gather_object or not holds_tensor(input_data):
            parts = gather_objects(world, input_data)
            return [item for rank, part in enumerate(parts) if self._is_data_leader(rank) for item in part]
        return gather_nest(world, input_data, self._is_data_leader)

    def _is_data_leader(self, rank: int) -> bool:
        """True if a rank is the first of the ranks that read the same data."""
        return bool(self._trainer.strategy.mesh.is_data_leader(rank))

    def reduce(self, tensor: object, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Returns the sum over the ranks, or their mean times `scale`; `none` returns the tensor unchanged."""
        world = self._trainer.world

        def reduced(value: object) -> Any:
            if not isinstance(value, Tensor):
                return value
            if world.is_distributed and reduction != "none":
                value = sum_tensor(value)
            factor = scale / world.world_size if reduction == "mean" else 1.0
            return value * factor if factor != 1.0 else value

        return tree_map(reduced, tensor)

    def pad_across_processes(self, tensor: object, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pads a tensor along `dim` to the largest size on any rank."""
        world = self._trainer.world

        def padded(value: object) -> Any:
            if not isinstance(value, Tensor) or not world.is_distributed or dim >= value.dim():
                return value
            missing = max(gather_objects(world, value.shape[dim])) - value.shape[dim]
            if missing == 0:
                return value
            filler = value.new_full((*value.shape[:dim], missing, *value.shape[dim + 1 :]), pad_index)
            return torch.cat([filler, value] if pad_first else [value, filler], dim)

        return tree_map(padded, tensor)

    def wait_for_everyone(self) -> None:
        """Waits until all ranks have reached this call (a barrier)."""
        wait_for_all(self._trainer.world)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorates `function` to run on rank 0 only; it returns None on other ranks."""
        if function is None:
            return self.on_main_process

        @wraps(function)
        def called(*values: Any, **options: Any) -> Any:
            return function(*values, **options) if self.is_main_process else None

        return called

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Runs the block on rank 0 before the other ranks."""
        with first_before_others(self._trainer.world, self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Runs the block on local rank 0 of each machine before the machine's other ranks."""
        with first_before_others(self._trainer.world, self.is_local_main_process):
            yield

    def print(self, *values: Any, **options: Any) -> None:
        """Prints on local rank 0."""
        if self.is_local_main_process:
            print(*values, **options)

    # ---- one step

    def autocast(self, autocast_handler: object = None) -> AbstractContextManager[Any]:
        """Returns the precision context for computing losses."""
        return self._trainer.strategy.forward_context()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Accumulates the gradients of `loss` without dividing it."""
        self._trainer.strategy.backward(loss)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clips gradients to a total norm; returns the norm before clipping."""
        precision, optimizer = self._trainer.strategy.precision, self._trainer.optimizer
        if precision.scales and optimizer is not None:
            precision.unscale(optimizer)
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    @property
    def sync_gradients(self) -> bool:
        """True in the last micro-batch of an optimizer step."""
        run = self._trainer.run
        return run is None or run.engine.is_last_micro_step

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the last optimizer step was skipped (float16: its gradients overflowed)."""
        run = self._trainer.run
        return run is not None and not run.engine.is_applied

    def no_sync(self, model: object = None) -> AbstractContextManager[Any]:
        """Returns the context without gradient synchronization."""
        return self._trainer.strategy.micro_step(False)

    def accumulate(self, *models: Any) -> AbstractContextManager[Any]:
        """Returns an empty context, because the Trainer accumulates gradients itself."""
        return nullcontext()

    # ---- models and loaders

    def prepare(self, *items: Any, **options: Any) -> Any:
        """Prepares models as `prepare_model` and loaders as `prepare_data_loader` does; returns the rest unchanged."""
        prepared = tuple(self._prepare(item) for item in items)
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Moves a model other than the trained one (a reference model, a teacher) to the device and returns it."""
        has_own_devices = bool(getattr(model, "hf_device_map", None)) or getattr(model, "quantization_method", None)
        if device_placement is not False and not has_own_devices:
            put_on_device(model, self.device)
        return model

    def prepare_data_loader(self, data_loader: object, **options: Any) -> Any:
        """Returns this rank's shard of the loader; its random order is a function of the seed and the epoch."""
        return self._prepare_loader(data_loader)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Returns the module as the user gave it, without the wrappers for training."""
        strategy = self._trainer.strategy
        return model if keep_torch_compile and hasattr(model, "_orig_mod") else strategy.unwrap(model)

    @property
    def scaler(self) -> Any:
        """Returns the torch GradScaler of float16 training; None in other precisions."""
        return getattr(self._trainer.strategy.precision, "scaler", None)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Returns the full weights of a model. If the model is sharded, all ranks must call this method.

        `unwrap=False` keeps the names that the training wrappers add.
        """
        strategy = self._trainer.strategy
        return strategy.full_weights(strategy.unwrap(model) if unwrap else model)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Writes an object on rank 0, or on local rank 0 of each machine with `save_on_each_node`.

        Args:
            obj: the object to write.
            f: a path, or a file opened for writing bytes.
            safe_serialization: True writes a dict of tensors as safetensors, tied tensors once; False uses torch.save.
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
        """Frees nothing; returns one None for each object."""
        return tuple(None for _ in objects)

    def _prepare(self, item: object) -> Any:
        if isinstance(item, DataLoader):
            return self._prepare_loader(item)
        return self.prepare_model(item) if isinstance(item, nn.Module) else item

    def _prepare_loader(self, loader: object) -> Any:
        """Replaces a RandomSampler by a sampler with a seeded order per epoch, as accelerate does by default."""
        if not getattr(self.dataloader_config, "use_seedable_sampler", True):
            return self._split(loader)
        holder, inner = loader, getattr(loader, "sampler", None)
        if type(inner) is not RandomSampler:  # the sampler may be inside a batch sampler
            holder = getattr(loader, "batch_sampler", None)
            inner = getattr(holder, "sampler", None)
        if type(inner) is RandomSampler and not inner.replacement and inner.num_samples == len(inner.data_source):
            ordered = random_sampler(len(inner.data_source), self._trainer._data_seed)
            for owner in (holder, getattr(loader, "batch_sampler", None)):
                if getattr(owner, "sampler", None) is inner:
                    vars(owner)["sampler"] = ordered  # DataLoader refuses the assignment
        return self._split(loader)

    def _split(self, loader: Any) -> Any:
        """Returns this rank's shard of the loader, with the batch size over all ranks as `total_batch_size`."""
        part = self._part_of(loader)
        batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        if not hasattr(part, "total_batch_size") and batch_size is not None:
            num_parts = self._trainer.strategy.data_coordinates()[1]
            part.total_batch_size = global_micro_batch_size(self.dataloader_config, batch_size, num_parts)
        return part

    def _part_of(self, loader: Any) -> Any:
        (rank, size), config = self._trainer.strategy.data_coordinates(), self.dataloader_config
        asked = getattr(config, "dispatch_batches", None)
        dispatcher = dispatcher_of(
            self._trainer.world,
            self._trainer.strategy.mesh,
            is_stream(loader.dataset) if asked is None else asked,
        )
        if size == 1 and dispatcher is None:
            return loader
        if size > 1:
            check_own_loader(loader, config, size)
        at_once = global_micro_batch_size(config, loader.batch_size or 1, size)
        data_shard = DataShard(rank, size, (at_once,)) if size > 1 else None
        return split_loader(loader, data_shard, self._trainer._data_seed, dispatcher)


def check_own_loader(loader: DataLoader[Any], config: object, size: int) -> None:
    """Checks that a user's own loader can be sharded as requested.

    Raises:
        ValueError: the loader's batches are too small to be split.
        UnsupportedOption: the loader makes batches or chooses samples in a way that cannot be sharded.
    """
    is_own = isinstance(loader.sampler, DistributedSampler)
    if is_on(config, "split_batches") and (loader.batch_size is None or is_own or is_stream(loader.dataset)):
        raise UnsupportedOption(
            "accelerator_config={'split_batches': True} with a loader of your own that has a batch sampler, a "
            "DistributedSampler or a stream is not supported: such batches cannot be split. Leave split_batches out."
        )
    if loader.batch_size is None and loader.batch_sampler is None and not is_stream(loader.dataset):
        raise UnsupportedOption(
            "A loader of your own with batch_size=None, whose dataset gives whole batches, is not supported with "
            "several processes: give it a batch_size or a batch_sampler, and a dataset of samples."
        )
    if is_on(config, "dispatch_batches") and is_own:
        raise UnsupportedOption(
            "accelerator_config={'dispatch_batches': True} with a DistributedSampler is not supported: the first "
            "process would read its own samples only. Give the loader another sampler, or leave dispatch_batches out."
        )
    if loader.batch_size is not None:
        check_batch(config, "batch_size", loader.batch_size, size)
