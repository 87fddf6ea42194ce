"""auto_find_batch_size: after an out-of-memory the same samples go on in smaller micro-batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, RecordGradient, Tagger, classification, losses, make_trainer, tagging, weights
from torch import Tensor
from torch.nn import functional

from paceline import TrainerCallback

DATA = tagging(24)
ERRORS = {
    "typed": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "worded": RuntimeError("MPS backend out of memory"),
    "host": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
}


class Narrow(Tagger):
    """Has memory for `room` samples; fails in forward, or in backward."""

    def __init__(self, room: int, *, error: str = "typed", in_backward: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.room, self.error, self.in_backward = room, error, in_backward
        self.sizes: list[int] = []

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        has_gradients = torch.is_grad_enabled()  # without, there is room for twice as many
        if has_gradients:
            self.sizes.append(len(input_ids))
        outputs = super().forward(input_ids, labels)
        if len(input_ids) > self.room * (1 if has_gradients else 2):
            if not (self.in_backward and has_gradients):
                raise ERRORS[self.error]

            def fail(gradient: Tensor) -> None:  # the head has its gradient by then
                handle.remove()
                raise ERRORS[self.error]

            handle = self.embedding.weight.register_hook(fail)
        return outputs


def run(folder: Path, model: Any, **options: Any) -> Any:
    defaults = {"per_device_train_batch_size": 8, "num_train_epochs": 2, "max_grad_norm": 0}
    trainer = make_trainer(folder, model.double(), DATA, cls=RecordGradient, **{**defaults, **options})
    trainer.train()
    return trainer


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("room", [3, 1])
def test_the_run_goes_on_as_if_nothing_had_been(
    tmp_path: Path, batch: int, accumulation: int, room: int, in_backward: bool
) -> None:
    options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    plain = run(tmp_path, Tagger(), **options)
    narrow = run(tmp_path, Narrow(room, in_backward=in_backward), auto_find_batch_size=True, **options)
    assert narrow.state.global_step == plain.state.global_step
    assert narrow.state.max_steps == plain.state.max_steps
    for expected, found in zip(plain.gradients, narrow.gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert losses(narrow) == pytest.approx(losses(plain), rel=1e-10)
    assert narrow.state.epoch == plain.state.epoch == 2
    assert [s for s in narrow.model.sizes if s > room] == sorted(
        [s for s in narrow.model.sizes if s > room], reverse=True
    )
    assert narrow.state.train_batch_size <= room
    assert narrow.args.per_device_train_batch_size == batch  # the user's arguments are the user's


@pytest.mark.parametrize("error", ERRORS)
def test_every_kind_of_error(tmp_path: Path, error: str) -> None:
    narrow = run(tmp_path, Narrow(4, error=error), auto_find_batch_size=True)
    torch.testing.assert_close(weights(narrow.model), weights(run(tmp_path, Tagger()).model), rtol=1e-8, atol=1e-10)


def test_popped_labels_are_there_again(tmp_path: Path) -> None:
    class Pops(RecordGradient):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(input_ids=inputs["input_ids"], labels=labels)
            loss = functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())
            return (loss, outputs) if return_outputs else loss

    options = {"per_device_train_batch_size": 8, "num_train_epochs": 1}
    plain = make_trainer(tmp_path, Tagger().double(), DATA, cls=Pops, **options)
    narrow = make_trainer(tmp_path, Narrow(3).double(), DATA, cls=Pops, auto_find_batch_size=True, **options)
    plain.train()
    narrow.train()
    torch.testing.assert_close(weights(narrow.model), weights(plain.model), rtol=1e-8, atol=1e-10)


def test_without_the_option_it_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        run(tmp_path, Narrow(4))


@pytest.mark.parametrize("listens", [False, True])
def test_a_step_that_is_partly_applied_is_not_retried(tmp_path: Path, listens: bool) -> None:
    """Smaller micro-batches would repeat the update of the tensors that have had it, and give other weights."""

    class HalfWay(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if self.calls == 2:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].sub_(1.0)
                raise ERRORS["typed"]
            return super().step(closure)

    class Listens(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:  # applied as a whole by then
                raise ERRORS["typed"]

    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if listens else HalfWay(model.parameters(), 0.1)
    options: dict[str, Any] = {"callbacks": [Listens()]} if listens else {}
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(tmp_path, model, auto_find_batch_size=True, optimizers=(optimizer, None), **options)
    assert any("some of them may be updated already" in note for note in caught.value.__notes__)
    ERRORS["typed"].__notes__.clear()


def test_another_error_is_not_retried(tmp_path: Path) -> None:
    class Broken(Tagger):
        calls = 0

        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            self.calls += 1
            raise RuntimeError("shapes do not match")

    model = Broken()
    with pytest.raises(RuntimeError, match="shapes"):
        run(tmp_path, model, auto_find_batch_size=True)
    assert model.calls == 1


def test_no_memory_for_one_sample(tmp_path: Path) -> None:
    with pytest.raises(MemoryError, match=r"one sample.*activation_checkpointing"):
        run(tmp_path, Narrow(0), auto_find_batch_size=True)


class StopAt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 4


def test_a_resumed_run_ends_the_same(tmp_path: Path) -> None:
    """The position is in samples: what was split before is not seen twice, nor left out."""
    options: dict[str, Any] = {"auto_find_batch_size": True, "save_strategy": "steps", "save_steps": 1}
    whole = run(tmp_path / "whole", Narrow(4), **options)
    run(tmp_path / "parts", Narrow(4), callbacks=[StopAt()], **options)
    trainer = make_trainer(
        tmp_path / "parts",
        Narrow(4).double(),
        DATA,
        per_device_train_batch_size=8,
        num_train_epochs=2,
        max_grad_norm=0,
        **options,
    )
    trainer.train(resume_from_checkpoint=True)
    torch.testing.assert_close(weights(trainer.model), weights(whole.model), rtol=1e-8, atol=1e-10)
    assert trainer.state.global_step == whole.state.global_step == 6


class Relief(TrainerCallback):
    """Gives the model room for all samples from step 20 on."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.room = 100 if state.global_step >= 20 else 2


class StopIn(TrainerCallback):
    """Stops between an out-of-memory and the next try of a larger size."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == 60


@pytest.mark.slow
def test_the_micro_batch_grows_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 220, "num_train_epochs": 3}
    with caplog.at_level("INFO", logger="paceline"):
        grown = run(tmp_path, Narrow(2), auto_find_batch_size=True, callbacks=[Relief()], **options)
    assert grown.state.train_batch_size == 8
    assert set(grown.model.sizes) >= {2, 4, 8}
    assert len([text for text in caplog.messages if text.startswith("Trying")]) == 2
    plain = run(tmp_path, Tagger(), **options)
    for expected, found in zip(plain.gradients, grown.gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    assert losses(grown) == pytest.approx(losses(plain), rel=1e-7)


@pytest.mark.slow
def test_the_size_is_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"auto_find_batch_size": True, "max_steps": 150, "save_strategy": "steps"}
    options |= {"save_steps": 60, "gradient_accumulation_steps": 2}
    whole = run(tmp_path / "whole", Narrow(2), callbacks=[Relief()], **options)
    first = run(tmp_path / "parts", Narrow(2), callbacks=[Relief(), StopIn()], **options)
    trainer = make_trainer(
        tmp_path / "parts", Narrow(2).double(), DATA, per_device_train_batch_size=8, max_grad_norm=0,
        callbacks=[Relief()], **options,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=True)
    assert torch.equal(weights(trainer.model), weights(whole.model))
    trained: Any = trainer.model
    assert first.model.sizes + trained.sizes == whole.model.sizes
    assert trainer.state.train_batch_size == whole.state.train_batch_size == 4


@pytest.mark.parametrize("in_training", [False, True])
def test_in_evaluation_it_says_what_to_do(tmp_path: Path, in_training: bool) -> None:
    class Full(Classifier):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            if not self.training:
                raise ERRORS["typed"]
            return super().forward(x, labels)

    data = classification(8)
    trainer = make_trainer(
        tmp_path,
        Full(),
        data,
        eval_dataset=data,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=7,
        auto_find_batch_size=True,
    )
    with pytest.raises(MemoryError, match=r"batch of 7 samples.*per_device_eval_batch_size") as caught:
        trainer.train() if in_training else trainer.evaluate()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
