"""Networks of other packages, unmodified, with images cut by rows: inference and a training step."""

from __future__ import annotations

import copy

import pytest
import torch
from neighborhood_oracle import Dense
from torch import nn
from torch.distributed.tensor import Shard

from shardtensor.testing import count_communication, run_distributed, shard, shared_mesh


def vit(attention: str):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=attention,
    )
    return ViTForImageClassification(config), torch.randn(2, 3, 32, 32), lambda model, x: model(x).logits


def swin(attention: str):
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        num_labels=5,
        drop_path_rate=0.0,
        attn_implementation=attention,
    )
    return SwinForImageClassification(config), torch.randn(2, 3, 32, 32), lambda model, x: model(x).logits


def dit(attention: str):
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=16,
        patch_size=2,
        norm_num_groups=4,
        num_embeds_ada_norm=10,
    )
    times, labels = torch.tensor([3, 7]), torch.tensor([1, 2])
    return model, torch.randn(2, 4, 16, 16), lambda model, x: model(x, timestep=times, class_labels=labels).sample


class NatLayer(nn.Module):
    def __init__(self, width: int, dilation: int):
        super().__init__()
        from natten import NeighborhoodAttention2D

        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = NeighborhoodAttention2D(width, num_heads=width // 4, kernel_size=3, dilation=dilation)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
        self.gamma1, self.gamma2 = (nn.Parameter(0.5 * torch.ones(width)) for _ in range(2))

    def forward(self, x):
        x = x + self.gamma1 * self.attn(self.norm1(x))
        return x + self.gamma2 * self.mlp(self.norm2(x))


class Nat(nn.Module):
    """The neighborhood attention transformer, and with dilation the dilated one: convolutions make tokens and halve the
    size between the levels, channels are last in between.
    """

    def __init__(self, width: int, classes: int, dilation: int):
        super().__init__()
        self.tokens = nn.Sequential(
            nn.Conv2d(3, width // 2, 3, stride=2, padding=1), nn.Conv2d(width // 2, width, 3, stride=2, padding=1)
        )
        self.norm = nn.LayerNorm(width)
        self.first = nn.Sequential(NatLayer(width, 1), NatLayer(width, dilation))
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False)
        self.second = nn.Sequential(nn.LayerNorm(2 * width), NatLayer(2 * width, 1), nn.LayerNorm(2 * width))
        self.pool, self.head = nn.AdaptiveAvgPool1d(1), nn.Linear(2 * width, classes)

    def forward(self, x):
        x = self.first(self.norm(self.tokens(x).permute(0, 2, 3, 1)))
        x = self.second(self.down(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        return self.head(self.pool(x.permute(0, 3, 1, 2).flatten(2)).flatten(1))


def nat(dilation: int):
    return Dense(Nat(8, 5, dilation)), torch.randn(2, 3, 32, 32), lambda model, x: model(x)


def check(make, option, mesh_shape, sizes) -> None:
    torch.manual_seed(0)
    model, x, call = make(option)
    model, x = model.double().eval(), x.double()
    twin = copy.deepcopy(model)
    placements = [Shard(2)] if len(mesh_shape) == 1 else [Shard(0), Shard(2)]
    sharded = shard(x, shared_mesh(mesh_shape), placements, {len(mesh_shape) - 1: sizes})
    with torch.no_grad(), count_communication() as counted:
        y = call(model, sharded)
    assert counted.collectives["all_gather"] == 0
    with torch.no_grad():
        torch.testing.assert_close(y.full_tensor(), call(twin, x), rtol=1e-10, atol=1e-12)
    for m, inputs in ((model, sharded), (twin, x)):
        m.train()
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        torch.manual_seed(1)  # DiT drops labels at random
        loss = call(m, inputs).square().mean()
        loss.backward()
        optimizer.step()
    for (name, a), b in zip(twin.named_parameters(), model.parameters()):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
@pytest.mark.parametrize("dilation", [1, 2])
def test_nat(dilation, mesh_shape):
    pytest.importorskip("natten")
    run_distributed(check, 2 * len(mesh_shape), nat, dilation, mesh_shape, (20, 12))


@pytest.mark.parametrize(
    ("attention", "mesh_shape"),
    [
        *(("sdpa", (2, 2)), ("eager", (2,))),
        *(pytest.param(*values, marks=pytest.mark.slow) for values in (("sdpa", (2,)), ("eager", (2, 2)))),
    ],
)
@pytest.mark.parametrize("make", [vit, swin])
def test_transformers(make, attention, mesh_shape):
    pytest.importorskip("transformers")
    run_distributed(check, 2 * len(mesh_shape), make, attention, mesh_shape, (20, 12), timeout=180.0)


@pytest.mark.parametrize("mesh_shape", [pytest.param((2,), marks=pytest.mark.slow), (2, 2)])
def test_diffusers(mesh_shape):
    pytest.importorskip("diffusers")
    run_distributed(check, 2 * len(mesh_shape), dit, "", mesh_shape, (10, 6), timeout=180.0)
