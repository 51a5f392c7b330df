"""Runs whose rewards are a judge's, against a server with OpenAI's protocol on this machine."""

# ruff: noqa: F811 (a fixture that is imported)

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer
from tests.unit.rewards.test_judge import prompt_of, said
from tests.unit.rewards.test_remote import Server
from tests.unit.rewards.test_remote import server as judge  # noqa: F401

KEY = "sk-very-secret-9876543210"


def judged(work: Workspace, judge: Server, out: Path, **more: Any) -> list[str]:
    flags = {
        **{"custom_rm_path": None, "rm_num_workers": None, "rm_type": "judge", "rm_timeout_s": 60},
        **{"judge_url": f"http://127.0.0.1:{judge.server_port}/v1", "judge_model": "wise"},
        **{"judge_key_variable": "JUDGE_KEY", "save": out / "c"},
    }
    return work.flags(out, **flags | more)


def test_a_run_learns_from_a_judge(
    server: TrainServer, work: Workspace, judge: Server, tmp_path: Path
) -> None:
    """Two ranks ask it, again after an error, and the key is in no file of the run."""
    failed: list[int] = []

    def answer(body: dict[str, Any], n: int) -> tuple[int, bytes]:
        if len(failed) < 2:
            failed.append(n)
            return 503, b"busy"
        return said(f"Score: {len(prompt_of(body)) % 11}")

    judge.answer = answer
    hook = f"tests.e2e.faults:set_variable JUDGE_KEY {KEY}"
    done = server.train(judged(work, judge, tmp_path), tmp_path / "log", ranks=2, hook=hook).ok()
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["rollout/failed_frac"] == 0 and row["train/grad_norm"] > 0
        assert 0 < row["rollout/reward_mean"] < 1
    assert len(failed) == 2
    prompts = [prompt_of(body) for body in judge.requests]
    assert all("spell " in prompt and " backward" in prompt for prompt in prompts)
    assert {headers["Authorization"] for headers in judge.headers_seen} == {f"Bearer {KEY}"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and KEY not in done.out + done.err
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_a_judge_without_a_score_ends_the_run(
    server: TrainServer, work: Workspace, judge: Server, tmp_path: Path
) -> None:
    judge.answer = lambda body, n: said("I would rather not say.")
    hook = f"tests.e2e.faults:set_variable JUDGE_KEY {KEY}"
    done = server.train(judged(work, judge, tmp_path), tmp_path / "log", hook=hook)
    assert done.status != 0
    assert "--max-failed-samples" in done.err and "gave no score" in done.err
    assert rows_of(tmp_path) == []
