"""Functions of the user's that take part in training and logging, in whole runs, as slime calls
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import Workspace, rows_of, sampled
from tests.e2e.programs import TrainServer

# What the run does without them; slime's own formulas.
SAME = """
import torch

def advantages(args, rollout_data):
    assert args.advantage_estimator == "grpo" and len(rollout_data["kl"]) == len(rollout_data["tokens"])
    returns = [r * torch.ones_like(p) for r, p in zip(rollout_data["rewards"], rollout_data["log_probs"])]
    rollout_data["advantages"], rollout_data["returns"] = list(returns), returns

def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    assert not calculate_per_token_loss and all(t > r for t, r in zip(total_lengths, response_lengths))
    def reduce(x):
        parts = x.split(response_lengths, 0)
        return sum((p * m).sum() / m.sum().clamp_min(1) for p, m in zip(parts, loss_masks))
    return reduce

def postprocess(args, rollout_id, rollout_data):
    assert rollout_id in (0, 1) and set(rollout_data) >= {"advantages", "raw_reward", "sample_indices"}
"""
CONVERT = """
def same(args, samples):
    with open(__file__ + ".calls", "a") as file:
        file.write(f"{len(samples)} ")
    groups = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample.reward)
    means = {number: sum(rewards) / len(rewards) for number, rewards in groups.items()}
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.reward - means[sample.group_index] for sample in samples],
        "raw_reward": [sample.reward for sample in samples],
        "truncated": [int(sample.status == sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": [sample.rollout_id for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
        "rollout_mask_sums": [sum(sample.loss_mask) for sample in samples],
        "round_number": [0 for sample in samples],
    }

def split(args, samples):
    # each response as two sequences: one learns its first half, the other the rest
    data = same(args, [sample for sample in samples for _ in range(2)])
    for place in range(0, 2 * len(samples), 2):
        length = data["response_lengths"][place]
        half = [int(i < length // 2) for i in range(length)]
        data["loss_masks"][place : place + 2] = [half, [1 - bit for bit in half]]
        data["rollout_mask_sums"][place : place + 2] = [length, length]
    return data

def short(args, samples):
    data = same(args, samples)
    data["loss_masks"][3] = data["loss_masks"][3][1:]
    return data
"""
SEEN = """
import json
from pathlib import Path

FOLDER = Path({folder!r})

def note(kind, *values):
    with (FOLDER / "seen").open("a") as file:
        file.write(json.dumps([kind, *values]) + "\\n")

def init(args):
    import torch.distributed as dist
    note("init", dist.is_initialized(), args.n_samples_per_prompt)

def before_log_prob(args, model, store_prefix):
    note("log_prob", store_prefix, len(model), sum(p.numel() for p in model[0].parameters()) > 0)

def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    note("step", rollout_id, step_id, opt_param_scheduler.num_steps, len(optimizer.param_groups) > 0)

async def first(args, sample, *, rollout_id=None, evaluation=False):
    assert sample.reward is None and sample.response_length
    sample.metadata["seen"] = [rollout_id, evaluation]

def second(args, sample):
    sample.metadata["seen"].append("second")
    sample.loss_mask[0] = 0
    return sample

def reward(args, sample):
    return len(sample.metadata["seen"]) + 0.01 * sample.index

def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    means = sum(s.reward for s in samples) / len(samples)
    note("log", rollout_id, len(samples), means - rollout_extra_metrics["rollout/reward_mean"], rollout_time > 0)
    return rollout_id == 0

def log_eval(rollout_id, args, data, extra_metrics):
    few = data["few"]
    note("eval", len(few["rewards"]), len(few["truncated"]), few["samples"][0].metadata["seen"][1:], sorted(extra_metrics)[0])
    return True

def silent(args, rollout_id, rollout_data):
    rollout_data["advantages"] = [a * 0 for a in rollout_data["advantages"]]
    for mask in rollout_data["loss_masks"]:
        mask[-1] = 0

def wider(args, rollout_id, rollout_data):
    rollout_data["loss_masks"] = [m * 0 + 1 for m in rollout_data["loss_masks"]]
"""


def own(folder: Path, text: str) -> str:
    file = folder / "own.py"
    file.write_text(text)
    return str(file)


@pytest.mark.extended
def test_slimes_formulas_for_advantages_and_the_loss_change_nothing(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """As functions: the run without them, up to rounding; on two ranks of a pipeline too."""
    file = own(tmp_path, SAME)
    hooks = {
        "custom_advantage_function_path": f"{file}:advantages",
        "custom_pg_loss_reducer_function_path": f"{file}:reducer",
        "rollout_data_postprocess_path": f"{file}:postprocess",
    }
    flags: dict[str, Any] = {"loss_reduction": "sequence_mean"}
    server.train(work.flags(tmp_path / "plain", **flags), tmp_path / "log_plain").ok()
    server.train(work.flags(tmp_path / "own", **flags, **hooks), tmp_path / "log_own").ok()
    two = {**flags, **hooks, "pipeline_model_parallel_size": 2}
    server.train(work.flags(tmp_path / "two", **two), tmp_path / "log_two", ranks=2).ok()
    for name in ("own", "two"):
        for ours, plain in zip(rows_of(tmp_path / name), rows_of(tmp_path / "plain"), strict=True):
            assert abs(ours["train/loss"] - plain["train/loss"]) < 1e-5
            norms = ours["train/grad_norm"], plain["train/grad_norm"]
            assert abs(norms[0] - norms[1]) < 1e-4 * norms[1]


def test_hooks_see_what_slime_shows_them(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Megatron's, those of samples before their reward, and those of logging, which may leave the
    run's own metrics out; and a postprocess function that leaves nothing to learn."""
    file = own(tmp_path, SEEN.format(folder=str(tmp_path)))
    more: dict[str, Any] = {
        "custom_megatron_init_path": f"{file}:init",
        "custom_megatron_before_log_prob_hook_path": f"{file}:before_log_prob",
        "custom_megatron_before_train_step_hook_path": f"{file}:before_train_step",
        "rollout_sample_hook_path": f"{file}:first {file}:second",
        "custom_rollout_log_function_path": f"{file}:log",
        "custom_eval_rollout_log_function_path": f"{file}:log_eval",
        "rollout_data_postprocess_path": f"{file}:silent",
        "custom_rm_path": f"{file}:reward",
        "eval_prompt_data": f"few {work.prompts}@[0:3]",
        "eval_interval": 2,
        "skip_eval_before_train": "",
        "use_kl_loss": "", "kl_loss_coef": 0.1, "ref_load": work.model,
        "save_debug_rollout_data": tmp_path / "r_{rollout_id}",
    }  # fmt: skip
    server.train(work.flags(tmp_path / "out", **more), tmp_path / "log").ok()
    lines = (tmp_path / "seen").read_text().splitlines()
    seen: dict[str, list[list[Any]]] = {}
    for kind, *values in map(json.loads, lines):
        seen.setdefault(kind, []).append(values)
    assert seen["init"] == [[True, 4]] and json.loads(lines[0])[0] == "init"
    assert seen["log_prob"] == [["", 1, True], ["ref_", 1, True]] * 2
    assert seen["step"] == [[0, 0, 0, True], [0, 1, 1, True], [1, 0, 2, True], [1, 1, 3, True]]
    assert [(row[0], row[1], row[3]) for row in seen["log"]] == [(0, 16, True), (1, 16, True)]
    assert all(abs(row[2]) < 1e-6 for row in seen["log"])
    assert seen["eval"] == [[3, 3, [True, "second"], "eval/few/mean"]]
    first, second = rows_of(tmp_path / "out")
    assert not any(name.startswith(("rollout/", "eval/")) for name in first)
    assert any(name.startswith("rollout/") for name in second)
    assert not any(name.startswith("eval/") for name in second)
    assert first["train/policy_loss"] == 0 and first["train/kl_loss"] == pytest.approx(0, abs=1e-6)
    for index, (_, reward) in sampled(tmp_path / "r_{rollout_id}", 1).items():
        assert reward == pytest.approx(3 + 0.01 * index)


def test_what_a_hook_gets_wrong_is_reported_by_its_flag(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    file = own(tmp_path, SEEN.format(folder=str(tmp_path)))
    more = {
        "rollout_data_postprocess_path": f"{file}:wider",
        "rollout_sample_hook_path": f"{file}:first {file}:second",
    }
    error = server.train(work.flags(tmp_path / "out", **more), tmp_path / "log").error()
    assert f"--rollout-data-postprocess-path {file}:wider: loss_masks[0] has tokens" in error


def test_samples_are_converted_as_slime_converts_them(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """slime's own conversion changes nothing but the last bits of the means; halves of a response
    as sequences of their own are the same step; two ranks do what one does."""
    file = own(tmp_path, CONVERT)
    flags: dict[str, Any] = {
        "disable_grpo_std_normalization": "",
        "loss_reduction": "sequence_mean",
        "micro_batch_size": None,
        "use_dynamic_batch_size": "",
        "max_tokens_per_gpu": 256,
    }
    path = "custom_convert_samples_to_train_data_path"
    runs: dict[str, tuple[dict[str, Any], int]] = {
        "plain": ({}, 1),
        "same": ({path: f"{file}:same"}, 1),
        "split": ({path: f"{file}:split", "async_rollout": "", "max_staleness": 0}, 2),
    }
    for name, (more, ranks) in runs.items():
        argv = work.flags(tmp_path / name, **flags, **more)
        server.train(argv, tmp_path / f"log_{name}", ranks=ranks).ok()
    plain = rows_of(tmp_path / "plain")
    for name in ("same", "split"):
        for ours, theirs in zip(rows_of(tmp_path / name), plain, strict=True):
            assert abs(ours["train/loss"] - theirs["train/loss"]) < 1e-5
            norms = ours["train/grad_norm"], theirs["train/grad_norm"]
            assert abs(norms[0] - norms[1]) < 1e-4 * norms[1]
    short = work.flags(tmp_path / "short", **flags, **{path: f"{file}:short"})
    error = server.train(short, tmp_path / "log_short").error()
    assert "entry 3, of sample 3: loss_masks has " in error
    assert Path(file + ".calls").read_text().split() == ["16", "16", "32", "32", "16"]
