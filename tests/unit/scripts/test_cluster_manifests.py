"""The files for Kubernetes and SkyPilot, as far as a machine with neither can tell: their schemas,
where the packages that carry these are installed, and the command lines that they start."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from arguments.parse import parse_args
from arguments.run_config import RunConfig
from tests.paths import ROOT
from tests.unit.command_lines import complete
from tests.unit.scripts.test_launch_scripts import RECORDER

JOB_SET = ROOT / "scripts/kubernetes/train.yaml"
TASK = ROOT / "scripts/skypilot/train.yaml"

READ = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
print(task.name, task.num_nodes, task.volumes)
"""


def job_set() -> dict[str, Any]:
    return yaml.safe_load(JOB_SET.read_text(encoding="utf-8"))


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    (job,) = manifest["spec"]["replicatedJobs"]
    (found,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return found


def launched(argv: list[str], folder: Path) -> tuple[Any, RunConfig]:
    """What torchrun and train.py read from a command line. Its run file is that of a complete one."""
    torchrun = get_args_parser().parse_args(argv)
    assert torchrun.training_script == "train.py"
    ours = [
        re.sub(r"^(--config=)?/shared/run\.yaml$", "", word)
        for word in torchrun.training_script_args
    ]
    ours = [word for word in ours if word not in ("", "--config")]
    ours = [word.replace("/shared", str(folder)) for word in ours]
    config = parse_args(complete(folder, *ours), 1)
    assert config.checkpoint.save == config.checkpoint.load and config.checkpoint.save_interval
    return torchrun, config


def test_the_manifest_is_a_job_set() -> None:
    """A field that the API does not have is lost on the way through its model."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api")
    manifest = job_set()
    read = models.JobsetV1alpha2JobSet.from_dict(manifest)
    assert read.to_dict() == manifest
    wrong = job_set()
    wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 0
    assert models.JobsetV1alpha2JobSet.from_dict(wrong).to_dict() != wrong


def test_what_the_pods_start(tmp_path: Path) -> None:
    """Each $(NAME) is one of the container's variables; the names and numbers fit each other."""
    manifest = job_set()
    pod = container(manifest)
    values = {each["name"]: each.get("value", "1") for each in pod["env"]}
    assert pod["command"] == ["python", "-m", "slime_like.torchrun"]
    argv = [re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], word) for word in pod["args"]]
    torchrun, _ = launched(argv, tmp_path)
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    name = manifest["metadata"]["name"]
    assert torchrun.master_addr == f"{name}-{job['name']}-0-0.{name}"
    assert spec["completionMode"] == "Indexed" and torchrun.node_rank == 1
    assert int(torchrun.nnodes) == spec["parallelism"] == spec["completions"]
    assert int(torchrun.nproc_per_node) == pod["resources"]["limits"]["nvidia.com/gpu"]


def test_how_the_pods_end() -> None:
    """Time to save before SIGKILL; a wrong command line ends it; all else starts all pods again."""
    spec = job_set()["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    grace = {each["name"]: each.get("value") for each in container(job_set())["env"]}
    assert pod["terminationGracePeriodSeconds"] > int(grace["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy requires it
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2]
    assert rule["onExitCodes"]["containerName"] == container(job_set())["name"]
    assert spec["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert spec["failurePolicy"]["maxRestarts"] > 0 and job["backoffLimit"] == 0


def test_the_volumes_of_the_pods() -> None:
    pod = job_set()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    mounted = {each["name"]: each["mountPath"] for each in container(job_set())["volumeMounts"]}
    assert set(mounted) == {each["name"] for each in pod["volumes"]}
    paths = [a.split("=")[1] for a in container(job_set())["args"] if "=/" in a]
    assert len(paths) == 4 and all(path.startswith(f"{mounted['shared']}/") for path in paths)


def test_skypilot_reads_the_task(tmp_path: Path) -> None:
    """By its package, which `make test-skypilot` installs on its own. A key that it does not know is
    an error."""
    python = os.environ.get("SKYPILOT_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import sky"], capture_output=True, timeout=120).returncode:
        pytest.skip("no skypilot: make test-skypilot")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(TASK.read_text(encoding="utf-8").replace("num_nodes:", "nodes:"))
    read, rejected = (
        subprocess.run([python, "-c", READ, str(path)], capture_output=True, text=True, timeout=120)
        for path in (TASK, wrong)
    )
    assert read.stdout.splitlines()[-1:] == ["slime-like 2 {'/shared': 'slime-like'}"], read.stderr
    assert rejected.returncode and "nodes" in rejected.stderr


def test_what_the_task_starts(tmp_path: Path) -> None:
    """Its script, run by bash on the second of two nodes, with a python that writes what it got."""
    task = yaml.safe_load(TASK.read_text(encoding="utf-8"))
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(RECORDER)
    python.chmod(0o755)
    environment = {
        **os.environ,
        **task["envs"],
        "RECORD": str(tmp_path / "record.json"),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
    }
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-c", task["run"]], cwd=tmp_path, env=environment, check=True, timeout=60)
    argv = json.loads((tmp_path / "record.json").read_text())["argv"]
    assert argv[:2] == ["-m", "slime_like.torchrun"]
    torchrun, _ = launched(argv[2:], tmp_path)
    assert (torchrun.nnodes, torchrun.node_rank, torchrun.nproc_per_node) == ("2", 1, "8")
    assert torchrun.master_addr == "10.0.0.7"
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"].endswith(":8")
    assert set(task["volumes"]) == {"/shared"}
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert task["setup"].split()[1] in targets
