"""Every `AutoencoderKL*` of diffusers, encoding and decoding on several ranks: right, and what is sent.

torchrun --nproc-per-node 2 table.py [--only Wan]

A small network of each class runs in one process, then with `DomainParallel` on its encoder and decoder, in float64 and
with the same input. Prints a table in Markdown: the largest difference relative to the range of the values, and the
messages and bytes that rank 0 sends, the gathers of code and result included.
"""

import argparse
import sys
from pathlib import Path

import diffusers
import torch
import torch.distributed as dist
from autoencoders import AUTOENCODERS, Autoencoder
from tqdm import tqdm
from ways import by_shardtensor, has_distvae

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
import running

from shardtensor.testing import Communication, count_communication

HEADER = "| class | input | difference | messages | KiB | DistVAE has it |\n|---|---|---|---|---|---|"
SAID = {True: "yes", False: "no", None: "not installed"}


def all_classes() -> list[str]:
    return sorted(name for name in dir(diffusers) if name.startswith("AutoencoderKL"))


@torch.no_grad()
def compared(kind: Autoencoder, mesh: dist.DeviceMesh) -> tuple[float, Communication, bool | None]:
    """The relative difference, what was communicated, and whether DistVAE has a form of the network."""
    torch.manual_seed(0)
    network = kind.make(diffusers).double().eval()
    for parameter in network.parameters():  # some are zero at the start, and would hide what comes before them
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(kind.shape, dtype=torch.float64)
    expected = kind.there_and_back(network, x)
    adapted = has_distvae(network)
    by_shardtensor(network, mesh, kind.dim)
    with count_communication() as counted:
        found = kind.there_and_back(network, x)
    # Of a result that is the same everywhere this is nan, which is not right.
    return float((found - expected).abs().max() / (expected.max() - expected.min())), counted, adapted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="classes whose names contain this")
    args = parser.parse_args()
    running.add_world(args)
    if not args.sharded:
        running.refuse(args, ValueError("the table is about several ranks: start it with torchrun"))
    args.device = "cpu"  # float64
    running.start(args)
    mesh = dist.init_device_mesh("cpu", (args.world_size,))
    rows, passed = [HEADER], True
    chosen = [name for name in all_classes() if args.only in name]
    for name in tqdm(chosen, desc="autoencoders", unit="class", disable=args.rank != 0):
        if name not in AUTOENCODERS:
            rows.append(f"| `{name}` | | no small one of it is known here | | | |")
            continue
        kind = AUTOENCODERS[name]
        difference, counted, adapted = compared(kind, mesh)
        passed = passed and difference <= running.TOLERANCE["float64"]
        sent = (counted.bytes_sent + counted.collective_bytes) / 1024
        shape = " x ".join(map(str, kind.shape))
        numbers = f"{difference:.0e} | {counted.messages} | {sent:.1f}"
        rows.append(f"| `{name}` | {shape} | {numbers} | {SAID[adapted]} |")
    passed = all(running.of_all_ranks(passed))
    if args.rank == 0:
        compared_ones = sum(name in AUTOENCODERS for name in chosen)
        print("\n".join(rows), f"\n\n{'PASS' if passed else 'FAIL'}: {compared_ones} of {len(chosen)} classes compared")
    running.leave(args, passed)


if __name__ == "__main__":
    main()
