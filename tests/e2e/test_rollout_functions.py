"""Whole runs whose rollouts and evaluations are made by functions of the user's, in slime's
convention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_like.rollout.recording import load_rollout
from tests.e2e.helpers import Workspace, rows_of, same_numbers, sampled, weights_of
from tests.e2e.programs import TrainServer

EXAMPLE = "examples/own_rollout/widest_groups.py:generate_rollout"
# what slime's own does, wrapped as users wrap it: the run must not change by one bit
WRAPPED = """
from slime_like.compat.slime.api import generate_rollout

def rollout(args, rollout_id, data_source, evaluation=False):
    return generate_rollout(args, rollout_id, data_source, evaluation=evaluation)
"""


def own(folder: Path, text: str, name: str = "rollout") -> str:
    file = folder / "own.py"
    file.write_text(text)
    return f"{file}:{name}"


@pytest.mark.slow
def test_slimes_own_rollout_through_a_function_changes_nothing(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Weights, metrics and evaluations bit by bit, on one rank; the same samples on two, of a
    pipeline."""
    flags: dict[str, Any] = dict(
        eval_prompt_data=f"few {work.prompts}@[0:5]",
        eval_interval=1,
        n_samples_per_eval_prompt=2,
        rollout_temperature=0.9,
    )
    path = own(tmp_path, WRAPPED)
    for name, more in (("plain", {}), ("function", {"rollout_function_path": path})):
        out = tmp_path / name
        server.train(
            work.flags(
                out,
                **flags,
                **more,
                save_hf=out / "hf",
                save_debug_rollout_data=out / "r_{rollout_id}",
            ),
            out / "log",
        ).ok()
    plain, function = rows_of(tmp_path / "plain"), rows_of(tmp_path / "function")
    assert same_numbers(function[1:]) == same_numbers(plain[1:])
    names = [name for name in plain[-1] if name.startswith("eval/")]
    assert len(names) == 6 and [[row[n] for n in names] for row in function] == [
        [row[n] for n in names] for row in plain
    ]
    expected, found = (
        weights_of(tmp_path / "plain" / "hf"),
        weights_of(tmp_path / "function" / "hf"),
    )
    assert [name for name in expected if not expected[name].equal(found[name])] == []
    assert all(
        row["rollout/unknown_version_frac"] == 0 and row["rollout/staleness_max"] == 0
        for row in function[1:]
    )
    two = tmp_path / "two"
    layout = dict(
        pipeline_model_parallel_size=2,
        rollout_function_path=path,
        save_debug_rollout_data=two / "r_{rollout_id}",
    )
    server.train(work.flags(two, **flags, **layout), two / "log", ranks=2).ok()
    assert sampled(two / "r_{rollout_id}", 0) == sampled(tmp_path / "plain" / "r_{rollout_id}", 0)
    assert abs(rows_of(two)[-1]["train/loss"] - plain[-1]["train/loss"]) < 1e-5


@pytest.mark.slow
def test_the_example_carries_groups_over_and_resumes(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Groups that it gives back are trained on a rollout later, under the version that wrote them;
    a resumed run continues with them, and two ranks sample what one does."""
    flags: dict[str, Any] = dict(
        rollout_function_path=EXAMPLE,
        num_rollout=3,
        token_tis_ratio_clip_high=2.0,
        tis_ratio_type="token",
    )
    full_run, parts, two = tmp_path / "whole", tmp_path / "parts", tmp_path / "two"
    server.train(
        work.flags(full_run, **flags, save_debug_rollout_data=full_run / "r_{rollout_id}"),
        full_run / "log",
    ).ok()
    rows = rows_of(full_run)
    assert rows[0]["rollout/carried_groups"] > 0 and rows[0]["rollout/spread_mean"] > 0
    assert max(row["rollout/staleness_max"] for row in rows) == 1
    carried = [
        s
        for g in load_rollout(str(full_run / "r_{rollout_id}"), 1)
        for s in g.samples
        if s.metadata.get("carried")
    ]
    assert carried and all(set(s.weight_versions) == {1} for s in carried)
    server.train(
        work.flags(parts, **flags | dict(num_rollout=1), save=parts / "c"), parts / "log"
    ).ok()
    server.train(
        work.flags(parts, **flags, load=parts / "c", save=parts / "c"), parts / "log2"
    ).ok()
    assert same_numbers(rows_of(parts)) == same_numbers(rows)
    server.train(
        work.flags(two, **flags, save_debug_rollout_data=two / "r_{rollout_id}"),
        two / "log",
        ranks=2,
    ).ok()
    assert sampled(two / "r_{rollout_id}", 2) == sampled(full_run / "r_{rollout_id}", 2)


# Each returns something that is wrong in one way, or does what it must not
WRONG = {
    "too_few": ("return groups[:-1]", "returned 3 groups of [4] samples, must be 4 groups (--rollout-batch-size) of 4 samples (--n-samples-per-prompt)"),
    "flat": ("return groups[0]", "returned a list of SlimeSample; return a list of groups"),
    "log_probs": ("groups[1][2].rollout_log_probs.pop()", "sample 6: rollout_log_probs has "),
    "positive": ("groups[0][1].rollout_log_probs[0] = 0.5", "sample 1: rollout_log_probs are not finite, or above 0"),
    "some_silent": ("groups[0][3].rollout_log_probs = None", "sample 3 has no rollout_log_probs, but others do"),
    "mask": ("groups[0][0].loss_mask = [1]", "sample 0: loss_mask has 1 entries for "),
    "token": ("groups[3][3].tokens[0] = 10**6", "sample 15: tokens from "),
    "no_reward": ("groups[2][0].reward = None", "sample 8: has no reward; set it"),
    "pending": ("groups[2][1].status = Sample.Status.PENDING", "sample 9: status is 'pending'"),
    "version": ("groups[0][0].engine_outputs = []; groups[0][0].weight_versions = ['7']", "sample 0: weight version 7, newer than the engine's, 1"),
    "twice": ("groups[1] = groups[0]", "group_index 0 occurs twice"),
    "mixed": ("groups[0][0], groups[1][0] = groups[1][0], groups[0][0]", "a group has samples with group_index [0, 1]"),
    "metric": ("return RolloutFnTrainOutput(groups, {'reward_mean': 1})", "the metric 'rollout/reward_mean' is one of the run's own"),
    "raises": ("None.nothing", "the function raised AttributeError: 'NoneType' object has no attribute 'nothing' ("),
    "hangs": ("time.sleep(60)", "rollout 1 took longer than --rollout-function-timeout-s 4"),
}  # fmt: skip
MAKES = """
import time
from slime_like.compat.slime.api import RolloutFnTrainOutput, Sample, generate_rollout

def rollout(args, rollout_id, data_source, evaluation=False):
    groups = generate_rollout(args, rollout_id, data_source).samples
    {body}
    return groups
"""


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in ("token", "hangs") else pytest.mark.slow) for c in WRONG],
)
def test_what_a_function_returns_is_checked(
    server: TrainServer, work: Workspace, tmp_path: Path, case: str
) -> None:
    """The run ends with one message that names the function; every rank does."""
    body, words = WRONG[case]
    path = own(tmp_path, MAKES.format(body=body))
    error = server.train(
        work.flags(tmp_path / "out", rollout_function_path=path, rollout_function_timeout_s=4),
        tmp_path / "log",
        ranks=2,
    ).error()
    assert words in error and "--rollout-function-path" in error and "Traceback" not in error


# Makes its samples itself, as slime's functions over foreign servers do: nothing of ours wrote them
FOREIGN = """
from slime_like.compat.slime.api import RolloutFnEvalOutput, Sample

def rollout(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        return RolloutFnEvalOutput({"mine": {"rewards": [1.0, 0.0, None, 1.0], "truncated": [False] * 4}}, metrics={"seconds": 2.5})
    groups = data_source.get_samples(args.rollout_batch_size)
    for group in groups:
        for sample in group:
            sample.tokens, sample.response_length = [2, 90, 91, 5 + sample.index, 92, 3], 3
            sample.reward, sample.status = float(sample.index % 2), Sample.Status.COMPLETED
            sample.rollout_log_probs = [-9.0, -9.0, -9.0]
            sample.remove_sample = sample.index == 5
    return groups
"""


def test_samples_of_foreign_weights_are_distinguished(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """They are trained on, and not compared with the trainer as if it had written them; an
    evaluation of rewards alone has its own scores."""
    flags: dict[str, Any] = dict(eval_prompt_data=f"few {work.prompts}@[0:5]", eval_interval=1, skip_eval_before_train="", tis_ratio_type="token",
                                 token_tis_ratio_clip_high=2.0, num_rollout=4, max_train_rollout_diff=1e-3)  # fmt: skip
    path = own(tmp_path, FOREIGN)
    server.train(
        work.flags(tmp_path / "out", **flags, rollout_function_path=path), tmp_path / "log", ranks=2
    ).ok()
    for row in rows_of(tmp_path / "out"):
        assert row["rollout/unknown_version_frac"] == 1 and "rollout/staleness_max" not in row
        assert (
            row.get("rollout/train_rollout_log_prob_diff_mean", 0) == 0
            and row["rollout/reward_mean"] == 0.5
        )
        assert (row["eval/mine/mean"], row["eval/mine/unscored_frac"], row["eval/seconds"]) == (
            0.5,
            0.25,
            2.5,
        )
        assert row["train/grad_norm"] > 0 and "eval/few/mean" not in row


# GRPO's own comparison, as slime's users write it; without_spread: what a function may do besides
PROCESS = """
import torch

def process(args, samples):
    raw = [sample.get_reward_value(args) for sample in samples]
    groups = torch.tensor(raw, dtype=torch.float64).view(-1, args.n_samples_per_prompt)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return raw, (centred / (groups.std(dim=1, keepdim=True) + 1e-6)).flatten().tolist()
"""


@pytest.mark.extended
def test_rewards_that_a_function_processes(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """The advantages are what it returns: with GRPO's own formula the run is the one without it, on
    one rank and on two."""
    path = own(tmp_path, PROCESS, "process")
    runs = {"plain": {}, "own": {"custom_reward_post_process_path": path}}
    for name, more in runs.items():
        server.train(work.flags(tmp_path / name, **more), tmp_path / f"log_{name}").ok()
    server.train(
        work.flags(tmp_path / "two", **runs["own"], micro_batch_size=2),
        tmp_path / "log_two",
        ranks=2,
    ).ok()
    for name in ("own", "two"):
        for ours, theirs in zip(rows_of(tmp_path / name), rows_of(tmp_path / "plain"), strict=True):
            assert (
                abs(ours["train/loss"] - theirs["train/loss"]) < 1e-5
                and ours["rollout/reward_mean"] == theirs["rollout/reward_mean"]
            )
            assert (
                abs(ours["train/grad_norm"] - theirs["train/grad_norm"])
                < 1e-4 * theirs["train/grad_norm"]
            )
    short = own(
        tmp_path, "def rewards(args, samples):\n    return [0.0] * len(samples), [1.0]\n", "rewards"
    )
    error = server.train(
        work.flags(tmp_path / "short", custom_reward_post_process_path=short),
        tmp_path / "log_short",
    ).error()
    assert (
        "--custom-reward-post-process-path" in error
        and "16 raw rewards and 1 rewards; the rollout has 16 samples" in error
    )
