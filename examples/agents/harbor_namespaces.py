"""An environment of Harbor without containers, for tasks that need no more than this machine has:

    python harbor_worker.py work --environment harbor_namespaces:NamespaceEnvironment ...

Every command runs in user, mount and process namespaces of its own (`unshare` and `setpriv` of
util-linux). It sees this machine's /usr and /etc, read-only, and an own tree for everything else,
which the next command finds as it was. An image is not built: a Dockerfile that does more than name
an image and a working directory is refused. Files come and go as archives that are packed and
unpacked inside, so that no link of the policy's leads out.

This keeps episodes apart. Against a policy that looks for a way out, take containers; and do not
run it as root, who can read all of /etc.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shlex
import signal
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import NetworkMode

_SHARED = ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64", "/lib32")
_OWN = ("app", "tests", "logs/agent", "logs/verifier", "logs/artifacts", "solution", "root", "tmp")
_FILES_S = 600
MAX_BYTES = 64 * 2**20  # of a command's output, which comes from the policy; the rest is dropped
_ENTER = """
set -e
mount --make-rprivate /
mount --bind "$ROOT" "$ROOT"
cd "$ROOT"
for shared in $SHARED; do
  mount --rbind "$shared" ".$shared"
  mount -o remount,bind,ro ".$shared"
done
mount --rbind /dev dev
mount -t proc proc proc
mkdir -p .old
pivot_root . .old
cd /
umount -l /.old
cd "$1"
unset ROOT SHARED
exec setpriv --inh-caps=-all --bounding-set=-all --no-new-privs bash -c "$2"
"""


async def _exchange(process: asyncio.subprocess.Process, given: bytes) -> tuple[bytes, bytes]:
    """Output and errors of a process, at most MAX_BYTES of each."""

    async def feed(stream: asyncio.StreamWriter) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stream.write(given)
            await stream.drain()
        stream.close()

    async def read(stream: asyncio.StreamReader) -> bytes:
        kept = bytearray()
        while part := await stream.read(2**16):
            kept += part[: MAX_BYTES - len(kept)]
        return bytes(kept)

    assert process.stdin and process.stdout and process.stderr
    _, out, err = await asyncio.gather(
        feed(process.stdin), read(process.stdout), read(process.stderr)
    )
    await process.wait()
    return out, err


class NamespaceEnvironment(BaseEnvironment):
    """See above. Not for tasks with compose files, GPUs, or a list of allowed hosts."""

    @staticmethod
    def type() -> str:
        return "namespaces"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        """Raises ValueError for a task that needs an image."""
        self._workdir = "/app"
        file = self.environment_dir / "Dockerfile"
        others = sorted(p.name for p in self.environment_dir.iterdir() if p.name != file.name)
        if others or self.task_env_config.docker_image:
            found = ", ".join(others) or f"the image {self.task_env_config.docker_image}"
            raise ValueError(f"{self.environment_dir}: {found}: needs containers")
        for line in file.read_text(encoding="utf-8").split("\n"):
            word, _, rest = line.strip().partition(" ")
            if word.upper() == "WORKDIR":
                self._workdir = str(PurePosixPath("/", rest.strip()))
            elif word and not word.startswith("#") and word.upper() != "FROM":
                raise ValueError(
                    f"{file}: {line.strip()}: no image is built here, and programs are those of "
                    "this machine; use an environment with containers"
                )

    async def start(self, force_build: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="harbor_root_")
        root = Path(self._folder.name)
        self._shared = []
        for name in _SHARED:
            if os.path.islink(name):  # /bin is usr/bin on most systems
                (root / name[1:]).symlink_to(os.readlink(name))
            elif os.path.isdir(name):
                (root / name[1:]).mkdir()
                self._shared.append(name)
        for name in (*_OWN, "dev", "proc", self._workdir[1:]):
            (root / name).mkdir(parents=True, exist_ok=True)
        done = await self.exec("true")
        if done.return_code:
            raise RuntimeError(f"no namespaces here: {done.stderr}")

    async def stop(self, delete: bool) -> None:
        self._folder.cleanup()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """See `BaseEnvironment`; there is one user. Raises TimeoutError."""
        code, out, err = await self._run(command, b"", cwd, env or {}, timeout_sec)
        texts = {"stdout": out.decode(errors="replace"), "stderr": err.decode(errors="replace")}
        return ExecResult(return_code=code, **texts)

    async def _run(
        self,
        command: str,
        given: bytes,
        cwd: str | None,
        env: dict[str, str],
        timeout_sec: int | None,
    ) -> tuple[int, bytes, bytes]:
        spaces = ["--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child"]
        if self._network_policy.network_mode == NetworkMode.NO_NETWORK:
            spaces.append("--net")
        process = await asyncio.create_subprocess_exec(
            *("unshare", *spaces, "bash", "-c", _ENTER, "enter", cwd or self._workdir, command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={
                **{"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root"},
                **{**self._persistent_env, **env},
                **{"ROOT": self._folder.name, "SHARED": " ".join(self._shared)},
            },
            start_new_session=True,
        )
        try:
            out, err = await asyncio.wait_for(_exchange(process, given), timeout_sec)
        finally:
            with contextlib.suppress(
                ProcessLookupError
            ):  # what is left of the command ends with it
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode is not None
        return process.returncode, out, err

    async def _files(self, command: str, given: bytes = b"") -> bytes:
        """The output of a command that packs or unpacks. Raises RuntimeError."""
        code, out, err = await self._run(command, given, "/", {}, _FILES_S)
        if code:
            raise RuntimeError(f"{command}: {err.decode(errors='replace').strip()}")
        if len(out) == MAX_BYTES:
            raise RuntimeError(f"{command}: more than {MAX_BYTES} bytes")
        return out

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = shlex.quote(target_path)
        content = Path(source_path).read_bytes()
        await self._files(f'mkdir -p "$(dirname {target})" && cat > {target}', content)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(source_dir, arcname=".")
        target = shlex.quote(target_dir)
        unpack = f"mkdir -p {target} && tar -C {target} --no-same-owner -xf -"
        await self._files(unpack, packed.getvalue())

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        content = await self._files(f"cat {shlex.quote(source_path)}")
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        Path(target_path).write_bytes(content)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        packed = await self._files(f"tar -C {shlex.quote(source_dir)} -cf - .")
        Path(target_dir).mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(target_dir, filter=transfer_tar_filter)
