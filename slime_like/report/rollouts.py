"""Recorded rollouts (--save-debug-rollout-data) as compact columns for the page.

The list of samples is stored in columns; the tokens of each sample, and values per token, are
packed as base64, which the page unpacks when the sample is opened.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slime_like.images.recorded import IMAGES, image_path
from slime_like.metrics.logger import FILE_NAME as METRICS_FILE
from slime_like.report.images import Thumbnails
from slime_like.report.read import Run, rounded

FORMAT = b'"format": "slime_like rollout 1"'  # near the start of a recording
DTYPES = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "I16": "<i2", "BOOL": "?"}
MAX_TEXT = 100_000  # characters of a prompt or response
# name on the page -> (tensor of the recording, tensor to subtract)
FIELDS = {
    "advantage": ("advantages", None),
    "log_prob": ("rollout_log_probs", None),
    "diff": ("old_log_probs", "rollout_log_probs"),
    "entropy": ("entropy", None),
    "value": ("values", None),
    "importance": ("importance_weights", None),
    "token_reward": ("token_rewards", None),
}


@dataclass(slots=True)
class Samples:
    """Samples for the page."""

    columns: dict[str, list[Any]] = field(default_factory=dict)  # of the list, [N] each
    prompts: list[str] = field(default_factory=list)  # texts, indexed by `columns["prompt"]`
    details: list[dict[str, object]] = field(default_factory=list)  # by sample, see `_details`
    vocabularies: list[dict[str, str]] = field(default_factory=list)  # by run and token
    left_out: int = 0  # number of samples beyond the limit
    problems: list[str] = field(default_factory=list)
    thumbnails: Thumbnails = field(default_factory=Thumbnails)


COLUMNS = (
    "run", "rollout", "group", "id", "reward", "status", "length", "prompt", "response", "label",
    "meta", "advantage", "images",
)  # fmt: skip


def recordings(run: Run) -> list[Path]:
    """JSON files of recorded rollouts in the run's folder (without nested runs), or else in the
    folder that its flag names, where a later run of the same settings may record; newest rollouts
    first."""
    inner = {path.parent for path in run.folder.rglob(METRICS_FILE)} - {run.folder}
    own = [path for path in run.folder.rglob("*.json") if inner.isdisjoint(path.parents)]
    paths = {path.resolve() for path in own if _is_recording(path)}
    template = run.record.get("config", {}).get("--save-debug-rollout-data")
    if not paths and isinstance(template, str) and "{rollout_id}" in template:
        stem = Path(template.removesuffix(".json").removesuffix(".safetensors"))
        name = stem.name.replace("{rollout_id}", "*")
        if "{rollout_id}" not in str(stem.parent):
            paths |= {path.resolve() for path in stem.parent.glob(name + ".json")}
    return sorted(filter(_is_recording, paths), key=_number, reverse=True)


def _is_recording(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return FORMAT in file.read(200)
    except OSError:
        return False


def _number(path: Path) -> tuple[int, str]:
    digits = "".join(c for c in path.stem if c.isdecimal())
    return int(digits or 0), str(path)


def read_samples(runs: Sequence[Run], limit: int) -> Samples:
    """Samples of all runs, at most `limit`: of the newest rollouts, and of each run's first one, so
    that the page can compare its beginning with its end."""
    result = Samples({name: [] for name in COLUMNS}, vocabularies=[{} for _ in runs])
    prompts: dict[str, int] = {}
    files: list[tuple[int, Path]] = []
    first: list[tuple[int, Path]] = []
    for index, run in enumerate(runs):
        paths = recordings(run)
        first += [(index, path) for path in paths[-1:]]
        files += [(index, path) for path in paths[:-1]]
    files.sort(key=lambda item: _number(item[1])[0], reverse=True)
    for index, path in [*files[: len(runs)], *first, *files[len(runs) :]]:
        try:
            header = json.loads(path.read_bytes())
            groups = header["groups"]
            if len(result.details) >= limit:
                result.left_out += sum(len(group["samples"]) for group in groups)
                continue
            tensors = _tensors_of(path)
            rollout = int(header.get("rollout", header["rollout_id"] + 1))
        except (OSError, ValueError, KeyError, TypeError) as error:
            result.problems.append(f"{path.name}: cannot be read ({type(error).__name__})")
            continue
        result.vocabularies[index].update(_vocabulary(path))
        for group in groups:
            for row in group["samples"]:
                if len(result.details) >= limit:
                    result.left_out += 1
                    continue
                images = _images(result, path, row)
                name = str(row["sample_id"])
                _add(result, prompts, index, rollout, row, tensors, name, images)
                for i, branch in enumerate(row.get("branches") or ()):
                    name = f"{row['sample_id']}.{i}"
                    images = _images(result, path, branch)
                    both = {**row, **branch}
                    _add(result, prompts, index, rollout, both, tensors, name, images)
    if result.thumbnails.left_out:
        result.problems.append(f"{result.thumbnails.left_out} images are not shown")
    result.prompts = list(prompts)
    return result


def _add(
    result: Samples,
    prompts: dict[str, int],
    run: int,
    rollout: int,
    row: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    name: str,
    images: list[int | None] | None,
) -> None:
    """Add one sample or branch. name: of the sample, or of a branch of its episode. images: places
    in `Samples.thumbnails`."""
    details = _details(name, int(row["response_length"]), tensors)
    reward = row.get("reward")
    if isinstance(reward, int | float) and math.isfinite(reward):
        reward = rounded(float(reward))
    elif reward is not None:
        reward = str(reward)
    advantage = details.get("advantage")
    values = (
        run,
        rollout,
        row["group_id"],
        name,
        reward,
        str(row.get("status", "")),
        row["response_length"],
        prompts.setdefault(str(row.get("text", ""))[:MAX_TEXT], len(prompts)),
        str(row.get("response", ""))[:MAX_TEXT],
        _text(row.get("label")),
        _text(row.get("metadata") or None),
        advantage if isinstance(advantage, int | float) else None,
        images,
    )
    for column, value in zip(COLUMNS, values):
        result.columns[column].append(value)
    result.details.append(details)


def _images(result: Samples, recording: Path, row: Mapping[str, Any]) -> list[int | None] | None:
    """Places of a row's images in `Samples.thumbnails`; None without images."""
    folder = recording.parent / IMAGES
    digests = [d for d in row.get("images") or () if isinstance(d, str) and d.isalnum()]
    return [result.thumbnails.place(image_path(folder, d)) for d in digests] or None


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)[:MAX_TEXT]


def _details(name: str, length: int, tensors: Mapping[str, np.ndarray]) -> dict[str, object]:
    """Token details of a response, by name on the page: ``tokens`` (int32), ``mask`` (bytes, absent
    if all tokens are trained on), ``versions`` (int32), and other fields as bfloat16, or as one
    number if all tokens have the same value. Packed as base64."""

    def get(tensor: str | None) -> np.ndarray | None:
        values = tensors.get(f"{name}.{tensor}")
        return values if values is not None and values.shape[:1] == (length,) else None

    packed: dict[str, object] = {}
    tokens = tensors.get(f"{name}.tokens")
    if tokens is not None and length:
        packed["tokens"] = _base64(tokens[-length:].astype("<i4"))
    mask = get("loss_mask")
    versions = get("weight_versions")
    if mask is not None and not mask.all():
        packed["mask"] = _base64(mask.astype("u1"))
    if versions is not None and versions.size:
        packed["versions"] = _constant_or(versions.astype("<i4"))
    for field_name, (tensor, other) in FIELDS.items():
        value = get(tensor)
        subtracted = get(other)
        if value is not None and value.size and (other is None or subtracted is not None):
            difference = value if subtracted is None else value - subtracted
            trained = mask if field_name == "advantage" else None  # 0 at untrained tokens
            packed[field_name] = _constant_or(difference.astype("<f4"), trained)
    old = get("old_log_probs")
    ref = get("ref_log_probs")
    if old is not None and ref is not None and old.size:
        with np.errstate(over="ignore"):
            packed["kl"] = _constant_or((np.exp(ref - old) - (ref - old) - 1).astype("<f4"))
    return packed


def _constant_or(values: np.ndarray, mask: np.ndarray | None = None) -> object:
    """The packed values, or one number if all are equal. mask: the values that matter; None for
    all."""
    seen = values if mask is None or not mask.any() else values[mask.astype(bool)]
    if (seen == seen[0]).all() and math.isfinite(seen[0]):
        return rounded(float(seen[0]))
    if values.dtype == np.dtype("<f4"):  # rounded to bfloat16
        bits = values.view("<u4")
        kept = np.where(np.isnan(values), 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
        return _base64(kept.astype("<u2"))
    return _base64(values)


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def _tensors_of(path: Path) -> dict[str, np.ndarray]:
    """Tensors of the recording, and of each rank's training data."""
    tensors = dict(_read_safetensors(path.with_suffix(".safetensors")))
    for training in sorted(path.parent.glob(f"{path.stem}.train*.safetensors")):
        tensors.update(_read_safetensors(training))
    return tensors


def _read_safetensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors of a safetensors file. Raises ValueError if it is damaged."""
    data = path.read_bytes()
    try:
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + size])
        for name, entry in header.items():
            if name == "__metadata__" or entry["dtype"] not in DTYPES:
                continue
            begin, end = entry["data_offsets"]
            values = np.frombuffer(data[8 + size + begin : 8 + size + end], DTYPES[entry["dtype"]])
            yield name, values.reshape(entry["shape"])
    except (struct.error, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: no safetensors file ({error})") from error


def _vocabulary(path: Path) -> dict[str, str]:
    try:
        tokens = json.loads(path.with_suffix(".tokens.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in tokens.items()} if isinstance(tokens, dict) else {}
