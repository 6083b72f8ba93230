"""Steps that are captured: what replays give, what they leave out, and what is refused."""

from __future__ import annotations

import gc
import re
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from device.test_networks import benchmarks
from on_ranks import on_ranks
from seeded import seeded
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from shardtensor import ShardTensor
from shardtensor.dispatch import planning
from shardtensor.parallel import capture
from shardtensor.testing import count_communication, run_distributed, run_expecting_errors, shard, shared_mesh

CALLS, WARMUP = 5, 2  # of which the last three are replays


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.vae = benchmarks.autoencoder(8, 16)

    def forward(self, x):
        return self.vae.decode(self.vae.encode(x).latent_dist.mode()).sample


NETWORKS = {  # how it is made, the input, and the layout of its rows
    "globe U-Net": (benchmarks.globe, (1, 3, 48, 16), (32, 16)),
    "ViT": (lambda: Tokens(benchmarks.vit()), (1, 3, 48, 48), (32, 16)),
    "autoencoder": (Autoencoder, (1, 3, 24, 16), (16, 8)),
}


class Tokens(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x, interpolate_pos_encoding=True).last_hidden_state


def plain(tensors):
    return [t.full_tensor() if isinstance(t, DTensor) else t.clone() for t in tensors]


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, capturable=True)


def train(model, optimizer, batches, use, wrapped=None, calls=CALLS):
    """Losses, gradients and weights of as many steps, each on another batch with another target."""

    def step(x, target, *, scale):
        optimizer.zero_grad()
        loss = ((wrapped or model)(x) - target).square().mean() * scale
        loss.backward()
        optimizer.step()
        return {"loss": loss}

    step = use(step)
    losses = []
    for i in range(calls):
        target = torch.full((), i / 10, dtype=torch.float64)
        losses.append(step(batches(i), target, scale=2.0)["loss"])
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return plain(losses), plain(gradients), plain(model.state_dict().values())


def compare(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name", [pytest.param("globe U-Net", marks=SLOW), pytest.param("ViT", marks=SLOW), "autoencoder"]
)
@on_ranks(2, timeout=200)
def test_captured_steps_are_the_eager_ones(name, emulated):
    make, shape, rows = NETWORKS[name]
    mesh, results = shared_mesh(2), []

    def batches(i):
        return shard(torch.randn(shape, generator=seeded(i), dtype=torch.float64), mesh, [Shard(2)], {0: rows})

    for use in (lambda step: step, lambda step: capture(step, warmup=WARMUP)):
        torch.manual_seed(0)
        model = make().double()
        results.append(train(model, adam(model), batches, use))
    eager, captured = results
    assert len({float(loss) for loss in captured[0]}) == CALLS
    compare(captured, eager)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.gelu(self.norm(self.conv(x))).flatten(2).transpose(1, 2))


def small(dtype=torch.float64):
    torch.manual_seed(0)
    return Small().to(dtype)


def images(i, mesh, n=2, dtype=torch.float64, sizes=(5, 3)):
    x = torch.randn(n, 3, sum(sizes), 4, generator=seeded(i), dtype=torch.float64).to(dtype)
    return shard(x, mesh, [Shard(2)], {0: sizes})


@pytest.mark.on_cpu("what runs where there are no graphs")
@on_ranks(2)
def test_on_the_host_the_step_runs_as_it_is():
    """The same numbers and errors of arguments; other shapes, reads and optimizers are no matter."""
    mesh, results = shared_mesh(2), []
    for use in (lambda step: step, lambda step: capture(step, warmup=WARMUP)):
        model = small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
        results.append(train(model, optimizer, lambda i: images(i, mesh, n=1 + i), use))
    compare(results[1], results[0])
    read = capture(lambda x: x.sum().item())
    assert read(images(0, mesh)) == images(0, mesh).sum().item()
    assert not capture(lambda x: (x * 2).requires_grad_())(images(0, mesh)).requires_grad
    with pytest.raises(ValueError, match="an argument of the step requires a gradient"):
        read(images(0, mesh).requires_grad_())


def replayed(step, *args):
    """What a replay enters of the package, and what it sends, as far as the host knows."""
    entered = set()

    def note(frame, event, _):
        _, found, file = frame.f_code.co_filename.partition("/shardtensor/")
        if event == "call" and found:
            entered.add(file if file == "parallel/capture.py" else f"{file}:{frame.f_code.co_name}")

    with count_communication() as counted:
        step(*args)
    sys.setprofile(note)
    step(*args)
    sys.setprofile(None)
    return entered, counted.collectives


def step_of(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


@on_ranks(2)
def test_a_replay_enters_no_operator_of_the_package(emulated):
    mesh, model = shared_mesh(2), small()
    step = step_of(model, adam(model))
    x = images(0, mesh)
    entered, _ = replayed(step, x)
    assert len(entered) > 50
    step = capture(step, warmup=1)
    step(x), step(x)
    # The helper's own, an attribute of the argument, and what makes a ShardTensor of the loss.
    most = {"parallel/capture.py", "dispatch/tensor.py:requires_grad", "dispatch/tensor.py:wrap"}
    entered, sent = replayed(step, x)
    assert "parallel/capture.py" in entered and entered <= most and not sent


@on_ranks(2)
def test_gradients_may_be_used_and_reset_outside(emulated):
    """The optimizer, or who adds up gradients, may be outside: with zero_grad() there, too, or after two batches."""
    for every in (1, 2):
        results = []
        for use in (lambda step: step, lambda step: capture(step, warmup=WARMUP)):
            mesh, model, losses = shared_mesh(2), small(), []
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

            def step(x, model=model):
                loss = model(x).square().mean()
                loss.backward()
                return loss

            step = use(step)
            for i in range(2 * CALLS):
                if i % every == 0:
                    optimizer.zero_grad()
                losses.append(step(images(i, mesh)))
                if i % every == every - 1:
                    optimizer.step()
            results.append((plain(losses), plain(model.state_dict().values())))
        compare(results[1][0], results[0][0])
        compare(results[1][1], results[0][1])


@on_ranks(2)
def test_results_are_not_overwritten_and_indices_may_change(emulated):
    mesh = shared_mesh(2)
    index = shard(torch.tensor([7, 0, 3, 3, 1, 6, 2, 5]), mesh, [Shard(0)], {0: (5, 3)})
    gathered = capture(lambda x, index: [x[index], 3, x.sum(0)], warmup=1)
    found, expected = [], []
    for i in range(4):  # also of an index with other values, of which each call finds other rows
        x, index = images(i, mesh).redistribute(placements=[Shard(2)]).transpose(0, 2), index.flip(0) + 0
        found.append(gathered(x, index))
        expected.append([x[index], 3, x.sum(0)])
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[1] == 3 and ours[0]._spec == theirs[0]._spec
        compare(plain([ours[0], ours[2]]), plain([theirs[0], theirs[2]]))


@on_ranks(2)
def test_what_a_graph_reads_lives_as_long_as_the_graph(emulated):
    mesh = shared_mesh(2)
    # Of which ranks keep tables on the device, of weights and of places.
    step = capture(lambda x: F.adaptive_avg_pool2d(F.interpolate(x, (11, 4), mode="bilinear"), (3, 2)), warmup=1)
    x = images(1, mesh)
    expected = step(x).full_tensor()
    step(x)
    planning._plans.clear()  # as more plans than are kept would do
    gc.collect()
    compare(plain([step(x)]), [expected])


def on_two_axes(wrap):
    mesh, results = shared_mesh((2, 2), ("data", "domain")), []
    for use in (lambda step: step, lambda step: capture(step)):
        model = small()
        wrapped = wrap(model, mesh["data"])
        mine = mesh.get_local_rank("data")
        optimizer = adam(model)
        results.append(train(model, optimizer, lambda i: images(2 * i + mine, mesh["domain"]), use, wrapped, 14))  # noqa: B023
    compare([*results[1][0], *results[1][1], *results[1][2]], [*results[0][0], *results[0][1], *results[0][2]])


def ddp():
    def wrap(model, mesh):
        stream = torch.cuda.Stream()  # as torch asks for: it keeps what belongs to a stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            wrapped = DistributedDataParallel(model, process_group=mesh.get_group())
        torch.cuda.current_stream().wait_stream(stream)
        return wrapped

    on_two_axes(wrap)


def fsdp2():
    def wrap(model, mesh):
        for layer in (model.conv, model):
            fully_shard(layer, mesh=mesh)
        return model

    on_two_axes(wrap)


def ddp_on_the_current_stream():
    with pytest.raises(RuntimeError, match="would make the legacy stream depend on a capturing"):
        on_two_axes(lambda model, mesh: DistributedDataParallel(model, process_group=mesh.get_group()))


@pytest.mark.parametrize(
    "work", [pytest.param(ddp, marks=SLOW), ddp_on_the_current_stream, fsdp2], ids=lambda f: f.__name__
)
def test_wrappers_are_captured(work, emulated):
    run_distributed(work, 4, timeout=120)


# -- what is refused --------------------------------------------------------------------------------------------------


def printed(x):
    print(x)
    return x


IN_STEPS = {  # a step of an argument, and what the error says
    "item": (lambda x: x.sum().item(), "item: a CUDA graph cannot contain this, because the host reads values"),
    "if": (lambda x: x if x.sum() > 0 else -x, "item: a CUDA graph cannot contain this"),
    "printing": (printed, "cannot contain this step"),
    "a mask": (lambda x: x[x > 0], "masked_select: a CUDA graph cannot contain this"),
    "dropout": (lambda x: F.dropout(x, 0.5), "the host draws a seed for each call"),
    "a tensor of the host": (
        lambda x: x + torch.rand(4, device="cpu", dtype=torch.float64).to("cuda"),
        "operation not permitted when stream is capturing (copy from the host)",
    ),
    "one rank": (lambda x: x.to_local().sum().item() if dist.get_rank() else x, "(rank 1: CUDA error: "),
}


def refused(step, text, *args, kind=RuntimeError, compared=0, **kwargs):
    """On all ranks alike, and with nothing sent but what they compare, in as many groups."""
    from device.emulated import counted

    with counted() as found, pytest.raises(kind) as raised:
        step(*args, **kwargs)
    assert text in str(raised.value), raised.value
    assert found.total("nccl") == 2 * compared, found.events
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    return str(raised.value)


def steps_are_refused():
    mesh, texts = shared_mesh(2), []
    for function, text in IN_STEPS.values():
        step, x = capture(function, warmup=1), images(0, mesh)
        step(x)
        texts.append(refused(step, text, x, compared=1))
        gc.collect()  # the errors: a frame of torch's printing keeps functorch off
        assert "A graph repeats kernels" in texts[-1]
        assert images(0, mesh).square().sum().item() > 0
    return texts


def test_steps_that_need_the_host_are_refused_on_all_ranks(emulated):
    first, second = run_distributed(steps_are_refused, 2)
    assert first == second


@on_ranks(2)
def test_other_arguments_than_captured_are_refused(emulated):
    mesh = shared_mesh(2)
    x, y = images(0, mesh), torch.ones(3)
    for calls in (1, 3):  # before the step is captured, and afterwards
        step = capture(lambda x, y, scale: x.sum() * y.sum() * scale, warmup=2)
        for _ in range(calls):
            step(x, y, scale=2)
        was = "in the first call, and a CUDA graph repeats that"
        refused(step, "argument [0] is ", images(0, mesh, n=1), y, scale=2, kind=ValueError)
        refused(step, "argument [0] is ", images(0, mesh, sizes=(4, 4)), y, scale=2, kind=ValueError)
        refused(step, f"argument [1] is (4,), torch.float32, on {y.device}", x, torch.ones(4), scale=2, kind=ValueError)
        refused(step, f"argument ['scale'] is 3, but was 2 {was}", x, y, scale=3, kind=ValueError)
        refused(step, "torch.float64", x, y.double(), scale=2, kind=ValueError)
        refused(step, "which requires a gradient", x, y.clone().requires_grad_(), scale=2, kind=ValueError)
        compare(plain([step(x, y, scale=2)]), plain([x.sum() * y.sum() * 2]))
    step = capture(lambda *args: args[0])
    refused(step, "an argument of the step requires a gradient", x.clone().requires_grad_(), kind=ValueError)
    refused(step, "on cpu and cuda", x, torch.ones(3, device="cpu"), kind=ValueError)
    refused(step, "no argument of the step is a tensor", 3, kind=TypeError)
    refused(capture, "at least 1 is needed", step, warmup=0, kind=ValueError)


def trained(optimizer_of, calls, between=lambda optimizer: None):
    mesh, model = shared_mesh(2), small()
    optimizer = optimizer_of(model.parameters())
    step = capture(step_of(model, optimizer), warmup=1)
    losses = []
    for i in range(calls):
        losses.append(step(images(i, mesh)))
        between(optimizer)
    return plain(losses), lambda: step(images(0, mesh))


def stepped(kind, parameters, **options):
    """An optimizer that has been used before, so that it keeps how often where it does without a default device."""
    with torch.device("cpu"):
        parameters = list(parameters)
        optimizer = kind(parameters, **options)
        for p in parameters:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    return optimizer


@on_ranks(2)
def test_optimizers_that_compute_on_the_host_are_refused(emulated):
    _, step = trained(lambda p: stepped(torch.optim.Adagrad, p, lr_decay=0.1), 1)
    refused(step, "Adagrad keeps 'step' on the host")

    def decay(optimizer):
        optimizer.param_groups[0]["lr"] *= 0.5

    made = []
    _, step = trained(lambda p: made.append(torch.optim.SGD(p, lr=0.5)) or made[0], 3)
    decay(made[0])
    refused(step, "lr of SGD is 0.25, but was 0.5 when the step was captured", kind=ValueError)
    # A tensor on the GPU goes on, and no optimizer has to be made for graphs.
    rates = [torch.tensor(0.01, dtype=torch.float64) for _ in range(2)]
    found, _ = trained(lambda p: stepped(torch.optim.AdamW, p, lr=rates[0], eps=1e-2), 5, decay)
    with mock.patch(f"{__name__}.capture", lambda step, warmup: step):
        options = {"lr": rates[1], "eps": 1e-2, "capturable": True}
        expected, _ = trained(lambda p: stepped(torch.optim.AdamW, p, **options), 5, decay)
    compare(found, expected)


@on_ranks(2)
def test_debug_mode_and_communication_by_the_host_are_refused(emulated):
    mesh = shared_mesh(2)
    x, step = images(0, mesh), capture(lambda x: F.conv2d(x, torch.ones(1, 3, 3, 3, dtype=torch.float64)), warmup=1)
    step(x)
    with mock.patch.dict("os.environ", {"SHARDTENSOR_DEBUG": "1"}):
        refused(step, "unset SHARDTENSOR_DEBUG", x, compared=1)
    with mock.patch("shardtensor.parallel.capture.backend_of", lambda group, device: "gloo"):
        refused(step, "the ranks communicate by gloo, through the host", x)


def ranks_differ():
    mesh = shared_mesh(2)
    step, x = capture(lambda x: F.conv2d(x, torch.ones(1, 3, 3, 3, dtype=torch.float64)), warmup=1), images(0, mesh)
    step(x)
    if dist.get_rank():  # nothing is sent for it
        ShardTensor.from_local(torch.ones(2), mesh, [Shard(0)], shard_sizes="even")
    step(x)


def test_ranks_that_have_not_done_the_same_are_told_before_they_capture(emulated):
    for error in run_expecting_errors(ranks_differ, 2):
        assert re.search(r"the ranks have not done the same .* was capture \d+ of a step", str(error)), error
