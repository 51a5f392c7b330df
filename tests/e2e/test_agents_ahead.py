"""Whole runs in which agents play ahead of the training (--async-rollout): weights change within an
episode, and staleness is that of each token."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_like.rollout.recording import load_rollout
from slime_like.samples.episodes import complete
from slime_like.types import NOT_SAMPLED, Sample
from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer
from tests.e2e.test_agents import SIZES, prompts
from tests.e2e.test_stragglers import served
from tests.fake_sglang import FakeServer

# forks after each of four answers, with time between them
AGENT = """
import asyncio
async def play(task):
    messages = [{"role": "user", "content": task.prompt}]
    for turn in range(4):
        answer = (await task.chat(messages, max_tokens=5))["choices"][0]["message"]
        await asyncio.sleep(0.2)
        await task.chat([*messages, answer, {"role": "user", "content": "or else"}], max_tokens=3)
        messages += [answer, {"role": "user", "content": "again"}]
    return len(answer["content"]) / 4
"""


def versions(sample: Sample) -> list[int]:
    """Of all tokens that the model wrote, in all branches."""
    sequences = (sample, *sample.branches)
    return [v for s in sequences for v in s.weight_versions if v != NOT_SAMPLED]


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("engine", ["local", "sglang"])
def test_each_token_is_as_stale_as_its_own_version(
    server: TrainServer, work: Workspace, tmp_path: Path, engine: str, ranks: int
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    flags: dict[str, Any] = SIZES | dict(
        prompt_data=prompts(tmp_path), apply_chat_template=None, custom_rm_path=None, rm_type="zero", n_samples_per_prompt=2, num_rollout=5,
        rollout_batch_size=2, agent_function_path=f"{tmp_path}/agent.py:play", async_rollout="", tis_ratio_type="token",
        token_tis_ratio_clip_high=2.0, rollout_max_response_len=120, max_tokens_per_gpu=1024, save_debug_rollout_data=tmp_path / "r_{rollout_id}",
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        if engine == "sglang":
            fake = stack.enter_context(FakeServer(str(work.model)))
            line = served(
                work, fake, tmp_path / "out", **flags | dict(rollout_local_batch_size=None)
            )
        else:
            line = work.flags(tmp_path / "out", **flags)
        server.train(line, tmp_path / "log", ranks=ranks).ok()
    mixed = 0
    for step, row in enumerate(rows_of(tmp_path / "out")):
        groups = load_rollout(str(tmp_path / "r_{rollout_id}"), step)
        samples = [s for g in groups for s in complete(g.samples)]
        assert row["agent/lost"] == 0 and row["agent/forks"] == 3 and len(samples) == 4
        behind = [step + 1 - v for s in samples for v in versions(s)]
        assert set(behind) <= {0, 1}
        shares = {n: v for n, v in row.items() if n.startswith("rollout/staleness_frac_")}
        assert shares == {
            f"rollout/staleness_frac_{n}": pytest.approx(behind.count(n) / len(behind))
            for n in set(behind)
        }
        for sample in samples:
            written = sample.metadata["agent"]["written_tokens"]
            assert len(versions(sample)) == written, "each answer is in one sequence"
            for own in (sample, *sample.branches):
                trained = [v for v, m in zip(own.weight_versions, own.loss_mask.tolist()) if m]
                assert trained == sorted(trained)
        mixed += sum(len(set(versions(s))) > 1 for s in samples)
    assert mixed, "no weights came within an episode"


PROGRAM = """
import json, os, urllib.request
task = json.load(open("task.json"))
def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
def ask(messages, **more):
    return post("/chat/completions", {"messages": messages, "max_tokens": 5, **more})["choices"][0]["message"]
question = [{"role": "user", "content": task["prompt"]}]
answer = ask(question)
if not task["evaluation"] and task["label"].startswith("g"):
    raise SystemExit("gives up")
ask([*question, {**answer, "content": "edited"}, {"role": "user", "content": "?"}])
post("/rewards", {"reward": len(answer["content"] or "") / 9, "answer": 0})
open("reward", "w").write(str(len(answer["content"] or "") / 5))
"""


@pytest.mark.extended
def test_programs_on_two_ranks_ahead_of_the_training(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Each rank has a gateway; episodes of the next rollout run while this one is trained on, those
    that fail are lost, and evaluations play the same program."""
    (tmp_path / "agent.py").write_text(PROGRAM)
    source = prompts(tmp_path)
    flags = SIZES | dict(
        prompt_data=source, apply_chat_template=None, custom_rm_path=None, rm_type="zero", max_failed_samples=1.0,
        agent_command=f"{sys.executable} {tmp_path}/agent.py", agent_episodes=3, async_rollout="", num_rollout=2, rollout_batch_size=2,
        n_samples_per_prompt=2, advantage_estimator="grpo_turn", agent_turn_penalty=0.01, eval_interval=2, skip_eval_before_train="", eval_prompt_data=f"texts {source}@[0:2]",
    )  # fmt: skip
    line = work.flags(tmp_path / "out", **flags)  # type: ignore[arg-type]
    place = line.index("--agent-command")
    line[place + 1 : place + 3] = [" ".join(line[place + 1 : place + 3])]
    server.train(line, tmp_path / "log", ranks=2).ok()
    rows = [row for row in rows_of(tmp_path / "out") if "rollout/reward_mean" in row]
    assert len(rows) == 2
    for row in rows:
        lost = row["agent/lost"]
        assert row["rollout/failed_frac"] == lost < 1
        assert row["agent/branches"] == pytest.approx(2 - lost)
        assert row["train/grad_norm"] > 0
        assert row["agent/foreign_messages"] == pytest.approx(1 - lost)
    assert rows[1]["rollout/staleness_max"] <= 1
    assert "eval/texts/mean" in rows[1]
