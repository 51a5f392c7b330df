"""A language model as a judge, against a server with OpenAI's protocol on this machine."""

# ruff: noqa: F811 (a fixture that is imported)

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from arguments.schema import JudgeConfig
from slime_like.function_args import FunctionArgs
from slime_like.rewards.grader import Grader
from slime_like.rewards.judge import NAMES, SCORE_RANGE, Scale, key_of, parse_prompt
from slime_like.types import Sample, SampleStatus
from tests.unit.rewards.test_grader import make
from tests.unit.rewards.test_remote import Server, server  # noqa: F401

KEY = "sk-very/secret+0123456789"


def said(content: object, end: str = "stop") -> tuple[int, bytes]:
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": end}
    return 200, json.dumps({"choices": [choice]}).encode()


def judge_settings(server: Server, **more: Any) -> FunctionArgs:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    config = JudgeConfig(judge_url=url, judge_model="wise", **more)
    return FunctionArgs(dataclasses.asdict(config))


def grader(server: Server, reward: dict[str, Any] | None = None, **more: Any) -> Grader:
    return Grader(
        **{
            "rm_type": "judge",
            "rm_timeout_s": 100.0,
            "rm_cache_size": 100,
            "settings": judge_settings(server, **more),
            **(reward or {}),
        }
    )


def asked(i: int, response: str) -> Sample:
    return dataclasses.replace(make(i, response, label="4"), text="2+2?")


def prompt_of(body: dict[str, Any]) -> str:
    (message,) = body["messages"]
    return message["content"]


def test_what_it_is_asked_and_what_comes_back(server: Server) -> None:
    """Its prompt shows question, label and the answer without thoughts; equal answers to a prompt are
    asked about once, now and in the next rollout."""
    server.answer = lambda body, n: said("Right, but long.\n**Score:** 7.5")
    samples = [asked(i, f"<think>{i}</think> four") for i in range(20)]
    with grader(server) as g:
        first = g.grade(samples)
        second = g.grade([asked(30, "five"), samples[0]])
    assert {s.reward for s in [*first, *second]} == {0.75}
    assert len(server.requests) == 2, "one for 'four', one for 'five'"
    body = server.requests[0]
    assert {**body, "messages": []} == {
        "model": "wise",
        "messages": [],
        "temperature": 0,
        "max_tokens": 1024,
    }
    prompt = prompt_of(body)
    assert "Question:\n2+2?\n" in prompt and "Reference answer:\n4\n" in prompt
    assert "four" in prompt and "<think>" not in prompt


def test_a_template_verdicts_and_parameters(server: Server, tmp_path: Path) -> None:
    template = tmp_path / "judge.txt"
    template.write_text("{{ metadata.rubric }}|{{ response }}|\\frac{a}{b}")
    verdicts = {"CORRECT": 1, "INCORRECT": -1, "NOT_ATTEMPTED": 0.25}
    server.answer = lambda body, n: said(
        {"r": "It is not CORRECT, but INCORRECT.", "n": "NOT_ATTEMPTED"}[prompt_of(body)[2]]
    )
    more = {"judge_prompt": str(template), "judge_verdicts": verdicts}
    parameters = {"temperature": None, "max_tokens": None, "max_completion_tokens": 9}
    with grader(server, **more, judge_parameters=parameters) as g:
        wrong, none = g.grade([make(i, t, metadata={"rubric": "R"}) for i, t in enumerate("rn")])
    assert (wrong.reward, none.reward) == (-1.0, 0.25)
    asked = {prompt_of(request) for request in server.requests}
    assert asked == {"R|r|\\frac{a}{b}", "R|n|\\frac{a}{b}"}
    assert server.requests[0].keys() == {"model", "messages", "max_completion_tokens"}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (said("I like it."), "gave no score: no line \"Score: x\" is in its answer, which ends 'I like it.'"),
        (said("Score: 11"), "11 is beyond --judge-score-range 0 10"),
        (said("<think>Score: 3</think>Hm"), 'no line "Score: x"'),
        (said("> Score: 10\nI ignore that.\nScore: 1"), "its answer has the scores 1 and 10"),
        (said("Score: 5", "length"), "was cut at its token limit; raise max_tokens in --judge-parameters"),
        (said(None, "content_filter"), "was withheld by a content filter"),
        (said(None, "tool_calls"), "answered without text (finish_reason 'tool_calls')"),
        ((200, b'{"error": "no such model"}'), 'answered no chat completion: {"error": "no such model"}'),
        ((404, b'{"error": "no such model"}'), 'answered 404 ({"error": "no such model"})'),
    ],
)  # fmt: skip
def test_a_judge_without_a_score_fails_the_sample(
    server: Server, answer: tuple[int, bytes], words: str
) -> None:
    """Never a 0; the reason names the judge; and the failure is not kept for the next time."""
    server.answer = lambda body, n: answer if n == 1 else said("Score: 10")
    with grader(server) as g:
        (lost,) = g.grade([make(1, "x")])
        assert lost.status == SampleStatus.FAILED and lost.reward is None
        assert words in lost.metadata["failure"] and "/v1/chat/completions" in g.last_failure
        assert g.last_counts["raised"] == 1 and g.last_counts["graded"] == 0
        (again,) = g.grade([make(1, "x")])
        assert again.reward == 1.0


def test_passing_faults_cost_time_and_lasting_ones_the_sample(server: Server) -> None:
    server.answer = lambda body, n: (
        said("Score: 1") if "busy" in prompt_of(body) and n > 2 else (429, b"slow down")
    )
    with grader(server, {"rm_timeout_s": 4.0}) as g:
        busy, broken = g.grade([make(0, "busy"), make(1, "broken")])
    assert busy.reward == pytest.approx(0.1)
    assert "answered 429 (slow down), " in broken.metadata["failure"]


ESCAPED = KEY.replace("/", "\\/").replace("+", "\\u002B")  # as some servers write JSON


@pytest.mark.parametrize("key", [KEY, ESCAPED])
@pytest.mark.parametrize(
    ("status", "text", "words"),
    [
        # each message is cut within the key
        (401, "x" * 180 + " wrong key KEY", "answered 401"),
        (200, "x" * 60 + " wrong key KEY", "answered no JSON"),
        (200, '{"error": {"message": "Incorrect API key provided for this deployment, ........: KEY"}}',
         "answered no chat completion"),
        (200, '{"choices": [{"message": {"content": "KEY' + "." * 90 + '"}}]}', "gave no score"),
        (200, '{"choices": [{"message": {"content": null}, "finish_reason": "no, not with this KEY"}]}', "without text"),
    ],
)  # fmt: skip
def test_the_key_is_sent_and_shown_nowhere(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    key: str,
    status: int,
    text: str,
    words: str,
) -> None:
    """A server that repeats it does not bring it, or a part of it, into the metadata or a message,
    and the settings, which recordings and checkpoints may hold, have only the variable's name."""
    monkeypatch.setenv("JUDGES_KEY", KEY)
    server.answer = lambda body, n: (status, text.replace("KEY", key).encode())
    with grader(server, judge_key_variable="JUDGES_KEY") as g:
        (lost,) = g.grade([make(1, "x")])
        settings = pickle.dumps(g.args)
    assert server.headers_seen[-1]["Authorization"] == f"Bearer {KEY}"
    parts = [KEY[start : start + 4] for start in range(len(KEY) - 3)]
    shown = lost.metadata["failure"] + str(g.last_failure) + "".join(capfd.readouterr())
    assert words in shown and [part for part in parts if part in shown] == []
    assert KEY.encode() not in settings and b"JUDGES_KEY" in settings


def test_a_stand_in_for_a_key_changes_no_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGES_KEY", "7")
    server.answer = lambda body, n: said("Score: 7")
    with grader(server, judge_key_variable="JUDGES_KEY") as g:
        (graded,) = g.grade([make(1, "x")])
    assert graded.reward == pytest.approx(0.7)


@pytest.mark.parametrize("value", ["sk-1\nsk-2", "the key", "sk-\u2026"])
def test_what_no_header_can_have_is_no_key(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("JUDGES_KEY", value)
    with pytest.raises(ValueError, match="whose value is no key") as caught:
        key_of("JUDGES_KEY")
    assert "sk-" not in str(caught.value)


def test_a_key_that_is_missing_stops_the_run_without_being_shown(server: Server) -> None:
    with (
        grader(server, judge_key_variable="sk_very_secret_0123456789") as g,
        pytest.raises(RuntimeError, match="names no environment variable that is set") as caught,
    ):
        g.grade([make(1, "x")])
    assert "secret" not in str(caught.value)


def test_no_more_requests_at_a_time_than_allowed(server: Server) -> None:
    running: list[int] = []
    most: list[int] = []

    def answer(body: dict[str, Any], n: int) -> tuple[int, bytes]:
        running.append(1)
        most.append(len(running))
        for _ in range(200_000):
            pass
        running.pop()
        return said("Score: 1")

    server.answer = answer
    with grader(server, {"rm_concurrency": 3}) as g:
        assert len(g.grade([make(i, str(i)) for i in range(30)])) == 30
    assert len(server.requests) == 30 and max(most) <= 3


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 7", 0.7), ("score 7/10", 0.7), ("**Score**: 7.0", 0.7), ("Score: 7 out of 10.", 0.7),
        ("<think>Score: 1</think>\nScore: 9", 0.9), ("Score = 10.", 1.0), ('{\n"score": 7\n}', 0.7),
        ("**Final score: 7.5/10**\r\n", 0.75), ("Overall Score：**7** / 10\n\nGood.", 0.7),
        ("Score: 7\n...\nFinal score: 7.0", 0.7),
        # a quotation within a sentence is none
        ("I ignore the line 'Score: 10' in the answer.\nScore: 0", 0.0),
    ],
)  # fmt: skip
def test_scores_are_read(text: str, score: float) -> None:
    assert Scale(None, SCORE_RANGE, {}).read(text) == pytest.approx(score)


@pytest.mark.parametrize(
    "text",
    [
        "", "7", "Score: x", "Score: -1", "Score: \u22121", "Score: .5", "Score: ten", "Score (0-10): 7",
        "Score: 7 (max score: 10)", "Score: 7 out of 10 (score 10 = perfect)", "Score: 7,5", "Score: 7-8",
        "Overall score\n1. Correctness", "Overall score\n1.", "Score: 7/100", "Score: 7%",
        "Score: 0. I ignored the line 'Score: 10' in the answer", "> Score: 10\nScore: 0",
    ],
)  # fmt: skip
def test_what_is_no_score_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        Scale(None, SCORE_RANGE, {}).read(text)


def test_a_score_of_another_range_and_of_ones_own_pattern() -> None:
    assert Scale(None, (-1, 1), {}).read("Score: -1") == 0
    assert Scale(None, (1, 5), {}).read("Score: 4/5") == 0.75
    with pytest.raises(ValueError, match='no line "Score: x"'):
        Scale(None, (1, 5), {}).read("Score: 4/10")
    assert Scale(r"\[\[(\d+)\]\]", SCORE_RANGE, {}).read("Not [[1]], but [[8]]") == 0.8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ respone }}", f"unknown name 'respone'; legal names: {', '.join(NAMES)}"),
        ("{{ prompt }}", "neither {{ response }} nor {{ answer }}"),
        ("{% if %}", "is no Jinja template: line 1"),
    ],
)
def test_a_template_is_checked_at_the_start(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_prompt(text)


def test_an_answer_is_no_template() -> None:
    """What the policy writes is inserted as it is."""
    assert parse_prompt("[{{ answer }}]").render(answer="{{ label }}", label="4") == "[{{ label }}]"
