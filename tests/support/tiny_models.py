"""Heads of transformers made tiny: their configs shrunk by the names of the fields."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from tiny_overrides import CUT_FIELDS, OF_HEADS, OVERRIDES
from torch import nn

VOCABULARY, CLASSES = 64, 3
MAX_PARAMETERS = {False: 3_200_000, True: 32_000_000}  # by whether it is made wide

# what makes a config small, by the names of its fields
TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("embedding_size", "decoder_hidden_size", "projection_dim", "hidden_dim", "d_embed"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "num_blocks", "decoder_num_hidden_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("decoder_attention_heads", "num_key_value_heads", "decoder_num_attention_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "decoder_intermediate_size", "hidden_dim_ffn", "d_inner"), 48),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("vocab_size", "n_token", "n_words", "entity_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_source_positions"), 64),
    **dict.fromkeys(("max_target_positions", "sliding_window", "attention_window"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    "image_size": 32,
    "patch_size": 8,
    "num_labels": CLASSES,
    "conv_dim": [16, 16],
    "conv_stride": [4, 4],
    "conv_kernel": [8, 4],
    "num_feat_extract_layers": 2,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [16, 16, 32, 32],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
PER_LAYER = ("no_rope_layers", "attention_chunk_size", "rope_parameters_per_layer")
LAYER_TYPES = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "indexer_types")
# without a value a model may not be made
FILLED = ("head_dim", "vocab_size", "num_key_value_heads", "num_experts", "num_experts_per_tok", "n_routed_experts")
FILLED += ("moe_intermediate_size",)
# made from other fields, or names of what is left out
DERIVED = ("id2label", "label2id", "architectures", "transformers_version", "dtype")
DERIVED += ("stage_names", "out_features", "out_indices", "per_layer_config", "attention_layers")
# what draws random numbers in training: a whole batch draws others than its parts
RANDOM = ("dropout", "drop", "dropout_prob", "dropout_rate", "pdrop", "layerdrop", "drop_path_rate", "drop_rate")
RANDOM += ("mask_time_prob", "mask_feature_prob", "jitter_noise")
# the tokens in a text that stand for something else, each with its own id
PLACES = {"image": 60, "video": 61, "audio": 62}
IS_LAYERS = re.compile(r"(^|_)(n|num)_.*layers?$|_layers$|(^|_)depths?$|_num_layers")
IS_HEADS = re.compile(r"(^|_)heads?$|(^|_)heads_")
IS_WIDTH = re.compile(r"(size|dim|dims|width|widths|channels?|rank|d_model|hidden|features)$")
CODEBOOKS = ("num_codebooks", "num_quantizers")
IS_EXPERTS = re.compile(r"experts$")


def shrink(settings: Mapping[str, Any], wide: bool, is_inner: bool = False) -> dict[str, Any]:
    """The fields of a config, and of those inside it, made small and without dropout.

    Args:
        settings: the fields.
        wide: by the patterns too, and with two layers.
        is_inner: it is a config in another, which names its type.
    """
    small: dict[str, Any] = {}
    known = fields_of(settings.get("model_type", "")) if wide else None
    for name, value in settings.items():
        if known is not None and name not in known and name != "model_type":
            continue  # the config makes it from others
        if name in DERIVED or (name == "model_type" and not is_inner) or (wide and name in CUT_FIELDS):
            continue
        if isinstance(value, dict) and (name.endswith("config") or "model_type" in value):
            small[name] = shrink(value, wide, is_inner=True)
        elif isinstance(value, float) and name.endswith(RANDOM):
            small[name] = 0.0
        else:
            small[name] = shrink_field(name, value, wide)
    override = OVERRIDES.get(settings.get("model_type", ""), {})
    return merge(small, copy.deepcopy(override))  # a config may take entries out of it


def fields_of(model_type: str) -> set[str] | None:
    """The fields that a type of config is made from; None: unknown."""
    from transformers import CONFIG_MAPPING

    try:
        kind = CONFIG_MAPPING[model_type]
    except KeyError:
        return None
    if not dataclasses.is_dataclass(kind):
        return None
    return {field.name for field in dataclasses.fields(kind) if field.init} | {"rope_parameters"}


def merge(settings: dict[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those of `override`; a config of another type replaces the one that was there."""
    for name, value in override.items():
        if isinstance(value, dict) and isinstance(settings.get(name), dict) and "model_type" not in value:
            settings[name] = merge(settings[name], value)
        else:
            settings[name] = value
    return settings


def shrink_field(name: str, value: Any, wide: bool) -> Any:
    """A field made small."""
    if wide and value == 0:
        return value
    if name.endswith("token_id") and isinstance(value, list):
        return [item if 0 <= item < VOCABULARY else 3 for item in value]
    if name in TINY and (value is not None or name == "num_labels" or (wide and name in FILLED)):
        wanted = TINY[name]
        if wide and wanted == 1:
            wanted = 2
        if isinstance(value, list | tuple) and not isinstance(wanted, list):
            return [wanted] * len(value)
        if wide and name in ("depths", "hidden_sizes") and len(value) != len(wanted):
            return [wanted[-1]] * len(value)
        if not isinstance(wanted, list) or isinstance(value, list | tuple):
            return wanted
    if name in LAYER_TYPES and isinstance(value, list):
        kinds = list(dict.fromkeys(value))
        return [kinds[0], kinds[-1]] if wide else value[:1]
    if name in PER_LAYER and not wide:
        return None
    if wide and name == "rope_parameters" and isinstance(value, dict) and "rope_type" in value:
        return {**value, "mrope_section": [2, 3, 3]}
    if name.endswith(("token_id", "token_index")) and isinstance(value, int):
        place = PLACES.get(name.rsplit("_token", 1)[0])
        return place or (value if 0 <= value < VOCABULARY else 2)
    return shrink_by_pattern(name, value) if wide else value


def shrink_by_pattern(name: str, value: Any) -> Any:
    """A field that no name in the table is of."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(item, int | list | tuple) for item in value):
        return [shrink_by_pattern(name, item) for item in value]
    if not isinstance(value, int):
        return value
    if "vocab" in name or name == "codebook_size":
        return min(value, VOCABULARY)
    if IS_EXPERTS.search(name) or name in CODEBOOKS:
        return min(value, 4)
    if IS_HEADS.search(name):
        return min(value, 2)
    if IS_LAYERS.search(name):
        return min(value, 2)
    if IS_WIDTH.search(name):
        return min(value, 32)
    return value


def build(kind: Any, wide: bool) -> nn.Module:
    """Raises: whatever keeps it from being made; ValueError where it is not small."""
    config_class = kind.config_class
    settings = config_class().to_dict()
    config = config_class(**merge(shrink(settings, wide), OF_HEADS.get(kind.__name__, {})))
    config.num_labels = 2 if re.search("QuestionAnswering|AlbertForPreTraining", kind.__name__) else CLASSES
    config.use_cache = False
    for name, value in (("pad_token_id", 1), ("decoder_start_token_id", 2), ("bos_token_id", 2), ("eos_token_id", 3)):
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > MAX_PARAMETERS[wide]:
        raise ValueError(f"it has {size} parameters")
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)  # what nothing initializes is NaN, not of chance
    try:
        model: nn.Module = kind(config)
    finally:
        torch.use_deterministic_algorithms(False)
    return model


def freeze(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model without what makes a whole batch differ from its parts, and without weights of zero."""
    model = model.to(dtype)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.masked_fill_(tensor.data.isnan(), 0.0)
    for parameter in model.parameters():  # heads that begin with zeros tell nothing at first
        if parameter.dim() > 0 and parameter.is_floating_point():
            parameter.data += 0.1 * torch.randn_like(parameter)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "drop_prob", None), float):
            module.drop_prob = 0.0  # type: ignore[assignment]
        if isinstance(module, nn.modules.batchnorm._BatchNorm):  # they couple samples: kept in evaluation mode
            module.eval()
            module.train = lambda mode=True, module=module: module  # type: ignore[method-assign, misc]
    model.train()
    return model
