"""Operators of torch's formulas: those that DTensor has strategies for, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from alike import raises_alike
from halves import in_halves, is_in
from on_ranks import on_ranks
from seeded import seeded
from torch.distributed.tensor import DTensor, Shard

import shardtensor
from shardtensor import UnsupportedSharding
from shardtensor._compat import DisableTorchFunction, decomposes
from shardtensor.dispatch.planning import returning
from shardtensor.dispatch.registry import OPERATORS, REFUSED, REMEDY, RULES, UNKNOWN, _default_of, function_of
from shardtensor.ops.spatial.interpolate import MODES
from shardtensor.testing import shard, shared_mesh

aten = torch.ops.aten


# -- what has a form ---------------------------------------------------------------------------------------------------


def with_strategies():
    """The operators that this release's DTensor has strategies for, but for those that write to ``out=``."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    names = ("op_strategy_funcs", "op_to_rules", "op_single_dim_strategy_funcs")
    found = {op for name in names for op in getattr(propagator, name, ())}
    return sorted((op for op in found if not any(a.is_out for a in op._schema.arguments)), key=str)


def has_form(op):
    forms = OPERATORS.get(op), RULES.get(op), _default_of(op)[1], function_of(op)
    return any(forms) or decomposes(op) or (returning(op) is not None and has_form(returning(op)))


# Kernels that only a program's own torch.ops reaches: torch's functions, which call them on one device, have plans.
BY_NAME_ALONE = {
    *("aten._batch_norm_with_update_functional", "aten._native_batch_norm_legit_functional"),
    *("aten._linalg_check_errors", "aten.linalg__powsum"),
    *(f"aten._upsample_lanczos2d_aa{of}" for of in ("", "_backward")),
    *(f"aten.{name}{n}d" for name in ("fractional_max_pool", "max_unpool") for n in (2, 3)),
    *(f"aten.nll_loss{n}_{of}" for n in ("", "2d") for of in ("forward", "backward")),
    *(f"prims.{name}" for name in ("amax", "amin", "copy_to", "erfcx", "frexp", "gcd", "ndtri", "ne")),
    *(f"prims.{name}" for name in ("prod", "sum", "var", "view_of")),
    *(f"prims.bessel_{name}" for name in ("i0e", "i1", "i1e", "j0", "j1")),
    *("prims.spherical_bessel_j0", "prims.zeta"),
}


def test_what_dtensors_have_strategies_for_has_a_form_on_shards_or_is_refused_with_a_reason():
    operators = [op for op in with_strategies() if op.namespace in ("aten", "prims")]
    assert len(operators) > 400
    without = [op for op in operators if not has_form(op)]
    assert {str(op.overloadpacket) for op in without} <= {str(packet) for packet in REFUSED} | BY_NAME_ALONE
    for op in without:
        reason = "; ".join(REFUSED.get(op.overloadpacket, (UNKNOWN, REMEDY)))
        assert not shardtensor.supports(op) and shardtensor.supports(op).reason == reason


# -- values ------------------------------------------------------------------------------------------------------------


def values(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=seeded(seed))


def rows():
    """An operator's name, its arguments, and where its tensors are sharded in turn; None: it stays plain."""
    x, g, w = values(5, 4, 7, 6), values(5, 4, 7, 6, seed=1), values(4, seed=2)
    for name, (_, n, _) in MODES.items():
        small, large = [5, 4, *(7, 6, 5)[:n]], [9, 4, 8][:n]
        corners = [] if "nearest" in name else [False]
        yield f"{name}_backward", [values(5, 4, *large), large, small, *corners], [[0], [1], [2], [-1]]
    for n in (2, 3):
        image, at = values(5, 4, *(7, 6, 5)[:n]), values(5, *(4, 9, 3)[:n], n, seed=3).tanh()
        options = [0, 0, False, [True, True]]
        grad, size = values(5, 4, *(4, 9, 3)[:n], seed=4), [3, 2, 4][:n]
        yield f"grid_sampler_{n}d_backward", [grad, image, at, *options], [[0, 0, 0], [1, 1, None], [2, None, 1]]
        yield f"_adaptive_avg_pool{n}d", [image, size], [[0], [1], [2]]
        averaged = values(5, 4, *size)
        yield f"_adaptive_avg_pool{n}d_backward", [averaged, image], [[0, 0], [1, 1], [None, 2], [2, 2]]

    _, mean, rstd = aten.native_layer_norm(x, [7, 6], None, None, 1e-5)
    scale, all_three = values(7, 6, seed=6), [True] * 3
    at = [[0, 0, 0, 0, None, None], [2, 2, None, None, 0, None], [1, None, 1, 1, None, 0]]
    yield "native_layer_norm_backward", [g, x, [7, 6], mean, rstd, scale, scale, all_three], at
    options = None, None, [True, False, False]
    yield "native_layer_norm_backward", [g, x, [7, 6], mean, rstd, *options], [[0, 0, 0, 0], [3, 3, None, None]]
    _, mean, rstd = aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    running = [values(4, seed=7), values(4).exp()]
    for train in (True, False):
        at = [[d, d, *[None] * 5] for d in (0, 2, 1)]
        yield "native_batch_norm_backward", [g, x, w, *running, mean, rstd, train, 1e-5, all_three], at

    for normalization in (0, 1, 2):
        for choice in (True, False):
            yield "_fft_c2c", [torch.complex(x, g), [2, 3], normalization, choice], [[0], [2], [3]]
            yield "_fft_r2c", [x, [2, 3], normalization, choice], [[0], [2], [3]]
        yield "_fft_c2r", [torch.complex(x, g), [2, 3], normalization, 10], [[0], [2], [3]]

    a = values(5, 3, 3) + 3 * torch.eye(3, dtype=x.dtype)
    positive = a @ a.mT + torch.eye(3, dtype=x.dtype)
    b, tall, lower = values(5, 3, 4, seed=8), values(5, 4, 3, seed=9), positive.tril()
    for name in ["_det", "_slogdet", "lu", "lu_factor_ex", "inv_ex", "matrix_exp"]:
        yield (f"_linalg{name}" if name.startswith("_") else f"linalg_{name}"), [a], [[0], [1]]
    for name in ("_linalg_eigh", "linalg_cholesky_ex", "cholesky", "linalg_ldl_factor_ex"):
        yield name, [positive], [[0], [1]]
    for name in ("linalg_qr", "geqrf", "_linalg_svd"):
        yield name, [tall], [[0], [1]]
    yield "_linalg_svd", [tall, False, False], [[0], [1]]
    yield "linalg_eig", [positive.tril(-1).mT + torch.arange(1.0, 4).double().diag()], [[0], [1]]
    yield "linalg_pinv", [a, torch.tensor(1e-9)], [[0, None], [1, None]]
    yield "linalg_lstsq", [tall, values(5, 4, 2)], [[0, 0]]
    reflected = list(torch.geqrf(tall))
    yield "linalg_householder_product", reflected, [[0, 0], [1, None]]
    yield "ormqr", [*reflected, tall, True, True], [[0, 0, 0], [0, None, 0]]
    of_columns = [[0, 0], [None, 0], [0, 2], [None, 2]]
    yield "_linalg_solve_ex", [a, b], of_columns
    yield "triangular_solve", [b, lower, False], [[0, 0], [2, None]]
    yield "cholesky_solve", [b, lower], [[0, 0], [2, None]]
    yield "cholesky_inverse", [lower], [[0], [1]]
    lu, ldl = list(torch.linalg.lu_factor(a)), list(torch.linalg.ldl_factor(positive))
    yield "linalg_lu_solve", [*lu, b], [[0, 0, 0], [None, None, 2]]
    yield "linalg_ldl_solve", [*ldl, b], [[0, 0, 0], [None, None, 2]]
    yield "lu_unpack", lu, [[0, 0], [0, None]]
    yield "linalg_cross", [a, a.mT.clone()], [[0, 0], [1, 1]]
    whole = torch.randint(1, 99, (5, 6), generator=seeded(3))
    yield "__irshift__", [whole, whole.remainder(5)], [[0, 0], [1, 0]]


def cases():
    """The rows for operators that this release of torch has."""
    for name, args, layouts in rows():
        if hasattr(aten, name):
            for dims in layouts:
                yield getattr(aten, name), args, dims


def uneven(length, ranks):
    """Shard sizes, with an empty one on more ranks than two."""
    return (length - 1, 1) if ranks == 2 else (length - 1, 0, 1)


def both(op, args, dims, ranks, below):
    """What the operator returns on shards, and on one device; operators that write get tensors of their own."""
    given = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    sharded = []
    for a in args:
        d = next(dims) if isinstance(a, torch.Tensor) else None
        sizes = None if d is None else {0: uneven(a.shape[d], ranks)}
        sharded.append(a if d is None else shard(a, shared_mesh(ranks), [Shard(d % a.ndim)], sizes))
    if not below:
        return op(*sharded), op(*given)
    with DisableTorchFunction(), torch.no_grad():
        return op(*sharded), op(*given)


def equal(found, expected):
    several = isinstance(expected, (tuple, list))
    for one, other in zip(found if several else [found], expected if several else [expected], strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            whole = one.full_tensor() if isinstance(one, DTensor) else one
            torch.testing.assert_close(whole, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("ranks", "half"), in_halves([2, 3]))
@on_ranks("ranks", timeout=180.0)
def test_values(ranks, half):
    ranks, failures = torch.distributed.get_world_size(), []
    for i, (op, args, dims) in enumerate(cases()):
        if is_in(i, half):
            # In turn by name, and as from C++, where torch functions are disabled.
            for below in {bool(i % 2), bool(half)}:
                try:
                    equal(*both(op, args, iter(dims), ranks, below))
                except (AssertionError, RuntimeError, UnsupportedSharding) as error:
                    failures.append(f"{op} {dims} {below}: {type(error).__name__} {str(error)[:400]}")
    assert not failures, "\n".join(failures)


@on_ranks(2)
def test_without_kernels_of_the_cpu_and_twice():
    """Root mean square norm's gradient, for which the CPU has no kernel; and gradients of gradients."""
    x, g, w = values(5, 4, 6), values(5, 4, 6, seed=1), values(4, 6, seed=2)
    root = (x.square().mean((1, 2), keepdim=True) + 1e-5).rsqrt()
    one = x.clone().requires_grad_(), w.clone().requires_grad_()
    expected = torch.autograd.grad(F.rms_norm(one[0], [4, 6], one[1], 1e-5), one, g)
    mesh = shared_mesh(2)
    for d in (0, 2):
        ours = [shard(t, mesh, [Shard(d)], {0: (t.shape[d] - 1, 1)}) for t in (g, x)]
        equal(aten._fused_rms_norm_backward(*ours, [4, 6], root, w, [True, True]), expected)
    maps, image = values(5, 4, 9), values(5, 4, 7, seed=3)
    whole = maps.clone().requires_grad_()
    sharded = shard(maps, mesh, [Shard(2)], {0: (8, 1)}, requires_grad=True)
    for t in (whole, sharded):
        back = aten.upsample_linear1d_backward(t, [9], [5, 4, 7], False)
        (back * image).square().sum().backward()
    torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad, rtol=1e-10, atol=1e-12)


def operand():
    return shard(values(5, 4), shared_mesh(2), [Shard(0)], {0: (4, 1)})


NO_FORM = r"no distributed form is known.*\(S\(0\)\[4, 1\]\).*allow_gather\(\)"
ERRORS = {
    "rrelu": (
        lambda x: aten.rrelu_with_noise(x, torch.zeros(5, 4, dtype=x.dtype), training=True),
        UnsupportedSharding,
        "call torch.nn.functional.rrelu",
    ),
    "loss": (
        lambda x: aten.nll_loss_forward(x, torch.zeros(5, dtype=torch.int64), None, 1, -100),
        UnsupportedSharding,
        f"nll_loss_forward.default: {NO_FORM}",
    ),
    "sum": (lambda x: torch.ops.prims.sum(x, [1]), UnsupportedSharding, f"sum.default: {NO_FORM}"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_refusals_say_what_to_call(name):
    raises_alike(operand, name)
