"""`say_twice` as a taskset of verifiers 0.4: tasks, their rewards, and a program that plays them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["SayTwice", "SayTwiceHarness"]


class Data(vf.TaskData):
    answer: str


class SayTask(vf.Task[Data]):
    @vf.reward
    async def said(self, trace: Any) -> float:
        """The share of answers with the word."""
        texts = [str(m.content) for m in trace.branches[-1].messages if m.role == "assistant"]
        return sum(self.data.answer in text for text in texts) / max(len(texts), 1)

    @vf.reward(weight=0.5)
    async def short(self, trace: Any) -> float:
        texts = [str(m.content) for m in trace.branches[-1].messages if m.role == "assistant"]
        return float(len(texts) == 2 and all(len(text) < 20 for text in texts))


class SayTwice(vf.Taskset[SayTask, vf.TasksetConfig]):
    def load(self) -> Iterable[SayTask]:
        for word in ("red", "blue", "green", "fail"):
            yield SayTask(Data(prompt=f"Say {word}.", answer=word), self.config.task)


class SayTwiceHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
    ) -> ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            for turn in range(2):
                if turn and data.answer == "fail":
                    raise RuntimeError("this row breaks")
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                answer.raise_for_status()
                messages += [
                    answer.json()["choices"][0]["message"],
                    {"role": "user", "content": "Again."},
                ]
        return ProgramResult(exit_code=0, stdout="", stderr="")
