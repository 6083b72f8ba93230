"""Pipelines of diffusers, unmodified, whose autoencoder runs on several ranks: an image and a video.

python decode.py                                             one process
torchrun --nproc-per-node 2 decode.py                        bands
torchrun --nproc-per-node 4 decode.py --mesh 2x2 --uneven    bands x stripes of different sizes
torchrun --nproc-per-node 2 decode.py --check                in float64, compared with one process
torchrun --nproc-per-node 2 decode.py --jobs video           the video only

Nothing is downloaded: the image's autoencoder learns one photograph, on the ranks, and all other weights are random.
Seconds, memory and bytes of decoding and encoding are those of this package, of one process, and of DistVAE where it is
installed and has a form of the autoencoder.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch
import torch.distributed as dist
from autoencoders import code_of
from pipelines import JOBS, Job, learn, photograph
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
    """Of a job on several ranks, compared with one process: the relative differences of all that it gives, and for the
    picture what one process and the ranks decode: the code of what was given, or if that is None what the pipeline has
    made."""

    differences: list[float]
    given: Tensor | None
    expected: Tensor
    found: Tensor


def layout_of(args: argparse.Namespace) -> Layout:
    sizes = args.sizes.split(",") if args.sizes else ()
    return make_layout(dict.fromkeys(DIMS, args.size // 8), args.world_size, args.mesh, sizes, args.uneven)


def in_ways(
    args: argparse.Namespace, name: str, mesh: dist.DeviceMesh | None, device: torch.device, given: Tensor | None
) -> dict[str, Job]:
    """The same job once in each way: in one process, and over the ranks, which learn what is given."""
    dtype = getattr(torch, args.dtype)
    jobs = {PLAIN: JOBS[name](args.size, dtype, device)}
    if mesh is not None:
        jobs[OURS] = JOBS[name](args.size, dtype, device)
        image_sizes = {m: tuple(n * jobs[OURS].factor for n in sizes) for m, sizes in args.layout.shard_sizes.items()}
        by_shardtensor(jobs[OURS].pipeline.vae, mesh, jobs[OURS].dim, args.layout.shard_sizes, image_sizes)
    if given is not None:
        learned = jobs[OURS if mesh is not None else PLAIN].pipeline.vae
        learn(learned, given, args.steps, quiet=args.rank != 0)
        jobs[PLAIN].pipeline.vae.load_state_dict(learned.state_dict())
    if mesh is not None and mesh.ndim == 1 and has_distvae(jobs[PLAIN].pipeline.vae):
        jobs[DISTVAE] = JOBS[name](args.size, dtype, device)
        jobs[DISTVAE].pipeline.vae.load_state_dict(jobs[PLAIN].pipeline.vae.state_dict())
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
    given = None
    if name == "image" and args.steps:
        given = photograph(args.size, getattr(torch, args.dtype), device)
    jobs = in_ways(args, name, mesh, device, given)
    made = jobs[PLAIN].run()  # on every rank, as the encoders take it
    picture, code = made, jobs[PLAIN].code
    if given is not None:
        picture, code = given, code_of(jobs[PLAIN].pipeline.vae, 2 * given - 1)
    runs = {
        "encode": {way: lambda job=job: code_of(job.pipeline.vae, 2 * picture - 1) for way, job in jobs.items()},
        "decode": {way: lambda job=job: job.pipeline.vae.decode(code).sample for way, job in jobs.items()},
    }
    differences = []
    for what, ways in runs.items():
        found = measured(args, ways, device, f"{what} {name}")
        everyone = running.of_all_ranks({way: each.memory for way, each in found.items()})
        if args.rank == 0:
            expected = found[PLAIN].result
            print(f"{what} {name}, {' x '.join(map(str, expected.shape))}")
            for way, each in found.items():
                memory = [rank[way] for rank in everyone[: 1 if way == PLAIN else None]]
                print(line(way, each, memory, difference(each.result, expected)))
            if mesh is not None:
                differences.append(difference(found[OURS].result, expected))
    several = made if mesh is None else jobs[OURS].run()
    differences.append(difference(several, made))
    if given is not None and args.rank == 0 and mesh is not None:
        made, several = ((1 + found[way].result) / 2 for way in (PLAIN, OURS))
    return Outcome(differences, given, made, several)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest one, relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def line(way: str, each: Measured, memory: Sequence[float], error: float) -> str:
    """What a way took; memory is by rank."""
    text = f"  {way:12} {each.seconds:7.3f} s  {', '.join(f'{gib * 1024:.0f}' for gib in memory)} MiB"
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
    add("--steps", type=int, help="of learning the photograph; default: 150, 0 with --check")
    add("--rounds", type=int, default=3, help="how often each way is timed")
    add("--dtype", choices=running.TOLERANCE, help="default: float32, float64 with --check")
    add("--device", help="cpu, cuda, ...; default: the accelerator if there is one, else cpu")
    add("--output", default="vae.png", help="where the picture goes")
    add("--check", action="store_true", help="no picture; fail if a result differs from one process's")
    args = parser.parse_args(given)
    args.size = args.size if args.size is not None else 64 if args.check else 192
    args.steps = args.steps if args.steps is not None else 0 if args.check else 150
    args.dtype = args.dtype or ("float64" if args.check else "float32")
    running.add_world(args)
    try:
        if args.size < 32 or args.size % 32 or args.rounds < 1 or args.steps < 0:
            raise ValueError("--size must be a multiple of 32, --rounds positive, and --steps not negative")
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

        pictures = {name: (each.given, each.expected, each.found) for name, each in outcomes.items()}
        canvas.draw(args.output, pictures, args.layout)
        print(f"see {args.output}")
    running.leave(args, passed)


if __name__ == "__main__":
    main()
