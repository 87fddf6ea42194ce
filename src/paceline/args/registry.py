"""Registries of implementations that options select. An entry has the location and the properties that rules check.

A location is `package.module:name`. Only runs that use it import it; parsing the arguments imports no framework.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplerEntry:
    """An order of training samples, selected by `train_sampling_strategy` or another option.

    Attributes:
        factory: location of a function `SamplerRequest -> sampler`; see `paceline.pytorch.data.sampling`.
        makes_batches: True if the sampler yields micro-batches of indices rather than single indices.
        takes_streams: True if data without a length keeps its own order; False refuses such data.
    """

    factory: str
    makes_batches: bool = False
    takes_streams: bool = False


@dataclass(frozen=True)
class StrategyEntry:
    """A strategy for several processes.

    Attributes:
        strategy: location of the class, which is called with `(world, precision, args)`.
        description: text for the plan that continues "N processes, ".
        is_option: True if `parallel` accepts its name; False if the mesh or another option selects it.
    """

    strategy: str
    description: str
    is_option: bool = False


SAMPLERS = {
    "random": SamplerEntry("paceline.pytorch.data.sampling:make_random", takes_streams=True),
    "sequential": SamplerEntry("paceline.pytorch.data.sampling:make_sequential", takes_streams=True),
    "group_by_length": SamplerEntry("paceline.pytorch.data.sampling:make_length_grouped"),
    "batch_rebalance": SamplerEntry("paceline.pytorch.data.sampling:make_rebalanced", makes_batches=True),
}

ORDERS = {
    **SAMPLERS,  # values of train_sampling_strategy
    "tokens": SamplerEntry("paceline.pytorch.data.token_batches:make_token_batches", makes_batches=True),
    # of a regularizer; DP-SGD refuses streams itself
    "poisson": SamplerEntry("paceline.pytorch.data.poisson:make_poisson", makes_batches=True, takes_streams=True),
}

STRATEGIES = {
    "ddp": StrategyEntry(
        "paceline.pytorch.distributed.ddp:DistributedData",
        "each with the whole model, gradients averaged (ddp)",
        is_option=True,
    ),
    "fsdp": StrategyEntry(
        "paceline.pytorch.distributed.fsdp:FullyShardedData",
        "each with a shard of every parameter, gradient and optimizer state (fsdp)",
        is_option=True,
    ),
    "xla": StrategyEntry(
        "paceline.pytorch.distributed.xla:XlaDevices",
        "on XLA devices, whose compiler shares the work (xla)",
        is_option=True,
    ),
    "pipeline": StrategyEntry(
        "paceline.pytorch.distributed.pipeline:Pipelined",
        "each with some of the layers, micro-batches one after another",
    ),
    "mesh": StrategyEntry("paceline.pytorch.distributed.mesh:MeshParallel", "in a mesh"),
    "deepspeed": StrategyEntry(
        "paceline.pytorch.distributed.deepspeed:DeepSpeed",
        "each with its ZeRO partitions (deepspeed)",
    ),
}

# settings of the regularizers that the option `regularizers` names; a setting class has the location of its pass
REGULARIZERS = {
    "mixup": "paceline.args.regularizers:Mixup",
    "cutmix": "paceline.args.regularizers:CutMix",
    "sam": "paceline.args.regularizers:SAM",
    "dp_sgd": "paceline.args.regularizers:DPSGD",
}

# option -> function that makes the callback of its value
OPTION_CALLBACKS = {
    "eval_harness": "paceline.pytorch.evaluation.harness:harness_of",
    "eval_samples": "paceline.pytorch.evaluation.samples:samples_of",
    "pruning": "paceline.pytorch.pruning.callback:pruning_of",
    "snapshot_ensemble": "paceline.pytorch.ensembles.snapshots:snapshots_of",
}
