"""A session as a tree of turns: a turn, and every request that continues it, keeps the tokens that
were generated.

A request's history is matched against earlier turns. If it starts with the complete conversation of
a turn, the next prompt is that turn's prompt and generated tokens, followed only by what is new.
Any other history (rewritten or truncated, without reasoning, with an edited tool result, or a
sub-agent's conversation) continues the longest matching conversation, or none: it forms a branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from slime_like.agents.messages import history_keys, images_of
from slime_like.agents.templates import ChatTemplate
from slime_like.data.messages import ASSISTANT, Message
from slime_like.engines.base import GenerateOutput
from slime_like.images.encoded import EncodedImage
from slime_like.samples.indexer_topk import rows_with_choice
from slime_like.samples.routed_experts import join_routed_experts
from slime_like.samples.sampling_mask import empty_sampling_mask, pad_sampling_mask
from slime_like.types import NOT_SAMPLED

Split = Literal["paths", "turns"]


@dataclass(frozen=True, slots=True)
class NextPrompt:
    """The prompt of a request."""

    parent: TreeTurn | None  # the turn that it continues, or None
    tokens: tuple[int, ...]
    # assistant messages among the new ones that the model did not generate in this form
    foreign: int = 0
    # the tokens of a matching turn could not be kept, because the chat template renders it
    # differently
    rewritten: bool = False


@dataclass(eq=False, slots=True)
class TreeTurn:
    """A completion. It holds what its parent does not, so that the memory of a session grows with
    its length, and not with the square of it."""

    parent: TreeTurn | None
    rest: tuple[int, ...]  # tokens given to the model after those of the parent
    tokens: tuple[int, ...]  # generated tokens, with one log-prob and weight version each
    log_probs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    truncated: bool  # it reached a limit
    sampling_mask: tuple[Tensor, ...] | None  # see `GenerateOutput`
    # routed experts of its prompt and tokens, starting at the parent's last token, which was not
    # computed before
    routed_experts: Tensor | None
    indexer_topk: Tensor | None  # likewise, see samples/indexer_topk.py
    new_messages: tuple[Message, ...]  # those that were answered, after the parent's answer
    answer: Message
    number: int  # index in the session
    reward: float = 0.0  # of this turn
    # length of `rest` of a turn with a parent, 0 if an earlier sibling already has the same
    observed: int = 0
    children: int = 0
    # the observations that precede its children
    child_observations: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def prompt(self) -> tuple[int, ...]:
        """All tokens given to the model."""
        before = chain.from_iterable((turn.rest, turn.tokens) for turn in self.path[:-1])
        return (*chain.from_iterable(before), *self.rest)

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages that were answered."""
        before = ((*turn.new_messages, turn.answer) for turn in self.path[:-1])
        return (*chain.from_iterable(before), *self.new_messages)

    @property
    def all_tokens(self) -> tuple[int, ...]:
        """The tokens that the prompt of any continuation starts with."""
        return (*self.prompt, *self.tokens)

    @property
    def root(self) -> TreeTurn:
        turn = self
        while turn.parent is not None:
            turn = turn.parent
        return turn

    @property
    def path(self) -> list[TreeTurn]:
        """The turns from the root to this one."""
        parts = [self]
        while parts[-1].parent is not None:
            parts.append(parts[-1].parent)
        return parts[::-1]


@dataclass(frozen=True, slots=True)
class Branch:
    """A sequence to train on. Its first `prompt_length` tokens are context; the others have one
    entry each in mask, log-probs, versions and sampling_mask."""

    tokens: tuple[int, ...]
    prompt_length: int
    loss_mask: tuple[bool, ...]
    log_probs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    truncated: bool
    # for each trained turn, its start relative to the end of the prompt, its length and its index
    # in the tree
    spans: tuple[tuple[int, int, int], ...]
    sampling_mask: Tensor | None = None
    # routed experts of all tokens, as first computed on this path
    routed_experts: Tensor | None = None
    indexer_topk: Tensor | None = None
    images: tuple[EncodedImage, ...] = ()  # in the order of their placeholders


@dataclass(slots=True)
class SessionTree:
    """The turns of one session in order."""

    template: ChatTemplate
    turns: list[TreeTurn] = field(default_factory=list)
    # roots, forks, foreign_messages and rewritten_turns of completed requests
    counts: Counter[str] = field(default_factory=Counter)
    _by_history: dict[bytes, TreeTurn] = field(default_factory=dict)

    def next_prompt(self, messages: Sequence[Message], tools: object) -> NextPrompt:
        """Build the prompt of a request, without changing the tree.

        Args:
            messages: In canonical form.
            tools: For the template, None without.

        Raises:
            BadRequest: see `ChatTemplate.prompt`.
        """
        keys = list(history_keys(messages, tools))
        for length in range(len(messages), 0, -1):
            turn = self._by_history.get(keys[length])
            if turn is None:
                continue
            after = messages[length:]
            rest = self.template.following(
                messages[: length - 1],
                turn.answer,
                after,
                tools,
                turn.tokens[-1] if turn.tokens else None,
            )
            if rest is not None:
                return NextPrompt(turn, (*turn.all_tokens, *rest), _count_assistant(after))
            fresh = self.template.prompt(messages, tools)
            return NextPrompt(None, tuple(fresh), _count_assistant(messages), rewritten=True)
        return NextPrompt(
            None, tuple(self.template.prompt(messages, tools)), _count_assistant(messages)
        )

    def add(
        self,
        prompt: NextPrompt,
        messages: Sequence[Message],
        tools: object,
        answer: Message,
        output: GenerateOutput,
    ) -> TreeTurn:
        """Add a completed turn. Among equal conversations, later requests continue the newest."""
        routed_experts, indexer_topk = output.routed_experts, output.indexer_topk
        parent = prompt.parent
        if parent is not None:
            start = len(parent.all_tokens) - 1
            routed_experts = _after(parent.routed_experts, routed_experts, start)
            if indexer_topk is not None:
                start = rows_with_choice(start, indexer_topk.size(2))
            indexer_topk = _after(parent.indexer_topk, indexer_topk, start)
        rest = prompt.tokens
        new_messages = tuple(messages)
        if parent is not None:
            rest = rest[len(parent.all_tokens) :]
            new_messages = new_messages[len(parent.messages) + 1 :]
        turn = TreeTurn(
            parent, rest, output.tokens, output.log_probs, output.weight_versions,
            output.finish_reason == "length", output.sampling_mask, routed_experts, indexer_topk,
            new_messages, answer, len(self.turns),
        )  # fmt: skip
        if parent is None:
            self.counts["roots"] += 1
        else:
            self.counts["forks"] += parent.children > 0
            parent.children += 1
            turn.observed = 0 if rest in parent.child_observations else len(rest)
            parent.child_observations.add(rest)
        self.counts["foreign_messages"] += prompt.foreign
        self.counts["rewritten_turns"] += prompt.rewritten
        self.turns.append(turn)
        *_, key = history_keys([*messages, answer], tools)
        self._by_history[key] = turn
        return turn

    def branches(self, split: Split = "paths", *, observations: bool = False) -> list[Branch]:
        """Split the tree into sequences in which every turn is trained on exactly once.

        Args:
            split: "paths": one sequence per leaf, training the turns on its path that no earlier
                sequence trains; "turns": one sequence per turn. Both train the same tokens in the
                same contexts.
            observations: The response of a sequence that continues a turn starts right after that
                turn, instead of after the observation, so that each observation is in exactly one
                response.
        """
        if split == "turns":
            return [_branch([turn], turn, observations) for turn in self.turns if turn.tokens]
        taken: set[int] = set()
        parts = []
        for leaf in (turn for turn in self.turns if not turn.children):
            trained_turns = [turn for turn in leaf.path if id(turn) not in taken]
            taken.update(map(id, trained_turns))
            if any(turn.tokens for turn in trained_turns):
                parts.append(_branch(trained_turns, leaf, observations))
        return parts


def _branch(trained_turns: Sequence[TreeTurn], leaf: TreeTurn, observations: bool) -> Branch:
    """The tokens up to the end of `leaf`, where only those of `trained_turns` are trained on."""
    tokens = leaf.all_tokens
    start = len(trained_turns[0].prompt) - (trained_turns[0].observed if observations else 0)
    count = len(tokens) - start
    mask = [False] * count
    log_probs = [0.0] * count
    versions = [NOT_SAMPLED] * count
    sets = empty_sampling_mask(count)
    spans = []
    for turn in trained_turns:
        first = len(turn.prompt) - start
        end = first + len(turn.tokens)
        assert tokens[start + first : start + end] == turn.tokens, "kept as generated"
        mask[first:end] = [True] * len(turn.tokens)
        log_probs[first:end] = turn.log_probs
        versions[first:end] = turn.weight_versions
        sets[first:end] = turn.sampling_mask or empty_sampling_mask(len(turn.tokens))
        spans.append((first, len(turn.tokens), turn.number))
    return Branch(
        tokens,
        start,
        tuple(mask),
        tuple(log_probs),
        tuple(versions),
        leaf.truncated,
        tuple(spans),
        None if leaf.sampling_mask is None else pad_sampling_mask(sets),
        _whole([turn.routed_experts for turn in leaf.path]),
        _whole([turn.indexer_topk for turn in leaf.path]),
        images_of(leaf.messages),
    )


def _after(parent: Tensor | None, record: Tensor | None, start: int) -> Tensor | None:
    """The part of an output's record from row `start` on, the last one of its parent's record."""
    if record is None:
        return None
    assert parent is not None, "either all turns of a session have a record, or none"
    return join_routed_experts(parent[-1:], record[start:], record.size(0) - start)


def _whole(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The record of the tokens up to the end of the last turn of a path."""
    known = [part for part in parts if part is not None]
    return torch.cat([*(part[:-1] for part in known[:-1]), known[-1]]) if known else None


def _count_assistant(messages: Sequence[Message]) -> int:
    return sum(message["role"] == ASSISTANT for message in messages)
