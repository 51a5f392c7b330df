"""Episodes that are paused when a rollout has enough, and continue in the next one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from slime_like.agents.command import MARK, run_command
from slime_like.agents.rollouts import AgentGenerate, Task
from slime_like.agents.server import Gateway
from slime_like.agents.sessions import SessionLimits
from slime_like.engines.base import GenerateOutput, GenerateRequest, GenerationClient
from slime_like.rollout.episode import Model
from slime_like.samples.episodes import complete
from slime_like.types import Prompt, Sample, SampleStatus
from tests.unit.agents.test_server import END, TOKENIZER, SamplingParams


class Writer:
    """Writes an answer of `words` words to each prompt, in parts where it is asked for fewer tokens.
    log: every token that it wrote, with the version of then."""

    def __init__(self, words: int = 12) -> None:
        self.words, self.version = words, 1
        self.log: list[tuple[int, int]] = []
        self.calls = self.running = self.most = 0
        self._rest: dict[tuple[int, ...], tuple[int, ...]] = {}

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        rest = self._rest.pop(request.prompt_tokens, None)
        if rest is None:
            self.calls += 1
            text = " ".join(f"w{self.calls}x{i}" for i in range(self.words))
            rest = (*TOKENIZER(text, add_special_tokens=False)["input_ids"], END)
        tokens = rest[: sampling.max_new_tokens]
        if left := rest[len(tokens) :]:
            self._rest[(*request.prompt_tokens, *tokens)] = left
        self.log += [(t, self.version) for t in tokens]
        count = len(tokens)
        versions = (self.version,) * count
        return GenerateOutput(
            request.sample_id, tokens, (-0.1 * self.version,) * count, "length" if left else "stop", versions
        )  # fmt: skip


def model_of(writer: Writer) -> Model:
    sampling = SamplingParams(max_new_tokens=2000)
    return Model(cast(GenerationClient, writer), TOKENIZER, sampling, lambda i, place: place + i)


@pytest.fixture
def makes() -> Iterator[Any]:
    made = []

    def make(play: Any, *, episodes: int = 8, timeout_s: float = 30.0) -> AgentGenerate:
        gateway = Gateway("127.0.0.1", 0, max_body=10**6)
        made.append(
            AgentGenerate(
                "test",
                play,
                gateway,
                end_ids=frozenset({END}),
                limits=SessionLimits(),
                timeout_s=timeout_s,
                episodes=episodes,
                pauses=True,
                by_token=True,
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def blank(count: int) -> list[Sample]:
    return [Sample.empty(Prompt(3, "question", (1, 2)), 5 + i) for i in range(count)]


def trained(sample: Sample) -> list[tuple[int, int, float]]:
    """Token, version and log-prob of what is trained on, of all branches."""
    found: list[tuple[int, int, float]] = []
    for each in (sample, *sample.branches):
        assert each.rollout_log_probs is not None
        rows = zip(
            each.tokens[each.prompt_length :].tolist(),
            each.weight_versions,
            each.rollout_log_probs.tolist(),
            each.loss_mask.tolist(),
            strict=True,
        )
        found += [(t, v, round(p, 4)) for t, v, p, m in rows if m]
    return found


def played(
    agent: AgentGenerate,
    writer: Writer,
    samples: list[Sample],
    limit: int | None,
    *,
    rounds: int = 99,
) -> tuple[list[Sample], int]:
    """Rounds until all have ended, with new weights after each."""
    for count in range(1, rounds + 1):
        unfinished = [s for s in samples if not s.ended]
        done = agent.run(unfinished, model_of(writer), evaluation=False, limit=limit)
        by_id = {s.sample_id: s for s in done}
        samples = [by_id.get(s.sample_id, s) for s in samples]
        if all(s.ended for s in samples):
            return samples, count
        writer.version += 1
    return samples, rounds


def say(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_every_token_is_kept_once_with_its_own_version(makes: Any) -> None:
    """A paused episode continues, in the middle of an answer too: the agent runs once, each token that
    was written is trained on once, with the version and log-prob of when it was written."""
    writer, begun = Writer(), []

    async def play(task: Task) -> float:
        begun.append(task.sample_id)
        messages: list[Any] = [say("a")]
        for _ in range(2):
            answer = (await task.chat(messages))["choices"][0]["message"]
            messages += [answer, say("more")]
        await task.chat([*messages[:2], say("a fork")])
        return 0.5

    agent = makes(play)
    (partial,) = agent.run(blank(1), model_of(writer), evaluation=False, limit=7)
    assert partial.status == SampleStatus.PARTIAL and partial.response_length == 7
    assert [(t, v) for t, v, _ in trained(partial)] == writer.log
    writer.version = 2
    (sample,), rounds = played(agent, writer, [partial], 50)
    assert rounds > 2 and begun == [5] and writer.calls == 3
    assert sample.status == SampleStatus.COMPLETED and sample.reward == 0.5
    assert [(t, v) for t, v, _ in trained(sample)] == writer.log
    assert all(p == pytest.approx(-0.1 * v) for _, v, p in trained(sample))
    assert len({v for _, v, _ in trained(sample)}) == rounds + 1
    numbers = sample.metadata["agent"]
    assert numbers["written_tokens"] == len(writer.log) and numbers["answers"] == 3
    assert numbers["forks"] == 1 and numbers["restarted"] == 0
    assert sample.metadata["agent_answers"]["parents"] == [-1, 0, 0]


def test_without_a_limit_it_is_as_without_pauses(makes: Any) -> None:
    async def play(task: Task) -> float:
        await task.chat([say("a")])
        return 1.0

    writer = Writer()
    samples, rounds = played(makes(play), writer, blank(3), None)
    assert rounds == 1 and [s.reward for s in samples] == [1.0] * 3
    assert sum(len(trained(s)) for s in samples) == len(writer.log)


def test_episodes_that_wait_leave_their_places_to_others(makes: Any) -> None:
    async def play(task: Task) -> float:
        for i in range(3):
            await task.chat([say(f"{task.sample_id} {i}")])
        return float(task.sample_id)

    writer = Writer()
    samples, rounds = played(makes(play, episodes=1), writer, blank(4), 10)
    assert rounds > 3 and [s.reward for s in samples] == [5.0, 6.0, 7.0, 8.0]
    assert writer.most == 1
    assert sum(len(trained(s)) for s in samples) == len(writer.log)


def test_answers_at_once_wait_together(makes: Any) -> None:
    async def play(task: Task) -> float:
        await asyncio.gather(*(task.chat([say(f"part {i}")]) for i in range(3)))
        return 1.0

    writer = Writer()
    (sample,), rounds = played(makes(play), writer, blank(1), 20)
    assert rounds > 1 and sample.num_branches == 2
    assert sorted((t, v) for t, v, _ in trained(sample)) == sorted(writer.log)


def test_no_time_passes_while_the_run_trains(makes: Any) -> None:
    """Neither --agent-timeout-s nor a limit of the agent's own counts it; without a pause both do."""

    async def play(task: Task) -> float:
        async with asyncio.timeout(0.8):
            await task.chat([say("a")])
        await task.chat([say("b")])
        if task.metadata.get("slow"):
            await asyncio.sleep(5)
        return 1.0

    agent, writer = makes(play, timeout_s=1.0), Writer()
    (partial,) = agent.run(blank(1), model_of(writer), evaluation=False, limit=5)
    for _ in range(2):
        time.sleep(0.7)
        (partial,) = agent.run([partial], model_of(writer), evaluation=False, limit=5)
    (sample,), _ = played(agent, writer, [partial], None)
    assert sample.status == SampleStatus.COMPLETED and sample.reward == 1.0
    slow = Sample.empty(Prompt(3, "question", (1, 2), metadata={"slow": True}), 9)
    (late,), _ = played(agent, writer, [slow], 20)
    assert "took longer than --agent-timeout-s 1" in late.metadata["failure"]


def test_an_evaluation_is_played_while_others_wait(makes: Any) -> None:
    async def play(task: Task) -> float:
        await task.chat([say("a")])
        await task.chat([say("b")])
        return 2.0 if task.evaluation else 1.0

    agent, writer = makes(play, episodes=1), Writer()
    (partial,) = agent.run(blank(1), model_of(writer), evaluation=False, limit=5)
    others = [Sample.empty(Prompt(4, "test", (1, 2)), i) for i in range(3)]
    scores = agent.run(others, model_of(writer), evaluation=True, limit=None)
    assert [s.reward for s in scores] == [2.0] * 3
    (sample,), _ = played(agent, writer, [partial], None)
    assert sample.reward == 1.0 and trained(sample)[:5] == trained(partial)


def test_an_episode_of_another_process_begins_again(
    makes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a resume: what it had is not trained on, and it says so."""

    async def play(task: Task) -> float:
        await task.chat([say("a")])
        return 1.0

    writer = Writer()
    (partial,) = makes(play).run(blank(1), model_of(writer), evaluation=False, limit=5)
    again = Writer()
    again.version = 7
    agent = makes(play)
    (sample,), _ = played(agent, again, [partial], None)
    assert {v for _, v, _ in trained(sample)} == {7}
    assert sample.metadata["agent"]["restarted"] == 1
    assert "episodes of a resumed run are played from their beginning" in caplog.text
    server = Server()
    server.version = 8
    (sample,) = stream(makes(play), server, [partial], lambda: False)
    assert {v for _, v, _ in trained(sample)} == {8}
    assert sample.metadata["agent"]["restarted"] == 1


def test_an_agent_that_gives_up_while_it_waits_is_no_harm(makes: Any) -> None:
    """Its time passes in an evaluation; the place that it would continue with is free for others."""

    async def play(task: Task) -> float:
        asking = asyncio.create_task(task.chat([say("a")]))
        await asyncio.sleep(0.2)
        if not task.evaluation:
            asking.cancel()
        await asyncio.wait({asking})
        return 1.0

    agent, writer = makes(play, episodes=1), Writer()
    samples = agent.run(blank(2), model_of(writer), evaluation=False, limit=5)
    other = Sample.empty(Prompt(4, "test", (1, 2)), 1)
    (score,) = agent.run([other], model_of(writer), evaluation=True, limit=None)
    assert score.reward == 1.0
    samples, rounds = played(agent, writer, samples, 5)
    assert rounds == 1
    assert all("asked for no answer" in s.metadata["failure"] for s in samples)


def test_programs_that_wait_end_with_the_run(makes: Any, tmp_path: Path) -> None:
    """A program asks over HTTP, which waits; closing ends it."""
    program = tmp_path / "agent.py"
    program.write_text(
        "import json, os, urllib.request\n"
        "for i in range(3):\n"
        "    body = json.dumps({'messages': [{'role': 'user', 'content': str(i)}]}).encode()\n"
        "    headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "    url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "    urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()\n"
        "open('reward', 'w').write('4')\n"
    )

    async def play(task: Task) -> float | None:
        return await run_command(["python", str(program)], task)

    agent, writer = makes(play), Writer()
    (partial, other) = agent.run(blank(2), model_of(writer), evaluation=False, limit=5)
    time.sleep(0.5)
    (sample,), rounds = played(agent, writer, [partial], 60)
    assert rounds > 1 and sample.reward == 4.0 and not other.ended

    def alive() -> list[int]:
        return [
            p.pid
            for p in psutil.Process().children(recursive=True)
            if p.status() != psutil.STATUS_ZOMBIE and MARK in p.environ()
        ]

    assert alive()
    agent.close()
    agent.close()
    assert not alive()


def test_a_stop_string_over_the_seam_of_two_parts_ends_the_answer(makes: Any) -> None:
    async def play(task: Task) -> float:
        answer = await task.chat([say("a")], stop=["x1 w1x2"])
        assert answer["choices"][0]["message"]["content"] == "w1x0 w1"
        return 1.0

    for limit in (3, 5, 7):
        writer = Writer()
        (sample,), _ = played(makes(play), writer, blank(1), limit)
        assert sample.metadata.get("failure") is None and sample.reward == 1.0
        text = TOKENIZER.decode([t for t, _, _ in trained(sample)])
        assert text.startswith("w1x0 w1x1 w1x2") and "w1x4" not in text
        assert complete([sample]) == [sample]


class Server(Writer):
    """Writes a token at a time, until it is aborted: a request then brings what it has."""

    def __init__(self, words: int = 12) -> None:
        super().__init__(words)
        self.aborts = 0

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        aborts, found = self.aborts, GenerateOutput(request.sample_id, (), (), "length", ())
        while len(found.tokens) < sampling.max_new_tokens and found.finish_reason == "length":
            if aborts != self.aborts:
                return replace(found, finish_reason="abort")
            prompt = (*request.prompt_tokens, *found.tokens)
            part = await super().generate_one(
                replace(request, prompt_tokens=prompt), replace(sampling, max_new_tokens=1)
            )
            found = replace(
                part,
                tokens=found.tokens + part.tokens,
                log_probs=found.log_probs + part.log_probs,
                weight_versions=found.weight_versions + part.weight_versions,
            )
        return found

    async def abort(self, sample_ids: Collection[int] | None = None) -> None:
        self.aborts += 1


def stream(
    agent: AgentGenerate, server: Server, samples: list[Sample], until: Callable[[], bool]
) -> list[Sample]:
    """A rollout that answers one by one, and has enough as soon as `until` says so."""

    async def work() -> list[Sample]:
        model = model_of(server)
        asked = [
            asyncio.ensure_future(agent.respond(s, model, evaluation=False))
            for s in samples
            if not s.ended
        ]
        while not until() and not all(each.done() for each in asked):
            await asyncio.sleep(0.001)
        agent.stop()
        await server.abort()
        done = {s.sample_id: s for s in await asyncio.gather(*asked)}
        return [done.get(s.sample_id, s) for s in samples]

    with agent.runner() as runner:
        found: list[Sample] = runner.run(work())
        return found


def test_servers_that_abort_lose_nothing(makes: Any) -> None:
    """A request that is aborted in the middle continues under the weights of the next rollout; the agent
    runs once, and each token that was written is trained on once with its own version."""
    server, begun = Server(), []

    async def play(task: Task) -> float:
        begun.append(task.sample_id)
        messages: list[Any] = [say(f"a {task.sample_id}")]
        for _ in range(2):
            answer = (await task.chat(messages))["choices"][0]["message"]
            messages += [answer, say("more")]
        await asyncio.gather(*(task.chat([*messages[:2], say(f"fork {i}")]) for i in range(2)))
        return 0.5

    agent, samples, rollouts = makes(play, episodes=2), blank(3), 0
    while not all(s.ended for s in samples):
        before = len(server.log)
        samples = stream(agent, server, samples, lambda b=before: len(server.log) > b + 20)  # type: ignore[misc]
        written = [(t, v) for s in samples for t, v, _ in trained(s) if s.response_length]
        assert sorted(written) == sorted(server.log), "of those that wait too"
        server.version += 1
        rollouts += 1
    assert rollouts > 4 and sorted(begun) == [5, 6, 7]
    for sample in samples:
        assert sample.status == SampleStatus.COMPLETED and sample.reward == 0.5
        assert sample.metadata["agent"]["answers"] == 4
        assert all(p == pytest.approx(-0.1 * v) for _, v, p in trained(sample))
    assert any(len({v for _, v, _ in trained(s)}) > 1 for s in samples)


def test_an_agent_at_work_is_not_waited_for(makes: Any) -> None:
    """A tool that takes long: the rollout ends, and the agent continues where it was; one that waits
    for its turn has no token yet."""
    tool, at_work = asyncio.Event(), []

    async def play(task: Task) -> float:
        await task.chat([say("a")])
        if task.sample_id == 5:
            at_work.append(len(server.log))
            await tool.wait()
        await task.chat([say("b")])
        return float(task.sample_id)

    server = Server(words=3)
    agent = makes(play, episodes=1)
    samples = stream(agent, server, blank(2), lambda: bool(at_work))
    assert [s.status for s in samples] == [SampleStatus.PARTIAL] * 2
    assert [s.response_length for s in samples] == [*at_work, 0]
    tool.set()  # the agent continues during the evaluation, and waits for the engine
    server.version = 2
    other = Sample.empty(Prompt(4, "test", (1, 2)), 9)
    (score,) = agent.run([other], model_of(server), evaluation=True, limit=None)
    assert score.reward == 9.0 and score.num_branches == 1
    server.version = 3
    samples = stream(agent, server, samples, lambda: False)
    assert [s.reward for s in samples] == [5.0, 6.0]
    assert [{v for _, v, _ in trained(s)} for s in samples] == [{1, 3}, {3}]
    assert len(trained(samples[0])) == 2 * at_work[0]


def test_an_answer_that_was_complete_when_it_was_aborted_is_full(makes: Any) -> None:
    class Late(Server):
        async def generate_one(
            self, request: GenerateRequest, sampling: SamplingParams
        ) -> GenerateOutput:
            found = await Writer.generate_one(self, request, sampling)
            while not self.aborts:
                await asyncio.sleep(0.001)
            return replace(found, finish_reason="abort")

    async def play(task: Task) -> float:
        answer = await task.chat([say("a")], max_tokens=5)
        assert answer["choices"][0]["finish_reason"] == "length"
        return 1.0

    server, agent = Late(), makes(play)
    samples = stream(agent, server, blank(1), lambda: bool(server.log))
    (sample,) = stream(agent, server, samples, lambda: False)
    assert sample.reward == 1.0 and len(trained(sample)) == 5 and server.calls == 1


def test_a_function_that_blocks_a_later_rollout_is_named(
    makes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Each rollout runs the event loop in its own thread."""
    server = Server(words=3)

    async def play(task: Task) -> float:
        await task.chat([say("a")])
        while server.version == 1:
            await asyncio.sleep(0.001)
        time.sleep(0.8)
        return 1.0

    agent, samples = makes(play), blank(1)
    agent._watch.seconds = 0.2
    until = lambda: server.calls == 1 and not server._rest  # noqa: E731
    with ThreadPoolExecutor(1) as threads:
        samples = threads.submit(stream, agent, server, samples, until).result()
    assert not samples[0].ended and not caplog.records
    server.version = 2
    (sample,) = stream(agent, server, samples, lambda: False)
    assert sample.reward == 1.0
    (record,) = (r for r in caplog.records if r.levelname == "ERROR")
    assert "blocks the event loop" in record.message
    assert f"{__file__}:{play.__code__.co_firstlineno + 4}" in record.message
