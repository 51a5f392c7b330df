"""A SLURM of one host: munged, slurmctld and a slurmd for each of two nodes, in a temporary folder,
without systemd.

Debian: apt-get install slurm-wlm munge. Everything started here is ended by its pid file, and takes
what it runs with it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from tests.e2e.programs import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
SEARCH = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/sbin"
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# the second is also how long a requeued job waits, which is two minutes otherwise
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=30
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why no cluster can be started here."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    if missing:
        return f"SLURM is not installed: no {', '.join(missing)} (Debian: apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "starting slurmd and munged needs root"
    if socket.gethostname() == "localhost":
        return "the two nodes need two names, and this host is called localhost"
    return None


class Cluster:
    """A cluster of two nodes: this host's name, and localhost. Its folder has logs and states."""

    def __enter__(self) -> Cluster:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self._run("scancel", "--user", "root", "--full", "--signal=KILL")
        for file in [*sorted(self.folder.glob("slurm*.pid")), self.folder / "munge" / "pid"]:
            end(file)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        self.folder.chmod(0o755)
        munge = self.folder / "munge"
        munge.mkdir()
        (munge / "key").write_bytes(secrets.token_bytes(1024))
        (munge / "key").chmod(0o400)
        for path in (munge, munge / "key"):
            shutil.chown(path, "munge", "munge")
        options = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        self._run(
            "runuser",
            "-u",
            "munge",
            "--",
            "munged",
            *(f"--{name}={munge / file}" for name, file in options.items()),
        )
        (self.folder / "state").mkdir()
        host = socket.gethostname()
        configuration = CONFIGURATION.format(
            host=host, folder=self.folder, ports=[free_port() for _ in range(3)]
        )
        (self.folder / "slurm.conf").write_text(configuration)
        for node in (host, "localhost"):
            (self.folder / f"spool-{node}").mkdir()
        self._run("slurmctld", "-f", str(self.folder / "slurm.conf"))
        for node in (host, "localhost"):
            self._run("slurmd", "-f", str(self.folder / "slurm.conf"), "-N", node)
        self._wait_for(
            lambda: self._run("sinfo", "--noheader", "--states=idle", "--format=%D") == "2",
            60,
            "the nodes are not idle",
        )

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": SEARCH}

    def submit(
        self,
        script: Path,
        *flags: str,
        options: tuple[str, ...] = (),
        variables: dict[str, str] | None = None,
    ) -> int:
        """The number of the new job.

        Args:
            options: Of sbatch.
            flags: Of train.py.
        """
        out = self._run(
            "sbatch", "--parsable", *options, str(script), *flags, environment=variables or {}
        )
        return int(out)

    def state(self, job: int) -> dict[str, str]:
        """JobState, Restarts, ExitCode and so on."""
        words = self._run("scontrol", "--oneliner", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ended(self, job: int, limit_s: float, log: Path) -> dict[str, str]:
        """The state of a job that is over, and none of whose processes is left."""
        final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self._wait_for(
            lambda: self.state(job)["JobState"] in final, limit_s, f"job {job} goes on", log
        )
        self._wait_for(lambda: not self.processes(job), 15, f"job {job} has left processes", log)
        return self.state(job)

    def signal(self, job: int, *how: str) -> None:
        self._run("scancel", *how, str(job))

    def requeue(self, job: int) -> None:
        self._run("scontrol", "requeue", str(job))

    def wait_for_line(self, log: Path, words: str, limit_s: float, *, times: int = 1) -> None:
        self._wait_for(
            lambda: log.exists() and log.read_text().count(words) >= times,
            limit_s,
            f"no line with {words!r}",
            log,
        )

    def processes(self, job: int) -> list[psutil.Process]:
        """Of this job, whoever their parent is now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                actual = variables.get("SLURM_CONF") == self.environment[
                    "SLURM_CONF"
                ] and variables.get("SLURM_JOB_ID") == str(job)
                if actual and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self, job: int) -> dict[int, psutil.Process]:
        """The training processes by rank."""
        return {
            int(p.environ()["RANK"]): p
            for p in self.processes(job)
            if "RANK" in p.environ() and "train.py" in p.cmdline()
        }

    def _run(self, program: str, *words: str, environment: dict[str, str] | None = None) -> str:
        command = [shutil.which(program, path=SEARCH) or program, *words]
        done = subprocess.run(
            command, env=self.environment | (environment or {}), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def _wait_for(
        self, condition: object, limit_s: float, words: str, log: Path | None = None
    ) -> None:
        assert callable(condition)
        deadline = time.monotonic() + limit_s
        while not condition():
            shown = [
                file
                for file in (log, self.folder / "slurmctld.log")
                if file is not None and file.exists()
            ]
            assert time.monotonic() < deadline, f"{words} after {limit_s} s\n" + "\n".join(
                file.read_text()[-4000:] for file in shown
            )
            time.sleep(0.2)


def end(pid_file: Path, grace_s: float = 10.0) -> None:
    """The process that wrote this file."""
    try:
        process = psutil.Process(int(pid_file.read_text()))
    except (OSError, ValueError, psutil.Error):
        return
    with contextlib.suppress(psutil.Error):
        process.terminate()
        deadline = time.monotonic() + grace_s
        while (
            process.status() != psutil.STATUS_ZOMBIE
        ):  # a container's first process may not collect them
            if time.monotonic() > deadline:
                process.kill()
                return
            time.sleep(0.05)
