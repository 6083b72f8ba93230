"""How many networks, losses and tools of each package the tests here run unmodified, and compare with one process.

    cd tests && python -m networks.count        writes benchmarks/results/networks.json

`make networks` does this when all of them have passed. Counted are the tests whose names end in ``_are_exact``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "networks.json"
# The package of a module's tests, where its name is not that of the module and does not begin each test's name.
PACKAGES = {
    "adapters": "peft",
    "anemoi": "anemoi-models",
    "autoencoders": "diffusers",
    "bounding": "anemoi-models",
    "deepinv": "deepinv",
    "denoising_diffusion": "denoising-diffusion-pytorch",
    "diffusion_schedulers": "diffusers",
    "explanations": "captum",
    "gaussian_processes": "gpytorch",
    "monai": "MONAI",
    "monai_tools": "MONAI",
    "neuraloperator": "neuraloperator",
    "nnunet": "nnU-Net's networks",
    "point_clouds": "torch_geometric",
    "quantizers": "vector-quantize-pytorch",
    "restoration": "spandrel",
    "segmentation_models": "segmentation_models.pytorch",
    "torch_functions": "torch",
    "torch_harmonics": "torch-harmonics",
    "vit_pytorch": "vit-pytorch",
    "x_transformers": "x-transformers",
}
SAME = {
    *("diffusers", "e3nn", "kornia", "lightly", "timm", "torch_geometric", "torchmetrics", "torchvision"),
    "transformers",
}
OURS = {"example_jobs"}  # programs of this repository
TEST = re.compile(r"(?:tests/)?networks/test_(\w+)\.py::\w+_are_exact\[(.*)\]")


def counted(tests: Iterable[str]) -> Counter[str]:
    """The number of tests by package, of lines such as ``networks/test_timm.py::test_networks_are_exact[vgg]``."""
    found: Counter[str] = Counter()
    for test in tests:
        match = TEST.fullmatch(test.strip())
        if match and match[1] not in OURS:
            of_name = match[2].partition(",")[0].replace("_", "-")
            found[match[1] if match[1] in SAME else PACKAGES.get(match[1], of_name)] += 1
    return found


def main() -> None:
    listed = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "--part", "all", "tests/networks"]
    done = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True, timeout=1200)
    counts = dict(counted(done.stdout.splitlines()).most_common())
    day = datetime.now(timezone.utc).date().isoformat()
    RESULTS.write_text(json.dumps({"date": day, "networks": counts}, indent=1) + "\n")
    print(f"{sum(counts.values())} of {len(counts)} packages")


if __name__ == "__main__":
    main()
