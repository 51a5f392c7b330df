"""Buffer of unfinished groups, which are sampled before new prompts. Its state is part of every
checkpoint."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.data.prompts import PromptSource
from slime_like.rollout.recording import decode, encode
from slime_like.sample_index import AnySample, remote_samples, rows_of
from slime_like.types import Prompt, Sample, SampleGroup, SampleStatus, complete

_ARRAYS = (
    "tokens",
    "loss_mask",
    "rollout_log_probs",
    "token_sets",
    "routes",
    "teacher_log_probs",
    "teacher_prompt",
    "token_rewards",
)
_PLAIN = ("sample_id", "response_length", "response")


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """A prompt and its samples; some may be unfinished, and some may be on other ranks."""

    prompt: Prompt
    samples: tuple[AnySample, ...]

    @property
    def group_id(self) -> int:
        return self.prompt.group_id

    @property
    def ended(self) -> bool:
        return all(sample.ended for sample in self.samples)

    @property
    def response_tokens(self) -> int:
        return sum(sample.response_length for sample in self.samples)

    def with_samples(self, samples: Iterable[AnySample]) -> PendingGroup:
        """A copy with these samples."""
        return PendingGroup(self.prompt, tuple(samples))


# (waiting groups, count) -> ids of at most `count` groups to continue, ids of groups to discard
Choose = Callable[[Sequence[PendingGroup], int], tuple[list[int], list[int]]]
# buffer filter: (rollout id, waiting groups, count) -> the same
ChooseWaiting = Callable[[int, Sequence[PendingGroup], int], tuple[list[int], list[int]]]


def oldest_first(
    rollout_id: int, waiting: Sequence[PendingGroup], count: int
) -> tuple[list[int], list[int]]:
    """The default `ChooseWaiting`: the groups that have waited longest."""
    return [group.group_id for group in waiting[:count]], []


class GroupBuffer:
    """Provides groups to sample: unfinished ones selected by `choose`, then new prompts with
    n_samples empty samples each. rank: this rank, out of num_holders that sample."""

    def __init__(
        self, source: PromptSource, n_samples: int, *, rank: int = 0, num_holders: int = 1
    ) -> None:
        self.source = source
        self.n_samples = n_samples
        self._rank = rank
        self._num_holders = num_holders
        self.waiting: list[PendingGroup] = []

    def take(self, count: int, choose: Choose) -> tuple[list[PendingGroup], list[PendingGroup]]:
        """Draw groups.

        Args:
            count: Number of groups.
            choose: Selects waiting groups to continue and to discard.

        Returns:
            `count` groups to sample, and the discarded ones.
        """
        chosen, discarded = choose(self.waiting, count) if self.waiting else ([], [])
        by_id = {group.group_id: group for group in self.waiting}
        self.waiting = [
            group for group in self.waiting if group.group_id not in {*chosen, *discarded}
        ]
        groups = [by_id[i] for i in chosen]
        new = self.source.next_prompts(count - len(groups)) if len(groups) < count else []
        groups += [self.empty_group(prompt) for prompt in new]
        return groups, [by_id[i] for i in discarded]

    def empty_group(self, prompt: Prompt) -> PendingGroup:
        """A new group of empty samples for a prompt."""
        first = prompt.group_id * self.n_samples
        samples = (Sample.empty(prompt, first + j) for j in range(self.n_samples))
        return PendingGroup(prompt, tuple(samples))

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def requeue(self, groups: Sequence[PendingGroup]) -> None:
        """Return groups to the buffer, for the next `take`."""
        self.waiting += groups

    def load(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Replace the buffer by the groups of `waiting_to_rows`. Called on every rank; each keeps
        the samples it held, or a share if the number of ranks changed."""
        self.waiting = [self._loaded(row, place) for place, row in enumerate(rows)]

    def _loaded(self, row: Mapping[str, Any], place: int) -> PendingGroup:
        """Load one group. place: its index among the waiting groups."""
        prompt = _prompt(row["prompt"])
        samples: list[AnySample] = []
        for saved in row["samples"]:
            sample = _sample(prompt.group_id, prompt.text, prompt.label, saved)
            holder = int(saved.get("holder", place)) % self._num_holders
            has_begun = sample.response_length or sample.ended  # empty samples exist on all ranks
            if has_begun and holder != self._rank:
                samples += remote_samples(*rows_of([sample], holder))
            else:
                samples.append(sample)
        return PendingGroup(prompt, tuple(samples))


def waiting_to_rows(
    groups: Sequence[PendingGroup], holders: Sequence[Sequence[int]]
) -> list[dict[str, object]]:
    """Serialise waiting groups to plain JSON, exactly. groups: complete. holders: the rank that
    holds each of their samples."""
    return [
        {
            "prompt": _prompt_row(group.prompt),
            "samples": [
                _sample_row(s) | {"holder": holder}
                for s, holder in zip(complete(group.samples), of_group, strict=True)
            ],
        }
        for group, of_group in zip(groups, holders, strict=True)
    ]


def groups_to_rows(groups: Sequence[SampleGroup]) -> list[dict[str, object]]:
    """Serialise sampled groups to plain JSON, exactly; inverse of `groups_from_rows`. groups:
    complete."""
    return [
        {
            "group_id": group.group_id,
            "samples": [
                _sample_row(s)
                | {
                    "group_id": s.group_id,
                    "text": s.text,
                    "label": _text(s.label, f"sample {s.sample_id}: label"),
                }
                for s in complete(group.samples)
            ],
        }
        for group in groups
    ]


def groups_from_rows(rows: Sequence[Mapping[str, Any]]) -> list[SampleGroup]:
    """The groups that `groups_to_rows` was given."""
    return [
        SampleGroup(
            row["group_id"],
            tuple(_sample(s["group_id"], s["text"], _value(s["label"]), s) for s in row["samples"]),
        )
        for row in rows
    ]


def _prompt_row(prompt: Prompt) -> dict[str, object]:
    return {
        "group_id": prompt.group_id,
        "text": prompt.text,
        "tokens": list(prompt.tokens),
        "label": _text(prompt.label, f"prompt {prompt.group_id}: label"),
        "metadata": _text(dict(prompt.metadata), f"prompt {prompt.group_id}: metadata"),
    }


def _prompt(row: Mapping[str, Any]) -> Prompt:
    return Prompt(
        row["group_id"],
        row["text"],
        tuple(row["tokens"]),
        _value(row["label"]),
        _value(row["metadata"]),
    )


def _sample_row(sample: Sample) -> dict[str, object]:
    row = {name: getattr(sample, name) for name in _PLAIN} | {
        name: _pack(getattr(sample, name)) for name in _ARRAYS
    }
    return row | {
        "status": str(sample.status),
        "weight_versions": list(sample.weight_versions),
        "reward": None if sample.reward is None else float(sample.reward).hex(),
        "metadata": _text(dict(sample.metadata), f"sample {sample.sample_id}: metadata"),
        "branches": [_sample_row(branch) for branch in sample.branches],
    }


def _sample(group_id: int, text: str, label: Any, row: Mapping[str, Any]) -> Sample:
    # checkpoints of older versions have no log-probs of a teacher and no rewards of tokens
    arrays = {name: _unpack(row.get(name)) for name in _ARRAYS}
    tokens, mask = arrays.pop("tokens"), arrays.pop("loss_mask")
    assert tokens is not None and mask is not None
    sample = Sample(
        group_id=group_id,
        text=text,
        tokens=tokens,
        loss_mask=mask,
        status=SampleStatus(row["status"]),
        weight_versions=tuple(row["weight_versions"]),
        label=label,
        reward=None if row["reward"] is None else float.fromhex(row["reward"]),
        metadata=_value(row["metadata"]),
        **{name: row[name] for name in _PLAIN},
    )
    return replace(
        sample,
        rollout_log_probs=arrays["rollout_log_probs"],
        token_sets=arrays["token_sets"],
        routes=arrays["routes"],
        teacher_log_probs=arrays["teacher_log_probs"],
        teacher_prompt=arrays["teacher_prompt"],
        token_rewards=arrays["token_rewards"],
        branches=tuple(
            _sample(group_id, text, label, branch) for branch in row.get("branches", ())
        ),
    )


def _text(value: object, where: str) -> str:
    """Encode a value as a JSON string, because the JSON of the checkpoint rejects NaN."""
    return json.dumps(encode(value, where))


def _value(text: str) -> Any:
    return decode(json.loads(text))


def _pack(tensor: Tensor | None) -> dict[str, object] | None:
    if tensor is None:
        return None
    array = tensor.numpy()
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "bytes": base64.b64encode(array.tobytes()).decode(),
    }


def _unpack(row: Mapping[str, Any] | None) -> Tensor | None:
    if row is None:
        return None
    array = np.frombuffer(base64.b64decode(row["bytes"]), dtype=row["dtype"]).reshape(row["shape"])
    return torch.from_numpy(array.copy())
