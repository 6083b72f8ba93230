"""Layers and models of sequences: perceivers, attention in windows, state spaces, forecasts.

More of them are in test_other_programs.py. The name of each begins with that of its package.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from networks import torchvision_set_up  # noqa: F401  # before a package imports torchvision
from networks.oracle import Network, all_exact, all_refused, text
from networks.programs import layer, load, of, of_ids

PACKAGE = "torch"
TOKENS, HEADS, SERIES = (2, 21, 16), (2, 2, 21, 8), (5, 48)

# -- perceivers --------------------------------------------------------------------------------------------------------

PERCEIVER = {
    "num_freq_bands": 3,
    "depth": 1,
    "max_freq": 8.0,
    "input_channels": 3,
    "num_latents": 5,
    "latent_dim": 16,
    "cross_dim_head": 8,
    "latent_heads": 2,
    "latent_dim_head": 8,
    "num_classes": 4,
}
LATENTS = {"depth": 1, "num_latents": 5, "latent_dim": 16, "latent_heads": 2}
KEPT = torch.arange(13).expand(2, 13) < 9


def perceiver(module: str, **options: Any) -> nn.Module:
    network: nn.Module = load(f"perceiver_pytorch.{module}").Perceiver(**{**PERCEIVER, **options})
    return network


PERCEIVERS = {
    **{
        f"perceiver_pytorch, {name}": layer(lambda module=module: perceiver(module), (2, 13, 9, 3), 1, reduced=30.0)
        for name, module in (("plain", "perceiver_pytorch"), ("gated", "gated"), ("mixed latents", "mixed_latents"))
    },
    "perceiver_pytorch, masked": layer(
        lambda: perceiver("perceiver_pytorch", input_axis=1),
        (2, 13, 3),
        1,
        call=lambda network, x: network(x, mask=KEPT),
        reduced=100.0,
        at_use={
            "shape": (2, 4096, 3),
            "call": lambda network, x: network(x, mask=torch.arange(x.shape[1]).expand(2, -1) < 4000),
        },
    ),
    "perceiver_pytorch, queries": layer(
        lambda: load("perceiver_pytorch.perceiver_io").PerceiverIO(
            dim=16, queries_dim=8, logits_dim=5, decoder_ff=True, **LATENTS
        ),
        TOKENS,
        1,
        call=lambda network, x: network(x, queries=x[..., :8]),
        reduced=30.0,
    ),
}

# -- attention in windows, positions, state spaces ---------------------------------------------------------------------


def windows(**options: Any) -> Network:
    return layer(
        lambda: load("local_attention").LocalAttention(window_size=8, autopad=True, dim=8, **options),
        HEADS,
        2,
        call=lambda attention, x: attention(x, x * 2, x.sin()),
    )


def axial(network: Any, x: Tensor) -> Any:
    return load("rotary_embedding_torch").apply_rotary_emb(network.get_axial_freqs(13, 9), x)


def vision_mamba(**options: Any) -> nn.Module:
    package = load("mambapy.vim")
    network: nn.Module = package.VMamba(package.MambaConfig(d_model=16, n_layers=1, d_state=4, **options))
    return network


def jamba() -> nn.Module:
    package = load("mambapy.jamba")
    attention = {"num_attention_heads": 2, "num_key_value_heads": 1, "attn_layer_offset": 1, "attn_layer_period": 2}
    config = package.JambaLMConfig(d_model=16, n_layers=2, mlp_size=24, d_state=4, num_experts=3, **attention)
    network: nn.Module = package.Jamba(config)
    return network


SEQUENCES = {
    "local_attention, transformer": of_ids(
        lambda: load("local_attention").LocalTransformer(
            num_tokens=10, max_seq_len=64, dim=16, depth=1, local_attn_window_size=8, dim_head=8, heads=2
        ),
        (2, 24),
        1,
    ),
    "local_attention, both sides": windows(causal=False, look_backward=1, look_forward=1),
    "local_attention, exact": windows(causal=True, exact_windowsize=True, use_xpos=True),
    "rotary_embedding_torch, xPos": layer(
        lambda: load("rotary_embedding_torch").RotaryEmbedding(dim=8, use_xpos=True),
        HEADS,
        2,
        call=lambda rotary, x: rotary.rotate_queries_and_keys(x, x * 2),
    ),
    "rotary_embedding_torch, axial": layer(
        lambda: load("rotary_embedding_torch").RotaryEmbedding(dim=4, freqs_for="pixel", max_freq=16),
        (1, 13, 9, 16),
        1,
        call=axial,
    ),
    "mambapy, both directions": layer(vision_mamba, TOKENS, 1, reduced=30.0),
    "mambapy, both directions, sequential": layer(lambda: vision_mamba(pscan=False), TOKENS, 1),
    "mambapy, Jamba": layer(jamba, TOKENS, 1),
    "siren_pytorch, latent": layer(
        lambda: load("siren_pytorch").SirenWrapper(
            load("siren_pytorch").SirenNet(2, 16, 3, 2), image_width=13, image_height=9, latent_dim=7
        ),
        (1, 3, 9, 13),
        2,
        call=lambda network, x: network(x, latent=torch.ones(7, dtype=x.dtype)),
        reduced=30.0,
    ),
    "nystrom_attention": layer(
        lambda: load("nystrom_attention").NystromAttention(
            dim=16, dim_head=8, heads=2, num_landmarks=4, residual=True, residual_conv_kernel=5
        ),
        (1, 32, 16),
        1,
    ),
    "egnn_pytorch": layer(
        lambda: load("egnn_pytorch").EGNN(dim=8), (1, 13, 8), 1, call=lambda network, x: network(x, text(1, 13, 3))
    ),
    "slot_attention": layer(
        lambda: load("slot_attention").SlotAttention(num_slots=3, dim=16, iters=2), TOKENS, 1, reduced=30.0
    ),
    "axial_attention": layer(
        lambda: load("axial_attention").AxialAttention(dim=16, dim_index=1, heads=2, num_dimensions=2),
        (1, 16, 13, 9),
        2,
    ),
    "g_mlp_pytorch": layer(
        lambda: load("g_mlp_pytorch").gMLPVision(image_size=32, patch_size=8, num_classes=5, dim=16, depth=2),
        (2, 3, 32, 32),
        2,
    ),
    "conformer": layer(
        lambda: load("conformer").Conformer(dim=16, depth=1, dim_head=8, heads=2, conv_kernel_size=7),
        TOKENS,
        1,
        train=True,
    ),
    "linformer": layer(lambda: load("linformer").Linformer(dim=16, seq_len=21, depth=1, heads=2, k=5), TOKENS, 1),
}

# -- forecasts ---------------------------------------------------------------------------------------------------------


def bolt() -> nn.Module:
    config = load("transformers").T5Config(
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=2,
        vocab_size=4,
        dropout_rate=0.0,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    config.chronos_config = {
        "context_length": 48,
        "prediction_length": 16,
        "input_patch_size": 8,
        "input_patch_stride": 8,
        "quantiles": [0.1, 0.5, 0.9],
        "use_reg_token": True,
    }
    network: nn.Module = load("chronos.chronos_bolt").ChronosBoltModelForForecasting(config)
    return network


def quantiles(network: nn.Module, x: Tensor) -> Any:
    return network(context=x).quantile_preds


FORECASTS = {
    "chronos, series": layer(bolt, SERIES, 0, call=quantiles, reduced=300.0),
    # Its mean and scale are sums in float32.
    "chronos, time": layer(bolt, (2, 48), 1, call=quantiles, reduced=300.0, tolerance=1e-6),
    "chronos, scales": of(lambda x: load("chronos.chronos_bolt").InstanceNorm()(x), SERIES, 1, tolerance=1e-6),
}
NETWORKS = {**PERCEIVERS, **SEQUENCES, **FORECASTS}
REFUSED = {
    "mambapy, Jamba": r"tolist: no rank holds all values\. .*Remedy: take x\.full_tensor"
}  # the tokens of an expert


test_networks_are_exact = all_exact(
    __name__, [name for name in NETWORKS if name not in REFUSED], always=("nystrom_attention",), of_packages=True
)
test_refusals_say_what_to_do = all_refused(__name__, REFUSED, of_packages=True)
