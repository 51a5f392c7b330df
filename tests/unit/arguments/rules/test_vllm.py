"""Settings of vLLM servers: what is passed on to them, checked against an installation, and every
rule broken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from arguments.parse import parse_args
from arguments.run_config import RunConfig
from tests.unit.command_lines import (
    assert_refused,
    complete,
    interpreter_with,
    problems_of_flags,
    refused,
)

ENGINE = "class EngineArgs:\n    max_num_seqs: int = 1\n    logprobs_mode: str = 'raw_logprobs'\n"


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that has a vLLM of a few settings."""
    files = {"vllm/__init__.py": "", "vllm/engine/arg_utils.py": ENGINE}
    return interpreter_with(tmp_path, files)


VLLM = "--rollout-engine vllm --vllm-python {python} "
HERE = VLLM + "--rollout-external-engine-addrs 127.0.0.1:30000 "
STARTED = VLLM + "--rollout-num-gpus 2 "
# rule; flags; the flag that is named; words
REFUSED = [
    ("check_unused_sglang_flags", "--vllm-python python", "--vllm-python",
     "has no effect with --rollout-engine local; remove it or add --rollout-engine vllm"),
    ("check_unused_sglang_flags", "--vllm-max-num-seqs 4", "--vllm-max-num-seqs",
     "add --rollout-engine vllm"),
    ("check_unused_sglang_flags", STARTED + "--no-sglang-router", "--no-sglang-router",
     "has no effect with --rollout-engine vllm; remove it or add --rollout-engine sglang"),
    ("check_unused_sglang_flags", VLLM + "--colocate", "--colocate",
     "has no effect with --rollout-engine vllm"),
    ("check_server_addresses", VLLM, "--rollout-engine",
     "--rollout-external-engine-addrs host:port"),
    ("check_server_addresses", HERE + "--rollout-num-gpus 2", "--rollout-num-gpus",
     "cannot be combined with"),
    ("check_started_servers", HERE + "--vllm-max-num-seqs 4", "--vllm-max-num-seqs",
     "add --rollout-num-gpus"),
    ("check_vllm_installation", STARTED + "--vllm-max-num-seq 4", "--vllm-max-num-seq",
     "did you mean --vllm-max-num-seqs?"),
    ("check_vllm_installation", STARTED + "--vllm-logprobs-mode raw_logprobs",
     "--vllm-logprobs-mode", "is set by the run"),
    ("check_vllm_installation",
     "--rollout-engine vllm --rollout-num-gpus 1 --vllm-python /no/python", "--vllm-python",
     "cannot be run"),
    ("check_weight_transport", HERE + "--update-weight-transport cuda_ipc",
     "--update-weight-transport", "requires --colocate"),
    ("check_vllm_limits", HERE + "--rollout-top-p 0.9", "--rollout-top-p",
     "use --rollout-engine sglang or local"),
    ("check_vllm_limits", HERE + "--rollout-top-k 5", "--rollout-top-k",
     "use --rollout-engine sglang or local"),
    ("check_vllm_limits", STARTED + "--rollout-num-gpus-per-engine 2",
     "--rollout-num-gpus-per-engine", "must be 1 without a GPU"),
]  # fmt: skip


@refused(REFUSED)
def test_refused(tmp_path: Path, python: str, row: tuple[str, str, str, str]) -> None:
    assert_refused(problems_of_flags(tmp_path, row[1].replace("{python}", python)), row)


def test_started_and_external_servers(tmp_path: Path, python: str) -> None:
    def parsed(flags: str) -> RunConfig:
        return parse_args(complete(tmp_path, *flags.format(python=python).split()), 1)

    assert parsed(STARTED + "--vllm-max-num-seqs 4").vllm.vllm_server_flags == {"max_num_seqs": "4"}
    external = parsed(HERE)
    assert external.sglang.rollout_num_gpus is None
    assert external.sglang.update_weight_transport == "broadcast"


def test_a_python_without_vllm(tmp_path: Path) -> None:
    row = (
        "check_vllm_installation",
        f"--rollout-engine vllm --rollout-num-gpus 1 --vllm-python {sys.executable}",
        "--rollout-num-gpus",
        "which " + sys.executable + " does not have; set --vllm-python",
    )
    assert_refused(problems_of_flags(tmp_path, row[1]), row)
