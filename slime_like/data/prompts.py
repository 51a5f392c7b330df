"""Prompts in the order of training: template, tokens, shuffling, and a position that can be saved.

The order of an epoch depends on (seed, epoch) alone, so that a position is three numbers and a
resumed run draws the same prompts as an uninterrupted one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arguments.eval_sets import EvalSet
from arguments.schema.data import DataConfig
from slime_like.data.source import TASK_PREFIX, Row, RowSource, batches, open_source
from slime_like.data.template import render_rows
from slime_like.rewards.registry import AnswerCheck
from slime_like.types import Prompt

_TOKENISE_AT_ONCE = 1000
# rows, before the model is built; one that was not looked at is named when its turn comes
_CHECKED = 5000


@dataclass(frozen=True, slots=True)
class RowKeys:
    """Which keys of a row hold what."""

    input: str
    label: str | None
    metadata: str

    @classmethod
    def of(
        cls,
        spec: str,
        config: DataConfig,
        *,
        input_key: str | None = None,
        label_key: str | None = None,
        metadata_key: str | None = None,
    ) -> RowKeys:
        """Those that the settings name for a file; rows of a reasoning_gym source have keys of
        their own."""
        if spec.startswith(TASK_PREFIX):
            return cls("question", "answer", "metadata")
        return cls(
            input_key or config.input_key,
            label_key or config.label_key,
            metadata_key or config.metadata_key,
        )


@dataclass(frozen=True, slots=True)
class Room:
    """How long a prompt may be. positions: of the model, None where they do not matter. response:
    --rollout-max-response-len, or a set's own."""

    positions: int | None = None
    response: int = 0

    def problem(self, tokens: int) -> str | None:
        """Why a prompt of so many tokens does not fit, or None."""
        if self.positions is None or tokens + self.response <= self.positions:
            return None
        longest = self.positions - self.response
        remedy = (
            f"--rollout-max-prompt-len {longest} leaves such prompts out"
            if longest > 0
            else "lower --rollout-max-response-len"
        )
        return (
            f"the prompt has {tokens} tokens, which with a response of {self.response} exceed the "
            f"model's {self.positions} positions; {remedy}"
        )


_ANY = Room()


class PromptFormat:
    """How a row becomes a prompt: which keys hold what, and the chat template, for which a plain
    string is one user message.

    answer_check: what a row's label and metadata must be for its responses to be of use. Tokens are
    those of the text alone (no special tokens are added): a chat template writes its own, and a
    plain string is taken as it stands. Raises ValueError when a chat template is asked for and the
    tokenizer has none.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        *,
        keys: RowKeys,
        answer_check: AnswerCheck | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.keys = keys
        self._metadata = dict(metadata or {})  # laid over that of every row
        self._answer_check = answer_check
        self._tokenizer = tokenizer
        self._chat = config.apply_chat_template
        self._chat_arguments = {"add_generation_prompt": True, **config.apply_chat_template_kwargs}
        if self._chat and not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "--apply-chat-template: the tokenizer has no chat template; leave the flag out or use another tokenizer"
            )

    @property
    def columns(self) -> list[str]:
        return [
            key for key in (self.keys.input, self.keys.label, self.keys.metadata) if key is not None
        ]

    def check(self, row: Row) -> str | None:
        """What is wrong with a row, or None."""
        for flag, key in (("--input-key", self.keys.input), ("--label-key", self.keys.label)):
            if key is not None and key not in row:
                return f"missing key {key!r} ({flag}); the keys that are there: {', '.join(sorted(row)) or 'none'}"
        prompt, metadata = row[self.keys.input], row.get(self.keys.metadata)
        if metadata is not None and not isinstance(metadata, dict):
            return f"{self.keys.metadata!r} (--metadata-key) must be an object, not {type(metadata).__name__}"
        if prompt == "":
            return f"{self.keys.input!r} (--input-key) is empty"
        problem = None if isinstance(prompt, str) else self._check_messages(prompt)
        if problem is None and self._answer_check is not None:
            problem = self._answer_check(self._label(row), {**(metadata or {}), **self._metadata})
        return problem

    def _check_messages(self, messages: Any) -> str | None:
        name = f"{self.keys.input!r} (--input-key)"
        is_chat = (
            isinstance(messages, list)
            and messages
            and all(isinstance(m, dict) and "role" in m for m in messages)
        )
        if not is_chat:
            return f"{name} must be a string or a list of messages with a role, not {type(messages).__name__}"
        if not self._chat:
            return f"{name} is a list of chat messages, which needs --apply-chat-template"
        for number, message in enumerate(messages):
            problem = _content_problem(message)
            if problem:
                return f"{name}: message {number} ({message['role']}): {problem}"
        return None

    def _label(self, row: Row) -> Any:
        return row[self.keys.label] if self.keys.label is not None else None

    def texts(self, rows: Sequence[Row], where: Callable[[int], str]) -> list[str]:
        """What the model sees of each row. where: a row's place in words, by its index in `rows`.
        Raises ValueError as `render_rows`."""
        prompts = [row[self.keys.input] for row in rows]
        if self._chat:
            return render_rows(self._render, prompts, where)
        assert all(isinstance(prompt, str) for prompt in prompts), (
            "check() lets messages through only with a chat template"
        )
        return prompts

    def _render(self, prompt: str | list[dict[str, Any]]) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **self._chat_arguments)

    def tokenise(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        encoded = self._tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False
        )
        return [tuple(ids) for ids in encoded["input_ids"]]

    def prompt(self, group_id: int, row: Row, text: str, tokens: tuple[int, ...]) -> Prompt:
        metadata = {**(row.get(self.keys.metadata) or {}), **self._metadata}
        return Prompt(
            group_id=group_id, text=text, tokens=tokens, label=self._label(row), metadata=metadata
        )


def _content_problem(message: Mapping[str, Any]) -> str | None:
    """A message holds text, or a list of parts as ``{"type": "text", "text": ...}``. One that calls
    tools may hold nothing."""
    content = message.get("content")
    if content is None:
        return None if message.get("tool_calls") else "'content' is missing or null"
    if isinstance(content, str):
        return None
    if not isinstance(content, list) or not content:
        return f"'content' must be a string or a list of parts, not {type(content).__name__ if content != [] else 'an empty list'}"
    for part in content:
        if not (isinstance(part, dict) and isinstance(part.get("type"), str)):
            return "every part of 'content' must be an object with a 'type'"
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            return "a part of 'content' of type 'text' must hold a string under 'text'"
    return None


def tokens_of(
    source: RowSource, form: PromptFormat, indices: Sequence[int], room: Room = _ANY
) -> tuple[list[Row], list[str], list[tuple[int, ...]]]:
    """Rows, texts and tokens of some prompts. Raises ValueError naming the row that has none, or
    too many."""
    rows = source.rows(indices)
    texts = form.texts(rows, lambda place: source.where(indices[place]))
    tokens = form.tokenise(texts)
    for index, ids in zip(indices, tokens):
        if not ids:
            raise ValueError(f"{source.where(index)}: the prompt has no tokens")
        if problem := room.problem(len(ids)):
            raise ValueError(f"{source.where(index)}: {problem}")
    return rows, texts, tokens


def short_enough(
    source: RowSource,
    form: PromptFormat,
    max_prompt_len: int | None,
    flag: str,
    room: Room = _ANY,
) -> range | np.ndarray:
    """Indices of the rows whose prompt has at most `max_prompt_len` tokens. Where no limit is set,
    all of them, of which up to
    `_CHECKED`, evenly spread, are rendered, tokenised and measured.

    Raises ValueError when none is left, and naming the row whose prompt cannot be made or does not
    fit. The number left out becomes a note of the source.
    """
    if max_prompt_len is None:
        step = -(-len(source) // _CHECKED)
        for some in batches(len(range(0, len(source), step)), _TOKENISE_AT_ONCE):
            tokens_of(source, form, [step * index for index in some], room)
        return range(len(source))
    kept: list[int] = []
    shortest: int | None = None
    for indices in batches(len(source), _TOKENISE_AT_ONCE):
        lengths = [len(tokens) for tokens in tokens_of(source, form, indices)[2]]
        shortest = min(lengths) if shortest is None else min(shortest, *lengths)
        kept += [index for index, length in zip(indices, lengths) if length <= max_prompt_len]
    if not kept:
        raise ValueError(
            f"--rollout-max-prompt-len {max_prompt_len}: {flag} {source.name} has no prompt this short; the shortest has {shortest} tokens"
        )
    if len(kept) < len(source):
        left_out = len(source) - len(kept)
        source.notes.append(
            f"{source.name}: left out {left_out} of {len(source)} prompts, longer than --rollout-max-prompt-len {max_prompt_len}"
        )
    return np.asarray(kept, dtype=np.int64)


class PromptSource:
    """An endless stream of prompts over epochs of one data source.

    answer_check: `data.sft.answer_problem`, or `rewards.registry.answer_check` of the run's reward;
    None accepts every label.
    `len()` is the number of prompts in an epoch, `num_left_out` the number of rows that were too
    long, `notes` what the user should be
    told once (rows left out), a line each. Raises ValueError at construction for everything that is
    wrong with the data, by its file and line, or with the chat template.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        *,
        answer_check: AnswerCheck | None = None,
        room: Room = _ANY,
    ) -> None:
        if config.prompt_data is None:
            raise ValueError(
                "--prompt-data is missing: name a .jsonl or .parquet file, or reasoning_gym:<task>"
            )
        self._form = PromptFormat(
            config,
            tokenizer,
            keys=RowKeys.of(config.prompt_data, config),
            answer_check=answer_check,
        )
        self._source = open_source(
            config.prompt_data,
            check=self._form.check,
            columns=self._form.columns,
            skip_bad_rows=config.skip_bad_rows,
        )
        self._kept = short_enough(
            self._source, self._form, config.rollout_max_prompt_len, "--prompt-data", room
        )
        self.num_left_out = len(self._source) - len(self._kept)
        self.notes = self._source.notes
        self._shuffle, self._seed = config.rollout_shuffle, config.rollout_seed
        self.epoch = 0
        self._offset = 0  # prompts of this epoch that were handed out
        self._next_group_id = 0
        self._order = self._epoch_order()

    def __len__(self) -> int:
        return len(self._kept)

    def next_prompts(self, n: int) -> list[Prompt]:
        """The next `n` prompts, going on into the next epoch when this one ends. Group ids rise by
        one over the whole run."""
        indices: list[int] = []
        while len(indices) < n:
            if self._offset == len(self):
                self.epoch, self._offset = self.epoch + 1, 0
                self._order = self._epoch_order()
            taken = self._order[self._offset : self._offset + n - len(indices)]
            indices += [int(self._kept[i]) for i in taken]
            self._offset += len(taken)
        first = self._next_group_id
        self._next_group_id += n
        return _make_prompts(self._source, self._form, indices, first)

    def _epoch_order(self) -> range | np.ndarray:
        """Positions in `_kept`, in the order of this epoch."""
        if not self._shuffle:
            return range(len(self))
        # RandomState: numpy promises never to change its stream, so that a run resumes alike under
        # a later numpy.
        return np.random.RandomState([self._seed % 2**32, self.epoch]).permutation(len(self))

    def _fingerprint(self) -> dict[str, Any]:
        order = f"seed={self._seed}" if self._shuffle else "file"
        return {
            "path": self._source.name,
            "num_rows": len(self._source),
            "num_prompts": len(self),
            "content": self._source.content,
            "order": order,
        }

    def state_dict(self) -> dict[str, Any]:
        """The position as plain JSON."""
        return {
            "epoch": self.epoch,
            "offset": self._offset,
            "next_group_id": self._next_group_id,
            "source": self._fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises ValueError when the data is not the same; a moved
        file with the same content is."""
        saved, ours = dict(state["source"]), self._fingerprint()
        different = [key for key in ours if key != "path" and saved.get(key) != ours[key]]
        if different:
            words = "; ".join(
                f"{key}: saved {saved.get(key)!r}, now {ours[key]!r}" for key in different
            )
            raise ValueError(
                f"--prompt-data {ours['path']}: differs from the data of the saved run ({saved.get('path')}), so its position cannot be resumed: "
                f"{words}. Give the same data, --rollout-seed, --rollout-shuffle and --rollout-max-prompt-len, or start a new run"
            )
        self.epoch, self._offset, self._next_group_id = (
            int(state["epoch"]),
            int(state["offset"]),
            int(state["next_group_id"]),
        )
        self._order = self._epoch_order()


def _make_prompts(
    source: RowSource, form: PromptFormat, indices: Sequence[int], first_group_id: int
) -> list[Prompt]:
    made = tokens_of(source, form, indices)
    return [
        form.prompt(group_id, *parts)
        for group_id, parts in zip(itertools.count(first_group_id), zip(*made))
    ]


def load_eval_sets(
    eval_sets: Sequence[EvalSet],
    data: DataConfig,
    tokenizer: Any,
    *,
    flag: str = "--eval-prompt-data",
    answer_check: AnswerCheck | None = None,
    room_of: Callable[[EvalSet], Room] = lambda each: _ANY,
) -> tuple[dict[str, list[Prompt]], list[str]]:
    """Evaluation prompts by the name of their set, whole and in the order of the file; and notes
    for the user, as of `PromptSource`.

    Group ids are unique over all sets. Prompts over --rollout-max-prompt-len are left out.
    answer_check: of the run's reward; a set with a function of its own takes any row. room_of: how
    long its prompts may be. Raises ValueError as `PromptSource` does.
    """
    sets: dict[str, list[Prompt]] = {}
    notes: list[str] = []
    first = 0
    for each in eval_sets:
        keys = RowKeys.of(
            each.path,
            data,
            input_key=each.input_key,
            label_key=each.label_key,
            metadata_key=each.metadata_key,
        )
        check = None if each.custom_rm_path is not None else answer_check
        form = PromptFormat(data, tokenizer, keys=keys, answer_check=check, metadata=each.metadata)
        source = open_source(
            each.path,
            check=form.check,
            columns=form.columns,
            skip_bad_rows=data.skip_bad_rows,
            flag=flag,
        )
        kept = short_enough(source, form, data.rollout_max_prompt_len, flag, room_of(each))
        sets[each.name] = _make_prompts(source, form, [int(i) for i in kept], first)
        first += len(kept)
        notes += source.notes
    return sets, notes
