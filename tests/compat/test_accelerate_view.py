"""`trainer.accelerator`: every member that subclasses use, and what it tells."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from small_models import Classifier, classification, make_trainer, weights
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from paceline import Trainer, TrainerCallback
from paceline.args.errors import UnsupportedOption
from paceline.args.mesh import Mesh
from paceline.pytorch.data.dispatch import DispatchedLoader
from paceline.pytorch.data.indexed import IndexedLoader

accelerate = pytest.importorskip("accelerate")

MEMBERS = {
    "gather_for_metrics", "gather", "device", "unwrap_model", "is_main_process", "is_local_main_process",
    "process_index", "local_process_index", "num_processes", "reduce", "pad_across_processes", "wait_for_everyone",
    "backward", "clip_grad_norm_", "prepare", "prepare_model", "state", "distributed_type", "parallelism_config",
    "autocast", "print", "main_process_first", "sync_gradients", "accumulate", "no_sync",
    "gradient_accumulation_steps", "dataloader_config", "optimizer_step_was_skipped",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    yield
    for state in (accelerate.state.AcceleratorState, accelerate.state.GradientState, accelerate.state.PartialState):
        state._shared_state.clear()


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return make_trainer(tmp_path, Classifier(), classification(24))


def test_every_member_is_there(trainer: Trainer) -> None:
    assert {name for name in MEMBERS if not hasattr(trainer.accelerator, name)} == set()
    assert trainer.accelerator is trainer.accelerator


def test_what_it_says_of_the_world_is_what_accelerate_says(trainer: Trainer) -> None:
    theirs: Any = accelerate.Accelerator(cpu=True)
    for name in (
        "device", "num_processes", "process_index", "local_process_index", "is_main_process", "is_local_main_process",
        "is_last_process", "use_distributed", "distributed_type", "mixed_precision", "sync_gradients",
        "gradient_accumulation_steps", "parallelism_config", "split_batches", "even_batches",
        "optimizer_step_was_skipped",
    ):  # fmt: skip
        assert getattr(trainer.accelerator, name) == getattr(theirs, name), name
    for name in ("deepspeed_plugin", "num_processes", "distributed_type", "device", "backend", "is_main_process"):
        assert getattr(trainer.accelerator.state, name) == getattr(theirs.state, name), name


def test_it_starts_the_state_that_its_loggers_need(trainer: Trainer, caplog: Any) -> None:
    logger = accelerate.logging.get_logger("of_a_library")
    with pytest.raises(RuntimeError):
        logger.warning("too early")
    assert trainer.accelerator is not None
    logger.warning("in time")
    assert "in time" in caplog.text
    assert trainer.args.distributed_state.num_processes == 1


def test_one_process_gathers_what_it_has(trainer: Trainer, capsys: Any) -> None:
    view, tensor = trainer.accelerator, torch.arange(3.0)
    for gathered in (
        view.gather(tensor), view.gather_for_metrics(tensor), view.reduce(tensor), view.pad_across_processes(tensor),
    ):  # fmt: skip
        assert torch.equal(gathered, tensor)
    assert torch.equal(view.reduce(tensor, "mean", scale=2.0), tensor * 2)
    assert view.gather_for_metrics([{"a": 1}], use_gather_object=True) == [{"a": 1}]
    view.wait_for_everyone()
    with view.main_process_first(), view.local_main_process_first(), view.no_sync(None), view.accumulate(trainer.model):
        view.print("once")
    assert capsys.readouterr().out == "once\n"


def test_a_step_through_it_is_a_step(tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            with self.accelerator.autocast():
                loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
            self.norm = self.accelerator.clip_grad_norm_(model.parameters(), 0.1)
            return loss.detach()

    own = make_trainer(tmp_path, Classifier(), classification(24), cls=Own, max_grad_norm=0.1)
    own.train()
    plain = make_trainer(tmp_path, Classifier(), classification(24), max_grad_norm=0.1)
    plain.train()
    torch.testing.assert_close(weights(own.model), weights(plain.model))


def test_it_tells_where_a_run_stands(tmp_path: Path) -> None:
    class Own(Trainer):
        seen: list[bool]

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.seen.append(self.accelerator.sync_gradients)
            return super().compute_loss(*args, **kwargs)

    class Look(TrainerCallback):
        skipped: list[bool] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.skipped.append(trainer.accelerator.optimizer_step_was_skipped)

    trainer = make_trainer(
        tmp_path, Classifier(), classification(24), cls=Own, callbacks=[Look()], gradient_accumulation_steps=3
    )
    trainer.seen = []
    trainer.train()
    assert trainer.seen == [False, False, True] * 2
    assert Look.skipped == [False, False]


def test_models_beside_the_one_that_is_trained(trainer: Trainer) -> None:
    other = torch.nn.Linear(2, 2)
    assert trainer.accelerator.prepare_model(other, evaluation_mode=True) is other
    assert trainer.accelerator.unwrap_model(trainer.model_wrapped) is trainer.model
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    assert trainer.accelerator.prepare(other, optimizer) == (other, optimizer)
    assert trainer.accelerator.free_memory(other, optimizer) == (None, None)


@pytest.mark.parametrize("with_batch_sampler", [False, True])
def test_a_prepared_loader_has_accelerates_order(trainer: Trainer, with_batch_sampler: bool) -> None:
    data = list(range(10))

    def loader() -> DataLoader[int]:
        if not with_batch_sampler:
            return DataLoader(data, batch_size=4, shuffle=True)  # type: ignore[arg-type]
        sampler = RandomSampler(data, generator=torch.Generator())  # type: ignore[arg-type]
        return DataLoader(data, batch_sampler=BatchSampler(sampler, 4, False))  # type: ignore[arg-type]

    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=trainer.args.seed)
    theirs = accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(loader())
    ours = trainer.accelerator.prepare(loader())
    assert ours.total_batch_size == theirs.total_batch_size == 4
    for epoch in range(2):
        theirs.set_epoch(epoch)
        ours.batch_sampler.sampler.set_epoch(epoch)
        assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in theirs]


def test_a_prepared_loader_is_trained_on_and_resumed(tmp_path: Path) -> None:
    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(DataLoader(self.train_dataset, batch_size=4, shuffle=True))

    whole = make_trainer(tmp_path / "a", Classifier(), classification(24), cls=Own, num_train_epochs=2)
    plain = make_trainer(tmp_path / "b", Classifier(), classification(24), num_train_epochs=2)
    whole.train()
    plain.train()
    assert torch.equal(weights(whole.model), weights(plain.model))  # the same order, too


def test_it_saves_what_it_is_given(trainer: Trainer, tmp_path: Path) -> None:
    view, model = trainer.accelerator, torch.nn.Linear(2, 2)
    weights_of_model = view.get_state_dict(trainer.model_wrapped)
    assert weights_of_model.keys() == trainer.model.state_dict().keys()
    view.save(weights_of_model, tmp_path / "weights.pt")
    torch.testing.assert_close(torch.load(tmp_path / "weights.pt"), dict(weights_of_model))
    tied = {"a": model.weight.detach(), "b": model.weight.detach()}
    with open(tmp_path / "weights.safetensors", "wb") as file:
        view.save(tied, file, safe_serialization=True)
    assert set(safetensors.torch.load_file(tmp_path / "weights.safetensors")) == {"a"}
    assert view.on_main_process(len)([1]) == view.on_main_process()(len)([1]) == 1
    assert view.scaler is None
    trainer.world = replace(trainer.world, process_index=1, local_process_index=1)
    view.save(1, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    assert view.on_main_process(len)([1]) is None


def test_the_scaler_is_that_of_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Classifier(), classification(8), fp16=True)
    assert isinstance(trainer.accelerator.scaler, torch.amp.GradScaler)


def test_what_it_has_not_is_said(trainer: Trainer) -> None:
    with pytest.raises(AttributeError, match=r"no 'save_state'.*gather_for_metrics.*docs/migration.md"):
        trainer.accelerator.save_state  # noqa: B018


def test_without_accelerate(trainer: Trainer, monkeypatch: Any) -> None:
    monkeypatch.setattr("paceline.pytorch.distributed.world.is_installed", lambda name: False)
    monkeypatch.setattr("paceline.compat.accelerate_view.is_installed", lambda name: False)
    assert trainer.accelerator.distributed_type == "NO"
    assert trainer.accelerator.state.num_processes == 1
    assert trainer.args.distributed_state is None
    assert logging.getLogger("paceline").level == 0


def test_own_loaders_that_several_processes_share_as_accelerates_config_says(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

    monkeypatch.setattr(trainer, "world", replace(trainer.world, world_size=2))
    monkeypatch.setattr(trainer.strategy, "mesh", Mesh(dp_replicate=2))
    data: Any = list(range(9))
    prepare, config = trainer.accelerator.prepare, trainer.args.accelerator_config
    assert isinstance(prepare(DataLoader(data, batch_size=2)), IndexedLoader)
    assert isinstance(prepare(DataLoader(Stream(), batch_size=2)), DispatchedLoader)
    with pytest.raises(UnsupportedOption, match=r"batch_size=None, whose dataset gives whole batches"):
        prepare(DataLoader(data, batch_size=None))
    config.dispatch_batches = False
    assert type(prepare(DataLoader(Stream(), batch_size=2))) is DataLoader
    config.dispatch_batches = True
    assert isinstance(prepare(DataLoader(data, batch_size=2)), DispatchedLoader)
    with pytest.raises(UnsupportedOption, match=r"dispatch_batches.* with a DistributedSampler .*leave dispatch"):
        prepare(DataLoader(data, sampler=DistributedSampler(data, 2, 0)))
    config.dispatch_batches, config.split_batches = None, True
    assert prepare(DataLoader(data, batch_size=5)).global_micro_batch_size == 5
    with pytest.raises(ValueError, match=r"batch_size=1 with .*split over 2 processes. Set batch_size to 2 or more"):
        prepare(DataLoader(data, batch_size=1))
    for loader in (DataLoader(Stream(), batch_size=2), DataLoader(data, batch_sampler=[[0, 1], [2]])):
        with pytest.raises(UnsupportedOption, match=r"split_batches.* with a loader of your own .*Leave split"):
            prepare(loader)


def test_loaders_of_the_trainer_say_how_many_samples_all_processes_read(trainer: Trainer) -> None:
    assert trainer.get_train_dataloader().total_batch_size == trainer.args.per_device_train_batch_size
    assert trainer.get_eval_dataloader(classification(4)).total_batch_size == trainer.args.per_device_eval_batch_size


def test_settings_of_the_loaders_are_those_of_an_accelerator(tmp_path: Path) -> None:
    chosen = {"split_batches": True, "dispatch_batches": False, "even_batches": False}
    theirs = accelerate.Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**chosen))
    ours = make_trainer(tmp_path, Classifier(), classification(24), accelerator_config=chosen).accelerator
    for name in chosen:
        assert getattr(ours, name) == getattr(theirs, name) == chosen[name]


def test_gradient_state_follows_the_run(tmp_path: Path) -> None:
    """In the names of accelerate: where updates and epochs end."""
    seen = []

    class Looks(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            state = self.accelerator.gradient_state
            assert state.in_dataloader
            seen.append((state.sync_gradients, state.end_of_dataloader))
            return super().training_step(model, inputs, num_items_in_batch)

    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    trainer = make_trainer(tmp_path, Classifier(), classification(20), cls=Looks, **options)
    trainer.train()
    epoch = [(False, False), (True, False), (False, False), (True, False), (True, True)]
    assert seen == 2 * epoch
    state, theirs = trainer.accelerator.gradient_state, accelerate.state.GradientState()
    assert not state.in_dataloader
    assert not state.end_of_dataloader
    assert (state.num_steps, state.remainder) == (theirs.num_steps, theirs.remainder) == (1, -1)
