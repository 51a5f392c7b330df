"""The rewards that come with the project. Nothing here imports torch: workers start in a fraction
of a second."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime_like.registry import Registry
from slime_like.rewards import code, confinement, exact_match, gsm8k, math, remote, task


@dataclass(frozen=True, slots=True)
class Reward:
    """score(response, label, metadata) -> float; raises where a sample cannot be scored.

    problem(label, metadata) -> why no response to such a row can be scored, or None; cheap, it is
    asked for every row of a file. inline: looks at no text of a model, so it is graded in the
    calling process. All others are graded in confined workers. bounded: takes time linear in the
    text and does not read the metadata; a worker is given many texts at once. evaluates(response):
    whether evaluating this text may run code; it is then graded in a process of its own. None:
    never. prepare: imports what it needs, before the first sample's deadline runs. library: (import
    name, distribution) of that, which the extra
    `extra` installs.
    """

    score: Callable[[str, Any, Mapping[str, Any]], float]
    problem: Callable[[Any, Mapping[str, Any]], str | None]
    inline: bool = False
    bounded: bool = False
    evaluates: Callable[[str], bool] | None = None
    prepare: Callable[[], None] | None = None
    library: tuple[str, str] | None = None
    extra: str = "tasks"

    def missing_library(self) -> str | None:
        """The distribution that has to be installed, and how; or None."""
        if self.library is None or importlib.util.find_spec(self.library[0]) is not None:
            return None
        return f"{self.library[1]}; install it with: pip install 'slime_like[{self.extra}]'"


rewards: Registry[Reward] = Registry("reward (--rm-type)")
rewards.add(
    "zero",
    Reward(lambda response, label, metadata: 0.0, lambda label, metadata: None, inline=True),
)
rewards.add("exact_match", Reward(exact_match.score, exact_match.problem, bounded=True))
rewards.add("gsm8k", Reward(gsm8k.score, gsm8k.problem, bounded=True))
rewards.add(
    "math",
    Reward(math.score, math.problem, prepare=math.prepare, library=("math_verify", "math-verify")),
)
rewards.add("code", Reward(code.score, code.problem, prepare=code.prepare))
rewards.add(
    "remote_rm",
    Reward(
        remote.only_remote,
        remote.problem,
        prepare=remote.prepare,
        library=("httpx", "httpx"),
        extra="sglang",
    ),
)
rewards.add(
    "task",
    Reward(
        task.score,
        task.problem,
        evaluates=task.evaluates,
        prepare=task.prepare,
        library=("reasoning_gym", "reasoning-gym"),
    ),
)


AnswerCheck = Callable[
    [Any, Mapping[str, Any]], str | None
]  # (label, metadata) -> what is wrong with them, or None


def reward_of(
    rm_type: str | None, metadata: Mapping[str, Any], *, from_metadata: bool = False
) -> str:
    """The reward of a row.

    Args:
        rm_type: --rm-type; None: `task` where the row carries a reasoning-gym task, which thereby
        scores itself. metadata: Of the row. ``rm_type`` in it comes first. from_metadata:
        --rm-type-from-metadata: the row may choose another reward than the run's. Data that someone
            else wrote would otherwise decide which scorers and programs run here.

    Raises:
        ValueError: There is none, one that does not exist, or one that the row may not choose.
    """
    own = metadata.get("rm_type")
    if own is not None and own != rm_type and not from_metadata:
        raise ValueError(
            f"the row's metadata asks for rm_type {own!r}; allow rows to choose their reward with --rm-type-from-metadata"
        )
    if own is not None:
        return _known(own, "metadata rm_type")
    if rm_type is not None:
        return _known(rm_type, "--rm-type")
    if task.problem(None, metadata) is not None:
        raise ValueError(
            "no reward: give --rm-type, --custom-rm-path, or --rm-type-from-metadata and rm_type in its metadata"
        )
    return "task"


def require_library(name: str) -> None:
    """Raises ValueError where the reward's library is not installed. Walks sys.path: not to be
    called for every row."""
    missing = rewards.get(name).missing_library()
    if missing:
        raise ValueError(f"the reward {name} needs {missing}")


def require_confinement(name: str) -> None:
    """Raises ValueError where text would be executed and this host cannot confine it."""
    executes = name == "code" or rewards.get(name).evaluates is not None
    if executes and (words := confinement.refusal()):
        raise ValueError(f"the reward {name} executes text of the model, and {words}")


def answer_check(
    rm_type: str | None, custom_rm_path: str | None, *, from_metadata: bool = False
) -> AnswerCheck:
    """Why no response to a row can be graded, or None; for `data.prompts`. A custom function takes
    any row."""
    ready: set[str] = set()

    def check(label: Any, metadata: Mapping[str, Any]) -> str | None:
        if custom_rm_path is not None:
            return None
        try:
            name = reward_of(rm_type, metadata, from_metadata=from_metadata)
            if name not in ready:
                require_library(name)
                require_confinement(name)
        except ValueError as error:
            return str(error)
        ready.add(name)
        return rewards.get(name).problem(label, metadata)

    return check


def _known(name: Any, source: str) -> str:
    if not isinstance(name, str) or name not in rewards.names():
        raise ValueError(
            f"{source} {name!r}: unknown reward; legal values: {', '.join(rewards.names())}"
        )
    return name
