"""What every network of another package is held to: on two ranks it does what it does on one device.

A module of networks names its ``PACKAGE``, lists its ``NETWORKS``, and makes their test by :func:`all_exact`; a few run
always, the others with ``-m slow``, and all of a package that is not installed are skipped.
"""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from seeded import seeded
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from shardtensor import UnsupportedSharding
from shardtensor.testing import count_communication, run_distributed, shard, shared_mesh


def normal(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def uniform(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, dtype=torch.float64)


def integers(end: int) -> Callable[[tuple[int, ...]], Tensor]:
    """Draws numbers below ``end``, such as of classes or words."""
    return partial(torch.randint, 0, end)


@dataclass(frozen=True)
class Network:
    """A small one of its kind.

    Attributes:
        make: the network, from the module :data:`PACKAGE`.
        shape: of the input.
        dim: of the input that is cut, 5/8 to the first rank.
        call: the network's result for an input: a tensor, a number, or several of these in tuples, lists and dicts.
        tolerance: relative; larger where the network computes in float32 whatever its weights are.
        reduced: bytes that are summed over ranks in all, relative to the input's: statistics, pooled features and the
            like, of which some networks have many for so small an image. No activation.
        norms_train: norms that keep running statistics compute them from the batch, as in training. A mean and a
            variance for each channel come on top of ``reduced``.
        dtype: of weights and input; float32 where the network cannot run in another, with a tolerance to match.
        half: run in bfloat16, too; not where the network's one device cannot.
        draw: the input of a shape, equal on all ranks after the same seed. Integers have no gradient.
        train: the whole network is in training mode.
        backward: the result is differentiated, where it can be; not where one device cannot or should not.
        default: dtype of what the network itself makes without one.
        values: a preview reads those of indices (networks.shares).
        at_use: other fields for counts of shares (networks.shares), where ``make`` or ``call`` fixes a tiny size, or
            takes a plain tensor of the input's size, which a program would shard.
    """

    make: Callable[[Any], nn.Module]
    shape: tuple[int, ...]
    dim: int = 2
    call: Callable[[nn.Module, Tensor], Any] = field(default=lambda network, x: network(x))
    tolerance: float = 1e-9
    reduced: float = 0.5
    norms_train: bool = False
    dtype: torch.dtype = torch.float64
    half: bool = False
    draw: Callable[[tuple[int, ...]], Tensor] = normal
    train: bool = False
    backward: bool = True
    default: torch.dtype = torch.float32
    values: bool = False
    at_use: Mapping[str, Any] = field(default_factory=dict)


class Called(nn.Module):
    """A network, called as its entry says."""

    def __init__(self, network: Network, model: nn.Module) -> None:
        super().__init__()
        self.model, self.call = model, network.call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.model, x)


def names(networks: Iterable[str], always: Sequence[str] = ()) -> list[Any]:
    """Parameters of a test: those not in ``always`` are slow."""
    return [pytest.param(name, marks=() if name in always else pytest.mark.slow) for name in networks]


def all_exact(module: str, networks: Iterable[str], always: Sequence[str] = (), of_packages: bool = False) -> Any:
    """The test that networks of a module do on two ranks what they do in one process. ``of_packages``: each name begins
    with a package, without which it is skipped."""
    return _each(check, module, networks, always, of_packages)


def all_refused(module: str, networks: Iterable[str], always: Sequence[str] = (), of_packages: bool = False) -> Any:
    """The test that networks of a module are refused, as its ``REFUSED`` says."""
    return _each(check_refused, module, networks, always, of_packages)


def _each(
    check: Callable[[str, str], None], module: str, networks: Iterable[str], always: Sequence[str], of_packages: bool
) -> Any:
    @pytest.mark.parametrize("name", names(networks, always))
    def test(name: str) -> None:
        if of_packages:
            pytest.importorskip(name.split(",")[0])
        run_distributed(check, 2, module, name, timeout=300.0)

    return test


def text(*shape: int) -> Tensor:
    """What a prompt gives, the same on every rank."""
    return torch.randn(shape, generator=seeded(1), dtype=torch.float64)


def check(module: str, name: str) -> None:
    """Compare the network ``name`` of a module of networks on two ranks with itself in one process: the result, the
    input's gradient, those of all parameters, and all parameters and buffers. To be called by every rank."""
    network, model, twin, x, sharded = prepared(module, name)
    with default_dtype(network.default):
        seed()
        with count_communication() as counted:
            actual = results(network.call(model, sharded))
        summed = f"{counted.collective_bytes / x.nbytes:.2f} of the input's bytes, {dict(counted.collectives)}"
        assert counted.collective_bytes < network.reduced * x.nbytes + statistics(model), summed
        seed()
        expected = results(network.call(twin, x))
        assert len(actual) == len(expected) > 0
        for ours, theirs in zip(actual, expected, strict=True):
            assert_near(ours, theirs, network.tolerance)
            assert ours.requires_grad == theirs.requires_grad
        if network.backward and any(each.requires_grad for each in expected):
            loss(actual).backward()
            loss(expected).backward()
            assert (sharded.grad is None) == (x.grad is None)
            if x.grad is not None:
                assert_near(sharded.grad, x.grad, network.tolerance, name="the input's gradient")
    compare(model, twin, network.tolerance)
    if network.half:
        check_half(network, twin, x.detach())


def check_refused(module: str, name: str) -> None:
    """The network ``name`` runs in one process; of two ranks, each raises the error that the module's ``REFUSED`` has a
    pattern of, and says what to do. To be called by every rank."""
    network, model, twin, x, sharded = prepared(module, name)
    with default_dtype(network.default):
        seed()
        assert results(network.call(twin, x))
        seed()
        with pytest.raises(UnsupportedSharding, match=importlib.import_module(module).REFUSED[name]) as refused:
            loss(results(network.call(model, sharded))).backward()
    assert "Remedy: " in str(refused.value)


def prepared(module: str, name: str) -> tuple[Network, nn.Module, nn.Module, Tensor, Tensor]:
    """The network ``name``, built twice, and its input in whole and cut."""
    listed = importlib.import_module(module)
    network: Network = listed.NETWORKS[name]
    # Both are built, as some cannot be copied; with the seed of the call, too, for those that draw numbers in it.
    package = importlib.import_module(listed.PACKAGE)
    with default_dtype(network.default):
        model, twin = (
            built(network.make, package, network.dtype, network.norms_train, network.train) for _ in range(2)
        )
    x = network.draw(network.shape)
    graded = x.is_floating_point() and network.backward
    x = x.to(network.dtype) if x.is_floating_point() else x
    sharded = cut(x, network.dim, graded)
    return network, model, twin, x.requires_grad_(graded), sharded


def seed() -> None:
    """Of a call, for a network that draws numbers in it."""
    torch.manual_seed(1)
    random.seed(1)


def results(y: Any) -> list[Tensor]:
    """The tensors of a result, and its numbers, in order."""
    if isinstance(y, Tensor):
        return [y]
    if isinstance(y, bool | str | None):
        return []
    if isinstance(y, int | float):
        return [torch.tensor(y, dtype=torch.float64)]
    return [each for part in (y.values() if hasattr(y, "items") else y) for each in results(part)]


def loss(y: Sequence[Tensor]) -> Tensor:
    """Of what of the results can be differentiated. Without the weights, the gradient of one that ends with a norm
    would be nothing but rounding."""
    parts = [torch.view_as_real(each) if each.is_complex() else each for each in y if each.requires_grad]
    return torch.stack([(weights(part) * (part + 1).square()).mean() for part in parts]).sum()


def weights(y: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, y.shape[-1] if y.dim() else 1, dtype=y.dtype)


def compare(model: nn.Module, twin: nn.Module, tolerance: float) -> None:
    """Parameters, their gradients and buffers of a network, with those of the same one in one process."""
    # Biases in front of norms have gradients of nothing but rounding.
    gradients = [p.grad for p in twin.parameters() if p.grad is not None and p.numel()]
    largest = max((float(gradient.abs().max()) for gradient in gradients), default=0.0)
    for (key, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), key
        if q.grad is not None:
            assert_near(p.grad, q.grad, tolerance, largest, f"gradient of {key}")
        assert_near(p, q, tolerance, name=key)
    for (key, p), q in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert_near(p, q, tolerance, name=key)


def check_half(network: Network, model: nn.Module, x: Tensor) -> None:
    """In bfloat16 the error of two ranks, against float64, is at most twice that of one device: of the result and of
    the input's gradient, in the root of mean squares."""
    model.zero_grad()
    model.bfloat16()
    x = x.bfloat16()
    reference = copy.deepcopy(model).double()

    def run(model: nn.Module, x: Tensor) -> list[Tensor]:
        y = network.call(model, x)
        y.square().mean().backward()
        assert x.grad is not None
        return [whole(y).detach().double(), whole(x.grad).double()]

    exact = run(reference, x.double().requires_grad_())
    one = run(copy.deepcopy(model), x.clone().requires_grad_())
    two = run(model, cut(x, network.dim))
    for what, ours, theirs, truth in zip(("the result", "the input's gradient"), two, one, exact, strict=True):
        error, allowed = ((each - truth).square().mean().sqrt() for each in (ours, theirs))
        assert error <= 2 * allowed, f"{what} in bfloat16: error {error:.2e}, that of one device {allowed:.2e}"


def built(
    make: Callable[[Any], nn.Module],
    package: Any,
    dtype: torch.dtype = torch.float64,
    norms_train: bool = False,
    train: bool = False,
) -> nn.Module:
    torch.manual_seed(0)
    random.seed(0)
    with uninitialized_is_nan():
        model = make(package).train(train)
    model = model.double() if dtype is torch.float64 else model.float()
    for layer in model.modules() if norms_train else ():
        if keeps_statistics(layer):
            layer.train()
    with torch.no_grad():
        for parameter in model.parameters():  # some start at zero, and some at whatever was in memory
            largest = parameter.abs().max() if parameter.numel() else torch.tensor(1.0)
            if not parameter.isfinite().all() or not 1e-9 < largest < 1e3:
                nn.init.normal_(parameter, std=0.1)
    return model


@contextmanager
def uninitialized_is_nan() -> Iterator[None]:
    """What a network leaves as it was in memory would differ between ranks."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def keeps_statistics(layer: nn.Module) -> bool:
    return getattr(layer, "running_mean", None) is not None


def statistics(model: nn.Module) -> int:
    """Bytes of the means and variances that norms compute from the batch."""
    kept = [layer.running_mean for layer in model.modules() if keeps_statistics(layer) and layer.training]
    return sum(2 * mean.nbytes for mean in kept)


def cut(x: Tensor, dim: int, requires_grad: bool = True) -> Tensor:
    first = x.shape[dim] * 5 // 8
    sizes = {0: (first, x.shape[dim] - first)}
    return shard(x, shared_mesh(2), [Shard(dim)], sizes, requires_grad=requires_grad)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def assert_near(actual: Any, expected: Tensor, tolerance: float, scale: float = 0.0, name: str = "") -> None:
    """Equal to ``tolerance`` times ``scale``, or times the largest expected value if that is larger. Integers, and what
    is infinite or NaN, are equal."""
    actual, expected = whole(actual).detach(), expected.detach()
    if actual.dtype == expected.dtype and torch.equal(actual, expected):
        return  # as most parameters are, which may be large
    finite = expected[expected.isfinite()]
    if not (expected.is_floating_point() or expected.is_complex()):
        tolerance, finite = 0.0, finite[:0]
    scale = max(scale, float(finite.abs().max()) if finite.numel() else 0.0)
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=tolerance * scale, equal_nan=True, msg=lambda m: f"{name} {m}".strip()
    )
