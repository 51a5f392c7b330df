"""Damaged entries of trainer.json are named, with their value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_like.checkpoints import files
from slime_like.checkpoints.state import TRAINER_FILE, read_trainer_state

NETWORK: dict[str, Any] = {"optimizer": ["Adam"], "optimizer_step": 2, "scheduler": None}
STATE: dict[str, Any] = {
    "step": 2,
    "world_size": 1,
    "layout": "1 process",
    "networks": {"policy": NETWORK},
    "fingerprints": [{"policy": {"weights": "a:b"}}],
    "of a later version": {"a": 1},
}


def read(folder: Path, content: object) -> object:
    (folder / TRAINER_FILE).write_text(json.dumps(content))
    return read_trainer_state(folder)


def test_a_state_is_returned_as_it_was_saved(tmp_path: Path) -> None:
    assert read(tmp_path, STATE) == STATE


def test_a_state_may_have_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts that were sampled ahead are in it: a kilobyte a token with routed experts. Other
    files of others are bounded."""
    monkeypatch.setattr(files.read_json, "__defaults__", (None, 100))
    assert read(tmp_path, STATE) == STATE
    with pytest.raises(ValueError, match="bytes are too many"):
        files.read_json(tmp_path / TRAINER_FILE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": True}, "step is True: Input should be a valid integer"),
        ({"step": -1}, "step is -1: Input should be greater than or equal to 0"),
        ({"world_size": 0}, "world_size is 0: "),
        ({"networks": {"../x": NETWORK}}, "networks.../x.[key] is '../x': "),
        ({"networks": {"policy": {}}}, "networks.policy.optimizer is missing"),
        ({"networks": {"policy": NETWORK | {"optimizer": [3]}}}, "networks.policy.optimizer[0] is 3: "),
        ({"networks": {"policy": NETWORK | {"optimizer_step": float("nan")}}}, "optimizer_step is nan: "),
        ({"fingerprints": [{"policy": "a"}]}, "fingerprints[0].policy is 'a': "),
        ({"fingerprints": []}, "'fingerprints' are not those of all ranks"),
        ({"has_rng": "yes"}, "has_rng is 'yes': "),
        ({"random_states": {"policy": 1}}, "random_states.policy is 1: "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(tmp_path, STATE | changes)
    assert str(caught.value).startswith(
        f"checkpoint {tmp_path}: trainer.json is missing or damaged"
    )
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["step", "world_size", "layout", "networks", "fingerprints"])
def test_what_is_missing_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is missing"):
        read(tmp_path, {key: value for key, value in STATE.items() if key != name})


def test_what_is_no_object(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"the content is \[1\]: Input should be a valid dictionary"
    ):
        read(tmp_path, [1])
