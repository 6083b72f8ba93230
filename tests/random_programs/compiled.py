"""Programs as one function, compiled for shards, next to what they give on one device."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardtensor import UnsupportedSharding

from .compare import Outcome, different_gradients, different_values, first_line, gathered, place_on, raised_by, unstable
from .program import Leaf, Program, Run, made_by, plain, runnable

# What torch.compile does not take, or takes otherwise.
_LEFT_OUT = ("autograd", "checkpoint", "func.", "float(", "deepcopy", "requires_grad_")
_MADE_BEFORE = ("rand", "randint", "seeded")


class _Constants(ast.NodeTransformer):
    """Names in place of calls that make modules and random numbers, which are called here."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or node.func.id not in _MADE_BEFORE:
            return node
        try:
            made = eval(ast.unparse(node), self.names)
        except NameError:  # its arguments are those of a tensor
            return node
        name = f"c{len(self.names)}"
        self.names[name] = made
        return ast.Name(name, ast.Load())


def run_as_function(program: Program, place: Callable[[Leaf], torch.Tensor], compiled: bool) -> Run:
    """The program, all of whose lines are one function; with the gradients of its loss."""
    lines = [line for line in program.lines if not any(text in line for text in _LEFT_OUT)]
    lines = list(runnable(tuple(lines), len(program.leaves)))
    made = dict.fromkeys(name for line in lines for name in made_by(line) if name[0] == "t")
    leaves = [f"x{k}" for k in range(len(program.leaves))]
    # torch.compile takes no outputs of subclasses that are views of each other.
    body = [*lines, "return {" + ", ".join(f"{name!r}: {name}.clone()" for name in made) + "}"]
    text = f"def program({', '.join(leaves)}):\n" + "".join(f"    {line}\n" for line in body)
    run = Run(replace(program, lines=()), place)
    names = dict(run.globals)
    tree = ast.fix_missing_locations(_Constants(names).visit(ast.parse(text)))
    exec(compile(tree, "program", "exec"), names)
    function = names["program"]
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager", dynamic=False)
    run.tensors |= function(*(run.tensors[name] for name in leaves))
    run.backward(twice=False)
    return run


def compared_compiled(seed: int, program: Program, mesh: DeviceMesh) -> Outcome:
    """The program compiled for shards; what is refused, or raises where it is not compiled, is left alone."""
    place, runs = place_on(mesh), {}

    def raised(name: str, place: Callable[[Leaf], torch.Tensor], compiled: bool = False) -> list[str]:
        def step(_: Any) -> None:
            runs[name] = run_as_function(program, place, compiled)

        error = raised_by(step, Run(replace(program, leaves=(), lines=()), plain))
        kind = "refused: " if isinstance(error, UnsupportedSharding) else ""
        return gathered("" if error is None else f"{kind}{type(error).__name__}: {first_line(error)}")

    if any(raised("one", plain)) or any(raised("plain", plain, compiled=True)):
        return Outcome(seed, "raised")
    if any(errors := raised("eager", place)):
        return Outcome(seed, "refused", refused=[f"the program: {max(errors)}"])
    if any(errors := raised("compiled", place, compiled=True)):
        return Outcome(seed, "foreign" if all(errors) else "split", max(errors))
    for what, difference in (("value", different_values), ("gradient", different_gradients)):
        if detail := difference(runs["one"], runs["compiled"]):
            # Of a leaf that is written to, torch.compile computes again from what was written what gradients need.
            torchs = difference(runs["one"], runs["plain"]) or unstable(program)
            return Outcome(seed, "unstable" if torchs else f"wrong {what}", detail)
    return Outcome(seed, "right")
