"""Recorded rollouts on disk, to train without generating, or for inspection.

Two files: ``<path>.json`` with everything except tensors, and ``<path>.safetensors`` with the
tensors of every sample. The JSON has the SHA-256 of the other file, so that files of different
rollouts cannot be mixed. Images are in the folder ``images`` beside them, each once over all
rollouts, under the SHA-256 of its file. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from slime_like.checked_json import HIGHEST_LOG_PROB, LOWEST_LOG_PROB
from slime_like.images.encoded import EncodedImage
from slime_like.images.recorded import IMAGES, image_path
from slime_like.samples.episodes import complete
from slime_like.samples.groups import SampleGroup, flatten
from slime_like.text import clean, shown
from slime_like.types import NOT_SAMPLED, Sample, SampleStatus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


FORMAT = "slime_like rollout 1"
_DAMAGED = (AttributeError, KeyError, TypeError, ValueError, RecursionError)
_MAX_ID = 2**62
_DIGEST = re.compile("[0-9a-f]{64}")
# field of `Sample` -> its name in the files of all versions
_TENSORS = {
    "tokens": "tokens",
    "loss_mask": "loss_mask",
    "rollout_log_probs": "rollout_log_probs",
    "sampling_mask": "token_sets",
    "routed_experts": "routes",
    "indexer_topk": "indexer_topk",
    "token_rewards": "token_rewards",
}
# Fields that JSON holds, with their types. Rewards, labels and metadata may hold NaN: Python's
# JSON writes and reads it.
_PLAIN: Mapping[str, tuple[type, ...] | None] = {
    "group_id": (int,),
    "sample_id": (int,),
    "response_length": (int,),
    "reward": (int, float, type(None)),
    "text": (str,),
    "response": (str,),
    "label": None,  # any
    "metadata": (dict,),
}
# keys under which JSON holds a tuple, and a dict whose keys are not all text
_TUPLE = "__tuple__"
_ITEMS = "__items__"


def debug_data_paths(template: str, rollout_id: int, *, first: int = 1) -> tuple[Path, Path]:
    """(JSON, safetensors) paths of a rollout.

    Args:
        template: ``{rollout_id}`` in it is replaced by the rollout's number; an extension of either
        file is dropped. rollout_id: counted from 0. first: the number of the first rollout: 1, as
        on the screen and in metrics.jsonl; 0 in files of version 0.1 and before.
    """
    stem = (
        template.replace("{rollout_id}", str(rollout_id + first))
        .removesuffix(".json")
        .removesuffix(".safetensors")
    )
    return Path(stem + ".json"), Path(stem + ".safetensors")


def save_rollout(template: str, rollout_id: int, groups: Sequence[SampleGroup]) -> Path:
    """Write both files, each atomically and the JSON last; returns its path. Raises ValueError
    naming the sample whose label or metadata hold anything but text, numbers, None, lists, tuples
    and dicts."""
    json_path, tensor_path = debug_data_paths(template, rollout_id)
    tensors: dict[str, Tensor] = {}
    sample_ids = [sample.sample_id for sample in flatten(groups)]
    assert len(set(sample_ids)) == len(sample_ids), "sample ids are unique"
    rows = []
    for group in groups:
        samples = [_to_row(s, tensors, str(s.sample_id)) for s in complete(group.samples)]
        rows.append({"group_id": group.group_id, "samples": samples})
    payload = save(tensors)
    header = {
        "format": FORMAT,
        "rollout": rollout_id + 1,
        "rollout_id": rollout_id,
        "tensors_sha256": hashlib.sha256(payload).hexdigest(),
        "groups": rows,
    }
    json_path.parent.mkdir(parents=True, exist_ok=True)
    _write_images(json_path.parent / IMAGES, complete(flatten(groups)))
    _write(tensor_path, payload)
    text = json.dumps(header, ensure_ascii=False, indent=1)
    _write(json_path, text.encode("utf-8", "surrogatepass"))
    return json_path


def _write_images(folder: Path, samples: Sequence[Sample]) -> None:
    """Write the images that the folder does not have yet."""
    images = {
        image.digest: image for s in samples for each in (s, *s.branches) for image in each.images
    }
    for image in images.values():
        path = image_path(folder, image.digest)
        if not path.is_file():
            folder.mkdir(exist_ok=True)
            _write(path, image.data)


def _read_image(folder: Path, digest: str) -> EncodedImage:
    """Raises ValueError if the file is missing or has another content."""
    path = image_path(folder, digest)
    if not path.is_file():
        raise ValueError(f"{path}: no such file, an image of the recording")
    image = EncodedImage(path.read_bytes())
    if image.digest != digest:
        raise ValueError(f"{path}: damaged: another content than when it was recorded")
    return image


def save_token_values(
    template: str, rollout_id: int, rank: int, values: Mapping[str, Mapping[str, Tensor]]
) -> Path:
    """Write per-token training inputs of one data-parallel rank next to the recorded rollout, for
    inspection.

    Args:
        template, rollout_id: See `save_rollout`.
        rank: Data-parallel rank.
        values: By sample (its id; for a branch the id, a dot and its number) and name, [R] each.
    """
    path = debug_data_paths(template, rollout_id)[1].with_suffix(f".train{rank}.safetensors")
    tensors: dict[str, Tensor] = {}
    for key, named in values.items():
        for name, tensor in named.items():
            tensors[f"{key}.{name}"] = tensor.detach().float().cpu().contiguous().clone()
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, save(tensors))
    return path


def remove_token_values(template: str, rollout_id: int) -> None:
    """Remove the token values of an earlier attempt at this rollout, which may have had more
    ranks."""
    stem = debug_data_paths(template, rollout_id)[0].with_suffix("")
    for path in stem.parent.glob(f"{glob.escape(stem.name)}.train*.safetensors"):
        path.unlink(missing_ok=True)


def save_token_texts(
    template: str,
    rollout_id: int,
    groups: Sequence[SampleGroup],
    tokenizer: PreTrainedTokenizerBase,
) -> Path:
    """Write the text of every token of a recorded rollout, for readers without the tokenizer.
    Tokens are decoded after another token, because many tokenizers drop a leading space."""
    ids: set[int] = set()
    for sample in complete(flatten(groups)):
        for sequence in (sample, *sample.branches):
            ids.update(sequence.tokens.tolist())
    alone = {token: tokenizer.decode([token]) for token in sorted(ids)}
    texts = {str(token): text for token, text in alone.items()}
    before = next((token for token, text in alone.items() if text.isalnum()), None)
    if before is not None:
        for token in alone:
            both = tokenizer.decode([before, token])
            if both.startswith(alone[before]):
                texts[str(token)] = both[len(alone[before]) :]
    path = debug_data_paths(template, rollout_id)[0].with_suffix(".tokens.json")
    _write(path, json.dumps(texts).encode())
    return path


def load_rollout(template: str, rollout_id: int) -> list[SampleGroup]:
    """Load the groups of `save_rollout`.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: Names the file: damaged, of another rollout, or the two files do not belong
            together.
    """
    json_path, tensor_path = _recorded_paths(template, rollout_id)
    for path in (json_path, tensor_path):
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: no such file; --load-debug-rollout-data needs it for rollout "
                f"{rollout_id + 1}"
            )
    header = _read_header(json_path)
    if header.get("rollout_id") != rollout_id and "{rollout_id}" in template:
        recorded = header.get("rollout_id")
        number = recorded + 1 if type(recorded) is int else shown(recorded)
        raise ValueError(f"{json_path}: holds rollout {number}, not {rollout_id + 1}")
    payload = tensor_path.read_bytes()
    if hashlib.sha256(payload).hexdigest() != header.get("tensors_sha256"):
        raise ValueError(f"{tensor_path}: damaged, or not written together with {json_path}")
    try:
        tensors = load(payload)
        groups = []
        images = RecordedImages(json_path.parent / IMAGES)
        for row in header["groups"]:
            samples = tuple(_from_row(sample_row, tensors, images) for sample_row in row["samples"])
            groups.append(SampleGroup(row["group_id"], samples))
        return groups
    except (*_DAMAGED, SafetensorError) as error:
        reason = f"{type(error).__name__}: {clean(str(error))}"
        raise ValueError(f"{json_path}: damaged ({reason})") from error


def _recorded_paths(template: str, rollout_id: int) -> tuple[Path, Path]:
    """Paths of a recorded rollout. Files of earlier versions, which counted from 0, are recognised
    by the missing "rollout" in their header."""
    paths = debug_data_paths(template, rollout_id)
    earlier = debug_data_paths(template, rollout_id, first=0)
    if earlier != paths and earlier[0].is_file():
        with contextlib.suppress(ValueError):  # a damaged file, of another rollout
            header = _read_header(earlier[0])
            if "rollout" not in header and header.get("rollout_id") == rollout_id:
                return earlier
    return paths


def _read_header(json_path: Path) -> dict[str, Any]:
    try:
        header = json.loads(json_path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{json_path}: not JSON ({clean(str(error))})") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(
            f"{json_path}: not a saved rollout (expected a JSON object with format {FORMAT!r})"
        )
    return header


def _to_row(sample: Sample, tensors: dict[str, Tensor], key: str) -> dict[str, Any]:
    """Serialise a sample: returns its JSON row and adds its tensors to `tensors`, under names that
    start with `key`."""
    for name, stored_as in _TENSORS.items():
        tensor = getattr(sample, name)
        if tensor is not None:  # cloned: safetensors rejects tensors that share memory
            tensors[f"{key}.{stored_as}"] = tensor.detach().cpu().contiguous().clone()
    tensors[f"{key}.weight_versions"] = torch.tensor(sample.weight_versions, dtype=torch.int64)
    where = f"sample {sample.sample_id}"
    values = {name: getattr(sample, name) for name in _PLAIN} | {"metadata": dict(sample.metadata)}
    row = {name: encode(value, f"{where}: {name}") for name, value in values.items()}
    row["status"] = str(sample.status)
    if sample.images:
        row["images"] = [image.digest for image in sample.images]
    if sample.branches:
        row["branches"] = [
            _to_row(branch, tensors, f"{key}.{i}") for i, branch in enumerate(sample.branches)
        ]
    return row


class RecordedImages:
    """The images of a recording, each read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, EncodedImage] = {}

    def of_row(self, row: Mapping[str, Any]) -> tuple[EncodedImage, ...]:
        """The images of a sample's row. Raises ValueError."""
        digests = row.get("images", [])
        if not all(isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in digests):
            raise ValueError(f"images is {shown(digests)}")
        for digest in digests:
            if digest not in self._read:
                self._read[digest] = _read_image(self._folder, digest)
        return tuple(self._read[digest] for digest in digests)


def _from_row(
    row: dict[str, Any], tensors: dict[str, Tensor], images: RecordedImages, key: str = ""
) -> Sample:
    where = f"sample {shown(row['sample_id'])}"
    key = key or str(row["sample_id"])
    for name, types in _PLAIN.items():
        value = row[name]
        legal = types is None or type(value) in types
        lowest = 0 if types == (int,) else -_MAX_ID
        is_number = types is not None and type(value) is int
        if not legal or (is_number and not lowest <= value <= _MAX_ID):
            raise ValueError(f"{where}: {name} is {shown(value)}")
    length = row["response_length"]
    present: dict[str, Any] = {
        name: tensors[f"{key}.{stored_as}"]
        for name, stored_as in _TENSORS.items()
        if f"{key}.{stored_as}" in tensors
    }
    tokens = present.get("tokens")
    loss_mask = present.get("loss_mask")
    if (
        tokens is None
        or loss_mask is None
        or not loss_mask.numel() == length <= tokens.numel()
        or (tokens.ndim, loss_mask.ndim) != (1, 1)
        or (tokens.dtype, loss_mask.dtype) != (torch.int64, torch.bool)
    ):
        raise ValueError(f"{where}: tokens or loss mask absent, or of the wrong length or type")
    branch_rows = enumerate(row.get("branches") or ())
    branches = [_from_row(branch, tensors, images, f"{key}.{i}") for i, branch in branch_rows]
    fields: dict[str, Any] = {name: decode(row[name]) for name in _PLAIN}
    return Sample(
        **fields,
        **present,
        status=SampleStatus(row["status"]),
        weight_versions=tuple(tensors[f"{key}.weight_versions"].tolist()),
        branches=tuple(branches),
        images=images.of_row(row),
    )


def check_values(groups: Sequence[SampleGroup], vocab_size: int) -> None:
    """Validate recorded samples like responses of engines.

    Args:
        groups: From `load_rollout`.
        vocab_size: Vocabulary size of the trained model.

    Raises:
        ValueError: Names the sample.
    """
    samples = complete(flatten(groups))
    ids = [sample.sample_id for sample in samples]
    if len(set(ids)) != len(ids):
        raise ValueError("two samples have the same sample_id")
    for sample in samples:
        if sample.status not in (SampleStatus.ABORTED, SampleStatus.FAILED):
            for sequence in (sample, *sample.branches):
                _check_sample(sequence, vocab_size)


def _check_sample(sample: Sample, vocab_size: int) -> None:
    where = f"sample {sample.sample_id}"
    length = sample.response_length
    wrong = (sample.tokens < 0) | (sample.tokens >= vocab_size)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise ValueError(
            f"{where}: tokens: {int(sample.tokens[place])} at {place} is not a token id from 0 to "
            f"{vocab_size - 1}"
        )
    versions = sample.weight_versions
    if len(versions) not in (0, length) or min(versions, default=0) < NOT_SAMPLED:
        raise ValueError(f"{where}: weight versions {shown(versions)} for {length} tokens")
    log_probs = sample.rollout_log_probs
    if log_probs is not None:
        if log_probs.shape != (length,):
            raise ValueError(f"{where}: {log_probs.numel()} log-probs for {length} tokens")
        legal = (log_probs >= LOWEST_LOG_PROB) & (log_probs <= HIGHEST_LOG_PROB)  # no NaN
        wrong = sample.loss_mask & ~legal
        if bool(wrong.any()):
            place = int(wrong.nonzero()[0])
            raise ValueError(
                f"{where}: the log-prob of token {place} is {float(log_probs[place])}, must be a "
                f"number from {LOWEST_LOG_PROB:g} to 0"
            )
    rewards = sample.token_rewards
    if rewards is not None and (rewards.shape != (length,) or not bool(rewards.isfinite().all())):
        raise ValueError(f"{where}: {rewards.numel()} rewards of {length} tokens, or not finite")
    if sample.sampling_mask is not None:
        sets = sample.sampling_mask
        if sets.ndim != 2 or sets.size(0) != length:
            raise ValueError(f"{where}: token sets of shape {tuple(sets.shape)}")
        if sets.numel() and (int(sets.min()) < -1 or int(sets.max()) >= vocab_size):
            raise ValueError(f"{where}: token sets with ids beyond the vocabulary")
        response = sample.tokens[sample.prompt_length :]
        has_own = (sets == response[:, None]).any(1) | ~sample.loss_mask
        if not bool(has_own.all()):
            raise ValueError(f"{where}: a token was not among those that it was sampled from")


def encode(value: object, where: str) -> Any:
    """Encode `value` losslessly for JSON, which would silently turn tuples into lists and numeric
    keys into strings."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if type(value) is list:
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {_TUPLE: [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if type(value) is dict:
        items = [
            (encode(key, where), encode(item, f"{where}[{key!r}]")) for key, item in value.items()
        ]
        plain = all(type(key) is str and key not in (_TUPLE, _ITEMS) for key in value)
        return dict(items) if plain else {_ITEMS: items}
    raise ValueError(
        f"{where} is a {type(value).__name__}; a saved rollout can hold text, numbers, None, "
        "lists, tuples and dicts"
    )


def decode(value: object) -> Any:
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(decode(item) for item in value[_TUPLE])
        if value.keys() == {_ITEMS}:
            return {decode(key): decode(item) for key, item in value[_ITEMS]}
        return {key: decode(item) for key, item in value.items()}
    return value


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
