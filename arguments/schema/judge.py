"""A language model that grades responses (--rm-type judge)."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import CheckedSettings, arg

_URL = "judge_url"


@dataclass(frozen=True, slots=True)
class JudgeConfig(CheckedSettings):
    judge_url: str | None = arg(
        None,
        "Base URL of the judge's chat completions, such as https://host/v1.",
        required_with="rm_type=judge",
    )
    judge_model: str | None = arg(
        None, "Name of the judge at --judge-url.", needs=_URL, required_with="judge_url"
    )
    judge_key_variable: str | None = arg(
        None,
        "Name of the environment variable with the key of --judge-url, for example OPENAI_API_KEY. "
        "Default: no key is sent.",
        metavar="NAME",
        needs=_URL,
    )
    judge_prompt: str | None = arg(
        None,
        "File with the Jinja template of the judge's prompt: prompt, messages, response, answer "
        "(the response after its thoughts), label, metadata. Default: a grade from 0 to 10.",
        metavar="FILE",
        needs=_URL,
    )
    judge_score_pattern: str | None = arg(
        None,
        "Regular expression of the score in the judge's answer: the last match, and of it the "
        "first group. Default: a line of its own, 'Score: x'; two that differ fail the sample.",
        metavar="REGEX",
        needs=_URL,
    )
    judge_score_range: list[float] | None = arg(
        None,
        "Worst and best score of the judge, which become the rewards 0 and 1. Default: 0 10.",
        nargs="+",
        metavar="SCORE",
        needs=_URL,
    )
    judge_verdicts: dict[str, object] = arg(
        {},
        "Words in place of a score, with their rewards, as a JSON object: "
        '{"CORRECT": 1, "INCORRECT": 0}. The last one in the judge\'s answer counts.',
        needs=_URL,
        excludes=("judge_score_pattern", "judge_score_range"),
    )
    judge_parameters: dict[str, object] = arg(
        {},
        "Further parameters of the request, as a JSON object; temperature is 0 and max_tokens 1024 "
        "if it does not say otherwise, and null leaves one out.",
        needs=_URL,
    )
