"""The task of tests/e2e/agent_task.py for verifiers' classic releases: say the digit that is asked
for, and once more."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from say_twice import _dataset, _texts


def right(completion: Any, answer: str) -> float:
    return sum(text == answer for text in _texts(completion)) / 2


class SameDigit(vf.MultiTurnEnv):
    async def setup_state(self, state: Any, **more: Any) -> Any:
        return state

    async def env_response(self, messages: Any, state: Any, **more: Any) -> Any:
        return [{"role": "user", "content": ":"}]


def load_environment() -> Any:
    rows = [
        {"prompt": [{"role": "user", "content": f"{digit}:"}], "answer": digit}
        for digit in "0123" * 4
    ]
    rubric = vf.Rubric(funcs=[right], weights=[1.0])
    return SameDigit(dataset=_dataset(rows), rubric=rubric, max_turns=2)
