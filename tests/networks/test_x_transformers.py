"""The layers of x-transformers, with tokens cut: positions, norms, residuals, attention, feed-forward of many kinds."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from seeded import seeded
from torch import nn

from networks.oracle import Network, all_exact, text

PACKAGE = "x_transformers"
pytest.importorskip(PACKAGE)

SIZE = {"dim": 16, "depth": 2, "heads": 2, "attn_dim_head": 8, "ff_mult": 2, "verbose": False}
ENCODERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"attn_flash": True},
    "flash, ALiBi": {"attn_flash": True, "alibi_pos_bias": True},
    "rotary": {"rotary_pos_emb": True},
    "rotary, part": {"rotary_pos_emb": True, "rotary_emb_dim": 4},
    "polar": {"polar_pos_emb": True},
    "ALiBi": {"alibi_pos_bias": True, "alibi_num_heads": 1},
    "T5 bias": {"rel_pos_bias": True},
    "projected bias": {"attn_use_rel_proj_pos_bias": True},
    "data-dependent ALiBi": {"attn_data_dependent_alibi": True},
    "memory": {"attn_num_mem_kv": 3},
    "zero key": {"attn_add_zero_kv": True},
    "sink": {"attn_head_learned_sink": True},
    "top keys": {"attn_sparse_topk": 4},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "talking heads, scaled": {"attn_pre_scale_post_talking_heads": True},
    "one key head": {"attn_one_kv_head": True},
    "grouped, flash": {"heads": 4, "attn_kv_heads": 2, "attn_flash": True},
    "QK norm": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "QK RMSNorm": {"attn_qk_rmsnorm": True, "attn_value_rmsnorm": True},
    "gated values": {"attn_gate_values": True, "attn_gate_value_heads": True, "attn_swiglu_values": True},
    "output gate": {"attn_output_gate": True},
    "on attention": {"attn_on_attn": True},
    "sigmoid": {"attn_sigmoid": True},
    "hard": {"attn_hard": True},
    "L2 distance": {"attn_l2_distance": True},
    "soft clamp": {"attn_softclamp_logits": True},
    "cog": {"attn_cog_signed": True},
    "LASER": {"attn_laser": True},
    "latent": {"attn_use_latent_q": True, "attn_dim_latent_q": 8, "attn_use_latent_kv": True, "attn_dim_latent_kv": 8},
    "orthogonal values": {"attn_orthog_projected_values": True},
    "inverted": {"attn_inverted_attention": True},
    "GLU": {"ff_glu": True, "ff_swish": True},
    "GLU, bias": {"ff_glu": True, "ff_glu_mult_bias": True, "ff_post_act_ln": True, "ff_no_bias": True},
    "squared ReLU": {"ff_relu_squared": True},
    "SoLU": {"ff_solu": True},
    "RMSNorm": {"use_rmsnorm": True},
    "simple RMSNorm": {"use_simple_rmsnorm": True, "pre_norm_has_final_norm": False},
    "ScaleNorm": {"use_scalenorm": True, "pre_norm_has_final_norm": False},
    "dynamic tanh": {"use_dynamic_tanh": True},
    "erf norm": {"use_derf": True},
    "sandwich": {"sandwich_norm": True, "softclamp_output": True},
    "post-norm": {"pre_norm": False},
    "layer scale": {"use_layerscale": True},
    "gated residual": {"gate_residual": True},
    "scaled residual": {"scale_residual": True},
    "orthogonal residual": {"orthog_residual": True},
    "mean-variance residual": {"mv_split_residual": True},
    "aggregated residual": {"attn_aggregated_residuals": True, "attn_aggregated_residual_kwargs": {"lora_rank": 4}},
    "attention residual": {"residual_attn": True},
    "value residual": {"add_value_residual": True},
    "hyper connections": {"num_residual_streams": 2, "qkv_receive_diff_residuals": True},
    "layers integrated": {"integrate_layers": True},
    "U-Net": {"unet_skips": True, "depth": 4},
    "reinjected": {"reinject_input": True},
    "macaron": {"macaron": True},
    "shifted tokens": {"shift_tokens": 1},
    "tied": {"weight_tie_layers": True},
}
DECODERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"attn_flash": True},
    "flash, ALiBi": {"attn_flash": True, "alibi_pos_bias": True},
    "rotary": {"rotary_pos_emb": True},
    "xPos": {"rotary_pos_emb": True, "rotary_xpos": True},
    "T5 bias": {"rel_pos_bias": True},
    "CoPE": {"attn_use_cope": True},
    "data-dependent ALiBi": {"attn_data_dependent_alibi": True},
    "data-dependent ALiBi, rows": {"attn_data_dependent_alibi": True, "attn_data_dependent_alibi_per_row": True},
    "memory": {"attn_num_mem_kv": 3},
    "memory, flash": {"attn_num_mem_kv": 3, "attn_flash": True},
    "selective": {"attn_selective": True},
    "window": {"attn_max_attend_past": 4},
    "shifted tokens": {"shift_tokens": 1},
    "top keys": {"attn_sparse_topk": 4},
}
MODELS: dict[str, dict[str, Any]] = {
    "embeddings": {},
    "memory tokens": {"num_memory_tokens": 3},
    "class token": {"use_cls_token": True},
    "average": {"average_pool_embed": True},
    "pooled": {"attn_pool": True, "num_pooled_tokens": 2},
    "sinusoids": {"scaled_sinu_pos_emb": True},
    "normalized": {"l2norm_embed": True, "post_emb_norm": True},
    "mixture": {"mixture_of_softmax": True},
}


def layers(name: str, **options: Any) -> Any:
    return lambda package: getattr(package, name)(**{**SIZE, **options})


def model(**options: Any) -> Any:
    """A network on embeddings, in place of token ids."""

    def make(package: Any) -> nn.Module:
        made = package.TransformerWrapper(
            num_tokens=11, max_seq_len=64, attn_layers=package.Encoder(**SIZE), token_emb=nn.Identity(), **options
        )
        return made

    return make


def vit(layers: dict[str, Any] | None = None, **options: Any) -> Any:
    return lambda package: package.ViTransformerWrapper(
        image_size=32, patch_size=4, num_classes=5, attn_layers=package.Encoder(**SIZE, **(layers or {})), **options
    )


def continuous(**options: Any) -> Any:
    return lambda package: package.ContinuousTransformerWrapper(
        dim_in=6, dim_out=5, max_seq_len=64, attn_layers=package.Encoder(**SIZE), **options
    )


HALF = ("plain", "flash", "flash, ALiBi", "rotary", "T5 bias", "GLU", "RMSNorm", "QK RMSNorm", "memory")
TOKENS = (2, 21, 16)
LONG = {"shape": (1, 4096, 16)}  # for which fused kernels are
NETWORKS = {
    **{
        f"Encoder, {name}": Network(
            layers("Encoder", **options),
            TOKENS,
            1,
            tolerance=1e-5 if name == "polar" else 1e-9,
            half=name in HALF,
            at_use=LONG if options.get("attn_flash") else {},
        )
        for name, options in ENCODERS.items()
    },
    **{
        f"Decoder, {name}": Network(
            layers("Decoder", **options),
            TOKENS,
            1,
            half=name in HALF,
            at_use=LONG if options.get("attn_flash") else {},
        )
        for name, options in DECODERS.items()
    },
    "PrefixDecoder": Network(
        layers("PrefixDecoder"), TOKENS, 1, lambda network, x: network(x, prefix_attn_len=torch.tensor([5, 9]))
    ),
    "Encoder, masked": Network(
        layers("Encoder"), TOKENS, 1, lambda network, x: network(x, mask=torch.arange(21) < torch.tensor([[21], [15]]))
    ),
    "Encoder, dynamic bias": Network(
        layers("Encoder", dynamic_pos_bias=True, dynamic_pos_bias_log_distance=True, dynamic_pos_bias_norm=True),
        TOKENS,
        1,
        lambda network, x: network.float()(x.float()),  # the bias is float32
        tolerance=1e-5,
    ),
    "Encoder, batch": Network(layers("Encoder", rotary_pos_emb=True), (3, 21, 16), 0),
    "Encoder, condition": Network(
        layers("Encoder", use_adaptive_layernorm=True, use_adaptive_layerscale=True, dim_condition=4),
        TOKENS,
        1,
        lambda network, x: network(x, condition=text(2, 4)),
    ),
    "Encoder, RMS condition": Network(
        layers("Encoder", use_adaptive_rmsnorm=True, dim_condition=4),
        TOKENS,
        1,
        lambda network, x: network(x, condition=text(2, 4)),
    ),
    "Encoder, context": Network(
        layers("Encoder", cross_attend=True), TOKENS, 1, lambda network, x: network(x, context=text(2, 7, 16))
    ),
    "CrossAttender": Network(layers("CrossAttender"), TOKENS, 1, lambda network, x: network(x, context=text(2, 7, 16))),
    "CrossAttender, context cut": Network(
        layers("CrossAttender"),
        TOKENS,
        1,
        lambda network, x: network(text(2, 7, 16), context=x),
        reduced=1.0,
        tolerance=1e-5,
    ),
    "AttentionPool": Network(
        lambda package: package.x_transformers.AttentionPool(16, 2, depth=2, heads=2, dim_head=8),
        TOKENS,
        1,
        tolerance=1e-5,
        half=True,
    ),
    **{
        f"Model, {name}": Network(model(**options), TOKENS, 1, tolerance=1e-5 if name == "pooled" else 1e-9)
        for name, options in MODELS.items()
    },
    "Model, recycled": Network(model(recycling=True), TOKENS, 1, lambda network, x: network(x, recycle_steps=2)),
    "Continuous": Network(continuous(), (2, 21, 6), 1),
    "Continuous, memory tokens": Network(continuous(num_memory_tokens=3), (2, 21, 6), 1),
    "ViT": Network(vit(), (2, 3, 32, 32), half=True),
    "ViT, registers": Network(vit(num_register_tokens=2, post_emb_norm=True), (2, 3, 32, 32)),
    "ViT, flash": Network(
        vit(layers={"attn_flash": True, "rotary_pos_emb": True, "ff_glu": True, "use_rmsnorm": True}),
        (2, 3, 32, 32),
        half=True,
    ),
}


# -- token ids, and what predicts them ---------------------------------------------------------------------------------

SHORT = {"depth": 1, "heads": 2, "attn_dim_head": 8}
IDS = (2, 21)


def decoder(package: Any, **options: Any) -> nn.Module:
    return package.Decoder(dim=16, **SHORT, **options)


def language(package: Any, layers: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    return package.TransformerWrapper(
        num_tokens=10, max_seq_len=64, attn_layers=decoder(package, **(layers or {})), **options
    )


def of_ids(make: Any, shape: tuple[int, ...] = IDS, dim: int = 1, **options: Any) -> Network:
    return Network(make, shape, dim, **{"draw": partial(torch.randint, 0, 10), "reduced": 30.0, **options})


def inside(module: str, name: str, *arguments: Any, **options: Any) -> nn.Module:
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)(*arguments, **options)


def filled(package: Any) -> nn.Module:
    """Predicts the tokens that are masked."""
    model = package.TransformerWrapper(num_tokens=11, max_seq_len=21, attn_layers=package.Encoder(dim=16, **SHORT))
    return inside("nonautoregressive_wrapper", "NonAutoregressiveWrapper", model, mask_id=10)


def continued(package: Any) -> nn.Module:
    model = package.ContinuousTransformerWrapper(dim_in=6, dim_out=6, max_seq_len=64, attn_layers=decoder(package))
    return package.ContinuousAutoregressiveWrapper(model)


def translator(package: Any, longest: int = 64) -> nn.Module:
    sides = {
        f"{side}_{key}": value
        for side in ("enc", "dec")
        for key, value in {"num_tokens": 10, "depth": 1, "heads": 2, "max_seq_len": longest}.items()
    }
    return package.XTransformer(dim=16, **sides)


NETWORKS |= {
    "ids": of_ids(language),
    "ids, rotary": of_ids(
        lambda p: language(p, {"rotary_pos_emb": True, "attn_flash": True}, use_abs_pos_emb=False)
    ),
    "AutoregressiveWrapper": of_ids(lambda p: p.AutoregressiveWrapper(language(p)), train=True),
    "generated": of_ids(
        lambda p: p.AutoregressiveWrapper(language(p)),
        (2, 9),
        call=lambda network, x: network.generate(x, 5, temperature=0.0, cache_kv=False),
        backward=False,
    ),
    "generated, batch": of_ids(
        lambda p: p.AutoregressiveWrapper(language(p)),
        (3, 9),
        0,
        call=lambda network, x: network.generate(x, 5, temperature=0.0),
        backward=False,
    ),
    "NonAutoregressiveWrapper": of_ids(filled, train=True),
    "BeliefStateWrapper": of_ids(
        lambda p: inside("belief_state_wrapper", "BeliefStateWrapper", language(p), language(p)), (2, 9), train=True
    ),
    "FreeTransformer": of_ids(
        lambda p: inside(
            "free_transformer",
            "FreeTransformer",
            num_tokens=10,
            dim=16,
            dec_head_depth=1,
            dec_tail_depth=1,
            max_seq_len=64,
            heads=2,
            attn_dim_head=8,
            latent_bits=4,
        ),
        train=True,
        dtype=torch.float32,  # of its codes
        tolerance=1e-4,
    ),
    "XValTransformerWrapper": of_ids(
        lambda p: p.XValTransformerWrapper(
            num_tokens=11, max_seq_len=64, numerical_token_id=3, attn_layers=decoder(p)
        ),
        call=lambda network, x: network(x, x * 0.1),
    ),
    "MultiInputTransformerWrapper": of_ids(
        lambda p: p.MultiInputTransformerWrapper(
            num_tokens={"a": 10, "b": 10}, max_seq_len=64, attn_layers=decoder(p)
        ),
        call=lambda network, x: network({"a": x, "b": x.flip(1)}),
    ),
    "XTransformer": of_ids(
        translator,
        call=lambda network, x: network(x, torch.randint(0, 10, (2, 12), generator=seeded(1))),
        tolerance=1e-6,  # softmax over a context that is cut, in float32
        reduced=100.0,
        at_use={"make": partial(translator, longest=1024), "shape": (2, 1024)},
    ),
    "ContinuousAutoregressiveWrapper": Network(continued, (2, 21, 6), 1, reduced=30.0),
    "NeoMLP": Network(lambda p: p.NeoMLP(dim_in=5, dim_hidden=3, dim_out=2, dim_model=16, depth=1), (9, 5), 0),
    "autoencoder": Network(
        lambda _: inside(
            "continuous_autoencoder",
            "ContinuousTransformerAutoencoder",
            dim=16,
            enc_depth=1,
            dec_depth=1,
            max_seq_len=32,
            dim_input=6,
            dim_latent=4,
            heads=2,
            attn_dim_head=8,
        ),
        (2, 21, 6),
        1,
        reduced=30.0,
    ),
}


test_networks_are_exact = all_exact(__name__, NETWORKS, always=("ViT, flash", "ids"))
