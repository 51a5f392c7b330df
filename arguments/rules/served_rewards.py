"""Rules about rewards that a server computes: a reward server, a reward model, a judge."""

from __future__ import annotations

import re
from collections.abc import Callable

from arguments.rules.base import Rule, Settings, problem
from arguments.rules.declared import may_grade
from arguments.rules.distillation import AT_RM_URL, teacher_urls
from slime_like.config import LARGEST_FLOAT32, Problem
from slime_like.rewards.judge import key_of, parse_prompt, prompt_text
from slime_like.text import shown

JUDGE = "judge"
_OWN_PARAMETERS = {  # of the request, and what to use in place
    "messages": "--judge-prompt has the text",
    "model": "use --judge-model",
    "n": "one answer is read",
    "stream": "the answer is read whole",
}
_HTTP = ("http://", "https://")


def missing_server(rm_type: str, s: Settings) -> str | None:
    """The flag with the server of a reward, if it is not given."""
    if rm_type in AT_RM_URL and s.reward.rm_url is None:
        return "--rm-url"
    return "--judge-url" if rm_type == JUDGE and s.judge.judge_url is None else None


def _is_used(s: Settings, *names: str) -> bool:
    return may_grade(s, lambda name: name in names)


def check_reward_server(s: Settings) -> list[Problem]:
    url = s.reward.rm_url
    if url is None:
        return []
    if not url.startswith(_HTTP):
        return problem("rm_url", url, "must start with http:// or https://")
    is_teacher = s.distillation.served and url in teacher_urls(s)
    if is_teacher or _is_used(s, *AT_RM_URL):
        return []
    message = "has no effect without --rm-type remote_rm or reward_model; add it"
    return problem("rm_url", url, message)


def check_judge(s: Settings) -> list[Problem]:
    """The judge's settings, which would otherwise fail its first sample."""
    judge = s.judge
    if judge.judge_url is None:
        return []
    if not judge.judge_url.startswith(_HTTP):
        return problem("judge_url", judge.judge_url, "must start with http:// or https://")
    if not _is_used(s, JUDGE):
        message = "has no effect without --rm-type judge; add it"
        return problem("judge_url", judge.judge_url, message)
    problems = []
    checks: tuple[tuple[str, Callable[[], object], object], ...] = (
        # the value is not shown: it may be the key itself
        ("judge_key_variable", lambda: key_of(judge.judge_key_variable), None),
        (
            "judge_prompt",
            lambda: parse_prompt(prompt_text(judge.judge_prompt)),
            judge.judge_prompt,
        ),
        (
            "judge_score_pattern",
            lambda: _check_pattern(judge.judge_score_pattern),
            judge.judge_score_pattern,
        ),
        (
            "judge_score_range",
            lambda: _check_range(judge.judge_score_range),
            judge.judge_score_range,
        ),
        ("judge_verdicts", lambda: _check_verdicts(judge.judge_verdicts), judge.judge_verdicts),
        (
            "judge_parameters",
            lambda: _check_parameters(judge.judge_parameters),
            judge.judge_parameters,
        ),
    )
    for name, check, value in checks:
        try:
            check()
        except (OSError, ValueError) as error:
            problems += problem(name, value, _as_text(error))
    return problems


def _as_text(error: OSError | ValueError) -> str:
    unread = isinstance(error, OSError | UnicodeDecodeError)
    return f"cannot be read: {error}" if unread else str(error)


def _check_pattern(pattern: str | None) -> None:
    try:
        groups = re.compile(pattern or "").groups
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    if groups > 1:
        raise ValueError(f"has {groups} groups, must have at most one; (?:...) makes no group")


def _check_range(bounds: list[float] | None) -> None:
    if bounds is not None and (len(bounds) != 2 or not bounds[0] < bounds[1]):
        raise ValueError("must be two numbers, the worst score and a higher one, the best")


def _check_verdicts(verdicts: dict[str, object]) -> None:
    for word, reward in verdicts.items():
        if not word.strip() or isinstance(reward, bool) or not isinstance(reward, int | float):
            raise ValueError(f"{word!r}: {reward!r}: must be words with numbers")
        if not abs(reward) <= LARGEST_FLOAT32:  # no float holds every integer of JSON
            raise ValueError(f"{word!r}: {shown(reward)}: the numbers must be finite")


def _check_parameters(parameters: dict[str, object]) -> None:
    for name, instead in _OWN_PARAMETERS.items():
        if name in parameters:
            raise ValueError(f"must not have {name!r}: {instead}")


SERVED_REWARD_RULES: tuple[Rule, ...] = (check_reward_server, check_judge)
