"""The declaration of operators: binding, promotion, and that a plan is kept under all that it was made from."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from seeded import seeded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardtensor
from shardtensor import ShardTensor, UnsupportedSharding
from shardtensor.extend import Composed, LocalPlan, operator
from shardtensor.observe._compat import init_fake_process_group
from shardtensor.testing import assert_matches_unsharded, shard, shared_mesh, simulate_ranks


def scaled(x, other=None, factor=2, *, shift=0):
    if torch.overrides.has_torch_function((x, other)):
        return torch.overrides.handle_torch_function(scaled, (x, other), x, other, factor, shift=shift)
    return x * factor + shift if other is None else x * factor + other + shift


class Declared:
    """``scaled`` declared, and how often a plan was made."""

    def __enter__(self):
        self.made = []

        @operator(scaled, tensors="x other")
        def plan_scaled(call, x, other=None, factor=2, *, shift=0):
            self.made.append((x, other, factor, shift, call.autocast()))
            if other is not None:
                call.redistribute("other", other.with_layout(x.layout))
            return LocalPlan(lambda a, b: scaled(a, b, factor, shift=shift), x)

        return self

    def __exit__(self, *_):
        shardtensor.extend.unregister(scaled)


def on_one_rank(check):
    """Run a check that needs specs only, as rank 0 of two."""
    simulate_ranks(check, 2, only=[0])


def made(mesh, local=None, sizes=(5, 3), placement=None):
    local = torch.zeros(5, 4) if local is None else local
    return ShardTensor.from_local(local, mesh, [placement or Shard(0)], shard_sizes={0: sizes} if sizes else None)


def every_ingredient():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    x = made(mesh)
    image = torch.zeros(1, 3, 4, 4)
    variants = {
        "the same": lambda: scaled(x),
        "dtype": lambda: scaled(made(mesh, torch.zeros(5, 4, dtype=torch.float64))),
        "shape": lambda: scaled(made(mesh, torch.zeros(5, 3))),
        "shard sizes": lambda: scaled(made(mesh, sizes=(5, 7))),
        "placement": lambda: scaled(made(mesh, torch.zeros(8, 4), None, Replicate())),
        "strides": lambda: scaled(made(mesh, torch.zeros(4, 5).T, None, Replicate())),
        "channels last": lambda: scaled(made(mesh, image, (1, 1))),
        "memory format": lambda: scaled(made(mesh, image.contiguous(memory_format=torch.channels_last), (1, 1))),
        "an argument": lambda: scaled(x, factor=3),
        "its type": lambda: scaled(x, factor=3.0),
        "and another": lambda: scaled(x, factor=True),
        "a keyword": lambda: scaled(x, shift=1),
        "a second tensor": lambda: scaled(x, x),
        "a plain tensor": lambda: scaled(x, torch.zeros(8, 4)),
        "the plain one's dtype": lambda: scaled(x, torch.zeros(8, 4, dtype=torch.float64)),
        "the plain one's strides": lambda: scaled(x, torch.zeros(4, 8).T),
    }
    circumstances = {
        "autocast": lambda: torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16),
        "allow_gather": shardtensor.allow_gather,
        "the method of attention": lambda: shardtensor.attention_method("ring"),
        "half precision": lambda: shardtensor.half_precision("exact"),
    }
    with Declared() as declared:
        for name, call in variants.items():
            before = len(declared.made)
            call()
            assert len(declared.made) == before + 1, f"{name}: no plan of its own"
            call()
            assert len(declared.made) == before + 1, f"{name}: the plan was not kept"
        for name, context in circumstances.items():
            before = len(declared.made)
            with context():
                scaled(x)
                scaled(x)
            assert len(declared.made) == before + 1, name
            scaled(x)
            assert len(declared.made) == before + 1, f"{name}: the plan from outside was lost"
        before = len(declared.made)
        torch.set_default_dtype(torch.float64)
        try:
            scaled(x)
        finally:
            torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(True)
        try:
            scaled(x)
        finally:
            torch.use_deterministic_algorithms(False)
        assert len(declared.made) == before + 2
        with torch.no_grad(), shardtensor.set_transport("p2p"):  # which runs depend on, and no plan
            scaled(x)
        assert len(declared.made) == before + 2
        shardtensor.extend.register(on_one_rank)(lambda: None)
        shardtensor.extend.unregister(on_one_rank)
        scaled(x)
        assert len(declared.made) == before + 3, "the registry"


def test_a_plan_is_kept_under_all_that_it_depends_on():
    on_one_rank(every_ingredient)


def other_meshes():
    one, two = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    with Declared() as declared:
        scaled(made(one))
        scaled(ShardTensor.from_local(torch.zeros(5, 4), two, [Replicate(), Shard(0)], shard_sizes={1: (5, 3)}))
        scaled(made(init_device_mesh("cpu", (2,))))  # an equal one
        assert len(declared.made) == 2
        with pytest.raises(UnsupportedSharding, match="different meshes"):
            scaled(made(one), ShardTensor.from_local(torch.zeros(8, 4), two, [Replicate()] * 2))


def test_plans_and_meshes():
    on_one_rank(other_meshes)


def test_plans_do_not_outlive_their_process_groups():
    with Declared() as declared:
        for _ in range(2):
            init_fake_process_group(0, 2)
            try:
                mesh = init_device_mesh("cpu", (2,))
                scaled(made(mesh))
                assert scaled(made(mesh)).device_mesh is mesh
            finally:
                dist.destroy_process_group()
        assert len(declared.made) == 2


def places():
    mesh = init_device_mesh("cpu", (2,))
    x, y = made(mesh, torch.ones(5, 4)), made(mesh, torch.full((5, 4), 10.0))
    with Declared():
        assert scaled(x, x).to_local().unique().tolist() == [3]
        # The same plan, for there is nothing else in its key; but other tensors.
        assert scaled(x, y).to_local().unique().tolist() == [12]
        assert scaled(other=y, x=x).to_local().unique().tolist() == [12]
        with pytest.raises(TypeError, match="multiple values"):
            shardtensor.extend.registered()[scaled](x, x=x)
        with pytest.raises(TypeError, match="takes 4 arguments, but 5 were given"):
            shardtensor.extend.registered()[scaled](x, y, 2, 0, 1)


def test_tensors_are_bound_by_their_place():
    on_one_rank(places)


def unhashable():
    mesh = init_device_mesh("cpu", (2,))

    class Factor(float):
        __hash__ = None

    with Declared() as declared:
        for _ in range(2):
            assert scaled(made(mesh, torch.ones(5, 4)), factor=Factor(3)).to_local().unique().tolist() == [3]
        assert len(declared.made) == 2


def test_an_argument_that_cannot_be_hashed_is_planned_anew():
    on_one_rank(unhashable)


@on_ranks(2)
def test_operands_are_prepared():
    mesh = shared_mesh(2)
    torch.manual_seed(0)
    x = torch.randn(8, 4, dtype=torch.float64)
    with Declared():
        # Plain, DTensor, Partial: all are ShardTensors in the plan's run, and their gradients come back as they were.
        plain = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
        sharded = shard(x, mesh, [Shard(0)], {0: (5, 3)}, requires_grad=True)
        partial = shard(x, mesh, [Partial()])
        dtensor = DTensor.from_local(x, mesh, [Replicate()])
        for other, value in ((plain, plain.detach()), (dtensor, x), (partial, x)):
            y = scaled(sharded, other)
            torch.testing.assert_close(y.full_tensor(), 2 * x + value, rtol=1e-12, atol=1e-12)
        y = scaled(sharded, plain)
        (y * y).sum().backward()
        assert type(plain.grad) is torch.Tensor
        torch.testing.assert_close(plain.grad, 2 * (2 * x + plain.detach()), rtol=1e-12, atol=1e-12)
        assert_matches_unsharded(scaled, x, mesh=mesh, placements=[Shard(0)], shard_sizes={0: (7, 1)})


def test_what_every_spelling_has_is_declared():
    with pytest.raises(TypeError, match="lacks arguments"):

        @operator(F.selu, tensors="input")
        def plan_selu(call, input):
            return LocalPlan(lambda local: local, input)


def test_a_spelling_is_declared_once():
    with Declared(), pytest.raises(ValueError, match="has a handler already"):
        operator(scaled, tensors="x")(lambda call, x, other=None, factor=2, *, shift=0: Composed(lambda x: x))
    with pytest.raises(ValueError, match="has a rule already"):
        operator(torch.ops.aten.flip.default)(lambda call: None)
    with pytest.raises(KeyError):
        shardtensor.extend.unregister(nullcontext)


@pytest.mark.parametrize(
    ("function", "how"),
    [
        (F.conv2d, "declared"),
        (torch.Tensor.softmax, "decomposed"),
        (torch.ops.aten.relu.default, "elementwise"),
        (torch.relu_, "elementwise"),
        (torch.add, "elementwise"),  # which has overloads of numbers, for TorchScript
        (torch.ops.aten.conv2d.padding, "declared"),
        (F.softplus, "elementwise"),
        (F.softsign, "decomposed"),
        (torch.segment_reduce, "refused"),
        (torch.ops.aten.segment_reduce, "refused"),
        (torch.as_strided, "declared"),
        (len, "decomposed"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),  # without addresses, which differ in each process
)
def test_supports(function, how):
    answer = shardtensor.supports(function)
    assert answer.how == how
    assert bool(answer) == (how != "refused")
    assert how not in ("declared", "elementwise") or answer.where.startswith("shardtensor.ops.")
    assert how != "refused" or "register a handler" in answer.reason


def test_supports_tells_of_transforms():
    for transform in (torch.func.grad, torch.func.vjp, torch.func.jvp, torch.func.hessian, torch.func.vmap):
        answer = shardtensor.supports(transform)
        assert answer and answer.how == "declared" and answer.where == "shardtensor.operators.transforms"
    assert "second derivatives" in shardtensor.supports(torch.func.jvp).reason
    assert not shardtensor.supports(torch.func.linearize)


def test_supports_asks_for_functions():
    with pytest.raises(TypeError, match="neither a function nor an operator"):
        shardtensor.supports(3)


NUMPY_NAMES = {
    "sum": lambda x: x.sum(axis=1, keepdims=True),
    "mean": lambda x: torch.mean(x, axis=(0, 1)),
    "amax": lambda x: x.amax(axis=0, keepdims=True),
    "max": lambda x: x.max(axis=0)[0],
    "std": lambda x: x.std(axis=1, keepdims=True),
    "cumsum": lambda x: x.cumsum(axis=0),
    "softmax": lambda x: torch.softmax(x, axis=0),
    "cat": lambda x: torch.cat([x, x], axis=0),
    "sort": lambda x: x.sort(axis=0)[0],
    "mul": lambda x: torch.mul(x1=x, x2=x),
    "matmul": lambda x: torch.matmul(x1=x, x2=x.T),
    "sum of": lambda x: torch.sum(a=x),
}


@on_ranks(2)
def test_numpy_names_of_arguments():
    for function in NUMPY_NAMES.values():
        x = torch.randn(5, 6, dtype=torch.float64, generator=seeded(0))
        assert_matches_unsharded(function, x, mesh_shape=2, placements=[Shard(0)], shard_sizes={0: (4, 1)})


NUMBERS_AS_TENSORS = {
    "sizes in a tuple": lambda x, n: F.pad(x, (n, 2, n - 1, n)),
    "by keyword": lambda x, n: F.avg_pool2d(x, kernel_size=n + 1, stride=n),
    "a dim": lambda x, n: x.softmax(n) + x.sum(3 - n, keepdim=True),
    "next to a parameter": lambda x, n: F.conv2d(x, x.new_ones(2, 4, 3, 3), None, (n + 1, 1), n),
    "a real number": lambda x, n: F.layer_norm(x, (8,), eps=n * 0.1),
    "an operand of another overload": lambda x, n: torch.max((3 * x).long(), n),
}


@pytest.mark.parametrize("how", NUMBERS_AS_TENSORS)
@on_ranks(2)
def test_tensors_of_one_element_are_numbers(how):
    function, x = NUMBERS_AS_TENSORS[how], torch.randn(1, 4, 6, 8, dtype=torch.float64)
    layout = {"placements": [Shard(2)], "shard_sizes": {0: (5, 1)}}
    for number in (1, 1, 2):  # a plan holds for one number only
        given = torch.tensor(number)
        assert_matches_unsharded(lambda t, n=given: function(t, n), x, mesh_shape=2, **layout)
    mesh = shared_mesh(2)
    one = ShardTensor.from_local(torch.tensor(1), mesh, [Replicate()])
    y = function(shard(x, mesh, *layout.values()), one)
    torch.testing.assert_close(y.full_tensor(), function(x, torch.tensor(1)))
