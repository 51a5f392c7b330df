"""Saved rollouts: exact round trip, and errors that name the file."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.rollout.recording import check_values, debug_data_paths, load_rollout, save_rollout
from slime_like.samples.groups import SampleGroup
from slime_like.types import Sample, SampleStatus


def _sample(sample_id: int, **changes: Any) -> Sample:
    generator = torch.Generator().manual_seed(sample_id)
    response = 3 + sample_id
    values: dict[str, Any] = dict(
        group_id=sample_id // 2,
        sample_id=sample_id,
        tokens=torch.randint(0, 9, (4 + response,), generator=generator),
        response_length=response,
        loss_mask=torch.rand(response, generator=generator) > 0.3,
        rollout_log_probs=torch.randn(response, generator=generator),
        sampling_mask=torch.randint(-1, 9, (response, 4), generator=generator, dtype=torch.int32),
        routed_experts=torch.randint(
            -1, 9, (4 + response, 3, 2), generator=generator, dtype=torch.int16
        ),
        indexer_topk=torch.randint(
            -1, 4, (2 + response, 2, 2), generator=generator, dtype=torch.int32
        ),
        reward=1 / 3,
        weight_versions=tuple(range(response)),
        text="2 + 2 =",
        response=" 4 — 四\ud800",  # a lone surrogate, as a broken byte sequence may leave
        label="4",
        metadata={"task": "sums", "numbers": [1, 2.5, None, True]},
    )
    return Sample(**(values | changes))


GROUPS = [
    SampleGroup(
        7,
        (
            _sample(0),
            _sample(
                1,
                reward=None,
                status=SampleStatus.FAILED,
                rollout_log_probs=None,
                weight_versions=(),
            ),
            _sample(
                2,
                reward=float("nan"),
                status=SampleStatus.ABORTED,
                response_length=0,
                tokens=torch.tensor([5]),
                loss_mask=torch.zeros(0, dtype=torch.bool),
                rollout_log_probs=torch.zeros(0),
            ),
            _sample(
                3,
                reward=float("-inf"),
                status=SampleStatus.TRUNCATED,
                rollout_log_probs=torch.full((6,), float("nan")),
            ),
            _sample(
                4,
                label=[1, (2, "3")],
                metadata={
                    "t": (1, (2,)),
                    3: {"x": float("inf")},
                    "__tuple__": 1,
                    "d": {"__items__": [1]},
                    "e": {},
                },
            ),
        ),
    ),
    SampleGroup(8, ()),
]


def _same(a: Any, b: Any) -> bool:
    """Equal in value and type, with NaN equal to itself; tensors bit by bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.nan_to_num(nan=123.0), b.nan_to_num(nan=123.0))
        )
    if dataclasses.is_dataclass(a):
        return all(_same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return [(type(k), k) for k in a] == [(type(k), k) for k in b] and all(
            _same(a[k], b[k]) for k in a
        )
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def test_round_trip_is_exact(tmp_path: Path) -> None:
    template = str(tmp_path / "deep" / "rollout_{rollout_id}")
    path = save_rollout(template, 11, GROUPS)
    assert path == tmp_path / "deep" / "rollout_12.json"
    assert sorted(p.name for p in path.parent.iterdir()) == [
        "rollout_12.json",
        "rollout_12.safetensors",
    ]
    assert _same(load_rollout(template, 11), GROUPS)


def test_shared_and_strided_tensors_are_saved(tmp_path: Path) -> None:
    mask, tokens = torch.ones(4, dtype=torch.bool), torch.arange(16).view(8, 2)[:, 1]
    shared = dict(
        tokens=tokens, loss_mask=mask, response_length=4, rollout_log_probs=None, weight_versions=()
    )
    groups = [SampleGroup(0, (_sample(0, **shared), _sample(1, **shared)))]
    save_rollout(str(tmp_path / "r"), 0, groups)
    assert _same(load_rollout(str(tmp_path / "r"), 0), groups)


@pytest.mark.parametrize(
    "template", ["a/{rollout_id}", "a/{rollout_id}.json", "a/{rollout_id}.safetensors"]
)
def test_paths(template: str) -> None:
    assert debug_data_paths(template, 2) == (Path("a/3.json"), Path("a/3.safetensors"))


def test_a_template_without_id_serves_every_rollout(tmp_path: Path) -> None:
    save_rollout(str(tmp_path / "fixed"), 5, GROUPS)
    assert _same(load_rollout(str(tmp_path / "fixed"), 6), GROUPS)


@pytest.mark.parametrize("value", [torch.zeros(2), {1, 2}, object()])
def test_what_json_cannot_hold_is_refused_by_name(tmp_path: Path, value: object) -> None:
    groups = [SampleGroup(0, (_sample(3, metadata={"a": [0, value]}),))]
    with pytest.raises(
        ValueError, match=r"sample 3: metadata\['a'\]\[1\] is a (Tensor|set|object)"
    ):
        save_rollout(str(tmp_path / "r"), 0, groups)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, suffix: str) -> None:
    save_rollout(str(tmp_path / "r{rollout_id}"), 0, GROUPS)
    (tmp_path / f"r1.{suffix}").unlink()
    with pytest.raises(
        FileNotFoundError, match=rf"r1\.{suffix}: no such file; --load-debug-rollout-data"
    ):
        load_rollout(str(tmp_path / "r{rollout_id}"), 0)


def _spoil_json(path: Path) -> None:
    path.with_suffix(".json").write_text('{"format": ')


def _spoil_format(path: Path) -> None:
    path.with_suffix(".json").write_text('{"format": "other"}')


def _cut_tensors(path: Path) -> None:
    file = path.with_suffix(".safetensors")
    file.write_bytes(file.read_bytes()[:-1])


def _flip_a_bit(path: Path) -> None:
    file = path.with_suffix(".safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def _other_tensors(path: Path) -> None:
    save_rollout(str(path.with_name("other")), 1, GROUPS[:0])
    path.with_name("other.safetensors").replace(path.with_suffix(".safetensors"))


def _edit(path: Path, **changes: Any) -> None:
    file = path.with_suffix(".json")
    header = json.loads(file.read_bytes())
    header["groups"][0]["samples"][0] |= changes
    file.write_text(json.dumps(header))


def _wrong_length(path: Path) -> None:
    _edit(path, response_length=2)


def _word_for_reward(path: Path) -> None:
    _edit(path, reward="high")


def _huge_reward(path: Path) -> None:
    _edit(path, reward=10**400)


def _nested_metadata(path: Path) -> None:
    file = path.with_suffix(".json")
    text = file.read_bytes()
    file.write_bytes(text.replace(b'"metadata": {', b'"metadata": {"x": ' + b"[" * 50_000, 1))


def _group_id_of_text(path: Path) -> None:
    _edit(path, group_id="7")


def _unknown_status(path: Path) -> None:
    _edit(path, status="fine")


def _another_sample(path: Path) -> None:
    _edit(path, sample_id=99)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_spoil_json, r"r1\.json: not JSON"),
        (_spoil_format, r"r1\.json: not a saved rollout"),
        (_cut_tensors, r"r1\.safetensors: damaged, or not written together with .*r1\.json"),
        (_flip_a_bit, r"r1\.safetensors: damaged"),
        (_other_tensors, r"r1\.safetensors: damaged"),
        (_wrong_length, r"r1\.json: damaged \(ValueError: sample 0: "),
        (_unknown_status, r"r1\.json: damaged \(ValueError: 'fine'"),
        (
            _word_for_reward,
            r"r1\.json: damaged \(ValueError: sample 0: reward is 'high'",
        ),
        (_huge_reward, r"r1\.json: damaged \(ValueError: sample 0: reward is 10000"),
        (_nested_metadata, r"r1\.json: not JSON \("),
        (_group_id_of_text, r"r1\.json: damaged \(ValueError: sample 0: group_id is '7'"),
        (_another_sample, r"r1\.json: damaged \(ValueError: sample 99: "),
    ],
)
def test_damage_is_named(tmp_path: Path, spoil: Any, message: str) -> None:
    template = str(tmp_path / "r{rollout_id}")
    spoil(save_rollout(template, 0, GROUPS))
    with pytest.raises(ValueError, match=message):
        load_rollout(template, 0)


def test_a_renamed_rollout_is_refused(tmp_path: Path) -> None:
    template = str(tmp_path / "r{rollout_id}")
    save_rollout(template, 0, GROUPS)
    for suffix in ("json", "safetensors"):
        (tmp_path / f"r1.{suffix}").rename(tmp_path / f"r2.{suffix}")
    with pytest.raises(ValueError, match=r"r2\.json: holds rollout 1, not 2"):
        load_rollout(template, 1)


def test_files_of_an_earlier_version_are_numbered_from_0(tmp_path: Path) -> None:
    """And may lie in one folder with later ones: a run that was continued."""
    template = str(tmp_path / "r{rollout_id}")
    for rollout_id in (1, 0):  # as version 0.1 named and wrote them
        path = save_rollout(template, rollout_id, GROUPS[: rollout_id + 1])
        header = json.loads(path.read_bytes())
        assert header.pop("rollout") == rollout_id + 1
        path.write_text(json.dumps(header))
    for rollout_id in (0, 1):
        for suffix in ("json", "safetensors"):
            (tmp_path / f"r{rollout_id + 1}.{suffix}").rename(tmp_path / f"r{rollout_id}.{suffix}")
    save_rollout(template, 2, GROUPS)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [
        "r0.json",
        "r1.json",
        "r3.json",
    ]
    for rollout_id in range(3):
        assert _same(
            load_rollout(template, rollout_id), GROUPS[: rollout_id + 1 if rollout_id < 2 else None]
        )
    with pytest.raises(FileNotFoundError, match=r"r4\.json: no such file.*for rollout 4"):
        load_rollout(template, 3)


def _good(**changes: Any) -> Sample:
    """Two prompt tokens and three of the response, which is trained on but for its second token."""
    values: dict[str, Any] = dict(
        group_id=0,
        sample_id=3,
        tokens=torch.tensor([1, 2, 3, 4, 5]),
        response_length=3,
        loss_mask=torch.tensor([True, False, True]),
        rollout_log_probs=torch.tensor([-0.5, math.nan, 0.0]),  # NaN where nothing is trained on
        sampling_mask=torch.tensor([[3, 9], [-1, -1], [5, -1]], dtype=torch.int32),
        reward=1.0,
        weight_versions=(1, -1, 2),
    )
    return Sample(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"status": SampleStatus.ABORTED, "tokens": torch.tensor([1, 2, 3, 4, 99])}, None),
        ({"weight_versions": ()}, None),
        ({"tokens": torch.tensor([1, 2, 3, 4, 10])}, "tokens: 10 at 4 is not a token id"),
        ({"tokens": torch.tensor([-1, 2, 3, 4, 5])}, "tokens: -1 at 0 is not a token id"),
        (
            {"rollout_log_probs": torch.tensor([-0.5, 0, math.nan])},
            "the log-prob of token 2 is nan",
        ),
        ({"rollout_log_probs": torch.tensor([0.5, 0, 0])}, "the log-prob of token 0 is 0.5"),
        ({"rollout_log_probs": torch.tensor([-1e30, 0, 0])}, "the log-prob of token 0 is -1"),
        ({"rollout_log_probs": torch.zeros(2)}, "2 log-probs for 3 tokens"),
        ({"weight_versions": (1, 2)}, r"weight versions \(1, 2\) for 3 tokens"),
        ({"weight_versions": (1, -7, 2)}, "weight versions"),
        ({"sampling_mask": torch.zeros(3, 2, dtype=torch.int32)}, "was not among those"),
        ({"sampling_mask": torch.full((3, 2), 10, dtype=torch.int32)}, "beyond the vocabulary"),
    ],
)
def test_values_are_held_to_those_of_an_engine(changes: Any, words: str | None) -> None:
    groups = [SampleGroup(0, (_good(**changes),))]
    if words is None:
        check_values(groups, 10)
        return
    with pytest.raises(ValueError, match=f"sample 3: .*{words}"):
        check_values(groups, 10)


def test_a_sample_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="the same sample_id"):
        check_values([SampleGroup(0, (_good(), _good()))], 10)
