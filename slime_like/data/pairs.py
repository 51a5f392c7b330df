"""Preference pairs: rows with a chosen and a rejected answer to one prompt (`--loss-type
dpo_loss`), in TRL's columns `chosen` and `rejected`.

Answers are strings or lists of messages. Lists either start with the assistant's answer to the
prompt of --input-key, or include the prompt as their common prefix.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from arguments.schema.data import DataConfig
from slime_like.config import LARGEST_FLOAT32
from slime_like.data.conversation import ConversationFormat
from slime_like.data.messages import ASSISTANT
from slime_like.data.prompt_format import PromptFormat, RowKeys, missing_key
from slime_like.data.rendering import RowProblem, render_rows
from slime_like.data.row_images import RowImages
from slime_like.data.rows import Row
from slime_like.data.sft import sft_samples
from slime_like.data.turns import MASKS, STEP_MASK, Segment, continue_turn
from slime_like.images.processor import ImageProcessor
from slime_like.text import shown
from slime_like.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PairText: TypeAlias = "str | tuple[list[Segment], list[Segment]]"
Message: TypeAlias = dict[str, Any]


class PairFormat(PromptFormat):
    """Preference pairs: a row becomes the prompt of its chosen answer, and `rejected` has the other
    answer's."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        keys: RowKeys,
        images: RowImages | None = None,
    ) -> None:
        super().__init__(
            config, tokenizer, keys=dataclasses.replace(keys, label=None), images=images
        )
        self._answers = {"--chosen-key": config.chosen_key, "--rejected-key": config.rejected_key}
        self._margin_key = config.margin_key
        self._conversations: list[ConversationFormat] = []
        if getattr(tokenizer, "chat_template", None):
            self._conversations = [
                ConversationFormat(
                    config,
                    tokenizer,
                    keys=dataclasses.replace(keys, input=key, label=None, input_flag=flag),
                )
                for flag, key in self._answers.items()
            ]

    @property
    def columns(self) -> list[str]:
        margin = [] if self._margin_key is None else [self._margin_key]
        return [*super().columns, *self._answers.values(), *margin]

    @property
    def conversations(self) -> tuple[str, ...]:
        return (self.keys.input, *self._answers.values())

    def _problem(self, row: Row) -> str | None:
        for flag, key in self._answers.items():
            if key not in row:
                return missing_key(key, flag, row)
        chosen, rejected = (row[key] for key in self._answers.values())
        kinds = {type(chosen), type(rejected)}
        if kinds not in ({str}, {list}) or not chosen or not rejected:
            names = " and ".join(f"{key!r} ({flag})" for flag, key in self._answers.items())
            return f"{names} must both be texts, or both lists of messages, and not empty"
        if chosen == rejected:
            return "the chosen and the rejected answer are the same, so nothing can be learnt"
        if problem := self._check_margin(row):
            return problem
        return self._check_conversations(row) if kinds == {list} else super()._problem(row)

    def _check_margin(self, row: Row) -> str | None:
        if self._margin_key is None:
            return None
        margin: Any = row.get(self._margin_key)
        is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
        if is_number and abs(margin) <= LARGEST_FLOAT32:  # no float holds every integer of JSON
            return None
        name = f"{self._margin_key!r} (--margin-key)"
        return f"{name} must be a finite number that float32 holds, not {shown(margin)}"

    def _check_conversations(self, row: Row) -> str | None:
        if not self._conversations:
            return "answers are lists of messages, and the tokenizer has no chat template"
        for key in self._answers.values():
            if not all(isinstance(message, dict) for message in row[key]):
                return f"{key!r} must be a list of messages with a role"
            if row[key][0].get("role") == ASSISTANT and self.keys.input not in row:
                return f"missing key {self.keys.input!r} (--input-key), what {key!r} answers"
            prompt = row.get(self.keys.input, [])
            if row[key][0].get("role") == ASSISTANT and not _is_prompt(prompt):
                return f"{self.keys.input!r} (--input-key) must be a string or a list of messages"
        rows = self._full_conversations(row)
        return next(filter(None, (f.check(r) for f, r in zip(self._conversations, rows))), None)

    def _full_conversations(self, row: Row) -> list[Row]:
        """The row twice, with each answer as a full conversation, in which turns that both share
        are not trained on."""
        conversations: list[list[Message]] = [list(row[key]) for key in self._answers.values()]
        if conversations[0][0].get("role") == ASSISTANT:
            prompt = row[self.keys.input]
            prompt_messages = (
                [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            )
            conversations = [[*prompt_messages, *answer] for answer in conversations]
        shared = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*conversations))
        )
        return [
            {**row, key: [_untrained(m) for m in messages[:shared]] + messages[shared:]}
            for key, messages in zip(self._answers.values(), conversations)
        ]

    def texts(self, rows: Sequence[Row], where: Callable[[int], str]) -> list[PairText]:
        return render_rows(self._pair_text, rows, where)

    def _pair_text(self, row: Row) -> PairText:
        if isinstance(row[self._answers["--chosen-key"]], str):
            if not self._chat:
                return row[self.keys.input]
            text = self._render(row)
            for key in self._answers.values():
                continue_turn(text, row[key])
            return text
        both = zip(self._conversations, self._full_conversations(row))
        chosen, rejected = (form.segments(each) for form, each in both)
        if chosen[0].text != rejected[0].text:
            raise RowProblem("the chosen and the rejected answer are answers to different prompts")
        return chosen, rejected

    def _prompt_of(self, text: PairText) -> str:
        return text if isinstance(text, str) else text[0][0].text

    def _written_text(self, text: PairText) -> str:
        segments = [Segment(text, False)] if isinstance(text, str) else text[0]
        return "".join(segment.text for segment in segments)

    def prompt(self, group_id: int, row: Row, text: PairText, tokens: tuple[int, ...]) -> Prompt:
        if isinstance(text, str):
            plain = super().prompt(group_id, row, text, tokens)
            answers = [row[key] for key in self._answers.values()]
            if self._chat:
                answers = [continue_turn(text, answer) for answer in answers]
            chosen, rejected = (dataclasses.replace(plain, label=answer) for answer in answers)
        else:
            chosen, rejected = (
                form.prompt(group_id, row, segments, tokens)
                for form, segments in zip(self._conversations, text)
            )
        margin = None if self._margin_key is None else float(row[self._margin_key])
        return dataclasses.replace(chosen, rejected=rejected, margin=margin)


def _untrained(message: dict[str, Any]) -> dict[str, Any]:
    """A message that is in both answers, whatever masks it has."""
    return {key: value for key, value in message.items() if key not in MASKS} | {STEP_MASK: 0}


def _is_prompt(value: object) -> bool:
    is_list = isinstance(value, list) and all(isinstance(message, dict) for message in value)
    return isinstance(value, str) or is_list


def pair_samples(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_response_len: int | None = None,
    scored: bool = False,
    processor: ImageProcessor | None = None,
) -> list[Sample]:
    """Samples of the chosen and the rejected answer of each prompt, alternating; see `sft_samples`.
    Their sample_ids are 2 group_id and 2 group_id + 1, their reward is the margin. scored: only the
    last token of each is active, at which a reward model has its score."""
    samples = []
    for prompt in prompts:
        assert prompt.rejected is not None, "made by PairFormat"
        for place, answer in enumerate((prompt, prompt.rejected)):
            (sample,) = sft_samples(
                [answer], tokenizer, max_response_len=max_response_len, processor=processor
            )
            sample = dataclasses.replace(
                sample, sample_id=2 * prompt.group_id + place, reward=prompt.margin
            )
            samples.append(_scored(sample) if scored else sample)
    return samples


def _scored(sample: Sample) -> Sample:
    last = torch.arange(sample.response_length) == sample.response_length - 1
    return dataclasses.replace(sample, loss_mask=last)
