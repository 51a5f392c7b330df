"""Validates the dict of lists returned by --custom-convert-samples-to-train-data-path, and converts
it to samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from slime_like.batching.turn_credit import keep_record
from slime_like.compat.slime.samples import HIGHEST_LOG_PROB, as_output, versions_of
from slime_like.types import OPTIONAL_TENSORS, TRAIN_REWARD, Sample, SampleStatus

REQUIRED = ("tokens", "response_lengths", "loss_masks", "rewards")
OPTIONAL = (
    "raw_reward",
    "truncated",
    "sample_indices",
    "rollout_ids",
    "rollout_log_probs",
    "rollout_mask_sums",
)
# keys for slime's logging and rollout buffer, or that slime computes itself
UNUSED = ("round_number", "metadata", "source_names", "prompt", "total_lengths")
_STATUS = {False: SampleStatus.COMPLETED, True: SampleStatus.TRUNCATED}


def read_train_data(
    result: object, samples: Sequence[Sample], name: str, *, vocab_size: int
) -> list[Sample]:
    """Parse the sequences to train on.

    Args:
        result: What the function returned.
        samples: The sequences that it received; those of an episode share an id and are adjacent.
        name: The flag and its value, for messages.
        vocab_size: Exclusive upper bound of token ids.

    Returns:
        The sequences of the same episodes in the same order, with any number of sequences per
        episode. `TRAIN_REWARD` in their metadata is the number to train on, NaN if there is none.
        An agent's record of its turns is dropped where the tokens of its episode have changed.

    Raises:
        ValueError: Names the flag, the key and the invalid entry.
    """
    data = _lists(result, name)
    ids = _episode_ids(data, samples, name)
    by_id: dict[int, list[Sample]] = {}
    for sample in samples:
        by_id.setdefault(sample.sample_id, []).append(sample)
    converted: dict[int, list[Sample]] = {sample_id: [] for sample_id in by_id}
    for place, sample_id in enumerate(ids):
        row = {key: values[place] for key, values in data.items()}
        number = len(converted[sample_id])
        where = f"{name}: entry {place}, of sample {sample_id}"
        converted[sample_id].append(_sample(row, by_id[sample_id], number, where, vocab_size))
    for sample_id, episode in converted.items():
        rewards = {repr(s.metadata[TRAIN_REWARD]) for s in episode}
        if len(rewards) > 1:
            raise ValueError(
                f"{name}: the sequences of sample {sample_id} have the rewards {sorted(rewards)}, "
                "must be equal"
            )
        converted[sample_id] = keep_record(episode, by_id[sample_id])
    _check_log_probs(data, name)
    _check_denominators(data, ids, converted, name)
    return list(chain.from_iterable(converted.values()))


def _lists(result: object, name: str) -> dict[str, Sequence[object]]:
    """The known keys, checked to be sequences of equal length."""
    if not isinstance(result, Mapping):
        raise ValueError(f"{name}: returned {type(result).__name__}; return a dict of lists")
    data = {key: value for key, value in result.items() if value is not None and key not in UNUSED}
    problems = [f"has no {key!r}" for key in REQUIRED if key not in data]
    problems += [f"has unknown {key!r}" for key in data if key not in (*REQUIRED, *OPTIONAL)]
    if problems:
        raise ValueError(
            f"{name}: the dict {problems[0]}; required: {', '.join(REQUIRED)}; optional: "
            f"{', '.join((*OPTIONAL, *UNUSED))}"
        )
    lengths = {key: len(value) for key, value in data.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{name}: lists of different lengths: {lengths}")
    return data


def _episode_ids(
    data: Mapping[str, Sequence[object]], samples: Sequence[Sample], name: str
) -> list[int]:
    """The sample that each entry belongs to, from rollout_ids, otherwise sample_indices, otherwise
    its position. Checks that every sample has entries, and that they are adjacent and in rollout
    order."""
    count = len(data["tokens"])
    expected = [sample.sample_id for sample in samples]
    key = next((key for key in ("rollout_ids", "sample_indices") if key in data), None)
    if key is None:
        if count != len(samples):
            raise ValueError(
                f"{name}: {count} entries for {len(samples)} samples; set 'rollout_ids' to the "
                "sample of each entry"
            )
        return expected
    ids = [int(value) if isinstance(value, int) else -1 for value in data[key]]
    runs = [i for place, i in enumerate(ids) if not place or ids[place - 1] != i]
    if runs != list(dict.fromkeys(expected)):
        raise ValueError(
            f"{name}: {key!r} must have every sample of the rollout, in order, with the sequences "
            f"of a sample adjacent; it starts with {list(data[key][:8])}, the samples with "
            f"{expected[:8]}"
        )
    return ids


def _sample(
    row: Mapping[str, Any], episode: Sequence[Sample], number: int, where: str, vocab_size: int
) -> Sample:
    """Build one sequence. number: index within its episode."""
    before = episode[min(number, len(episode) - 1)]
    length = row["response_lengths"]
    tokens = _tensor(row["tokens"], torch.int64, where, "tokens")
    if not tokens.numel() and not length and not before.response_length:
        tokens = before.tokens  # nothing was generated, so the function did not receive the prompt
    mask = _tensor(row["loss_masks"], torch.int64, where, "loss_masks")
    log_probs = row.get("rollout_log_probs")
    problems = {
        f"response_lengths is {length!r} of {tokens.numel()} tokens, prompt included": (
            type(length) is not int or not 0 <= length < tokens.numel()
        ),
        f"tokens are outside 0 to {vocab_size} - 1": bool(
            ((tokens < 0) | (tokens >= vocab_size)).any()
        ),
        f"loss_masks has {mask.numel()} entries for {length} response tokens": (
            mask.numel() != length
        ),
        "loss_masks has entries that are neither 0 nor 1": bool(((mask != 0) & (mask != 1)).any()),
    }
    for problem, holds in problems.items():
        if holds:
            raise ValueError(f"{where}: {problem}")
    _check_tensors(before, tokens, len(episode), number, where)
    return replace(
        before,
        tokens=tokens,
        response_length=length,
        loss_mask=mask.bool(),
        rollout_log_probs=None if log_probs is None else _log_probs(log_probs, mask, where),
        weight_versions=versions_of(
            tokens[tokens.numel() - length :].tolist(),
            mask.tolist(),
            [as_output(sample) for sample in episode],
        ),
        status=_status(row, before, where),
        reward=_number(row.get("raw_reward", before.reward), before, where, "raw_reward"),
        metadata={
            **before.metadata,
            TRAIN_REWARD: _number(row["rewards"], before, where, "rewards"),
        },
        branches=(),
    )


def _check_tensors(before: Sample, tokens: Tensor, count: int, number: int, where: str) -> None:
    """Raise ValueError if per-token data of the engine or the teacher belongs to other tokens."""
    present = [n for n in OPTIONAL_TENSORS if n != "rollout_log_probs" and before.has(n)]
    if present and (number >= count or not torch.equal(before.tokens, tokens)):
        raise ValueError(
            f"{where}: tokens must be unchanged, since the sample has {', '.join(present)}"
        )


def _tensor(value: object, dtype: torch.dtype, where: str, key: str) -> Tensor:
    """Convert a list or an array to [n]. Raises ValueError for other types of numbers."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.empty(0, 0)
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    if tensor.ndim != 1 or (dtype == torch.int64 and tensor.numel() and not is_integer):
        kind = "integers" if dtype == torch.int64 else "numbers"
        raise ValueError(f"{where}: {key} must be a list of {kind}")
    return tensor.to("cpu", dtype, copy=True)


def _log_probs(value: object, mask: Tensor, where: str) -> Tensor:
    """[R] float32; checked to be finite and at most 0 where the mask is 1."""
    log_probs = _tensor(value, torch.float32, where, "rollout_log_probs")
    if log_probs.numel() != mask.numel():
        raise ValueError(
            f"{where}: rollout_log_probs has {log_probs.numel()} entries for {mask.numel()} "
            "response tokens"
        )
    trained = log_probs[mask.bool()]
    if not bool((torch.isfinite(trained) & (trained < HIGHEST_LOG_PROB)).all()):
        raise ValueError(
            f"{where}: rollout_log_probs are not finite, or above 0, where loss_masks is 1"
        )
    return log_probs


def _status(row: Mapping[str, object], before: Sample, where: str) -> SampleStatus:
    value = row.get("truncated")
    if value is None or before.status not in _STATUS.values():
        return before.status
    if value not in (0, 1):
        raise ValueError(f"{where}: truncated is {value!r}, must be 0 or 1")
    return _STATUS[bool(value)]


def _number(value: object, before: Sample, where: str, key: str) -> float:
    """A reward; NaN if the sample had none because it failed."""
    lost = before.reward is None or not math.isfinite(before.reward)
    if isinstance(value, str | bytes) or not (value is None or hasattr(value, "__float__")):
        raise ValueError(f"{where}: {key} is {type(value).__name__}, must be a number")
    number = math.nan if value is None else float(value)
    if not lost and not math.isfinite(number):
        raise ValueError(
            f"{where}: {key} is {value}, but the sample had the reward {before.reward}"
        )
    return math.nan if lost else number


def _check_log_probs(data: Mapping[str, Sequence[object]], name: str) -> None:
    missing = [value is None for value in data.get("rollout_log_probs", ())]
    if any(missing) and not all(missing):
        raise ValueError(
            f"{name}: entry {missing.index(True)} has no rollout_log_probs, but others do; set "
            "them on all samples or on none"
        )


def _check_denominators(
    data: Mapping[str, Sequence[object]],
    ids: Sequence[int],
    converted: Mapping[int, Sequence[Sample]],
    name: str,
) -> None:
    """Check slime's denominators rollout_mask_sums; here --loss-reduction determines them."""
    for place, (value, sample_id) in enumerate(zip(data.get("rollout_mask_sums", ()), ids)):
        expected = sum(sample.active_tokens for sample in converted[sample_id])
        if value != expected:
            raise ValueError(
                f"{name}: rollout_mask_sums[{place}] is {value}, must be {expected}, the tokens in "
                f"the loss masks of sample {sample_id}; use --loss-reduction for other denominators"
            )
