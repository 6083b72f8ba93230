"""The networks of transformers: of images, videos, words, sound and series."""

from __future__ import annotations

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from networks.oracle import Network, all_exact, all_refused

PACKAGE = "transformers"
pytest.importorskip(PACKAGE)

STAGES = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
SWIN = {"patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "image_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def upernet(t: Any) -> nn.Module:
    backbone = t.ConvNextConfig(**STAGES, out_features=["stage1", "stage2", "stage3", "stage4"])
    sizes = {"hidden_size": 8, "auxiliary_in_channels": 16, "auxiliary_channels": 8, "pool_scales": [1, 2, 3]}
    return t.UperNetForSemanticSegmentation(t.UperNetConfig(backbone_config=backbone, num_labels=3, **sizes))


def dpt(t: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    neck = {"neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8, "reassemble_factors": [4, 2, 1, 0.5]}
    image = {"image_size": 64, "patch_size": 8, "backbone_out_indices": [0, 1, 2, 3], "is_hybrid": False}
    return t.DPTForDepthEstimation(t.DPTConfig(**sizes, **neck, **image, **NO_DROPOUT))


def logits(network: Any, x: Tensor) -> Tensor:
    return network(x).logits


NETWORKS = {
    "SegFormer": Network(
        lambda t: t.SegformerForSemanticSegmentation(
            t.SegformerConfig(
                **STAGES,
                **NO_DROPOUT,
                num_attention_heads=[1, 1, 2, 2],
                decoder_hidden_size=16,
                drop_path_rate=0.0,
                classifier_dropout_prob=0.0,
            )
        ),
        (2, 3, 64, 64),
        call=logits,
    ),
    "ConvNeXt": Network(
        lambda t: t.ConvNextForImageClassification(t.ConvNextConfig(**STAGES)), (2, 3, 64, 64), call=logits
    ),
    "ResNet": Network(
        lambda t: t.ResNetForImageClassification(
            t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
        ),
        (2, 3, 64, 64),
        call=logits,
    ),
    "UperNet": Network(upernet, (2, 3, 64, 64), call=logits),
    "DPT": Network(dpt, (2, 3, 64, 64), call=lambda network, x: network(x).predicted_depth),
    "Swinv2": Network(
        lambda t: t.Swinv2ForImageClassification(t.Swinv2Config(drop_path_rate=0.0, **SWIN)),
        (2, 3, 32, 32),
        call=logits,
    ),
    "Swin2SR": Network(
        lambda t: t.Swin2SRForImageSuperResolution(t.Swin2SRConfig(drop_path_rate=0.0, **SWIN | {"patch_size": 1})),
        (1, 3, 32, 32),
        call=lambda network, x: network(x).reconstruction,
    ),
    "Dinov2": Network(
        lambda t: t.Dinov2ForImageClassification(
            t.Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=4)
        ),
        (2, 3, 32, 32),
        call=logits,
    ),
}

# -- those whose results are several tensors ---------------------------------------------------------------------------

VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
MASKED = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 32,
}
PYRAMID = {**STAGES, "num_attention_heads": [1, 1, 2, 2], "drop_path_rate": 0.0, **NO_DROPOUT}
IMAGE, VIDEO, IDS, SERIES = (1, 3, 64, 64), (1, 4, 3, 32, 32), (2, 21), (5, 32, 3)


def tensors(result: Any) -> dict[str, Any]:
    """Of the result of a network, without the caches that are for its next call."""
    return {key: value for key, value in result.items() if isinstance(value, Tensor | tuple)}


NETWORK_OPTIONS = ("call", "tolerance", "train", "draw", "dtype", "reduced")


def model(name: str, config: str, shape: tuple[int, ...] = IMAGE, dim: int = 2, **options: Any) -> Network:
    """The network ``name`` of a configuration, whose options those of :class:`Network` are taken from."""
    of_network = {key: options.pop(key) for key in NETWORK_OPTIONS if key in options}
    given = {"call": lambda network, x: tensors(network(x)), "reduced": 100.0, **of_network}
    return Network(lambda t: getattr(t, name)(getattr(t, config)(**options)), shape, dim, **given)


def masked_autoencoder(t: Any, size: int) -> nn.Module:
    config = t.ViTMAEConfig(**VIT, **NO_DROPOUT, **MASKED, image_size=size, patch_size=8)
    network: nn.Module = t.ViTMAEForPreTraining(config)
    return network


def depth_anything(t: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
    stages = {"out_features": ["stage1", "stage2"], "reshape_hidden_states": False, "apply_layernorm": True}
    neck = {"neck_hidden_sizes": [8, 8], "reassemble_factors": [2, 1], "reassemble_hidden_size": 16}
    head = {"fusion_hidden_size": 8, "head_hidden_size": 8, "patch_size": 14}
    backbone = t.Dinov2Config(**sizes, **stages)
    return t.DepthAnythingForDepthEstimation(t.DepthAnythingConfig(backbone_config=backbone, **neck, **head))


IMAGES = {
    "ViT": model("ViTModel", "ViTConfig", **VIT, **NO_DROPOUT, image_size=64, patch_size=8),
    "DeiT": model("DeiTForImageClassification", "DeiTConfig", **VIT, **NO_DROPOUT, image_size=64, patch_size=8),
    "BEiT": model(
        "BeitModel",
        "BeitConfig",
        **VIT,
        **NO_DROPOUT,
        image_size=64,
        patch_size=8,
        use_relative_position_bias=True,
        drop_path_rate=0.0,
    ),
    "ViTMAE": model(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        **VIT,
        **NO_DROPOUT,
        **MASKED,
        image_size=64,
        patch_size=8,
        at_use={"make": lambda t: masked_autoencoder(t, 256), "shape": (1, 3, 256, 256)},
    ),
    # The tokens that are kept are sharded only if they are more than some 100 KiB.
    "ViTMAE, batch": model(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        (9, 3, 128, 128),
        **{**VIT, "hidden_size": 64},
        **NO_DROPOUT,
        **MASKED,
        image_size=128,
        patch_size=8,
    ),
    "CLIP": model("CLIPVisionModel", "CLIPVisionConfig", **VIT, image_size=64, patch_size=8),
    "SigLIP": model("SiglipVisionModel", "SiglipVisionConfig", **VIT, image_size=64, patch_size=8),
    "DINOv3": model("DINOv3ViTModel", "DINOv3ViTConfig", **VIT, image_size=64, patch_size=8),
    "SAM": model(
        "SamVisionModel",
        "SamVisionConfig",
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=64,
        patch_size=8,
        window_size=3,
        global_attn_indexes=[1],
        mlp_dim=32,
        output_channels=8,
    ),
    "DepthAnything": Network(depth_anything, (1, 3, 56, 56), call=lambda network, x: network(x).predicted_depth),
    "Hiera": model(
        "HieraModel",
        "HieraConfig",
        embed_dim=8,
        image_size=[64, 64],
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 2, 2],
        drop_path_rate=0.0,
    ),
    "Swin": model("SwinModel", "SwinConfig", **SWIN | {"image_size": 64, "patch_size": 4}, drop_path_rate=0.0),
    "PVT": model("PvtModel", "PvtConfig", **PYRAMID, image_size=64),
    "PVTv2": model("PvtV2Model", "PvtV2Config", **PYRAMID),
    "GLPN": model("GLPNForDepthEstimation", "GLPNConfig", **PYRAMID, decoder_hidden_size=16),
    "PoolFormer": model("PoolFormerModel", "PoolFormerConfig", **STAGES, drop_path_rate=0.0),
    "ConvNextV2": model("ConvNextV2Model", "ConvNextV2Config", **STAGES),
    "FocalNet": model(
        "FocalNetModel",
        "FocalNetConfig",
        image_size=64,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 32, 64],
        drop_path_rate=0.0,
    ),
    "MobileViT": model(
        "MobileViTModel",
        "MobileViTConfig",
        hidden_sizes=[8, 12, 16],
        neck_hidden_sizes=[4, 8, 12, 16, 16, 16, 32],
        num_attention_heads=2,
        **NO_DROPOUT,
    ),
    "MobileNetV2": model("MobileNetV2Model", "MobileNetV2Config", depth_multiplier=0.25),
    "EfficientNet": model(
        "EfficientNetModel",
        "EfficientNetConfig",
        width_coefficient=0.25,
        depth_coefficient=0.25,
        hidden_dim=320,
        image_size=64,
    ),
    "Levit": model(
        "LevitModel",
        "LevitConfig",
        (2, 3, 64, 64),
        image_size=64,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        drop_path_rate=0,
    ),
    "RegNet, training": model("RegNetModel", "RegNetConfig", embedding_size=8, **STAGES, groups_width=8, train=True),
    "BiT": model("BitModel", "BitConfig", embedding_size=8, **STAGES, num_groups=4),
    "VideoMAE": model(
        "VideoMAEModel",
        "VideoMAEConfig",
        VIDEO,
        3,
        **VIT,
        **NO_DROPOUT,
        image_size=32,
        patch_size=8,
        num_frames=4,
        tubelet_size=2,
    ),
    "TimeSformer": model(
        "TimesformerModel",
        "TimesformerConfig",
        VIDEO,
        3,
        **VIT,
        **NO_DROPOUT,
        image_size=32,
        patch_size=8,
        num_frames=4,
        drop_path_rate=0,
    ),
}

# -- words, sound and series -------------------------------------------------------------------------------------------

WORDS = {**VIT, "vocab_size": 10, "num_hidden_layers": 1}
GROUPED = {**WORDS, "num_key_value_heads": 1}


def language(name: str, config: str, **options: Any) -> Network:
    options = {"call": lambda network, ids: tensors(network(input_ids=ids)), **options}
    return model(name, config, IDS, 1, draw=partial(torch.randint, 0, 10), **options)


def translated(network: nn.Module, ids: Tensor) -> dict[str, Any]:
    return tensors(network(input_ids=ids, decoder_input_ids=torch.arange(14).view(2, 7) % 10))


def inside(module: str, name: str, *arguments: Any) -> nn.Module:
    layer: nn.Module = getattr(importlib.import_module(f"transformers.models.{module}"), name)(*arguments)
    return layer


LANGUAGE = {
    "BERT": language("BertModel", "BertConfig", **WORDS, **NO_DROPOUT),
    "RoBERTa": language("RobertaModel", "RobertaConfig", **WORDS, **NO_DROPOUT, max_position_embeddings=40),
    "GPT2": language(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=10,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "Mamba": language(
        "MambaModel",
        "MambaConfig",
        vocab_size=10,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=1,
        time_step_rank=4,
        reduced=300.0,
    ),
    # Their positions are rotations in float32.
    "Llama": language("LlamaForCausalLM", "LlamaConfig", **GROUPED, tolerance=1e-5),
    "Mistral": language("MistralModel", "MistralConfig", **GROUPED, sliding_window=6, tolerance=1e-5),
    "Mixtral": language("MixtralModel", "MixtralConfig", **GROUPED, num_local_experts=3, dtype=torch.float32),
    "Mixtral, eager": language(
        "MixtralModel",
        "MixtralConfig",
        **GROUPED,
        num_local_experts=3,
        experts_implementation="eager",
        tolerance=1e-5,
    ),
    "Qwen3": language("Qwen3Model", "Qwen3Config", **GROUPED, head_dim=8, tolerance=1e-5),
    "ModernBERT": language(
        "ModernBertModel",
        "ModernBertConfig",
        **WORDS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        tolerance=1e-5,
    ),
    "T5": language(
        "T5Model",
        "T5Config",
        vocab_size=10,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        call=translated,
    ),
    "wav2vec2": model(
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        (1, 400),
        1,
        **WORDS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        layerdrop=0.0,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
    ),
    "Whisper, encoder": Network(
        lambda t: t.WhisperModel(
            t.WhisperConfig(
                vocab_size=10,
                d_model=16,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=32,
                decoder_ffn_dim=32,
                max_source_positions=20,
                num_mel_bins=8,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
            )
        ).encoder,
        (1, 8, 40),
        call=lambda network, x: tensors(network(x)),
        reduced=100.0,
    ),
    "EnCodec, encoder": Network(
        lambda t: t.EncodecModel(
            t.EncodecConfig(
                num_filters=4,
                upsampling_ratios=[2, 2],
                codebook_size=8,
                codebook_dim=8,
                hidden_size=8,
                num_lstm_layers=1,
                target_bandwidths=[6.0],
                sampling_rate=400,
            )
        ).encoder,
        (1, 1, 200),
        reduced=100.0,
    ),
    "PatchTST": model(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        SERIES,
        0,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        prediction_length=4,
        num_input_channels=3,
        d_model=16,
        num_attention_heads=2,
        num_hidden_layers=1,
        ffn_dim=32,
    ),
    "PatchTSMixer": model(
        "PatchTSMixerForPrediction",
        "PatchTSMixerConfig",
        SERIES,
        1,
        context_length=32,
        patch_length=8,
        patch_stride=8,
        prediction_length=4,
        num_input_channels=3,
        d_model=16,
        num_layers=1,
    ),
    "Autoformer, decomposition": Network(
        lambda _: inside(
            "autoformer.modeling_autoformer", "AutoformerSeriesDecompositionLayer", SimpleNamespace(moving_average=5)
        ),
        (2, 21, 6),
        1,
    ),
    "Informer, convolution": Network(
        lambda _: inside("informer.modeling_informer", "InformerConvLayer", 6), (2, 21, 6), 1, train=True
    ),
}
NETWORKS |= {**IMAGES, **LANGUAGE}
# -- objects that queries find in an image -----------------------------------------------------------------------------


def maskformer(t: Any) -> nn.Module:
    stages = {"depths": [1] * 4, "num_heads": [2] * 4, "out_features": [f"stage{k}" for k in range(1, 5)]}
    backbone = t.SwinConfig(**SWIN | stages, drop_path_rate=0.0)
    sizes = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
    decoder = t.DetrConfig(num_queries=5, dropout=0.0, encoder_layers=0, **sizes)
    options = {"fpn_feature_size": 32, "mask_feature_size": 32, "num_labels": 3}
    return t.MaskFormerForInstanceSegmentation(
        t.MaskFormerConfig(backbone_config=backbone, decoder_config=decoder, **options)
    )


DETECTOR = {
    "encoder_hidden_dim": 16,
    "encoder_in_channels": [8, 16, 16],
    "encoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
    "d_model": 16,
    "decoder_in_channels": [16] * 3,
    "decoder_ffn_dim": 32,
    "decoder_attention_heads": 2,
    "decoder_layers": 2,
    "num_queries": 5,
    "num_denoising": 0,
    "num_labels": 3,
    "dropout": 0.0,
    "hidden_expansion": 0.5,
    "freeze_backbone_batch_norms": False,
}
DETECTS = {"call": lambda network, x: tensors(network(x)), "reduced": 100.0, "norms_train": True}


def detector(t: Any, name: str, config: str, backbone: Any) -> nn.Module:
    return getattr(t, name)(getattr(t, config)(backbone_config=backbone, **DETECTOR))


def rt_detr(t: Any) -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4, "layer_type": "basic"}
    backbone = t.RTDetrResNetConfig(**sizes, out_features=["stage2", "stage3", "stage4"])
    return detector(t, "RTDetrV2ForObjectDetection", "RTDetrV2Config", backbone)


def d_fine(t: Any) -> nn.Module:
    stages = {
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 8, 8, 16],
        "stage_mid_channels": [8] * 4,
        "stage_out_channels": [8, 8, 16, 16],
        "stage_num_blocks": [1] * 4,
        "stage_numb_of_layers": [2] * 4,
    }
    sizes = {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4, "out_features": ["stage2", "stage3", "stage4"]}
    backbone = t.HGNetV2Config(**stages, **sizes)
    return detector(t, "DFineForObjectDetection", "DFineConfig", backbone)


NETWORKS |= {
    "MaskFormer": Network(maskformer, IMAGE, call=lambda network, x: tensors(network(x)), reduced=100.0),
    "MobileViTV2": model(
        "MobileViTV2Model",
        "MobileViTV2Config",
        width_multiplier=0.25,
        image_size=64,
        classifier_dropout_prob=0.0,
    ),
    "RT-DETR v2": Network(rt_detr, (2, 3, 64, 64), **DETECTS),
    "D-FINE": Network(d_fine, (2, 3, 64, 64), **DETECTS),
}
# torch's product of groups of rows, which come in the order of their experts; a loop over the experts is exact.
REFUSED = {"Mixtral": r"_grouped_mm\.default: experts and scales are those of all rows"}
EXACT = [name for name in NETWORKS if name not in REFUSED]


test_networks_are_exact = all_exact(__name__, EXACT, always=("SegFormer", "BERT"))
test_refusals_say_what_to_do = all_refused(__name__, REFUSED)
