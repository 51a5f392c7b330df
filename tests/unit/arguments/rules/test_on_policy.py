"""Rules of --true-on-policy-mode: what cannot be exact is refused before the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from arguments.megatron_configs import Machine
from arguments.parse import parse_args
from arguments.sglang_install import deterministic_backends
from tests.unit.command_lines import (
    assert_refused,
    complete,
    interpreter_with,
    parse_flags,
    problems_of,
    problems_of_flags,
    refused,
)

MODE = "--true-on-policy-mode "
REFUSED = [
    ("", MODE + "--micro-batch-size 2", "--true-on-policy-mode", "--micro-batch-size above 1"),
    ("", MODE + "--micro-batch-size 1 --log-probs-micro-batch-size 4", "--true-on-policy-mode",
     "--log-probs-micro-batch-size above 1"),
    ("", MODE + "--use-dynamic-batch-size --max-tokens-per-gpu 64", "--true-on-policy-mode",
     "--use-dynamic-batch-size"),
    ("", MODE + "--rollout-top-p 0.9", "--true-on-policy-mode", "--rollout-top-p below 1"),
    ("", MODE + "--rollout-top-k 5", "--true-on-policy-mode", "--rollout-top-k above 0"),
    ("", MODE + "--async-rollout", "--true-on-policy-mode", "--async-rollout"),
    ("", MODE + "--partial-rollout --over-sampling-batch-size 8", "--true-on-policy-mode",
     "--partial-rollout"),
    ("", MODE + "--use-rollout-logprobs", "--true-on-policy-mode", "--use-rollout-logprobs"),
    ("check_trainer", MODE + "--attention-dropout 0.1", "--attention-dropout", "must be 0"),
    ("check_local_engine", MODE + "--custom-generate-function-path "
     "examples.guessing_game.game.generate", "--custom-generate-function-path", "of one turn"),
]  # fmt: skip


@refused(REFUSED)
def test_refused(tmp_path: Path, row: tuple[str, str, str, str]) -> None:
    assert_refused(problems_of_flags(tmp_path, row[1]), row)


def test_micro_batches_have_one_sequence_by_default(tmp_path: Path) -> None:
    algorithm = parse_flags(tmp_path, MODE).algorithm
    assert (algorithm.use_dynamic_batch_size, algorithm.micro_batch_size) == (False, 1)
    assert parse_flags(tmp_path, "").algorithm.use_dynamic_batch_size


@pytest.mark.parametrize("flag", ["--tensor-model-parallel-size", "--context-parallel-size"])
def test_the_local_engine_needs_the_whole_model_on_a_rank(tmp_path: Path, flag: str) -> None:
    words = complete(tmp_path, *MODE.split(), flag, "2")
    assert [p.flag for p in problems_of(words, 2)] == [flag]
    parse_args(complete(tmp_path, *MODE.split()), 2)  # data parallelism


CHOICES = 'DETERMINISTIC_ATTENTION_BACKEND_CHOICES = [\n    "fa3",\n    "triton",\n]\n'
FIELDS = (
    "class Exec:\n    enable_deterministic_inference: bool = False\n"
    "    attention_backend: str = ''\n"
)


@pytest.fixture
def python(tmp_path: Path) -> str:
    files = {
        "sglang/__init__.py": "",
        "sglang/srt/server_args.py": "class ServerArgs:\n    pass\n",
        "sglang/srt/arg_groups/choices.py": CHOICES,
        "sglang/srt/arg_groups/fields/exec_.py": FIELDS,
        "sglang_router/__init__.py": "",
        "sglang_router/router_args.py": "class RouterArgs:\n    policy: str = ''\n",
    }
    return interpreter_with(tmp_path, files)


def served(python: str, *more: str) -> list[str]:
    words = ("--rollout-engine", "sglang", "--rollout-num-gpus", "1", "--sglang-python", python)
    return [*MODE.split(), *words, *more]


def test_servers_need_a_gpu(tmp_path: Path, python: str) -> None:
    (found,) = problems_of(complete(tmp_path, *served(python)))
    assert found.flag == "--true-on-policy-mode" and "requires a GPU" in found.message


def test_servers_have_deterministic_kernels(
    tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "here", lambda: Machine(True, False, False))
    flag = "--sglang-attention-backend"
    (found,) = problems_of(complete(tmp_path, *served(python, flag, "torch_native")))
    assert found.flag == flag and "use fa3, triton, or leave it out" in found.message
    off = ("--sglang-enable-deterministic-inference", "false")
    (found,) = problems_of(complete(tmp_path, *served(python, *off)))
    assert found.flag == off[0] and "must be on" in found.message
    parse_args(complete(tmp_path, *served(python, flag, "fa3")), 1)


def test_the_backends_of_an_installation(tmp_path: Path) -> None:
    assert deterministic_backends(tmp_path) == set()
    (tmp_path / "srt").mkdir()
    (tmp_path / "srt" / "server_args.py").write_text(CHOICES)
    assert deterministic_backends(tmp_path) == {"fa3", "triton"}
