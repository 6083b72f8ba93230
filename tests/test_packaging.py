"""What an installation promises: few hard dependencies, types, and an import of all operators and nothing else."""

from __future__ import annotations

import os
import pydoc
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import Page, shows

import shardtensor


def requirements() -> list[str]:
    try:
        return metadata.requires("shardtensor") or []
    except metadata.PackageNotFoundError:
        pytest.skip("shardtensor is used from its source tree, not installed")


def test_torch_and_wrapt_are_the_only_hard_dependencies():
    hard = {re.split(r"[<>=!~ ;\[]", line)[0] for line in requirements() if "extra ==" not in line}
    assert hard == {"torch", "wrapt"}


def test_natten_is_an_extra_with_an_exact_version():
    assert [line for line in requirements() if line.startswith("natten")] == ['natten==0.21.7; extra == "natten"']


def test_types_are_shipped():
    package = find_spec("shardtensor")
    assert package is not None
    assert any((Path(folder) / "py.typed").is_file() for folder in package.submodule_search_locations or [])


def test_dir_shows_the_public_names():
    assert set(shardtensor.__all__) < set(dir(shardtensor)) and "install" not in dir(shardtensor)


# -- what is built ----------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.{}(sys.argv[1]))"


def run_python(*arguments, cwd, python=sys.executable, timeout=180, **variables):
    """A fresh interpreter, which finds nothing by this one's variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
    done = subprocess.run(
        [python, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution of this tree, unpacked, and the wheel that is built from it."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "_build", "results", "*.pt")
    shutil.copytree(ROOT, source, ignore=ignored)
    run_python("-c", BUILD.format("build_sdist"), str(folder), cwd=source)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder)
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    run_python("-c", BUILD.format("build_wheel"), str(folder), cwd=unpacked)
    (wheel,) = folder.glob("*.whl")
    return unpacked, wheel


def test_the_version_is_in_one_place(built):
    _, wheel = built
    version = shardtensor.__version__
    assert wheel.name == f"shardtensor-{version}-py3-none-any.whl"
    assert re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    others = [ROOT / name for name in ("pyproject.toml", "CITATION.cff", "docs/conf.py")]
    assert not [path.name for path in others if version in path.read_text()]


def test_the_source_distribution_has_what_tests_and_site_need(built):
    unpacked, _ = built
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "Makefile", "constraints.txt", "docs/conf.py"):
        assert (unpacked / name).is_file(), name
    for folder in ("shardtensor", "tests", "examples", "benchmarks", "docs"):
        kept = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py") if "_build" not in path.parts}
        assert kept == {str(path.relative_to(unpacked)) for path in (unpacked / folder).rglob("*.py")}


def test_the_wheel_has_the_package_and_nothing_else(built):
    _, wheel = built
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"shardtensor", f"{wheel.name.split('-py3')[0]}.dist-info"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "shardtensor").rglob("*.py")}
    others = {"shardtensor/py.typed", "shardtensor/observe/explain/page.html"}
    assert modules | others == {name for name in names if name.startswith("shardtensor/")}


def test_installing_the_wheel_makes_the_command(built):
    _, wheel = built
    folder = wheel.name.split("-py3")[0] + ".dist-info"
    declared = zipfile.ZipFile(wheel).read(f"{folder}/entry_points.txt").decode()
    assert "shardtensor = shardtensor.__main__:main" in declared
    metadata = zipfile.ZipFile(wheel).read(f"{folder}/METADATA").decode()
    python = re.search(r"^Requires-Python: >=(\S+)$", metadata, flags=re.M)
    assert python and f"Classifier: Programming Language :: Python :: {python[1]}\n" in metadata
    assert "torch<2.16,>=2.11" in metadata and "\nAuthor: " in metadata


PROGRAM = """
import sys
sys.modules.update(dict.fromkeys({absent}))  # what is None there cannot be imported
import torch  # which warns by itself where there is no NumPy
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import warnings
warnings.simplefilter("error")
import shardtensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = shardtensor.scatter_tensor(torch.arange(30.0).view(1, 2, 3, 5), init_device_mesh("cpu", (1,)), (Shard(2),))
x.requires_grad_()
y = torch.nn.Conv2d(2, 2, 3, padding=1)(x)
y.square().mean().backward()
assert x.grad.shape == x.shape and y.shard_sizes == {{0: (3,)}}
repr(y), y.mean().item()
import shardtensor.checkpoint, shardtensor.data, shardtensor.parallel
assert not any(map(sys.modules.get, {absent})) and shardtensor.dispatch.patches.installed()
print(shardtensor.__file__)
"""


def test_the_wheel_runs_without_the_source_tree_and_without_extras(built, tmp_path):
    _, wheel = built
    absent = {"numpy", "natten", "matplotlib", "lightning"}
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    done = run_python("-c", PROGRAM.format(absent=absent), cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "site")
    assert "shardtensor" not in done.stderr


@pytest.mark.slow
def test_a_clean_environment_installs_the_wheel_and_runs_the_quickstart(built, tmp_path):
    """As a user does: pip takes what the wheel asks for from an index; the repository is nowhere on the path."""
    _, wheel = built
    run_python("-m", "venv", str(tmp_path / "env"), cwd=tmp_path)
    python, empty = tmp_path / "env/bin/python", tmp_path / "empty"
    empty.mkdir()
    install = ("-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"))
    run_python(*install, str(wheel), cwd=empty, python=python, timeout=1200)
    page = Page("docs/quickstart.md")
    program, shown = ("".join(b.text for b in page.blocks if b.language == kind) for kind in ("python", "text"))
    (empty / "quickstart.py").write_text(program)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "quickstart.py")
    assert shows(shown, run_python(*torchrun, cwd=empty, python=python, OMP_NUM_THREADS="1").stdout)
    (empty / "models.py").write_text("import torch\n\nnet = torch.nn.Conv2d(3, 8, 3, padding=1)\n")
    preview = ("explain", "models:net", "--input", "1x3x90x180", "--mesh", "3", "--shard", "2", "--backward")
    shown = run_python("-m", "shardtensor", *preview, cwd=empty, python=python).stdout
    assert "input (1, 3, 90, 180) float32, dim 2 as [30, 30, 30]" in shown


def test_import_registers_all_operators_and_leaves_alone_what_takes_long():
    """Next to what torch.distributed.tensor imports itself."""
    code = "import sys, torch.distributed.tensor as _; before = set(sys.modules); import shardtensor\n"
    code += "print(*(getattr(f, '__name__', '') for f in shardtensor.extend.registered()))\n"
    code += "print(*(set(sys.modules) - before))"
    names, shown = map(str.split, run_python("-c", code, cwd=ROOT, PYTHONPATH=str(ROOT)).stdout.splitlines())
    assert {"conv2d", "linear", "layer_norm", "group_norm", "cross_entropy", "interpolate", "pad"} <= set(names)
    assert "scipy" not in shown and not [name for name in shown if name.startswith("shardtensor.testing")]
    others = {name for name in shown if not name.startswith(("shardtensor", "wrapt"))}
    # Modules of the standard library and of torch that are small; torch._dynamo alone takes half a second.
    slow = "torch._dynamo", "torch._inductor", "torch.utils.flop_counter", "triton", "numpy", "sympy"
    assert not {name for name in others if name.startswith(slow)}
    assert len(others) < 60, sorted(others)


def test_help_shows_our_methods_first():
    text = pydoc.plain(pydoc.render_doc(shardtensor.ShardTensor))
    ours = ["from_local", "from_dtensor", "to_local", "full_tensor", "redistribute", "shard_sizes"]
    before = text.partition("Method resolution order:")[0]
    assert all(name in before for name in ours)
    inherited = text.index("inherited from torch.distributed.tensor.DTensor")
    assert all(0 < text.index(f" |  {name}", len(before)) < inherited for name in ours)


@pytest.mark.parametrize("command", [["-m", "shardtensor"], ["shardtensor"]])
def test_the_command_line_tells_its_arguments_without_torch(command, tmp_path):
    """Torch takes seconds to import."""
    (tmp_path / "shardtensor").write_text("import sys, shardtensor.__main__ as m; sys.exit(m.main())")
    (tmp_path / "torch.py").write_text("raise ImportError")
    where = {"cwd": tmp_path, "PYTHONPATH": str(ROOT)}
    assert "--shard SHARD" in run_python(*command, "explain", "--help", **where).stdout
    (tmp_path / "program.py").write_text("import shardtensor")
    with pytest.raises(AssertionError, match="ImportError"):
        run_python("program.py", "shardtensor", "--help", **where)
