"""Whole runs in which agents wait between rollouts (--partial-rollout)."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slime_like.rollout.recording import load_rollout
from slime_like.samples.episodes import complete
from slime_like.types import Sample
from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer
from tests.e2e.test_agents import SIZES, prompts
from tests.e2e.test_stragglers import served
from tests.fake_sglang import FakeServer

# ends after one to seven turns, the same for all samples of a prompt; its log has each beginning
AGENT = """
import os
async def play(task):
    with open({log!r}, "a") as log:
        log.write(f"{{task.sample_id}} {{os.getpid()}}\\n")
    messages = [{{"role": "user", "content": task.prompt}}]
    for _ in range(1 + task.seed % 4 * 2):
        answer = (await task.chat(messages, max_tokens=6))["choices"][0]["message"]
        messages += [answer, {{"role": "user", "content": "again"}}]
    return len(answer["content"]) / 4
"""
PROGRAM = """
import json, os, urllib.request
task = json.load(open("task.json"))
messages = [{"role": "user", "content": task["prompt"]}]
for _ in range(1 + task["seed"] % 4 * 2):
    body = json.dumps({"messages": messages, "max_tokens": 6}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [answer, {"role": "user", "content": "again"}]
open("reward", "w").write(str(len(answer["content"] or "") / 4))
"""


def flags_of(folder: Path, **changes: Any) -> dict[str, Any]:
    flags = SIZES | dict(
        prompt_data=prompts(folder), apply_chat_template=None, custom_rm_path=None, rm_type="zero", n_samples_per_prompt=2, rollout_batch_size=2,
        over_sampling_batch_size=4, partial_rollout="", rollout_slice_len=8, num_rollout=4, rollout_max_response_len=200, max_tokens_per_gpu=2048,
        token_tis_ratio_clip_high=2.0, save_debug_rollout_data=folder / "r_{rollout_id}",
    )  # fmt: skip
    return flags | changes


def recorded(folder: Path, rollouts: int) -> list[Sample]:
    return [
        s
        for step in range(rollouts)
        for g in load_rollout(str(folder / "r_{rollout_id}"), step)
        for s in complete(g.samples)
    ]


def versions(sample: Sample) -> list[int]:
    return [v for v, m in zip(sample.weight_versions, sample.loss_mask.tolist(), strict=True) if m]


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [1, 2])
def test_agents_wait_for_the_next_rollout(
    server: TrainServer, work: Workspace, tmp_path: Path, ranks: int
) -> None:
    """Episodes that a rollout does not need continue in the next one under new weights: each begins
    once and is trained on once, with the version of each token; a resumed run begins those again that
    waited when it was saved."""
    log = tmp_path / "log_of_agents"
    (tmp_path / "agent.py").write_text(AGENT.format(log=str(log)))
    agent = dict(
        agent_function_path=f"{tmp_path}/agent.py:play", save=tmp_path / "c", tis_ratio_type="token"
    )
    out = tmp_path / "out"
    line = work.flags(out, **flags_of(tmp_path, **agent))
    server.train(line, tmp_path / "log", ranks=ranks).ok()
    rows = rows_of(out)
    assert sum(row["rollout/groups_resumed"] for row in rows) > 0
    assert all(row["agent/lost"] == row["agent/restarted"] == 0 for row in rows)
    samples = recorded(tmp_path, 4)
    assert len({s.sample_id for s in samples}) == len(samples) == 16
    begun = Counter(line.split()[0] for line in log.read_text().splitlines())
    assert set(begun.values()) == {1} and begun.keys() >= {str(s.sample_id) for s in samples}
    mixed = [s for s in samples if len(set(versions(s))) > 1]
    assert mixed and all(versions(s) == sorted(versions(s)) for s in samples)
    for sample in samples:
        numbers = sample.metadata["agent"]
        assert numbers["written_tokens"] == len(versions(sample)) and numbers["branches"] == 1
        assert numbers["answers"] % 2 == 1
    for step, row in enumerate(rows):
        assert row["train/grad_norm"] >= 0 and row["rollout/staleness_max"] <= step
    waiting = int(rows[-1]["rollout/groups_waiting"])
    assert waiting > 0
    more = work.flags(out, **flags_of(tmp_path, **agent, num_rollout=6, load=tmp_path / "c"))
    server.train(more, tmp_path / "log2", ranks=ranks).ok()
    later = rows_of(out)[4:]
    assert sum(row["agent/restarted"] for row in later) > 0
    for sample in recorded(tmp_path, 6)[16:]:
        assert min(versions(sample)) > 4, "nothing of an agent that is gone is trained on"


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["local", "sglang"])
def test_programs_wait_for_the_next_rollout(
    server: TrainServer, work: Workspace, tmp_path: Path, engine: str
) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    flags = flags_of(tmp_path, agent_command="PROGRAM", tis_ratio_type="token")
    with FakeServer(str(work.model)) as fake:
        fake.pace_s = lambda body: 0.05
        if engine == "sglang":
            flags |= dict(rollout_slice_len=None, rollout_local_batch_size=None)
            line = served(work, fake, tmp_path / "out", **flags)
        else:
            line = work.flags(tmp_path / "out", **flags)
        line[line.index("PROGRAM")] = f"{sys.executable} {tmp_path}/agent.py"
        server.train(line, tmp_path / "log").ok()
    rows = rows_of(tmp_path / "out")
    assert sum(row["rollout/groups_resumed"] for row in rows) > 0
    assert all(row["agent/lost"] == 0 for row in rows)
    samples = recorded(tmp_path, 4)
    assert any(len(set(versions(s))) > 1 for s in samples)
    assert len({s.sample_id for s in samples}) == len(samples)


@pytest.mark.extended
@pytest.mark.parametrize(("ranks", "slices"), [(1, None), (2, None), (2, 8)])
def test_agents_wait_while_servers_have_new_weights(
    server: TrainServer, work: Workspace, tmp_path: Path, ranks: int, slices: int | None
) -> None:
    """What a rollout does not need is aborted on the server, in the middle of an answer, and continues
    in the next one; with --rollout-slice-len, in rounds of all ranks."""
    log = tmp_path / "log_of_agents"
    (tmp_path / "agent.py").write_text(AGENT.format(log=str(log)))
    flags = flags_of(
        tmp_path, agent_function_path=f"{tmp_path}/agent.py:play", rollout_slice_len=slices, tis_ratio_type="token",
        rollout_local_batch_size=None, save=tmp_path / "c", eval_interval=2, skip_eval_before_train="", eval_prompt_data=f"few {tmp_path}/texts.jsonl@[0:2]",
    )  # fmt: skip
    with FakeServer(str(work.model)) as fake:
        fake.pace_s = lambda body: 0.02
        line = served(work, fake, tmp_path / "out", **flags)
        server.train(line, tmp_path / "log", ranks=ranks).ok()
        assert bool(fake.count("/abort_request")) == (slices is None)
        played = [line.split()[0] for line in log.read_text().splitlines()]
        again = flags | dict(num_rollout=6, load=tmp_path / "c")
        line = served(work, fake, tmp_path / "out", **again)
        server.train(line, tmp_path / "log2", ranks=ranks).ok()
    rows = [row for row in rows_of(tmp_path / "out") if "rollout/reward_mean" in row]
    rows, resumed = rows[:4], rows[4:]
    assert len(resumed) == 2 and sum(row["agent/restarted"] for row in resumed) > 0
    # episodes of the saved groups had ended, which keep their tokens, or begin anew: none goes on
    old = [[v <= 4 for v in versions(sample)] for sample in recorded(tmp_path, 6)[16:]]
    assert all(all(each) or not any(each) for each in old) and not all(map(any, old))
    assert len(rows) == 4 and sum(row["rollout/groups_resumed"] for row in rows) > 0
    assert all(row["agent/lost"] == row["agent/restarted"] == 0 for row in rows)
    assert all(row["rollout/failed_frac"] == 0 for row in rows) and "eval/few/mean" in rows[3]
    samples = recorded(tmp_path, 4)
    assert len({s.sample_id for s in samples}) == len(samples) == 16
    begun = Counter(played)
    for sample_id in ("0", "1"):  # evaluations have the same numbers
        begun[sample_id] -= 2
    assert set(begun.values()) == {1} and begun.keys() >= {str(s.sample_id) for s in samples}
    mixed = [s for s in samples if len(set(versions(s))) > 1]
    assert mixed and all(versions(s) == sorted(versions(s)) for s in samples)
    for sample in samples:
        numbers = sample.metadata["agent"]
        assert numbers["written_tokens"] == len(versions(sample)) and numbers["branches"] == 1
    assert all(row["rollout/staleness_max"] <= step for step, row in enumerate(rows))
