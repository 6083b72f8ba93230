"""Sums of parameters' gradients: in buckets, complete wherever they can be seen, on every rank alike."""

from __future__ import annotations

import gc
import itertools
import weakref
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from late_streams import LateStream, on_stream
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardtensor import scatter_tensor
from shardtensor._compat import without_values
from shardtensor.communication import redistribute, weight_gradients
from shardtensor.ranks.history import fingerprint
from shardtensor.testing import count_communication, run_distributed, shard, shared_mesh


class Scale(nn.Module):
    """Parameters that meet the input in elementwise operators."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(n)), nn.Parameter(torch.rand(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x * self.weight + self.bias)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), Scale(6), nn.LayerNorm(6), nn.Linear(6, 6), nn.PReLU(), nn.RMSNorm(6), nn.Linear(6, 6)]
    return nn.Sequential(*layers).double()


def rows(n: int = 7, sizes: tuple[int, ...] = (5, 2), **options: bool):
    """A plain input, and the same over all ranks."""
    whole = torch.linspace(-1, 1, 6 * n, dtype=torch.float64).view(n, 6).sin()
    mesh = init_device_mesh(torch.get_default_device().type, (len(sizes),))
    x = scatter_tensor(whole, mesh, (Shard(0),), shard_sizes={0: sizes})
    return whole.requires_grad_(**options), x.requires_grad_(**options)


def assert_gradients_match(model: nn.Module, expected: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12, msg=partial("{}: {}".format, name))


def buckets_of(size: int):
    return mock.patch.multiple(weight_gradients, BUCKET_BYTES=size, ACCELERATOR_BUCKET_BYTES=size)


@on_ranks(2)
def test_a_backward_pass_sums_the_gradients_of_all_layers_at_once():
    """Seven layers, with an autograd function, differentiated by autograd, or elementwise, and one message."""
    model, expected = network(), network()
    whole, x = rows(requires_grad=False)
    expected(whole).square().sum().backward()
    network()(x).square().sum().backward()  # between accelerators the first bucket has a process group made
    total = model(x).square().sum()
    with count_communication() as counted:
        total.backward()
    assert_gradients_match(model, expected)
    assert dict(counted.collectives) == {"all_reduce": 1}


@on_ranks(2)
def test_gradients_are_the_sums_themselves_while_the_transport_still_holds_these():
    """A thread of gloo lets go of tensors some time after the wait for them has ended."""
    model, (_, x), held = network(), rows(requires_grad=False), []
    start = redistribute.c10d_all_reduce_coalesced

    def holds(tensors, group):
        held.extend(tensors)
        return start(tensors, group)

    with mock.patch.object(redistribute, "c10d_all_reduce_coalesced", holds):
        model(x).square().sum().backward()
    assert {p.grad.data_ptr() for p in model.parameters()} == {t.data_ptr() for t in held}


@on_ranks(2)
def test_a_full_bucket_is_sent_while_the_backward_pass_goes_on():
    """A weight fills one; bias and norms travel with the next weight."""
    model, expected, order = network(), network(), []
    whole, x = rows()
    expected(whole).square().sum().backward()
    total = model(x).square().sum()
    model[0].weight.register_hook(lambda grad: order.append("sum of the first layer"))
    send = weight_gradients.start_sum

    def sends(*args, **options):
        order.append("sent")
        return send(*args, **options)

    noted = mock.patch.object(weight_gradients, "start_sum", sends)
    x.register_hook(lambda grad: order.append("input's gradient"))
    with noted, buckets_of(6 * 6 * 8), count_communication() as counted:
        total.backward()
    assert_gradients_match(model, expected)
    collectives = dict(counted.collectives)
    assert collectives == {"all_reduce": 3}
    assert order == ["sent", "sent", "sent", "input's gradient", "sum of the first layer"]


@on_ranks(4)
def test_ranks_may_ask_for_their_buckets_in_different_orders():
    """Buckets of a mesh of two dims, asked for in opposite orders by the ranks of the second one."""
    mesh = shared_mesh((2, 2))
    ranks_differ, numbers = mesh.get_coordinate()[1] == 0, itertools.count()
    model, expected = (nn.Sequential(*(nn.Linear(n, n + 1) for n in (3, 4, 5))).double() for _ in range(2))
    expected.load_state_dict(model.state_dict())
    whole = torch.randn(4, 6, 3, dtype=torch.float64)
    expected(whole).square().sum().backward()

    def number(ctx) -> None:
        n = next(numbers)
        ctx._set_sequence_nr(n if ranks_differ else 9 - n)  # the numbers of the first nodes of all, which are no more

    with mock.patch.object(weight_gradients, "run_last", number), buckets_of(1):
        model(shard(whole, mesh, [Shard(0), Shard(1)])).square().sum().backward()
    assert next(numbers) == 3
    assert_gradients_match(model, expected)


def used_in_several_ways() -> list[list[float]]:
    """Gradients of weights that a loss and a penalty of the input's gradient use."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3, padding=1), nn.LeakyReLU(), nn.Conv2d(6, 4, 4, 2, 1), nn.SiLU(), nn.Conv2d(4, 1, 3)
    model = nn.Sequential(*layers).double()
    whole = torch.randn(3, 3, 13, 11, dtype=torch.float64)
    x = shard(whole, shared_mesh(3), [Shard(2)], {0: (9, 0, 4)}, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (model(x.flip(3)).square().mean() + slope.square().mean()).backward()
    return [p.grad.flatten().tolist() for p in model.parameters()]


def test_gradients_of_several_uses_have_the_same_bits_on_all_ranks():
    """The ranks add them in one order, although their graphs, and so what is ready when, are not the same."""
    first, *others = run_distributed(used_in_several_ways, 3)
    assert others == [first, first]


# An accelerator's tensors, on the CPU.
elsewhere = mock.patch.object(weight_gradients, "_device_of", lambda t: t.device)


@pytest.mark.on_cpu("an accelerator and its streams are imitated")
@on_ranks(2)
def test_accelerators_sum_gradients_in_a_group_of_their_own():
    """Halos do not wait for buckets there."""
    # Which all-reduces of a backward pass are in the group of the mesh dim.
    model, expected, seen = network(), network(), []
    start = redistribute.c10d_all_reduce_coalesced
    whole, x = rows()
    group = x.device_mesh.get_group()
    expected(whole).square().sum().backward()

    def noted(tensors, via):
        assert dist.get_process_group_ranks(via) == dist.get_process_group_ranks(group)
        seen.append(via is group)
        return start(tensors, via)

    reduced = mock.patch.object(redistribute, "c10d_all_reduce_coalesced", noted)
    with elsewhere, reduced, on_stream(LateStream("default"), weight_gradients), buckets_of(6 * 6 * 8):
        model(x).square().sum().backward()
    assert_gradients_match(model, expected)
    assert fingerprint(group.group_name)[0] > 3, "what ranks compare with the next number holds these sums, too"
    assert seen == [False] * 3


def with_streams() -> None:
    """The same with streams of an accelerator, whose kernels know of no other order than that of waiting."""
    models, expected = [network(), network()], [network(), network()]
    whole, x = rows(requires_grad=False)
    for net in expected:
        net(whole).square().sum().backward()
    before, totals = torch.accelerator.current_stream(), []
    for net in models:
        stream = torch.Stream(whole.device)
        stream.wait_stream(before)
        with stream:
            totals.append(net(x).square().sum())
        before.wait_stream(stream)
    torch.autograd.backward(totals)
    torch.accelerator.synchronize()
    for net, other in zip(models, expected, strict=True):
        assert_gradients_match(net, other)


def test_layers_on_streams(device_of_ranks):
    if device_of_ranks == "cpu":
        pytest.skip("needs an accelerator: --device emulated or --device cuda")
    run_distributed(with_streams, 2)


@pytest.mark.on_cpu("an accelerator and its streams are imitated")
@on_ranks(2)
def test_layers_that_ran_on_different_streams_wait_for_each_other():
    """Two layers' contributions, each computed and taken on a stream of its own; results are as late as the work."""
    streams, sums = [LateStream(name) for name in ("first", "second", "third")], weight_gradients.start_sum
    given = [torch.full((3,), 1.0 + i + dist.get_rank()) for i in range(2)]
    places, mesh = [], shared_mesh(2)

    def start(tensors, *args, **kwargs):
        streams[1].synchronize()  # the current one, for which a collective waits
        finish = sums(tensors, *args, **kwargs)

        def late():
            results.extend(t.clone() for t in finish())
            with streams[2]:
                return [torch.empty_like(t).copy_(t, non_blocking=True) for t in results]

        return late

    results: list[torch.Tensor] = []
    with elsewhere, mock.patch.object(weight_gradients, "start_sum", start):
        bucket = weight_gradients._Bucket(mesh, (0,), given[0])
        for stream, value in zip(streams, given, strict=False):
            with on_stream(stream, weight_gradients):
                with stream:
                    contribution = torch.empty_like(value).copy_(value, non_blocking=True)
                places.append(bucket.add([contribution], [contribution.dtype]))
        with on_stream(streams[1], weight_gradients) as recorded:
            bucket.send()
        assert set(recorded.values()) == {"second"} and len(recorded) == 2
        with on_stream(streams[2], weight_gradients):
            (second,) = bucket.take(places[1])
        with on_stream(streams[0], weight_gradients) as recorded:
            (first,) = bucket.take(places[0])
        assert recorded == {first.data_ptr(): "first"}
        streams[0].synchronize()
        assert first.tolist() == [3.0] * 3
        assert second.tolist() == [5.0] * 3


@pytest.mark.parametrize("device, contributions", [("cpu", 1), ("cuda", 25)])
def test_buckets_between_accelerators_are_larger(device, contributions):
    """Contributions of 1 MiB, without data; the first bucket is sent when it is full."""
    with without_values() as mode, mode:
        megabyte = torch.empty(1 << 18, device=device)
        bucket = weight_gradients._Bucket(mock.Mock(), (0,), megabyte)
        while bucket.room > 0:
            bucket.add([megabyte], [megabyte.dtype])
    assert len(bucket._tensors) == contributions


@pytest.mark.parametrize("how", ["hook", "post accumulate", "autograd.grad"])
@on_ranks(2)
def test_nobody_sees_a_contribution(how):
    """Whoever looks at a gradient sees the whole one."""
    model, expected = network(), network()
    whole, x = rows()
    seen: dict[str, torch.Tensor] = {}
    expected(whole).square().sum().backward()
    weight = model[3].weight
    if how == "hook":
        weight.register_hook(lambda grad: seen.update(grad=grad.clone()))
    if how == "post accumulate":
        weight.register_post_accumulate_grad_hook(lambda p: seen.update(grad=p.grad.clone()))
    total = model(x).square().sum()
    if how == "autograd.grad":
        seen["grad"] = torch.autograd.grad(total, [x, weight])[1]
    else:
        total.backward()
        assert_gradients_match(model, expected)
    torch.testing.assert_close(seen["grad"], expected[3].weight.grad, rtol=1e-10, atol=1e-12)


def repeated(how: str) -> None:
    model, expected = network(), network()
    whole, x = rows()

    def run(net: nn.Module, t: torch.Tensor) -> torch.Tensor:
        if how.startswith("checkpoint"):
            return checkpoint(net, t, use_reentrant=how == "checkpoint, reentrant").square().sum()
        return net(t).square().sum() if how != "shared" else net(net(t)).square().sum()

    for net, t in ((expected, whole), (model, x)):
        total = run(net, t)
        if how == "inputs only":
            torch.autograd.grad(total, [t], retain_graph=True)
        total.backward(retain_graph=how == "retained")
        if how == "retained":
            total.backward()
        if how == "accumulated":
            run(net, t).backward()
    assert_gradients_match(model, expected)
    torch.testing.assert_close(x.grad.full_tensor(), whole.grad, rtol=1e-10, atol=1e-12)
    assert not weight_gradients._passes, "buckets of a pass that is over"


@pytest.mark.parametrize(
    "how", ["shared", "retained", "accumulated", "inputs only", "checkpoint", "checkpoint, reentrant"]
)
@pytest.mark.parametrize("bucket", [1, 1 << 20])
def test_passes_do_not_mix(how, bucket):
    """Weights used twice, graphs used twice, passes within passes, passes that leave gradients out."""
    with_buckets = partial(_with_buckets, bucket, repeated, how)
    run_distributed(with_buckets, 2)


def _with_buckets(size: int, function, *args) -> None:
    with buckets_of(size):
        function(*args)


@on_ranks(2)
def test_a_pass_that_fails():
    """An error in the middle of a pass, on every rank, leaves nothing behind that the next pass would take."""
    model, expected = network(), network()
    whole, x = rows()
    expected(whole).square().sum().backward()
    middle = model[2].register_full_backward_hook(lambda *_: (_ for _ in ()).throw(ValueError("on purpose")))
    with pytest.raises(ValueError, match="on purpose"):
        model(x).square().sum().backward()
    middle.remove()
    model.zero_grad()
    model(x).square().sum().backward()
    assert_gradients_match(model, expected)


def wrapped(how: str) -> dict[str, int]:
    """Gradients that FSDP2 or DDP takes before the backward pass ends are summed in time."""
    expected, model = network(), network()
    whole, x = rows(sizes=(5, 2))
    expected(whole).square().sum().backward()
    mesh = init_device_mesh(torch.get_default_device().type, (2, 1), mesh_dim_names=("domain", "data"))
    if how == "fsdp":
        for layer in (model[0], model[3], model[6], model):
            fully_shard(layer, mesh=mesh["data"])
    else:
        model = DistributedDataParallel(model, process_group=mesh["data"].get_group())
    total = model(x).square().sum()
    with count_communication() as counted:
        total.backward()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        grad = p.grad.full_tensor() if how == "fsdp" else p.grad
        torch.testing.assert_close(grad, q.grad, rtol=1e-10, atol=1e-12)
    return dict(counted.collectives)


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_wrappers_that_take_gradients_early(how):
    for collectives in run_distributed(wrapped, 2, how):
        assert collectives["all_reduce"] > 1, "one sum for all layers would come too late"


def together(sizes: tuple[int, ...]) -> None:
    model, expected = network(), network()
    whole, x = rows(9, sizes)
    for net, t in ((expected, whole), (model, x)):
        net(t).square().sum().backward()
    assert_gradients_match(model, expected)
    assert dist.get_world_size() == len(sizes)


@pytest.mark.parametrize("sizes", [(9, 0), (0, 1, 8), (2, 3, 3, 1)])
def test_empty_and_uneven_shards(sizes):
    run_distributed(together, len(sizes), sizes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@on_ranks(4, timeout=180)
def test_elementwise_parameters_on_a_mesh_of_two_dims(dtype):
    """Of which the gradient is summed over both mesh dims, over one, and over none."""
    mesh = shared_mesh((2, 2))
    torch.manual_seed(0)
    whole = torch.randn(5, 3, 4, dtype=dtype)
    shapes = (4,), (3, 1), (5, 1, 1), (1, 3, 1), (5, 3, 4)
    ours, theirs = ([nn.Parameter(torch.full(n, 0.5, dtype=t)) for n in shapes] for t in (dtype, torch.float64))

    def scaled(x: torch.Tensor, parameters: list[nn.Parameter]) -> torch.Tensor:
        for p in parameters:
            x = x * p
        return x

    scaled(shard(whole, mesh, [Shard(0), Shard(1)], {0: (4, 1), 1: (3, 0)}), ours).sum().backward()
    scaled(whole.double(), theirs).sum().backward()
    exact = dtype == torch.float64
    for p, q in zip(ours, theirs, strict=True):
        assert p.grad.dtype == dtype and type(p.grad) is torch.Tensor
        error = 1e-10 if exact else 2e-2
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=error, atol=error)


LAYERS = {
    "conv": lambda: nn.Conv2d(3, 3, 3, padding=1),  # a gradient of its weight would broadcast to the bias
    "strided": lambda: nn.Conv2d(3, 6, 2, stride=2),
    "depthwise": lambda: nn.Conv2d(3, 6, 3, padding=1, groups=3),
    "transposed": lambda: nn.ConvTranspose2d(3, 3, 3, padding=1),
    "pointwise": lambda: nn.Conv2d(3, 3, 1),
    "batch norm": lambda: nn.BatchNorm2d(3),
    "group norm": lambda: nn.GroupNorm(3, 3),
    "layer norm": lambda: nn.LayerNorm(4),
    "linear": lambda: nn.Linear(4, 4),
}


@pytest.mark.parametrize("sizes", [(6, 2), (0, 8)], ids=str)
@pytest.mark.parametrize("early", [False, True], ids=["in buckets", "early"])
@on_ranks(2)
def test_layers_of_which_only_one_parameter_is_trained(sizes, early):
    """In float32, whose kernels may return more gradients than they are asked for; channels-last, too.

    ``early``: in a wrapper that takes gradients before the backward pass ends.
    """
    mesh = init_device_mesh(torch.get_default_device().type, (len(sizes), 1), mesh_dim_names=("domain", "data"))
    for name in LAYERS:
        for trained in ("bias", "weight"):
            for memory in (torch.contiguous_format, torch.channels_last):
                grads = []
                for sharded in (False, True):
                    torch.manual_seed(0)
                    layer = LAYERS[name]().to(memory_format=memory).requires_grad_(False)
                    getattr(layer, trained).requires_grad_()
                    x = torch.randn(2, 3, sum(sizes), 4).to(memory_format=memory)
                    if sharded:
                        x = scatter_tensor(x, mesh["domain"], (Shard(2),), shard_sizes={0: sizes})
                    x.requires_grad_(name == "group norm")  # without it, torch's kernel for channels-last crashes
                    wrap = sharded and early
                    model = DistributedDataParallel(layer, process_group=mesh["data"].get_group()) if wrap else layer
                    model(x).square().sum().backward()
                    grads.append(getattr(layer, trained).grad)
                case = f"{name}, {trained}, {memory}: ".replace("{", "{{")
                torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4, msg=lambda m, c=case: c + m)


def after_fsdp2(kept: bool):
    """What is communicated next to a module with FSDP2 that rank 0 may still hold."""
    mesh = init_device_mesh(torch.get_default_device().type, (2,))
    wrapped = fully_shard(nn.Linear(2, 2), mesh=mesh)
    gone = weakref.ref(wrapped)
    if not (kept and dist.get_rank() == 0):
        del wrapped
        gc.collect()
    _, x = rows()
    network()(x).square().mean().backward()
    total = float(x.detach().sum())  # where ranks compare what they have communicated
    return gone() is None, total


@pytest.mark.parametrize("kept", (False, True))
def test_sums_do_not_depend_on_garbage_that_one_rank_has_collected(kept):
    (collected, total), other = run_distributed(after_fsdp2, 2, kept)
    assert collected is not kept and other == (True, total)
