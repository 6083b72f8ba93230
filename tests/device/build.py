"""Compile the emulated device; ``python tests/device/build.py`` prints where it is."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("emulated.cpp")
_OPTIONS = (
    "-O1",
    "-std=c++20",
    "-fPIC",
    "-shared",
    "-w",
    "-DTORCH_EXTENSION_NAME=emulated_device",
    "-DUSE_DISTRIBUTED",
    "-DUSE_C10D_GLOO",
)


_compiling: list[subprocess.Popen] = []


class NotAvailable(RuntimeError):
    """There is no C++ compiler on this machine, or torch has kernels of its own for CUDA."""


def begin() -> None:
    """Let another process compile; :func:`library` waits for it, and says what is wrong if it has failed."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    _compiling.append(subprocess.Popen([sys.executable, __file__], **quiet))


def library() -> Path:
    """The compiled extension, for the installed torch; compiled by the first call, which takes half a minute.

    torch itself is not imported: the extension has to be loaded before it.

    Raises:
        NotAvailable: no C++ compiler, named by ``CXX`` or found as ``c++``; or a torch that is built for CUDA.
        RuntimeError: the compiler failed; with what it said.
    """
    while _compiling:
        _compiling.pop().wait()
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise NotAvailable("the emulated CUDA device needs a C++ compiler (set CXX, or install g++)")
    torch = Path(find_spec("torch").origin).parent
    if any((torch / "lib").glob("*torch_cuda*")):
        raise NotAvailable("the emulated CUDA device needs a torch for CPUs: this one has kernels of its own for CUDA")
    version = importlib.metadata.version("torch")
    key = hashlib.sha256("\0".join([SOURCE.read_text(), version, compiler, *_OPTIONS]).encode()).hexdigest()[:16]
    target = SOURCE.parent / "build" / f"emulated-{key}.so"
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        folders = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
        libraries = ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
        command = [compiler, *_OPTIONS, *(f"-I{folder}" for folder in folders), str(SOURCE), "-o", str(unfinished)]
        done = subprocess.run([*command, f"-L{torch / 'lib'}", *libraries], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{compiler} could not compile {SOURCE}:\n{done.stderr}")
        unfinished.replace(target)
    return target


if __name__ == "__main__":
    print(library())
