"""The part of verifiers' classic interface that the worker and the test's environment touch, for
machines without the package. It shows that the worker claims, plays and reports; that the package is
driven rightly, only the package itself can show."""

from __future__ import annotations

import importlib
import inspect
from typing import Any


class Rubric:
    has_group_rewards = False

    def __init__(self, funcs: list[Any], weights: list[float]) -> None:
        self.funcs, self.weights = funcs, weights


class MultiTurnEnv:
    def __init__(self, dataset: Any, rubric: Rubric, max_turns: int) -> None:
        self.dataset, self.rubric, self.max_turns = dataset, rubric, max_turns

    def get_dataset(self) -> Any:
        return self.dataset

    get_eval_dataset = get_dataset

    async def run_rollout(self, row: Any, client: Any, model: str, sampling: Any) -> Any:
        state = await self.setup_state({**row, "completion": []})  # type: ignore[attr-defined]
        messages = list(row["prompt"])
        try:
            for turn in range(self.max_turns):
                if turn:
                    more = await self.env_response(messages, state)  # type: ignore[attr-defined]
                    messages += more
                    state["completion"] += more
                answer = await client.chat.completions.create(model=model, messages=messages)
                message = {"role": "assistant", "content": answer.choices[0].message.content}
                messages.append(message)
                state["completion"].append(message)
        except RuntimeError as error:
            return {"error": repr(error), "reward": 0.0}
        values = {**state, "state": state}
        scores = [
            func(**{name: values[name] for name in inspect.signature(func).parameters})
            for func in self.rubric.funcs
        ]
        rewards = zip(scores, self.rubric.weights, strict=True)
        return {"reward": sum(score * weight for score, weight in rewards), "error": None}


def load_environment(name: str, **settings: Any) -> Any:
    return importlib.import_module(name).load_environment(**settings)
