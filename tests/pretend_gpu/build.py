"""Builds backend.cpp with g++ on first use; the result is kept by a hash of everything that it depends on."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from tests.paths import ROOT

SOURCE = Path(__file__).with_name("backend.cpp")
FOLDER = ROOT / "outputs" / "pretend_gpu"
NAME = "_pretend_cuda"  # of the extension module
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-w", "-DUSE_C10D", "-DUSE_DISTRIBUTED")


def unavailable() -> str:
    """Why the pretend GPU can't be built here; empty if it can. It uses interfaces of torch that
    are stable but not public, hence the pinned version only."""
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None, "constraints.txt pins torch"
    version, _, build = metadata.version("torch").partition("+")
    if version != pinned[1]:
        return f"written for torch {pinned[1]}, not {version}"
    if build != "cpu" and (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "needs a CPU build of torch"
    if shutil.which("g++") is None:
        return "needs g++"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"needs the headers of Python {sysconfig.get_python_version()}"
    return ""


def library() -> Path:
    """The extension module; built now, in half a minute, if it is not there yet."""
    hashed = hashlib.sha256(SOURCE.read_bytes())
    hashed.update(f"{metadata.version('torch')} {sys.version} {FLAGS}".encode())
    path = FOLDER / hashed.hexdigest()[:16] / f"{NAME}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of several test processes builds
        if not path.exists():
            half_written = path.with_suffix(".tmp")
            _compile(half_written)
            half_written.rename(path)
    return path


def _torch() -> Path:
    """torch's folder, without importing it."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _compile(output: Path) -> None:
    torch = _torch()
    includes = (torch / "include", torch / "include/torch/csrc/api/include")
    command = ["g++", *FLAGS, str(SOURCE), "-o", str(output), f"-DTORCH_EXTENSION_NAME={NAME}"]
    for folder in (*map(str, includes), sysconfig.get_path("include")):
        command += ["-isystem", folder]
    command += [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"]
    command += [f"-l{name}" for name in ("torch", "torch_cpu", "torch_python", "c10")]
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"g++ cannot build {SOURCE.name}:\n{done.stderr[-4000:]}")
