"""Settings that some configs of transformers need beside what makes all of them small, by model type."""

from __future__ import annotations

from typing import Any

# lists by layer, which a config makes itself for the number of its layers
CUT_FIELDS = ("no_rope_layers", "rope_parameters_per_layer", "attn_layer_indices", "num_attention_heads_per_layer")
CUT_FIELDS += ("kv_source_layers",)

STAGES: dict[str, Any] = {
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}
THREE = {"model_type": "rt_detr_resnet", **STAGES, "out_features": ["stage2", "stage3", "stage4"]}
FOUR = {"model_type": "resnet", **STAGES, "out_features": ["stage1", "stage2", "stage3", "stage4"]}
BACKBONE: dict[str, Any] = {"backbone_config": FOUR}
DETR: dict[str, Any] = {"num_queries": 6, "encoder_attention_heads": 8, "decoder_attention_heads": 8, **BACKBONE}
RT_DETR: dict[str, Any] = {
    "backbone_config": THREE,
    "encoder_in_channels": [16, 32, 32],
    "decoder_in_channels": [32, 32, 32],
    "feat_channels": [32, 32, 32],
    "encoder_hidden_dim": 32,
    "d_model": 32,
    "num_queries": 6,
    "num_denoising": 0,
    "encoder_layers": 1,
    "decoder_layers": 2,
}
SWIN = {"window_size": 2, "depths": [1, 1], "num_heads": [2, 2], "patch_size": 4, "encoder_stride": 8}
SWIN4 = {"model_type": "swin", "window_size": 2, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2], "embed_dim": 8}
SWIN4 = {**SWIN4, "patch_size": 2, "image_size": 64, "out_features": ["stage1", "stage2", "stage3", "stage4"]}
MASKS: dict[str, Any] = {"backbone_config": SWIN4, "num_queries": 6, "num_attention_heads": 2}
SERIES = {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2]}
PATCHES = {"patch_length": 4, "patch_stride": 4, "num_input_channels": 2}

OVERRIDES: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    "autoformer": {**SERIES, "moving_average": 5},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "beit": {"out_indices": [1, 2, 3, 4], "num_hidden_layers": 4, "pool_scales": [1, 2], "use_mask_token": True},
    "bit": {"num_groups": 4},
    "blip-2": {"image_token_index": 60},
    "blip_2_qformer": {"use_qformer_text_input": True},
    "bridgetower": {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "contrastive_hidden_size": 16,
        "logit_scale_init_value": 2.65,
    },
    "bridgetower_text_model": {"num_attention_heads": 2, "hidden_size": 64, "num_hidden_layers": 2},
    "bridgetower_vision_model": {"hidden_size": 64, "num_hidden_layers": 2},
    "bros": {"hidden_size": 64},
    "chameleon": {"vocabulary_map": {"<image>": 60, **{f"IMGIMG{chr(65 + i)}Z": 10 + i for i in range(16)}}},
    "clipseg": {"extract_layers": [0], "reduce_dim": 16, "decoder_num_attention_heads": 2},
    "codegen": {"rotary_dim": 8, "n_head": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "conditional_detr": DETR,
    "convnext": {"image_size": 64, "patch_size": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "num_stages": 2},
    "convnextv2": {"image_size": 64, "patch_size": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "num_stages": 2},
    "csm_depth_decoder_model": {"num_codebooks": 16},
    "d_fine": RT_DETR,
    "dab-detr": DETR,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deberta": {"pooler_hidden_size": 32},
    "deberta-v2": {"pooler_hidden_size": 32},
    "deit": {"encoder_stride": 8},
    "vit": {"encoder_stride": 8},
    "deformable_detr": {"num_queries": 6, "backbone_config": FOUR, "num_feature_levels": 4},
    "deimv2": RT_DETR,
    "detr": DETR,
    "dpt": {
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [16, 16, 16, 16],
        "fusion_hidden_size": 16,
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32, "per_layer_config": {}},
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128, "image_size": 64},
    "emu3": {
        "vocabulary_map": {"<image>": 60, "<|extra_200|>": 58, **{f"<|visual token {i:06}|>": i for i in range(9)}}
    },
    "eomt": {"train_num_points": 64, "num_queries": 6},
    "eomt_dinov3": {"train_num_points": 64, "num_queries": 6},
    "esm": {"vocab_size": 64, "pad_token_id": 1, "mask_token_id": 4},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma3n_text": {
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.0, 0.0],
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
    },
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": 32}},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]]},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "hiera": {"decoder_hidden_size": 32, "decoder_depth": 1, "decoder_num_attention_heads": 2},
    "higgs_audio_v2": {"use_text_head": True},
    "informer": SERIES,
    "instructblip": {"image_token_index": 60},
    "instructblipvideo": {"video_token_index": 61},
    "kosmos-2": {"latent_query_num": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "levit": {
        "image_size": 64,
        "patch_size": 16,
        "hidden_sizes": [16, 16, 16],
        "depths": [1, 1, 1],
        "num_attention_heads": [2, 2, 2],
        "key_dim": [8, 8, 8],
        "down_ops": [["Subsample", 8, 2, 2, 2, 2], ["Subsample", 8, 2, 2, 2, 2]],
    },
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8, "input_size": 32, "patch_size": 8},
    "lilt": {"channel_shrink_ratio": 4, "hidden_size": 48},
    "lw_detr_vit": {"image_size": 64, "num_windows": 4, "window_block_indices": [0]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "marian": {"decoder_vocab_size": 64},
    "mask2former": {**MASKS, "train_num_points": 64},
    "maskformer": {**MASKS, "decoder_config": DETR},
    "mimi": {"upsample_groups": 32},
    "mobilevitv2": {"patch_size": 2, "image_size": 64},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0]}},
    "moonshine_streaming": {"num_key_value_heads": 2, "num_attention_heads": 2},
    "grounding-dino": {"num_queries": 4, "decoder_layers": 2, "encoder_layers": 2, "backbone_config": SWIN4},
    "mm-grounding-dino": {"num_queries": 4, "decoder_layers": 2, "encoder_layers": 2, "backbone_config": SWIN4},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 59},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 59},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48},
    "oneformer": {**MASKS, "train_num_points": 64, "conv_dim": 32},
    "patchtsmixer": PATCHES,
    "patchtst": {**PATCHES, "do_mask_input": False, "num_targets": 2},
    "perceiver": {
        "num_latents": 8,
        "d_latents": 32,
        "num_blocks": 1,
        "num_self_attends_per_block": 1,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 1,
    },
    "pocket_tts": {"flow_head_config": {"condition_dim": 32}},
    "pp_doclayout_v2": RT_DETR,
    "pp_doclayout_v3": RT_DETR,
    "pp_doclayout_v4": RT_DETR,
    "reformer": {"axial_pos_embds": False},
    "roc_bert": {"enable_shape": True, "shape_vocab_size": 64, "pronunciation_vocab_size": 64},
    "rf_detr": {"num_queries": 4, "group_detr": 1},
    "rt_detr": RT_DETR,
    "rt_detr_v2": RT_DETR,
    "sapiens2": {
        "head_config": {
            "upsample_out_channels": [16],
            "upsample_kernel_sizes": [4],
            "conv_out_channels": [16],
            "conv_kernel_sizes": [1],
        }
    },
    "shieldgemma2": {"yes_token_index": 10, "no_token_index": 11},
    "siglip2_vision_model": {"num_patches": 16},
    "swin": SWIN,
    "swinv2": SWIN,
    "table-transformer": DETR,
    "time_series_transformer": SERIES,
    "upernet": {"backbone_config": FOUR, "pool_scales": [1, 2]},
    "videomt": {"train_num_points": 64, "num_queries": 6},
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
# by the name of the class, where the heads of a type differ
OF_HEADS: dict[str, dict[str, Any]] = {
    "ReformerModelWithLMHead": {"is_decoder": True},
    "ViltForImagesAndTextClassification": {"num_images": 2, "modality_type_vocab_size": 3},
    "Wav2Vec2ConformerForPreTraining": {"mask_time_prob": 0.05},
    "Wav2Vec2ForPreTraining": {"mask_time_prob": 0.05},
}
