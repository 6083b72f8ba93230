"""Pipelines of diffusers, unmodified, whose autoencoder runs on several ranks: an image and a video.

python decode.py                                             one process
torchrun --nproc-per-node 2 decode.py                        bands
torchrun --nproc-per-node 4 decode.py --mesh 2x2 --uneven    bands x stripes of different sizes
torchrun --nproc-per-node 2 decode.py --check                in float64, compared with one process
torchrun --nproc-per-node 2 decode.py --jobs video           the video only

The weights are random, and nothing is downloaded. Seconds, memory and bytes of decoding and encoding are those of this
package, of one process, and of DistVAE where it is installed and has a form of the autoencoder.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch
import torch.distributed as dist
from autoencoders import code_of
from pipelines import JOBS, Job
from torch import Tensor
from tqdm import tqdm
from ways import by_distvae, by_shardtensor, has_distvae

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
import running
from layout import Layout, add_options, make_layout

PLAIN, OURS, DISTVAE = "one process", "shardtensor", "DistVAE"
DIMS = ("rows", "columns")  # of the code


@dataclass
class Measured:
    """One way to decode or encode.

    Attributes:
        result: on this rank; None where it takes no part.
        seconds: in the median.
        memory: GiB of tensors that this rank makes, at most at one time.
        messages, sent: what this rank sends, and its bytes, operands of collectives included.
    """

    result: Tensor | None = None
    seconds: float = 0.0
    memory: float = 0.0
    messages: int = 0
    sent: int = 0


@dataclass
class Outcome:
    """Of a job on several ranks, compared with one process: the relative differences of all that it gives, and what its
    pipeline gives in one process and on the ranks."""

    differences: list[float]
    expected: Tensor
    found: Tensor


def layout_of(args: argparse.Namespace) -> Layout:
    sizes = args.sizes.split(",") if args.sizes else ()
    return make_layout(dict.fromkeys(DIMS, args.size // 8), args.world_size, args.mesh, sizes, args.uneven)


def in_ways(args: argparse.Namespace, name: str, mesh: dist.DeviceMesh | None, device: torch.device) -> dict[str, Job]:
    """The same job once in each way: in one process, and over the ranks."""
    dtype = getattr(torch, args.dtype)
    jobs = {PLAIN: JOBS[name](args.size, dtype, device)}
    if mesh is not None:
        jobs[OURS] = JOBS[name](args.size, dtype, device)
        image_sizes = {m: tuple(n * jobs[OURS].factor for n in sizes) for m, sizes in args.layout.shard_sizes.items()}
        by_shardtensor(jobs[OURS].pipeline.vae, mesh, jobs[OURS].dim, args.layout.shard_sizes, image_sizes)
    if mesh is not None and mesh.ndim == 1 and has_distvae(jobs[PLAIN].pipeline.vae):
        jobs[DISTVAE] = JOBS[name](args.size, dtype, device)
        by_distvae(jobs[DISTVAE].pipeline.vae, mesh)
    for job in jobs.values():
        job.pipeline.set_progress_bar_config(disable=True)
    return jobs


def measured(
    args: argparse.Namespace, runs: Mapping[str, Callable[[], Tensor]], device: torch.device, label: str
) -> dict[str, Measured]:
    """What each way gives, sends and holds, and then its seconds, in turns. One process's way is rank 0's alone."""
    mine = {way: run if way != PLAIN or args.rank == 0 else None for way, run in runs.items()}
    ways = {way: Measured() for way in runs}
    for way, run in tqdm(mine.items(), desc=label, unit="way", disable=args.rank != 0):
        each = ways[way]
        if run is not None:
            with running.counting() as counted:
                each.result = run()  # the first call makes plans
            each.messages, each.sent = counted.messages, counted.bytes_sent + counted.collective_bytes
            each.memory = running.most_at_once(run, device)
        running.wait_for_all()
    for way, seconds in running.take_turns(mine, args.rounds).items():
        ways[way].seconds = statistics.median(seconds)
    return ways


@torch.no_grad()
def perform(args: argparse.Namespace, name: str, mesh: dist.DeviceMesh | None, device: torch.device) -> Outcome:
    """Run a job's pipeline, and its autoencoder alone, in every way, and print what these take."""
    jobs = in_ways(args, name, mesh, device)
    picture = jobs[PLAIN].run()  # on every rank, as the encoders take it
    runs = {
        "decode": {way: lambda job=job: job.pipeline.vae.decode(job.code).sample for way, job in jobs.items()},
        "encode": {way: lambda job=job: code_of(job.pipeline.vae, 2 * picture - 1) for way, job in jobs.items()},
    }
    differences = []
    for what, ways in runs.items():
        found = measured(args, ways, device, f"{what} {name}")
        everyone = running.of_all_ranks({way: each.memory for way, each in found.items()})
        if args.rank == 0:
            expected = found[PLAIN].result
            print(f"{what} {name}, {' x '.join(map(str, expected.shape))}")
            for way, each in found.items():
                print(line(way, each, max(memory[way] for memory in everyone), difference(each.result, expected)))
            if mesh is not None:
                differences.append(difference(found[OURS].result, expected))
    several = picture if mesh is None else jobs[OURS].run()
    return Outcome([*differences, difference(several, picture)], picture, several)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest one, relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def line(way: str, each: Measured, memory: float, error: float) -> str:
    text = f"  {way:12} {each.seconds:7.3f} s  {memory * 1024:6.0f} MiB"
    if way == PLAIN:
        return text
    return f"{text}  {each.messages:4} messages, {each.sent / 2**20:6.2f} MiB sent  difference {error:.0e}"


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    add("--size", type=int, help="pixels of height and width, a multiple of 32; default: 192, 64 with --check")
    add_options(parser, DIMS)
    add("--rounds", type=int, default=3, help="how often each way is timed")
    add("--dtype", choices=running.TOLERANCE, help="default: float32, float64 with --check")
    add("--device", help="cpu, cuda, ...; default: the accelerator if there is one, else cpu")
    add("--output", default="vae.png", help="where the picture goes")
    add("--check", action="store_true", help="no picture; fail if a result differs from one process's")
    args = parser.parse_args(given)
    args.size = args.size if args.size is not None else 64 if args.check else 192
    args.dtype = args.dtype or ("float64" if args.check else "float32")
    running.add_world(args)
    try:
        if args.size < 32 or args.size % 32 or args.rounds < 1:
            raise ValueError("--size must be a multiple of 32 and --rounds positive")
        if args.check and not args.sharded:
            raise ValueError("--check compares with several ranks: start it with torchrun")
        args.layout = layout_of(args)
    except ValueError as error:
        running.refuse(args, error)
    return args


def main() -> None:
    args = parse_arguments()
    diffusers.logging.set_verbosity_error()  # it warns of float64
    device, mesh = running.start(args), None
    if args.sharded:
        mesh = dist.init_device_mesh(device.type, args.layout.mesh, mesh_dim_names=DIMS[: len(args.layout.mesh)])
    outcomes = {name: perform(args, name, mesh, device) for name in args.jobs}
    passed = True
    if args.rank == 0 and args.check:
        differences = [each for outcome in outcomes.values() for each in outcome.differences]
        passed = running.verdict("difference from one process", differences, running.TOLERANCE[args.dtype], args.dtype)
    elif args.rank == 0 and mesh is not None:
        import canvas

        canvas.draw(args.output, {name: (each.expected, each.found) for name, each in outcomes.items()}, args.layout)
        print(f"see {args.output}")
    running.leave(args, passed)


if __name__ == "__main__":
    main()
