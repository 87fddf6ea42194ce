"""The parts that the jobs of this folder share: a tokenizer, models, texts, and the files of their results."""

import functools
import itertools
import json
import logging
import os
import random
import sys
import time
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

torch.set_num_threads(1)
logging.basicConfig(level=logging.WARNING)
TEXT = "the a cat dog bird sees hears likes red green blue big small house tree river and but so"
WORDS = TEXT.split()
# where numbers are compared between two libraries nothing is drawn at random; where a run is resumed it is
DROPOUT = 0.1 if "dropout" in sys.argv else 0.0


def out() -> str:
    """The folder that the job was given."""
    return sys.argv[1]


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        eos_token="</s>",
        model_max_length=64,
    )


def settings(**own) -> dict:
    """Returns the arguments of a run: 8 steps of 2 x 4 samples, a checkpoint every 4; those of the job replace them."""
    return {
        "output_dir": out(),
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "logging_steps": 1,
        "save_steps": 4,
        "max_steps": 8,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "use_cpu": True,
        "disable_tqdm": True,
        **own,
    }


EVALUATED = {"eval_strategy": "steps", "eval_steps": 4}


def adapter():
    """Returns LoRA's configuration for the causal model, with `lora` among the arguments; else None."""
    if "lora" not in sys.argv:
        return None
    from peft import LoraConfig

    return LoraConfig(r=4, lora_dropout=DROPOUT, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


SIZES = {
    "vocab_size": 6 + len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def causal(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, attention_dropout=DROPOUT, eos_token_id=5, bos_token_id=None))


def scorer() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1, eos_token_id=5, bos_token_id=None))


def encoder_folder(kind: type) -> str:
    """A saved encoder with its tokenizer, for libraries that load from a path."""
    torch.manual_seed(0)
    folder = f"{out()}/encoder"
    extra = {"num_labels": 1} if "SequenceClassification" in kind.__name__ else {}
    rates = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
    kind(BertConfig(**SIZES, **rates, **extra)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def seed_generation() -> None:
    """Seed each call of `generate` by its number: what is sampled does not depend on what else was drawn before."""
    original, calls = GenerationMixin.generate, itertools.count()

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        with torch.random.fork_rng():  # the reference orders its data by the seed of the global generator
            torch.manual_seed(next(calls))
            return original(self, *args, **kwargs)

    GenerationMixin.generate = generate


def sentences(number: int, seed: int = 0) -> list[str]:
    """Sentences of 3 to 14 words."""
    source = random.Random(seed)
    return [" ".join(source.choices(WORDS, k=source.randint(3, 14))) for _ in range(number)]


class Kill(TrainerCallback):
    """Ends the process at step 6 without a word, once the checkpoint of step 4 is there."""

    def on_step_end(self, args, state, control, **kwargs):
        while state.global_step == 6:
            if any(Path(out(), "checkpoint-4").glob("trainer_state.json")):
                os._exit(9)
            time.sleep(0.01)


def train(trainer) -> None:
    """Train; with `kill` among the arguments only until step 6, with `resume` from the newest checkpoint on."""
    if "kill" in sys.argv:
        trainer.add_callback(Kill())
    trainer.train(resume_from_checkpoint=True if "resume" in sys.argv else None)


def adapter_gap(trained) -> float:
    """The most by which logits differ between a model with an adapter and its last checkpoint, loaded by PEFT."""
    from peft import PeftModel

    inputs = torch.tensor([tokenizer()("the cat sees a big red house")["input_ids"]])
    loaded = PeftModel.from_pretrained(causal(), f"{out()}/checkpoint-8").eval()
    with torch.no_grad():
        return (loaded(input_ids=inputs).logits - trained.eval()(input_ids=inputs).logits).abs().max().item()


def run(trainer) -> None:
    """Train, save the model, and write down the results."""
    train(trainer)
    trainer.save_model(f"{out()}/final")
    finish(trainer)


def finish(trainer, **more) -> None:
    """Write down the rows that were logged, and whose Trainer it was; of an adapter, whether it can be loaded."""
    if hasattr(trainer.model, "peft_config"):
        more["gap"] = adapter_gap(trainer.model)
    bases = [kind.__module__ for kind in type(trainer).__mro__ if kind.__name__ == "Trainer"]
    result = {"rows": trainer.state.log_history, "trainers": bases, **more}
    Path(out(), "result.json").write_text(json.dumps(result, default=float))
