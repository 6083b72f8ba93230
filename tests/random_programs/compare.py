"""One program on the ranks of a mesh, line by line next to one device."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from seeded import seeded
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardtensor import UnsupportedSharding
from shardtensor.testing import shard, shared_mesh

from .program import Leaf, Program, Run, plain

T = TypeVar("T")
Setup = Callable[[], Callable[[], None]]
# What may come of a program, and whether it is a defect.
KINDS = {
    "right": False,
    "refused": False,  # a line or the backward; all other lines are right
    "raised": False,  # an error on both
    "stricter": False,  # a tensor that only our operators save was written to
    "looser": False,  # an error on one device alone
    "unstable": False,  # rounding, or torch.compile, changes the numbers on one device, too
    "wrong value": True,
    "wrong gradient": True,
    "foreign": True,  # an error on shards that is no refusal
    "split": True,  # ranks end differently
    "hang": True,  # or a rank has died
}
WRITTEN = "modified by an inplace operation"


@dataclass
class Outcome:
    """What came of the program of a seed."""

    seed: int
    kind: str
    detail: str = ""
    refused: list[str] = field(default_factory=list)
    program: str = ""

    @property
    def bad(self) -> bool:
        return KINDS[self.kind]


Compare = Callable[[int, Program, DeviceMesh], Outcome]


def outcomes(
    programs: dict[int, Program], mesh: tuple[int, ...], compare: Compare, setup: Setup | None = None
) -> list[Outcome]:
    """What comes of the programs of seeds, on each rank. ``setup`` plants a defect, and returns what removes it."""
    restore = setup() if setup is not None else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [outcome_of(seed, program, shared_mesh(mesh), compare) for seed, program in programs.items()]
    finally:
        if restore is not None:
            restore()


def outcome_of(seed: int, program: Program, mesh: DeviceMesh, compare: Compare) -> Outcome:
    """The outcome of all ranks; what is bad is made shorter."""
    outcome = agreed(seed, program, mesh, compare)
    if outcome.bad and outcome.kind != "split":
        outcome, program = shortest(outcome, program, mesh, compare)
    return replace(outcome, program=program.listed())


def agreed(seed: int, program: Program, mesh: DeviceMesh, compare: Compare) -> Outcome:
    """The outcome of all ranks."""
    mine = compare(seed, program, mesh)
    if mine.bad or mine.kind in ("raised", "stricter", "looser"):
        print(mine, flush=True)
    all_ranks = gathered(mine)
    kinds = [outcome.kind for outcome in all_ranks]
    if len({(outcome.kind, *outcome.refused) for outcome in all_ranks}) > 1:
        worst = max(all_ranks, key=lambda outcome: list(KINDS).index(outcome.kind))
        wrong = set(kinds) <= {"right", "refused", worst.kind} and worst.kind.startswith("wrong")
        return replace(worst, kind=worst.kind if wrong else "split", detail=f"{kinds}: {worst.detail}")
    return all_ranks[0]


def shortest(outcome: Outcome, program: Program, mesh: DeviceMesh, compare: Compare) -> tuple[Outcome, Program]:
    """What is left of the program when no line can be left out without another outcome."""
    for shorter in program.shorter():
        again = agreed(outcome.seed, shorter, mesh, compare)
        if again.kind == outcome.kind:
            return shortest(again, shorter, mesh, compare)
    return outcome, program


def place_on(mesh: DeviceMesh) -> Callable[[Leaf], torch.Tensor]:
    """Makes leaves on a mesh."""

    def place(leaf: Leaf) -> torch.Tensor:
        if leaf.placements is None:
            return leaf.value()
        return shard(leaf.value(), mesh, list(leaf.placements), leaf.sizes)

    return place


def compared(seed: int, program: Program, mesh: DeviceMesh) -> Outcome:
    """A line that is refused is left out on one device, too, with all that need its tensors."""
    one, many = Run(program, plain), Run(program, place_on(mesh))
    refused: list[str] = []
    steps: list[tuple[str, Callable[[Run], None]]] = [(line, partial(Run.do, line=line)) for line in program.lines]
    for line, step in [*steps, ("the loss", partial(Run.backward, twice=program.twice))]:
        if line == "the loss":
            refused += forget_out_of_date(one, many)
            if detail := different_values(one, many):
                return Outcome(seed, "unstable" if unstable(program) else "wrong value", detail, refused)
        if not many.knows(line):
            continue
        error = raised_by(step, many)
        if isinstance(error, UnsupportedSharding):
            refused.append(f"{line}: {first_line(error)}")
            if line == "the loss":
                return Outcome(seed, "refused", refused=refused)
            continue
        expected = raised_by(step, one)
        if error is not None or expected is not None:
            return Outcome(seed, *classify(line, error, expected), refused)
    without = gathered(sorted(name for name, leaf in many.leaves().items() if leaf.grad is None))
    if any(names != without[0] for names in without):
        return Outcome(seed, "wrong gradient", f"the ranks lack gradients of {without}", refused)
    if detail := different_gradients(one, many):
        return Outcome(seed, "unstable" if unstable(program) else "wrong gradient", detail, refused)
    return Outcome(seed, "refused" if refused else "right", refused=refused)


def raised_by(step: Callable[[Run], None], run: Run) -> Exception | None:
    modules = len(run.modules)
    try:
        step(run)
    except Exception as error:
        del run.modules[modules:]
        return error
    return None


def classify(line: str, error: Exception | None, expected: Exception | None) -> tuple[str, str]:
    """The kind of an error on shards or on one device that is no refusal."""
    if error is None:
        return "looser", f"{line}: {first_line(expected)}"
    if expected is not None:
        return "raised", f"{line}: {first_line(error)}"
    if WRITTEN in str(error):
        return "stricter", f"{line}: {first_line(error)}"
    where = "".join(traceback.format_tb(error.__traceback__)[-3:])
    return "foreign", f"{line}: {type(error).__name__}: {first_line(error)}\n{where}"


def first_line(error: Exception | None) -> str:
    return str(error).split("\n")[0]


def forget_out_of_date(one: Run, many: Run) -> list[str]:
    """Leave out tensors that shards refuse to read: copies in place of views, of what was written to since."""
    reasons = []
    for name, tensor in list(many.tensors.items()):
        if isinstance(error := raised_by(lambda run, tensor=tensor: tensor.detach(), many), UnsupportedSharding):
            reasons.append(f"{name}: {first_line(error)}")
            del one.tensors[name], many.tensors[name]
    return reasons


def different_values(one: Run, many: Run) -> str:
    for name, tensor in one.tensors.items():
        if name in many.tensors and (detail := difference(tensor, many.tensors[name])):
            return f"{name} {detail}"
    return ""


def different_gradients(one: Run, many: Run) -> str:
    expected, got = one.leaves(), many.leaves()
    if set(expected) != set(got):
        return f"leaves that require grad are {sorted(expected)} on one device, {sorted(got)} on shards"
    for name, leaf in expected.items():
        a, b = leaf.grad, got[name].grad
        if (a is None) != (b is None):
            return f"{name}'s gradient is None on {'one device' if a is None else 'shards'} only"
        if a is not None and b is not None and (detail := difference(a, infinite_alike(a, b))):
            return f"{name}'s gradient {detail}"
    return ""


def infinite_alike(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """``got``, with what one device has where neither is finite.

    In the gradient of a convolution's weight, infinite gradients meet zeros, and the product is NaN: zeros of the
    padding on one device, where other taps stay infinite, and others around a shard.
    """
    if bool(expected.detach().isfinite().all()):
        return got
    whole = got.full_tensor() if isinstance(got, DTensor) else got
    return torch.where(expected.isfinite() | whole.isfinite(), whole, expected)


def gathered(mine: T) -> list[T]:
    """What each rank has."""
    ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


def difference(expected: torch.Tensor, got: torch.Tensor) -> str:
    if expected.requires_grad != got.requires_grad:
        return f"requires grad on {'one device' if expected.requires_grad else 'shards'} only"
    a, b = expected.detach(), got.detach()
    b = b.full_tensor() if isinstance(b, DTensor) else b
    for what in ("shape", "dtype"):
        if getattr(a, what) != getattr(b, what):
            return f"has {what} {getattr(a, what)} on one device, {getattr(b, what)} on shards"
    if torch.allclose(a, b, rtol=1e-8, atol=1e-10, equal_nan=True):
        return ""
    return f"differs by {(a.to(torch.complex128) - b).abs().max():.1e}"


def unstable(program: Program) -> bool:
    """Whether other rounding would change what one device gives."""
    runs = []
    for seed, scale in ((0, 0.0), (1, 1e-13), (2, 1e-13), (3, 1e-13)):
        generator = seeded(seed)

        def place(leaf: Leaf, scale: float = scale, generator: torch.Generator = generator) -> torch.Tensor:
            return leaf.value() + scale * torch.randn(leaf.shape, dtype=torch.float64, generator=generator)

        runs.append(Run(program, place))
        for line in program.lines:
            if runs[-1].knows(line):
                raised_by(partial(Run.do, line=line), runs[-1])
        raised_by(partial(Run.backward, twice=program.twice), runs[-1])
    return any(different_values(runs[0], run) or different_gradients(runs[0], run) for run in runs[1:])
