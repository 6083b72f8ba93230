"""The arguments of ``python -m shardtensor``, which are known before torch is imported."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .machines import MACHINES

if TYPE_CHECKING:
    import torch

MACHINE_OPTIONS = {
    "flops": "floating-point operations per second of a rank",
    "memory_bandwidth": "bytes per second that a rank reads and writes",
    "latency": "seconds of a message or collective",
    "bandwidth": "bytes per second of a rank's messages and collectives",
}


def parser() -> argparse.ArgumentParser:
    """The commands with their arguments; ``command`` of what it returns is the name of the one given."""
    made = argparse.ArgumentParser(prog="shardtensor", description="What models do on shards.")
    commands = made.add_subparsers(required=True)
    explain = commands.add_parser(
        "explain",
        help="messages, bytes, memory, balance and refusals, layer by layer, without a cluster",
        description="What a model would do on the ranks of a mesh, layer by layer, worked out in one process.",
    )
    _add_model(explain)
    explain.add_argument("--mesh", required=True, type=_lengths, help="ranks, or the shape of the mesh: 4 or 2x2")
    explain.add_argument(
        "--shard",
        required=True,
        action="append",
        type=_shard,
        help="tensor dims, one per mesh dim: 2 or 2,3; once for all inputs, or for each of them (plain: not sharded)",
    )
    explain.add_argument("--sizes", type=_sizes, help="shard sizes, one list per mesh dim: 300+1050 or 300+1050,2700")
    explain.add_argument("--only", type=_ranks, help='ranks to run, "all" or 0,3 (default: a sample of large worlds)')
    explain.add_argument("--values", action="store_true", help="run with values, in the memory of one rank")
    explain.add_argument("--share", action="store_true", help="print only how far a rank is from its part of the work")
    explain.add_argument("--json", action="store_true", help="print JSON in place of a table")
    explain.add_argument("--html", metavar="FILE", help="write a page, too")
    explain.set_defaults(command="explain")
    advise = commands.add_parser(
        "advise",
        help="which dims to shard, in which sizes, and whether it pays",
        description="Ways to shard a model's input over a number of ranks, by a model of the machine.",
    )
    _add_model(advise)
    advise.add_argument("--ranks", required=True, type=int, help="how many there are")
    advise.add_argument("--dims", type=_dims, help="tensor dims to try: 2,3 (default: all that are long enough)")
    advise.add_argument("--device", choices=MACHINES, default="h100", help="the machine to assume (default: h100)")
    for name, what in MACHINE_OPTIONS.items():
        option = f"--{name.replace('_', '-')}"
        advise.add_argument(option, type=float, help=f"of the machine: {what} (default: that of the device)")
    advise.set_defaults(command="advise")
    return made


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="module:function", help="a function that returns the model, or the model")
    parser.add_argument("--input", required=True, action="append", type=_lengths, help="shape of an input: 1x3x64x64")
    parser.add_argument(
        "--dtype", action="append", type=_dtype, help="of the inputs, one for all or one each (default: float32)"
    )
    parser.add_argument("--meta", action="store_true", help="make the model on the meta device, if it is too large")
    parser.add_argument("--backward", action="store_true", help="a backward pass as well")


# -- arguments --------------------------------------------------------------------------------------------------------


def _number(text: str, form: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; give {form}")
    return int(text)


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(_number(part, "lengths with x between them, such as 2x2 or 1x3x64x64") for part in text.split("x"))


def _dims(text: str) -> tuple[int | None, ...]:
    return tuple(None if part == "-" else _number(part, "dims such as 2, or 2,3") for part in text.split(","))


def _shard(text: str) -> tuple[int | None, ...] | None:
    return None if text == "plain" else _dims(text)


def _sizes(text: str) -> list[tuple[int, ...]]:
    form = "sizes such as 300+1050, or 300+1050,2700 for two mesh dims"
    return [tuple(_number(n, form) for n in part.split("+")) for part in text.split(",")]


def _ranks(text: str) -> list[int] | str:
    return text if text == "all" else [_number(part, 'ranks such as 0,3, or "all"') for part in text.split(",")]


def _dtype(text: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"torch has no dtype {text!r}; give one such as float32 or bfloat16")
    return dtype


# -- help -------------------------------------------------------------------------------------------------------------


def answer_help() -> None:
    """Print the help that the program's arguments ask for, and end the program, if it is ``python -m shardtensor``.

    Python imports the package before its ``__main__``, and the package imports torch, which takes seconds. So the
    package calls this function first. The program's name is read from what Python was started with, because
    ``sys.argv[0]`` is "-m" during that import.
    """
    started_as = sys.orig_argv[len(sys.orig_argv) - len(sys.argv) :][:1]
    ours = [Path(name).name for name in started_as] == ["shardtensor"] and sys.argv[0] in ("-m", *started_as)
    if ours and not {"-h", "--help"}.isdisjoint(sys.argv):
        parser().parse_args()
