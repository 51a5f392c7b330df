"""Convert a row of a data source to a prompt: keys, chat template, tokens and validation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from arguments.eval_sets import EvalSet
from arguments.prompt_mix import MixSource
from arguments.schema.data import DataConfig
from slime_like.data.chat_template import ChatRenderer
from slime_like.data.messages import ASSISTANT, MessageProblem, canonical
from slime_like.data.rendering import RowProblem, render_rows
from slime_like.data.row_images import RowImages, without_images
from slime_like.data.rows import TASK_PREFIX, Row
from slime_like.data.turns import continue_turn
from slime_like.images.encoded import EncodedImage
from slime_like.rewards.registry import AnswerCheck
from slime_like.types import PROMPT_MESSAGES, TEACHER_CONTEXT, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class RowKeys:
    """Names of a row's keys."""

    input: str
    label: str | None
    metadata: str
    tools: str = "tools"
    input_flag: str = "--input-key"
    demonstration: str | None = None
    desirable: str | None = None

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
        """The keys that the settings name for a file; rows of a reasoning_gym source have fixed
        keys."""
        if spec.startswith(TASK_PREFIX):
            demonstration = config.opd_demonstration_key
            return cls("question", "answer", "metadata", demonstration=demonstration)
        return cls(
            input_key or config.input_key,
            label_key or config.label_key,
            metadata_key or config.metadata_key,
            config.tool_key,
            demonstration=config.opd_demonstration_key,
            desirable=config.desirable_key,
        )


@dataclass(frozen=True, slots=True)
class Room:
    """Limits for prompt lengths."""

    positions: int | None = None  # of the model, None if they do not matter
    response: int = 0
    # what sets the limits, for messages
    prompt_limit: str = "--rollout-max-prompt-len"
    response_limit: str = "--rollout-max-response-len"

    def of(self, own: EvalSet | MixSource) -> Room:
        """The limits, with the names of those that an evaluation set or a source has itself."""
        names: dict[str, Any] = {}
        if own.max_prompt_len is not None:
            names["prompt_limit"] = f"{own.name}'s max_prompt_len"
        if own.max_response_len is not None:
            flag = " (--eval-max-response-len)" if isinstance(own, EvalSet) else ""
            names["response_limit"] = f"{own.name}'s max_response_len{flag}"
        return replace(self, **names)

    def problem(self, tokens: int) -> str | None:
        """Why a prompt of `tokens` tokens does not fit, or None."""
        if self.positions is None or tokens + self.response <= self.positions:
            return None
        longest = self.positions - self.response
        remedy = f"lower {self.response_limit}"
        if longest > 0:
            remedy = f"{self.prompt_limit} {longest} drops such prompts"
        return (
            f"the prompt has {tokens} tokens, which with a response of {self.response} exceed the "
            f"model's {self.positions} positions; {remedy}"
        )


ANY_LENGTH = Room()


class PromptFormat:
    """Converts rows to prompts: keys and chat template, for which a plain string is one user
    message.

    answer_check: validates a row's label and metadata for the reward. No special tokens are added:
    a chat template writes its own, and plain strings are used as they are. Raises ValueError if a
    chat template is requested and the tokenizer has none.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        keys: RowKeys,
        answer_check: AnswerCheck | None = None,
        metadata: Mapping[str, object] | None = None,
        chat: bool = False,
        teaches_itself: bool = False,
        trains_labels: bool = False,
        raw_messages: bool = False,
        images: RowImages | None = None,
    ) -> None:
        """
        Args:
            chat: Use the chat template regardless of --apply-chat-template.
            teaches_itself: Store the context of the teacher's prompt in the metadata
                (self-distillation).
            trains_labels: The label is the answer to train on.
            raw_messages: Without the chat template, rows with messages are for a user function,
                which renders them.
            images: Takes the images out of rows (--multimodal-keys).
        """
        self.images = images
        self._trains_labels = trains_labels
        self.keys = keys
        self._teaches_itself = teaches_itself
        self._metadata = dict(metadata or {})  # overrides each row's metadata
        self._answer_check = answer_check
        self.tokenizer = tokenizer
        self._chat = config.apply_chat_template or chat
        has_template = bool(getattr(tokenizer, "chat_template", None))
        self._raw_messages = raw_messages and has_template and not self._chat
        self._template = ChatRenderer(
            tokenizer, config.apply_chat_template_kwargs, images=config.multimodal_keys is not None
        )
        if self._chat and not getattr(tokenizer, "chat_template", None):
            flag = "--apply-chat-template"
            remedy = "remove the flag"
            if chat:
                flag = "--input-key"
                remedy = "set --label-key"
            raise ValueError(f"{flag}: the tokenizer has no chat template; {remedy} or use another")

    @property
    def columns(self) -> list[str]:
        keys = (self.keys.input, self.keys.label, self.keys.metadata, self.keys.tools)
        column = None if self.images is None else self.images.column
        others = (self.keys.desirable, self._demonstration_key, column)
        return [key for key in (*keys, *others) if key is not None]

    @property
    def conversations(self) -> tuple[str, ...]:
        """Fields with a text or a list of messages."""
        return (self.keys.input,)

    @property
    def _demonstration_key(self) -> str | None:
        return self.keys.demonstration if self._teaches_itself else None

    def check(self, row: Row) -> str | None:
        """Problem with a row of the source, or None."""
        if self.images is None:
            return self._problem(row)
        try:
            row, images = self.images.split(row, self.conversations)
        except RowProblem as problem:
            return str(problem)
        return self._problem(row) or self.images.problem(images)

    def recorded(self, row: Row) -> Row:
        """The part of a row that recordings and checkpoints must be able to hold as JSON."""
        if self.images is None:
            return row
        return without_images(row, self.images.column, self.conversations)

    def split_images(
        self, rows: Sequence[Row], where: Callable[[int], str]
    ) -> tuple[list[Row], list[list[object]]]:
        """The rows without their images, as the other methods take them, and the images of each.
        where: as in `texts`. Raises ValueError naming the row."""
        if self.images is None:
            return list(rows), [[] for _ in rows]
        pairs = []
        for place, row in enumerate(rows):
            try:
                pairs.append(self.images.split(row, self.conversations))
            except RowProblem as problem:
                raise ValueError(f"{where(place)}: {problem}") from problem
        return [row for row, _ in pairs], [images for _, images in pairs]

    def image_tokens(self, images: Sequence[object], text: Any) -> list[int]:
        """The number of placeholders of each of a row's images. text: of the row, see `texts`.
        Raises RowProblem."""
        if self.images is None:
            return []
        written = self._written_text(text).count(self.images.processor.mark)
        if written != len(images):
            raise RowProblem(
                f"the chat template writes {written} of the row's {len(images)} images; use the "
                "template of a model that takes images"
            )
        return self.images.counts(images)

    def _written_text(self, text: Any) -> str:
        """The whole text of a row."""
        return str(text)

    def load_images(self, images: Sequence[object]) -> tuple[EncodedImage, ...]:
        """The images of a row. Raises RowProblem."""
        return () if self.images is None else self.images.load(images)

    def _problem(self, row: Row) -> str | None:
        """Problem with a row without its images, or None."""
        for flag, key in (
            (self.keys.input_flag, self.keys.input),
            ("--label-key", self.keys.label),
            ("--desirable-key", self.keys.desirable),
            ("--opd-demonstration-key", self._demonstration_key),
        ):
            if key is not None and key not in row:
                return missing_key(key, flag, row)
        desirable = None if self.keys.desirable is None else row[self.keys.desirable]
        if desirable not in (None, False, True):
            name = f"{self.keys.desirable!r} (--desirable-key)"
            return f"{name} must be true or false, or 1 or 0, not {desirable!r}"
        if desirable is None and self.keys.desirable is not None:
            return f"{self.keys.desirable!r} (--desirable-key) is null"
        prompt = row[self.keys.input]
        metadata = row.get(self.keys.metadata)
        if metadata is not None and not isinstance(metadata, dict):
            name = f"{self.keys.metadata!r} (--metadata-key)"
            return f"{name} must be an object, not {type(metadata).__name__}"
        if prompt == "":
            return f"{self.keys.input!r} ({self.keys.input_flag}) is empty"
        problem = (
            self._check_prompt(prompt) or self._check_tools(row) or self._check_demonstration(row)
        )
        if problem is None and self._answer_check is not None:
            problem = self._answer_check(self._label(row), {**(metadata or {}), **self._metadata})
        return problem

    def _check_tools(self, row: Row) -> str | None:
        tools = row.get(self.keys.tools) if self._renders(row) else None
        if tools is None:
            return None
        name = f"{self.keys.tools!r} (--tool-key)"
        try:
            decoded = _decoded(tools)
        except ValueError as error:
            return f"{name} is not valid JSON: {error}"
        if not isinstance(decoded, list):
            return f"{name} must be a list of tools, or its JSON, not {type(decoded).__name__}"
        return None

    def _check_demonstration(self, row: Row) -> str | None:
        if not self._teaches_itself:
            return None
        prompt = row[self.keys.input]
        if not isinstance(prompt, str) and not isinstance(prompt[-1].get("content"), str):
            name = f"{self.keys.input!r} ({self.keys.input_flag})"
            return f"{name}: the last message must be text with --opd-type self"
        key = self._demonstration_key
        if key is None or isinstance(row[key], str):
            return None
        return f"{key!r} (--opd-demonstration-key) must be a string, not {type(row[key]).__name__}"

    def _check_prompt(self, messages: Any) -> str | None:
        if isinstance(messages, str):
            return None
        name = f"{self.keys.input!r} ({self.keys.input_flag})"
        is_chat = (
            isinstance(messages, list)
            and messages
            and all(isinstance(m, dict) and "role" in m for m in messages)
        )
        if not is_chat:
            kind = type(messages).__name__
            return f"{name} must be a string or a list of messages with a role, not {kind}"
        if not (self._chat or self._raw_messages):
            return f"{name} is a list of chat messages, which needs --apply-chat-template"
        for number, message in enumerate(messages):
            if problem := self._message_problem(message):
                return f"{name}: message {number} ({message['role']}): {problem}"
        return self._end_problem(messages)

    def _message_problem(self, message: Row) -> str | None:
        try:
            found = row_message(message)
        except MessageProblem as problem:
            hint = "; images need --multimodal-keys" * (self.images is None and _has_image(message))
            return f"{problem}{hint}"
        if message.get("content") is None and not found.get("tool_calls"):
            return "'content' is missing or null"
        return None

    def _end_problem(self, messages: Sequence[Row]) -> str | None:
        """Why no answer can follow the last message, or None."""
        if messages[-1]["role"] != ASSISTANT or self._template.continues_answer:
            return None
        return (
            f"{self.keys.input!r} ({self.keys.input_flag}) ends with an assistant's turn, which "
            "leaves nothing to answer; remove it, or continue it with "
            "--apply-chat-template-kwargs '{\"continue_final_message\": true}'; "
            "--loss-type sft_loss learns from such rows"
        )

    def _label(self, row: Row) -> object:
        return row[self.keys.label] if self.keys.label is not None else None

    def texts(self, rows: Sequence[Row], where: Callable[[int], str]) -> list[Any]:
        """The rendered text of each row: strings here, as accepted by `tokenise` and `prompt`.
        where: a row's location for messages, by index in `rows`. Raises ValueError like
        `render_rows`."""
        if self._chat or self._raw_messages:
            render = self._render_with_answer if self._trains_labels else self._render
            return render_rows(render, rows, where)
        prompts = [row[self.keys.input] for row in rows]
        assert all(isinstance(prompt, str) for prompt in prompts), (
            "check() lets messages through only with a chat template"
        )
        return prompts

    def _renders(self, row: Row) -> bool:
        """Whether the row's prompt is rendered with the chat template."""
        return self._chat or (self._raw_messages and not isinstance(row[self.keys.input], str))

    def _render(self, row: Row) -> str:
        if not self._renders(row):
            return str(row[self.keys.input])
        return self._prompt_text(row[self.keys.input], self._tools(row))

    def _render_with_answer(self, row: Row) -> str:
        """The prompt, if the label continues it. Raises RowProblem."""
        text = self._render(row)
        continue_turn(text, str(self._label(row)))
        return text

    def _prompt_text(self, prompt: str | Sequence[Row], tools: object) -> str:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = [row_message(message) for message in turns]
        text = self._template.render(messages, tools, open_turn=True)
        self._template.check_written(messages, tools)
        return text

    def teacher_text(self, metadata: Mapping[str, Any], rewrite: Callable[[str], str]) -> str:
        """The prompt as seen by the teacher, with its last message rewritten. metadata: of the
        prompt, with `TEACHER_CONTEXT`."""
        prompt = metadata[TEACHER_CONTEXT]["prompt"]
        if isinstance(prompt, str):
            prompt = rewrite(prompt)
        else:
            last = prompt[-1]
            prompt = [*prompt[:-1], {**last, "content": rewrite(last["content"])}]
        return self._prompt_text(prompt, metadata.get("tools")) if self._chat else str(prompt)

    def _tools(self, row: Row) -> object:
        """Tools of a row for the chat template, or None."""
        return _decoded(row.get(self.keys.tools)) if self._renders(row) else None

    def _metadata_of(self, row: Row) -> dict[str, object]:
        tools = self._tools(row)
        extra: dict[str, object] = {}
        if tools is not None:
            extra["tools"] = tools  # key in which slime's functions expect them
        if self._raw_messages and self._renders(row):
            extra[PROMPT_MESSAGES] = row[self.keys.input]
        if self._teaches_itself:
            key = self._demonstration_key
            demonstration = None if key is None else row[key]
            extra[TEACHER_CONTEXT] = {
                "prompt": row[self.keys.input],
                "demonstration": demonstration,
            }
        return {**(row.get(self.keys.metadata) or {}), **extra, **self._metadata}

    def tokenise(
        self, texts: Sequence[Any], image_tokens: Sequence[Sequence[int]] | None = None
    ) -> list[tuple[int, ...]]:
        """The ids of each text, or of the part of it that is the prompt. image_tokens: see the
        method of this name, of each text; None if there are no images."""
        if not texts:  # which tokenizers do not take
            return []
        processor = None if self.images is None else self.images.processor
        prompts = [self._prompt_of(text) for text in texts]
        if processor is not None:
            prompts = [processor.written(prompt) for prompt in prompts]
        encoded = self.tokenizer(prompts, add_special_tokens=False, return_attention_mask=False)
        if processor is None or image_tokens is None:
            return [tuple(ids) for ids in encoded["input_ids"]]
        return [
            tuple(processor.expand(ids, counts))
            for ids, counts in zip(encoded["input_ids"], image_tokens, strict=True)
        ]

    def _prompt_of(self, text: Any) -> str:
        return str(text)

    def prompt(self, group_id: int, row: Row, text: Any, tokens: tuple[int, ...]) -> Prompt:
        """The prompt of a row, still without its images. text, tokens: from `texts` and
        `tokenise`."""
        label = self._label(row)
        if self._trains_labels and self._chat:
            label = continue_turn(text, str(label))
        metadata = self._metadata_of(row)
        return Prompt(
            group_id=group_id,
            text=text,
            tokens=tokens,
            label=label,
            metadata=metadata,
            desirable=self.desirable(row),
        )

    def desirable(self, row: Row) -> bool | None:
        """Whether the row's answer is desirable; None without --desirable-key."""
        return None if self.keys.desirable is None else bool(row[self.keys.desirable])


def missing_key(key: str, flag: str, row: Row) -> str:
    outer = key.partition(".")[0]
    inner = row.get(outer) if outer != key else None
    if isinstance(inner, dict):
        return f"missing key {key!r} ({flag}); {outer!r} has: {', '.join(sorted(inner))}"
    return f"missing key {key!r} ({flag}); the row has: {', '.join(sorted(row)) or 'no keys'}"


def row_message(message: Row) -> dict[str, Any]:
    """The canonical form of a row's message; its role may be one that only the template knows."""
    return canonical(message, roles=None, keep_others=True)


def _has_image(message: Row) -> bool:
    """Whether the content has a part with an image, in any of its names."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, dict) and "image" in str(part.get("type")) for part in parts)


def _decoded(tools: object) -> object:
    """Decode tools given as a string. Raises ValueError for invalid JSON."""
    return json.loads(tools) if isinstance(tools, str) else tools
