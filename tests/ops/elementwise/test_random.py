"""Random numbers of shards: replicas equal, shards independent, repeatable, and those of one device where whole."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from copied import Copied
from on_ranks import on_ranks
from seeded import seeded
from spatial_cases import data
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from shardtensor.ops.elementwise.random import shard_seed
from shardtensor.testing import (
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

# Each draws from a tensor of positive numbers.
DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "native dropout": lambda x: torch.native_dropout(x, 0.25, True)[0],
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "rand_like": lambda x: torch.rand_like(x),
    "rand_like of another dtype": lambda x: torch.rand_like(x, dtype=torch.float32),
    "randn_like": lambda x: torch.randn_like(x),
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "randint_like from": lambda x: torch.randint_like(x, 1000, 2000, dtype=torch.int64),
    "normal_": lambda x: x.normal_(2.0, 3.0),
    "uniform_": lambda x: x.uniform_(2, 3),
    "exponential_": lambda x: x.exponential_(2.0),
    "geometric_": lambda x: x.geometric_(0.01),
    "cauchy_": lambda x: x.cauchy_(),
    "log_normal_": lambda x: x.log_normal_(),
    "random_": lambda x: x.random_(),
    "random_ to": lambda x: x.random_(1000),
    "random_ from": lambda x: x.random_(-1000, 1000),
    "bernoulli_": lambda x: x.bernoulli_(0.5),
    "bernoulli": lambda x: torch.bernoulli(x / (1 + x)),
    "bernoulli of one number": lambda x: torch.bernoulli(x, 0.5),
    "bernoulli_ of plain ones": lambda x: x.bernoulli_(torch.full((12, 6), 0.5)),
    "normal of means": lambda x: torch.normal(x, 2.0),
    "normal of deviations": lambda x: torch.normal(1.0, x),
    "normal of both": lambda x: torch.normal(x, x),
    "poisson": lambda x: torch.poisson(x * 100),
    "binomial": lambda x: torch.binomial((x * 50).round(), x.sigmoid()),
    "gamma": lambda x: torch.distributions.Gamma(x, 2.0).sample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x).sample(),
    "multinomial": lambda x: x.multinomial(5),
    "multinomial replaced": lambda x: x.multinomial(50, replacement=True),
    "init": lambda x: nn.init.trunc_normal_(x),
    "kaiming": lambda x: nn.init.kaiming_uniform_(x),
    "generator": lambda x: x.uniform_(generator=seeded(3)),
    "binomial, generator": lambda x: torch.binomial((x * 50).round(), x.sigmoid(), generator=seeded(3)),
    "poisson, generator": lambda x: torch.poisson(x * 100, generator=seeded(3)),
    "multinomial, generator": lambda x: x.multinomial(5, generator=seeded(3)),
    "normal, generator": lambda x: torch.normal(x, 2.0, generator=seeded(3)),
}
if "generator" in torch.ops.aten.rand_like.overloads():
    DRAWS["rand_like, generator"] = lambda x: torch.rand_like(x, generator=seeded(3))
    DRAWS["randint_like, generator"] = lambda x: torch.randint_like(x, 1000, generator=seeded(3))


def source(placements, sizes=None, mesh_shape=2):
    return shard(data(12, 6).abs() + 0.1, shared_mesh(mesh_shape), placements, sizes)


@on_ranks(2)
def test_whole_tensors_are_drawn_as_on_one_device():
    """Replicated: one device's numbers, whatever was drawn before."""
    for name, draw in DRAWS.items():
        torch.manual_seed(1)
        expected = draw(data(12, 6).abs() + 0.1)
        after = torch.rand(())
        for x in (source([Replicate()]), source([Partial()]) if name == "rand_like" else source([Replicate()])):
            torch.manual_seed(1)
            result = draw(x)
            assert torch.equal(result.to_local(), expected) and torch.equal(torch.rand(()), after), name


def sharded_draws():
    found = {}
    for name, draw in DRAWS.items():
        results = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            with count_communication() as traffic:
                y = draw(source([Replicate(), Shard(0)], {1: (5, 7)}, (2, 2)))
            # These ask whether all values are in range.
            assert not traffic.collectives or name in ("init", "gamma", "dirichlet"), name
            results.append(y.to_local())
            found[name, seed] = y.to_local(), y.shard_sizes, torch.rand(())
        assert torch.equal(results[0], results[1]), name
        if "generator" not in name:
            assert not torch.equal(results[0], results[2]), name
    return found


def test_replicas_draw_alike_and_shards_do_not():
    ranks = run_distributed(sharded_draws, 4, timeout=120)
    for key in ranks[0]:
        locals_ = [found[key][0] for found in ranks]
        assert all(found[key][1] == {1: (5, 7)} for found in ranks), key
        assert torch.equal(locals_[0], locals_[2]) and torch.equal(locals_[1], locals_[3]), key
        assert not torch.equal(locals_[0], locals_[1][:5]), key
        # What the ranks draw for plain tensors afterwards is still the same.
        assert len({found[key][2].item() for found in ranks}) == 1, key


@on_ranks(2)
def test_dropout_of_devices_other_than_the_cpu_is_a_draw_and_a_product():
    x = source([Shard(0)], {0: (5, 7)})
    torch.native_dropout(x, 0.25, True)
    with Copied() as seen:
        torch.native_dropout(x, 0.25, True)
    of_the_seed = "aten::randint", "aten::item", "aten::_local_scalar_dense"
    names = [name for name in seen.order if name not in (*of_the_seed, "aten::empty_like")]
    assert names == ["aten::bernoulli_", "aten::native_dropout_backward"]


@on_ranks(3)
def test_distributions_and_independence():
    torch.manual_seed(0)
    x = shard(torch.ones(300, 400), shared_mesh(3), [Shard(0)], {0: (100, 0, 200)})
    y = F.dropout(x, 0.25)
    local = y.to_local()
    values = set(local.unique().tolist())
    assert values <= {0.0, torch.tensor(1 / 0.75).item()}
    normal = torch.randn_like(x).full_tensor()
    pieces = normal[:100], normal[100:200], normal[200:]
    correlations = [(a * b).mean().abs().item() for a, b in ((pieces[0], pieces[1]), (pieces[0], pieces[2]))]
    dropped = (y.full_tensor() == 0).float().mean().item()
    assert abs(dropped - 0.25) < 0.006 and abs(normal.mean()) < 0.015 and abs(normal.std() - 1) < 0.01
    assert max(correlations) < 0.025  # 5 standard deviations


@on_ranks(3)
def test_draws_along_sharded_rows():
    """Rows that are cut: of a Dirichlet draw they sum to one, and multinomial exchanges them."""
    torch.manual_seed(0)
    x = shard(torch.full((400, 6), 2.0), shared_mesh(3), [Shard(1)], {0: (3, 0, 3)})
    y = torch._sample_dirichlet(x)
    assert y.shard_sizes == {0: (3, 0, 3)}
    with count_communication() as traffic:
        drawn = x.multinomial(2)
    assert dict(traffic.collectives) == {"all_to_all": 1}
    assert drawn.shape == (400, 2) and drawn.placements == (Shard(0),)
    y, drawn = y.full_tensor(), drawn.full_tensor()
    assert torch.allclose(y.sum(1), torch.ones(400)) and (y > 0).all()
    assert (y.mean(0) - 1 / 6).abs().max() < 0.03 and abs(y.var(0).mean() - 5 / 36 / 13) < 0.002
    assert (drawn[:, 0] != drawn[:, 1]).all() and set(drawn.flatten().tolist()) == set(range(6))


@on_ranks(3)
def test_the_gradient_of_dropout_has_its_mask():
    for layer in (nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.Dropout1d(0.5), nn.Dropout(1.0), nn.Dropout(0.0)):
        x = shard(data(6, 5, 4), shared_mesh(3), [Shard(2)], {0: (3, 0, 1)}, requires_grad=True)
        torch.manual_seed(4)
        y = layer(x)
        (y * data(6, 5, 4, seed=1)).sum().backward()
        assert x.grad.shard_sizes == x.shard_sizes
        mask = y.full_tensor() != 0
        grad = x.grad.full_tensor() / data(6, 5, 4, seed=1)
        if isinstance(layer, nn.AlphaDropout):
            continue
        mask = mask.double()
        scale = 1 / (1 - layer.p) if layer.p < 1 else 0.0
        assert torch.allclose(grad, mask * scale) and torch.allclose(y.full_tensor(), data(6, 5, 4) * mask * scale)
        if isinstance(layer, nn.Dropout1d):  # whole channels, on all shards alike
            assert torch.equal(mask.amin(2), mask.amax(2)) and 0 < mask.mean() < 1
        layer.eval()
        assert torch.equal(layer(x).full_tensor(), x.full_tensor())
    # Recomputed, the mask is the same.
    x = shard(data(6, 5, 4), shared_mesh(3), [Shard(2)], {0: (3, 0, 1)}, requires_grad=True)
    y = checkpoint(lambda t: F.dropout(t.sin(), 0.5), x, use_reentrant=False)
    F.dropout(x.detach(), 0.5)
    y.sum().backward()
    kept = y.full_tensor() != 0
    assert torch.allclose(x.grad.full_tensor(), 2 * data(6, 5, 4).cos() * kept)


def feature_noise():
    """dropout2d: what is dropped is dropped on all shards of a 2-D mesh, batch shards apart."""
    torch.manual_seed(0)
    x = shard(torch.ones(4, 16, 3, 5), shared_mesh((2, 2)), [Shard(0), Shard(2)], {0: (1, 3), 1: (1, 2)})
    mask = F.dropout2d(x, 0.5).full_tensor() != 0
    flat = mask.flatten(2)
    assert torch.equal(flat.any(2), flat.all(2))
    return mask[:, :, 0, 0]


def test_whole_channels_are_dropped_on_every_shard():
    masks = run_distributed(feature_noise, 4)
    assert all(torch.equal(masks[0], m) for m in masks)
    assert masks[0].any(1).all() and not masks[0].all(1).any()  # 2 ** -16 each


def disagree(replicated):
    os.environ["SHARDTENSOR_DEBUG"] = "1"
    try:
        torch.manual_seed(3)
        torch.rand_like(source([Shard(0)]))
        torch.manual_seed(dist.get_rank())
        torch.rand_like(source([Replicate()] if replicated else [Shard(0)]))
    finally:
        del os.environ["SHARDTENSOR_DEBUG"]


@pytest.mark.parametrize("replicated", [True, False])
def test_debugging_tells_differing_seeds_on_every_rank(replicated):
    errors = run_expecting_errors(disagree, 2, replicated)
    assert len(errors) == 2
    for raised in errors:
        text = r"random numbers from the state (\w+) for .* on rank 0, .* from the state (?!\1)\w+ .*torch.manual_seed"
        with pytest.raises(RuntimeError, match=text):
            raise raised


def wrong():
    shard(torch.ones(8), shared_mesh(2), [Shard(0)], {0: (5, 3)}).multinomial(2)


def test_a_row_that_no_other_dim_can_share_is_refused():
    for raised in run_expecting_errors(wrong, 2):
        with pytest.raises(NotImplementedError, match=r"multinomial.*tensor dim 0 must be unsharded.*\[5, 3\].*Remedy"):
            raise raised


@on_ranks(2)
def test_a_partial_is_drawn_once():
    torch.manual_seed(1)
    expected = torch.empty(12, 6, dtype=torch.float64).normal_()
    x = source([Partial()])
    torch.manual_seed(1)
    x.normal_()
    assert x.placements == (Partial(),) and torch.equal(x.full_tensor(), expected)


def test_seeds_of_shards_are_far_apart():
    seeds = {shard_seed(drawn, (i, j)) for drawn in range(20) for i in range(4) for j in range(4)}
    assert len(seeds) == 320 and all(0 <= seed < 2**63 for seed in seeds)
    differences = [(shard_seed(1, (i,)) ^ shard_seed(1, (i + 1,))).bit_count() for i in range(100)]
    assert min(differences) > 12
