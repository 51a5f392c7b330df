"""slime-like report: what it reads, what it warns of, and that hostile text stays text."""

from __future__ import annotations

import http.client
import json
import math
import re
import socket
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_like.metrics.logger import MetricsLogger
from slime_like.metrics.timeline import PhaseTimeline
from slime_like.report.alerts import alerts
from slime_like.report.page import json_in_html, live_data, page, runs_data
from slime_like.report.read import curves, read_run, run_names, state_of
from slime_like.report.rollouts import Samples, read_samples
from slime_like.report.serve import ReportServer
from slime_like.rollout.recording import (
    remove_token_values,
    save_rollout,
    save_token_texts,
    save_token_values,
)
from slime_like.samples.groups import SampleGroup
from slime_like.types import Sample, SampleStatus
from tests.paths import ROOT

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><!--"


class Characters:
    """A tokenizer of one token a character."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def sample(group: int, number: int, response: str, reward: float) -> Sample:
    prompt = "say it:"
    tokens = torch.tensor([ord(c) for c in prompt + response])
    length = len(response)
    return Sample(
        group_id=group,
        sample_id=number,
        tokens=tokens,
        response_length=length,
        loss_mask=torch.tensor([i != 1 for i in range(length)]),
        rollout_log_probs=torch.linspace(-2.0, -0.5, length),
        reward=reward,
        status=SampleStatus.COMPLETED,
        weight_versions=tuple(1 + i // 3 for i in range(length)),
        text=prompt,
        response=response,
        label="it",
        metadata={"turns": [{"tool": "<b>search</b>"}]},
    )


def write_run(folder: Path, *, rollouts: int = 2, wanted: int | None = None) -> Path:
    """Metrics and recorded rollouts, by the code that a run writes them with."""
    template = str(folder / "rollouts/{rollout_id}")
    with MetricsLogger(folder) as logger:
        for step in range(1, rollouts + 1):
            logger.log(step, {"rollout/reward_mean": 0.1 * step, "perf/step_s": 1.0})
    for rollout in range(rollouts):
        first = 10 * rollout
        samples = (
            sample(first, first, HOSTILE, 1.0),
            sample(first, first + 1, "wrong\nline", math.nan if rollout else 0.0),
        )
        groups = [SampleGroup(first, samples)]
        save_rollout(template, rollout, groups)
        save_token_texts(template, rollout, groups, Characters())
        for rank, each in enumerate(samples):
            size = each.response_length
            old = each.rollout_log_probs + 0.25
            values = {
                "advantages": torch.full((size,), 1.0 - 2 * rank),
                "old_log_probs": old,
                "ref_log_probs": old - torch.linspace(0, 1, size),
                "entropy": torch.rand(size),
            }
            save_token_values(template, rollout, rank, {str(each.sample_id): values})
    record = {"config": {"--num-rollout": wanted or rollouts, "--lr": 1e-3}, "changed": ["--lr"]}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_stacks_and_traces(tmp_path: Path) -> None:
    """The last request of each rank; none of a rank that nobody asked."""
    write_run(tmp_path)
    for name in ("stacks", "profile"):
        (tmp_path / name).mkdir()
    before = state_of(tmp_path)
    (tmp_path / "stacks/rank0.txt").write_text('{"rank": 0}\n--- one\nold\n--- two\nnew\n')
    (tmp_path / "stacks/rank1.txt").write_text('{"rank": 1}\n')
    (tmp_path / "profile/rank0_rollouts1-2.json.gz").touch()
    (run,) = runs_data([read_run(tmp_path)])["runs"]
    assert run["stacks"] == {0: "--- two\nnew"}
    assert run["profile"] == ("rank0_rollouts1-2.json.gz",)
    assert state_of(tmp_path) != before


def test_the_program_imports_neither_torch_nor_the_trainer(tmp_path: Path) -> None:
    write_run(tmp_path)
    code = (
        "import sys; from slime_like.report.__main__ import main; "
        f"sys.argv = ['report', {str(tmp_path)!r}]; status = main(); "
        "print(status, sorted({'torch', 'transformers', 'slime_like.trainer', 'slime_like.rollout'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr
    assert (tmp_path / "report.html").is_file()


def unpacked(text: str) -> np.ndarray:
    import base64

    halves = np.frombuffer(base64.b64decode(text), "<u2").astype("<u4") << 16
    return halves.view("<f4")


def test_samples_have_what_was_recorded(tmp_path: Path) -> None:
    found = read_samples([read_run(write_run(tmp_path))], 100)
    c = found.columns
    assert c["id"] == ["10", "11", "0", "1"] and c["rollout"] == [2, 2, 1, 1]
    assert c["reward"] == [1, "nan", 1, 0] and c["advantage"] == [1, -1, 1, -1]
    assert c["response"][0] == HOSTILE and found.prompts == ["say it:"]
    details = found.details[1]
    assert details["diff"] == 0.25  # the same for all tokens
    assert np.allclose(unpacked(details["log_prob"]), np.linspace(-2, -0.5, 10), rtol=0.004)
    kl = np.linspace(0, 1, 10)
    assert np.allclose(unpacked(details["kl"]), np.exp(-kl) + kl - 1, rtol=0.004, atol=1e-6)
    assert {"tokens", "mask", "versions", "entropy", "advantage"} <= details.keys()
    assert found.vocabularies[0][str(ord("w"))] == "w" and not found.problems


class Metaspace:
    """Its tokens begin with a space, and a text does not."""

    def decode(self, ids: list[int]) -> str:
        return "".join(" " + chr(i) for i in ids).lstrip()


def test_texts_of_tokens_keep_their_space(tmp_path: Path) -> None:
    groups = [SampleGroup(0, (sample(0, 0, "ab", 1.0),))]
    path = save_token_texts(str(tmp_path / "{rollout_id}"), 0, groups, Metaspace())
    assert json.loads(path.read_text())[str(ord("b"))] == " b"


def test_runs_with_other_tokenizers_keep_their_texts(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, rollouts=1) for name in ("a", "b")]
    texts = folders[1] / "rollouts/1.tokens.json"
    texts.write_text(json.dumps({str(ord("w")): "another"}))
    found = read_samples([read_run(folder) for folder in folders], 100)
    assert [words[str(ord("w"))] for words in found.vocabularies] == ["w", "another"]


def test_a_run_inside_another_is_not_read_with_it(tmp_path: Path) -> None:
    write_run(tmp_path, rollouts=1)
    write_run(tmp_path / "second", rollouts=2)
    assert read_samples([read_run(tmp_path)], 100).columns["rollout"] == [1, 1]


def test_what_another_layout_trained_with_goes(tmp_path: Path) -> None:
    template = str(tmp_path / "{rollout_id}")
    for rank in range(3):
        save_token_values(template, 0, rank, {"0": {"entropy": torch.rand(2)}})
    save_token_values(template, 10, 0, {"0": {"entropy": torch.rand(2)}})
    remove_token_values(template, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["11.train0.safetensors"]


def test_tokens_that_are_not_trained_on_leave_the_advantage_constant(tmp_path: Path) -> None:
    write_run(tmp_path, rollouts=1)
    advantages = {"0": {"advantages": torch.tensor([2.0, 0.0] + [2.0] * (len(HOSTILE) - 2))}}
    save_token_values(str(tmp_path / "rollouts/{rollout_id}"), 0, 0, advantages)
    assert read_samples([read_run(tmp_path)], 100).columns["advantage"][0] == 2


def test_the_newest_samples_are_kept(tmp_path: Path) -> None:
    (write_run(tmp_path, rollouts=3) / "rollouts/1.safetensors").write_bytes(b"not read")
    found = read_samples([read_run(write_run(tmp_path, rollouts=3))], 3)
    assert found.columns["rollout"] == [3, 3, 2] and found.left_out == 3 and not found.problems


def test_a_damaged_recording_is_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "rollouts/2.safetensors").write_bytes(b"no")
    found = read_samples([read_run(tmp_path)], 100)
    assert found.columns["rollout"] == [1, 1] and "2.json" in found.problems[0]


def test_hostile_text_is_no_markup(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path))]
    text = page(runs, read_samples(runs, 100))
    assert HOSTILE not in text and "\\u003c/script\\u003e" in text
    assert "connect-src 'none'" in text
    for data in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL):
        json.loads(data)
    outside = re.sub(r"<(script|style).*?</\1>", "", text, flags=re.DOTALL)
    assert not re.search(r"(src|href)=\"?(https?:)?//", outside)
    assert json.loads(json_in_html({"a": HOSTILE + "\u2028"})) == {"a": HOSTILE + "\u2028"}


def test_curves_keep_what_is_not_finite_apart(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path) as logger:
        logger.log(1, {"a": 1.0, "b": 2.0})
        logger.log(2, {"a": math.nan})
        logger.log(3, {"a": -math.inf, "b": 0.1 + 0.2})
    found = curves(read_run(tmp_path))
    assert found["metrics"] == {"a": [1, None, None], "b": [2, None, 0.3]}
    assert found["bad"] == {"a": [2, 3]}


def run_with(folder: Path, rows: list[dict[str, float]], **record: Any) -> list[dict[str, str]]:
    with MetricsLogger(folder) as logger:
        for step, row in enumerate(rows, start=1):
            logger.log(step, row)
    (folder / "run.json").write_text(json.dumps(record))
    return alerts(read_run(folder))


def test_a_good_run_has_no_alert(tmp_path: Path) -> None:
    rows = [
        {"rollout/reward_mean": 0.1 * i, "perf/step_s": 1.0, "train/skipped_steps": 0.0}
        for i in range(9)
    ]
    assert run_with(tmp_path, rows, config={"--num-rollout": 9}) == []


@pytest.mark.parametrize(
    ("last", "level", "words"),
    [
        ({"rollout/reward_mean": math.nan}, "error", "rollout/reward_mean was NaN"),
        (
            {"engine/evictions": 1.0},
            "error",
            "rollout engines were lost in 1 rollout, first in rollout 9",
        ),
        ({"train/skipped_steps": 2.0}, "error", "optimizer steps were skipped"),
        ({"health/truncation": 1.0}, "warning", "health/truncation held"),
        ({"perf/step_s": 9.0}, "warning", "more than 3 times the median of 1 s"),
    ],
)
def test_a_fault_is_an_alert(
    tmp_path: Path, last: dict[str, float], level: str, words: str
) -> None:
    rows = [{"perf/step_s": 1.0, "engine/evictions": 0.0}] * 8
    (found,) = run_with(tmp_path, [*rows, {"perf/step_s": 1.0, **last}])
    assert found["level"] == level and words in found["text"] and found["metric"] in last


def test_a_total_is_an_alert_where_it_rises(tmp_path: Path) -> None:
    rows = [{"train/skipped_steps": float(i >= 3)} for i in range(9)]
    (found,) = run_with(tmp_path, rows)
    assert found["text"].endswith("in 1 rollout, first in rollout 4")


def test_an_infinite_setting(tmp_path: Path) -> None:
    write_run(tmp_path, rollouts=1)
    (tmp_path / "run.json").write_text('{"config": {"--clip": Infinity}}')
    run = read_run(tmp_path)
    assert json.loads(json_in_html(runs_data([run])))["runs"][0]["config"] == {"--clip": "Infinity"}


def test_a_reward_that_is_gamed(tmp_path: Path) -> None:
    rows = [
        {"rollout/reward_mean": 0.1 * i, "eval/heldout/mean": 0.9 - 0.05 * i} for i in range(10)
    ]
    (found,) = run_with(tmp_path, rows)
    assert "eval/heldout/mean fell by 0.4" in found["text"]


def test_a_slow_rank(tmp_path: Path) -> None:
    rows = [
        [["train", 1e9 + i, 1.0, 1.0 if rank == 1 else 0.3] for i in range(9)] for rank in range(3)
    ]
    (tmp_path / "timeline").mkdir()
    for rank, lines in enumerate(rows):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"timeline/rank{rank}.jsonl").write_text(text + '["train", 1')
    (found,) = run_with(tmp_path, [{"a": 1.0}])
    assert found["text"].startswith("rank 1 worked for 9 s, the others for 2.7 s")


def test_the_timeline_is_what_the_page_reads(tmp_path: Path) -> None:
    timeline = PhaseTimeline(tmp_path, 3)
    for phase in ("generate", "after generate", "train", "after train", "end"):
        timeline.enter(phase)
    run_with(tmp_path, [{"a": 1.0}])
    found = read_run(tmp_path).timeline
    assert list(found) == [3] and [row[0] for row in found[3]] == ["generate", "train"]
    assert all(row[2] >= 0 and row[3] >= 0 for row in found[3])


def test_a_fresh_run_replaces_the_timeline(tmp_path: Path) -> None:
    for rank in (0, 1):
        PhaseTimeline(tmp_path, rank)
    (tmp_path / "timeline/rank0.jsonl").write_text('["of an earlier run", 0, 1, 1]\n')
    PhaseTimeline(tmp_path, 0, resumed=False, world_size=1)
    (left,) = (tmp_path / "timeline").iterdir()
    assert left.name == "rank0.jsonl" and not left.read_text()


def test_a_run_that_ended_early_and_its_errors(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("error: the engine is gone\n")
    found = run_with(tmp_path, [{"a": 1.0}], config={"--num-rollout": 5})
    assert [alert["text"][:15] for alert in found] == [
        "the engine is g",
        "1 of 5 rollouts",
    ]


def test_names_distinguish_runs() -> None:
    assert run_names([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert run_names([Path("/a/run"), Path("/b/run")]) == ["a/run", "b/run"]
    assert run_names([Path("/a/run"), Path("/a/run")]) == ["run (1)", "run (2)"]


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "slime_like.report", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "has no metrics.jsonl" in done.stderr


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    write_run(tmp_path)

    def runs() -> list[Any]:
        return [read_run(tmp_path)]

    with ReportServer(
        0,
        lambda: page(runs(), Samples(), live=True),
        lambda timeline: live_data(runs(), timeline=timeline),
        lambda: state_of(tmp_path),
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def get(
    server: ReportServer, page: str, host: str = "localhost", *, tag: str = ""
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    path = page if page.startswith("/") else server.root + page
    connection.request("GET", path, headers={"Host": host, "If-None-Match": tag})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_a_browser_that_does_not_read_blocks_no_other(
    server: ReportServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.make_page = lambda: "x" * 50_000_000  # more than a socket takes
    with socket.create_connection(("127.0.0.1", server.server_port)) as stalled:
        stalled.sendall(f"GET {server.root} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        stalled.recv(1)  # the answer has begun
        assert get(server, "runs.json")[0] == 200
    assert "Traceback" not in capsys.readouterr().err


def test_a_running_run_is_followed(server: ReportServer, tmp_path: Path) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, text = get(server, "")
    assert status == 200 and "connect-src 'self'" in text
    first = json.loads(get(server, "runs.json")[1])["runs"][0]
    assert first["steps"] == [1, 2] and not {"config", "timeline"} & first.keys()
    assert "timeline" in json.loads(get(server, "runs.json?timeline")[1])["runs"][0]
    tag = f'"{state_of(tmp_path)}"'
    assert get(server, "runs.json", tag=tag) == (304, "")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 1.0, "a": 1.0}\n{"step": 4, "ti')
    status, text = get(server, "runs.json", tag=tag)
    assert status == 200 and json.loads(text)["runs"][0]["steps"] == [1, 2, 3]
    assert get(server, "../run.json")[0] == 404
    assert get(server, "runs.json", host="evil.example:80")[0] == 403


@pytest.mark.parametrize("path", ["/", "/runs.json", "//runs.json", "/x/runs.json", "/ü"])
def test_the_page_has_an_address_that_nobody_guesses(server: ReportServer, path: str) -> None:
    status, text = get(server, urllib.parse.quote(path))
    assert status == 404 and "steps" not in text
    assert len(server.root) > 20
