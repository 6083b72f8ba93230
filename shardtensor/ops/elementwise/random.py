"""Random numbers: ``*_like``, in-place draws, ``bernoulli``, ``normal``, ``multinomial``.

A replicated tensor is drawn as on one device: the same numbers, from the same generator. For a sharded
tensor every rank takes one number from the generator that the caller would have used, and seeds with it, and with the
coordinates of its shard, a generator of its own. So

- ranks that hold the same shard draw the same numbers, and different shards draw independent ones;
- a program that seeds all ranks equally (``torch.manual_seed(0)``) repeats itself, and the generators of all ranks
  advance alike, so that numbers drawn for plain tensors stay equal on all ranks;
- the numbers are not those of one device, and depend on the tensor's layout.

All ranks of the mesh must be seeded equally. If ranks hold copies of what is drawn, the state that they draw from
enters the history of their groups. So copies that differ are noticed with the next number that the ranks read, see
[Note: history]. ``SHARDTENSOR_DEBUG=1`` makes all ranks compare at once.

Without a generator in the call, that number comes from the CPU's default one, whatever the device: it can be read
without waiting for the device, and activation checkpointing restores it. Dropout keeps its mask for the backward pass.
A CUDA graph would repeat the number with each replay, so draws of sharded tensors are refused while one is captured;
those of replicated ones come from torch's generator, which goes on from replay to replay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard

from ..._compat import OpOverload, overload_names
from ..._compat.c10d import group_along
from ...communication.tracing import goes_into_graph, graph_operator, is_traced
from ...dispatch.aten_calls import run
from ...dispatch.planning import AtenCall, AtenPlan, meta_of
from ...dispatch.registry import DECLINED, RULES, register
from ...errors import refuse
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import operator
from ...ranks.cuda_graphs import check_not_captured, is_capturing
from ...ranks.debug_mode import debug_enabled
from ...ranks.history import record
from ...ranks.summaries import digest
from ..common.named_dims import free_dims
from ..common.reduce import mesh_dims_of, rank_reduction
from ..shape.view import carry
from .pointwise import pointwise_plan

_aten = torch.ops.aten


_STATES = 2**56  # digests of generators' states, each of which fits into an integer with its negative
# The generator that the running call was given.
_given: ContextVar[torch.Generator | None] = ContextVar("generator", default=None)


def shard_seed(drawn: int, place: tuple[int, ...]) -> int:
    """The seed of the shard at ``place`` (its coordinates on the mesh dims that shard), from a number drawn by all.

    Example:
        >>> shard_seed(7, (0,)) == shard_seed(7, (0,)), shard_seed(7, (0,)) == shard_seed(7, (1,))
        (True, False)
    """
    digest = hashlib.blake2b(repr((drawn, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def is_divided(spec: ShardTensorSpec) -> bool:
    return any(isinstance(p, Shard) and spec.mesh.size(m) > 1 for m, p in enumerate(spec.placements))


def _own_generator(spec: ShardTensorSpec, like: Tensor) -> torch.Generator | None:
    """What this rank draws its part of a tensor with ``spec`` from, on the device of ``like``, a local tensor."""
    device = like.device
    if not is_divided(spec):
        if not is_traced(like) and not is_capturing(device):
            _note_source(digest(_state(_given.get(), device)) % _STATES, spec)
        return _given.get()
    return _generator_of(common_draw(spec, device), _place(spec), device)


def _note_source(number: int, spec: ShardTensorSpec) -> None:
    """Note the number, which the ranks that hold copies of a tensor with ``spec`` have in common; in debugging all."""
    for m, p in enumerate(spec.placements):
        if spec.mesh.size(m) > 1 and (not isinstance(p, Shard) or debug_enabled()):
            what = "shards" if isinstance(p, Shard) else "copies"
            record(group_along(spec.mesh, m).group_name, f"random numbers from the state {number:x} for {what}")


def _place(spec: ShardTensorSpec) -> tuple[int, ...]:
    """This rank's coordinates on the mesh dims that shard a tensor with ``spec``."""
    return tuple(spec.coordinate[m] for m, p in enumerate(spec.placements) if isinstance(p, Shard))


def _check_capture(device: torch.device) -> None:
    check_not_captured(
        "random numbers of sharded tensors (dropout, rand_like, ...)",
        device,
        "the host draws a seed for each call, and every replay would repeat the same numbers",
        "leave them outside of the captured part",
    )


def _generator_of(drawn: int, place: tuple[int, ...], device: torch.device) -> torch.Generator:
    generator = torch.Generator(device)
    generator.manual_seed(shard_seed(drawn, place))
    return generator


def common_draw(spec: ShardTensorSpec, device: torch.device) -> int:
    """A number from the generator that the caller would have used, equal on all ranks of the mesh."""
    _check_capture(device)
    given = _given.get()
    source = given.device if given is not None else torch.device("cpu")
    number = torch.randint(2**62, (), generator=given, device=source)
    if goes_into_graph(number):
        raise refuse(
            "random numbers",
            spec,
            "for sharded tensors, torch.compile supports only dropout, rand_like, randn_like and in-place draws whose "
            "parameters are numbers",
            "call this operator outside of the compiled function",
        )
    drawn = 0 if is_traced(number) else int(number)
    _note_source(drawn, spec)
    return drawn


def _state(generator: torch.Generator | None, device: torch.device) -> Tensor:
    if generator is not None:
        return generator.get_state()
    state: Tensor = (
        torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    )
    return state


def _index_of_generator(func: OpOverload) -> int | None:
    """The generator's index among an operator's arguments, if it has one."""
    return next((i for i, a in enumerate(func._schema.arguments) if a.name == "generator"), None)


def _with_generator(func: OpOverload) -> Callable[..., Any]:
    """A handler that takes the generator out of the arguments, so that plans are not kept for each generator.

    It calls the operator again, without; that has a plan.
    """
    at = _index_of_generator(func)

    def handler(*args: Any, **kwargs: Any) -> Any:
        generator = kwargs.get("generator")
        if generator is not None:
            kwargs = {**kwargs, "generator": None}
        elif at is not None and len(args) > at:
            generator, args = args[at], (*args[:at], None, *args[at + 1 :])
        if generator is None:
            return DECLINED
        before = _given.set(generator)
        try:
            return run(func, args, kwargs)
        finally:
            _given.reset(before)

    return handler


# -- in graphs, see [Note: communication in graphs] in tracing.py: order counts here, too ---------------------------


@graph_operator(
    "draw(Tensor like, str how, float[] parameters, int[] place) -> Tensor",
    lambda like, how, parameters, place: torch.empty_like(like, memory_format=torch.contiguous_format),
)
def _draw_in_graph(like: Tensor, how: str, parameters: list[float], place: list[int]) -> Tensor:
    """A shard at ``place`` of the size of ``like``, as the in-place method ``how`` draws it."""
    _check_capture(like.device)
    drawn = int(torch.randint(2**62, (), device="cpu"))
    empty = torch.empty_like(like, memory_format=torch.contiguous_format)
    drawn_shard: Tensor = getattr(empty, how)(*parameters, generator=_generator_of(drawn, tuple(place), like.device))
    return drawn_shard


def drawn_into(x: Tensor, how: str, *parameters: float, spec: ShardTensorSpec) -> Tensor:
    """``x``, a shard of a tensor with ``spec``, filled by the in-place method ``how``."""
    if goes_into_graph(x) and is_divided(spec) and _given.get() is None:
        return x.copy_(_draw_in_graph(x, how, list(parameters), _place(spec)))
    filled: Tensor = getattr(x, how)(*parameters, generator=_own_generator(spec, x))
    return filled


# -- element by element: the operator itself, from the shard's own generator ---------------------------------------


@operator(
    *(_aten.bernoulli.default, _aten.bernoulli.p, _aten.bernoulli_.float, _aten.poisson.default),
    *(_aten.uniform.default, _aten.uniform_.default, _aten.normal_.default, _aten.normal_functional.default),
    *(_aten.normal.Tensor_float, _aten.normal.float_Tensor, _aten.normal.Tensor_Tensor),
    *(_aten.exponential_.default, _aten.geometric_.default, _aten.cauchy_.default, _aten.log_normal_.default),
    *(_aten.random_.default, getattr(_aten.random_, "from"), _aten.random_.to),
)
def plan_draw(call: AtenCall) -> AtenPlan:
    """Elementwise, from the shard's own generator."""
    plan = pointwise_plan(call)
    inner: Callable[..., Tensor] = plan.call or call.func
    out = plan.outputs
    at = _index_of_generator(call.func)
    name = call.func._schema.name.removeprefix("aten::")
    numbers = name.endswith("_") and name != "random_" and all(isinstance(a, (int, float)) for a in call.args[1:at])

    def drawn(*args: Any, **kwargs: Any) -> Tensor:
        if numbers and goes_into_graph(args[0]):
            return drawn_into(args[0], name, *args[1:at], spec=out)
        like = next(a for a in args if isinstance(a, Tensor))
        return inner(*args[:at], **{**kwargs, "generator": _own_generator(out, like)})

    plan.call = drawn
    return plan


# torch's own does not compare sizes on meta tensors.
operator(_aten.bernoulli_.Tensor, meta=lambda x, p, generator=None: x.copy_(p))(plan_draw)
operator(_aten.bernoulli.Tensor, meta=lambda x, p, generator=None: torch.empty_like(x).copy_(p))(plan_draw)
# torch does not run these on meta tensors.
operator(_aten.binomial.default, meta=lambda count, prob, generator=None: count + prob)(plan_draw)
operator(_aten._standard_gamma.default, meta=lambda x, generator=None: torch.empty_like(x))(plan_draw)
operator(_aten._standard_gamma_grad.default, meta=torch.add)(pointwise_plan)
operator(_aten._dirichlet_grad.default, meta=lambda x, alpha, total: x + alpha)(pointwise_plan)


# -- new tensors like an old one: drawn in place, because these operators take no generator --------------------------


_LIKE = [
    getattr(packet, overload)
    for packet in (_aten.rand_like, _aten.randn_like, _aten.randint_like)
    for overload in ("default", "low_dtype", "generator", "low_generator_dtype")
    if overload in overload_names(packet)
]


@operator(*_LIKE)
def plan_draw_like(call: AtenCall) -> AtenPlan:
    """``rand_like``, ``randn_like``, ``randint_like``."""
    out = call.specs[0].for_gradient().replace(meta=meta_of(call.meta))
    how = {"aten::rand_like": "uniform_", "aten::randn_like": "normal_"}.get(call.func._schema.name)
    bounds = call.args[1:] if len(call.args) > 2 else (0, *call.args[1:])  # of randint_like

    def drawn(x: Tensor, *_: object, generator: None = None, **kwargs: Any) -> Tensor:
        empty = torch.empty_like(x, **kwargs)
        if how is not None:
            return drawn_into(empty, how, spec=out)
        return empty.random_(*bounds, generator=_own_generator(out, empty))

    return AtenPlan(out, call=drawn)


# -- rows --------------------------------------------------------------------------------------------------------------


@operator(_aten.multinomial.default)
def plan_multinomial(call: AtenCall) -> AtenPlan:
    """The rank that has all of a row draws from it, see [Note: whole rows] in sorting/sort.py."""
    given = call.reduced()[(0,)]
    spec = free_dims("multinomial", given, len(given.shape) - 1)
    out = carry(call, spec, call.meta, {d: d for d in range(len(spec.shape) - 1)})
    func: Callable[..., Tensor] = call.func
    rest = call.args[1:]
    shape = out.local_shape()
    empty = 0 in shape

    def drawn(x: Tensor, *_: object, **__: object) -> Tensor:
        generator = _own_generator(out, x)
        if empty:
            return torch.empty(shape, dtype=torch.int64, device=x.device)
        return func(x, *rest, generator=generator)

    return call.plan(out, {(0,): spec}, call=drawn)


@operator(_aten._sample_dirichlet.default, meta=lambda x, generator=None: torch.empty_like(x))
def plan_dirichlet(call: AtenCall) -> AtenPlan:
    """Gamma variates over their sum, which the ranks add up where a row is sharded."""
    spec = call.reduced()[(0,)]
    out = spec.replace(meta=meta_of(call.meta))
    over = mesh_dims_of(spec, [len(spec.shape) - 1])
    func: Callable[..., Tensor] = call.func
    reduce = rank_reduction(spec, over)

    def drawn(x: Tensor, *_: object) -> Tensor:
        generator = _own_generator(out, x)
        if not over:
            return func(x, generator)
        gamma: Tensor = _aten._standard_gamma.default(x, generator)
        return gamma / reduce(gamma.sum(-1, keepdim=True), "sum")

    return call.plan(out, {(0,): spec}, call=drawn)


# -- with a generator in the call --------------------------------------------------------------------------------------

for _op, _plan in RULES.items():
    _draws = _plan in (plan_draw, plan_draw_like, plan_multinomial, plan_dirichlet)
    if _draws and _index_of_generator(_op) is not None:
        register(_op)(_with_generator(_op))


# -- dropout -----------------------------------------------------------------------------------------------------------

# Dropout as devices other than the CPU run it; on the CPU it is a draw and a product.
#
# Its gradient is elementwise, see pointwise.py.


@register(F.dropout)
def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """What drops nothing returns its input, as torch's does, which takes several calls to find that out."""
    return input if 0 <= p <= 1 and not (training and p) else DECLINED


@operator(_aten.native_dropout.default)
def plan_native_dropout(call: AtenCall) -> AtenPlan:
    spec = call.reduced()[(0,)]
    p, train = call.args[1], call.args[2]
    outs = [spec.replace(meta=meta_of(m)) for m in call.meta]
    sharded = is_divided(spec)
    native_dropout: Callable[..., tuple[Tensor, Tensor]] = _aten.native_dropout.default

    def dropout(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        if not sharded:
            return native_dropout(x, p, train)
        if train is False:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        mask = drawn_into(torch.empty_like(x, dtype=torch.bool), "bernoulli_", 1 - p, spec=spec)
        # A product of the three, which is one kernel on GPUs.
        return _aten.native_dropout_backward.default(x, mask, 1 / (1 - p) if p < 1 else 0.0), mask

    return call.plan(outs, {(0,): spec}, call=dropout)
