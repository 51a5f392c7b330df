"""Which checkpoint is the newest, and what is said when that cannot be told. Whole runs: tests/e2e/test_resume.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import megatron_patches
from slime_like.checkpoint_folders import TRACKER, checkpoint_folder, complete_steps, is_checkpoint_root, newest_step

megatron_patches.apply()

from slime_like.megatron_backend.checkpoint import read_trainer_state  # noqa: E402


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Complete checkpoints 2, 10 and 4; one that was being written, one without its last file."""
    for step in (2, 10, 4):
        checkpoint_folder(tmp_path, step).mkdir()
        (checkpoint_folder(tmp_path, step) / "trainer.json").write_text(json.dumps({"step": step}))
    (tmp_path / "iter_0000012.tmp").mkdir()
    (tmp_path / "iter_0000012.tmp" / "trainer.json").write_text("{}")
    checkpoint_folder(tmp_path, 14).mkdir()
    (tmp_path / TRACKER).write_text("4\n")
    return tmp_path


def test_complete_steps(root: Path, tmp_path: Path) -> None:
    assert complete_steps(root) == [2, 4, 10]
    assert complete_steps(tmp_path / "none") == []


def test_the_tracker_is_believed(root: Path) -> None:
    assert newest_step(root) == (4, None)


@pytest.mark.parametrize(
    ("content", "words"), [(None, "is missing"), ("", "holds no step"), ("x", "holds no step"), ("14", "names step 14, which is not there")]
)
def test_a_bad_tracker_falls_back_to_the_newest(root: Path, content: str | None, words: str) -> None:
    if content is None:
        (root / TRACKER).unlink()
    else:
        (root / TRACKER).write_text(content)
    step, warning = newest_step(root)
    assert step == 10
    assert warning == f"--load {root}: {TRACKER} {words}; resuming from the newest complete checkpoint, step 10"


def test_nothing_to_fall_back_to(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("5")
    with pytest.raises(ValueError, match="names step 5, which is not there, and there is no complete checkpoint"):
        newest_step(tmp_path)


def test_what_is_a_folder_of_checkpoints(root: Path, tmp_path: Path) -> None:
    assert is_checkpoint_root(root)
    (root / TRACKER).unlink()
    assert is_checkpoint_root(root)
    killed = tmp_path / "killed"
    (killed / "iter_0000002.tmp" / "model").mkdir(parents=True)
    assert not is_checkpoint_root(killed), "a first save that was cut short is no checkpoint"
    assert not is_checkpoint_root(tmp_path / "none")


def test_a_checkpoint_that_is_not_there(root: Path) -> None:
    assert read_trainer_state(checkpoint_folder(root, 2)) == {"step": 2}
    with pytest.raises(ValueError, match=r"iter_0000003 does not exist; complete steps in .*: 2, 4, 10"):
        read_trainer_state(checkpoint_folder(root, 3))
    with pytest.raises(ValueError, match=r"iter_0000014: trainer\.json is missing or damaged"):
        read_trainer_state(checkpoint_folder(root, 14))
