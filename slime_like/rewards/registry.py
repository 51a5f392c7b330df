"""Registry of built-in rewards. Does not import torch, so that workers start in a fraction of a
second."""

from __future__ import annotations

import importlib.util
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from slime_like.extras import pip_install
from slime_like.registry import Registry
from slime_like.rewards import (
    choice,
    code,
    confinement,
    dapo,
    deepscaler,
    exact_match,
    f1,
    gpqa,
    gsm8k,
    ifbench,
    judge,
    math,
    model_client,
    remote,
    task,
)
from slime_like.rewards.label import missing_label

if TYPE_CHECKING:
    from slime_like.rewards.custom import RewardArgs
    from slime_like.samples.slime_sample import SlimeSample

Score = Callable[[str, Any, Mapping[str, Any]], float]  # (response, label, metadata)
ScoreFunction = TypeVar("ScoreFunction", bound=Score)
# (label, metadata) -> why no response to such a row can be graded, or None
AnswerCheck = Callable[[Any, Mapping[str, Any]], str | None]


class Client(Protocol):
    """Of a server that grades. A worker makes one and keeps it."""

    def score(self, args: RewardArgs, sample: SlimeSample) -> Awaitable[object]:
        """Raises RuntimeError if the server has no score for the sample."""
        ...


def _no_problem(label: object, metadata: Mapping[str, object]) -> None:
    """Every row can be scored."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A built-in reward."""

    score: Score  # raises if a sample cannot be scored
    problem: AnswerCheck = _no_problem  # cheap; called for every row of a file
    # does not read the model's text, so it is graded in the calling process; all others are graded
    # in confined workers
    inline: bool = False
    # a server grades; makes its client, in a worker with access to the network, and raises
    # ValueError if it cannot
    connect: Callable[[RewardArgs], Client] | None = None
    keeps_answers: bool = False  # of the server, so that one worker asks for all samples
    key_setting: str | None = None  # names the environment variable with the server's key
    # takes time linear in the text and does not read the metadata; a worker gets many texts at once
    bounded: bool = False
    # a library may run code in the text, which is checked first (`evaluation.py`)
    evaluates: bool = False
    # imports what it needs, before the first sample's deadline starts
    prepare: Callable[[], None] | None = None
    # (import name, distribution) of that; `extra` installs it
    library: tuple[str, str] | None = None
    or_module: str | None = None  # in place of it
    extra: str | None = "tasks"

    def missing_library(self) -> str | None:
        """The distribution to install, and how; None if nothing is missing."""
        if self.library is None:
            return None
        modules = (self.library[0], self.or_module or self.library[0])
        if any(importlib.util.find_spec(module) is not None for module in modules):
            return None
        name = self.library[1]
        command = f"pip install {name}" if self.extra is None else pip_install(self.extra)
        return f"{name}; install it with: {command}"


rewards: Registry[Reward] = Registry("reward (--rm-type)")


def register_reward(
    name: str, problem: AnswerCheck = _no_problem, *, help: str = "", **declared: Any
) -> Callable[[ScoreFunction], ScoreFunction]:
    """Decorator that registers ``score(response, label, metadata) -> float`` as --rm-type `name`.

    It runs in sandboxed worker processes without access to files and sockets; use --custom-rm-path
    for functions that need them. declared: further fields of `Reward`. Raises ValueError if the
    name is taken.
    """

    def register(score: ScoreFunction) -> ScoreFunction:
        rewards.add(name, Reward(score, problem, **declared), help=help)
        return score

    return register


register_reward("zero", inline=True, help="0 for everything (distillation).")(
    lambda response, label, metadata: 0.0
)
register_reward("exact_match", missing_label, bounded=True, help="the response is the label.")(
    exact_match.score
)
register_reward(
    "gsm8k", gsm8k.problem, bounded=True, help="the last number of the response is the label's."
)(gsm8k.score)
_MATH: dict[str, Any] = {"prepare": math.prepare, "library": ("math_verify", "math-verify")}
register_reward("math", math.problem, help="math-verify finds the label in the response.", **_MATH)(
    math.score
)
register_reward(
    "deepscaler",
    missing_label,
    help="math-verify finds the label in the box after </think>.",
    **_MATH,
)(deepscaler.score)
register_reward(
    "dapo", dapo.problem, bounded=True, help="1 or -1: the last 'Answer:' is the label, an integer."
)(dapo.score)
register_reward("f1", missing_label, bounded=True, help="F1 of the words of response and label.")(
    f1.score
)
register_reward("gpqa", gpqa.problem, help="the letter, or the text, of the right choice.")(
    gpqa.score
)
register_reward(
    "choice", choice.problem, bounded=True, help="the option that the response names last."
)(choice.score)
register_reward(
    "ifbench",
    ifbench.problem,
    prepare=ifbench.prepare,
    library=("ifbench", "ifbench"),
    or_module="if_verifiable",
    extra=None,
    help="the metadata's instructions are followed (IFEval, IFBench).",
)(ifbench.score)
register_reward(
    "code", code.problem, prepare=code.prepare, help="the metadata's tests, in a sandbox."
)(code.score)
_SERVED: dict[str, Any] = {"library": ("httpx", "httpx"), "extra": "sglang"}


def _only_served(response: str, label: object, metadata: Mapping[str, object]) -> float:
    raise AssertionError("a server grades")


register_reward("remote_rm", connect=remote.RemoteReward, help="a server (--rm-url).", **_SERVED)(
    _only_served
)
register_reward(
    "judge",
    connect=judge.Judge,
    keeps_answers=True,
    key_setting="judge_key_variable",
    help="a language model (--judge-url) grades the response.",
    **_SERVED,
)(_only_served)
register_reward(
    "reward_model",
    connect=model_client.RewardModelClient,
    keeps_answers=True,
    help="the score of a served reward model with the policy's tokenizer (--rm-url).",
    **_SERVED,
)(_only_served)
register_reward(
    "task",
    task.problem,
    evaluates=True,
    prepare=task.prepare,
    library=("reasoning_gym", "reasoning-gym"),
    help="the data source's own scorer.",
)(task.score)


def reward_of(
    rm_type: str | None, metadata: Mapping[str, object], *, from_metadata: bool = False
) -> str:
    """Name of the reward of a row.

    Args:
        rm_type: --rm-type. If None, rows with a reasoning-gym task use the reward `task`.
        metadata: Of the row; its ``rm_type`` has priority.
        from_metadata: --rm-type-from-metadata: rows may choose a different reward than the run's.
            Otherwise untrusted data could decide which scorers and programs run here.

    Raises:
        ValueError: There is no reward, it is unknown, or the row may not choose it.
    """
    own = metadata.get("rm_type")
    if own is not None and own != rm_type and not from_metadata:
        raise ValueError(
            f"the row's metadata asks for rm_type {own!r}; allow rows to choose their reward with "
            "--rm-type-from-metadata"
        )
    if own is not None:
        return _check_name(own, "metadata rm_type")
    if rm_type is not None:
        return _check_name(rm_type, "--rm-type")
    if task.problem(None, metadata) is not None:
        raise ValueError(
            "no reward: give --rm-type, --custom-rm-path, or --rm-type-from-metadata and rm_type "
            "in its metadata"
        )
    return "task"


def require_library(name: str) -> None:
    """Raise ValueError if the reward's library is not installed. Searches sys.path: do not call it
    for every row."""
    missing = rewards.get(name).missing_library()
    if missing:
        raise ValueError(f"the reward {name} needs {missing}")


def require_confinement(name: str) -> None:
    """Raise ValueError if the reward executes model output and this host cannot confine it."""
    executes = name == "code" or rewards.get(name).evaluates
    if executes and (reason := confinement.refusal()):
        raise ValueError(f"the reward {name} executes text of the model, and {reason}")


def answer_check(
    rm_type: str | None, custom_rm_path: str | None, *, from_metadata: bool = False
) -> AnswerCheck:
    """Function that returns why no response to a row can be graded, or None; for `data.prompts`. A
    custom function accepts every row."""
    available = set[str]()

    def check(label: object, metadata: Mapping[str, object]) -> str | None:
        if custom_rm_path is not None:
            return None
        try:
            name = reward_of(rm_type, metadata, from_metadata=from_metadata)
            if name not in available:
                require_library(name)
                require_confinement(name)
        except ValueError as error:
            return str(error)
        available.add(name)
        return rewards.get(name).problem(label, metadata)

    return check


def _check_name(name: object, source: str) -> str:
    if not isinstance(name, str) or name not in rewards:
        raise ValueError(
            f"{source} {name!r}: unknown reward; legal values: {', '.join(rewards.names())}"
        )
    return name
