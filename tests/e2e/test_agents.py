"""Whole runs with agents: the gateway trains as a custom generate function does, bit by bit; what
agents do wrong costs their own samples."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_like.batching.turn_credit import TURNS
from slime_like.rollout.recording import load_rollout, save_rollout
from slime_like.samples.episodes import complete
from slime_like.samples.groups import SampleGroup
from slime_like.types import Sample
from tests.e2e.agent_task import Workers, write_task
from tests.e2e.helpers import WORDS, Workspace, rows_of, weights_of
from tests.e2e.programs import TrainServer, free_port
from tests.e2e.test_stragglers import served, slow_first
from tests.fake_sglang import FakeServer

CUSTOM = """
async def generate(model, episode):
    await model.write(episode, max_new_tokens=6)
    episode.observe("<|user|>again<|assistant|>")
    await model.write(episode, max_new_tokens=6)
"""
AGENT = """
async def play(task):
    messages = [{"role": "user", "content": task.prompt}]
    for more in ("again", None):
        answer = await task.chat(messages, max_tokens=6)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": more}]
"""
HTTP = """
import httpx, sys
async def play(task):
    assert task.url.startswith("http://127.0.0.1:")
    messages = [{"role": "user", "content": task.prompt}]
    async with httpx.AsyncClient(headers={"x-api-key": task.api_key}, timeout=60) as client:
        for more in ("again", None):
            body = {"model": "m", "messages": messages, "max_tokens": 6}
            answer = (await client.post(task.url + "/v1/messages", json=body)).json()
            messages.append({"role": "assistant", "content": answer["content"]})
            messages.append({"role": "user", "content": more})
"""
SIZES: dict[str, Any] = dict(
    use_dynamic_batch_size="", max_tokens_per_gpu=512, micro_batch_size=None, num_rollout=1, num_steps_per_rollout=1,
    rollout_local_batch_size=1,  # what is decoded together changes the last bits of log-probs
    rollout_max_response_len=64, n_samples_per_prompt=3, input_key="text",
)  # fmt: skip


def prompts(folder: Path) -> Path:
    path = folder / "texts.jsonl"
    rows = [{"text": f"spell {word}", "answer": word[::-1]} for word in WORDS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# what of the sampler's choices is replayed, and the number that says that the trainer agrees with them
REPLAYS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "routed_experts": dict(
        use_rollout_routing_replay="", num_steps_per_rollout=2, moe_router_dtype="fp32"
    ),
    "sampling_mask": dict(renormalize_sampled_log_probs="", rollout_top_k=9, rollout_top_p=0.8),
}


@pytest.mark.extended
@pytest.mark.parametrize("replay", REPLAYS)
def test_the_gateway_trains_as_a_custom_generate_function_does(
    server: TrainServer, work: Workspace, tmp_path: Path, replay: str
) -> None:
    """The same task through a function in the process, task.chat and Anthropic's API over HTTP: the
    same tokens, log-probs, routed experts, token sets and weights, to the last bit."""
    for name, text in (("custom", CUSTOM), ("agent", AGENT), ("http", HTTP)):
        (tmp_path / f"{name}.py").write_text(text)
    shared = SIZES | dict(prompt_data=prompts(tmp_path)) | REPLAYS[replay]
    if replay == "routed_experts":
        shared["hf_checkpoint"] = work.expert_model
    custom = dict(custom_generate_function_path=f"{tmp_path}/custom.py:generate")
    runs = {"custom": custom | dict(apply_chat_template="")}
    for name in ("agent", "http"):
        path = f"{tmp_path}/{name}.py:play"
        runs[name] = dict(agent_function_path=path, apply_chat_template=None)
    found = []
    for name, flags in runs.items():
        more = dict(save_hf=tmp_path / name / "hf", save_debug_rollout_data=tmp_path / name / "r")
        line = work.flags(tmp_path / name, **(shared | flags | more))  # type: ignore[arg-type]
        server.train(line, tmp_path / f"{name}.log").ok()
        groups = load_rollout(str(tmp_path / name / "r"), 0)
        found.append((weights_of(tmp_path / name / "hf"), groups, rows_of(tmp_path / name)[-1]))
    weights, groups, row = found[0]
    assert row["train/grad_norm"] > 0
    assert 0 < row["rollout/train_rollout_log_prob_diff_max"] < 1e-5, "recomputed by the trainer"
    if replay == "routed_experts":
        assert row["rollout/moe_routing_disagreement"] == 0 < row["train/moe_replay_disagreement"]
    for others, other_groups, other_row in found[1:]:
        assert all(torch.equal(weights[key], others[key]) for key in weights)
        assert other_row["train/loss"] == row["train/loss"]
        assert other_row["agent/answers"] == 2 and other_row["agent/branches"] == 1
        for ours, theirs in zip(groups, other_groups, strict=True):
            for a, b in zip(complete(ours.samples), complete(theirs.samples), strict=True):
                assert torch.equal(a.tokens, b.tokens) and torch.equal(a.loss_mask, b.loss_mask)
                assert a.rollout_log_probs is not None and b.rollout_log_probs is not None
                assert torch.equal(a.rollout_log_probs, b.rollout_log_probs)
                for name in ("routed_experts", "sampling_mask"):
                    ours_of_it, theirs_of_it = getattr(a, name), getattr(b, name)
                    assert (ours_of_it is None) == (theirs_of_it is None) == (name != replay)
                    assert ours_of_it is None or torch.equal(ours_of_it, theirs_of_it)
                assert (a.weight_versions, a.reward) == (b.weight_versions, b.reward)


@pytest.mark.slow
def test_an_agent_learns_over_two_turns(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """From random weights: the mean reward of both turns rises from below 0.4 to above 0.8. On two
    cores its 25 rollouts took 66 s next to other jobs."""
    write_task(tmp_path)
    flags = dict(
        hf_checkpoint=tmp_path / "model", prompt_data=tmp_path / "prompts.jsonl", input_key="text", apply_chat_template=None,
        agent_function_path=f"{tmp_path}/agent.py:play", use_dynamic_batch_size="", max_tokens_per_gpu=2048, micro_batch_size=None,
        num_rollout=25, rollout_batch_size=16, n_samples_per_prompt=8, num_steps_per_rollout=2, rollout_max_response_len=8, lr=3e-3,
    )  # fmt: skip
    server.train(work.flags(tmp_path / "out", **flags), tmp_path / "log").ok()  # type: ignore[arg-type]
    rewards = [row["rollout/reward_mean"] for row in rows_of(tmp_path / "out")]
    assert rewards[0] < 0.4
    assert sum(rewards[-5:]) / 5 > 0.8


BRANCHING = """
async def play(task):
    first = [{"role": "user", "content": task.prompt}]
    answer = (await task.chat(first, max_tokens=5))["choices"][0]["message"]
    asked = [*first, answer, {"role": "user", "content": "again"}]
    for _ in range(1 + task.sample_id % 3):  # forks
        last = (await task.chat(asked, max_tokens=4))["choices"][0]["message"]
    claimed = {"role": "assistant", "content": "never said"}
    await task.chat([*first, claimed, {"role": "user", "content": "so"}], max_tokens=3)
    return len(last["content"]) / 4
"""


def by_turns(sample: Sample) -> Sample:
    """The same episode with a sequence for each answer."""
    found = []
    for s in (sample, *sample.branches):
        assert s.rollout_log_probs is not None
        place = 0
        for trained, run in itertools.groupby(s.loss_mask.tolist()):
            count = len(list(run))
            a, b = place, place + count
            place = b
            if trained:
                found.append(
                    dataclasses.replace(
                        s,
                        tokens=s.tokens[: s.prompt_length + b],
                        response_length=count,
                        loss_mask=s.loss_mask[a:b],
                        rollout_log_probs=s.rollout_log_probs[a:b],
                        weight_versions=s.weight_versions[a:b],
                        sampling_mask=None if s.sampling_mask is None else s.sampling_mask[a:b],
                        routed_experts=None
                        if s.routed_experts is None
                        else s.routed_experts[: s.prompt_length + b],
                        branches=(),
                    )
                )
    metadata = dict(sample.metadata)
    if answers := metadata.get(TURNS):
        spans = [[[0, n, a]] for own in answers["spans"] for _, n, a in own]
        metadata[TURNS] = {**answers, "spans": spans}
    return dataclasses.replace(found[0], branches=tuple(found[1:]), metadata=metadata)


# folder of the recorded cut, and what is on two ranks
CUTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("paths", {}),
    ("turns", {}),
    ("turns_data", {}),
    ("turns_tensor", {"tensor_model_parallel_size": 2}),
    ("turns_context", {"context_parallel_size": 2}),
    ("turns_pipeline", {"pipeline_model_parallel_size": 2}),
)
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": dict(advantage_estimator="grpo", policy_loss_type="gspo", gspo_ratio_level="turn", loss_reduction="rollout_mean", num_steps_per_rollout=2),
    "reinforce_plus_plus": dict(normalize_advantages="", gamma=0.9),
    "ppo": dict(gamma=0.95, lambd=0.9, critic_lr=1e-3),
    "routed_experts": dict(advantage_estimator="grpo", **REPLAYS["routed_experts"]),
    "sampling_mask": dict(advantage_estimator="grpo", num_steps_per_rollout=2, **REPLAYS["sampling_mask"]),
}  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("method", METHODS)
def test_the_loss_does_not_depend_on_the_cut(
    server: TrainServer, work: Workspace, tmp_path: Path, method: str
) -> None:
    """A recorded rollout of agents that fork, as the tree's paths, as single answers, and on two
    data-, tensor-, context- and pipeline-parallel ranks: the same loss and weights."""
    (tmp_path / "agent.py").write_text(BRANCHING)
    shared = SIZES | dict(prompt_data=prompts(tmp_path), apply_chat_template=None, policy_loss_type="ppo", advantage_estimator=method, adam_eps=1e-4) | METHODS[method]  # fmt: skip
    agent = dict(
        agent_function_path=f"{tmp_path}/agent.py:play", custom_rm_path=None, rm_type="zero"
    )
    made = shared | agent | dict(save_debug_rollout_data=tmp_path / "paths")
    if method == "routed_experts":
        made["hf_checkpoint"] = shared["hf_checkpoint"] = work.expert_model
    if method != "sampling_mask":
        made["observation_loss_coef"] = 0.1
    server.train(work.flags(tmp_path / "made", **made), tmp_path / "log").ok()  # type: ignore[arg-type]
    groups = load_rollout(str(tmp_path / "paths"), 0)
    samples = [s for g in groups for s in complete(g.samples)]
    assert {s.num_branches for s in samples} == {1, 2, 3}
    row = rows_of(tmp_path / "made")[-1]
    assert row["agent/foreign_messages"] == 1 and row["agent/branches"] == 3
    assert 0 < row["rollout/train_rollout_log_prob_diff_max"] < 1e-5, "recomputed by the trainer"
    if method != "sampling_mask":
        assert row["train/observation_loss"] > 1, "of a model that has not seen such words"
    assert all(s.has(method) for s in samples if method in ("routed_experts", "sampling_mask"))
    cut = [SampleGroup(g.group_id, tuple(map(by_turns, complete(g.samples)))) for g in groups]
    save_rollout(str(tmp_path / "turns"), 0, cut)
    found = []
    experts = ("turns_expert", {"expert_model_parallel_size": 2})
    for name, layout in (*CUTS, experts) if method == "routed_experts" else CUTS:
        out = tmp_path / f"{name}{'_'.join(layout)}"
        if method == "routed_experts" and "tensor_model_parallel_size" in layout:
            layout = layout | {"sequence_parallel": ""}
        more = dict(
            load_debug_rollout_data=tmp_path / name.split("_")[0],
            save_hf=out / "hf",
            custom_rm_path=None,
            rm_type="zero",
        )
        line = work.flags(out, **(shared | more | layout))  # type: ignore[arg-type]
        server.train(line, tmp_path / "log", ranks=1 if name in ("paths", "turns") else 2).ok()
        found.append((rows_of(out)[-1], weights_of(out / "hf")))
    full_run, weights = found[0]
    assert full_run["train/grad_norm"] > 0
    for other, other_weights in found[1:]:
        assert abs(other["train/loss"] - full_run["train/loss"]) <= 1e-6
        assert abs(other["train/grad_norm"] - full_run["train/grad_norm"]) <= 1e-5
        for key in weights:
            torch.testing.assert_close(other_weights[key], weights[key], atol=3e-6, rtol=0)
        if method == "ppo":
            assert full_run["train/value_loss"] > 0
            assert abs(other["train/value_loss"] - full_run["train/value_loss"]) <= 1e-6


@pytest.mark.extended
def test_agents_in_front_of_servers(server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    """SGLang's protocol: the gateway is on rank 0; episodes of a rollout that has enough groups are
    ended, and nothing of them is trained on."""
    (tmp_path / "agent.py").write_text(AGENT)
    with FakeServer(str(work.model)) as fake:
        fake.pace_s = slow_first(1)
        flags = SIZES | dict(
            prompt_data=prompts(tmp_path), apply_chat_template=None, agent_function_path=f"{tmp_path}/agent.py:play", rollout_batch_size=3,
            over_sampling_batch_size=4, num_rollout=2, rollout_local_batch_size=None, save_debug_rollout_data=tmp_path / "r_{rollout_id}",
        )  # fmt: skip
        line = served(work, fake, tmp_path / "out", **flags)
        server.train(line, tmp_path / "log", ranks=2).ok()
        assert fake.count("/abort_request") >= 1
    for step, row in enumerate(rows_of(tmp_path / "out")):
        assert row["rollout/groups_kept"] == 3 and row["rollout/failed_frac"] == 0
        assert row["agent/answers"] == 2 and row["agent/lost"] == 0
        assert 0 < row["rollout/train_rollout_log_prob_diff_max"] < 1e-4
        groups = load_rollout(str(tmp_path / "r_{rollout_id}"), step)
        for sample in (s for g in groups for s in complete(g.samples)):
            trained = {v for v, m in zip(sample.weight_versions, sample.loss_mask.tolist()) if m}
            assert trained == {step + 1}


@pytest.mark.extended
def test_an_environment_by_name(server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    """A game of Gymnasium's, with credit by turn; each prompt is one seed, and evaluations see the
    sum of the rewards."""
    source = prompts(tmp_path)
    flags = SIZES | dict(
        prompt_data=source, apply_chat_template=None, custom_rm_path=None, rm_type="zero", save_debug_rollout_data=tmp_path / "r_{rollout_id}",
        agent_environment="gymnasium:CliffWalking-v1?max_episode_steps=3&actions=a,b,c,d", rollout_max_response_len=300, agent_max_turns=4,
        advantage_estimator="grpo_turn", num_rollout=2, eval_interval=2, skip_eval_before_train="", eval_prompt_data=f"texts {source}@[0:2]",
    )  # fmt: skip
    server.train(work.flags(tmp_path / "out", **flags), tmp_path / "log").ok()  # type: ignore[arg-type]
    rows = [row for row in rows_of(tmp_path / "out") if "rollout/reward_mean" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["agent/lost"] == 0 and row["agent/foreign_messages"] == 0
        assert 1 <= row["agent/answers"] <= 4 and row["agent/branches"] == 1
        assert row["rollout/reward_mean"] == pytest.approx(row["agent/answer_rewards"]), "of turns"
        assert 0 < row["rollout/train_rollout_log_prob_diff_max"] < 1e-4
    samples = [s for g in load_rollout(str(tmp_path / "r_{rollout_id}"), 0) for s in g.samples]
    rewards = [reward for s in samples for reward in s.metadata["agent_answers"]["rewards"]]
    assert set(rewards) <= {0, -1, -100}
    assert rows[0]["agent/answer_rewards"] == pytest.approx(sum(rewards) / len(samples))
    assert rows[1]["eval/texts/mean"] == rows[1]["eval/texts/mean"] <= 0


@pytest.mark.extended
def test_workers_elsewhere_play_the_tasks_of_a_run(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Training and evaluation over HTTP; a worker's error costs one sample, and what it wrote is not
    trained on."""
    port, key = free_port(), "a-key-of-all-workers"
    (tmp_path / "keys").write_text(f"# the farm\n{key}\n")
    source = prompts(tmp_path)
    flags = SIZES | dict(
        prompt_data=source, apply_chat_template=None, custom_rm_path=None, rm_type="zero", max_failed_samples=1.0, agent_worker_keys=tmp_path / "keys",
        agent_port=port, num_rollout=2, eval_interval=2, skip_eval_before_train="", eval_prompt_data=f"texts {source}@[0:2]",
        save_debug_rollout_data=tmp_path / "r_{rollout_id}",
    )  # fmt: skip
    with Workers(port, key, 3) as workers:
        done = server.train(work.flags(tmp_path / "out", **flags), tmp_path / "log")  # type: ignore[arg-type]
    done.ok()
    assert not workers.problems
    rows = [row for row in rows_of(tmp_path / "out") if "rollout/reward_mean" in row]
    samples = sum(len(g.samples) for g in load_rollout(str(tmp_path / "r_{rollout_id}"), 0))
    assert [row["agent/lost"] * samples for row in rows] == pytest.approx([1, 0])
    assert len(workers.claimed) == 2 * samples + 2 and rows[1]["eval/texts/mean"] > 0.25
    assert len({task["api_key"] for task in workers.claimed}) == len(workers.claimed)
    assert sum(task["evaluation"] for task in workers.claimed) == 2
    seeds = Counter(task["seed"] for task in workers.claimed if not task["evaluation"])
    assert set(seeds.values()) == {SIZES["n_samples_per_prompt"]}
    for row in rows:
        assert row["train/grad_norm"] > 0 and row["agent/workers_lost"] == 0
        assert 0 < row["rollout/train_rollout_log_prob_diff_max"] < 1e-4


DIGITS = """
class Digits:
    def reset(self, *, seed, row):
        self.label, self.turn = row["label"], 0
        return row["prompt"]
    def step(self, action):
        self.turn += 1
        return ":", 0.5 * (action[:1] == self.label), self.turn == 2
"""


@pytest.mark.slow
def test_a_model_learns_an_environment(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """From random weights, with credit by turn: what the answers of an episode earn rises from below
    0.4 to above 0.8."""
    write_task(tmp_path)
    (tmp_path / "digits.py").write_text(DIGITS)
    flags = dict(
        hf_checkpoint=tmp_path / "model", prompt_data=tmp_path / "prompts.jsonl", input_key="text", apply_chat_template=None,
        agent_environment=f"{tmp_path}/digits.py:Digits", use_dynamic_batch_size="", max_tokens_per_gpu=2048, micro_batch_size=None,
        num_rollout=25, rollout_batch_size=16, n_samples_per_prompt=8, num_steps_per_rollout=2, rollout_max_response_len=8, lr=3e-3,
        advantage_estimator="grpo_turn", custom_rm_path=None, rm_type="zero", agent_max_answer_tokens=1,
    )  # fmt: skip
    server.train(work.flags(tmp_path / "out", **flags), tmp_path / "log").ok()  # type: ignore[arg-type]
    rewards = [row["agent/answer_rewards"] for row in rows_of(tmp_path / "out")]
    assert rewards[0] < 0.4
    assert sum(rewards[-5:]) / 5 > 0.8
