"""The launch scripts for a GPU and for SLURM, as far as a machine with neither can tell: what they
call, and how they end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arguments.parse import parse_args
from tests.paths import ROOT
from tests.unit.command_lines import write_files

# In place of python: writes its arguments and some variables, then waits for SIGTERM if asked to
RECORDER = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, time
out = pathlib.Path(os.environ["RECORD"])
def stop(*_):
    out.with_suffix(".stopped").write_text("TERM")
    pathlib.Path(os.environ["SLIME_LIKE_STATUS_FILE"]).write_text(os.environ["RECORD_STATUS"])
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
record = {{"argv": sys.argv[1:], "folder": os.getcwd(), "pid": os.getpid()}}
out.with_suffix(".tmp").write_text(json.dumps(record))
out.with_suffix(".tmp").rename(out)
time.sleep(float(os.environ.get("RECORD_WAIT_S", "0")))
"""


def recorder(folder: Path) -> dict[str, str]:
    path = folder / "python"
    path.write_text(RECORDER)
    path.chmod(0o755)
    return {**os.environ, "PYTHON": str(path), "RECORD": str(folder / "record.json")}


def recorded(folder: Path) -> tuple[list[str], str]:
    record = json.loads((folder / "record.json").read_text())
    return record["argv"], record["folder"]


def test_the_command_line_for_one_gpu_is_right(tmp_path: Path) -> None:
    files = write_files(tmp_path, max_position_embeddings=40960)
    Path(files["prompts"]).write_text('{"question": "1+1=", "answer": "#### 2"}\n')
    environment = recorder(tmp_path) | {
        "MODEL": files["hf"],
        "TRAIN": files["prompts"],
        "TEST": files["prompts"],
    }
    script = ["bash", str(ROOT / "scripts/run_one_gpu.sh"), "--num-rollout", "30"]
    subprocess.run(script, env=environment, check=True, timeout=200)
    argv, folder = recorded(tmp_path)
    assert argv[0] == "train.py" and Path(folder) == ROOT
    config = parse_args(argv[1:], 1)
    assert config.rollout.num_rollout == 30, "flags of the caller come last"
    assert (
        config.algorithm.policy_loss_type == "sapo"
        and config.reward.rm_type == "gsm8k"
        and config.megatron.transformer.bf16
    )
    assert config.warnings == (), "--save and --load of a new folder is how a run is started"


def test_a_missing_setting_for_one_gpu_is_named() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MODEL", "TRAIN", "TEST")
    }
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/run_one_gpu.sh")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0 and "MODEL" in done.stderr


# What SLURM's commands do, here: srun runs this node's task, scontrol and scancel write down that
# they were called.
COMMANDS = {
    "srun": 'echo "$@" > "$RECORD.srun"; while [[ $1 != bash ]]; do shift; done; '
    'SLURM_STEP_ID=7 SLURM_STEP_NUM_NODES=2 exec "$@"',
    # a reader that leaves after the first line would end this by SIGPIPE
    "scontrol": 'if [[ $1 == requeue ]]; then echo "$2" > "$RECORD.requeued"; exit "$REQUEUE"; fi; '
    "echo alpha; sleep 0.1; echo beta",
    "scancel": 'echo "$@" > "$RECORD.scancel"; '
    'kill -TERM "$(grep -o "pid\\": [0-9]*" "$RECORD" | grep -o "[0-9]*$")"',
    # somebody listens on the first node when the second asks
    "timeout": "exit $((SLURM_NODEID == 0))",
    "sleep": "",  # the script that waits for SLURM to end it
}


def slurm(folder: Path, node: int) -> dict[str, str]:
    """The variables of a job of two nodes, and commands that run here what SLURM would run on that
    node."""
    commands = folder / "bin"
    commands.mkdir()
    for name, script in COMMANDS.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (commands / name).chmod(0o755)
    variables = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "alpha,beta",
        "SLURM_NNODES": "2",
    }
    variables |= {
        "SLURM_NODEID": str(node),
        "SLURM_GPUS_ON_NODE": "8",
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
    }
    return recorder(folder) | variables


def test_slurm_starts_torchrun_on_each_node(tmp_path: Path) -> None:
    script = [
        "bash",
        str(ROOT / "scripts/slurm/train.sbatch"),
        "--lr",
        "1e-6",
        "--rollout-stop",
        "a b",
    ]
    subprocess.run(
        script, env=slurm(tmp_path, node=1), check=True, timeout=60, stdout=subprocess.DEVNULL
    )
    argv, folder = recorded(tmp_path)
    assert argv[:2] == ["-m", "torch.distributed.run"] and Path(folder) == ROOT
    place = argv.index("train.py")
    options = dict(zip(argv[2:place:2], argv[3:place:2]))
    assert options == {
        "--nnodes": "2",
        "--node-rank": "1",
        "--nproc-per-node": "8",
        "--master-addr": "alpha",
        "--master-port": "23456",
    }
    assert argv[place + 1 :] == ["--lr", "1e-6", "--rollout-stop", "a b"], (
        "arguments arrive as they were given"
    )
    assert (
        (tmp_path / "record.json.srun")
        .read_text()
        .startswith("--nodes 2 --ntasks 2 --ntasks-per-node 1 --relative 0 --kill-on-bad-exit=1")
    )


@pytest.mark.parametrize(
    ("left", "requeue", "restarts", "status", "words"),
    [
        ("75", "0", "0", 75, "stopped by SIGTERM: requeued"),
        ("75", "1", "0", 75, "SLURM does not requeue this job: submit it again"),
        ("75", "0", "100", 75, "after 100 requeues"),
        ("1", "0", "0", 1, "the trainer ended with status 1"),
        ("143", "0", "0", 1, "the trainer ended with status 143"),
    ],
)
def test_slurm_passes_sigterm_on_and_requeues_what_can_continue(
    tmp_path: Path, left: str, requeue: str, restarts: str, status: int, words: str
) -> None:
    """left: the status that rank 0 leaves. 143: it had no --save."""
    environment = slurm(tmp_path, node=0) | {
        "RECORD_WAIT_S": "60",
        "RECORD_STATUS": left,
        "REQUEUE": requeue,
        "SLURM_RESTART_COUNT": restarts,
    }
    script = ["bash", str(ROOT / "scripts/slurm/train.sbatch")]
    with subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, text=True) as job:
        try:
            deadline = time.monotonic() + 200
            while not (tmp_path / "record.json").exists():
                assert job.poll() is None and time.monotonic() < deadline, "the job did not start"
                time.sleep(0.05)
            job.send_signal(signal.SIGTERM)
            out, _ = job.communicate(timeout=200)
        finally:
            job.kill()
    assert job.returncode == status and words in out
    assert (tmp_path / "record.stopped").read_text() == "TERM"
    assert (tmp_path / "record.json.scancel").read_text() == "--signal=TERM 123456.7\n", (
        "the trainer's step, not srun and not the engines"
    )
    asked = (tmp_path / "record.json.requeued").exists()
    assert asked == (left == "75" and restarts == "0")


@pytest.mark.parametrize(
    ("states", "least", "restarts", "starts", "words"),
    [
        ("alloc alloc*", "1", "2", 3, "restart 2 of 2 on 1 of 2 node(s)"),
        ("alloc mix", "1", "1", 2, "restart 1 of 1 on 2 of 2 node(s)"),
        ("alloc down", "2", "2", 1, "1 of 2 node(s) are left, and MIN_NODES is 2"),
        ("alloc down*", "", "2", 1, "the trainer ended with status 1"),
    ],
)
def test_slurm_starts_the_trainer_again_on_the_nodes_that_are_left(
    tmp_path: Path, states: str, least: str, restarts: str, starts: int, words: str
) -> None:
    """A trainer that fails each time, as one does whose node is lost."""
    environment = slurm(tmp_path, node=0)
    for name, text in {
        "srun": 'echo "$@" >> "$RECORD.srun"; exit 1',
        "sinfo": 'set -- $STATES; echo "alpha $1"; echo "beta $2"; echo "beta $2"',
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment |= {"STATES": states, "MIN_NODES": least, "MAX_RESTARTS": restarts}
    script = ["bash", str(ROOT / "scripts/slurm/train.sbatch"), "--lr", "1e-6"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and words in done.stdout, done.stdout + done.stderr
    first, *again = (tmp_path / "record.json.srun").read_text().splitlines()
    assert "--nodes 2 " in first and "--relative 0 " in first and 1 + len(again) == starts
    left = [n for n, state in zip(("alpha", "beta"), states.split()) if state in ("alloc", "mix")]
    for line in again:
        assert f"--nodes {len(left)} " in line and f"--nodelist {','.join(left)} " in line
        assert line.endswith("node.sh --lr 1e-6")


def test_slurm_requeues_a_job_that_is_stopped_while_it_waits_to_restart(tmp_path: Path) -> None:
    """Whatever status the lost trainer left."""
    environment = slurm(tmp_path, node=0)
    for name, text in {
        "srun": 'echo "$@" >> "$RECORD.srun"; echo 1 > "$SLIME_LIKE_STATUS_FILE"; exit 1',
        "sinfo": 'echo "alpha alloc"',
        "sleep": 'if [[ $1 == 31 ]]; then kill -TERM "$PPID"; fi',
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment |= {"MIN_NODES": "1", "RESTART_WAIT_S": "31", "REQUEUE": "0"}
    script = ["bash", str(ROOT / "scripts/slurm/train.sbatch")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 75 and "stopped by SIGTERM: requeued" in done.stdout, done.stdout
    assert len((tmp_path / "record.json.srun").read_text().splitlines()) == 1
    assert (tmp_path / "record.json.requeued").read_text() == "123456\n"


@pytest.mark.parametrize(
    "script",
    sorted(
        str(path.relative_to(ROOT))
        for path in ROOT.glob("scripts/**/*")
        if path.suffix in (".sh", ".sbatch")
    ),
)
def test_shell_scripts_are_well_formed(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True, timeout=200)


def test_shell_scripts_pass_shellcheck() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    scripts = [str(path) for path in ROOT.glob("scripts/**/*") if path.suffix in (".sh", ".sbatch")]
    done = subprocess.run(
        ["shellcheck", "-x", "-P", "SCRIPTDIR", *scripts],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
