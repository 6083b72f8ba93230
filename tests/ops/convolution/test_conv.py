"""Convolution against the unsharded one: values, gradients, messages, memory, errors, and every entry point to it."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from alike import raises_alike
from copied import Copied
from hypothesis import example, given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks
from spatial_cases import IN_WAYS, WAYS, computing, data
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardtensor
from shardtensor import ShardTensor, UnsupportedSharding
from shardtensor._compat import DisableTorchFunction
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    shard,
    shared_mesh,
    simulate_ranks,
)

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
FUNCTION = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def check(cases, way="by their size"):
    """Run cases ``(input shape, conv arguments, mesh shape, dims per mesh dim, sizes)`` on every rank."""
    for shape, arguments, mesh_shape, dims, sizes in cases:
        torch.manual_seed(0)
        n = len(arguments["kernel_size"])
        conv = CONV[n](shape[-n - 1], **arguments).double()
        x = torch.randn(shape, dtype=torch.float64)
        placements = [Replicate() if d is None else Shard(d) for d in dims]
        with computing(way):
            assert_matches_unsharded(conv, x, mesh_shape=mesh_shape, placements=placements, shard_sizes=sizes)


def valid(shape, arguments):
    """Whether torch accepts the convolution on the whole tensor."""
    n = len(arguments["kernel_size"])
    try:
        CONV[n](shape[-n - 1], **arguments, device="meta")(torch.empty(shape, device="meta"))
    except (RuntimeError, ValueError):
        return False
    # Meta convolutions do not check the kernel against the input.
    pads = arguments["padding"]
    if isinstance(pads, str):
        return pads == "same" or all(
            (k - 1) * d + 1 <= size for k, d, size in zip(arguments["kernel_size"], arguments["dilation"], shape[-n:])
        )
    return all(
        (k - 1) * d + 1 <= size + 2 * p
        for k, d, p, size in zip(arguments["kernel_size"], arguments["dilation"], pads, shape[-n:])
    )


def conv_arguments(n, kernel, stride=1, padding=0, dilation=1, groups=1, bias=True, out_channels=4):
    return {
        "kernel_size": (kernel,) * n,
        "stride": (stride,) * n,
        "padding": padding if isinstance(padding, str) else (padding,) * n,
        "dilation": (dilation,) * n,
        "groups": groups,
        "bias": bias,
        "out_channels": out_channels,
    }


GRID_SIZES = {
    1: [{0: (7,)}, {0: (33,)}],
    2: [{0: (5, 3)}, {0: (1, 16)}, {0: (0, 7)}, {0: (17, 16)}],
    3: [{0: (1, 5, 1)}, {0: (7, 0, 10)}, {0: (2, 2, 1)}, {0: (11, 11, 11)}],
    4: [{0: (1, 1, 1, 2)}, {0: (9, 0, 0, 8)}, {0: (5, 7, 1, 20)}],
}


def grid(world):
    cases = []
    settings_ = itertools.product((1, 2, 3, 4, 5), (1, 2, 3), (0, 1, 2, "same", "valid"), (1, 2))
    for i, (kernel, stride, padding, dilation) in enumerate(settings_):
        if padding == "same" and stride > 1:
            continue
        sizes = GRID_SIZES[world][i % len(GRID_SIZES[world])]
        arguments = conv_arguments(1, kernel, stride, padding, dilation, groups=(1, 2, 4)[i % 3], bias=i % 2 == 0)
        shape = (1 + i % 2, 4, sum(sizes[0]))
        if valid(shape, arguments):
            cases.append((shape, arguments, world, [2], sizes))
    return cases


@pytest.mark.parametrize(("world", "way"), IN_WAYS)
def test_grid_of_kernels_strides_paddings_dilations(world, way):
    cases = grid(world)
    assert len(cases) > 60
    run_distributed(check, world, cases, way, timeout=120)


def image(sizes_h, sizes_w, n=2):
    return (n, 4, sum(sizes_h), sum(sizes_w))


@pytest.mark.on_device
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(((2, 3, 8, 5), conv_arguments(2, 3, padding=1), (2,), [2], {0: (5, 3)}), id="rows"),
        pytest.param(((2, 3, 5, 8), conv_arguments(2, 3, padding=1), (2,), [3], {0: (7, 1)}), id="columns"),
        pytest.param(((3, 4, 6, 6), conv_arguments(2, 3, padding=1), (2,), [0], {0: (1, 2)}), id="batch"),
        pytest.param(((1, 4, 6, 6), conv_arguments(2, 3, padding=1), (2,), [0], {0: (0, 1)}), id="empty-batch"),
        pytest.param(((4, 8, 5), conv_arguments(2, 3, padding=1), (2,), [1], {0: (5, 3)}), id="unbatched"),
        pytest.param(((2, 4, 8, 5), conv_arguments(2, 3, padding=1, groups=4), (2,), [2], {0: (2, 6)}), id="depthwise"),
        pytest.param(((2, 4, 9, 5), conv_arguments(2, 4, padding="same"), (2,), [2], {0: (4, 5)}), id="even-same"),
        pytest.param(((2, 4, 9, 7), conv_arguments(2, 1), (2,), [2], {0: (4, 5)}), id="pointwise"),
        pytest.param(((2, 4, 9, 7), conv_arguments(2, 1, stride=3), (2,), [2], {0: (1, 8)}), id="gaps"),
        pytest.param(((1, 4, 7, 6, 5), conv_arguments(3, 3, padding=1), (2,), [2], {0: (2, 5)}), id="volume"),
        pytest.param(((1, 4, 7, 6, 5), conv_arguments(3, 3, stride=2, padding=1), (2,), [4], {0: (4, 1)}), id="depth"),
    ],
)
def test_two_ranks(case):
    run_distributed(check, 2, [case])


def meshes_2x2():
    for dims in ([2, 3], [3, 2], [0, 2], [3, 0], [2, None], [None, 3]):
        for h, w in [((5, 3), (2, 4)), ((1, 6), (7, 0)), ((0, 5), (1, 1)), ((17, 16), (4, 13))]:
            for kernel, stride, padding, dilation in [
                (3, 1, 1, 1),
                (5, 2, 2, 1),
                (4, 1, "same", 1),
                (2, 2, 0, 1),
                (3, 1, 2, 2),
            ]:
                arguments = conv_arguments(2, kernel, stride, padding, dilation)
                cut = {0: (1, 2), 2: h, 3: w}
                shape = (3, 4, sum(h), sum(w))
                if valid(shape, arguments):
                    yield shape, arguments, (2, 2), dims, {m: cut[d] for m, d in enumerate(dims) if d is not None}


@pytest.mark.parametrize("way", ["at once", "by owners", pytest.param("in two", marks=pytest.mark.slow)])
def test_both_spatial_dims_on_a_2x2_mesh_with_corners(way):
    cases = list(meshes_2x2())
    assert len(cases) > 80
    run_distributed(check, 4, cases, way, timeout=120)


@pytest.mark.parametrize("way", ["at once", "in two", "by owners"])
def test_three_sharded_dims(way):
    """Corners of corners: a volume cut along all its dims on a 2 x 2 x 1 mesh, and on a mesh dim of size one."""
    arguments = conv_arguments(3, 3, padding=1)
    cut = {0: (2, 3), 1: (1, 4), 2: (6,)}
    strided = conv_arguments(3, 3, stride=2, padding=1)
    cases = [((1, 4, 5, 5, 6), a, (2, 2, 1), [2, 3, 4], cut) for a in (arguments, strided)]
    run_distributed(check, 4, cases, way)


@on_ranks(4)
def test_each_rank_may_differentiate_in_its_own_way():
    """Both send the same messages in the same order, so ranks need not agree on the way."""
    cases = [case for case in meshes_2x2() if case[3] == [2, 3]]
    check(cases, ("at once", "in two")[torch.distributed.get_rank() % 2])


def grads(layer):
    return [p.grad for p in layer.parameters()]


@pytest.mark.on_device
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
@on_ranks(2)
def test_ranks_that_differentiate_in_their_own_way_sum_in_one_order(kind):
    """The operator starts the sum of gradients that a hook asks for: on all ranks before it returns the halo's."""
    torch.manual_seed(0)
    layer = kind(4, 4, 3, stride=2, padding=1).double()
    alone, whole = copy.deepcopy(layer), data(2, 4, 9, 6).requires_grad_()
    for p in layer.parameters():
        p.register_post_accumulate_grad_hook(lambda p: None)
    with computing(("in two", "at once")[torch.distributed.get_rank()]):
        x = shard(whole.detach(), shared_mesh(2), [Shard(2)], {0: (6, 3)}, requires_grad=True)
        layer(x).square().sum().backward()
    alone(whole).square().sum().backward()
    for found, expected in ((x.grad.full_tensor(), whole.grad), *zip(grads(layer), grads(alone), strict=True)):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


# -- hypothesis ----------------------------------------------------------------------------------------------------

LENGTHS = st.sampled_from([1, 2, 5, 7, 17, 33])


@st.composite
def cuts(draw, total, ranks):
    borders = sorted(draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
    return tuple(b - a for a, b in zip([0, *borders], [*borders, total]))


@st.composite
def convolutions(draw, mesh_shape):
    n = draw(st.sampled_from([1, 2, 2, 3]))
    each = st.tuples(*[st.integers(1, 3)] * n)
    padding = draw(st.one_of(st.tuples(*[st.integers(0, 3)] * n), st.sampled_from(["same", "valid"])))
    groups = draw(st.sampled_from([1, 2, 4]))
    arguments = {
        "kernel_size": draw(st.tuples(*[st.integers(1, 5)] * n)),
        "stride": (1,) * n if padding == "same" else draw(each),
        "padding": padding,
        "dilation": draw(each),
        "groups": groups,
        "bias": draw(st.booleans()),
        "out_channels": 4 * draw(st.integers(1, 2)),
    }
    batch = draw(st.lists(st.integers(1, 3), max_size=1))
    lengths = LENGTHS if n < 3 else st.sampled_from([1, 2, 5, 7])
    shape = (*batch, 4, *draw(st.tuples(*[lengths] * n)))
    first = len(batch) + 1
    possible = [*range(first, first + n), *([0] if batch else [])]
    dims = draw(st.permutations([*possible, *[None] * len(mesh_shape)]))[: len(mesh_shape)]
    sizes = {m: draw(cuts(shape[d], mesh_shape[m])) for m, d in enumerate(dims) if d is not None}
    return shape, arguments, mesh_shape, list(dims), sizes


def drawn(mesh_shape, examples):
    world = 1
    for n in mesh_shape:
        world *= n

    @settings(max_examples=examples)
    @given(st.lists(convolutions(mesh_shape), min_size=4, max_size=8), st.sampled_from([*WAYS]))
    def run(cases, way):
        run_distributed(check, world, [case for case in cases if valid(case[0], case[1])], way, timeout=120)

    run()


@pytest.mark.parametrize("mesh_shape", [(1,), (3,), (2, 2)], ids=str)
def test_drawn_convolutions(mesh_shape):
    drawn(mesh_shape, examples=25)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (4,), (2, 2), (1, 3), (4, 1)], ids=str)
def test_many_drawn_convolutions(mesh_shape):
    drawn(mesh_shape, examples=300)


@example(sizes=(97,), kernel=3)
@given(sizes=st.sampled_from([(96, 1), (1, 96), (50, 47), (0, 97)]), kernel=st.sampled_from([3, 7, 31]))
@settings(max_examples=6)
def test_long_signals_with_wide_kernels(sizes, kernel):
    arguments = conv_arguments(1, kernel, padding=kernel // 2)
    run_distributed(check, len(sizes), [((1, 4, sum(sizes)), arguments, len(sizes), [2], {0: sizes})])


# -- every entry point ------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer that stores its own weights and calls a function of the reader's choice."""

    def __init__(self, call):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 3, 3, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(6, dtype=torch.float64))
        self.call = call

    def forward(self, x):
        return self.call(x, self.weight, self.bias)


def below_functions(x, w, b):
    """Past every function-level entry point: autograd records aten.convolution itself."""
    if not isinstance(x, ShardTensor):
        return torch.convolution(x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    mesh = x.device_mesh
    w, b = (ShardTensor.from_local(t, mesh, [Replicate()], shard_sizes={}) for t in (w, b))
    with DisableTorchFunction():
        return torch.ops.aten.convolution.default(x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def inference(x, w, b):
    with torch.inference_mode():
        return torch.ops.aten.conv2d.default(x, w, b, [1, 1], [1, 1])


ENTRY_POINTS = {
    "F.conv2d": lambda x, w, b: F.conv2d(x, w, b, padding=1),
    "torch.conv2d": lambda x, w, b: torch.conv2d(x, w, b, padding=(1, 1)),
    "keywords": lambda x, w, b: F.conv2d(input=x, weight=w, bias=b, padding="same"),
    "torch.convolution": lambda x, w, b: torch.convolution(x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "aten packet": lambda x, w, b: torch.ops.aten.convolution(x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "aten overload": lambda x, w, b: torch.ops.aten.convolution.default(
        x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    ),
    "aten conv2d": lambda x, w, b: torch.ops.aten.conv2d.default(x, w, b, [1, 1], [1, 1]),
    "below functions": below_functions,
}


def through(entry, patched=True):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 5, dtype=torch.float64)
    if not patched:
        shardtensor.dispatch.patches.uninstall()
    try:
        layer = Layer(ENTRY_POINTS[entry])
        assert_matches_unsharded(layer, x, mesh_shape=2, placements=[Shard(2)], shard_sizes={0: (5, 3)})
    finally:
        shardtensor.dispatch.patches.install()


@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_every_entry_point_leads_to_the_same_convolution(entry):
    run_distributed(through, 2, entry)


def test_no_door_depends_on_the_patches():
    run_distributed(through, 2, "F.conv2d", patched=False)


@on_ranks(2)
def test_inference_mode():
    torch.manual_seed(0)
    layer = Layer(inference)
    x = torch.randn(2, 4, 8, 5, dtype=torch.float64)
    sharded = shard(x, shared_mesh(2), [Shard(2)], {0: (5, 3)})
    with torch.inference_mode():
        whole = F.conv2d(x, layer.weight, layer.bias, padding=1)
        for call in (ENTRY_POINTS["F.conv2d"], ENTRY_POINTS["torch.conv2d"], ENTRY_POINTS["aten conv2d"], inference):
            torch.testing.assert_close(
                call(sharded, layer.weight, layer.bias).full_tensor(), whole, rtol=1e-10, atol=1e-12
            )


@on_ranks(2)
def test_weights_that_are_dtensors():
    """DTensor weights get their contribution as a Partial DTensor, whose full value is the unsharded gradient."""
    torch.manual_seed(0)
    mesh = shared_mesh(2)
    w = torch.randn(6, 4, 3, 3, dtype=torch.float64)
    x = torch.randn(2, 4, 8, 5, dtype=torch.float64)
    whole = w.clone().requires_grad_()
    F.conv2d(x, whole, padding=1).square().sum().backward()
    weight = DTensor.from_local(w.clone(), mesh, [Replicate()]).requires_grad_()
    with count_communication() as counts:
        F.conv2d(shard(x, mesh, [Shard(2)], {0: (5, 3)}), weight, padding=1).square().sum().backward()
    assert type(weight.grad) is DTensor
    assert not counts.collectives["all_reduce"], "the contribution must stay for FSDP to reduce"
    torch.testing.assert_close(weight.grad.full_tensor(), whole.grad, rtol=1e-10, atol=1e-10)


# -- dtypes and memory formats -------------------------------------------------------------------------------------


def formats():
    torch.manual_seed(0)
    mesh = shared_mesh(2)
    sizes = {0: (5, 3)}
    conv = nn.Conv2d(4, 6, 3, padding=1)
    x = torch.randn(2, 4, 8, 5)
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        assert_matches_unsharded(conv.to(dtype), x.to(dtype), mesh=mesh, placements=[Shard(2)], shard_sizes=sizes)
    weight = torch.randn(2, 1, 2, dtype=torch.complex128)

    def penalty(x):
        (grad,) = torch.autograd.grad(F.conv1d(x[:, None], weight).abs().sum(), x, create_graph=True)
        return grad.abs().square().sum()

    # Of one channel, a shard lies in memory otherwise than the whole tensor.
    assert_matches_unsharded(penalty, torch.randn(4, 3, dtype=torch.complex128), mesh=mesh, placements=[Shard(0)])
    last = x.double().to(memory_format=torch.channels_last)
    y = assert_matches_unsharded(
        nn.Conv2d(4, 6, 3, padding=1).double().to(memory_format=torch.channels_last),
        last,
        mesh=mesh,
        placements=[Shard(2)],
        shard_sizes=sizes,
    )
    assert y.is_contiguous(memory_format=torch.channels_last)
    conv = nn.Conv2d(4, 6, 3, padding=1)
    sharded = shard(x, mesh, [Shard(2)], sizes, requires_grad=True)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        y = conv(sharded)
        assert y.dtype == y.to_local().dtype == torch.bfloat16
        whole = conv(x)
    y.float().sum().backward()
    torch.testing.assert_close(y.full_tensor().float(), whole.float(), rtol=2e-2, atol=2e-2)
    assert sharded.grad.dtype == torch.float32 and conv.weight.grad.dtype == torch.float32


def test_dtypes_autocast_and_channels_last():
    run_distributed(formats, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("way", ["at once", "in two"])
@on_ranks(2)
def test_boundaries_are_rounded_once(way, dtype):
    """The largest error next to the boundary between two shards and anywhere on one device, against float64.

    The kernel's rows cancel each other: a sum of rounded parts would be wrong in its leading digits.
    """
    torch.manual_seed(0)
    rows = torch.randn(2, 16, 1, 12) + 0.01 * torch.randn(2, 16, 8, 12)
    taps = torch.randn(8, 16, 1, 3) * torch.tensor([1.0, -2.0, 1.0]).view(3, 1)
    x, weight = rows.to(dtype), taps.to(dtype)
    exact = F.conv2d(x.double(), weight.double(), padding=1)[:, :, 1:-1]
    with computing(way):
        y = F.conv2d(shard(x, shared_mesh(2), [Shard(2)], {0: (5, 3)}), weight, padding=1).full_tensor()[:, :, 1:-1]
    alone = F.conv2d(x, weight, padding=1)[:, :, 1:-1]
    found, expected = ((z.double() - exact).abs() for z in (y, alone))
    assert found[:, :, 3:5].max() <= 2 * expected[:, :, 3:5].max(), (found[:, :, 3:5].max(), expected.max())


def returned_to_the_boundary(way, dtype, sizes):
    """The same of the input's gradient, of which ranks return what they have of others' rows."""
    torch.manual_seed(0)
    n = sum(sizes)
    grad = (torch.randn(2, 16, 1, 12) + 0.01 * torch.randn(2, 16, n, 12)).to(dtype)
    weight = (torch.randn(16, 8, 1, 3) * torch.tensor([1.0, -2.0, 1.0]).view(3, 1)).to(dtype)
    x = torch.randn(2, 8, n, 12).to(dtype)

    def gradient(x, weight, grad):
        return torch.autograd.grad(F.conv2d(x, weight, padding=1), x, grad)[0]

    exact = gradient(x.double().requires_grad_(), weight.double(), grad.double())
    alone = gradient(x.clone().requires_grad_(), weight, grad)
    mesh = shared_mesh(len(sizes))
    with computing(way):
        x, grad = (shard(t, mesh, [Shard(2)], {0: sizes}) for t in (x, grad))
        found = gradient(x.requires_grad_(), weight, grad).full_tensor()
    errors = [(g.double() - exact)[:, :, 1:-1].abs().max() for g in (found, alone)]
    assert errors[0] <= 2 * errors[1], (way, sizes, errors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", ["at once", "in two"])
@pytest.mark.parametrize("sizes", [(5, 3), (3, 4, 2), (3, 1, 4)], ids=str)  # a row that both neighbours read
def test_gradients_at_boundaries_are_rounded_once(way, dtype, sizes):
    run_distributed(returned_to_the_boundary, len(sizes), way, dtype, sizes)


def opposite_contributions(kernel, batch, dtype, memory_format):
    """Tensors of a convolution whose ranks' contributions to the weight's gradient nearly cancel."""
    torch.manual_seed(0)
    half = torch.randn(batch, 16, 24, 20)
    x = torch.cat([half, half + 0.01 * torch.randn_like(half)], 2)
    grad = torch.einsum("oc,nchw->nohw", torch.randn(8, 16), half)  # correlated with the input: contributions add up
    grad = torch.cat([grad, 0.01 * torch.randn_like(grad) - grad], 2)
    tensors = x, torch.randn(8, 16, kernel, kernel), torch.randn(8), grad
    return [t.to(dtype, memory_format=memory_format if t.ndim == 4 else torch.preserve_format) for t in tensors]


def gradients_of_parameters(x, weight, bias, grad, scope=nullcontext):
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    with scope():
        y = F.conv2d(x, weight, bias, padding=weight.shape[2] // 2)
    return torch.autograd.grad(y, [weight, bias], grad)


@shardtensor.half_precision("exact")
def sums_of_contributions(kernel, dtype, autocast, memory_format):
    mesh, device = shared_mesh(2), torch.get_default_device().type

    def scope():
        return torch.autocast(device, dtype, enabled=autocast)

    for batch, sizes in ((1, (24, 24)), (2, (7, 41)), (1, (0, 48))):
        tensors = opposite_contributions(kernel, batch, dtype, memory_format)
        exact = gradients_of_parameters(*(t.double() for t in tensors))
        x, weight, bias, grad = tensors
        if autocast:
            weight, bias = weight.float(), bias.float()
        one = gradients_of_parameters(x, weight, bias, grad, scope)
        x, grad = (shard(t, mesh, [Shard(2)], {0: sizes}) for t in (x, grad))
        found = gradients_of_parameters(x, weight, bias, grad, scope)
        allowed = []
        for got, alone, value in zip(found, one, exact, strict=True):
            error, of_one = ((t.double() - value).abs().max() for t in (got, alone))
            allowed.append(2 * max(of_one, torch.finfo(dtype).eps * value.abs().max() / 2))
            assert got.dtype == alone.dtype and error <= allowed[-1], (batch, sizes, error, of_one)
        # What the float32 of contributions is for: each rank's rounded would be wrong by more than the rule allows.
        whole, halves = tensors[0], tensors[3].split(24, 2)
        rounded = [torch.zeros_like(tensors[3]) for _ in halves]
        for place, half, start in zip(rounded, halves, (0, 24)):
            place.narrow(2, start, 24).copy_(half)
        parts = [gradients_of_parameters(whole, *tensors[1:3], part)[0].float() for part in rounded]
        assert (sum(parts).double() - exact[0]).abs().max() > 2 * allowed[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_contributions_to_weights_that_cancel_are_rounded_once(kernel, dtype, memory_format):
    for autocast in (False, True):
        run_distributed(sums_of_contributions, 2, kernel, dtype, autocast, memory_format)


# -- messages, bytes, memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["all_to_all", "p2p"])
@on_ranks(3)
def test_one_message_per_neighbour_with_the_halo_and_nothing_else(transport):
    """Messages and bytes of one 3 x 3 convolution, forward and backward, per rank: one row each way."""
    with shardtensor.set_transport(transport):
        mesh = shared_mesh(3)
        rank = mesh.get_local_rank()
        conv = nn.Conv2d(4, 6, 3, padding=1, dtype=torch.float64)
        x = shard(torch.randn(2, 4, 9, 5, dtype=torch.float64), mesh, [Shard(2)], {0: (4, 1, 4)}, requires_grad=True)
        grad = shard(torch.randn(2, 6, 9, 5, dtype=torch.float64), mesh, [Shard(2)], {0: (4, 1, 4)})
        conv(x.detach()[..., :4]).sum().backward()  # another shape: devices connect process groups when first used
        with count_communication() as forward:
            y = conv(x)
        with count_communication() as backward:
            y.backward(grad)
    neighbours = 2 if rank == 1 else 1
    row = 2 * 4 * 5 * 8
    for counts in (forward, backward):
        assert counts.messages == counts.received_messages == neighbours
        assert counts.bytes_sent == counts.bytes_received == neighbours * row
        assert set(counts.sent_to) == {r for r in (rank - 1, rank + 1) if 0 <= r < 3}
    assert set(forward.collectives) <= {"all_to_all"}, "no sizes are communicated"
    # The weight's and the bias's gradients travel together.
    assert backward.collectives["all_reduce"] == 1
    assert backward.collective_bytes == (conv.weight.numel() + conv.bias.numel()) * 8


@on_ranks(4)
def test_halo_wider_than_the_shards():
    """Five rows to each side over shards of two: several hops, still one message per peer."""
    mesh = shared_mesh(4)
    x = shard(torch.randn(1, 1, 8, dtype=torch.float64), mesh, [Shard(2)], {0: (2, 2, 2, 2)})
    with count_communication() as counts:
        F.conv1d(x, torch.randn(1, 1, 11, dtype=torch.float64), padding=5)
    rank = mesh.get_local_rank()
    needs = {r: set(range(2 * r - 5, 2 * r + 7)) for r in range(4)}
    mine = {2 * rank, 2 * rank + 1}
    expected = {r: len(mine & needs[r]) * 8 for r in range(4) if r != rank and mine & needs[r]}
    assert dict(counts.sent_to) == expected


@on_ranks(2)
def test_no_communication_where_no_halo_is_needed():
    """Where no rank needs anything, nothing is started: pointwise kernels, aligned patches, batch shards."""
    mesh = shared_mesh(2)
    x = torch.randn(2, 4, 8, 4, dtype=torch.float64)
    with torch.no_grad(), count_communication() as counts:
        nn.Conv2d(4, 4, 1).double()(shard(x, mesh, [Shard(2)], {0: (5, 3)}))
        nn.Conv2d(4, 4, 2, stride=2).double()(shard(x, mesh, [Shard(2)], {0: (6, 2)}))
        nn.Conv2d(4, 4, 3, padding=1).double()(shard(x, mesh, [Shard(0)]))
    assert not counts.messages and not counts.collectives


def bitwise():
    torch.manual_seed(0)
    mesh = shared_mesh(3)
    x = torch.randn(2, 4, 9, 5)
    conv = nn.Conv2d(4, 6, 5, stride=2, padding=2)
    results = []
    for transport in ("all_to_all", "p2p"):
        with shardtensor.set_transport(transport):
            sharded = shard(x, mesh, [Shard(2)], {0: (4, 1, 4)}, requires_grad=True)
            y = conv(sharded)
            y.square().sum().backward()
            results.append((y.to_local(), sharded.grad.to_local(), conv.weight.grad.clone()))
            conv.zero_grad()
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_transports_agree_bitwise():
    run_distributed(bitwise, 3)
    with pytest.raises(ValueError, match="'carrier pigeon': choose 'auto', 'all_to_all' or 'p2p'"):
        shardtensor.set_transport("carrier pigeon")


def saved(sharded, way="by their size"):
    """Elements that a convolution keeps for its backward pass."""
    kept = []
    mesh = shared_mesh(2)
    x = torch.randn(1, 4, 16, 8)
    x = shard(x, mesh, [Shard(2)], {0: (8, 8)}, requires_grad=True) if sharded else x[:, :, :8].requires_grad_()
    conv = nn.Conv2d(4, 4, 3, padding=1)

    def pack(t):
        kept.append(t._local_tensor.numel() if isinstance(t, ShardTensor) else t.numel())
        return t

    with computing(way), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        conv(x)
    return sum(kept)


@pytest.mark.parametrize("way", ["at once", "in two"])
def test_only_the_halo_is_saved_beyond_what_the_unsharded_convolution_saves(way):
    alone = run_distributed(saved, 2, False)
    sharded = run_distributed(saved, 2, True, way)
    assert [b - a for a, b in zip(alone, sharded)] == [4 * 8] * 2  # one row


def many_ranks():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (64,))
    x = ShardTensor.from_local(torch.randn(1, 2, 3), mesh, [Shard(2)], shard_sizes={0: (3,) * 64})
    with count_communication() as counts:
        F.conv1d(x, torch.randn(2, 2, 3), padding=1)
    return counts.messages, counts.bytes_sent


def test_messages_grow_with_the_borders_only():
    results = simulate_ranks(many_ranks, 64)
    assert sum(messages for messages, _ in results) == 2 * 63
    assert sum(sent for _, sent in results) == 2 * 63 * 2 * 4


# -- uneven shards -----------------------------------------------------------------------------------------------------


def mirrored(x, rows=100):
    """An image with a mirrored border, as networks of image restoration make it: the last rank has little of it."""
    return torch.cat([x, x.flip(2)], 2)[:, :, :rows]


def with_residuals(x, first, second):
    x = mirrored(x)
    return second(first(x).relu()) + x


# Sizes of the image, and those of the first convolution's result.
NEARLY_NOTHING = [((48, 48), (50, 50)), ((32, 32, 32), (34, 34, 32)), ((60, 36), (50, 50))]


@pytest.mark.parametrize(("sizes", "shared"), NEARLY_NOTHING)
def test_an_input_of_which_a_rank_has_nearly_nothing_gets_even_shards(sizes, shared):
    run_distributed(share_evenly, len(sizes), sizes, shared)


def share_evenly(sizes, shared):
    first, second = nn.Conv2d(3, 80, 3, padding=1).double(), nn.Conv2d(80, 3, 3, padding=1).double()
    layout = {"mesh_shape": len(sizes), "placements": [Shard(2)], "shard_sizes": {0: sizes}}
    assert_matches_unsharded(with_residuals, data(1, 3, 96, 64), first, second, **layout)
    x = shard(data(1, 3, 96, 64), shared_mesh(len(sizes)), [Shard(2)], {0: sizes}, requires_grad=True)
    y = mirrored(x).detach().requires_grad_()
    left, row, rank = y.shard_sizes[0], 3 * 64 * 8, dist.get_rank()
    with count_communication() as forward:
        z = first(y)
    assert z.shard_sizes[0] == shared
    with count_communication() as backward:
        (grad,) = torch.autograd.grad(z.sum(), y)
    assert grad.shard_sizes[0] == left
    if len(sizes) == 2:  # a message to the last rank with rows, and the halos; their gradients
        rows = left[0] - shared[0]
        assert (forward.messages, forward.bytes_sent) == ((2, (rows + 1) * row), (1, row))[rank]
        assert (backward.messages, backward.bytes_sent) == ((1, row), (2, (rows + 1) * row))[rank]
    chosen = (78, *(13,) * (len(sizes) - 1))
    kept = shard(data(1, 3, sum(chosen), 64), shared_mesh(len(sizes)), [Shard(2)], {0: chosen})
    assert first(kept).shard_sizes[0] == chosen
    little = nn.Conv2d(3, 1, 3, padding=1).double()
    assert little(y[:, :, :, :9]).shard_sizes[0] == left


# -- errors --------------------------------------------------------------------------------------------------------


def operand():
    return shard(torch.randn(2, 4, 8, 5), shared_mesh(2), [Shard(2)], {0: (5, 3)}, requires_grad=True)


def weight(*kernel):
    return torch.randn(6, 4, *kernel)


def of_shape(x, shape, dim, sizes):
    return shard(torch.randn(shape), x.device_mesh, [Shard(dim)], {0: sizes})


ERRORS = {
    "kernel": (
        lambda x: F.conv2d(of_shape(x, (2, 4, 3, 5), 2, (2, 1)), weight(5, 5)),
        RuntimeError,
        r"conv2d: kernel size \(5, 5\).* is greater than the padded input \(3, 5\) of the global tensor",
    ),
    "channels": (
        lambda x: F.conv2d(of_shape(x, (1, 4, 1, 1), 1, (3, 1)), weight(1, 1)),
        UnsupportedSharding,
        r"conv2d: tensor dim 1 must be unsharded.*S\(1\)\[3, 1\].*Remedy: redistribute",
    ),
    "groups": (
        lambda x: F.conv2d(x, weight(3, 3), groups=2),
        RuntimeError,
        "conv2d: weight (6, 4, 3, 3) with groups=2 does not fit 4 input channels",
    ),
    "stride": (lambda x: F.conv2d(x, weight(3, 3), stride=0), RuntimeError, r"conv2d: stride \(0, 0\).* must be pos"),
    "dims": (
        lambda x: F.conv2d(x, weight(3)),
        RuntimeError,
        "conv2d: expected a 3-D (unbatched) or 4-D (batched) input",
    ),
    "weight": (
        lambda x: F.conv2d(x, of_shape(x, (6, 4, 3, 3), 0, (3, 3))),
        UnsupportedSharding,
        r"conv2d: the parameter is sharded.*S\(0\)\[3, 3\].*redistribute it to Replicate",
    ),
    "dtype": (
        lambda x: F.conv2d(x, weight(3, 3).double()),
        RuntimeError,
        "conv2d: input of torch.float32 and weight of torch.float64 should be the same",
    ),
    "same": (
        lambda x: F.conv2d(x, weight(3, 3), stride=2, padding="same"),
        RuntimeError,
        "conv2d: padding='same' is not supported for strided convolutions",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_clear_and_raised_on_every_rank(name):
    raises_alike(operand, name)


@on_ranks(2)
def test_sharded_channels_are_spread_over_a_free_dim():
    torch.manual_seed(0)
    mesh = shared_mesh(2)
    x = torch.randn(2, 4, 8, 5, dtype=torch.float64)
    for conv in (nn.Conv2d(4, 6, 3, padding=1).double(), nn.ConvTranspose2d(4, 6, 3, stride=2).double()):
        for sizes in ((3, 1), (0, 4)):
            assert_matches_unsharded(conv, x, mesh_shape=2, placements=[Shard(1)], shard_sizes={0: sizes})
    with count_communication() as c:
        y = F.conv2d(shard(x, mesh, [Shard(1)], {0: (3, 1)}), torch.randn(6, 4, 1, 1, dtype=torch.float64))
    assert (y.shard_sizes, y.placements) == ({0: (4, 4)}, (Shard(2),))
    # Half the rows of the channels that the rank held.
    assert (c.messages, c.bytes_sent) == (1, 2 * (3, 1)[dist.get_rank()] * 4 * 5 * 8)
    assert dict(c.collectives) == {"all_to_all": 1}


@on_ranks(2)
def test_inside_allow_gather_what_is_refused_outside_is_right():
    torch.manual_seed(0)
    mesh = shared_mesh(2)
    x = torch.randn(2, 4, 8, 5, dtype=torch.float64)
    w = torch.randn(4, 4, 2, 2, dtype=torch.float64, requires_grad=True)
    sharded = shard(x, mesh, [Shard(2)], {0: (5, 3)}, requires_grad=True)
    with shardtensor.allow_gather():
        y = F.conv2d(sharded, shard(w.detach(), mesh, [Shard(0)]))
    torch.testing.assert_close(y.full_tensor(), F.conv2d(x, w), rtol=1e-10, atol=1e-12)


def trace_of_convolution(way):
    """What a rank does one after the other, forward and backward."""
    mesh = shared_mesh(3)
    x = shard(torch.randn(1, 4, 9, 6), mesh, [Shard(2)], {0: (3, 4, 2)}).requires_grad_()
    w = torch.randn(4, 4, 3, 3)
    with computing(way):
        F.conv2d(x, w, None, 1, 1).sum().backward()  # makes the plans
        with Copied() as forward:
            y = F.conv2d(x, w, None, 1, 1)
        loss = y.sum()
        with Copied() as backward:
            loss.backward()
    kept = {"send": "send", "wait": "wait", "aten::convolution": "compute", "aten::convolution_backward": "compute"}
    orders = [[kept[name] for name in traced.order if name in kept] for traced in (forward, backward)]
    return mesh.get_local_rank(), *orders


def test_shard_and_halo_are_convolved_by_one_kernel():
    """In the backward pass nothing is fetched again."""
    for _, forward, backward in run_distributed(trace_of_convolution, 3, "at once"):
        assert forward == ["send", "wait", "compute"]
        assert backward == ["compute", "send", "wait"]


def test_the_halo_s_gradient_travels_while_others_are_computed():
    for rank, forward, backward in run_distributed(trace_of_convolution, 3, "in two"):
        sides = ["compute"] * (2 if rank == 1 else 1)
        assert forward == ["send", "wait", "compute"]
        assert backward == [*sides, "send", "compute", "wait"]  # the weight is not differentiated


@on_ranks(2)
def test_volumes_in_both_memory_formats():
    mesh = shared_mesh(2)
    torch.manual_seed(0)
    convolutions = nn.Conv3d(4, 6, 3, 1, 1).double(), nn.Conv3d(4, 6, (2, 3, 3), (1, 2, 1), groups=2).double()
    formats = torch.contiguous_format, torch.channels_last_3d
    for dim, conv, last in itertools.product((2, 3, 4), convolutions, formats):
        x = torch.randn(1, 4, 6, 6, 6, dtype=torch.float64).contiguous(memory_format=last)
        assert_matches_unsharded(conv, x, mesh=mesh, placements=[Shard(dim)], shard_sizes={0: (4, 2)})
