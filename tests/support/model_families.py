"""One tiny model of each family in transformers, without dropout, and eight samples for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers_models import bart, bert, gpt2, ids, t5, whisper

NUM_SAMPLES = 8


@dataclass(frozen=True)
class Family:
    """A family of models: the construction of a model, and of one sample of its data from a generator.

    `generates`: it is trained with the Seq2SeqTrainer; `asks_for_loss`: it has no labels, but a loss on request.
    """

    make: Callable[[], Any]
    sample: Callable[[torch.Generator], dict[str, Tensor]]
    generates: bool = False
    asks_for_loss: bool = False

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Any]:
        batch: dict[str, Any] = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        return {**batch, "return_loss": True} if self.asks_for_loss else batch

    def data(self, seed: int = 1) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [self.sample(generator) for _ in range(NUM_SAMPLES)]


def seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return made


TEXT = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TEXT, num_key_value_heads=1))


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**VISION, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return ViTForImageClassification(config)


def wav2vec2(head: str) -> Any:
    import transformers

    config = transformers.Wav2Vec2Config(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_labels=3,
        classifier_proj_size=8,
        pad_token_id=0,
        ctc_loss_reduction="mean",
        apply_spec_augment=False,
        mask_time_prob=0.0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
    )
    return getattr(transformers, head)(config)


def clip() -> Any:
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(text_config={**TEXT, "projection_dim": 8}, vision_config={**VISION, "projection_dim": 8})
    config.projection_dim = 8
    return CLIPModel(config)


IMAGE_TOKEN = 30  # one for each of the four patches


def llava() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION),
        text_config=LlamaConfig(**TEXT),
        image_token_id=IMAGE_TOKEN,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


def shifted(tokens: Tensor) -> Tensor:
    """Targets of a causal model; the first one, which nothing predicts, is ignored."""
    return torch.cat([torch.tensor([-100]), tokens[1:]])


def words(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = ids(generator, 8)
    return {"input_ids": tokens, "labels": shifted(tokens)}


def sentence(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = ids(generator, 8)
    return {"input_ids": tokens, "labels": tokens[0] % 3}


def translation(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": ids(generator, 6), "labels": ids(generator, 5)}


def image(generator: torch.Generator) -> Tensor:
    return torch.randn(3, 16, 16, generator=generator)


def picture(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": image(generator), "labels": torch.randint(3, (), generator=generator)}


def sound(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_values": torch.randn(400, generator=generator), "labels": torch.randint(3, (), generator=generator)}


def spoken(generator: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(1, 12, (4,), generator=generator)
    return {"input_values": torch.randn(400, generator=generator), "labels": labels}


def speech(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_features": torch.randn(8, 40, generator=generator), "labels": ids(generator, 5)}


def captioned(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": torch.cat([ids(generator, 7), torch.tensor([1])]), "pixel_values": image(generator)}


def described(generator: torch.Generator) -> dict[str, Tensor]:
    text = torch.randint(2, IMAGE_TOKEN, (6,), generator=generator)
    tokens = torch.cat([torch.full((4,), IMAGE_TOKEN), text])
    labels = torch.cat([torch.full((4,), -100), text])
    return {"input_ids": tokens, "pixel_values": image(generator), "labels": labels}


FAMILIES: dict[str, Family] = {
    "GPT-2": Family(gpt2, words),
    "Llama": Family(seeded(llama), words),
    "BERT": Family(bert, sentence),
    "T5": Family(t5, translation, generates=True),
    "BART": Family(bart, translation, generates=True),
    "ViT": Family(seeded(vit), picture),
    "Wav2Vec2 for CTC": Family(seeded(lambda: wav2vec2("Wav2Vec2ForCTC")), spoken),
    "Wav2Vec2 for classes": Family(seeded(lambda: wav2vec2("Wav2Vec2ForSequenceClassification")), sound),
    "Whisper": Family(whisper, speech, generates=True),
    "CLIP": Family(seeded(clip), captioned, asks_for_loss=True),
    "LLaVA": Family(seeded(llava), described),
}
