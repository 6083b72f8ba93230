"""Multi-head attention and the transformer layers against the unsharded modules."""

from __future__ import annotations

import copy

import pytest
import torch
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import shardtensor
from shardtensor import ShardTensor
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

SIZES = {0: (5, 2)}
WHOLE = [Replicate()]


def data(*shape):
    return torch.randn(*shape, dtype=torch.float64)


class With(nn.Module):
    """A module called with keyword arguments, and with one tensor as query, key and value."""

    def __init__(self, module, **kwargs):
        super().__init__()
        self.module, self.kwargs = module, kwargs

    def forward(self, query, key=None, value=None):
        key = query if key is None else key
        return self.module(query, key, key if value is None else value, **self.kwargs)


def padding(batch: int, length: int) -> torch.Tensor:
    mask = torch.zeros(batch, length, dtype=torch.bool)
    mask[0, length - 2 :] = True
    return mask


@pytest.mark.parametrize("batch_first", [True, False])
@on_ranks(2)
def test_multihead_attention(batch_first):
    torch.manual_seed(0)
    dim = 1 if batch_first else 0
    x = data(2, 7, 8) if batch_first else data(7, 2, 8)
    masks = {"attn_mask": torch.rand(7, 7) < 0.3, "key_padding_mask": padding(2, 7)}
    masks["attn_mask"].fill_diagonal_(False)
    for need in (True, False):

        def check(module, *tensors, placements, sizes, need=need, **kwargs):
            assert_matches_unsharded(
                With(module, need_weights=need, **kwargs),
                *tensors,
                mesh_shape=2,
                placements=placements,
                shard_sizes=sizes,
            )

        plain = nn.MultiheadAttention(8, 2, batch_first=batch_first).double()
        check(plain, x, placements=[Shard(dim)], sizes=SIZES)
        check(plain, x, placements=[Shard(1 - dim)], sizes={0: (2, 0)}, **masks)
        check(plain, x, data(*x.shape), placements=[[Shard(dim)], WHOLE], sizes=[SIZES, None])
        check(plain, x, data(*x.shape), placements=[WHOLE, [Shard(dim)]], sizes=[None, SIZES])
        check(plain, x, placements=[Shard(dim)], sizes=SIZES, attn_mask=data(2 * 2, 7, 7), average_attn_weights=False)
        causal = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
        check(plain, x, placements=[Shard(dim)], sizes={0: (0, 7)}, attn_mask=causal, is_causal=True)
        extended = nn.MultiheadAttention(8, 2, batch_first=batch_first, add_bias_kv=True, add_zero_attn=True).double()
        check(extended, x, placements=[Shard(dim)], sizes=SIZES, **masks)
        others = nn.MultiheadAttention(8, 2, batch_first=batch_first, kdim=3, vdim=5, bias=False).double()
        k, v = data(*x.shape[:2], 3), data(*x.shape[:2], 5)
        check(others, x, k, v, placements=[Shard(dim)], sizes=SIZES)
        check(plain, x[0] if batch_first else x[:, 0], placements=[Shard(0)], sizes=SIZES)  # unbatched


class Padded(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, mask):
        return self.module(x, src_key_padding_mask=mask)


@on_ranks(2)
def test_transformer_layers():
    torch.manual_seed(0)
    x = data(2, 7, 8)
    for norm_first in (False, True):
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first).double()
        for train in (True, False):
            layer.train(train)
            assert_matches_unsharded(layer, x, mesh_shape=2, placements=[Shard(1)], shard_sizes=SIZES)
            # The padding sharded like the sequence, and plain.
            for places in ([Shard(1)], None):
                assert_matches_unsharded(
                    Padded(layer),
                    x,
                    padding(2, 7),
                    mesh_shape=2,
                    placements=[[Shard(1)], places],
                    shard_sizes=[SIZES, SIZES if places else None],
                )
    decoder = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True).double()
    assert_matches_unsharded(
        decoder, x, data(2, 5, 8), mesh_shape=2, placements=[[Shard(1)]] * 2, shard_sizes=[SIZES, {0: (1, 4)}]
    )


@on_ranks(2)
def test_inference():
    """Where plain tensors take torch's fused layers, ShardTensors take the steps that they consist of."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double().eval()
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, mask = data(2, 7, 8), padding(2, 7)
    sharded = shard(x, shared_mesh(2), [Shard(1)], SIZES)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for module in (layer, encoder):
                y = module(sharded)
                assert isinstance(y, ShardTensor) and y.shard_sizes == SIZES
                torch.testing.assert_close(y.full_tensor(), module(x), rtol=1e-10, atol=1e-12)
                padded = module(sharded, src_key_padding_mask=mask).full_tensor()
                torch.testing.assert_close(
                    padded[~mask], module(x, src_key_padding_mask=mask)[~mask], rtol=1e-10, atol=1e-12
                )


@on_ranks(4)
def test_two_mesh_dims():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).double()
    sizes = {0: (1, 2), 1: (6, 1)}
    assert_matches_unsharded(
        layer, data(3, 7, 8), mesh_shape=(2, 2), placements=[Shard(0), Shard(1)], shard_sizes=sizes
    )


def check_messages() -> tuple[int, dict]:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    x = shard(torch.randn(2, 7, 8), shared_mesh(2), [Shard(1)], SIZES)
    with count_communication() as counted, torch.no_grad():
        module(x, x, x, need_weights=False)
    forward = counted.bytes_sent
    with count_communication() as counted:
        module(x, x, x, need_weights=False)[0].sum().backward()
    return forward, dict(counted.collectives)


def test_messages():
    """Keys and values travel; nothing else but the weights' gradients, all of them in one all-reduce."""
    results = run_distributed(check_messages, 2)
    assert [forward for forward, _ in results] == [5 * 2 * 16 * 4, 2 * 2 * 16 * 4]
    assert all(collectives == {"all_to_all": 2, "all_reduce": 1} for _, collectives in results)


@on_ranks(2)
def test_autocast():
    """The gradients have the dtypes of what they belong to, and the errors of one device."""
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 7, 8)
    results = []
    for tensor in (x.requires_grad_(), shard(x.detach(), shared_mesh(2), [Shard(1)], SIZES, requires_grad=True)):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            y = module(tensor, tensor, tensor, need_weights=False)[0]
        assert y.dtype == torch.bfloat16
        y.float().square().mean().backward()
        grads = [tensor.grad, *(p.grad for p in module.parameters())]
        assert all(g.dtype == torch.float32 for g in grads)
        results.append([t.full_tensor() if isinstance(t, ShardTensor) else t for t in (y.float(), *grads)])
        module.zero_grad()
    for whole, ours in zip(*results):
        torch.testing.assert_close(ours, whole, rtol=0.03, atol=0.003)


@on_ranks(2)
def test_second_derivatives():
    """Those by the output's projection need first derivatives of the attention only, so they are there."""
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(8, 2, batch_first=True).double(), data(2, 7, 8)
    found = []
    for tensor in (x.requires_grad_(), shard(x.detach(), shared_mesh(2), [Shard(1)], SIZES, requires_grad=True)):
        y = module(tensor, tensor, tensor, need_weights=False)[0]
        (grad,) = torch.autograd.grad(y.square().sum(), module.out_proj.weight, create_graph=True)
        grad.square().sum().backward()
        found.append([tensor.grad, module.in_proj_weight.grad, module.out_proj.weight.grad])
        module.zero_grad()
    found[1][0] = found[1][0].full_tensor()
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


def call_with_a_wrong_mask() -> None:
    x = shard(torch.randn(2, 7, 8), shared_mesh(2), [Shard(1)], SIZES)
    nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x, attn_mask=torch.zeros(7, 6))


def test_torch_checks_the_arguments():
    for error in run_expecting_errors(call_with_a_wrong_mask, 2):
        assert isinstance(error, RuntimeError)
        assert "The shape of the 2D attn_mask is" in str(error)


# -- half precision ----------------------------------------------------------------------------------------------------


def gradients_in(dtype, module, x, grad, others):
    """The parameters' gradients in float64, of a copy of the module and operands in ``dtype``."""
    module = copy.deepcopy(module).to(dtype)
    y, _ = module(x, *others(x), need_weights=False)
    y.backward(grad)
    return {name: p.grad.double() for name, p in module.named_parameters()}


OTHERS = {"self": lambda x: (x, x), "cross": lambda x: [x * 1] * 2, "key and value": lambda x: (x * 1, x * 2)}


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("name", OTHERS)
@on_ranks(2)
@shardtensor.half_precision("exact")
def test_gradients_of_weights_in_half_precision(name, ring):
    """The ranks' contributions to the gradients of weights are opposite, but for a hundredth."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=True).bfloat16()
    half, grad = torch.randn(2, 2, 24, 16).unbind()
    x = torch.cat([half, half + torch.randn(half.shape) / 100], 1).bfloat16()
    grad = torch.cat([grad, torch.randn(grad.shape) / 100 - grad], 1).bfloat16()
    exact = gradients_in(torch.float64, module, x.double(), grad.double(), OTHERS[name])
    one = gradients_in(torch.bfloat16, module, x, grad, OTHERS[name])
    with shardtensor.attention_method("ring" if ring else "fetch"):
        shards = [shard(t, shared_mesh(2), [Shard(1)]) for t in (x, grad)]
        found = gradients_in(torch.bfloat16, module, *shards, OTHERS[name])
    for p in exact:
        error, of_one = ((g[p] - exact[p]).abs().max() for g in (found, one))
        unit = torch.finfo(torch.bfloat16).eps * exact[p].abs().max()
        assert error <= 2 * torch.maximum(of_one, unit / 2), f"{p}: off by {error}, one device by {of_one}"
