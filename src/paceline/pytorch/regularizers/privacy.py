"""Differentially private SGD (Abadi et al., 2016, arXiv:1607.00133), with the gradients and the accountant of Opacus.

The gradient of each sample is clipped to a norm C, and Gaussian noise of standard deviation sigma C is added to their
sum, once per optimizer step. The sum is divided by the number of samples that a step is expected to have.
"""

from __future__ import annotations

import logging
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import RandomSampler, SequentialSampler

from paceline.args.errors import UnsupportedOption
from paceline.args.regularizers import DPSGD
from paceline.core.optional import require
from paceline.pytorch.data.mixing import MixedDataset
from paceline.pytorch.data.poisson import PoissonBatches
from paceline.pytorch.data.sampling import OrderedSampler, RankBatches, RebalancedBatches
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.distributed.window import Pass
from paceline.pytorch.engine import Engine
from paceline.pytorch.model.reductions import SUM, LossReduction
from paceline.pytorch.optim.layerwise import steps_in_backward
from paceline.pytorch.regularizers.passes import Context, RegularizerPass
from paceline.pytorch.sync import RunWindow

logger = logging.getLogger(__name__)

EXTRA = "privacy"
ROUNDING, HALF_ROUNDING = 1e-3, 5e-2  # of sums of gradients, relative to the sum of the norms of their terms
TINY = 1e-6  # added to the norm of a sample's gradient, which may be 0: Opacus' value
NAME = "regularizers: dp_sgd"


class PrivacyAccount:
    """The optimizer steps that were made with noise, and the epsilon that they have spent.

    Args:
        settings: `delta`, `accountant` and `sampling` are read.
        num_samples: samples of the training data.

    Attributes:
        steps: number of optimizer steps by (noise multiplier, samples of the step; the expected ones with Poisson
            sampling).
        epochs: number of passes over the data that have begun, each of which may use a sample.
    """

    def __init__(self, settings: DPSGD, num_samples: int) -> None:
        self.settings, self.num_samples = settings, num_samples
        self.steps: dict[tuple[float, int], int] = {}
        self.epochs, self._last_epoch = 0, -1
        self._accountants = require("opacus.accountants", EXTRA)

    def add(self, noise_multiplier: float, samples: int, epoch: int) -> None:
        """Counts an optimizer step of an epoch."""
        key = (noise_multiplier, samples)
        self.steps[key] = self.steps.get(key, 0) + 1
        self.epochs += epoch != self._last_epoch
        self._last_epoch = epoch

    def epsilon(self) -> float:
        """Returns the epsilon of the steps so far."""
        if self.settings.sampling == "shuffle":
            return self._epsilon_of_epochs()
        return self._epsilon([(sigma, size / self.num_samples, count) for (sigma, size), count in self.steps.items()])

    def _epsilon_of_epochs(self) -> float:
        """Returns the epsilon of the steps so far if each sample is used once per epoch, in any order.

        No amplification by sampling is assumed: an epoch, or a part of one, is one Gaussian mechanism for each sample.
        """
        smallest = min((sigma for sigma, _ in self.steps), default=0.0)
        used = sum(size * count for (_, size), count in self.steps.items())
        # older checkpoints do not have the epochs
        return self._epsilon([(smallest, 1.0, max(-(-used // self.num_samples), self.epochs))] if used else [])

    def state_dict(self) -> dict[str, Any]:
        """Returns the steps and the epochs."""
        steps = [[*key, count] for key, count in self.steps.items()]
        return {"steps": steps, "epochs": [self.epochs, self._last_epoch]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`."""
        self.steps = {(float(sigma), int(size)): int(count) for sigma, size, count in state["steps"]}
        self.epochs, self._last_epoch = map(int, state.get("epochs", (0, -1)))

    def expected(self, noise_multiplier: float, samples: int, steps: int) -> float:
        """Returns the epsilon of a whole run."""
        return self._epsilon([(noise_multiplier, *self.mechanism(samples, steps))])

    def mechanism(self, samples: int, steps: int) -> tuple[float, int]:
        """Returns the sampling rate and the number of Gaussian mechanisms that make up a run.

        Args:
            samples: that an optimizer step is expected to have.
            steps: optimizer steps of the run.
        """
        if self.settings.sampling == "poisson":
            return samples / self.num_samples, steps
        return 1.0, max(-(-samples * steps // self.num_samples), 1)

    def _epsilon(self, history: list[tuple[float, float, int]]) -> float:
        if not history:
            return 0.0
        accountant = self._accountants.create_accountant(mechanism=self.settings.accountant)
        accountant.history = history
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the range of orders, whose best one bounds epsilon in any case
            return float(accountant.get_epsilon(delta=self.settings.delta))


class PrivateGradients(RegularizerPass):
    """Replaces the gradient of each optimizer step by a differentially private one.

    Args:
        settings: a DPSGD.
        context: the parts of the run.

    Attributes:
        noise_multiplier: standard deviation of the noise in units of the clipping norm.
        account: the epsilon spent so far.

    Raises:
        UnsupportedOption: the gradients of single samples are not available in this run.
    """

    weighs_samples = True

    def __init__(self, settings: DPSGD, context: Context) -> None:
        super().__init__(settings, context)
        check_run(context)
        assert context.num_samples is not None
        self.account = PrivacyAccount(settings, context.num_samples)
        self._size = min(context.plan.global_batch_size, context.num_samples)
        self.noise_multiplier = self._find_noise()
        self._key = secrets.randbits(128) if settings.noise_seed is None else abs(settings.noise_seed)
        self._passes: list[Pass] = []  # of the window in progress
        self._sums: dict[nn.Parameter, Tensor] = {}  # of the clipped gradients of the window in progress
        self._fillers: list[int] = []  # micro-batches of the window in progress that hold no sample of the step
        self._batches = find_batches(context) if settings.sampling == "poisson" else None
        if (settings.delta or 0) * context.num_samples >= 1:
            logger.warning(
                "%s(delta)=%g is at least 1 / %d, the share of one sample: choose a smaller one.",
                NAME,
                settings.delta,
                context.num_samples,
            )
        if context.optimizer.state and not context.num_steps():
            logger.warning(
                "%s: the epsilon of this run does not include the steps that the optimizer has made before it.", NAME
            )

    def _find_noise(self) -> float:
        """Returns the noise multiplier that is given, or that reaches the target epsilon at the end of the run."""
        settings = self.settings
        if settings.noise_multiplier is not None:
            return float(settings.noise_multiplier)
        rate, steps = self.account.mechanism(self._size, max(self.context.plan.max_steps, 1))
        find = require("opacus.accountants.utils", EXTRA).get_noise_multiplier
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = find(
                target_epsilon=settings.target_epsilon,
                target_delta=settings.delta,
                sample_rate=rate,
                steps=steps,
                accountant=settings.accountant,
            )
        return float(found)

    # ---- the model

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Lets Opacus compute the gradients of single samples while entered.

        Raises:
            UnsupportedOption: Opacus cannot do so for a module of the model; the message is its own.
        """
        model = self.context.model
        validator = require("opacus.validators", EXTRA).ModuleValidator
        errors = [str(error) for error in validator.validate(model, strict=False)]
        hooks_of = require("opacus.grad_sample", EXTRA).GradSampleHooks
        errors = errors or [str(error) for error in hooks_of.validate(model, strict=False)]
        if any(each.requires_grad for each in model.parameters(recurse=False)):
            errors.append(
                "it has parameters outside of its modules; move them to a module that is called with tensors."
            )
        if errors:
            raise UnsupportedOption(f"{NAME} cannot train {type(model).__name__}: {' '.join(errors)}")
        if self._batches is not None:
            self._batches.use_key(self._key)  # after a resume, that of the checkpoint
        hooks = hooks_of(model, loss_reduction="sum")
        samplers = hooks_of.GRAD_SAMPLERS
        of_embedding = samplers[nn.Embedding]
        samplers[nn.Embedding] = partial(without_padding, of_embedding)
        try:
            yield
        finally:
            samplers[nn.Embedding] = of_embedding
            hooks.cleanup()
            for module in model.modules():
                for name in ("activations", "max_batch_len"):  # left by a pass that an error interrupted
                    vars(module).pop(name, None)

    # ---- an optimizer step

    def run_window(self, call: RunWindow, engine: Engine, passes: list[Pass]) -> list[Tensor]:
        """Runs the passes, and sets the private gradient of the window.

        Raises:
            UnsupportedOption: the run was begun without privacy.
        """
        if self.context.num_steps() and not self.account.steps:
            raise UnsupportedOption(
                f"{NAME}: the first {self.context.num_steps()} steps of this run were made without it, and no epsilon "
                "holds for them: start a new run, or resume without it."
            )
        self._sums, self._passes = {}, passes
        self._fillers = self._find_fillers(passes)
        with warnings.catch_warnings():
            # inputs of the first layer need no gradient
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            losses = call(AfterEachPass(engine, self.collect), passes)  # type: ignore[arg-type]
        self._passes = []
        samples = sum(each.counts.samples for each in passes) if self._batches is None else self._size
        self._set_gradients(samples)
        feed = self.context.feed
        self.account.add(self.noise_multiplier, samples, feed.epoch if feed is not None else 0)
        return losses

    def _find_fillers(self, passes: list[Pass]) -> list[int]:
        """Returns the micro-batches of a window that hold no sample of the step.

        Raises:
            UnsupportedOption: the window is not an optimizer step of the sampler.
        """
        if self._batches is None:
            return []
        feed = self.context.feed
        assert feed is not None
        number = feed.accumulation
        step = feed.batches // number - 1
        expected = max(int(self._batches.counts(feed.epoch)[step]), number)
        found = sum(each.counts.samples for each in passes)
        if len(passes) != number or feed.batches % number or found != expected:
            raise UnsupportedOption(
                f"{NAME}: step {step + 1} of epoch {feed.epoch} has {found} samples, and the sampler drew {expected}: "
                "no epsilon holds for it. Leave get_batch_samples and the data loader to the Trainer, or set "
                "sampling='shuffle'."
            )
        return self._batches.fillers(feed.epoch, step)

    @torch.no_grad()
    def collect(self, engine: Engine, current: Pass) -> None:
        """Adds the clipped gradients of a micro-batch to those of the window, and drops all others."""
        if current.index in self._fillers:
            for parameter in self.context.strategy.parameters:
                parameter.grad_sample = None  # type: ignore[attr-defined]
            self.context.strategy.clear_gradients()
            return
        scale = self._scale(engine, current)
        parameters = [each for each in self.context.strategy.parameters if each.grad is not None]
        gradients = [self._of_samples(each, current.counts.samples) for each in parameters]
        number = self.context.num_steps() + 1
        if number & (number - 1) == 0:  # 1, 2, 4, 8, ...
            self._check_sums(parameters, gradients)
        norms = torch.stack([sample_norms(each) for each in gradients]).norm(dim=0) * scale
        factors = (self.settings.max_grad_norm / (norms + TINY)).clamp(max=1.0) * scale
        for parameter, gradient in zip(parameters, gradients, strict=True):
            clipped = torch.tensordot(factors.to(gradient.dtype), gradient, dims=1)
            self._sums[parameter] = self._sums[parameter] + clipped if parameter in self._sums else clipped
            parameter.grad_sample = None  # type: ignore[attr-defined]
        self.context.strategy.clear_gradients()

    def _scale(self, engine: Engine, current: Pass) -> Tensor:
        """Returns the factor from the gradient of a sample's share of the loss to that of its own loss, (samples,).

        The loss of a sample is the mean over its targets, so that the gradient depends on no other sample.
        """
        normalizer, counts = engine.normalizer, current.counts
        targets = LossReduction("tokens", shifted=normalizer.shifts)
        reduction = targets if normalizer.is_scaled else normalizer.reduction
        whole = engine.sync.total
        if normalizer.is_scaled:
            window = [each.counts for each in self._passes]
            whole = sum(targets.weigh(each.labels, each.samples, each.is_shifted) for each in window)
        elif reduction == SUM:
            reduction, whole = targets, 1.0
        rows = reduction.row_weights(counts.labels, counts.samples, counts.is_shifted)
        shares = [whole / weight if weight else 0.0 for weight in rows]
        return torch.tensor(shares, device=self.context.strategy.device)

    def _of_samples(self, parameter: nn.Parameter, num_samples: int) -> Tensor:
        """Returns the gradients of the samples of a micro-batch, shape (samples, *parameter.shape).

        Raises:
            UnsupportedOption: Opacus has computed none, or not one per sample.
        """
        found = getattr(parameter, "grad_sample", None)
        if isinstance(found, Tensor) and found.shape[0] == num_samples:
            return found
        name = self._name_of(parameter)
        seen = f"gradients of {found.shape[0]} rows" if isinstance(found, Tensor) else "none"
        raise UnsupportedOption(
            f"{NAME} needs a gradient of each of {num_samples} samples, and Opacus found {seen} for {name!r}: each "
            "module must keep samples in the first dimension, and be called once in a forward pass. Position "
            "embeddings need position_ids for each sample: add them in the data_collator."
        )

    def _check_sums(self, parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
        """Checks that the gradients of the samples add up to that of the micro-batch. Synchronizes with the device.

        Raises:
            UnsupportedOption: a weight is used outside of the module that holds it, where Opacus' hooks see nothing.
        """
        autocasts = self.context.strategy.precision.autocasts
        sizes = torch.stack([sample_norms(each) for each in gradients])
        # some gradients are zero but for rounding, as that of the bias of keys in attention
        sizes = torch.maximum(sizes.sum(1), 0.1 * sizes.norm(dim=0).sum())
        for parameter, gradient, size in zip(parameters, gradients, sizes, strict=True):
            assert parameter.grad is not None
            whole = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            rounding = HALF_ROUNDING if autocasts or gradient.dtype.itemsize <= 2 else ROUNDING
            if bool((gradient.sum(0) - whole).norm() > rounding * size):
                raise UnsupportedOption(
                    f"{NAME}: the gradients of samples that Opacus found for {self._name_of(parameter)!r} do not add "
                    "up to its gradient: the weight is also used outside of the module that holds it, as in "
                    "F.linear(hidden, embedding.weight). Give the weight to a module that is called there, such as an "
                    "nn.Linear whose weight is the same parameter."
                )

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next((name for name, each in self.context.model.named_parameters() if each is parameter), "?")

    @torch.no_grad()
    def _set_gradients(self, samples: int) -> None:
        """Sets the gradients to (sum of clipped gradients + noise) / samples."""
        deviation = self.noise_multiplier * self.settings.max_grad_norm
        numbers = np.random.default_rng([self._key, self.context.num_steps()])
        generator = torch.Generator(self.context.strategy.device)
        generator.manual_seed(int(numbers.integers(2**62)))
        for parameter in self.context.strategy.parameters:
            if not parameter.requires_grad:
                continue
            noise = torch.normal(
                0.0, deviation, parameter.shape, generator=generator, device=parameter.device, dtype=torch.float32
            )
            total = noise + self._sums[parameter].float() if parameter in self._sums else noise
            parameter.grad = (total / samples).to(parameter.dtype)
        self._sums = {}

    # ---- the account

    def facts(self) -> dict[str, Any]:
        """Returns the noise and the epsilon that is expected at the end of the run, for its record."""
        settings, steps = self.settings, self.context.plan.max_steps
        return {
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": settings.max_grad_norm,
            "delta": settings.delta,
            "accountant": settings.accountant,
            "sampling": settings.sampling,
            "expected_epsilon": self.account.expected(self.noise_multiplier, self._size, steps),
        }

    def row(self, times: Mapping[str, float]) -> dict[str, float]:
        """Returns the epsilon that is spent, for a log row."""
        return {"epsilon": self.account.epsilon()}

    def describe(self) -> str:
        """Returns the privacy of the run as a sentence."""
        if not self.account.steps:
            return ""
        way = "Poisson sampling" if self._batches is not None else "each sample once per epoch"
        return (
            f"Privacy ({self.account.epsilon():.3f}, {self.settings.delta:g}) with {way}, at a noise multiplier of "
            f"{self.noise_multiplier:.4g}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the steps of the account, and the key of the noise, which must be kept secret."""
        return {**self.account.state_dict(), "key": str(self._key)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the account and the key."""
        self.account.load_state_dict(state)
        self._key = int(state["key"])


def sample_norms(gradients: Tensor) -> Tensor:
    """Returns the norms of the gradients of samples, `(samples, ...)`, for one parameter."""
    norms: Tensor = gradients.reshape(len(gradients), -1).norm(dim=1)
    return norms


def without_padding(sampler: Callable[..., dict[Any, Tensor]], layer: nn.Embedding, *inputs: Any) -> dict[Any, Tensor]:
    """Returns the gradients of the samples of an embedding, zero for the padding token, which Opacus counts."""
    found = sampler(layer, *inputs)
    if layer.padding_idx is not None and layer.weight in found:
        found[layer.weight][:, layer.padding_idx] = 0
    return found


class AfterEachPass:
    """An engine that calls a function after each pass; all else is the engine's.

    Args:
        engine: runs the passes.
        function: `(engine, pass)`.
    """

    def __init__(self, engine: Engine, function: Callable[[Engine, Pass], None]) -> None:
        self._engine, self._function = engine, function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_pass(self, current: Pass, model: nn.Module | None = None) -> Tensor:
        """Runs forward and backward of a micro-batch; returns its contribution to the loss."""
        loss = self._engine.run_pass(current, model)
        self._function(self._engine, current)
        return loss


def find_batches(context: Context) -> PoissonBatches:
    """Returns the batches of a run with Poisson sampling.

    Raises:
        UnsupportedOption: the loader or its sampler is the user's own.
    """
    found = getattr(context.feed and context.feed.loader, "batch_sampler", None)
    if isinstance(found, PoissonBatches):
        return found
    raise UnsupportedOption(
        f"{NAME}(sampling)='poisson' draws the samples of each step, and the training loader or its sampler is not the "
        "Trainer's: leave both to the Trainer, or set sampling='shuffle' if each sample is used once per epoch."
    )


def check_use_of_samples(loader: Any) -> None:
    """Refuses data and samplers that may use a sample several times in an epoch, which epsilon does not count.

    Raises:
        UnsupportedOption: the message names the data or the sampler.
    """
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, MixedDataset):
        raise UnsupportedOption(
            f"{NAME} with a {type(dataset).__name__}, which repeats samples of a source, while epsilon counts each of "
            "them once per epoch: give a dataset without repetitions, such as torch's ConcatDataset of the sources."
        )
    batches, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    if isinstance(batches, RankBatches) and not isinstance(batches, RebalancedBatches):
        return
    draws_once = isinstance(sampler, OrderedSampler | SequentialSampler)
    if draws_once or (isinstance(sampler, RandomSampler) and not sampler.replacement):
        return
    found = type(sampler if sampler is not None else batches or loader).__name__
    raise UnsupportedOption(
        f"{NAME} with the order of a {found}, which may use a sample several times in an epoch, while epsilon counts "
        "each of them once: leave the order to the Trainer, with train_sampling_strategy='random'."
    )


def check_run(context: Context) -> None:
    """Refuses runs in which the gradients of single samples are not available.

    Raises:
        UnsupportedOption: the message names the option and the remedy.
    """
    strategy = context.strategy
    if strategy.world.is_distributed or type(strategy) is not SingleDevice:
        raise UnsupportedOption(
            f"{NAME} on several processes is not supported, whose gradients are averaged before they are clipped: "
            "start one process, or leave it out."
        )
    if strategy.precision.scales or strategy.precision.has_masters:
        raise UnsupportedOption(f"{NAME} is not supported with fp16 or Apex: set bf16=True instead.")
    if steps_in_backward(context.optimizer):
        raise UnsupportedOption(
            f"{NAME} with an optimizer that steps in the backward pass is not supported: choose another optim."
        )
    if context.num_samples is None:
        raise UnsupportedOption(f"{NAME} needs the number of training samples, and the data has no length.")
    check_use_of_samples(context.feed and context.feed.loader)
    if context.objective.normalizer.function is not None:
        raise UnsupportedOption(
            f"{NAME} with a function as loss_weight, which has no weights of single samples: name a reduction."
        )
