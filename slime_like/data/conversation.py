"""Conversations for supervised fine-tuning: assistant turns are trained on, everything else is
masked (`--loss-type sft_loss` without `--label-key`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from arguments.schema.data import DataConfig
from slime_like.data.messages import ASSISTANT
from slime_like.data.prompt_format import PromptFormat, RowKeys, row_message
from slime_like.data.rendering import render_rows
from slime_like.data.row_images import RowImages
from slime_like.data.rows import Row
from slime_like.data.turns import MASKS, Segment, is_trained, split_trained_turns
from slime_like.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ConversationFormat(PromptFormat):
    """A `PromptFormat` in which a text is a list of segments; the first segment is the prompt.
    Raises ValueError if the tokenizer has no chat template."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        keys: RowKeys,
        images: RowImages | None = None,
    ) -> None:
        super().__init__(config, tokenizer, keys=keys, chat=True, images=images)
        self._mask_type = config.loss_mask_type

    def _check_prompt(self, messages: Any) -> str | None:
        name = f"{self.keys.input!r} ({self.keys.input_flag})"
        if isinstance(messages, str):
            return (
                f"{name} is a string; --loss-type sft_loss without --label-key trains on lists of "
                "messages: set --label-key, the field with the answer"
            )
        if problem := super()._check_prompt(messages):
            return problem
        if messages[0]["role"] == ASSISTANT:
            return f"{name}: the first message is an assistant's, which answers nothing"
        for number, message in enumerate(messages):
            given = {key: message[key] for key in MASKS if message.get(key) is not None}
            for key, value in given.items():
                if value not in (0, 1):
                    return f"{name}: message {number}: {key!r} is {value!r}; legal: 0 and 1"
            if len(set(given.values())) > 1:
                return f"{name}: message {number}: {' and '.join(MASKS)} contradict each other"
        if not any(map(is_trained, messages)):
            return f"{name}: there is no turn of an assistant to learn"
        return None

    def _end_problem(self, messages: Sequence[Row]) -> str | None:
        return None

    def texts(self, rows: Sequence[Row], where: Callable[[int], str]) -> list[list[Segment]]:
        return render_rows(self.segments, rows, where, remedy="correct the row or the template")

    def segments(self, row: Row) -> list[Segment]:
        """The conversation of a row, split at the start and end of its trained turns."""
        tools = self._tools(row)
        messages = [row_message(message) for message in row[self.keys.input]]
        render = functools.partial(self._template.render, tools=tools)
        end = self.tokenizer.eos_token or ""
        segments = split_trained_turns(render, messages, self._mask_type, end=end)
        self._template.check_written(messages, tools)
        for index, message in enumerate(messages):
            if is_trained(message):
                self._template.check_thoughts_written(messages[: index + 1], tools)
        return segments

    def _prompt_of(self, text: list[Segment]) -> str:
        return text[0].text

    def _written_text(self, text: list[Segment]) -> str:
        return "".join(segment.text for segment in text)

    def prompt(
        self, group_id: int, row: Row, text: list[Segment], tokens: tuple[int, ...]
    ) -> Prompt:
        turns = tuple((segment.text, segment.trained) for segment in text[1:])
        return Prompt(
            group_id,
            text[0].text,
            tokens,
            metadata=self._metadata_of(row),
            turns=turns,
            desirable=self.desirable(row),
        )
