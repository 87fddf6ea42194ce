"""The optional parts of the optimizer steps of a run, each created if an option requests it.

A new one is a function in `PARTS` that returns a `StepPart`; the session, the engine and the loop stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from paceline.args.plan import Plan
from paceline.args.sections import Options
from paceline.checkpoint import layout as names
from paceline.core.contracts import Stateful
from paceline.core.events import CallbackHandler
from paceline.core.methods import is_ours
from paceline.core.optional import LateModule
from paceline.core.session import Meter
from paceline.core.signals import StopSignals
from paceline.pytorch.data.loading import StatefulDataIterator, sample_count
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.engine import Engine
from paceline.pytorch.model.loss import LossNormalizer
from paceline.pytorch.model.objective import adapted
from paceline.pytorch.trainer_protocol import TrainerProtocol

if TYPE_CHECKING:
    from paceline.pytorch.data.sources import WindowSources
    from paceline.pytorch.data.window_ids import WindowIds
    from paceline.pytorch.distillation import cache as distillation_cache
    from paceline.pytorch.model import sample_losses
    from paceline.pytorch.regularizers import passes
    from paceline.pytorch.step_parts import data_map as maps
    from paceline.pytorch.step_parts import flops, linear_loss_run, noise_scale, source_loss, token_terms
else:
    distillation_cache = LateModule("paceline.pytorch.distillation.cache")
    flops = LateModule("paceline.pytorch.step_parts.flops")
    linear_loss_run = LateModule("paceline.pytorch.step_parts.linear_loss_run")
    maps = LateModule("paceline.pytorch.step_parts.data_map")
    noise_scale = LateModule("paceline.pytorch.step_parts.noise_scale")
    passes = LateModule("paceline.pytorch.regularizers.passes")
    sample_losses = LateModule("paceline.pytorch.model.sample_losses")
    source_loss = LateModule("paceline.pytorch.step_parts.source_loss")
    token_terms = LateModule("paceline.pytorch.step_parts.token_terms")

TrainingStep = Callable[..., Tensor]


@dataclass(frozen=True)
class Setup:
    """The run that parts are created for.

    Attributes:
        options: the arguments.
        facade: the members of the Trainer that parts call.
        strategy: the strategy of the run; it has prepared the model.
        model: as the user gave it.
        optimizer: the optimizer of the run.
        normalizer: scales the losses of micro-batches.
        plan: the plan of the run.
        feed: its data.
        signals: requests to stop.
        sample_ids: the samples of the window, if an option needs them; else None.
        sample_sources: their sources, with `loss_by_source`; else None.
        num_steps: returns the optimizer steps so far.
        training_step: the Trainer's, as the parts before have wrapped it.
    """

    options: Options
    facade: TrainerProtocol
    strategy: SingleDevice
    model: nn.Module
    optimizer: Any
    normalizer: LossNormalizer
    plan: Plan
    feed: StatefulDataIterator
    signals: StopSignals
    sample_ids: WindowIds | None
    sample_sources: WindowSources | None
    num_steps: Callable[[], int]
    training_step: TrainingStep


def no_context(engine: Engine, handler: CallbackHandler) -> AbstractContextManager[None]:
    """Returns a context without effect."""
    return nullcontext()


@dataclass(frozen=True)
class StepPart:
    """One optional part of a run, and how it takes part in it.

    Attributes:
        name: the name of the attribute of the Trainer that holds it, and of its item in checkpoints.
        value: the part itself.
        training_step: wraps the Trainer's; None if it does not look at passes.
        meter: adds entries to the log rows; None without any.
        is_stateful: it is an item of checkpoints.
        join: called with the engine once it is made.
        active: returns the context in which the loop runs.
        before_save: called on all processes before a checkpoint.
        finish: called with the output folder at the end of a run, on a process that saves.
        facts: returns entries of `run.json`.
    """

    name: str
    value: Any
    training_step: TrainingStep | None = None
    meter: Meter | None = None
    is_stateful: bool = False
    join: Callable[[Engine], None] = lambda engine: None
    active: Callable[[Engine, CallbackHandler], AbstractContextManager[None]] = no_context
    before_save: Callable[[], None] = lambda: None
    finish: Callable[[Path], None] = lambda folder: None
    facts: Callable[[], Mapping[str, Any]] = dict


# ---- the parts


def count_flops(setup: Setup) -> StepPart | None:
    """Counts floating-point operations, with `log_flops`."""
    if not setup.options.log_flops:
        return None
    meter = flops.meter_of(setup.facade, setup.strategy, setup.plan, setup.model)
    return StepPart("flop_meter", meter, training_step=meter.training_step, meter=meter, join=meter.join)


def train_without_logits(setup: Setup) -> StepPart | None:
    """Computes the loss from the inputs of the head, with `linear_cross_entropy`."""
    facade = setup.facade
    if facade.objective.linear_loss is None and not setup.options.phases:
        return None
    made = linear_loss_run.LinearLossRun(
        lambda: facade.objective.linear_loss,
        setup.model,
        setup.options,
        setup.strategy.world,
        setup.num_steps,
    )
    return StepPart(
        "linear_loss",
        made,
        join=made.join,
        active=lambda engine, handler: made.active(),
        before_save=made.agree,
    )


def measure_noise(setup: Setup) -> StepPart | None:
    """Measures the gradient noise scale, with `gradient_noise_scale`."""
    if not setup.options.gradient_noise_scale:
        return None
    step = adapted(setup.training_step, 3)
    made = noise_scale.make_noise_scale(setup.strategy, setup.plan, setup.optimizer, setup.options, step)
    return StepPart(
        names.NOISE_SCALE,
        made,
        training_step=made.training_step,
        meter=made,
        is_stateful=True,
        join=made.follow,
    )


def record_samples(setup: Setup) -> StepPart | None:
    """Records a data map, with `data_map`."""
    if not setup.options.data_map:
        return None
    assert setup.sample_ids is not None
    maps.check_run(setup.options, setup.feed.loader)
    made = maps.DataMapRecorder(
        adapted(setup.training_step, 3),
        setup.sample_ids,
        setup.strategy,
        setup.normalizer,
        len(setup.feed.loader.dataset),
        setup.options.torch_compile,
    )

    def write(folder: Path) -> None:
        made.write(folder, setup.facade.log_table, setup.facade.log_figure)

    return StepPart(
        names.DATA_MAP,
        made,
        training_step=made.training_step,
        is_stateful=True,
        active=made.recording,
        before_save=made.merge,
        finish=write,
    )


def compute_token_terms(setup: Setup) -> StepPart | None:
    """Logs token accuracy, entropy and perplexity, and adds a z-loss, with `log_token_metrics` and `z_loss_weight`."""
    options = setup.options
    if not options.log_token_metrics and not options.z_loss_weight:
        return None
    made = token_terms.TokenTerms(options, setup.strategy, setup.plan.leave_out_non_finite)
    return StepPart(names.TOKEN_TERMS, made, meter=made, is_stateful=True, join=made.join, before_save=made.gather)


def record_sources(setup: Setup) -> StepPart | None:
    """Logs the loss of each source, with `loss_by_source`."""
    options = setup.options
    if setup.sample_sources is None:
        return None
    option = f"loss_by_source={options.loss_by_source!r}"
    losses = sample_losses.SampleLosses(setup.normalizer, options.label_smoothing_factor, option)
    leaves_out = setup.plan.leave_out_non_finite
    made = source_loss.SourceLoss(setup.sample_sources, setup.strategy, losses, leaves_out)
    return StepPart(names.SOURCE_LOSS, made, meter=made, is_stateful=True, join=made.join, before_save=made.gather)


def distil(setup: Setup) -> StepPart | None:
    """Trains with a teacher, if the Trainer has one."""
    made = setup.facade.distillation
    if made is None:
        return None
    made.begin(setup.options, setup.strategy)
    if setup.options.distillation_cache is not None:
        assert setup.sample_ids is not None
        made.cache = distillation_cache.open_cache(
            made,
            setup.options,
            precision=str(setup.plan.precision),
            strategy=setup.strategy,
            loader=setup.feed.loader,
            ids=setup.sample_ids,
            prepare=setup.facade._prepare_inputs,
            signals=setup.signals,
        )
    return StepPart(
        names.DISTILLATION,
        made,
        meter=made,
        is_stateful=True,
        join=made.follow,
        active=lambda engine, handler: made.applied(setup.model, handler),
        before_save=made.share,
    )


def regularize(setup: Setup) -> StepPart | None:
    """Runs the passes of `regularizers`."""
    if not setup.options.regularizers:
        return None
    made = passes.make_passes(
        passes.Context(
            settings=passes.regularizers_of(setup.options),
            model=setup.strategy.unwrap(setup.model),
            strategy=setup.strategy,
            optimizer=setup.optimizer,
            objective=setup.facade.objective,
            plan=setup.plan,
            num_steps=setup.num_steps,
            feed=setup.feed,
            num_samples=sample_count(setup.feed.loader),
            owns_loss=is_ours(setup.facade.compute_loss),
        )
    )
    return StepPart(
        names.REGULARIZERS,
        made,
        meter=made,
        is_stateful=made.is_stateful,
        join=made.join,
        active=lambda engine, handler: made.applied(),
        facts=made.facts,
    )


# in the order in which they wrap `training_step`, the first one innermost, and join the engine
PARTS: tuple[Callable[[Setup], StepPart | None], ...] = (
    count_flops,
    train_without_logits,
    measure_noise,
    record_samples,
    compute_token_terms,
    record_sources,
    regularize,
    distil,
)


class StepParts:
    """The optional parts of one run.

    Args:
        parts: in their order.

    Attributes:
        training_step: the Trainer's, wrapped by the parts; None without a run.
    """

    def __init__(self, parts: Sequence[StepPart] = (), training_step: TrainingStep | None = None) -> None:
        self._parts = tuple(parts)
        self.training_step = training_step

    def find(self, name: str) -> Any:
        """Returns the part of this name; None if the run has none."""
        return next((part.value for part in self._parts if part.name == name), None)

    @property
    def meters(self) -> list[Meter]:
        """Returns the parts that add entries to the log rows."""
        return [part.meter for part in self._parts if part.meter is not None]

    def join(self, engine: Engine) -> None:
        """Joins the parts to the engine of the run."""
        for part in self._parts:
            part.join(engine)

    @contextmanager
    def active(self, engine: Engine, handler: CallbackHandler) -> Iterator[None]:
        """Holds the contexts of the parts while the loop runs."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.active(engine, handler))
            yield

    def before_save(self) -> None:
        """Brings the parts up to date before a checkpoint; collective."""
        for part in self._parts:
            part.before_save()

    def finish(self, folder: Path) -> None:
        """Writes the results of the parts into the output folder."""
        for part in self._parts:
            part.finish(folder)

    def items(self) -> dict[str, Stateful]:
        """Returns the parts that are items of checkpoints."""
        return {part.name: part.value for part in self._parts if part.is_stateful}

    def facts(self) -> dict[str, Any]:
        """Returns the entries of the parts in `run.json`."""
        return {name: value for part in self._parts for name, value in part.facts().items()}


def make_step_parts(setup: Setup) -> StepParts:
    """Returns the optional parts of a run, by the order of `PARTS`."""
    made: list[StepPart] = []
    for make in PARTS:
        part = make(setup)
        if part is None:
            continue
        made.append(part)
        if part.training_step is not None:
            setup = replace(setup, training_step=part.training_step)
    return StepParts(made, setup.training_step)
