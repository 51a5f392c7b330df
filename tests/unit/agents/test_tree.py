"""What is trained on of an agent's session is what was generated, token for token, whatever the chat
template and whatever the client sends back."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from slime_like.agents.messages import BadRequest, canonical
from slime_like.agents.sessions import (
    Choice,
    ParsedRequest,
    Session,
    SessionLimits,
    TooManyRequests,
)
from slime_like.agents.templates import ChatTemplate
from slime_like.agents.tool_calls import format_of, parse
from slime_like.agents.tree import Branch
from slime_like.engines.base import (
    GenerateOutput,
    GenerateRequest,
    GenerationClient,
    SamplingParams,
)
from slime_like.rollout.episode import Model
from slime_like.samples.sampling_mask import split_sampling_mask
from tests.agent_templates import FAMILIES, MARKS, Family, call_text, make_tokenizer

WIDTH = 6  # keys that a query attends to at most
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
PARIS, ROME = ("weather", {"city": "Paris"}), ("weather", {"city": "Zürich"})


class Writer:
    """Writes given texts in tokens that no tokenizer would choose: pieces of 1 to 4 characters."""

    def __init__(self, tokenizer: Any, seed: int = 0) -> None:
        self.tokenizer = tokenizer
        self.texts: list[str] = []
        self.written: list[tuple[tuple[int, ...], GenerateOutput]] = []
        self.seeds: list[int] = []
        self.random = random.Random(seed)

    def pieces(self, text: str) -> list[int]:
        found: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, [*MARKS, " STOP"])) + ")", text):
            while part:
                size = len(part) if part in (*MARKS, " STOP") else self.random.randint(1, 4)
                found += self.tokenizer(part[:size], add_special_tokens=False)["input_ids"]
                part = part[size:]
        return found

    async def generate_one(
        self, request: GenerateRequest, sampling: SamplingParams
    ) -> GenerateOutput:
        self.seeds.append(request.seed)
        tokens = self.pieces(self.texts.pop(0))
        await asyncio.sleep(0)
        reason: Any = "stop" if tokens[-1] in END_IDS(self.tokenizer) else "length"
        for count in range(1, len(tokens) + 1):
            if any(s in self.tokenizer.decode(tokens[:count]) for s in sampling.stop):
                tokens, reason = tokens[:count], "stop"
                break
        log_probs = tuple(-self.random.random() for _ in tokens)
        versions = (1,) * len(tokens)
        sets = tuple(torch.cat([torch.tensor([t]), torch.randint(9, (3,))]).int() for t in tokens)
        length = len(request.prompt_tokens) + len(tokens)
        routed_experts = torch.randint(0, 99, (length, 2, 2), dtype=torch.int16)
        routed_experts[-1] = -1  # not computed
        keys = torch.randint(0, 99, (max(0, length - WIDTH), 2, WIDTH), dtype=torch.int32)
        keys[-1:] = -1
        output = GenerateOutput(
            request.sample_id,
            tuple(tokens),
            log_probs,
            reason,
            versions,
            sets,
            routed_experts,
            keys,
        )
        self.written.append((request.prompt_tokens, output))
        return output


def END_IDS(tokenizer: Any) -> set[int]:
    more = {"<|return|>": ["<|call|>"], "<|endoftext|>": ["<|user|>", "<|observation|>"]}
    names = [tokenizer.eos_token, *more.get(tokenizer.eos_token, [])]
    return set(tokenizer.convert_tokens_to_ids(names))


class Talk:
    """A client with a session: `ask` adds its answer to the history, as agents do."""

    def __init__(self, name: str, limits: SessionLimits | None = None, room: int = 4000) -> None:
        self.family: Family = FAMILIES[name]
        self.tokenizer = make_tokenizer(self.family)
        self.writer = Writer(self.tokenizer)
        model = Model(
            cast(GenerationClient, self.writer),
            self.tokenizer,
            SamplingParams(max_new_tokens=room),
            lambda sample_id, position: position,
        )
        template = ChatTemplate(self.tokenizer, END_IDS(self.tokenizer))
        found = format_of(self.family.template)
        assert found == self.family.format
        self.session = Session(3, model, template, tool_format=found, limits=limits)
        self.history: list[dict[str, Any]] = []

    def end(self, *, calls: bool = False) -> str:
        """What a model ends its turn with."""
        if self.family.format == "harmony":
            return "" if calls else "<|return|>"
        if self.family.format == "glm":
            return "<|observation|>" if calls else "<|user|>"
        return self.family.ends

    def said(self, text: str) -> str:
        return self.closed + self.final(text)

    def final(self, text: str) -> str:
        """After a thought."""
        mark = "<|channel|>final<|message|>" if self.family.format == "harmony" else ""
        return mark + text

    def calls(self, *calls: tuple[str, dict[str, Any]]) -> str:
        return self.closed + call_text(self.family, list(calls)) + self.end(calls=True)

    @property
    def closed(self) -> str:
        """The end of a thought that the prompt has begun."""
        return "</think>\n\n" if self.family is FAMILIES["qwen3_open_thought"] else ""

    async def asked(self, text: str, *messages: dict[str, Any], **more: Any) -> Choice:
        self.writer.texts.append(text)
        self.history += [canonical(m, 0) for m in messages]
        (choice,) = await self.session.answer(ParsedRequest(tuple(self.history), **more))
        self.history.append(dict(choice.message))
        return choice

    def ask(self, text: str, *messages: dict[str, Any], **more: Any) -> Choice:
        return asyncio.run(self.asked(text, *messages, **more))

    def check(self, branches: int) -> None:
        """Trained ids are generated ids, each once and after the prompt that it was given; nothing
        else is trained on."""
        tree, written = self.session.tree, self.writer.written
        assert len(tree.branches()) == branches
        for cut in (tree.branches(), tree.branches("turns")):
            found = []
            for branch in cut:
                place, end = branch.prompt_length, len(branch.tokens)
                assert len(branch.loss_mask) == end - place and branch.loss_mask[0]
                while place < end:
                    i = place - branch.prompt_length
                    if not branch.loss_mask[i]:
                        assert branch.log_probs[i] == 0 and branch.weight_versions[i] == -1
                        place += 1
                        continue
                    prompt = branch.tokens[:place]
                    (number,) = [
                        n
                        for n, (given, output) in enumerate(written)
                        if given == prompt
                        and branch.tokens[place:][: len(output.tokens)] == output.tokens
                        and branch.log_probs[i:][: len(output.tokens)] == output.log_probs
                    ]
                    count = len(written[number][1].tokens)
                    assert all(branch.loss_mask[i : i + count])
                    assert set(branch.weight_versions[i : i + count]) == {1}
                    assert branch.sampling_mask is not None
                    sets = split_sampling_mask(branch.sampling_mask[i : i + count])
                    given = written[number][1].sampling_mask
                    assert given is not None and all(map(torch.equal, sets, given))
                    found.append(number)
                    place += count
                self.check_routes(branch)
            assert sorted(found) == list(range(len(written)))
        paths, turns = (
            observed(tree.branches(cut, observations=True)) for cut in ("paths", "turns")
        )
        assert paths == turns, "each observation once, after the same tokens, whatever the cut"
        assert bool(paths) == any(t.parent is not None for t in tree.turns)

    def check_routes(self, branch: Branch) -> None:
        """Each token went where the first answer of its path that computed it says, and attended to
        the keys it says; the last one nowhere."""
        path = self.session.tree.turns[branch.spans[-1][2]].path
        reported = [
            next(o for p, o in self.writer.written if (p, o.log_probs) == (t.prompt, t.log_probs))
            for t in path
        ]
        assert branch.routed_experts is not None and branch.routed_experts.size(0) == len(
            branch.tokens
        )
        for place, found in enumerate(branch.routed_experts[:-1]):
            first = next(
                o.routed_experts for t, o in zip(path, reported) if place < len(t.all_tokens) - 1
            )
            assert first is not None and torch.equal(found, first[place])
        assert bool((branch.routed_experts[-1] == -1).all())
        keys = branch.indexer_topk
        assert keys is not None and len(keys) == max(0, len(branch.tokens) - WIDTH)
        for row, chosen in enumerate(keys[:-1]):
            first = next(
                o.indexer_topk
                for t, o in zip(path, reported)
                if row + WIDTH < len(t.all_tokens) - 1
            )
            assert first is not None and torch.equal(chosen, first[row])
        assert bool((keys[-1:] == -1).all())


def observed(branches: Sequence[Branch]) -> Counter[tuple[int, ...]]:
    """Of each token of a response that is not trained on, all up to it."""
    return Counter(
        branch.tokens[: branch.prompt_length + i + 1]
        for branch in branches
        for i, trained in enumerate(branch.loss_mask)
        if not trained
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(choice: Choice, place: int, text: str) -> dict[str, Any]:
    call = choice.message["tool_calls"][place]
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def plain(talk: Talk) -> None:
    """Several turns, with characters of several bytes that tokens cut in two."""
    for number, text in enumerate(("naïve 🙂 answer", "the tool, 東京", "was"), 1):
        choice = talk.ask(talk.said(text) + talk.end(), user(f"question {number} – «é»"))
        assert choice.message["content"] == text
    assert talk.session.tree.counts == {"roots": 1, "foreign_messages": 0, "rewritten_turns": 0, "forks": 0}  # fmt: skip
    texts = [talk.tokenizer.decode(prompt) for prompt, _ in talk.writer.written]
    full = talk.tokenizer.apply_chat_template(
        talk.history[:-1], tokenize=False, add_generation_prompt=True
    )
    if not talk.family.thinks and talk.family.format not in ("harmony", "glm"):
        # some templates write a space before an answer, which this model does not
        assert texts[-1].replace(" ", "") == full.replace(" ", ""), (
            "as the template, in other tokens"
        )
    talk.check(1)


def tools(talk: Talk) -> None:
    call = talk.ask(talk.calls(PARIS), user("rain?"), tools=TOOLS)
    assert (call.finish, call.message["tool_calls"][0]["function"]) == (
        "tool_calls",
        {"name": "weather", "arguments": {"city": "Paris"}},
    )
    said = talk.said("it rains")
    answer = talk.ask(said + talk.end(), result(call, 0, "rain"), tools=TOOLS)
    assert answer.finish == "stop" and answer.message["content"] == "it rains"
    assert not talk.session.tree.counts["rewritten_turns"] and talk.session.numbers()["tool_errors"] == 0  # fmt: skip
    assert talk.tokenizer.decode(talk.writer.written[1][0]).count("rain") >= 2
    talk.check(1)


def parallel_tools(talk: Talk) -> None:
    if not talk.family.parallel:
        return tools(talk)
    calls = talk.ask(talk.calls(PARIS, ROME), user("rain?"), tools=TOOLS)
    found = [c["function"]["arguments"]["city"] for c in calls.message["tool_calls"]]
    assert found == ["Paris", "Zürich"]
    results = (result(calls, 0, "rain"), result(calls, 1, "sun"))
    talk.ask(talk.said("so so") + talk.end(), *results, tools=TOOLS)
    talk.ask(talk.said("yes") + talk.end(), user("sure?"), tools=TOOLS)
    assert not talk.session.tree.counts["rewritten_turns"]
    talk.check(1)


def dropped_thoughts(talk: Talk) -> None:
    """A client that keeps thoughts continues; one that drops them makes a branch."""
    if talk.family.format == "harmony":
        thought = "<|channel|>analysis<|message|>let me see<|end|><|start|>assistant"
    else:
        thought = ("" if talk.closed else "<think>\n") + "let me see\n</think>\n\n"
    first = talk.ask(thought + talk.final("yes") + talk.end(), user("is it?"))
    assert first.message["reasoning_content"] == "let me see" and first.message["content"] == "yes"
    talk.ask(thought + talk.final("no") + talk.end(), user("sure?"))
    talk.check(1)
    for message in talk.history:
        message.pop("reasoning_content", None)
    talk.ask(thought + talk.final("well") + talk.end(), user("really?"))
    talk.check(2)
    counts = talk.session.tree.counts
    assert (counts["roots"], counts["foreign_messages"]) == (2, 2)


def edits(talk: Talk) -> None:
    """An edited result forks from the call; an edited answer and a cut history are new roots."""
    call = talk.ask(talk.calls(PARIS), user("rain?"), tools=TOOLS)  # fmt: skip
    before = list(talk.history)
    talk.ask(talk.said("rain") + talk.end(), result(call, 0, "rain"), tools=TOOLS)
    talk.history = [*before]
    talk.ask(talk.said("sun") + talk.end(), result(call, 0, "sun"), tools=TOOLS)
    talk.check(2)
    kept = talk.session.tree.turns[0].all_tokens
    assert talk.writer.written[2][0][: len(kept)] == kept, "continues from the call's own tokens"
    assert talk.session.tree.counts["forks"] == 1
    talk.history[-1]["content"] = "snow"
    talk.ask(talk.said("cold") + talk.end(), user("so?"), tools=TOOLS)
    talk.check(3)
    assert talk.session.tree.counts["foreign_messages"] == 1
    kept = talk.session.tree.turns[0].all_tokens
    assert talk.writer.written[3][0][: len(kept)] == kept, "up to the edit it is the same"
    talk.history = [user("summary: rain")]
    talk.ask(talk.said("fine") + talk.end(), user("go on"), tools=TOOLS)
    talk.check(4)
    assert talk.session.tree.counts["roots"] == 2


def sub_agents(talk: Talk) -> None:
    """Two conversations at once next to the main one, which continues; a question with two answers."""

    async def play() -> None:
        await talk.asked(talk.said("first") + talk.end(), user("main"))
        talk.writer.texts += [talk.said(f"sub {i}") + talk.end() for i in range(2)]
        jobs = [ParsedRequest((user(f"sub-task {i}"),)) for i in range(2)]
        await asyncio.gather(*(talk.session.answer(ask) for ask in jobs))
        await talk.asked(talk.said("second") + talk.end(), user("go on"))
        talk.writer.texts += [talk.said("a") + talk.end(), talk.said("b") + talk.end()]
        both = await talk.session.answer(ParsedRequest((*talk.history, user("again")), n=2))
        assert [c.message["content"] for c in both] == ["a", "b"]

    asyncio.run(play())
    talk.check(4)
    positions = [s for s in talk.writer.seeds if s < 2**32]
    assert len(positions) == 3 and len(set(talk.writer.seeds)) == 6, "the main one: by its length"


def stop_strings(talk: Talk) -> None:
    """A stop string ends inside a token: the client gets the text before it, the token stays."""
    choice = talk.ask(talk.said("we say STOP here"), user("talk"), stop=("STO",))
    text = talk.tokenizer.decode(choice.tokens)
    assert choice.message["content"] == "we say " and text.endswith(" STOP")
    assert choice.finish == "stop"
    talk.ask(talk.said("well") + talk.end(), user("go on"))
    talk.check(1)
    prompt = talk.tokenizer.decode(talk.writer.written[1][0])
    first = talk.writer.written[0]
    assert prompt.startswith(talk.tokenizer.decode(first[0]) + text)
    if talk.family.format not in ("harmony", "glm"):
        assert prompt[len(talk.tokenizer.decode(first[0]) + text) :].lstrip().startswith(talk.family.ends)  # fmt: skip


DIALOGUES: Sequence[Callable[[Talk], None]] = (
    plain, tools, parallel_tools, dropped_thoughts, edits, sub_agents, stop_strings,
)  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dialogue", DIALOGUES, ids=lambda d: d.__name__)
def test_what_is_trained_on_is_what_was_generated(
    name: str, dialogue: Callable[[Talk], None]
) -> None:
    dialogue(Talk(name))


def test_limits_of_a_session() -> None:
    talk = Talk("chatml", SessionLimits(turns=2))
    talk.ask("one" + talk.end(), user("1"))
    talk.ask("two" + talk.end(), user("2"))
    with pytest.raises(TooManyRequests, match="has had its 2 answers"):
        talk.ask("three", user("3"))
    assert talk.session.numbers()["refused"] == 1
    short = Talk("chatml", room=6)
    short.ask("abc" + short.end(), user("more"))
    with pytest.raises(BadRequest, match="no room for an answer"):
        short.ask("abc" + short.end(), user("more"))
    with pytest.raises(BadRequest, match="n is 99; 1 to 16"):
        Talk("chatml").ask("x", user("y"), n=99)


def test_calls_that_cannot_be_read_stay_text() -> None:
    parsed = parse('<tool_call>{"name": 3}</tool_call>', "hermes")
    assert (parsed.content, parsed.calls, parsed.errors) == (
        '<tool_call>{"name": 3}</tool_call>',
        (),
        1,
    )
    assert parse('<tool_call>{"name": "f"}</tool_call>', "hermes", tools=False).calls == ()
    danger = '```tool_code\n__import__("os").system("x")\n```'
    assert parse(danger, "python").errors == 1


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("text", "must be an object with a role"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "a part of type 'image_url'"),
        ({"role": "assistant", "tool_calls": [{}]}, "must have a function with a name"),
        ({"role": "tool", "content": "x", "tool_call_id": 3}, "'tool_call_id' must be text"),
    ],
)
def test_wrong_messages_are_named(message: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        canonical(message, 4)


def test_calls_in_a_history_reach_a_template_that_takes_them_as_text_alone() -> None:
    """DeepSeek's: calls without any content, and arguments that are joined as texts."""
    talk = Talk("deepseek_r1")
    arguments = {"city": "Zürich"}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    history = [user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    template = talk.session.tree.template
    text = template.decode(template.prompt(history, TOOLS))
    assert 'weather\n```json\n{"city": "Zürich"}' in text


def test_a_message_that_the_template_does_not_write_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a first request and in what follows an answer, whose own calls are kept as tokens."""
    talk = Talk("qwen3")
    template = (
        "{% for m in messages if m.role in ('user', 'assistant') %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    monkeypatch.setattr(talk.tokenizer, "chat_template", template)
    reported = {"role": "system", "content": "Be brief."}
    with pytest.raises(BadRequest, match=r"message 0 \(system\): the chat template does not write"):
        talk.ask("never said", reported, user("a"))
    talk.history.clear()
    talk.writer.texts.clear()
    choice = talk.ask(talk.calls(PARIS), user("a"), tools=TOOLS)
    with pytest.raises(BadRequest, match=r"message 2 \(tool\): the chat template does not write"):
        talk.ask("never said", result(choice, 0, "17 degrees"), tools=TOOLS)
    del talk.history[2:]
    talk.writer.texts.clear()
    answer = talk.ask(talk.said("17 degrees.") + talk.end(), user("and now?"), tools=TOOLS)
    assert answer.message["content"] == "17 degrees."
