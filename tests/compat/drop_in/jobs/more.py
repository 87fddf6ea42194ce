"""TRL's other trainers that a CPU can run, named in the second argument."""

import sys

from datasets import Dataset
from small_parts import causal, out, run, seed_generation, sentences, settings, tokenizer
from transformers import AutoModelForCausalLM

kind = sys.argv[2]
options = settings(save_steps=2, max_steps=4)
columns = {name: sentences(32, place) for place, name in enumerate(("prompt", "chosen", "rejected"))}
pairs = Dataset.from_dict(columns)
prompts = Dataset.from_dict({"prompt": columns["prompt"]})


def count_cats(completions, **kwargs):
    return [float(len(text.split()) + text.count("cat")) for text in completions]


def chat(prompt, answer):
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def chatting():
    words = tokenizer()
    words.chat_template = (
        "{% for message in messages %}{{ message['content'] }} {% if message['role'] == 'assistant' %}</s>{% endif %}"
        "{% endfor %}"
    )
    return words


if kind == "kto":
    from trl import KTOConfig, KTOTrainer

    rows = {"prompt": columns["prompt"], "completion": columns["chosen"], "label": [True, False] * 16}
    trainer = KTOTrainer(
        model=causal(),
        ref_model=causal(1),
        args=KTOConfig(**options),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
    )
elif kind == "cpo":
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    trainer = CPOTrainer(model=causal(), args=CPOConfig(**options), train_dataset=pairs, processing_class=tokenizer())
elif kind == "orpo":
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    trainer = ORPOTrainer(model=causal(), args=ORPOConfig(**options), train_dataset=pairs, processing_class=tokenizer())
elif kind == "tpo":
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    trios = Dataset.from_dict({**columns, "reference": sentences(32, 3)})
    trainer = TPOTrainer(model=causal(), args=TPOConfig(**options), train_dataset=trios, processing_class=tokenizer())
elif kind == "gkd":  # on the texts of the data, not on sampled ones
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    rows = {"messages": [chat(*pair) for pair in zip(columns["prompt"], columns["chosen"], strict=True)]}
    trainer = GKDTrainer(
        model=causal(),
        teacher_model=causal(1),
        args=GKDConfig(**options, lmbda=0.0, max_length=64, max_new_tokens=8),
        train_dataset=Dataset.from_dict(rows),
        processing_class=chatting(),
    )
elif kind == "distillation":
    seed_generation()
    from trl import DistillationConfig, DistillationTrainer

    trainer = DistillationTrainer(
        model=causal(),
        teacher_model=causal(1),
        args=DistillationConfig(**options, max_completion_length=8),
        train_dataset=prompts,
        processing_class=tokenizer(),
    )
elif kind == "online dpo":
    seed_generation()
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    trainer = OnlineDPOTrainer(
        model=causal(),
        ref_model=causal(1),
        reward_funcs=count_cats,
        args=OnlineDPOConfig(**options, max_new_tokens=8),
        train_dataset=prompts,
        processing_class=tokenizer(),
    )
elif kind in ("grpo", "rloo", "gmpo"):
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    kinds = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer), "gmpo": (GMPOConfig, GMPOTrainer)}
    config, cls = kinds[kind]
    seed_generation()
    causal().save_pretrained(f"{out()}/model")  # a reference model is made from its path
    trainer = cls(
        model=AutoModelForCausalLM.from_pretrained(f"{out()}/model"),
        reward_funcs=count_cats,
        args=config(**options, num_generations=4, max_completion_length=8),
        train_dataset=prompts,
        processing_class=tokenizer(),
    )
elif kind == "gold":  # on the texts of the data, not on sampled ones
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

    rows = {"messages": [chat(*pair) for pair in zip(columns["prompt"], columns["chosen"], strict=True)]}
    trainer = GOLDTrainer(
        model=causal(),
        teacher_model=causal(1),
        args=GOLDConfig(**options, lmbda=0.0, max_length=64, max_completion_length=8, use_extended_uld=False),
        train_dataset=Dataset.from_dict(rows),
        processing_class=chatting(),
    )
elif kind == "sdft":
    from trl.experimental.sdft import SDFTConfig, SDFTTrainer

    seed_generation()
    causal().save_pretrained(f"{out()}/model")
    rows = {"prompt": columns["prompt"], "privileged_context": columns["chosen"]}
    trainer = SDFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(f"{out()}/model"),
        args=SDFTConfig(**options, max_completion_length=8, distillation_topk=8),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
    )
elif kind == "sdpo":
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    seed_generation()
    causal().save_pretrained(f"{out()}/model")
    trainer = SDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(f"{out()}/model"),
        reward_funcs=count_cats,
        args=SDPOConfig(**options, num_generations=4, max_completion_length=8),
        train_dataset=prompts,
        processing_class=tokenizer(),
    )
elif kind == "a2po":
    from trl.experimental.a2po import A2POConfig, A2POTrainer

    seed_generation()
    trainer = A2POTrainer(
        model=causal(),
        reward_funcs=count_cats,
        args=A2POConfig(**options, max_completion_length=8),
        train_dataset=prompts,
        processing_class=tokenizer(),
    )
else:
    raise SystemExit(f"no job {kind}")
run(trainer)
