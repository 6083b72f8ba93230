"""Every registered function, operator and rule is entered by a case that is compared with one device.

Cases come from torch's own database, the first sample of every operator in the cuts of :func:`paired`, and further ones
until they enter what is missing; from :func:`more`; and what takes more than one call to compare is listed in
:data:`ELSEWHERE` with the tests that do it. An entry in none of them fails this test. ``make sweep`` runs all cuts.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from operator_sweep import operator_names
from operator_sweep.cases import Cut, cuts, database
from operator_sweep.worker import IMPRECISE, NAMES, REFUSED, RIGHT, Expected, Lockstep, Options, samples_of
from seeded import seeded
from torch import Tensor

from shardtensor._compat import DisableTorchFunction
from shardtensor.dispatch.registry import FUNCTIONS, OPERATORS, RULES
from shardtensor.ops.spatial.interpolate import MODES
from shardtensor.testing import run_distributed

pytestmark = pytest.mark.every_run

with contextlib.suppress(ImportError):
    import natten  # noqa: F401  # whose functions get handlers when it is imported

aten, nn, linalg = torch.ops.aten, torch._C._nn, torch._C._linalg
TABLES = {"function": FUNCTIONS, "operator": OPERATORS, "rule": RULES}


def label(kind, key):
    """How an entry is named here."""
    if isinstance(key, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"{kind} {str(key).replace('::', '.')}"
    home = getattr(key, "__objclass__", None)
    home = home.__name__ if home else key.__module__
    return f"{kind} {home}.{getattr(key, '__qualname__', key.__name__)}".replace("TensorBase", "Tensor").replace(
        "Tensor.Tensor", "Tensor"
    )


def entries():
    return {label(kind, key): key for kind, table in TABLES.items() for key in table}


class Recorder:
    """Notes which entries give a result."""

    def __init__(self):
        self.entered = set()
        self.originals = [(kind, key, handler) for kind, table in TABLES.items() for key, handler in table.items()]
        for kind, key, handler in self.originals:
            TABLES[kind][key] = self.recording(label(kind, key), handler)

    def recording(self, name, handler):
        def recorded(*args, **kwargs):
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                self.entered.add(name)
            return result

        return recorded

    def undo(self):
        for kind, key, handler in self.originals:
            TABLES[kind][key] = handler


# -- cases that torch's database does not have ------------------------------------------------------------------------


def below(operator):
    """An operator called where torch functions are disabled, as by torch's own C++ code."""

    def function(*args, **kwargs):
        with DisableTorchFunction(), torch.no_grad():
            return operator(*args, **kwargs)

    return function


def through_entry(name):
    """Arithmetic in place on an entry of a sharded dim."""

    def function(x, y):
        x = x.clone()
        getattr(x[1], name)(y[1])
        return x

    return function


def randn(*shape):
    return torch.randn(*shape, requires_grad=True)


def more():
    """``(function, tensors)``; the first dim is cut."""
    x, y = torch.randn(6, 5), torch.rand(6, 5) + 0.5
    whole, shifts = torch.randint(1, 9, (6, 5)), torch.randint(0, 3, (6, 5))
    square, lines, images, boxes = randn(4, 3, 3), randn(4, 3, 8), randn(4, 3, 8, 6), randn(4, 2, 4, 6, 4)
    positive = (square @ square.mT + 3 * torch.eye(3)).detach()
    classes = torch.tensor([0, 4, 1, 1, 2, 3])
    yield Tensor.__matmul__, (square, square)
    for name in ("add", "sub", "mul", "div", "floor_divide", "remainder"):
        yield through_entry(f"{name}_"), (x, y)
    for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "idiv", "ipow"):
        yield through_entry(f"__{name}__"), (y, y)
    yield through_entry("pow_"), (y, y)
    for name in ("copy_", "clamp_"):
        yield through_entry(name), (randn(6, 5), randn(6, 5))
    for write in (lambda t: t.fill_(2.0), lambda t: t.zero_(), lambda t: t.masked_fill_(t > 0, 0.5)):
        yield (lambda x, write=write: (t := x.clone(), write(t[1]))[0]), (randn(6, 5),)
    yield (lambda at: torch.ops.aten._convert_indices_from_coo_to_csr(at, 5)), (classes.sort().values,)
    yield (lambda x: 2 * x.unfold(1, 3, 1)), (randn(6, 5),)
    yield (lambda x: x.as_strided((6, 3, 2), (5, 2, 1))), (randn(6, 5),)
    yield (lambda x: torch.as_strided(x, (3, 2, 5), (10, 5, 1))), (randn(6, 5),)
    yield (lambda x: torch.as_strided(x, (), ()) + x.as_strided((1, 1), (7, 7))), (randn(6, 5),)
    yield (lambda x: x.as_strided((6, 1, 5), (5, 3, 1)) * x[1:].as_strided((), ())), (randn(6, 5),)
    yield (lambda x: torch.stack([x[i].exp() for i in range(6)])), (x,)
    yield (lambda x: aten._unsafe_view.default(x, [6, 5, 1])), (randn(6, 5),)
    for name in ("bitwise_and_", "bitwise_or_", "bitwise_xor_", "bitwise_left_shift_", "bitwise_right_shift_"):
        yield through_entry(name), (whole, shifts)
    for name in ("iand", "ior", "ixor", "ilshift", "irshift"):
        yield through_entry(f"__{name}__"), (whole, shifts)
    yield lambda x: x.clone().fill_diagonal_(2.0), (x,)
    yield lambda x, y: x.clone().__setitem__(slice(1, 4), y[2:5]), (x, y)
    for function in (linalg.linalg_matrix_exp, torch.inverse, Tensor.inverse):
        yield function, (square.detach(),)
    yield linalg.linalg_matmul, (square, square)
    yield (lambda a, b: linalg.linalg_solve_triangular(a, b, upper=True)), (positive, positive)
    for function in (torch.qr, Tensor.qr, torch.geqrf, Tensor.geqrf, linalg.linalg_qr):
        yield function, (square.detach(),)
    for function in (torch.svd, Tensor.svd, linalg.linalg_svd):
        yield (lambda a, function=function: function(a)[1]), (square.detach(),)
    yield linalg.linalg_lstsq, (positive, square.detach())
    for function in (torch.orgqr, Tensor.orgqr):
        yield function, (square.detach(), torch.rand(4, 3))
    for function in (torch.ormqr, Tensor.ormqr):
        yield function, (square.detach(), torch.rand(4, 3), square.detach())
    for function in (torch.ger, Tensor.ger):
        yield function, (randn(6), randn(5))
    for n, t in ((1, lines), (2, images), (3, boxes)):
        two = [2] * n
        twice = [2 * size for size in t.shape[2:]]
        yield getattr(torch, f"max_pool{n}d"), (t, two)
        yield getattr(aten, f"max_pool{n}d"), (t, two)
        for kind in ("reflection", "replication"):
            yield getattr(nn, f"{kind}_pad{n}d"), (t, [1, 1] * n)
            yield getattr(aten, f"{kind}_pad{n}d"), (t, [1, 1] * n)
        yield getattr(F, f"lp_pool{n}d"), (t, 2.0, 2)
        yield getattr(aten, f"conv_transpose{n}d"), (t, randn(3, 2, *two))
        with_indices = "max_pool1d_with_indices" if n == 1 else f"max_pool{n}d_with_indices"
        yield getattr(torch if n == 1 else nn, with_indices), (t, two)
        yield getattr(aten, with_indices), (t, two)
        yield getattr(torch if n == 1 else nn, f"adaptive_max_pool{n}d"), (t, two)
        yield getattr(aten, f"adaptive_max_pool{n}d"), (t, two)
        for name in (f"upsample_nearest{n}d", f"_upsample_nearest_exact{n}d"):
            yield getattr(aten, name), (t, twice)
            yield below(getattr(aten, name).default), (t.detach(), twice)
        linear = f"upsample_{ {1: 'linear1d', 2: 'bilinear2d', 3: 'trilinear3d'}[n] }"
        yield getattr(aten, linear), (t, twice, False)
        yield below(getattr(aten, linear).default), (t.detach(), twice, False)
    for name in ("upsample_bicubic2d", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa"):
        yield getattr(aten, name), (images, [16, 12], False)
        yield below(getattr(aten, name).default), (images.detach(), [16, 12], False)
    for function in (nn.pad, aten.pad):
        yield function, (images, [1, 1])
    kernel = randn(2, 3, 3, 3)
    convolved = (images, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    for function in (torch.convolution, aten.convolution, aten.convolution.default, below(aten.convolution.default)):
        yield function, convolved
    for function in (torch.grid_sampler, aten.grid_sampler):
        yield function, (images, torch.rand(4, 5, 5, 2), 0, 0, False)
    yield F.affine_grid, (randn(4, 2, 3), (4, 3, 5, 5))
    yield nn.one_hot, (classes, 5)
    for home in (torch, aten):
        yield home.hinge_embedding_loss, (x.requires_grad_(), torch.ones(6, 5))
        yield home.margin_ranking_loss, (x, y, torch.ones(6, 5))
        yield home.kl_div, (x, y)
        yield home.poisson_nll_loss, (x, y, True, False, 1e-8, 1)
    yield torch.binary_cross_entropy_with_logits, (x, y.clamp(0, 1))
    for home in (nn, aten):
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"):
            yield getattr(home, name), (x, y)
        yield home.binary_cross_entropy, (y / 2, y / 2)
        yield home.multi_margin_loss, (x, classes)
        yield home.multilabel_margin_loss, (x, torch.tensor([[0, 3, -1, 1, 1]] * 6))
        yield home.cross_entropy_loss, (x, classes)
        yield home.nll_loss, (x, classes)
        yield home.nll_loss_nd, (x, classes)
        yield home.nll_loss2d, (images, torch.randint(3, (4, 8, 6)))
    for name in ("mse_loss", "huber_loss", "smooth_l1_loss"):
        yield (lambda x, y, name=name: getattr(F, name)(x, y.detach())), (x, y)
    yield (lambda x: F.huber_loss(x, x.exp())), (x,)
    statistics = torch.zeros(3), torch.ones(3)
    yield torch.batch_norm, (images, None, None, *statistics, False, 0.1, 1e-5, False)
    yield torch.instance_norm, (images, None, None, None, None, True, 0.1, 1e-5, False)
    for home in (torch, aten):
        yield home._native_batch_norm_legit_no_training, (images, None, None, *statistics, 0.1, 1e-5)
    yield torch._safe_softmax, (x, 1)
    yield below(aten._safe_softmax.default), (x, 1)
    for function in (torch.nonzero_static, Tensor.nonzero_static):
        yield (lambda x, function=function: function(x, size=7)), (shifts,)
    yield below(aten.roll.default), (y.detach(), [7])
    yield below(aten.bincount.default), (classes,)
    yield below(aten.histc.default), (y.detach(), 4, 0.0, 2.0)
    yield (lambda x: aten.histogram.bin_ct(x, 4, range=[0.0, 2.0])), (y.detach(),)
    yield aten.histogram.bins_tensor, (y.detach(), torch.linspace(0, 2, 5))
    yield aten.norm.ScalarOpt_dtype, (x.detach(), 2, torch.float64)
    yield below(lambda x: aten.norm.ScalarOpt_dtype(x, 2, dtype=torch.float64)), (x.detach(),)
    yield below(lambda x: aten.norm.ScalarOpt_dim_dtype(x, 2, [1], True, dtype=torch.float64)), (x.detach(),)
    for name in ("_is_all_true", "_is_any_true"):
        yield below(getattr(aten, name).default), (shifts > 0,)
    yield below(aten.allclose.default), (x.detach(), x.detach())
    yield below(aten._standard_gamma_grad.default), (y.detach(), y.detach())
    yield below(aten._dirichlet_grad.default), (y.detach() / 2, y.detach(), y.detach() + 1)
    yield below(aten.copy.default), (x.detach(), x.detach() * 2)
    yield below(aten.detach_copy.default), (x.detach(),)
    yield below(aten.select_copy.int), (x.detach(), 1, 2)
    yield below(aten.slice_copy.Tensor), (x.detach(), 1, 1, 4)
    yield below(aten.split_copy.Tensor), (x.detach(), 2, 1)
    yield below(aten.squeeze_copy.dims), (torch.randn(6, 1, 5), [1])
    yield below(aten.view_as_complex_copy.default), (torch.randn(6, 2),)
    yield below(aten.view_as_real_copy.default), (torch.randn(6, dtype=torch.complex64),)
    yield below(aten.searchsorted.Scalar), (torch.arange(6.0), 2.5)
    yield below(aten.isin.Tensor_Scalar), (shifts, 2)
    yield below(lambda x: aten.reshape.default(x, [6, 5, 1])), (x.detach(),)
    yield below(lambda x: aten._reshape_alias.default(x, [6, 5, 1], [5, 1, 1])), (x.detach(),)
    yield below(lambda x: aten.unsafe_split_with_sizes.default(x, [2, 3], 1)), (x.detach(),)
    yield below(lambda x: aten._conj.default(x).resolve_conj()), (torch.randn(6, dtype=torch.complex64),)
    yield below(lambda x: aten._neg_view.default(x) + 0), (x.detach(),)
    yield below(lambda x: aten.lift_fresh.default(x) + 0), (x.detach(),)
    yield below(lambda x: aten._unique2.default(x)[0]), (shifts,)
    yield below(lambda x: aten.unique_consecutive.default(x)[0]), (classes,)
    yield below(lambda x: aten.unique_dim.default(x, 0)[0]), (shifts,)
    for home in (torch, aten):
        yield home.native_group_norm, (images, None, None, 4, 3, 48, 3, 1e-5)
    index = torch.tensor([[0, 2], [1, 0]] * 3)
    yield below(lambda x, i: aten.scatter_.value(x.clone(), 1, i, 2.0)), (x.detach(), index)
    for name, value in (("scatter", torch.randn(6, 2)), ("scatter", None)):
        for inplace in ("", "_"):
            overload = "reduce" if value is not None else "value_reduce"
            operator = getattr(getattr(aten, name + inplace), overload)
            source = 2.0 if value is None else value

            def scattered(x, i, s, operator=operator):
                return below(operator)(x.clone(), 1, i, s, reduce="add")

            yield scattered, (x.detach(), index, source)
    yield below(lambda x: aten._unsafe_index.Tensor(x, [None, torch.tensor([0, 3])])), (x.detach(),)
    yield (
        below(lambda x, v: aten._unsafe_index_put.default(x, [None, torch.tensor([0, 3])], v)),
        (
            x.detach(),
            torch.randn(6, 2),
        ),
    )
    yield (
        below(lambda x, v: aten._index_put_impl_.default(x.clone(), [None, torch.tensor([0, 3])], v)),
        (
            x.detach(),
            torch.randn(6, 2),
        ),
    )
    yield below(lambda g, i: aten.embedding_dense_backward.default(g, i, 5, -1, False)), (randn(6, 4), classes)
    heads = randn(4, 2, 5, 8)
    yield aten.scaled_dot_product_attention.default, (heads, heads, heads)
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    yield below(lambda q: flash(q, q, q)[0]), (heads,)
    yield below(lambda q: flash_backward(q)), (heads,)

    p = torch.rand(6, 5, requires_grad=True)
    yield F.binary_cross_entropy, (p, p.detach())
    edges = torch.linspace(-3, 3, 4)
    yield (lambda x: torch.histogramdd(x, (edges, edges)).hist), (torch.randn(6, 2),)
    yield (lambda a, b: linalg.linalg_lu_solve(*torch.linalg.lu_factor(a), b)), (positive, positive)
    samples = torch.rand(4, 3, 2)
    yield (lambda x: F.fractional_max_pool2d_with_indices(x, 3, (3, 2), _random_samples=samples)), (images,)
    samples = torch.rand(4, 2, 3)
    yield (lambda x: F.fractional_max_pool3d_with_indices(x, 2, (2, 3, 2), _random_samples=samples)), (boxes,)
    gradient = (torch.randn(4, 2, 8, 6), images.detach(), kernel.detach(), None)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    yield below(lambda g, x, w, *_: aten.convolution_backward.default(g, x, w, None, *rest)[:2]), gradient
    yield written_to, (x.detach(), y)
    yield below(aten.histc.default), (y.detach(), 4)
    for home in (torch, aten):
        yield home._native_batch_norm_legit, (images, None, None, *statistics, False, 0.1, 1e-5)
    for function in (linalg.linalg_matrix_norm, linalg.linalg_norm):
        yield function, (square, "nuc", [-2, -1])
    for name in ("adam", "adamw", "sgd", "adagrad"):
        for rate in (0.1, torch.tensor(0.1)):
            yield fused_step(name, rate), (x.detach(), y)
    yield from drawn()


def written_to(x, y):
    x = x.clone()
    x[torch.tensor([4, 1])] = y[torch.tensor([0, 5])]
    return x


def fused_step(name, rate):
    operator = getattr(aten, f"_fused_{name}_")
    operator = operator.tensor_lr if isinstance(rate, Tensor) else operator.default
    betas = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False}
    options = {
        "sgd": {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False},
        "adagrad": {"lr_decay": 0.1, "eps": 1e-8},
    }.get(name, betas)

    def step(parameter, gradient):
        parameter, sums, step = parameter.clone(), gradient * 0 + 1, torch.tensor(1.0)
        state = {"sgd": ([sums],), "adagrad": ([sums], [step])}.get(name, ([sums], [sums.clone()], [], [step]))
        below(operator)([parameter], [gradient], *state, lr=rate, weight_decay=0.1, maximize=False, **options)
        return parameter, sums

    return step


def drawn():
    """Random numbers, of a generator given or not."""
    x, p, counts = torch.zeros(6, 5), torch.rand(6, 5), torch.full((6, 5), 4.0)
    for operator, *args in (
        (aten.bernoulli.default, p),
        (aten.bernoulli.p, x, 0.5),
        (aten.bernoulli.Tensor, x, p),
        (aten.bernoulli_.float, x, 0.5),
        (aten.bernoulli_.Tensor, x, p),
        (aten.binomial.default, counts, p),
        (aten.poisson.default, counts),
        (aten._standard_gamma.default, counts),
        (aten._sample_dirichlet.default, counts),
        (aten.multinomial.default, p, 2),
        (aten.normal.Tensor_float, x, 1.0),
        (aten.normal.float_Tensor, 0.0, p),
        (aten.normal.Tensor_Tensor, x, p),
        (aten.normal_functional.default, x),
        (aten.uniform.default, x),
        (aten.random_.default, x),
        (aten.random_.to, x, 5),
        (getattr(aten.random_, "from"), x, 2, 5),
        *((getattr(aten, f"{name}_").default, x) for name in ("cauchy", "exponential", "log_normal")),
        *((getattr(aten, f"{name}_").default, x) for name in ("normal", "uniform")),
        (aten.geometric_.default, x, 0.5),
        (aten.rand_like.generator, x),
        (aten.randn_like.generator, x),
        (aten.randint_like.generator, x, 5),
        (aten.randint_like.low_generator_dtype, x, 2, 5),
    ):
        for given in (False, True):

            def draw(*args, operator=operator, given=given):
                generator = seeded(1) if given else None
                first = [a.clone() if isinstance(a, Tensor) else a for a in args]
                return below(operator)(*first, generator=generator)

            if isinstance(args[0], Tensor):
                yield draw, args
            else:
                yield (lambda b, a, draw=draw: draw(a, b)), args[::-1]
    yield below(lambda x: aten.native_dropout.default(x, 0.5, True)), (p,)
    yield below(aten.detach.default), (p,)
    yield (lambda x: F.dropout(x, 0.5, training=False)), (x,)


def flash_backward(q):
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward.default(out, q, q, q, out, lse, 0.0, False)


# Compared by tests of their own: the file, and what to look for in it.
ELSEWHERE = {
    ("test_point_clouds.py", "fps"): [f"function pyg.{name}" for name in ("fps", "knn", "radius")],
    ("test_flex.py", "varlen_attn"): ["function torch_attn._varlen_attn"],
    ("test_written.py", ".data = "): ["function getset_descriptor.getset_descriptor.__set__"],
    ("test_dispatch.py", "_assert_async"): [f"rule aten._assert_async.{name}" for name in ("default", "msg")],
    ("test_view.py", "view_copy"): ["rule aten.view.dtype", "operator aten.view_copy.dtype"],
    ("test_opt_einsum.py", "contract"): ["function opt_einsum.contract.infer_backend"],
    ("test_c10d.py", "all_reduce"): ["operator c10d.allreduce_.default"],
    ("test_c10d.py", "broadcast"): ["operator c10d.broadcast_.default"],
    ("test_c10d.py", "reduce"): ["operator c10d.reduce_.default"],
    ("test_c10d.py", "send"): [
        f"operator c10d.{name}.default" for name in ("recv_", "recv_any_source_", "reduce_scatter_", "scatter_", "send")
    ],
    ("test_compile.py", "test_inputs_that_are_views"): ["function Tensor._is_view"],
    ("test_written_views.py", "reshaped_data"): ["function getset_descriptor.getset_descriptor.__get__"],
    ("test_written_views.py", "detached_of_data"): ["function torch._VariableFunctionsClass.detach"],
    ("test_dispatch.py", "reshape"): ["rule aten.reshape.default"],
    ("test_dispatch.py", "glu_jvp"): [
        *(f"rule aten.{name}.default" for name in ("alias_copy", "glu_jvp", "log_sigmoid_backward", "zero_")),
        *(f"rule aten.{name}.Tensor" for name in ("fill", "fill_")),
        *(f"rule aten.{name}.Scalar" for name in ("floor_divide", "floor_divide_", "rsub")),
    ],
    ("test_gradients.py", "test_zeros_that_have_no_memory"): [
        f"operator prims.{n}.default" for n in ("add", "mul", "div")
    ],
    ("test_transforms.py", "make_dual"): [
        f"operator aten.{name}.default"
        for name in ("is_same_size", "_has_same_storage_numel", "_new_zeros_with_same_feature_meta")
    ],
    ("test_gradients.py", "backward"): ["function torch._tensor.Tensor.backward", "function torch.autograd.backward"],
    ("test_export.py", "from_dlpack"): [
        *(f"function Tensor.{name}" for name in ("apply_", "map2_", "map_", "numpy", "tolist")),
        *(f"function Tensor.{name}" for name in ("data_ptr", "const_data_ptr", "storage_offset", "untyped_storage")),
        *(f"function torch._tensor.Tensor.{name}" for name in ("__array__", "__dlpack__", "__dlpack_device__")),
        "function property.property.__get__",
        "function torch._tensor.Tensor.storage",
        "function torch._tensor.Tensor.__format__",
    ],
    ("test_pad.py", "pad_sequence"): [f"function {name}.pad_sequence" for name in ("aten", "torch._C._nn")],
    ("test_sparse.py", "torch.sparse.mm"): ["function torch._C._sparse._sparse_mm"],
    ("test_sparse.py", "sparse_coo_tensor"): [
        "operator aten._sparse_coo_tensor_with_dims_and_tensors.default",
        "operator aten.sparse_compressed_tensor.comp_plain_value_size",
    ],
    ("test_graphs.py", "include_self"): ["operator aten.scatter_.value"],
    ("test_gather.py", "searchsorted"): ["operator aten.searchsorted.Scalar"],
    ("test_multihead.py", "padding"): ["operator aten._nested_tensor_from_mask_left_aligned.default"],
    ("test_attention.py", "natten.na2d"): ["function natten.functional.neighborhood_attention_generic"],
    ("test_sphere.py", "attend = "): ["function attention_kernels._neighborhood_s2_attention_torch"],
    ("test_attention.py", "natten.attention"): ["function natten.functional.attention"],
    ("test_attention.py", "natten.merge_attentions"): ["function natten.attn_merge.merge_attentions"],
    ("test_fused_optimizers.py", "GradScaler"): ["operator aten._amp_foreach_non_finite_check_and_unscale_.default"],
    ("test_sync_batch_norm.py", "SyncBatchNorm"): ["function torch.nn.modules.batchnorm.SyncBatchNorm.forward"],
    ("test_flex.py", "flex_attention"): ["function torch.ops.higher_order.flex_attention"],
    ("test_neighbors.py", "radius"): [f"function shardtensor.neighbors.nearest.{name}" for name in ("knn", "radius")],
    ("test_pool.py", "max_pool2d_with_indices_backward"): ["operator aten.max_pool2d_with_indices_backward.default"],
    ("test_rnn.py", "nn.LSTMCell"): [
        f"function torch._VariableFunctionsClass.{name}{cell}"
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        for cell in ("", "_cell")
    ],
    ("test_stft.py", "istft"): [
        "function torch._VariableFunctionsClass.istft",
        "function torch._tensor.Tensor.istft",
    ],
    ("test_formulas.py", "def rows"): [
        *(f"function aten.{name}_backward" for name in MODES),
        *(f"function aten.{name}{n}d_backward" for name in ("_adaptive_avg_pool", "grid_sampler_") for n in (2, 3)),
        *(f"function aten.{name}_backward" for name in ("native_layer_norm", "native_batch_norm")),
        *(f"function aten._fft_{name}" for name in ("c2c", "r2c", "c2r")),
        *(f"function aten.linalg_{name}" for name in ("lstsq", "lu_solve", "matrix_exp", "qr")),
        *(f"function aten.{name}" for name in ("geqrf", "ormqr", "linalg_solve_triangular", "_linalg_svd")),
        "function torch._VariableFunctionsClass._linalg_svd",
        *("rule aten.__irshift__.Scalar", "rule aten.__irshift__.Tensor"),
    ],
    ("test_formulas.py", "test_without_kernels"): [
        "function aten._fused_rms_norm_backward",
    ],
    ("test_fused_optimizers.py", "test_norms_of_lists"): [
        *(f"operator aten._foreach_{name}.Scalar" for name in ("norm", "powsum")),
        *(f"operator aten._fused_{name}.{of}" for name in ("adam", "adamw") for of in ("default", "tensor_lr")),
    ],
    ("test_fake_quantize.py", "fake_quantize_per_channel_affine"): [
        "rule aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default",
        *(
            f"rule aten.fake_quantize_per_{of}_affine_cachemask{of_gradient}.default"
            for of in ("channel", "tensor")
            for of_gradient in ("", "_backward")
        ),
    ],
    ("test_export.py", "torch.tensor("): [
        *(f"function Tensor.__{name}__" for name in ("bool", "complex", "float", "index", "int")),
    ],
    ("test_torchscript.py", "torch.jit.trace(network, x)"): ["operator aten._convolution.default"],
    ("test_rearranging.py", "repeat_interleave"): ["operator aten.repeat_interleave.Tensor"],
    ("test_c10d.py", "all_gather"): ["operator c10d.allgather_.default"],
    ("test_subclass.py", "share_memory_"): ["function torch._tensor.Tensor.share_memory_"],
    # torch hands these on under the names of the methods that they are: add_, matmul and so on.
    ("test_subclass.py", "__iadd__"): [
        "function Tensor.__matmul__",
        *(f"function Tensor.__i{name}__" for name in ("add", "sub", "mul", "div", "floordiv", "mod")),
    ],
}


# -- the run ----------------------------------------------------------------------------------------------------------


def short(key):
    """The name that an entry shares with an operator of the database."""
    name = getattr(key, "__name__", str(key)).split(".")[0]
    return name.strip("_") if not name.startswith("__") else name


def paired(sample):
    """Cuts of a sample along each dim and with each kind of other operands, the first of them with and without an empty
    shard, of the others every second one with.
    """
    alike = defaultdict(list)
    for cut in cuts(sample):
        alike[cut.dim, cut.others].append(cut)
    for i, both in enumerate(alike.values()):
        yield from both if i == 0 else both[i % len(both) :][:1]


def check_all(folder):
    """What no case has entered, what went wrong, and how many cases of first samples there were."""
    warnings.simplefilter("ignore")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lockstep = Lockstep(Path(folder) / "lockstep", rank, ranks)
    recorder, covered, wrong = Recorder(), set(), []

    def attempt(name, sample, kind="function", function=None, wanted=None, only=None):
        """The cuts of a sample, until one is right and has entered what is wanted; how many these were."""
        expected = Expected(name, sample, Options(kind=kind), function)
        if expected.impossible:
            return 0
        tried = 0
        for cut in only or [cut for cut in cuts(sample) if wanted is None or not cut.empty]:
            tried += 1
            recorder.entered.clear()
            said, detail = expected.compare(cut, lockstep)
            if IMPRECISE in said:
                said, detail = expected.compare(cut, lockstep, precisely=True)
            if set(said) == {RIGHT}:
                covered.update(recorder.entered)
                if wanted in covered:
                    break
            elif set(said) != {REFUSED}:
                wrong.append(f"{name} {function} {cut}: {[NAMES[s] for s in said]}: {detail}")
        return tried

    try:
        known = entries()
        by_name = defaultdict(list)
        for entry in sorted(known):
            by_name[short(known[entry])].append(entry)
        names = operator_names()
        firsts = [(name, sample) for name in names for sample in samples_of(name, Options(limit=1))]
        tried = sum(attempt(name, sample, only=paired(sample)) for name, sample in firsts)
        torch.manual_seed(0)
        for function, (first, *others) in more():
            sample = SimpleNamespace(input=first, args=tuple(others), kwargs={})
            for others in ("alike", "plain"):
                attempt("add", sample, function=function, only=[Cut(0, False, others)])
        for name in names:
            same = {name.split(".")[-1], database()[name].aten_name, name.replace(".", "_")}
            for entry in [entry for n in sorted(same) for entry in by_name[n]]:
                function = known[entry]
                written = short(function) != getattr(function, "__name__", "").split(".")[0].lstrip("_")
                for sample in samples_of(name, Options(limit=8)) if entry not in covered else ():
                    attempt(name, sample, "in place" if written else "function", function, entry)
                    if entry in covered:
                        break
    finally:
        recorder.undo()
    return sorted(set(known) - covered), wrong, tried


@pytest.fixture(scope="module")
def found():
    with tempfile.TemporaryDirectory() as folder:
        return run_distributed(check_all, 2, folder, timeout=600)[0]


def test_no_case_is_wrong(found):
    """Among them the first sample of every operator, on two ranks; with gradients."""
    assert not found[1], "\n".join(found[1])
    assert found[2] > 1900


def test_every_entry_is_compared_with_one_device(found):
    elsewhere = {name for names in ELSEWHERE.values() for name in names}
    missing = [name for name in found[0] if name not in elsewhere]
    assert not missing, "give them a case in more(), or name their tests in ELSEWHERE:\n" + "\n".join(missing)


def test_what_is_compared_elsewhere_is():
    for name, text in ELSEWHERE:
        (file,) = Path(__file__).parents[1].rglob(name)
        assert text in file.read_text(), (name, text)
