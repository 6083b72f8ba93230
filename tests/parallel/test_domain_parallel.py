"""Modules that take plain tensors and run on shards: results and gradients are those of the module itself."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
import warnings
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from seeded import seeded
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import shardtensor
from shardtensor import RanksDiffer, ShardTensor
from shardtensor.parallel import DomainParallel, domain_parallel
from shardtensor.testing import count_communication, run_distributed, run_expecting_errors, shard, shared_mesh

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Sample:
    maps: list[Tensor]
    mask: Tensor | None = None
    title: str = ""


class Decoder(nn.Module):
    """Layers of all kinds: on shards, with a plain time step and prompt, after a pooling."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.time = nn.Linear(3, 4)
        self.last = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, latents, time, *, scale=None):
        x = F.silu(self.norm(self.first(latents))) + self.time(time)[:, :, None, None]
        x = F.interpolate(self.last(x), scale_factor=2.0)
        return x if scale is None else x * scale


def values(*shapes):
    torch.manual_seed(1)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def decoder():
    torch.manual_seed(0)
    return Decoder().double()


def compare(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def trained(shape, layout, options, sizes):
    mesh = shared_mesh(shape)
    module, twin = decoder(), decoder()
    assert (
        parallelize_module(module, mesh, DomainParallel(inputs=layout, outputs=(Replicate(),) * mesh.ndim, **options))
        is module
    )
    plain = [t.requires_grad_() for t in values((2, 2, 6, 11), (2, 3), (2, 2, 12, 22))]
    seen = []
    module.first.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    result = module(plain[0], plain[1], scale=plain[2])
    assert type(result) is Tensor and seen[0].shard_sizes == sizes
    twins = [t.detach().clone().requires_grad_() for t in plain]
    expected = twin(twins[0], twins[1], scale=twins[2])
    compare(result, expected)
    (cotangent,) = values(result.shape)
    (result * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    for p, q in zip([*plain, *module.parameters()], [*twins, *twin.parameters()], strict=True):
        assert type(p.grad) is Tensor
        compare(p.grad, q.grad)
    return [t.grad for t in plain]


@pytest.mark.parametrize(
    ("shape", "layout", "options", "sizes"),
    [
        (2, Shard(3), {}, {0: (6, 5)}),
        (2, Shard(-1), {"shard_sizes": "even"}, {0: (6, 5)}),
        (3, Shard(3), {"align": 4}, {0: (4, 4, 3)}),
        (3, Shard(2), {}, {0: (2, 2, 2)}),
        (3, {"latents": Shard(3)}, {"shard_sizes": {0: (7, 0, 4)}}, {0: (7, 0, 4)}),
        (2, [Shard(3), Replicate()], {"shard_sizes": {-1: (2, 9)}}, {0: (2, 9)}),
        ((2, 2), (Shard(2), Shard(3)), {"align": {1: 8}}, {0: (3, 3), 1: (8, 3)}),
        ((2, 2), (Shard(0), Shard(3)), {}, {0: (1, 1), 1: (6, 5)}),
        ((2, 2), {"scale": (Replicate(), Shard(3)), "latents": (Shard(0), Shard(3))}, {}, {0: (1, 1), 1: (6, 5)}),
    ],
)
def test_training_with_plain_inputs_and_outputs(shape, layout, options, sizes):
    ranks = shape if isinstance(shape, int) else shape[0] * shape[1]
    first, *others = run_distributed(trained, ranks, shape, layout, options, sizes)
    for other in others:
        assert all(map(torch.equal, first, other))


class Nested(nn.Module):
    """Takes and returns containers."""

    def forward(self, sample, *more, **named):
        maps = [m * 2 for m in sample.maps]
        mask = None if sample.mask is None else ~sample.mask
        moved = tuple(F.avg_pool2d(m, 3, 1, 1) for m in more)
        table = {key: value + 1 for key, value in named["table"].items()}
        return Sample(maps, mask, sample.title), moved, OrderedDict(table), Pair(maps[0].sum(), named["text"])


@on_ranks(2)
def test_tensors_in_containers():
    mesh = shared_mesh(2)
    a, b, c, step = values((1, 2, 3, 8), (1, 2, 3, 5), (1, 2, 4, 4), (3,))
    mask = a > 0
    table = MappingProxyType({"c": c, "step": step})
    expected = Nested()(Sample([a, b], mask, "t"), a, c, table=table, text="x")

    def run(**options):
        module = parallelize_module(Nested(), mesh, DomainParallel(**options))
        return module(Sample([a, b], mask, "t"), a, c, table=table, text="x")

    one, moved, found, pair = run(inputs=Shard(3), outputs=Replicate())
    assert type(one) is Sample and one.title == "t" and type(found) is OrderedDict and type(pair) is Pair
    tensors = [*one.maps, one.mask, *moved, *found.values(), pair.first]
    assert all(type(t) is Tensor for t in tensors) and pair.second == "x"
    wanted = [*expected[0].maps, expected[0].mask, *expected[1], *expected[2].values(), expected[3].first]
    for t, u in zip(tensors, wanted, strict=True):
        compare(t, u)

    layouts = {
        "sample": {"maps": [None, Shard(2)], "mask": Shard(3)},
        "more": [None, Shard(3)],
        "table": {"c": Shard(2)},
    }
    one, moved, found, pair = run(inputs=layouts, outputs=[{"maps": [Shard(1)]}, None, {"c": Shard(0)}])
    kinds = [(type(t), getattr(t, "placements", None)) for t in (*one.maps, one.mask, *moved, *found.values())]
    sharded = [(ShardTensor, (Shard(d),)) for d in (1, 2, 3, 3, 0)]
    plain = (Tensor, None)
    assert kinds == [*sharded[:3], plain, *sharded[3:], plain]
    assert type(pair.first) is Tensor
    for t, u in zip([*one.maps, one.mask, moved[1], found["c"]], [*wanted[:3], *wanted[4:6]], strict=True):
        compare(t.full_tensor(), u)


@on_ranks(2)
def test_outputs():
    mesh = shared_mesh(2)
    (x,) = values((2, 3, 7))
    cases = [
        ({"outputs": Shard(2)}, ShardTensor, (2, 3, 7)),
        ({"outputs": Shard(2), "use_local_output": True}, Tensor, (2, 3, 4 - 1 * mesh.get_local_rank())),
        ({"outputs": Replicate(), "use_local_output": False}, ShardTensor, (2, 3, 7)),
        ({"outputs": None}, ShardTensor, (2, 3, 7)),
    ]
    for options, kind, shape in cases:
        module = parallelize_module(nn.Tanh(), mesh, DomainParallel(inputs=Shard(2), **options))
        for _ in range(3):  # in which the ranks compare their inputs
            module(x)
        with count_communication() as counted:
            y = module(x)
        assert type(y) is kind and y.shape == shape
        assert bool(counted.collectives) == (options["outputs"] == Replicate())
        expected = x.tanh() if kind is ShardTensor else x.tanh().chunk(2, 2)[mesh.get_local_rank()]
        compare(y.full_tensor() if kind is ShardTensor else y, expected)
    # What the module returns may be plain, too.
    y = parallelize_module(nn.Tanh(), mesh, DomainParallel(inputs=None, outputs=Shard(1)))(x)
    assert y.shard_sizes == {0: (2, 1)}
    compare(y.full_tensor(), x.tanh())


@on_ranks(2)
def test_inputs_that_are_distributed_already():
    mesh = shared_mesh(2)
    (x,) = values((2, 3, 7))
    uneven = {0: (2, 5)}
    for options, sizes in (({}, (2, 5)), ({"shard_sizes": "even"}, (4, 3)), ({"align": 3}, (3, 4))):
        module = parallelize_module(nn.Tanh(), mesh, DomainParallel(inputs=Shard(2), outputs=None, **options))
        y = module(shard(x, mesh, [Shard(2)], uneven))
        assert y.shard_sizes == {0: sizes}
        compare(y.full_tensor(), x.tanh())
        given = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        y = module(given)
        compare(y.full_tensor(), x.tanh())
        y.square().sum().backward()
        assert type(given.grad) is DTensor and given.grad.placements == (Shard(0),)
        compare(given.grad.full_tensor(), 2 * x.tanh() * (1 - x.tanh() ** 2))


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Conv2d(2, 3, 4, stride=4)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(3, 3, 4, stride=4), nn.Conv2d(3, 2, 3, padding=1))

    def forward(self, x):
        return self.decoder(self.encoder(x) * 2)


@on_ranks(3)
def test_a_plan_of_submodules():
    mesh = shared_mesh(3)
    torch.manual_seed(0)
    module = Autoencoder().double()
    twin = copy.deepcopy(module)
    plan: dict[str, Any] = {
        "encoder": DomainParallel(inputs=Shard(2), outputs=Shard(2), align=4),
        "decoder": DomainParallel(inputs=Shard(2), outputs=Replicate()),
    }
    parallelize_module(module, mesh, plan)
    (x,) = values((1, 2, 28, 4))
    for _ in range(3):  # in which the ranks compare their inputs
        module.encoder(x)
    with count_communication() as counted:
        assert module.encoder(x).shard_sizes == {0: (2, 2, 3)}
    assert not counted.collectives and not counted.messages  # the encoder's windows end where shards do
    y = module(x)
    compare(y, twin(x))
    y.square().mean().backward()
    twin(x).square().mean().backward()
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        compare(p.grad, q.grad)
    with torch.inference_mode():
        compare(module(x), twin(x))


def pipeline():
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    blocks = {"layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = AutoencoderKL(latent_channels=4, sample_size=32, **blocks, **kinds).double().eval()
    twin = copy.deepcopy(vae)
    mesh = shared_mesh(2, "domain")
    parallelize_module(vae.decoder, mesh["domain"], DomainParallel(inputs=Shard(3), outputs=Replicate()))
    parallelize_module(vae.encoder, mesh["domain"], DomainParallel(inputs=Shard(3), outputs=Replicate(), align=2))
    latents, image = values((1, 4, 6, 11), (1, 3, 16, 30))
    twins = [t.clone().requires_grad_() for t in (latents, image)]
    latents.requires_grad_(), image.requires_grad_()
    decoded, encoded = vae.decode(latents), vae.encode(image).latent_dist.mean
    assert type(decoded.sample) is Tensor and type(encoded) is Tensor
    expected = twin.decode(twins[0]).sample, twin.encode(twins[1]).latent_dist.mean
    for found, wanted in zip((decoded.sample, encoded), expected, strict=True):
        compare(found, wanted)
        found.square().mean().backward()
        wanted.square().mean().backward()
    for p, q in zip([latents, image, *vae.parameters()], [*twins, *twin.parameters()], strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-10)


def test_an_autoencoder_of_diffusers():
    pytest.importorskip("diffusers")
    run_distributed(pipeline, 2, timeout=120.0)


def pyramid():
    from diffusers.models.autoencoders.vae import DecoderOutput

    class Wrapped(nn.Module):
        def forward(self, x):
            return DecoderOutput(sample=x * 2)

    (x,) = values((1, 2, 3, 5))
    out = parallelize_module(Wrapped(), shared_mesh(2), DomainParallel(inputs=Shard(3), outputs=Replicate()))(x)
    assert type(out) is DecoderOutput and out["sample"] is out.sample and torch.equal(out[0], x * 2)
    named = DomainParallel(inputs=Shard(3), outputs={"sample": Shard(2)})
    out = parallelize_module(Wrapped(), shared_mesh(2), named)(x)
    assert type(out) is DecoderOutput and out.sample.placements == (Shard(2),)


def test_outputs_of_diffusers():
    pytest.importorskip("diffusers")
    run_distributed(pyramid, 2)


class Spectral(nn.Module):
    """Writes to a tensor that it makes, as spectral convolutions do; and may fail."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))

    def forward(self, x, fails=False):
        out = torch.zeros(x.shape[0], 3, *x.shape[2:], dtype=x.dtype)
        out[:, :, :, :4] = torch.einsum("bihw,io->bohw", x[:, :, :, :4], self.weight)
        if fails:
            raise ArithmeticError("as asked")
        return out


@on_ranks(2)
def test_tensors_that_the_module_makes():
    mesh = shared_mesh(2)
    module, twin = Spectral(), Spectral()
    parallelize_module(module, mesh, DomainParallel(inputs=Shard(2), outputs=Replicate()))
    (x,) = values((2, 2, 5, 6))
    for _ in range(2):
        compare(module(x), twin(x))
        with pytest.raises(ArithmeticError, match="as asked"):
            module(x, fails=True)
    module(x).sum().backward()
    twin(x).sum().backward()
    compare(module.weight.grad, twin.weight.grad)


class Classifier(nn.Module):
    """Two convolutions on shards, and two linear layers on what has been pooled, of which the first has all features
    in one dim."""

    def __init__(self, features):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.wide, self.last = nn.Linear(2, features), nn.Linear(features, features)

    def forward(self, x):
        pooled = self.second(self.first(x)).mean((2, 3))
        return self.last(self.wide(pooled).tanh())


def warned_of(call):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in seen if "alike" in str(warning.message)]


@on_ranks(3)
def test_a_first_call_in_which_ranks_do_the_same_work():
    x, mesh = torch.randn(1, 2, 6, 6, generator=seeded(0)), shared_mesh(3)
    style = DomainParallel(inputs=Shard(2), outputs=Replicate())
    module = parallelize_module(Classifier(features=100), mesh, style)
    (text,) = warned_of(lambda: module(x))
    # Convolutions: 36 pixels of 4 x 2 x 9 numbers, and of 4 x 2 x 4; linear layers: 10,000 numbers, and 200, with which
    # ranks multiply what each has pooled.
    repeated = 10_000 / (10_200 + 36 * 4 * 2 * (9 + 4))
    assert text.startswith("DomainParallel, Classifier.forward(): all 3 ranks along mesh dim 0 do "), text
    assert f"do {repeated:.0%} of the work" in text and f"each has {1 + 2 * repeated:.2f} times its part" in text
    assert "is last, whose input (1, 100) is not sharded along mesh dim 0" in text and "explain --share" in text
    assert not warned_of(lambda: module(x)) and not any(m._forward_hooks for m in module.children())
    few = parallelize_module(Classifier(features=5), mesh, style)
    assert not warned_of(lambda: few(x))  # a hundredth of the work
    compiled = Classifier(features=100)
    compiled.last.compile(backend="eager")
    assert not warned_of(lambda: parallelize_module(compiled, mesh, style)(x))


@on_ranks(2, timeout=120.0)
def test_compiled_forward():
    torch.compiler.reset()
    (x,) = values((2, 3, 7))
    module = nn.Sequential(nn.Linear(7, 4), nn.Tanh()).double()
    expected = module(x)
    parallelize_module(module, shared_mesh(2), DomainParallel(inputs=Shard(1), outputs=Replicate()))
    module.forward = torch.compile(module.forward, backend="aot_eager", fullgraph=True)
    compare(module(x), expected)


# -- errors -----------------------------------------------------------------------------------------------------------


def misused(case):
    mesh = shared_mesh(2)
    x, y = values((2, 3, 7), (2, 3, 9))

    def tanh(inputs, **options):
        return parallelize_module(nn.Tanh(), mesh, DomainParallel(inputs=inputs, outputs=Replicate(), **options))

    {
        "placements": lambda: tanh(3),
        "tuple": lambda: tanh((Shard(0), None)),
        "partial": lambda: tanh(Partial()),
        "align": lambda: tanh(Shard(1), align=0),
        "both": lambda: tanh(Shard(1), align=2, shard_sizes="even"),
        "mesh dim": lambda: tanh(Shard(1), align={1: 2}),
        "mesh": lambda: tanh((Shard(1), Shard(2))),
        "name": lambda: tanh({"x": Shard(1)}),
        "position": lambda: tanh([None, Shard(1)]),
        "dim": lambda: tanh(Shard(3))(x),
        "sizes": lambda: tanh(Shard(2), shard_sizes={0: (4, 4)})(x),
        "part": lambda: tanh({"input": {"y": Shard(1)}})(x),
        "call": lambda: tanh(Shard(1))(x, input=y),
        "methods": lambda: tanh(Shard(1), methods="forward"),
        "method": lambda: tanh(Shard(1), methods=("forward", "decode")),
        "method's name": lambda: tanh({"input": Shard(1)}, methods=("forward", "extra_repr")),
    }[case]()


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("placements", TypeError, "inputs=3: a placement"),
        ("tuple", TypeError, "a list of layouts by position"),
        ("partial", ValueError, "only Shard and Replicate"),
        ("align", ValueError, "align=0: a positive integer"),
        ("both", ValueError, "give only one of them"),
        ("mesh dim", ValueError, "align={1: 2} names mesh dims beyond those of the mesh (2,)"),
        ("mesh", ValueError, "has 2 placements, and the mesh (2,) has 1 dims"),
        ("name", ValueError, "inputs names 'x', which Tanh.forward(input) does not take"),
        ("position", ValueError, "inputs has 2 layouts, and Tanh.forward(input) takes fewer"),
        ("dim", ValueError, "no tensor has the dims that (Shard(dim=3),) shards, only inputs['input'] (2, 3, 7)"),
        ("sizes", ValueError, "inputs['input'] (2, 3, 7): shard sizes (4, 4) of mesh dim 0 add up to 8"),
        ("part", ValueError, "inputs['input'], a Tensor, has no y"),
        ("call", TypeError, "multiple values for argument 'input'"),
        ("methods", TypeError, "methods='forward': a tuple of names of methods"),
        ("method", ValueError, "methods names 'decode', which Tanh does not have"),
        ("method's name", ValueError, "inputs names 'input', which Tanh.extra_repr() does not take"),
    ],
)
def test_errors(case, kind, text):
    for error in run_expecting_errors(misused, 2, case):
        assert isinstance(error, kind) and text in str(error), error


# -- values that differ between ranks ----------------------------------------------------------------------------------


class Denoiser(nn.Module):
    """Not a forward pass of a single tensor: an image, a step, and what else there is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, sample, step, extra=()):
        return self.last(self.first(sample) * step)


def inputs_of_rank(rank, what="nothing"):
    torch.manual_seed(5)
    sample, step, mask = torch.randn(1, 2, 9, 4), torch.tensor(3), torch.ones(9, 9)
    if rank == 1 and what == "noise":
        sample = torch.randn(1, 2, 9, 4)
    elif rank == 1 and what == "step":
        step = torch.tensor(4)
    elif rank == 1 and what == "mask":
        mask[3, 4] = 0
    elif rank == 1 and what == "shape":
        mask = mask[1:]
    elif rank == 1 and what == "rounding":
        sample = sample * (1 + 1e-6)
    return sample, step, {"masks": [mask]}


def denoiser(mesh, **options):
    return parallelize_module(Denoiser(), mesh, DomainParallel(inputs=Shard(2), outputs=Replicate(), **options))


def noise_differs(what, calls, mode):
    mesh = shared_mesh(2)
    module = denoiser(mesh)
    with mode():
        for _ in range(calls):
            module(*inputs_of_rank(mesh.get_local_rank()))
        module(*inputs_of_rank(mesh.get_local_rank(), what))


NAMED = {
    "noise": r"inputs\['sample'\], one of the {}, is \(1, 2, 9, 4\) with the digest \w+ on rank 0, .* on rank 1",
    "step": r"inputs\['step'\], one of the {}, is \(\) with the digest \w+ on rank 0, \(\) with the digest",
    "mask": r"inputs\['extra'\]\['masks'\]\[0\], one of the {}, is \(9, 9\) with the digest",
    "shape": r"{}: .*inputs\['extra'\]\['masks'\]\[0\] \(9, 9\) float32 on rank 0, .*\(8, 9\) float32 on rank 1",
}


@pytest.mark.parametrize("mode", (torch.enable_grad, torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("what", NAMED)
def test_inputs_that_differ_are_named_on_every_rank(what, mode):
    text = NAMED[what].format(r"plain inputs of Denoiser \(DomainParallel\)")
    for error in run_expecting_errors(noise_differs, 2, what, 0, mode):
        with pytest.raises(RanksDiffer, match=text):
            raise error
        assert what == "shape" or "torch.manual_seed(seed) on all ranks" in str(error)


def in_debug_mode(what, calls, mode):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDTENSOR_DEBUG", "1")
        noise_differs(what, calls, mode)


def test_first_calls_are_compared_and_all_of_them_in_debug_mode():
    for calls in (1, 2):
        for error in run_expecting_errors(noise_differs, 2, "noise", calls, torch.no_grad):
            assert "plain inputs of Denoiser" in str(error)
    run_distributed(noise_differs, 2, "noise", 3, torch.no_grad)
    for error in run_expecting_errors(in_debug_mode, 2, "noise", 5, torch.no_grad):
        assert "plain inputs of Denoiser" in str(error)


def own_weights(mode):
    mesh = shared_mesh(2)
    module = denoiser(mesh)
    with torch.no_grad():
        module.last.bias[1] += mesh.get_local_rank()
    with mode():
        module(*inputs_of_rank(0))


@pytest.mark.parametrize("mode", (torch.enable_grad, torch.no_grad, torch.inference_mode))
def test_weights_that_differ_are_told_where_no_number_is_read(mode):
    for error in run_expecting_errors(own_weights, 2, mode):
        with pytest.raises(RuntimeError, match=r"the plain parameter of conv2d .* is \(2,\) with the digest"):
            raise error


@on_ranks(2)
def test_equal_inputs_pass():
    mesh = shared_mesh(2)
    rank = mesh.get_local_rank()
    torch.manual_seed(rank)
    module, twin = denoiser(mesh), Denoiser()
    generator = seeded(7)
    for _ in range(5):
        sample = torch.randn(1, 2, 9, 4, generator=generator)
        compare(module(sample, torch.tensor(2)), twin(sample, torch.tensor(2)))
    module(*inputs_of_rank(rank, "rounding"))
    # What has no layout may differ.
    style = DomainParallel(inputs={"sample": Shard(2)}, outputs=Replicate())
    module = parallelize_module(Denoiser(), mesh, style)
    compare(module(sample, torch.tensor(2), torch.randn(3)), twin(sample, torch.tensor(2)))


# -- methods ----------------------------------------------------------------------------------------------------------


class Coder(nn.Module):
    """As those of diffusers: pipelines call ``encode`` and ``decode``, which training calls through ``forward``."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Conv2d(2, 3, 3, stride=2, padding=1)
        self.decoder = nn.ModuleList([nn.Upsample(scale_factor=2), nn.Conv2d(3, 2, 3, padding=1)])

    def encode(self, x):
        return SimpleNamespace(codes=self.encoder(x), kind="codes")

    def decode(self, z, scale=1.0):
        for layer in self.decoder:
            z = layer(z)
        return z * scale

    def forward(self, x):
        y = self.decode(self.encode(x).codes)
        return y, type(y)


STYLE = {"inputs": Shard(3), "outputs": Replicate()}


def coder():
    torch.manual_seed(0)
    return Coder().double()


@on_ranks(2)
def test_methods():
    mesh = shared_mesh(2)
    (x,) = values((1, 2, 6, 12))
    vae, twin = coder(), coder()
    parallelize_module(vae, mesh, DomainParallel(**STYLE, methods=("forward", "encode")))
    parallelize_module(vae, mesh, DomainParallel(inputs={"z": Shard(3)}, outputs=Replicate(), methods=("decode",)))
    codes, expected = vae.encode(x), twin.encode(x)
    assert (type(codes), codes.kind, type(codes.codes)) == (SimpleNamespace, "codes", Tensor)
    compare(codes.codes, expected.codes)
    decoded = vae.decode(codes.codes, scale=2), twin.decode(expected.codes, scale=2)
    for found, wanted in (decoded, (vae(x)[0], twin(x)[0])):
        assert type(found) is Tensor
        compare(found, wanted)
        found.square().sum().backward()
        wanted.square().sum().backward()
    for p, q in zip(vae.parameters(), twin.parameters(), strict=True):
        compare(p.grad, q.grad)
    assert vae(x)[1] is ShardTensor, "what a method with a style calls goes on with shards"
    with count_communication() as counted:
        vae(x)
    with count_communication() as alone:
        vae.encode(x), vae.decode(codes.codes)
    assert counted.messages < alone.messages  # only the last result is gathered
    with torch.autocast(x.device.type, torch.bfloat16):
        assert vae.float().decode(codes.codes.float()).dtype is torch.bfloat16
    vae.double()
    with pytest.raises(RuntimeError, match="does not fit 2 input channels"):
        vae.decode(x)  # other channels; what was entered is left
    compare(vae.decode(codes.codes), twin.decode(expected.codes))
    assert type(torch.zeros(3)) is Tensor


@on_ranks(2)
def test_copies_of_modules_with_methods():
    """A copy's methods are its own; names of parameters are the module's; a part may be recomputed in backward."""
    vae, twin = coder(), coder()
    parallelize_module(vae, shared_mesh(2), DomainParallel(**STYLE, methods=("encode", "decode")))
    copied = copy.deepcopy(vae)
    nn.init.zeros_(copied.decoder[1].weight)
    nn.init.ones_(copied.decoder[1].bias)
    (codes,) = values((1, 3, 4, 6))
    assert copied.decode(codes).eq(1).all()
    compare(vae.decode(codes), twin.decode(codes))
    assert list(vae.state_dict()) == list(twin.state_dict())
    copied.load_state_dict(vae.state_dict())
    compare(copied.decode(codes), twin.decode(codes))
    for module in (vae, twin):
        checkpoint(module.decode, codes, use_reentrant=False).square().sum().backward()
    compare(vae.decoder[1].weight.grad, twin.decoder[1].weight.grad)


def diffusion():
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    blocks = {"layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = AutoencoderKL(latent_channels=4, sample_size=32, **blocks, **kinds).double().eval()
    twin = copy.deepcopy(vae)
    parallelize_module(vae, shared_mesh(2), DomainParallel(**STYLE, methods=("encode", "decode")))
    latents, images = values((2, 4, 6, 11), (2, 3, 16, 30))
    vae.enable_slicing()
    found, expected = vae.encode(images).latent_dist, twin.encode(images).latent_dist
    assert type(found.mean) is Tensor and type(found.std) is Tensor
    compare(found.sample(seeded(0)), expected.sample(seeded(0)))
    compare(vae.decode(latents, return_dict=False)[0], twin.decode(latents).sample)
    compare(vae(images).sample, twin(images).sample)


def test_methods_of_diffusers():
    pytest.importorskip("diffusers")
    run_distributed(diffusion, 2, timeout=120.0)


def called_otherwise(style, calls):
    vae = coder()
    parallelize_module(vae, shared_mesh(2), DomainParallel(**STYLE, **style))
    image, codes = values((1, 2, 6, 12), (1, 3, 4, 6))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for method in calls:
            getattr(vae, method)(codes if method == "decode" else image)
    return [str(warning.message) for warning in seen]


def test_a_warning_for_a_method_without_the_style():
    for texts in run_distributed(called_otherwise, 2, {}, ("decode", "decode", "encode")):
        assert len(texts) == 2
        assert "applied to Coder.forward(), but the program called Coder.decode(), which ran" in texts[0]
        assert 'DomainParallel(..., methods=("encode", "decode"))' in texts[0]
        assert "the program called Coder.encode()" in texts[1]
    for texts in run_distributed(called_otherwise, 2, {}, ("forward",)):
        assert len(texts) == 1 and "Call the module itself rather than its forward()" in texts[0]
    for style, calls in (({}, ("__call__", "decode")), ({"methods": ("decode",)}, ("encode", "decode", "forward"))):
        assert run_distributed(called_otherwise, 2, style, calls) == [[], []]


PROGRAM = """
import sys, torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from shardtensor.parallel import DomainParallel, domain_parallel

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
    def encode(self, x):
        return self.layer(x)
    def decode(self, x):
        return self.layer(x)
    def forward(self, x):
        return self.layer(x)

class Unused(Model):
    pass

class Otherwise(Model):
    pass

torch.distributed.init_process_group("gloo", init_method="file://{file}", rank=int(sys.argv[1]), world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
for module, styles, calls in (
    (Unused, [{{}}], ()),
    (Otherwise, [{{"methods": ("encode",)}}, {{"methods": ("forward",)}}], ("decode",)),
    (Model, [{{"methods": ("encode",)}}], ("decode", "encode")),
):
    model = module()
    for style in styles:
        parallelize_module(model, mesh, DomainParallel(inputs=Shard(0), outputs=Replicate(), **style))
    for method in calls:
        getattr(model, method)(torch.ones(4, 3))
{end}
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("end", "texts"),
    [
        (
            "",
            (
                "applied to Unused.forward(), which this program has not called. Every rank",
                "applied to Otherwise.encode() and Otherwise.forward(), which this program has not called, but "
                "Otherwise.decode().",
            ),
        ),
        pytest.param("raise ArithmeticError", (), marks=pytest.mark.slow),
    ],
)
def test_a_warning_at_the_end(tmp_path, end, texts):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(end=end, file=tmp_path / "store"))
    environment = {**os.environ, "PYTHONPATH": str(Path(shardtensor.__file__).parents[1])}
    processes = [
        subprocess.Popen([sys.executable, str(program), rank], stderr=subprocess.PIPE, text=True, env=environment)
        for rank in "01"
    ]
    for process in processes:
        _, said = process.communicate(timeout=120)
        assert (process.returncode != 0) == bool(end)
        assert said.count("DomainParallel was applied") == len(texts)
        assert all(text in " ".join(said.split()) for text in texts)


# -- the faster way ----------------------------------------------------------------------------------------------------


class Clock:
    """On which a call takes one time on shards, and another without."""

    def __init__(self, on_shards, without):
        self.seconds, self.now, self.began = (on_shards, without), 0.0, False

    def __call__(self, way):
        self.began = not self.began
        if not self.began:
            self.now += self.seconds[way._TRIED[len(way._times[way._key])]]
        return self.now


TRIED = [True, True, False, False]


@pytest.mark.parametrize("output", [Replicate(), Shard(2)])
@pytest.mark.parametrize(
    ("clocks", "grad", "after", "text"),
    [
        (((0.05, 0.02), (0.03, 0.03)), False, [*TRIED, False, False, False], "without shards: 50.0 ms on shards, 30.0"),
        (((0.02, 0.05), (0.03, 0.01)), False, [*TRIED, True, True, True], "on shards: 30.0 ms on shards, 50.0 ms"),
        (((0.02, 0.01), (0.2, 0.01)), False, [True] * 7, ""),
        (((0.05, 0.02), (0.03, 0.03)), True, [True] * 7, ""),
    ],
    ids=["without", "on shards", "long", "with gradients"],
)
@on_ranks(2)
def test_the_faster_way_is_kept_on_all_ranks(clocks, grad, after, text, output):
    mesh = shared_mesh(2)
    clock = Clock(*clocks[mesh.get_local_rank()])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU()).double()
    plain = copy.deepcopy(model)
    style = DomainParallel(inputs=Shard(2), outputs=output, when="auto")
    parallelize_module(model, mesh, style)
    sent, logged = [], []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logger = logging.getLogger("shardtensor")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    with torch.set_grad_enabled(grad), mock.patch.object(domain_parallel._FasterWay, "_now", lambda way: clock(way)):
        for shape in [(1, 2, 7, 6)] * 7 + [(1, 2, 5, 6)]:
            x = torch.randn(shape, dtype=torch.float64, generator=seeded(len(sent)))
            with count_communication() as counted:
                y = model(x)
            sent.append(counted.messages > 0)
            whole = y.full_tensor() if isinstance(y, DTensor) else y
            torch.testing.assert_close(whole, plain(x), rtol=1e-10, atol=1e-12)
            assert isinstance(y, ShardTensor) == output.is_shard()
    logger.removeHandler(handler)
    logger.setLevel(level)
    assert sent == [*after, True]  # inputs of another shape begin on shards
    assert [text in line for line in logged] == [True] * bool(text)


def test_errors_of_the_faster_way():
    with pytest.raises(ValueError, match="when='sometimes'"):
        DomainParallel(inputs=Shard(2), outputs=Replicate(), when="sometimes")
    with pytest.raises(ValueError, match="give one layout for all outputs"):
        DomainParallel(inputs=Shard(2), outputs=None, when="auto")


# -- inputs on another device ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_inputs_of_the_host(emulated):
    """Inputs on the CPU: each device gets its part; one that requires gradients gets them where it is."""
    mesh = shared_mesh(2)
    module = nn.Conv1d(2, 2, 3, padding=1)
    x = torch.randn(1, 2, 1 << 12, device="cpu", requires_grad=True)
    expected = copy.deepcopy(module).to("cpu")(x)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    parallelize_module(module, mesh, DomainParallel(inputs=Shard(2), outputs=Shard(2), when="auto"))
    with torch.no_grad():
        for _ in range(6):
            y = module(x)
    assert y.device.type == mesh.device_type and y.shard_sizes == {0: (1 << 11, 1 << 11)}
    torch.testing.assert_close(y.full_tensor().cpu(), expected)
    module(x).square().sum().backward()
    assert x.grad.device.type == "cpu"
    torch.testing.assert_close(x.grad, gradient)
