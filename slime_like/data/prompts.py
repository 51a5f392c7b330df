"""Data source of the rollouts: prompts in training order.

The order of an epoch depends only on (seed, epoch), so a position is three numbers, and a resumed
run draws the same prompts as an uninterrupted one. Waiting groups are part of every checkpoint
(`rollout/group_rows.py`).
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from arguments.eval_sets import EvalSet
from arguments.prompt_mix import with_overrides
from arguments.schema.data import DataConfig
from slime_like.data.agent_prompts import AgentPromptFormat
from slime_like.data.conversation import ConversationFormat
from slime_like.data.pairs import PairFormat
from slime_like.data.prompt_format import ANY_LENGTH, PromptFormat, Room, RowKeys
from slime_like.data.rendering import RowProblem
from slime_like.data.row_images import RowImages
from slime_like.data.rows import TASK_PREFIX, Row
from slime_like.data.source import RowSource, batches, folder_of, open_source, same_content
from slime_like.data.standard_rows import open_standard
from slime_like.images.encoded import EncodedImage
from slime_like.images.processor import ImageProcessor
from slime_like.rewards.registry import AnswerCheck
from slime_like.rewards.registry import answer_check as reward_check
from slime_like.text import clean
from slime_like.types import Prompt, T

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TOKENISE_AT_ONCE = 1000
# rows to check before the model is built; problems of others are reported when they are used
_CHECKED = 5000


@dataclass(frozen=True, slots=True)
class TokenisedRows:
    """Rows of a source, with what their prompts are made of."""

    rows: list[Row]  # without images
    images: list[list[object]]  # of each row, not read yet
    texts: list[object]
    tokens: list[tuple[int, ...]]


def tokenise_rows(
    source: RowSource, form: PromptFormat, indices: Sequence[int], room: Room = ANY_LENGTH
) -> TokenisedRows:
    """Render and tokenise some prompts. Raises ValueError naming a row whose prompt is empty or too
    long, or whose images cannot be used."""

    def where(place: int) -> str:
        return source.where(indices[place])

    rows, images = form.split_images(source.rows(indices), where)
    texts = form.texts(rows, where)
    counts = [
        _of_row(form.image_tokens, each, text, where=where(place))
        for place, (each, text) in enumerate(zip(images, texts))
    ]
    tokens = form.tokenise(texts, counts)
    for place, ids in enumerate(tokens):
        if not ids:
            raise ValueError(f"{where(place)}: the prompt has no tokens")
        if problem := room.problem(len(ids)):
            raise ValueError(f"{where(place)}: {problem}")
    return TokenisedRows(rows, images, texts, tokens)


def _of_row(read: Callable[..., T], *arguments: object, where: str) -> T:
    """The result of `read`. Raises ValueError naming the row, where, in place of RowProblem."""
    try:
        return read(*arguments)
    except RowProblem as problem:
        raise ValueError(f"{where}: {clean(problem)}") from problem


def select_short_rows(
    source: RowSource,
    form: PromptFormat,
    max_prompt_len: int | None,
    flag: str,
    room: Room = ANY_LENGTH,
) -> range | np.ndarray:
    """Indices of the rows whose prompt has at most `max_prompt_len` tokens. Without a limit all
    rows, of which up to `_CHECKED`, evenly spaced, are rendered, tokenised and measured.

    Raises ValueError if no row is left, or naming a row whose prompt cannot be rendered or does not
    fit. The number of dropped rows is added to the notes of the source.
    """
    if max_prompt_len is None:
        step = -(-len(source) // _CHECKED)
        for chunk in batches(len(range(0, len(source), step)), _TOKENISE_AT_ONCE):
            tokenise_rows(source, form, [step * index for index in chunk], room)
        return range(len(source))
    kept: list[int] = []
    shortest: int | None = None
    for indices in batches(len(source), _TOKENISE_AT_ONCE):
        lengths = [len(tokens) for tokens in tokenise_rows(source, form, indices).tokens]
        shortest = min(lengths) if shortest is None else min(shortest, *lengths)
        kept += [index for index, length in zip(indices, lengths) if length <= max_prompt_len]
    if not kept:
        raise ValueError(
            f"{room.prompt_limit} {max_prompt_len}: every prompt of {flag} {source.name} is "
            f"longer; the shortest has {shortest} tokens"
        )
    if len(kept) < len(source):
        num_dropped = len(source) - len(kept)
        source.notes.append(
            f"{source.name}: dropped {num_dropped} of {len(source)} prompts, longer than "
            f"{room.prompt_limit} {max_prompt_len}"
        )
    return np.asarray(kept, dtype=np.int64)


class PromptStream(abc.ABC):
    """The prompts of a run, in training order: of one data source, or of a mix. `len()` is the
    number of prompts per epoch, `num_left_out` the number of rows that were too long, `notes`
    messages to log."""

    num_left_out: int
    notes: list[str]

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def next_prompts(self, n: int) -> list[Prompt]:
        """The next `n` prompts. Group ids increase by one over the whole run."""

    def observe(self, prompt: Prompt, rewards: Sequence[float | None]) -> None:
        """The rewards of a prompt's samples, once it is trained on or dropped."""
        return

    def metrics(self) -> dict[str, float]:
        """How far the stream is."""
        return {}

    @abc.abstractmethod
    def state_dict(self) -> dict[str, object]:
        """The position as plain JSON."""

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`. Raises ValueError if the data differ; a moved file with equal
        content is fine."""


class PromptSource(PromptStream):
    """An endless stream of prompts over epochs of one data source.

    Args:
        metadata: Overrides each row's, of prompts to answer.
        order: Distinguishes the orders of sources with the same seed.
        answer_check: `data.sft.answer_problem`, or `rewards.registry.answer_check` of the run's
            reward; None accepts every label.
        conversations: Rows are conversations for supervised training.
        pairs: Rows are preference pairs.
        teaches_itself: Self-distillation.
        trains_labels: Supervised training on the labels.
        raw_messages: See `PromptFormat`.
        for_agents: Rows are for agents.
        image_processor: The model's, with --multimodal-keys.

    Raises:
        ValueError: For any problem with the data, naming file and line, or with the chat template.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        answer_check: AnswerCheck | None = None,
        room: Room = ANY_LENGTH,
        conversations: bool = False,
        pairs: bool = False,
        teaches_itself: bool = False,
        trains_labels: bool = False,
        raw_messages: bool = False,
        for_agents: bool = False,
        image_processor: ImageProcessor | None = None,
        metadata: Mapping[str, object] | None = None,
        order: tuple[int, ...] = (),
    ) -> None:
        if config.prompt_data is None:
            raise ValueError("--prompt-data is missing: .jsonl, .parquet or reasoning_gym:<task>")
        keys = RowKeys.of(config.prompt_data, config)
        images = row_images(image_processor, config, config.prompt_data)
        self._form: PromptFormat
        if pairs:
            self._form = PairFormat(config, tokenizer, keys=keys, images=images)
        elif conversations:
            self._form = ConversationFormat(config, tokenizer, keys=keys, images=images)
        else:
            self._form = form_of_prompts(for_agents)(
                config,
                tokenizer,
                keys=keys,
                answer_check=answer_check,
                metadata=metadata,
                teaches_itself=teaches_itself,
                trains_labels=trains_labels,
                raw_messages=raw_messages or for_agents,
                images=images,
            )
        self._source = open_source(
            config.prompt_data,
            check=self._form.check,
            recorded=self._form.recorded,
            columns=self._form.columns,
            skip_bad_rows=config.skip_bad_rows,
        )
        self._kept = select_short_rows(
            self._source, self._form, config.rollout_max_prompt_len, "--prompt-data", room
        )
        self.num_left_out = len(self._source) - len(self._kept)
        self.notes = self._source.notes
        self._shuffle = config.rollout_shuffle
        self._seed = config.rollout_seed
        self._order_key = order
        self.epoch = 0
        self._offset = 0  # number of prompts of this epoch that were handed out
        self._next_group_id = 0
        self._order = self._epoch_order()

    def __len__(self) -> int:
        return len(self._kept)

    def next_prompts(self, n: int) -> list[Prompt]:
        """See `PromptStream`; at the end of an epoch the next one begins."""
        indices: list[int] = []
        while len(indices) < n:
            if self._offset == len(self):
                self.epoch = self.epoch + 1
                self._offset = 0
                self._order = self._epoch_order()
            taken = self._order[self._offset : self._offset + n - len(indices)]
            indices += [int(self._kept[i]) for i in taken]
            self._offset += len(taken)
        first = self._next_group_id
        self._next_group_id += n
        return self.prompts_of(indices, first)

    def prompts_of(self, indices: Sequence[int], first_group_id: int) -> list[Prompt]:
        """The prompts of some rows, with group ids from `first_group_id` on."""
        return _make_prompts(self._source, self._form, indices, first_group_id)

    def _epoch_order(self) -> range | np.ndarray:
        """Indices into `_kept`, in the order of this epoch."""
        if not self._shuffle:
            return range(len(self))
        # RandomState: numpy guarantees its stream, so that a run resumes identically under a later
        # numpy version.
        key = [self._seed % 2**32, self.epoch, *self._order_key]
        return np.random.RandomState(key).permutation(len(self))

    def _fingerprint(self) -> dict[str, object]:
        order = f"seed={self._seed}" if self._shuffle else "file"
        return {
            "path": self._source.name,
            "num_rows": len(self._source),
            "num_prompts": len(self),
            "content": self._source.content,
            "order": order,
        }

    def state_dict(self) -> dict[str, object]:
        """See `PromptStream`."""
        return {
            "epoch": self.epoch,
            "offset": self._offset,
            "next_group_id": self._next_group_id,
            "source": self._fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `PromptStream`."""
        saved = dict(state["source"])
        current = self._fingerprint()
        different = [key for key in current if key != "path" and saved.get(key) != current[key]]
        if same_content(saved.get("content"), self._source.content):
            different = [key for key in different if key != "content"]
        if different:
            changes = "; ".join(
                f"{key}: saved {saved.get(key)!r}, now {current[key]!r}" for key in different
            )
            raise ValueError(
                f"--prompt-data {current['path']}: differs from the data of the saved run "
                f"({saved.get('path')}), so its position cannot be resumed: {changes}. Use the "
                "same data, --rollout-seed, --rollout-shuffle and --rollout-max-prompt-len, or "
                "start a new run"
            )
        self.epoch = int(state["epoch"])
        self._offset = int(state["offset"])
        self._next_group_id = int(state["next_group_id"])
        self._order = self._epoch_order()


def _make_prompts(
    source: RowSource, form: PromptFormat, indices: Sequence[int], first_group_id: int
) -> list[Prompt]:
    made = tokenise_rows(source, form, indices)
    prompts = []
    columns = zip(made.rows, made.texts, made.tokens, made.images)
    for place, (row, text, tokens, images) in enumerate(columns):
        prompt = form.prompt(first_group_id + place, row, text, tokens)
        if images:
            loaded = _of_row(form.load_images, images, where=source.where(indices[place]))
            prompt = with_images(prompt, loaded)
        prompts.append(prompt)
    return prompts


def with_images(prompt: Prompt, images: tuple[EncodedImage, ...]) -> Prompt:
    """The prompt, and in a pair the other answer's, with its images."""
    rejected = None if prompt.rejected is None else with_images(prompt.rejected, images)
    return replace(prompt, images=images, rejected=rejected)


def form_of_prompts(for_agents: bool) -> type[PromptFormat]:
    """How rows become prompts, where they are not for supervised training."""
    return AgentPromptFormat if for_agents else PromptFormat


def row_images(processor: ImageProcessor | None, data: DataConfig, spec: str) -> RowImages | None:
    """Takes the images out of the rows of a data source; None without --multimodal-keys."""
    if processor is None or data.multimodal_keys is None or spec.startswith(TASK_PREFIX):
        return None
    return RowImages(processor, data.multimodal_keys["image"], folder_of(spec))


def load_eval_sets(
    eval_sets: Sequence[EvalSet],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    flag_of: Callable[[EvalSet], str] = lambda eval_set: "--eval-prompt-data",
    answer_check: AnswerCheck | None = None,
    room_of: Callable[[EvalSet], Room] = lambda eval_set: ANY_LENGTH,
    raw_messages: bool = False,
    for_agents: bool = False,
    image_processor: ImageProcessor | None = None,
) -> tuple[dict[str, list[Prompt]], list[str]]:
    """Evaluation prompts by set name, complete and in file order; and notes for the user, like
    those of `PromptSource`.

    Group ids are unique over all sets. Prompts over a set's max_prompt_len, or over
    --rollout-max-prompt-len, are dropped. Raises ValueError like `PromptSource`.

    Args:
        flag_of: Names a set's flag in errors.
        answer_check: Of the run's reward, for sets without their own; a set with its own function
            accepts every row.
        room_of: Limits for prompt lengths.
        raw_messages: See `PromptFormat`.
        for_agents, image_processor: See `PromptSource`.
    """
    sets: dict[str, list[Prompt]] = {}
    notes: list[str] = []
    first = 0
    for eval_set in eval_sets:
        flag = flag_of(eval_set)
        check = answer_check
        if eval_set.custom_rm_path is not None:
            check = None
        elif eval_set.rm_type is not None:
            check = reward_check(eval_set.rm_type, None)
        make_form = functools.partial(
            form_of_prompts(for_agents),
            with_overrides(data, eval_set),
            tokenizer,
            answer_check=check,
            metadata=eval_set.metadata,
            raw_messages=raw_messages or for_agents,
        )
        source: RowSource
        if eval_set.set is not None:
            form = make_form(keys=RowKeys("prompt", "label", "metadata"))
            source = open_standard(
                eval_set, check=form.check, flag=flag, skip_bad_rows=data.skip_bad_rows
            )
        else:
            keys = RowKeys.of(
                eval_set.path,
                data,
                input_key=eval_set.input_key,
                label_key=eval_set.label_key,
                metadata_key=eval_set.metadata_key,
            )
            form = make_form(
                keys=replace(keys, desirable=None),
                images=row_images(image_processor, data, eval_set.path),
            )
            source = open_source(
                eval_set.path,
                check=form.check,
                recorded=form.recorded,
                columns=form.columns,
                skip_bad_rows=data.skip_bad_rows,
                flag=flag,
            )
        longest = eval_set.max_prompt_len or data.rollout_max_prompt_len
        kept = select_short_rows(source, form, longest, flag, room_of(eval_set).of(eval_set))
        sets[eval_set.name] = _make_prompts(source, form, [int(i) for i in kept], first)
        first += len(kept)
        notes += source.notes
    return sets, notes
