"""The patched functions: invisible to plain tensors, reversible, and nothing that correctness rests on."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import pkgutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from seeded import seeded
from torch import nn
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor.dispatch import patches
from shardtensor.testing import run_expecting_errors, shard, shared_mesh

EAGER = [p for p in patches.PATCHES if not p.lazy]
NAMES = [f"{p.module}:{p.name}" for p in EAGER]


class Holder(nn.Module):
    """A model that keeps functions, as users' do."""

    def __init__(self):
        super().__init__()
        self.function = F.conv2d
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.linear = nn.Linear(5, 4)

    def forward(self, x):
        return self.linear(self.function(self.conv(x), self.conv.weight[:2, :1].repeat(1, 3, 1, 1)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Holder()


@pytest.fixture
def x():
    return torch.randn(2, 2, 7, 7, generator=seeded(0))


@pytest.mark.parametrize("name", NAMES)
def test_a_patched_function_looks_like_the_original(name):
    patched = pkgutil.resolve_name(name)
    original = patched.__wrapped__
    assert isinstance(patched, patches.PatchedFunction)
    assert (patched.__name__, patched.__doc__) == (original.__name__, original.__doc__)
    assert patched == original and hash(patched) == hash(original)
    try:
        assert inspect.signature(patched) == inspect.signature(original)
    except ValueError:
        with pytest.raises(ValueError):
            inspect.signature(original)  # a builtin has none


@pytest.mark.parametrize("name", NAMES)
def test_patched_functions_pickle_and_copy_by_name(name):
    patched = pkgutil.resolve_name(name)
    assert pickle.loads(pickle.dumps(patched)) is patched
    assert copy.deepcopy(patched) is copy.copy(patched) is patched
    stored = pickle.dumps(patched)
    assert b"shardtensor" not in stored and name.encode() in stored


def test_models_that_hold_them_are_saved_and_copied(model, x):
    expected = model(x)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stream, weights_only=False)):
        assert torch.equal(twin(x), expected)


def test_what_was_saved_loads_where_this_package_is_not_imported(model, x, tmp_path):
    # A file of functions and of torch's own modules, such as others can read.
    torch.save({"function": model.function, "conv": model.conv}, tmp_path / "conv.pt")
    script = f"""
import sys, torch
loaded = torch.load({str(tmp_path / "conv.pt")!r}, weights_only=False)
assert not any(name.split(".")[0] == "shardtensor" for name in sys.modules)
assert loaded["function"] is torch.nn.functional.conv2d
assert loaded["conv"](torch.ones(1, 2, 5, 5)).shape == (1, 3, 5, 5)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 3)
        self.linear = nn.Linear(5, 2)

    def forward(self, x):
        weight = self.conv.weight
        return self.linear(F.conv1d(x, weight, stride=1)) + F.linear(self.conv(x), self.linear.weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit is on its way out
def test_scripting_tracing_and_fx():
    torch.manual_seed(0)
    model, x = Scripted(), torch.randn(2, 2, 7)
    expected = model(x)
    assert torch.equal(torch.jit.script(model)(x), expected)
    conv = nn.Conv2d(1, 1, 1)
    assert torch.equal(torch.jit.script(conv)(torch.ones(1, 1, 2, 2)), conv(torch.ones(1, 1, 2, 2)))
    assert torch.equal(torch.jit.trace(model, x)(x), expected)
    graph = torch.fx.symbolic_trace(model)
    assert torch.equal(graph(x), expected)
    assert any("conv1d" in str(node.target) for node in graph.graph.nodes)
    assert torch.equal(pickle.loads(pickle.dumps(graph))(x), expected)


def test_export_compile_and_function_transforms():
    torch.manual_seed(0)
    model, x = Scripted(), torch.randn(2, 2, 7)
    expected = model(x)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    batched = torch.vmap(lambda weight: F.conv1d(x, weight))(torch.stack([model.conv.weight] * 3))
    torch.testing.assert_close(batched[1], F.conv1d(x, model.conv.weight))
    gradient = torch.func.grad(lambda weight: F.linear(x, weight).sum())(torch.ones(4, 7))
    assert gradient.shape == (4, 7)


def everything(seed=0):
    """Results and gradients of the patched functions on plain tensors."""
    g = seeded(seed)
    results = []
    for n in (1, 2, 3):
        x = torch.randn(2, 4, *(6,) * n, generator=g, requires_grad=True)
        w = torch.randn(6, 2, *(3,) * n, generator=g, requires_grad=True)
        b = torch.randn(6, generator=g)
        y = getattr(F, f"conv{n}d")(x, w, b, stride=2, padding=1, groups=2)
        y.square().sum().backward()
        results += [y, x.grad, w.grad, getattr(F, f"conv{n}d")(input=x, weight=w, padding="same", groups=2)]
    x, w = torch.randn(3, 5, generator=g), torch.randn(2, 5, generator=g)
    results += [F.linear(x, w), F.linear(x, w, bias=torch.ones(2)), F.l1_loss(x, x + 1)]
    return [t.detach() for t in results]


def test_plain_results_are_bitwise_those_of_the_originals():
    with_patches = everything()
    patches.uninstall()
    try:
        assert not [name for name in patches.installed() if name.startswith("torch.")]
        assert not isinstance(F.conv2d, patches.PatchedFunction)
        without = everything()
    finally:
        patches.install()
    assert all(map(torch.equal, with_patches, without)) and len(without) == 15
    assert {name.replace(":", ".") for name in NAMES} <= set(patches.installed())


def test_installing_twice_wraps_once():
    before = F.conv2d
    patches.install()
    assert F.conv2d is before
    assert not isinstance(F.conv2d.__wrapped__, patches.PatchedFunction)
    patches.uninstall()
    patches.uninstall()
    assert F.conv2d is before.__wrapped__
    patches.install()
    assert isinstance(F.conv2d, patches.PatchedFunction)


def test_torchs_errors_pass_through():
    with pytest.raises(RuntimeError, match="groups"):
        F.conv2d(torch.ones(1, 3, 4, 4), torch.ones(2, 2, 3, 3), groups=2)
    with pytest.raises(TypeError):
        F.linear()


@pytest.mark.parametrize("how", ["installed", "uninstalled"])
@on_ranks(2)
def test_correctness_does_not_rest_on_patches(how):
    """One convolution through every entry point, with and without patches."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, padding=1).double()
    whole = torch.randn(1, 2, 8, 5, dtype=torch.float64)
    x = shard(whole, shared_mesh(2), [Shard(2)], {0: (5, 3)})
    imported_earlier = F.conv2d.__wrapped__
    if how == "uninstalled":
        patches.uninstall()
    try:
        assert isinstance(F.conv2d, patches.PatchedFunction) == (how == "installed")
        w, b = conv.weight, conv.bias
        results = [
            conv(x),
            F.conv2d(x, w, b, padding=1),
            torch.conv2d(x, w, b, padding=1),
            imported_earlier(x, w, b, padding=1),
            torch.ops.aten.conv2d.default(x, w, b, [1, 1], [1, 1]),
            torch.ops.aten.convolution(x, w, b, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        ]
    finally:
        patches.install()
    for i, y in enumerate(results):
        assert y.shard_sizes == {0: (5, 3)}, i
        torch.testing.assert_close(y.full_tensor(), conv(whole), rtol=1e-10, atol=1e-12, msg=str(i))


# -- natten ----------------------------------------------------------------------------------------------------------

NATTEN_LATER = """
import sys
import shardtensor
from shardtensor.dispatch import patches
assert "natten" not in sys.modules
assert not [name for name in patches.installed() if name.startswith("natten")]
import natten, torch
assert {name for name in patches.installed() if name.startswith("natten")}
for function in (natten.na1d.__globals__["neighborhood_attention_generic"], natten.attention, natten.merge_attentions):
    assert function.__wrapped__ in shardtensor.extend.registered()
q = torch.randn(1, 6, 6, 2, 8)
before = natten.na2d(q, q, q, kernel_size=3)
patches.uninstall()
assert not patches.installed()
assert torch.equal(natten.na2d(q, q, q, kernel_size=3), before)
patches.install()
assert {name for name in patches.installed() if name.startswith("natten")}
"""
NATTEN_FIRST = """
import natten
import shardtensor
assert {name for name in shardtensor.dispatch.patches.installed() if name.startswith("natten")}
for function in (natten.na1d.__globals__["neighborhood_attention_generic"], natten.attention, natten.merge_attentions):
    assert function.__wrapped__ in shardtensor.extend.registered()
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(NATTEN_LATER, id="imported later"),
        pytest.param(NATTEN_FIRST, id="imported first", marks=pytest.mark.slow),
    ],
)
def test_natten_is_patched_whenever_it_is_imported(script):
    pytest.importorskip("natten")
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=120)


def attend_without_a_handler():
    import natten

    function = natten.functional.neighborhood_attention_generic.__wrapped__
    handler = shardtensor.extend.registered()[function]
    q = shard(torch.randn(1, 8, 6, 2, 8), shared_mesh(2), [Shard(1)], {0: (5, 3)})
    shardtensor.extend.unregister(function)
    try:
        natten.na2d(q, q, q, kernel_size=3)
    finally:
        shardtensor.extend.register(function)(handler)


def test_natten_without_a_handler_is_refused():
    pytest.importorskip("natten")
    for error in run_expecting_errors(attend_without_a_handler, 2):
        assert isinstance(error, shardtensor.UnsupportedSharding), repr(error)
        assert "neighborhood_attention_generic: no distributed form is registered" in str(error)
