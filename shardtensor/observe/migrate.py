"""Find the lines to change in a program that comes from PhysicsNeMo, from plain DTensors, or from messages of its own.

``python -m shardtensor migrate PATH...`` reads Python files, imports none of them, and prints for each line::

    train.py:12: physicsnemo.domain_parallel.sync_module_over_mesh -> shardtensor.parallel.synchronize(model, mesh)

``--only physicsnemo`` (``dtensor``, ``messages``) restricts it to one origin. What the lines have in common is in
docs/migrating.md. Names are followed through ``import ... as``; methods and arguments are recognized by their names, in
files that import what they belong to. Nothing is changed.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Origin:
    """What a program can come from.

    Attributes:
        roots: the modules whose names count, with all that is in them.
        names: the last part of a name in them, and what to write instead; with a dot in front methods and attributes
            that are recognized in files which import one of the roots, and with ``=`` behind arguments, likewise.
    """

    roots: tuple[str, ...]
    names: dict[str, str]

    def has(self, name: str) -> bool:
        return any(name == root or name.startswith(f"{root}.") for root in self.roots)


_NOTHING = "nothing"
_REGISTER = "shardtensor.register(function), a decorator"
_PROMOTION = f"{_NOTHING}: plain tensors count as replicated"
_OWN_OPERATOR = f"{_NOTHING} for torch's operators; shardtensor.communication.halo.Fetch for one of your own"
_FACTORY = "x.new_zeros(shape) and the like, or shardtensor.scatter_tensor of a plain tensor"
_EXCHANGE = f"{_NOTHING} if it moves a halo, rows or keys: the operators of a shardtensor.ShardTensor do"
_REDUCTION = f"{_NOTHING} if it sums weights' gradients, statistics or losses over the domain: operators do"

_PHYSICSNEMO = Origin(
    # The class was in physicsnemo.distributed (and modulus.distributed) before; what else is there may stay.
    roots=("physicsnemo.domain_parallel", "physicsnemo.distributed", "modulus.distributed"),
    names={
        "ShardTensor": "shardtensor.ShardTensor",
        "ShardTensorSpec": "shardtensor.ShardTensorSpec",
        "scatter_tensor": "shardtensor.scatter_tensor; it also takes shard_sizes=",
        "sync_module_over_mesh": "shardtensor.parallel.synchronize(model, mesh)",
        "TensorPromotionMode": _PROMOTION,
        "register_custom_ops": f"{_NOTHING}: import shardtensor registers all operators",
        "register_shard_wrappers": f"{_NOTHING}: import shardtensor registers all operators",
        "halo_padding": _OWN_OPERATOR,
        "unhalo_padding": _OWN_OPERATOR,
        "HaloConfig": _OWN_OPERATOR,
        "ring_sdpa": "torch.nn.functional.scaled_dot_product_attention",
        "mark_module_as_shared": f"{_NOTHING}: gradients of weights are summed over the domain in backward",
        "unmark_module_as_shared": f"{_NOTHING}: gradients of weights are summed over the domain in backward",
        ".register_function_handler": _REGISTER,
        ".register_dispatch_handler": _REGISTER,
        ".register_named_function_handler": _REGISTER,
        ".set_promotion_mode": _PROMOTION,
        ".get_promotion_mode": _PROMOTION,
        ".promotion_mode": _PROMOTION,
        ".patches_enabled": "shardtensor.dispatch.patches.installed()",
        ".sharding_shapes": "x.shard_sizes: {mesh_dim: (length on rank 0, ...)}, without the other dims",
        ".offsets": "sum(x.shard_sizes[mesh_dim][:coordinate])",
        "sharding_shapes=": 'shard_sizes={mesh_dim: (length on rank 0, ...)}; "chunk" is "even", "infer" is None',
    },
)
_DTENSOR = Origin(
    roots=("torch.distributed.tensor", "torch.distributed._tensor"),
    names={
        "DTensor": "shardtensor.ShardTensor, for activations; weights may stay DTensors",
        "distribute_tensor": "shardtensor.scatter_tensor(tensor, source, mesh, placements), for inputs",
        "implicit_replication": _PROMOTION,
        "context_parallel": f"{_NOTHING}: torch.nn.functional.scaled_dot_product_attention of sharded sequences",
        "local_map": _REGISTER,
        **dict.fromkeys(("empty", "full", "ones", "rand", "randn", "zeros"), _FACTORY),
    },
)
_MESSAGES = Origin(
    roots=("torch.distributed",),
    names={
        **dict.fromkeys(("send", "recv", "isend", "irecv", "P2POp", "batch_isend_irecv"), _EXCHANGE),
        **dict.fromkeys(("all_to_all", "all_to_all_single", "all_gather", "all_gather_into_tensor"), _EXCHANGE),
        **dict.fromkeys(("all_reduce", "reduce_scatter", "reduce_scatter_tensor"), _REDUCTION),
        "scatter": "shardtensor.scatter_tensor(tensor, source, mesh, placements), for inputs",
    },
)
ORIGINS = {"physicsnemo": _PHYSICSNEMO, "dtensor": _DTENSOR, "messages": _MESSAGES}


@dataclass(frozen=True, order=True)
class Finding:
    """A line to change: its number, from 1, the name in it, and what to write instead."""

    line: int
    name: str
    instead: str


def find(source: str, origins: Iterable[str] = tuple(ORIGINS)) -> list[Finding]:
    """The lines to change in a module's source, in their order.

    Args:
        source: Python source text.
        origins: names of :data:`ORIGINS`; default: all.

    Raises:
        SyntaxError: the text is not Python.

    Example:
        >>> from shardtensor.observe.migrate import find
        >>> find("from physicsnemo.domain_parallel import ShardTensor")[0].instead
        'shardtensor.ShardTensor'
    """
    tree = ast.parse(source)
    imported = list(_imports(tree))
    bound = {alias: name for alias, name, _ in imported}
    found: set[Finding] = set()
    for origin in (ORIGINS[name] for name in origins):
        is_imported = any(map(origin.has, bound.values()))
        for name, line, may_stay in (*((name, line, False) for _, name, line in imported), *_uses(tree, bound)):
            is_member = name.startswith(".") or name.endswith("=")
            if is_imported if is_member else origin.has(name):
                instead = origin.names.get(name if is_member else name.rpartition(".")[2])
                # A name that is called the same with us stays: its import is all that changes.
                if instead and not (may_stay and _same_name(name, instead)):
                    found.add(Finding(line, name, instead))
    return sorted(found)


def _imports(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Names that imports bind anywhere in the module, what they are, with its modules, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield alias.asname or first, alias.name if alias.asname else first, alias.lineno
                yield alias.name, alias.name, alias.lineno  # which makes it known that the module is imported
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}", alias.lineno


def _uses(tree: ast.AST, bound: dict[str, str]) -> Iterator[tuple[str, int, bool]]:
    """Uses of what imports have bound, and methods, attributes and arguments of whatever object, with their lines.

    The last of the three is whether it is a name by itself.
    """
    for node in ast.walk(tree):
        line: int = getattr(node, "end_lineno", 0)
        if name := _full_name(node, bound):
            yield name, line, isinstance(node, ast.Name)
        if isinstance(node, ast.Attribute):
            yield f".{node.attr}", line, False
        elif isinstance(node, ast.keyword):
            yield f"{node.arg}=", node.lineno, False


def _full_name(node: ast.AST, bound: dict[str, str]) -> str:
    """``physicsnemo.domain_parallel.ShardTensor`` for ``dp.ShardTensor``; empty for what no import has bound."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, "")
    if isinstance(node, ast.Attribute) and (base := _full_name(node.value, bound)):
        return f"{base}.{node.attr}"
    return ""


def _same_name(name: str, instead: str) -> bool:
    ours = re.match(r"[\w.]*", instead)
    return ours is not None and ours[0].rpartition(".")[2] == name.rpartition(".")[2]


def _files(paths: Sequence[str]) -> Iterator[Path]:
    for path in map(Path, paths):
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def show(options: argparse.Namespace) -> int:
    """Print the lines to change. Returns the exit status: 1 where a file could not be read or parsed, otherwise 0."""
    lines = status = 0
    for file in _files(options.paths):
        try:
            findings = find(file.read_text(), [options.only] if options.only else ORIGINS)
        except (OSError, SyntaxError, ValueError) as error:
            at, text = (f"{file}:{error.lineno}", error.msg) if isinstance(error, SyntaxError) else (file, error)
            print(f"{at}: {text}", file=sys.stderr)
            status = 1
            continue
        for finding in findings:
            print(f"{file}:{finding.line}: {finding.name} -> {finding.instead}")
        lines += len({finding.line for finding in findings})
    print(f"{lines} line{'s' * (lines != 1)} to look at")
    return status
