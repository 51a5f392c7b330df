"""A mistake is answered once: one setting is named, whatever else the run uses, and everything that
is wrong with it stands behind its name."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest

from arguments.parse import parse_args
from slime_like.config import ConfigError, Problem
from tests.unit.command_lines import complete

# What a run may use beside. {folder} is the test's folder.
RUNS = {
    "local": "",
    "SGLang servers": "--rollout-engine sglang --rollout-external-engine-addrs 127.0.0.1:3000 "
    "--no-sglang-router",
    "SGLang to start": "--rollout-engine sglang --rollout-num-gpus 2",
    "vLLM servers": "--rollout-engine vllm --rollout-external-engine-addrs 127.0.0.1:3000",
    "vLLM to start": "--rollout-engine vllm --rollout-num-gpus 2",
    "adapters": "--lora-rank 4",
    "critic": "--advantage-estimator ppo",
    "reference": "--use-kl-loss --kl-loss-coef 0.1 --ref-load {folder}/hf",
    "teacher": "--use-opd --opd-type megatron --opd-teacher-load {folder}/hf",
    "evaluation": "--eval-interval 1 --eval-prompt-data held {folder}/prompts.jsonl",
    "saves": "--save {folder}/saved --save-hf {folder}/saved_hf",
    "images": """--multimodal-keys {"image":"images"} --apply-chat-template""",
}
# mistake -> the flag that is named; "without FLAG" leaves it out of the command line
MISTAKES = {
    "without --hf-checkpoint": "--hf-checkpoint",
    "--hf-checkpoint {folder}/none": "--hf-checkpoint",
    "--hf-checkpoint Qwen/Qwen3-0.6B": "--hf-checkpoint",
    "--hf-checkpoint {folder}/empty": "--hf-checkpoint",
    "--hf-checkpoint {folder}/prompts.jsonl": "--hf-checkpoint",
    "--hf-checkpoint {folder}/broken": "--hf-checkpoint",
    "--hf-checkpoint {folder}/foreign": "--hf-checkpoint",
    "--hf-checkpoint": "--hf-checkpoint",
    "without --prompt-data": "--prompt-data",
    "--prompt-data {folder}/none.jsonl": "--prompt-data",
    "--prompt-data {folder}": "--prompt-data",
    "--prompt-data openai/gsm8k": "--prompt-data",
    "--prompt-data reasoning_gym:nothing": "--prompt-data",
    "--input-key question": "--input-key",
    "--label-key answer": "--label-key",
    "without --lr": "--lr",
    "--lr fast": "--lr",
    "--lr 0": "--lr",
    "without --num-rollout": "--num-rollout",
    "--num-rollout 0": "--num-rollout",
    "without --rm-type": "--rm-type",
    "--rm-type maths": "--rm-type",
    "--custom-rm-path nowhere.score": "--custom-rm-path",
    "--custom-rm-path {folder}/none.py:score": "--custom-rm-path",
    "--rollout-batch-size 0": "--rollout-batch-size",
    "--global-batch-size 7": "--global-batch-size",
    "--tensor-model-parallel-size 3": "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size 3": "--pipeline-model-parallel-size",
    "--context-parallel-size 2": "--context-parallel-size",
    "--expert-model-parallel-size 2": "--expert-model-parallel-size",
    "--sequence-parallel": "--sequence-parallel",
    "--num-layers 3": "--num-layers",
    "--num-experts 8": "--num-experts",
    "--moe-grouped-gemm": "--moe-grouped-gemm",
    "--moe-router-enable-expert-bias": "--moe-router-enable-expert-bias",
    "--fp16": "--fp16",
    "--attention-backend flash": "--attention-backend",
    "--rollout-max-response-len 0": "--rollout-max-response-len",
    "--rollout-top-p 2": "--rollout-top-p",
    "--ref-load {folder}/none": "--ref-load",
    "--load {folder}/none": "--load",
    "--output-dir {folder}/prompts.jsonl": "--output-dir",
    "--config {folder}/none.yaml": "--config",
    "--config {folder}/broken.yaml": "--config",
    "--policy-loss-type grpo": "--policy-loss-type",
    "--learning-rate 1": "--learning-rate",
    "--epochs 3": "--epochs",
    "--eval-interval 5 --eval-prompt-data held {folder}/none.jsonl": "--eval-prompt-data",
    "--rollout-engine sglangg": "--rollout-engine",
    "--lora-target-modules query": "--lora-target-modules",
    "--lr-decay-style cosin": "--lr-decay-style",
    "--profile-ranks 3": "--profile-ranks",
    "--preflight-nodes 2": "--preflight-nodes",
    "--update-weight-full-interval 1": "--update-weight-full-interval",
    "--update-weight-disk-dir {folder}/weights": "--update-weight-disk-dir",
}


def write_wrong_files(folder: Path) -> None:
    for name in ("empty", "broken", "foreign"):
        (folder / name).mkdir()
    (folder / "broken/config.json").write_text("{")
    (folder / "foreign/config.json").write_text(json.dumps({"architectures": ["Foreign"]}))
    (folder / "broken.yaml").write_text("lr: [\n")


def problems_of(folder: Path, run: str, mistake: str = "") -> list[Problem]:
    without, wrong = (mistake.split(" ")[1:], "") if "without" in mistake else ([], mistake)
    words = [word.replace("{folder}", str(folder)) for word in f"{run} {wrong}".split()]
    without += [word for word in words if word in ("--hf-checkpoint", "--prompt-data")]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parse_args(complete(folder, *words, without=tuple(without)), 1)
    except ConfigError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize("name", RUNS)
def test_a_mistake_names_one_setting(tmp_path: Path, name: str) -> None:
    """Beside what the run lacks without the mistake, e.g. an installed server."""
    write_wrong_files(tmp_path)
    known = {str(problem) for problem in problems_of(tmp_path, RUNS[name])}
    found = {
        mistake: {
            problem.flag
            for problem in problems_of(tmp_path, RUNS[name], mistake)
            if str(problem) not in known
        }
        for mistake in MISTAKES
    }
    wrong = {mistake: named for mistake, named in found.items() if named != {MISTAKES[mistake]}}
    assert not wrong


def test_a_setting_is_named_once_with_all_that_is_wrong_with_it() -> None:
    error = ConfigError(
        [
            Problem("--a", 3, "must divide 4"),
            Problem("--b", None, "required"),
            Problem("--a", 3, "must divide 8"),
            Problem("--a", 5, "must be odd"),
        ]
    )
    assert str(error) == (
        "3 problems in the configuration:\n"
        "  - --a (given: 3): must divide 4; also must divide 8\n"
        "  - --b: required\n"
        "  - --a (given: 5): must be odd"
    )
    assert len(error.problems) == 4


def test_sizes_that_do_not_divide_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(complete(tmp_path, "--tensor-model-parallel-size", "3"), 3)
    assert re.fullmatch(
        r"1 problem in the configuration:\n  - --tensor-model-parallel-size \(given: 3\): must "
        r"divide --num-attention-heads 4; also must divide --num-query-groups 2; also must divide "
        r"--hidden-size 64; also must divide --ffn-hidden-size 128",
        str(caught.value),
    )
