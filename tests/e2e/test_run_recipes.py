"""Tiny twins of the recipes of scripts/recipes: the same run file on a tiny model with random weights,
one process or two. Those of GSM8K and DAPO learn, from real rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean, variance
from typing import Any

import pytest
import yaml

from scripts.make_tiny_model import make_tiny_model
from slime_like.cli.tiny_model import save_model
from tests.e2e.helpers import Workspace, rows_of, save_other_model
from tests.e2e.programs import ROOT, TrainServer
from tests.unit.scripts.test_run_recipes import RECIPES, ROWS, example_rows, settings_of

# what a GPU or more than two processes are needed for
LEFT_OUT = {
    "rollout_engine", "rollout_num_gpus", "rollout_num_gpus_per_engine", "colocate", "sglang_mem_fraction_static", "bf16",
    "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "tensor_model_parallel_size", "sequence_parallel",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "optimizer_cpu_offload", "use_precision_aware_optimizer", "eval_prompt_data",
    "eval_interval", "save", "load", "save_interval", "over_sampling_batch_size", "hf_checkpoint", "opd_teacher_load", "lr_warmup_iters",
}  # fmt: skip
SMALL = {
    "num_rollout": 2, "rollout_batch_size": 4, "global_batch_size": 8, "rollout_max_prompt_len": 200, "rollout_max_response_len": 8,
    "max_tokens_per_gpu": 2048, "lr": 1e-3, "no_tensorboard": True, "no_plot": True, "no_progress": True, "rm_num_workers": 1,
}  # fmt: skip


def twin(name: str, work: Workspace, folder: Path, **changes: Any) -> tuple[list[str], int]:
    """(command line, processes): its run file without what needs GPUs."""
    settings = {k: v for k, v in settings_of(name).items() if k not in LEFT_OUT}
    experts = "expert_model_parallel_size" in settings_of(name)
    settings |= {
        **SMALL,
        "hf_checkpoint": str(work.expert_model if experts else work.model),
        "prompt_data": str(example_rows(name)),
        "output_dir": str(folder / "out"),
    }
    settings["n_samples_per_prompt"] = min(settings["n_samples_per_prompt"], 4)
    settings["global_batch_size"] = 4 * settings["n_samples_per_prompt"]
    if settings.get("num_steps_per_rollout") == 2:
        settings["global_batch_size"] //= 2
    if (
        settings["rm_type"] == "dapo" and "hf_checkpoint" not in changes
    ):  # a random model never answers: groups would all be alike
        del settings["rm_type"]
        settings["custom_rm_path"] = f"{work.reward}:letters"
    if "opd_type" in settings:
        teacher = save_other_model(folder / "teacher", seed=2, std=0.3)
        settings["opd_teacher_load"] = str(teacher)
    if experts:
        settings["expert_model_parallel_size"] = 2
    if path := settings.get("custom_generate_function_path"):
        settings["custom_generate_function_path"] = str(ROOT / path)
    if "multimodal_keys" in settings:
        make_tiny_model("Qwen3-VL", folder / "seeing", images=True, max_position_embeddings=1024)
        preprocessor = folder / "seeing" / "preprocessor_config.json"
        small = json.loads(preprocessor.read_text())
        small["size"]["longest_edge"] = 64 * 48  # 48 tokens of a picture
        preprocessor.write_text(json.dumps(small))
        settings["hf_checkpoint"] = str(folder / "seeing")
        settings["custom_rm_path"] = f"{work.reward}:letters"
        del settings["rm_type"]
    (folder / "run.yaml").write_text(yaml.safe_dump(settings | changes))
    return ["--config", str(folder / "run.yaml")], 2 if experts else 1


@pytest.mark.extended
@pytest.mark.parametrize("name", RECIPES)
def test_a_tiny_twin_trains(
    name: str, server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    argv, ranks = twin(name, work, tmp_path)
    server.train(argv, tmp_path / "log", ranks=ranks).ok()
    rows = [row for row in rows_of(tmp_path / "out") if "train/loss" in row]
    assert len(rows) == 2
    assert all(math.isfinite(row["train/loss"]) for row in rows)
    assert all(row["rollout/failed_frac"] == 0 for row in rows)


ONE_FOR_ALL = 1 / 8  # share of right answers of a model that gives each question the same one


def short_rows(folder: Path) -> Path:
    """Rows of GSM8K with an answer of one digit, which a model that writes two characters can give;
    each digit answers one question, so that the same answer to all is right for one in eight."""
    rows = [line for line in ROWS.read_text().splitlines() if line[-4] == " "]
    by_digit = {line[-3]: line for line in rows if len(json.loads(line)["question"]) < 330}
    assert len(by_digit) == 8
    path = folder / "short.jsonl"
    path.write_text("\n".join(by_digit.values()) + "\n")
    return path


SEEDS = [pytest.param(1, marks=pytest.mark.extended), *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_gsm8k_rises(seed: int, server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    """Random weights are right by chance; they learn which digit answers which question, from the
    reward alone. The score ends at twice what one answer to all would get, or above, and its rise is many
    times the standard error of its first and last 8 rollouts."""
    changes = dict(
        prompt_data=str(short_rows(tmp_path)), num_rollout=60, rollout_batch_size=8, n_samples_per_prompt=32, global_batch_size=256,
        rollout_max_prompt_len=400, rollout_max_response_len=2, lr=1e-2, seed=seed, rollout_seed=seed,
    )  # fmt: skip
    argv, _ = twin("gsm8k_qwen3_0.6b", work, tmp_path, **changes)
    server.train(argv, tmp_path / "log", timeout_s=900).ok()
    scores = [row["rollout/reward_mean"] for row in rows_of(tmp_path / "out")]
    first, last = scores[:8], scores[-8:]
    error = math.sqrt((variance(first) + variance(last)) / 8)
    print(
        [round(mean(scores[i : i + 8]), 3) for i in range(0, 60, 8)], f"standard error {error:.3g}"
    )
    assert mean(last) - mean(first) > 8 * error, scores
    assert mean(first) < 0.15 and mean(last) > 2 * ONE_FOR_ALL, scores


def dapo_rows(folder: Path) -> dict[str, Path]:
    """GSM8K's questions with answers below 100, in DAPO's form: `rl` to be answered, and others with
    their answers to write in `warm_up`."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    pairs = [(row["question"], row["answer"].rpartition("#### ")[2]) for row in rows]
    pairs = [
        (question, answer) for question, answer in pairs if len(question) < 260 and len(answer) < 3
    ]
    parts = {
        "rl": [{"prompt": question, "label": answer} for question, answer in pairs[:12]],
        "warm_up": [{"prompt": question, "label": f"Answer: {answer}"} for question, answer in pairs[12:]],
    }  # fmt: skip
    assert len(parts["warm_up"]) > 20
    for name, part in parts.items():
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text)
    return {name: folder / f"{name}.jsonl" for name in parts}


@pytest.mark.parametrize("seed", SEEDS)
def test_dapo_rises(seed: int, server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    """Random weights learn DAPO's form from 23 answers, then what answers 12 other questions."""
    data = dapo_rows(tmp_path)
    save_model(tmp_path / "model", hidden_size=32, num_layers=2, seed=seed)
    common = dict(
        seed=seed, rollout_seed=seed, rollout_max_prompt_len=300, rollout_max_response_len=11
    )
    warm_up = dict(
        hf_checkpoint=str(tmp_path / "model"), prompt_data=str(data["warm_up"]), input_key="prompt", label_key="label",
        apply_chat_template=True, loss_type="sft_loss", num_rollout=30, rollout_batch_size=16, lr=1e-2,
        max_tokens_per_gpu=2048, use_dynamic_batch_size=True, save_hf=str(tmp_path / "warm"), output_dir=str(tmp_path / "sft"),
        no_tensorboard=True, no_plot=True, no_progress=True,
    )  # fmt: skip
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(warm_up | common))
    server.train(["--config", str(tmp_path / "sft.yaml")], tmp_path / "sft_log", timeout_s=900).ok()
    changes = dict(
        hf_checkpoint=str(tmp_path / "warm"), prompt_data=str(data["rl"]), num_rollout=20, rollout_batch_size=8,
        n_samples_per_prompt=32, global_batch_size=128, lr=2e-3, eval_prompt_data=["gsm8k", str(data["rl"])],
        n_samples_per_eval_prompt=8, eval_interval=5,
    )  # fmt: skip
    argv, _ = twin("dapo_math_qwen3_4b", work, tmp_path, **changes, **common)
    server.train(argv, tmp_path / "log", timeout_s=900).ok()
    rewards = [
        row["eval/gsm8k/mean"] for row in rows_of(tmp_path / "out") if "eval/gsm8k/mean" in row
    ]
    right = [(reward + 1) / 2 for reward in rewards]  # 1 or -1 each
    assert right[0] < 0.1 and right[-1] > right[0] + 0.1, right
