"""What one rank does: run the cases of an operator and agree with the other ranks on how each one ended.

After every case the ranks tell each other how it went through a small shared file, not through a collective: a rank
that has raised must not meet the others' messages. Only when all say the same does the next case begin. Otherwise the
ranks stop, and the parent goes on with new processes behind that case.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import struct
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import shardtensor
from shardtensor import UnsupportedSharding
from shardtensor.layout import caches

from .cases import (
    DTYPES,
    HALF,
    Cut,
    along_one_dim,
    copied_sample,
    cuts,
    database,
    entries,
    first_operands,
    in_double,
    other_operands,
    place,
    samples,
    variant,
)
from .half import DATA, less_exact, rounded_weights, shifted
from .memory import another_format, in_memory, row_major
from .transforms import checkpointed, transformed

RIGHT, REFUSED, WRONG, FOREIGN, IMPRECISE, FORMAT = range(6)
NAMES = {
    RIGHT: "right",
    REFUSED: "refused",
    WRONG: "wrong",
    FOREIGN: "foreign",
    IMPRECISE: "wrong",
    FORMAT: "format",  # right numbers, but no longer channels-last
}
PATIENCE = 15.0  # seconds that a rank waits for the others to end a case

# Results that are memory as it was found.
UNDEFINED = ("empty", "new_empty", "resize", "nn.functional.feature_alpha_dropout_without")

# Where torch leaves the order of equal elements open: which result holds their positions.
UNSTABLE = {"sort": 1, "argsort": 0, "msort": None}


# Of expanded tensors torch gives wrong medians, and wrong gradients of stft: ours are compared with those of copies.
WRONG_IF_EXPANDED = ("median", "nanmedian", "masked.median", "stft")

# The chunked form (given ``options``) takes the gradients of its forward pass for constants: second derivatives are
# wrong, or raise, and its tangents are zeros. Ours are compared with those of the composed form.
WRONG_TWICE = "nn.functional.linear_cross_entropy"


@dataclass(frozen=True)
class Options:
    """What a sweep runs.

    Attributes:
        dtype: "float", "int", "bool", "bfloat16" or "float16": the samples. Of half precision the error against float64
            is compared with one device's.
        kind: "function" (with gradients where there are any), "forward" (without), "in place".
        gather: inside allow_gather().
        limit: at most so many samples of each operator.
        memory: one of ``MEMORY``; None: as torch makes the samples.
        data: of half precision, what the samples hold; see half.py.
        autocast: "bfloat16" or "float16": inside torch.autocast, and compared as samples of half precision are.
        entries: the first operands are entries of a sharded dim, each on one rank.
        together: all operands are sharded along the same dim, also those that the operator does not pair.
        transform: of torch.func, inside of which the operator is called.
        checkpoint: a policy of selective checkpointing, inside of which it is called for the first time on a layout.
        only: the number of the sample and the name of the cut of cases; None for all.
        setup: ``(module, function)`` to call on each rank before; what it returns is called afterwards.
    """

    dtype: str = "float"
    kind: str = "function"
    gather: bool = False
    limit: int = 10**9
    memory: str | None = None
    data: str = DATA[0]
    autocast: str | None = None
    entries: bool = False
    together: bool = False
    transform: str | None = None
    checkpoint: str | None = None
    only: frozenset[tuple[int, str]] | None = None
    setup: tuple[str, str] | None = None

    @property
    def rounded(self) -> torch.dtype | None:
        """Half precision that the operators compute in."""
        return HALF.get(self.autocast or self.dtype)


@dataclass(frozen=True)
class Case:
    """How one case ended, as rank 0 saw it. ``random``: its numbers are not compared."""

    operator: str
    sample: int
    cut: str
    outcome: str
    detail: str
    random: bool


class Lockstep:
    """The ranks' outcomes, case by case, in a file that all of them map."""

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.count = rank, ranks, 0
        size = 16 * ranks
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, size)
        self.memory = mmap.mmap(descriptor, size)
        os.close(descriptor)

    def outcomes(self, mine: int) -> list[int]:
        """Everybody's outcome of this case. A rank may be one case ahead, so there are two slots for each."""
        self.count += 1
        half = 8 * self.ranks * (self.count % 2)
        struct.pack_into("q", self.memory, half + 8 * self.rank, self.count * 256 + mine)
        deadline = time.monotonic() + PATIENCE
        while True:
            said = struct.unpack_from(f"{self.ranks}q", self.memory, half)
            if all(value // 256 == self.count for value in said):
                return [value % 256 for value in said]
            if time.monotonic() > deadline:
                waiting = [rank for rank, value in enumerate(said) if value // 256 != self.count]
                raise TimeoutError(f"ranks {waiting} did not end the case; this rank: {NAMES[mine]}")
            time.sleep(0.00005)


class Randomness(TorchDispatchMode):
    """Sees whether random numbers are drawn; those of shards are others than those of one device."""

    seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


Weights = Callable[[torch.Tensor], torch.Tensor]


def different_weights(t: torch.Tensor) -> torch.Tensor:
    """Weights for a loss that tell all its elements apart."""
    return torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype.to_real()).reshape(t.shape)


def loss_of(outputs: list[torch.Tensor], weights: Weights = different_weights) -> torch.Tensor:
    """A scalar that weighs every value."""
    total: Any = 0.0
    for t in outputs:
        weight = weights(t)
        # Of complex numbers the square: next to zero, the gradient of abs() is that of the rounding.
        total = total + ((t.abs().square() if t.is_complex() else t) * weight).sum()
    return total


def evaluate(
    function: Callable[..., Any],
    arguments: tuple[Any, Any, Any],
    gradients: bool,
    weights: Weights = different_weights,
) -> list[Any]:
    """The results, then the gradients; on shards both are still sharded."""
    first, args, kwargs = arguments
    torch.manual_seed(1)
    outputs = tree_leaves(function(first, *args, **kwargs))
    results = [t.detach() if isinstance(t, torch.Tensor) else t for t in outputs]
    roots = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
    if not gradients or not roots:
        return results
    leaves = [t for t in tree_leaves((first, args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    found = torch.autograd.grad(loss_of(roots, weights), leaves, allow_unused=True)
    for leaf, grad in zip(leaves, found):
        if grad is not None and isinstance(grad, DTensor) != isinstance(leaf, DTensor):
            raise TypeError(f"a gradient of type {type(grad).__name__} for a {type(leaf).__name__}")
    return results + [torch.zeros(t.shape, dtype=t.dtype) if g is None else g for g, t in zip(found, leaves)]


def by_what_they_pick(name: str, sample: Any, results: list[Any]) -> list[Any]:
    """The results, with positions that torch leaves open replaced by the elements there and themselves in order.

    What equal elements get of the gradient is put in order, too.
    """
    if name not in UNSTABLE or sample.kwargs.get("stable"):
        return results
    at = UNSTABLE[name]
    dim = 0 if name == "msort" else sample.args[0] if sample.args else sample.kwargs.get("dim", -1)
    values, order = sample.input.detach().sort(dim=dim, stable=True)
    if at is not None:
        positions = results[at]
        results = results[:at] + [sample.input.gather(dim, positions), positions.sort(dim)[0]] + results[at + 1 :]
    if values.ndim == 1 and len(values.unique()) < len(values) and len(results) > (1 if at is None else at + 2):
        places = order.argsort()  # where each element is among the ordered ones
        *results, gradient = results
        results = [*results, _by_two_keys(values, gradient[order])[places]]
    return results


def _by_two_keys(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``second`` in the order of ``first``, which is sorted, and then in its own."""
    by_second = second.argsort(stable=True)
    return second[by_second[first[by_second].argsort(stable=True)]]


def difference(got: list[Any], expected: list[Any], tolerance: float | None, values: bool) -> str | None:
    """In words, or None. Without a tolerance floating-point numbers are not compared."""
    if len(got) != len(expected):
        return f"{len(got)} results instead of {len(expected)}"
    for i, (a, b) in enumerate(zip(got, expected)):
        if not isinstance(b, torch.Tensor):
            if isinstance(a, torch.Tensor) or (values and a != b and not (a != a and b != b)):
                if not isinstance(b, float) or (tolerance or 1.0) * max(1, abs(b)) < abs(a - b):
                    return f"result {i} is {a!r} instead of {b!r}"
            continue
        if not isinstance(a, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
            shown = f"{tuple(a.shape)} {a.dtype} {a.layout}" if isinstance(a, torch.Tensor) else repr(a)
            return f"result {i} is {shown} instead of {tuple(b.shape)} {b.dtype} {b.layout}"
        if not values or not b.numel():
            continue
        if b.layout != torch.strided:
            a, b = a.to_dense(), b.to_dense()
        if not (b.is_floating_point() or b.is_complex()):
            if not torch.equal(a, b):
                return f"result {i} differs"
            continue
        if tolerance is None:
            continue
        finite = b[b.isfinite()].abs()
        scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
        if not torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
            return f"result {i} differs by up to {float((a - b).abs().nan_to_num(9e99).max()):.3g}"
    return None


@shardtensor.half_precision("exact")
def run_operator(name: str, options: Options, folder: str, skip: int, started: int) -> list[Case]:
    """All cases of one operator behind the first ``skip``; on every rank, which all return the same outcomes.

    In half precision the gradients of weights are the exact ones: the others are less exact than one device's. Each
    case is also written to a file at once, for a parent that has to end this process.
    """
    warnings.simplefilter("ignore")
    if options.setup is not None:
        undo = getattr(importlib.import_module(options.setup[0]), options.setup[1])()
        try:
            return run_operator(name, replace(options, setup=None), folder, skip, started)
        finally:
            undo()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lockstep = Lockstep(Path(folder) / f"lockstep-{started}", rank, ranks)
    log = open(Path(folder) / f"log-{rank}", "a")  # noqa: SIM115
    found: list[Case] = []
    number = 0
    with log:
        for i, sample in enumerate(samples_of(name, options)):
            reference: Expected | None = None
            for cut in (entries if options.entries else along_one_dim if options.together else cuts)(sample):
                if reference is not None and options.data != DATA[0] and reference.dim != cut.dim:
                    reference = None  # what cancels depends on the dim
                number += 1
                if number <= skip or (options.only is not None and (i, str(cut)) not in options.only):
                    continue
                reference = reference or Expected(name, shifted(sample, options.data, cut.dim), options, dim=cut.dim)
                if reference.impossible:
                    break
                said, detail = reference.compare(cut, lockstep)
                if IMPRECISE in said:
                    said, detail = reference.compare(cut, lockstep, precisely=True)
                together = NAMES[said[0]] if len(set(said)) == 1 else "split"
                for outcome in (FORMAT, WRONG):  # each rank sees its own gradients and shards
                    if outcome in said and set(said) <= {RIGHT, FORMAT, WRONG}:
                        together = NAMES[outcome]
                case = Case(name, i, str(cut), together, detail, reference.random)
                found.append(case)
                print(number, *vars(case).values(), sep="\t", file=log, flush=True)
                if together == "split":
                    raise RuntimeError(f"the ranks disagree on {name} #{i}, {cut}: {said}")
    return found


def samples_of(name: str, options: Options) -> list[Any]:
    """The samples that the options ask for, if the operator takes them."""
    op, dtype = database()[name], {**DTYPES, **HALF}[options.dtype]
    function = variant(name, options.kind)
    if function is None or not op.supports_dtype(dtype, torch.get_default_device().type):
        return []
    made = []
    for sample in samples(name, dtype, with_gradients(name, options)):
        if len(made) == options.limit:
            break
        if options.memory is not None:
            sample = in_memory(sample, options.memory)
        if sample is not None and first_operands(sample):
            made.append(sample)
    return made


def with_gradients(name: str, options: Options) -> bool:
    if options.kind == "forward" or options.dtype not in ("float", *HALF):
        return False
    op = database()[name]
    device_type = torch.get_default_device().type
    takes = options.dtype == "float" or HALF[options.dtype] in op.supported_backward_dtypes(device_type)
    return takes and bool(op.supports_autograd)


class Expected:
    """What one device gives for a sample, and how a cut compares with it.

    ``function`` is called instead of the operator ``name``; ``dim`` is the one that is sharded, where the data depend
    on it.
    """

    def __init__(
        self, name: str, sample: Any, options: Options, function: Callable[..., Any] | None = None, dim: int = 0
    ) -> None:
        self.name, self.sample, self.options = name, sample, options
        self.function = function or variant(name, options.kind)
        self.gradients = with_gradients(name, options)
        self.dim = dim
        self.weights = partial(rounded_weights, options.data, dim) if options.rounded else different_weights
        self.in_place = options.kind == "in place"
        self.undefined = name.startswith(UNDEFINED)
        self.precise: tuple[Any, list[Any]] | None = None
        self.impossible = False
        try:
            with Randomness() as randomness:
                self.values = self.run(self.arguments(sample))
            if options.autocast or options.transform:
                # Inside a mode autocast leaves tensors without elements as they are, and linalg.eig's values unchecked.
                self.values = self.run(self.arguments(sample))
            if options.memory == "expanded" and name in WRONG_IF_EXPANDED:
                self.values = self.run(tree_map(row_major, copied_sample(sample)))
        except Exception:
            self.impossible = True
        self.random = randomness.seen

    def arguments(self, sample: Any) -> tuple[Any, Any, Any]:
        """Those of one device."""
        first, args, kwargs = copied_sample(sample)
        if self.options.transform in ("twice", "jvp") and self.name.startswith(WRONG_TWICE):
            kwargs.pop("options", None)
        return first, args, kwargs

    def run(self, arguments: tuple[Any, Any, Any]) -> list[Any]:
        assert self.function is not None
        function = self.function
        if self.in_place:
            # Written to must be a result of something, as leaves that require gradients cannot be.
            function = lambda x, *a, **k: self.function(torch.clone(x), *a, **k)  # noqa: E731
        if self.options.autocast:  # gradients are taken outside of it, as torch recommends
            autocast = torch.autocast(torch.get_default_device().type, HALF[self.options.autocast])
            function = autocast(function)
        if self.options.checkpoint:
            caches.forget()
            function = checkpointed(self.options.checkpoint, function)
        if self.options.transform:
            return transformed(self.options.transform, function, arguments, self.name)
        return evaluate(function, arguments, self.gradients, self.weights)

    def compare(self, cut: Cut, lockstep: Lockstep, precisely: bool = False) -> tuple[list[int], str]:
        """Every rank's outcome, and this rank's words on it."""
        sample, expected = self.sample, self.values
        if precisely:
            sample, expected = self.in_double()
        got: list[Any] = []
        outcome, detail = RIGHT, ""
        try:
            with shardtensor.allow_gather() if self.options.gather else contextlib.nullcontext():
                got = self.run(place(sample, cut, lockstep.ranks, self.options.memory))
        except UnsupportedSharding as error:
            outcome, detail = REFUSED, str(error).split(". Operands:")[0].replace("\n", " ")
        except Exception as error:
            if "gloo/transport" in str(error) or "pair closure" in str(error):
                raise  # the ranks have lost each other: this case hangs, and no other one can be run here
            outcome, detail = FOREIGN, f"{type(error).__name__}: {' '.join(str(error)[:300].split())}"
        said = lockstep.outcomes(outcome)
        if any(said):
            return said, detail
        # Only now, when all ranks have results, are they put together.
        tolerance = 1e-9 if precisely and sample is not self.sample else 1e-3 if precisely else 2e-5
        values = not (self.random or self.undefined)
        found, wanted = [whole(t) for t in got], expected
        if not self.options.transform:
            found, wanted = (by_what_they_pick(self.name, sample, r) for r in (found, wanted))
        if self.options.rounded:
            detail = difference(found, wanted, None, values) or ""
            if values and not detail:
                precise = by_what_they_pick(self.name, *self.in_double())
                detail = less_exact(found, wanted, precise, self.options.rounded) or ""
            return lockstep.outcomes(WRONG if detail else RIGHT), detail
        detail = difference(found, wanted, tolerance, values) or ""
        if detail:
            return lockstep.outcomes(WRONG if precisely else IMPRECISE), detail
        detail = self.another_format(got) or ""
        return lockstep.outcomes(FORMAT if detail else RIGHT), detail

    def in_double(self) -> tuple[Any, list[Any]]:
        """The sample and its results in double precision; as they are if the operator does not take doubles."""
        if self.precise is None:
            wide = in_double(self.sample, self.options.memory)
            try:
                self.precise = wide, self.run(self.arguments(wide))
            except Exception:
                self.precise = self.sample, self.values
        return self.precise

    def another_format(self, got: list[Any]) -> str | None:
        """In words, which result, or gradient of a first operand, is no longer channels-last."""
        if self.options.memory is None:
            return None
        others = sum(t.requires_grad for t in other_operands(self.sample)) if self.gradients else 0
        for i, (a, b) in enumerate(zip(got[: len(got) - others], self.values)):
            if isinstance(a, DTensor) and (said := another_format(self.name, a, a._local_tensor, b)):
                return f"result {i} {said}"
        return None
