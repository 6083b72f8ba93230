"""The run of an operator above autograd: what a plan does on this rank, and how autograd differentiates it.

A plan is made by the function that declares its operator, see declaration.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import compress
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from .._compat import AutogradFunction, FunctionContext, alias, multithreading_enabled
from ..communication.weight_gradients import Contribution, GradientSum
from ..context import contributions_are_exact
from ..dispatch.gradients import needed_gradients, not_twice, passes
from ..dispatch.tensor import ShardTensor, as_gradient, from_part, placements_of_second, to_part, wrap
from ..errors import UnsupportedSharding
from ..layout.spec import ShardTensorSpec
from ..layout.strides import apart
from ..ranks.compared_operands import PlainOperands
from ..ranks.failures import note_raised
from ..ranks.history import here
from .autocast import without_autocast

# Where a call has an argument that holds tensors: the place of one among the call's tensors, or those of a list; None
# for one that was left out.
Places: TypeAlias = "int | tuple[Places, ...] | None"
Results: TypeAlias = "ShardTensor | tuple[ShardTensor, ...]"


class Plan:
    """The work of one call on this rank. Subclasses implement the local work of an operator and its gradient.

    Attributes:
        outputs: the spec of the result, or a tuple of specs.
        saves: the positions of the tensors that the gradient needs.
        saved_for: by position, the other tensor whose gradient alone needs a saved tensor. None is saved instead if
            that other tensor, a frozen weight, requires no grad.
        total: the sum over ranks for the gradients of plain parameters, if the plan computes it.
        deferred: the same sum, if it is computed after the backward pass of the plan (see :attr:`defers`).
        contributed: by position, the placements of gradients of ShardTensors to which each rank contributes, such as
            those of parameters in half precision.
        widens: whether the gradients of parameters are contributions, which the ranks sum now or later, in float32
            where the parameters are in half precision.
        exact: whether operands are converted to float32 for that. See :func:`shardtensor.half_precision`.
        name, device: the name of the operator, for errors; the device type of its tensors.
        label: the name, and text that distinguishes this plan from others of the operator, the same on all ranks. See
            history.py.
        order: the positions of the operator's tensors among those of the call, None for one that is left out. None:
            the same order.
        plain: the plain tensors among those of the call; None if there are none to compare.
        steps: steps that prepare tensors before the run, by position: promotion, casts, redistribution.
        prepares: whether there is anything to do before the run, see :meth:`prepared`.
        then: the layout that the result is redistributed to.
        twice: whether autograd can differentiate :meth:`again`, for second derivatives.
        linear: whether the operator is linear. Its gradient does not depend on the tensors, so they are not kept.
        view: whether the result represents a view, which may share memory with the tensors.
        new: whether :meth:`forward` returns new memory in each case. Otherwise results are copied that share theirs.
        depends: by position, the tensors on which the gradient of a tensor depends; default: all. Second derivatives
            with respect to other tensors are None, as on one device.
    """

    outputs: ShardTensorSpec | tuple[ShardTensorSpec, ...]
    saves: tuple[int, ...] = ()
    saved_for: ClassVar[Mapping[int, int]] = {}
    total: GradientSum | None = None
    deferred: GradientSum | None = None
    contributed: Mapping[int, Sequence[Placement]] = {}
    widens: bool = False
    exact: bool = False
    defers: bool = True
    twice: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    view: bool = False
    new: ClassVar[bool] = False
    depends: Mapping[int, Sequence[int]] = {}
    # Filled in by the operator that has the plan made.
    name: str = ""
    label: str = ""
    device: str = "cpu"
    order: tuple[Places, ...] | None = None
    plain: PlainOperands | None = None
    steps: tuple[tuple[int, Callable[[Any], Any]], ...] = ()
    prepares: bool = False
    then: ShardTensorSpec | None = None

    def forward(self, *tensors: Any) -> tuple[Any, Sequence[Tensor | None]]:
        """Return the local result (a tensor or a tuple of tensors), and other values that :meth:`backward` needs.

        Args:
            tensors: the local tensors; None for those that the caller left out.
        """
        raise NotImplementedError

    def backward(self, needed: Sequence[bool], grads: Sequence[Any], *saved: Any) -> Sequence[Tensor | None]:
        """Return local gradients of all tensors; None for those that are not ``needed``.

        With :attr:`total`, gradients of parameters are complete. Otherwise they must be new tensors.

        Args:
            grads: local gradients of the results, in the layout of :attr:`outputs`; None for results without gradient.
            saved: the local tensors in :attr:`saves`, then the other values that :meth:`forward` returned.
        """
        raise NotImplementedError

    def again(self, *tensors: Any) -> Any:
        """Compute the local result again, for autograd to differentiate. See :attr:`twice`."""
        return self.forward(*tensors)[0]

    def wide_for_free(self, device: str) -> bool:
        """Whether contributions in float32 cost no more than rounded ones on devices of this type."""
        return False

    def decide_precision(self, device: str, contributes: bool) -> None:
        """Decide whether operands are converted to float32.

        Args:
            contributes: whether gradients of parameters are contributions.
        """
        self.exact = contributions_are_exact()
        self.widens = contributes and (self.exact or self.wide_for_free(device))

    def run(self, tensors: Sequence[Any]) -> Any:
        """Return the result as ShardTensors, differentiable. ``tensors`` are redistributed already."""
        if torch.is_grad_enabled():
            if self.deferred is None:
                return _Run.apply(self, None, tensors, *tensors)
            deferring, contribution = self.deferred.defer(tensors)
            return _Run.apply(self, contribution, tensors, *deferring)
        held = _held(tensors)
        result = self.forward(*held)[0]
        return self.wrapped(result if self.new else apart(result, held))

    def wrapped(self, result: Any) -> Results:
        """Return local results as ShardTensors, not differentiable."""
        if isinstance(self.outputs, tuple):
            return tuple(map(wrap, result, self.outputs))
        return wrap(result, self.outputs)

    def prepared(self, tensors: Sequence[Any]) -> list[Any]:
        """The operator's tensors out of those of the call, in their order, promoted, cast and redistributed."""
        tensors = list(tensors) if self.order is None else [picked(tensors, place) for place in self.order]
        for i, step in self.steps:
            tensors[i] = step(tensors[i])
        return tensors


class LocalPlan(Plan):
    """A plan whose local work autograd differentiates: ``function`` computes the local result from local tensors.

    Communication in ``function`` must be differentiable, as with :class:`shardtensor.communication.halo.Fetch`.

    Args:
        gradients: the layout of the gradient of each tensor; None for the layout of the tensor. Use Partial for a
            replicated tensor with which the ranks do different work.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        outputs: ShardTensorSpec | tuple[ShardTensorSpec, ...],
        gradients: Sequence[ShardTensorSpec | None] | None = None,
    ) -> None:
        self.function, self.outputs, self.gradients = function, outputs, gradients

    def local_tensors(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the inputs of the local work, differentiably."""
        gradients = (None,) * len(tensors) if self.gradients is None else self.gradients
        return [
            to_part(t, t._spec.for_gradient() if spec is None else spec) if type(t) is ShardTensor else t
            for t, spec in zip(tensors, gradients, strict=True)
        ]

    def run(self, tensors: Sequence[Any]) -> Any:
        locals_: list[Any] = []
        if not torch.is_grad_enabled():
            for t in tensors:
                locals_.append(t._local_tensor if type(t) is ShardTensor else t)
        else:
            locals_ = self.local_tensors(tensors)
            if self.deferred is not None:
                locals_ = self.deferred.defer_of_autograd(locals_)
            elif self.total is not None:
                locals_ = self.total.complete(locals_)
        result = self.function(*locals_)
        if not self.view:
            result = apart(result, locals_)
        if isinstance(self.outputs, tuple):
            return tuple(map(from_part, result, self.outputs))
        return from_part(result, self.outputs)


class Composed(Plan):
    """A plan that calls other operators. ``function`` gets the operator's tensors, and the parameters of the caller."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def run(self, tensors: Sequence[Any]) -> Any:
        return self.function(*tensors)


class _RunContext(FunctionContext, Protocol):
    """What :class:`_Run` keeps.

    Attributes:
        plan: the :class:`Plan`; where there is a contribution, so is the plan's deferred sum.
        specs: by the tensors' positions, the layouts of gradients; None for plain tensors.
        others, autocast: for second derivatives: the tensors that are not saved, and autocast's device and dtype.
    """

    plan: Any
    contribution: Contribution | None
    specs: list[Any]
    others: list[Any]
    autocast: tuple[str, torch.dtype] | tuple[()]


class _Run(AutogradFunction):
    """A plan's run, and its gradient. Saved are tensors and the plan."""

    @staticmethod
    def forward(
        ctx: _RunContext, plan: Plan, contribution: Contribution | None, given: Sequence[Any], *tensors: Tensor | None
    ) -> Results:
        """``given`` are the operator's tensors without the node that sums parameters' gradients, and saved are these:
        what depends on saved tensors has gradients of its own, which are in no bucket.
        """
        held, specs = [], []
        for t in given:
            is_sharded = type(t) is ShardTensor
            held.append(t._local_tensor if is_sharded else t)
            specs.append(t._spec if is_sharded else None)
        result, kept = plan.forward(*held)
        if not plan.new:
            result = apart(result, held)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.contribution, ctx.specs = plan, contribution, specs
        saved = list(map(given.__getitem__, plan.saves))
        for i, other in plan.saved_for.items():
            if not given[other].requires_grad:
                saved[plan.saves.index(i)] = None
        ctx.save_for_backward(*saved, *kept)
        for i, placements in plan.contributed.items():
            specs[i] = given[i]._spec.replace(placements=placements)
        if plan.twice:
            ctx.others = [None] * len(given) if plan.linear else list(given)
            for i in plan.saves:
                ctx.others[i] = None
            device = plan.device
            ctx.autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ()
        outputs = plan.outputs
        return wrap(result, outputs) if type(outputs) is ShardTensorSpec else plan.wrapped(result)

    @staticmethod
    def backward(ctx: _RunContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            found = _gradients(ctx, ctx.saved_tensors, grads)
            if ctx.contribution is not None:
                ctx.contribution.add(compress(found, ctx.plan.deferred.needed))
            return None, None, None, *found
        if ctx.contribution is not None:
            ctx.contribution.note_summed()
        if ctx.plan.twice:
            if ctx.plan.device != "cpu" and multithreading_enabled():  # see [Note: graphs of gradients]
                raise UnsupportedSharding(
                    f"{ctx.plan.name}: from a plain tensor, create_graph=True makes a graph in the device's thread: "
                    "ranks may order its communication differently. Remedy: take the gradient inside "
                    "torch.autograd.set_multithreading_enabled(False), or of a ShardTensor."
                )
            return None, None, None, *_second_derivatives(ctx, grads)
        saved = ctx.saved_tensors  # once, as checkpointing asks for
        with torch.no_grad():
            found = _gradients(ctx, saved, grads)
            if ctx.contribution is not None:
                found = ctx.plan.deferred.start(found)()
        return None, None, None, *not_twice(ctx.plan.name, found, (*grads, *saved))


def _gradients(ctx: _RunContext, saved: Sequence[Any], grads: Sequence[Tensor | None]) -> list[Any]:
    plan, needed = ctx.plan, needed_gradients(ctx, 3) if passes.asked else ctx.needs_input_grad[3:]
    caller, here.operator = here.operator, plan.label
    try:
        outputs = plan.outputs if type(plan.outputs) is tuple else (plan.outputs,)
        local_grads = []
        for grad, spec in zip(grads, outputs, strict=True):
            local_grads.append(None if grad is None else as_gradient(grad, spec)._local_tensor)
        if torch.is_autocast_enabled(plan.device):
            with without_autocast(plan.device):
                found = plan.backward(needed, local_grads, *_held(saved))
        else:
            found = plan.backward(needed, local_grads, *_held(saved))
        gradients = list(found)
        for i, spec in enumerate(ctx.specs):
            if spec is not None and gradients[i] is not None:
                gradients[i] = wrap(gradients[i], spec)
        return gradients
    except Exception as error:
        note_raised(error)
        raise
    finally:
        here.operator = caller


def _held(tensors: Iterable[Any]) -> list[Any]:
    """The local tensors of ShardTensors, and others as they are."""
    held = []
    for t in tensors:
        held.append(t._local_tensor if type(t) is ShardTensor else t)
    return held


def _second_derivatives(ctx: _RunContext, grads: Sequence[Tensor | None]) -> list[Any]:
    """The gradients for second derivatives: the same computation once more, and differentiated by autograd."""
    plan, needed = ctx.plan, needed_gradients(ctx, 3)
    tensors = list(ctx.others)
    for i, t in zip(plan.saves, ctx.saved_tensors):
        tensors[i] = t
    locals_ = []
    for t, s in zip(tensors, ctx.specs, strict=True):
        if type(t) is ShardTensor:
            t = to_part(t, s.for_gradient() if s is t._spec else s)
        elif t is None and s is not None:  # not saved, as no gradient that is asked for depends on it
            t = _zeros(s, next(g for g in grads if g is not None))
        locals_.append(t)
    total = plan.total if plan.deferred is None else plan.deferred
    completed = locals_ if total is None else total.complete(locals_)
    with torch.autocast(*ctx.autocast) if ctx.autocast else nullcontext():
        result = plan.again(*completed)
    results, outputs = (result, plan.outputs) if type(plan.outputs) is tuple else ((result,), (plan.outputs,))
    pairs = [(y, _local_gradient(g, s)) for y, g, s in zip(results, grads, outputs) if g is not None]
    asked = list(compress(completed, needed))
    found = torch.autograd.grad([y for y, _ in pairs], asked, [g for _, g in pairs], create_graph=True)
    sources = [None if t is None else c for t, c in zip(tensors, completed)]
    sources += [g for _, g in pairs]
    places = range(len(completed))
    gradients = iter(found)
    complete: list[Any] = [None] * len(needed)
    for i in compress(places, needed):
        depends = plan.depends.get(i, places)
        complete[i] = _FunctionOf.apply(next(gradients), [j in depends for j in places], *sources)
    if total is not None:  # of what is in the graph on every rank, also on one without elements
        complete = total.start(complete)()
    return [g if g is None or s is None else from_part(g, s) for g, s in zip(complete, ctx.specs, strict=True)]


def _local_gradient(grad: Any, spec: ShardTensorSpec) -> Tensor:
    """The local part of the gradient of a result with this spec, differentiable again."""
    grad = as_gradient(grad, spec)
    local: Tensor = grad.to_local(grad_placements=placements_of_second(spec, grad._spec))
    return local


def _zeros(spec: ShardTensorSpec, grad: Tensor) -> Tensor:
    """In place of a tensor on which nothing depends."""
    dtype = spec.tensor_meta.dtype
    return torch.zeros(spec.own_shape, dtype=dtype, device=grad.device, requires_grad=True)


class _FunctionOf(AutogradFunction):
    """The identity on ``result``, which counts as a function of ``sources``, with a gradient of zeros.

    With an empty shard gradients depend on less than elsewhere; but what is differentiated again must communicate on
    every rank. Sources that no rank's gradient depends on (not ``depends``) are in the graph, as torch's own operators
    have them there, and get no gradient.
    """

    @staticmethod
    def forward(ctx: FunctionContext, result: Tensor, depends: Sequence[bool], *sources: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.depends = [*depends, *[True] * (len(sources) - len(depends))]
        ctx.like = [(t.shape, t.dtype) if isinstance(t, Tensor) else None for t in sources]
        return alias(result)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * len(ctx.like)
        if grad is not None:
            nothing = grad.reshape(-1)[:0].sum()
            for i, need in enumerate(ctx.needs_input_grad[2:]):
                if need and ctx.depends[i]:
                    shape, dtype = ctx.like[i]
                    of_real = nothing.is_complex() and not dtype.is_complex
                    found[i] = (nothing.real if of_real else nothing).to(dtype).expand(shape)
        return grad, None, *found


def picked(tensors: Sequence[Any], place: Any) -> Any:
    """The tensors at a place: one, or a list of them for a tuple of places."""
    if place is None:
        return None
    return tensors[place] if type(place) is int else [picked(tensors, item) for item in place]
