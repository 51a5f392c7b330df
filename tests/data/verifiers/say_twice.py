"""A classic environment of verifiers: a word is asked for, then asked for again; two rewards, with
weights. And one with a tool."""

from __future__ import annotations

from typing import Any

import verifiers as vf

ROWS = [
    {"prompt": [{"role": "user", "content": f"Say {word}."}], "answer": word}
    for word in ("red", "blue", "green", "fail")
]


def _dataset(rows: list[dict[str, Any]]) -> Any:
    try:
        from datasets import Dataset
    except ImportError:  # the stand-in of verifiers takes rows
        return rows
    return Dataset.from_list(rows)


def _texts(completion: Any) -> list[str]:
    found = [each if isinstance(each, dict) else each.model_dump() for each in completion]
    return [str(each["content"]) for each in found if each["role"] == "assistant"]


def said(completion: Any, answer: str) -> float:
    """The share of answers with the word."""
    texts = _texts(completion)
    return sum(answer in text for text in texts) / max(len(texts), 1)


def short(completion: Any, state: Any) -> float:
    return float(state["asked"] == 1 and all(len(text) < 20 for text in _texts(completion)))


class SayTwice(vf.MultiTurnEnv):
    async def setup_state(self, state: Any, **more: Any) -> Any:
        state["asked"] = 0
        return state

    async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
        if state["answer"] == "fail":
            raise RuntimeError("this row breaks")
        state["asked"] += 1
        return [{"role": "user", "content": "Again."}]


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: Any.
    """
    return 2 * number


def right(completion: Any, answer: str) -> float:
    return float(_texts(completion)[-1] == answer)


def load_environment(kind: str = "turns") -> Any:
    if kind == "tools":
        rows = [{"prompt": [{"role": "user", "content": "Twice 21?"}], "answer": "42"}]
        return vf.ToolEnv(
            dataset=_dataset(rows), rubric=vf.Rubric(funcs=[right]), tools=[double], max_turns=4
        )
    rubric = vf.Rubric(funcs=[said, short], weights=[1.0, 0.5])
    return SayTwice(dataset=_dataset(ROWS), rubric=rubric, max_turns=2)
