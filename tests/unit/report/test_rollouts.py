"""Samples of recorded rollouts on the page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from slime_like.report.read import read_run
from slime_like.report.rollouts import read_samples
from slime_like.rollout.recording import (
    remove_token_values,
    save_token_texts,
    save_token_values,
)
from slime_like.samples.groups import SampleGroup
from tests.unit.report.runs import HOSTILE, sample, write_run


def unpacked(text: str) -> np.ndarray:
    import base64

    halves = np.frombuffer(base64.b64decode(text), "<u2").astype("<u4") << 16
    return halves.view("<f4")


def test_samples_have_what_was_recorded(tmp_path: Path) -> None:
    found = read_samples([read_run(write_run(tmp_path))], 100)
    c = found.columns
    assert c["id"] == ["10", "11", "0", "1"] and c["rollout"] == [2, 2, 1, 1]
    assert c["reward"] == [1, "nan", 1, 0] and c["advantage"] == [1, -1, 1, -1]
    assert c["response"][0] == HOSTILE and found.prompts == ["say it:"]
    details = found.details[1]
    assert details["diff"] == 0.25  # the same for all tokens
    assert np.allclose(unpacked(details["log_prob"]), np.linspace(-2, -0.5, 10), rtol=0.004)
    kl = np.linspace(0, 1, 10)
    assert np.allclose(unpacked(details["kl"]), np.exp(-kl) + kl - 1, rtol=0.004, atol=1e-6)
    assert {"tokens", "mask", "versions", "entropy", "advantage"} <= details.keys()
    assert found.vocabularies[0][str(ord("w"))] == "w" and not found.problems


class Metaspace:
    """Its tokens begin with a space, and a text does not."""

    def decode(self, ids: list[int]) -> str:
        return "".join(" " + chr(i) for i in ids).lstrip()


def test_texts_of_tokens_keep_their_space(tmp_path: Path) -> None:
    groups = [SampleGroup(0, (sample(0, 0, "ab", 1.0),))]
    path = save_token_texts(str(tmp_path / "{rollout_id}"), 0, groups, Metaspace())
    assert json.loads(path.read_text())[str(ord("b"))] == " b"


def test_runs_with_other_tokenizers_keep_their_texts(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, rollouts=1) for name in ("a", "b")]
    texts = folders[1] / "rollouts/1.tokens.json"
    texts.write_text(json.dumps({str(ord("w")): "another"}))
    found = read_samples([read_run(folder) for folder in folders], 100)
    assert [words[str(ord("w"))] for words in found.vocabularies] == ["w", "another"]


def test_what_another_layout_trained_with_goes(tmp_path: Path) -> None:
    template = str(tmp_path / "{rollout_id}")
    for rank in range(3):
        save_token_values(template, 0, rank, {"0": {"entropy": torch.rand(2)}})
    save_token_values(template, 10, 0, {"0": {"entropy": torch.rand(2)}})
    remove_token_values(template, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["11.train0.safetensors"]


def test_tokens_that_are_not_trained_on_leave_the_advantage_constant(tmp_path: Path) -> None:
    write_run(tmp_path, rollouts=1)
    advantages = {"0": {"advantages": torch.tensor([2.0, 0.0] + [2.0] * (len(HOSTILE) - 2))}}
    save_token_values(str(tmp_path / "rollouts/{rollout_id}"), 0, 0, advantages)
    assert read_samples([read_run(tmp_path)], 100).columns["advantage"][0] == 2


def test_the_newest_and_the_first_samples_are_kept(tmp_path: Path) -> None:
    (write_run(tmp_path, rollouts=4) / "rollouts/2.safetensors").write_bytes(b"not read")
    found = read_samples([read_run(tmp_path)], 5)
    assert found.columns["rollout"] == [4, 4, 1, 1, 3] and found.left_out == 3
    assert not found.problems


def test_a_damaged_recording_is_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "rollouts/2.safetensors").write_bytes(b"no")
    found = read_samples([read_run(tmp_path)], 100)
    assert found.columns["rollout"] == [1, 1] and "2.json" in found.problems[0]
