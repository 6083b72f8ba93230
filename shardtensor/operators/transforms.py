"""``torch.func``'s transforms of functions that meet ShardTensors: ``grad``, ``vjp``, ``jvp``, ``vmap``, and what torch
makes of these (``jacrev``, ``jacfwd``, ``hessian``, ``grad_and_value``).

[Note: transforms] torch carries them out by levels, which hide what tensors are (see dispatch/transform_levels.py).
Here they are made of what every operator of ShardTensors has in any case, its gradient by autograd:

- ``grad`` and ``vjp`` differentiate by leaves of their own, which represent the function's arguments. So nothing else
  that the function uses counts as these arguments, as with levels. Where results may be differentiated further, by
  what surrounds the transform, there is a graph of the gradients.
- ``jvp``: the vector-Jacobian product is linear in the vector, so its own vector-Jacobian product is the
  Jacobian-vector product. So is each call that gets dual tensors (``torch.autograd.forward_ad``).
- ``vmap``: if the mapped dim is sharded, each rank maps over its own rows, on plain tensors. Otherwise the function is
  called for one row after the other. See vmap.py.

Whether a function meets ShardTensors is known only after it was called: its arguments may be plain, and it may hold
sharded tensors. So torch's transform goes first, unless an argument is sharded. It raises where it meets a ShardTensor,
before anything is sent. Then the outermost transform is carried out in our way: the function is called a second time,
from the same state of the random numbers. In a captured graph that cannot be, and the error stays. Programs without
ShardTensors have torch's functions, see [Note: footprint].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from .._compat import (
    AutogradFunction,
    FunctionContext,
    alias,
    transforms_active,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from .._compat.functorch import make_dual, replace_transforms, replaced_arguments, sliced_arguments, traces_graph
from ..dispatch.gradients import NotTwice, for_tangents
from ..dispatch.registry import TRANSFORMS, Support
from ..dispatch.tensor import ShardTensor, as_gradient, mark_leaf, wrap
from ..dispatch.transform_levels import InsideLevels, pushes_forward
from ..errors import refuse
from .forward_mode import pushing_tangents
from .vmap import draws_are_captured, mapped, met, random_states

Function = Callable[..., Any]
# Which arguments are differentiated by; None: all of them.
Argnums = int | tuple[int, ...] | None
# Gradients and vectors of results; None: of scalars, one.
Vectors = Sequence[Tensor | None] | None


# -- which way ---------------------------------------------------------------------------------------------------------


def _either(name: str, torchs: Function) -> Function:
    """torch's function that carries out a transform, and in place of it ours where ShardTensors are met."""
    if name == "safe_unpack_dual":
        return _of_no_shards(torchs)
    ours = _OURS[name]

    @wraps(torchs)
    def transform(*args: object, **kwargs: object) -> Any:
        if not dist.is_initialized():
            return torchs(*args, **kwargs)
        if not any(isinstance(t, ShardTensor) for t in tree_leaves((args, kwargs))):
            if transforms_active():
                return torchs(*args, **kwargs)
            before = None if draws_are_captured() else random_states()
            try:
                return torchs(*args, **kwargs)
            except Exception as error:
                if before is None or not met(error):
                    raise
                for set_state, state in before:
                    set_state(state)
        elif transforms_active():
            raise InsideLevels.at(name, args, kwargs)
        return ours(torchs, *args, **kwargs)

    return transform


def _of_no_shards(unpack_dual: Function) -> Function:
    """How torch takes tangents, with a refusal of those that it would keep in the graph of ``linearize``."""

    @wraps(unpack_dual)
    def unpacked(dual: object, *args: object, **kwargs: object) -> Any:
        if isinstance(dual, ShardTensor) and traces_graph():
            reason = "its graph would have derivatives by weights, which torch's has as constants"
            raise refuse("torch.func.linearize", [dual], reason, _PUSH)
        return unpack_dual(dual, *args, **kwargs)

    return unpacked


# -- what is differentiated by ----------------------------------------------------------------------------------------


class _Alias(AutogradFunction):
    """The identity: what is differentiated by is this use of a tensor, and no other one."""

    apply: ClassVar[Callable[[Tensor], Tensor]]

    @staticmethod
    def forward(ctx: FunctionContext, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return alias(tensor)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor | None) -> Tensor | None:
        return grad


def _leaf(tensor: object, surrounded: bool) -> Tensor:
    """What represents an argument; it is in the graph around the transform if there is one (``surrounded``)."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"expected Tensors to differentiate by, got {type(tensor)}")
    if surrounded and tensor.requires_grad:
        return _Alias.apply(tensor)
    new = tensor.detach()
    return mark_leaf(new) if isinstance(new, ShardTensor) else new.requires_grad_()


class _Differentiated:
    """A transform that differentiates, of one call.

    Attributes:
        args: with leaves in place of those that are differentiated by.
        given, leaves, structure: these, as they came and as the function gets them, and how they were nested.
        surrounded: whether there may be a graph around the transform.
    """

    def __init__(self, args: tuple[Any, ...], argnums: Argnums) -> None:
        self.surrounded = torch.is_grad_enabled()
        chosen = args if argnums is None else sliced_arguments(args, argnums, as_tuple=False)
        self.given, self.structure = tree_flatten(chosen)
        with torch.enable_grad():
            self.leaves = [_leaf(t, self.surrounded) for t in self.given]
        new = tree_unflatten(self.leaves, self.structure)
        if argnums is not None and isinstance(argnums, int):
            new = (new,)
        self.args = new if argnums is None else replaced_arguments(args, new, argnums)

    def is_function_of_others(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors depend on anything with a gradient but our leaves: whether they may be differentiated on."""
        if not self.surrounded:
            return False
        own = {id(t) for t in self.leaves}
        nodes = [t.grad_fn for t in tensors if t.grad_fn is not None]
        if any(t.requires_grad and t.grad_fn is None and id(t) not in own for t in tensors):
            return True
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in own:
                return True
            new = {n for n, _ in node.next_functions if n is not None} - seen
            seen |= new
            nodes += new
        return False

    def released(self, tree: object) -> Any:
        """Results without the part of the graph that is the transform's own."""

        def release(t: object) -> object:
            if not isinstance(t, Tensor) or not t.requires_grad or self.is_function_of_others([t]):
                return t
            return t.detach()

        return tree_map(release, tree)

    def pull_back(
        self, results: Sequence[Tensor], grads: Vectors, create_graph: bool, retain_graph: bool | None
    ) -> Any:
        """The gradients, nested as what is differentiated by was."""
        found = gradients(results, self.leaves, grads, create_graph, retain_graph)
        complete = [_of(t, g) for t, g in zip(self.leaves, found, strict=True)]
        return tree_unflatten(complete, self.structure)


def gradients(
    results: Sequence[Tensor], inputs: Sequence[Tensor], grads: Vectors, create_graph: bool, retain_graph: bool | None
) -> Sequence[Tensor | None]:
    """``torch.autograd.grad``, which leaves out results that depend on nothing; a graph is made in this thread."""
    if grads is None:
        grads = [None] * len(results)
    pairs = [(y, g) for y, g in zip(results, grads, strict=True) if y.requires_grad]
    if not pairs:
        return [None] * len(inputs)
    with torch.autograd.set_multithreading_enabled(False) if create_graph else nullcontext():
        found: Sequence[Tensor | None] = torch.autograd.grad(
            [y for y, _ in pairs],
            list(inputs),
            [g for _, g in pairs],
            create_graph=create_graph,
            retain_graph=retain_graph,
            allow_unused=True,
        )
    return found


def _of(tensor: Tensor, grad: Tensor | None) -> Tensor:
    """A gradient as torch.func has it: zeros where there is none; in the layout of its tensor."""
    if grad is None:
        return torch.zeros_like(tensor)
    return as_gradient(grad, tensor._spec) if isinstance(tensor, ShardTensor) else grad


# -- grad, vjp, jvp ----------------------------------------------------------------------------------------------------


def _with_aux(result: Any, has_aux: bool, name: str) -> tuple[Any, Any]:
    if not has_aux:
        return result, None
    if not (isinstance(result, tuple) and len(result) == 2):
        raise RuntimeError(f"{name}: output of function f should be a tuple: (output, aux) if has_aux is True")
    return result


def _grad_and_value(
    torchs: Function,
    func: Function,
    argnums: Argnums,
    has_aux: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Any]:
    call = _Differentiated(args, argnums)
    with torch.enable_grad():
        output, aux = _with_aux(func(*call.args, **kwargs), has_aux, "grad_and_value(f)(*args)")
    if not isinstance(output, Tensor) or output.dim():
        got = f"tensor with {output.dim()} dims" if isinstance(output, Tensor) else f"{type(output)}"
        raise RuntimeError(
            f"grad_and_value(f)(*args): Expected f(*args) to return a scalar Tensor, got {got}. Maybe you wanted to "
            "use the vjp or jacrev APIs instead?"
        )
    again = call.is_function_of_others([output])
    grads = call.pull_back([output], None, again, again or has_aux)
    output, aux = call.released(output), call.released(aux)
    return (grads, (output, aux)) if has_aux else (grads, output)


def _vjp(
    torchs: Function, func: Function, *primals: object, argnums: Argnums = None, has_aux: bool = False
) -> tuple[Any, ...]:
    call = _Differentiated(primals, argnums)
    with torch.enable_grad():
        output, aux = _with_aux(func(*call.args), has_aux, "vjp(f, *primals)")
    results, structure = _results(output, "vjp(f, *primals)")
    for result in results:
        if not (result.is_floating_point() or result.is_complex()):
            raise RuntimeError(
                "vjp(f, ...): All outputs of f must be floating-point or complex Tensors, got Tensor with dtype "
                f"{result.dtype}"
            )
    others = call.is_function_of_others(results)

    def pull_back(cotangents: object, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        if transforms_active():
            raise InsideLevels.at("vjp", tree_leaves(cotangents), {})
        grads, theirs = tree_flatten(cotangents)
        if theirs != structure:
            raise RuntimeError(
                "Expected pytree structure of cotangents to be the same as pytree structure of outputs to the "
                f"function. cotangents: {theirs}, primal output: {structure}"
            )
        if create_graph is None:
            create_graph = torch.is_grad_enabled() and (others or any(g.requires_grad for g in grads))
        return call.pull_back(results, grads, create_graph, retain_graph)

    released = call.released(output)
    return (released, pull_back, call.released(aux)) if has_aux else (released, pull_back)


def _results(output: object, name: str) -> tuple[list[Any], Any]:
    results, structure = tree_flatten(output)
    for result in results:
        if not isinstance(result, Tensor):
            raise RuntimeError(f"{name}: Expected f to return only tensors, got unsupported type {type(result)}")
    if not results:
        raise RuntimeError(f"{name}: Expected f to be a function that has non-empty output")
    return results, structure


def _jvp(
    torchs: Function,
    func: Function,
    primals: object,
    tangents: object,
    argnums: Argnums,
    *,
    strict: bool = False,
    has_aux: bool,
) -> tuple[Any, ...]:
    name = "jvp(f, primals, tangents)"
    if not isinstance(primals, tuple):
        raise RuntimeError(f"{name}: Expected primals to be a tuple. E.g. it should be valid to call f(*primals).")
    call = _Differentiated(primals, argnums)
    vectors, structure = tree_flatten(tangents)
    if len(vectors) != len(call.leaves):
        raise RuntimeError(
            f"{name}: Expected primals and tangents to have the same python structure. Got primals with structure "
            f"{call.structure} and tangents with structure {structure}"
        )
    with torch.enable_grad():
        with pushing_tangents():
            output, aux = _with_aux(func(*call.args), has_aux, name)
        results, out_structure = _results(output, name)
        pushed = push_forward(results, call.leaves, vectors, call.surrounded and _may_go_on(call, results, vectors))
    if strict and any(p is None for p in pushed):
        raise RuntimeError("jvp(f, primals, tangents, strict=True): The output of f is independent of the inputs.")
    complete = [torch.zeros_like(y) if p is None else p for y, p in zip(results, pushed, strict=True)]
    found = tree_unflatten(complete, out_structure)
    released = call.released(output)
    return (released, found, call.released(aux)) if has_aux else (released, found)


@pushes_forward
def _dual(func: Function, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    """What ``func`` returns for dual tensors, as dual tensors; what is not differentiable, as it is."""
    call = _Differentiated(primals, None)
    with torch.enable_grad():
        with pushing_tangents():
            output = func(*call.args)
        results = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        again = call.surrounded and _may_go_on(call, results, tangents)
        pushed = iter(push_forward(results, call.leaves, tangents, again))

    def dual(t: Any) -> Any:
        tangent = next(pushed) if isinstance(t, Tensor) else None
        t = call.released(t)
        return t if tangent is None else make_dual(t, tangent)

    return tree_map(dual, output)


def _may_go_on(call: _Differentiated, results: Sequence[Tensor], vectors: Sequence[Tensor]) -> bool:
    return call.is_function_of_others(results) or any(v.requires_grad for v in vectors)


def push_forward(
    results: Sequence[Tensor], leaves: Sequence[Tensor], tangents: Sequence[Tensor], create_graph: bool
) -> list[Tensor | None]:
    """The Jacobian-vector products of results that autograd has a graph of, see [Note: transforms].

    None for results that do not depend on ``leaves``.
    """
    found: list[Tensor | None] = [None] * len(results)
    ones = [i for i, y in enumerate(results) if y.requires_grad]
    cotangents = [_cotangent(results[i]) for i in ones]
    back = gradients([results[i] for i in ones], leaves, cotangents, True, True)
    given = map(_tangent, leaves, tangents)
    pairs = [(g, v) for g, v in zip(back, given, strict=True) if g is not None and g.requires_grad]
    if not pairs:
        return found
    try:
        with for_tangents.set_to(True):
            forward = gradients([g for g, _ in pairs], cotangents, [v for _, v in pairs], create_graph, create_graph)
    except RuntimeError as error:
        if not isinstance(error, NotTwice) and "is not implemented" not in str(error):  # as torch says it
            raise
        reason = f"a Jacobian-vector product is the derivative of a gradient, and {error}"
        raise refuse("jvp", results, reason, "use grad, vjp or jacrev instead of jvp, jacfwd and hessian") from error
    for i, u, g in zip(ones, cotangents, forward, strict=True):
        found[i] = g if g is None else _of(u, g)
    return found


def _tangent(leaf: Tensor, tangent: Tensor) -> Tensor:
    """The tangent; a plain one of a DTensor as a DTensor, which torch's own nodes need."""
    if isinstance(leaf, ShardTensor) or not isinstance(leaf, DTensor) or isinstance(tangent, DTensor):
        return tangent
    return DTensor.from_local(tangent, leaf.device_mesh, [Replicate()] * leaf.device_mesh.ndim, run_check=False)


def _cotangent(result: Tensor) -> Tensor:
    """A vector that a gradient is linear in: its values do not count."""
    if not isinstance(result, ShardTensor):
        return torch.zeros_like(result, requires_grad=True)
    spec = result._spec.for_gradient()
    return mark_leaf(wrap(result._local_tensor.new_zeros(spec.own_shape, dtype=spec.tensor_meta.dtype), spec))


def _declare(transforms: Iterable[Function], limits: str) -> None:
    TRANSFORMS.update({t: Support(True, "declared", __name__, f"refused: {limits}") for t in transforms})


_PUSH = "call torch.func.jvp with each tangent"
_WRITES = "writes to an argument that is differentiated by"
_declare([grad, grad_and_value, vjp, jacrev], _WRITES)
_declare([jvp, jacfwd, hessian], f"operators without second derivatives; {_WRITES}")
_declare([vmap], "randomness='different' where random numbers are drawn, and running statistics")
TRANSFORMS[linearize] = Support(False, "refused", __name__, _PUSH)

_OURS: dict[str, Function] = {
    "_vjp_with_argnums": _vjp,
    "_jvp_with_argnums": _jvp,
    "grad_and_value_impl": _grad_and_value,
    "vmap_impl": mapped,
}

replace_transforms(_either)
