"""Folders of checkpoints without what is in them: the newest, what a kill leaves at any instant,
what may go, what the manifest says."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_like.checkpoints import files
from slime_like.checkpoints.files import (
    FileRecord,
    hash_file,
    hashed_file,
    remove_folder,
    write_file,
)
from slime_like.checkpoints.folders import (
    NEXT_TRACKER,
    TRACKER,
    WRITING,
    checkpoint_folder,
    clean_up,
    complete_steps,
    is_checkpoint_root,
    newest_step,
    publish,
    remove_checkpoint,
    steps_to_remove,
    writing_folder,
)
from slime_like.checkpoints.manifest import (
    MANIFEST,
    damaged_files,
    read_manifest,
    split_by_size,
    write_manifest,
)


def write_checkpoint(root: Path, step: int, content: str = "") -> None:
    """As the saver does, in small."""
    folder = writing_folder(root, step)
    files.remove_folder(folder)
    (folder / "policy").mkdir(parents=True)
    records = {
        name: write_file(folder / name, f"{name} {step} {content}")
        for name in ("policy/a.distcp", "policy/b", "trainer.json")
    }
    files.sync_path(folder / "policy")
    write_manifest(folder, records)
    files.sync_path(folder)
    publish(root, step)


def content_of(root: Path, step: int) -> str:
    """Raises when the checkpoint is not whole."""
    folder = checkpoint_folder(root, step)
    records = read_manifest(folder)
    assert damaged_files(folder, records, records, threads=2) == []
    return (folder / "trainer.json").read_text()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Complete checkpoints 2, 10 and 4; one that was being written, one that lost its manifest."""
    for step in (2, 10, 4):
        write_checkpoint(tmp_path, step)
    writing_folder(tmp_path, 12).mkdir()
    (writing_folder(tmp_path, 12) / MANIFEST).write_text("{}")
    checkpoint_folder(tmp_path, 14).mkdir()
    return tmp_path


def test_complete_steps(root: Path, tmp_path: Path) -> None:
    assert complete_steps(root) == [2, 4, 10]
    assert complete_steps(tmp_path / "none") == []


def test_the_tracker_is_believed(root: Path) -> None:
    assert newest_step(root) == (4, None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is missing"),
        ("", "holds no step"),
        ("x", "holds no step"),
        ("14", "names step 14, which is not complete"),
    ],
)
def test_a_bad_tracker_falls_back_to_the_newest(
    root: Path, content: str | None, words: str
) -> None:
    if content is None:
        (root / TRACKER).unlink()
    else:
        (root / TRACKER).write_text(content)
    step, warning = newest_step(root)
    assert step == 10
    assert (
        warning
        == f"--load {root}: {TRACKER} {words}; taking the newest complete checkpoint, step 10"
    )


@pytest.mark.parametrize("content", ["5", "", None])
def test_nothing_to_fall_back_to(tmp_path: Path, content: str | None) -> None:
    checkpoint_folder(tmp_path, 5).mkdir()
    if content is not None:
        (tmp_path / TRACKER).write_text(content)
    assert is_checkpoint_root(tmp_path), (
        "damaged checkpoints are no reason to start at 0 in silence"
    )
    with pytest.raises(ValueError, match="and there is no complete checkpoint"):
        newest_step(tmp_path)


def test_what_is_a_folder_of_checkpoints(root: Path, tmp_path: Path) -> None:
    assert is_checkpoint_root(root)
    (root / TRACKER).unlink()
    assert is_checkpoint_root(root)
    killed = tmp_path / "killed"
    writing_folder(killed, 2).mkdir(parents=True)
    assert not is_checkpoint_root(killed), "a first save that was cut short is no checkpoint"
    assert not is_checkpoint_root(tmp_path / "none")


def test_clean_up(root: Path) -> None:
    aside = checkpoint_folder(root, 10).with_name("iter_0000010.replaced")
    checkpoint_folder(root, 10).rename(
        aside
    )  # killed between setting it aside and publishing its successor
    checkpoint_folder(root, 2).rename(root / "iter_0000002.removed")
    (root / "iter_notes.tmp").mkdir()
    assert clean_up(root) == [
        "iter_0000010 restored",
        "iter_0000012.tmp removed",
        "iter_0000002.removed removed",
    ]
    assert sorted(path.name for path in root.iterdir()) == [
        "iter_0000004",
        "iter_0000010",
        "iter_0000014",
        "iter_notes.tmp",
        TRACKER,
    ]
    assert clean_up(root) == []


def note(root: Path, step: int, before: int | None, manifest: str | None = None) -> str:
    """What `publish` writes before it renames a checkpoint."""
    own = (
        hash_file(checkpoint_folder(root, step) / MANIFEST).sha256 if manifest is None else manifest
    )
    return json.dumps({"step": step, "before": before, "manifest": own})


def test_a_tracker_that_was_about_to_change(tmp_path: Path) -> None:
    """A run that had gone back from 10 was killed when 4 was complete."""
    for step in (4, 10):
        write_checkpoint(tmp_path, step)
    (tmp_path / NEXT_TRACKER).write_text(note(tmp_path, 4, 10))
    assert newest_step(tmp_path) == (4, None)
    assert clean_up(tmp_path) == [f"{TRACKER} set to 4"]
    assert newest_step(tmp_path) == (4, None)
    assert not (tmp_path / NEXT_TRACKER).exists()


@pytest.mark.parametrize(
    ("content", "warns"),
    [
        ("4", False),
        ("", False),
        ("[]", False),
        ('{"step": 4, "before": 2, "manifest": ""}', True),
        ('{"step": 6, "before": 10, "manifest": ""}', False),
        ('{"step": 4, "before": 10, "manifest": "of another attempt"}', False),
    ],
)
def test_a_note_of_another_save_winds_no_run_back(
    tmp_path: Path, content: str, warns: bool
) -> None:
    """Left by a killed run and carried along by copies: the tracker counts."""
    for step in (4, 10):
        write_checkpoint(tmp_path, step)
    for name in (NEXT_TRACKER, f"{TRACKER}.tmp"):
        (tmp_path / name).write_text(content)
    step, warning = newest_step(tmp_path)
    assert step == 10 and (warning is not None and "is not followed" in warning) == warns
    assert len(clean_up(tmp_path)) == warns
    assert newest_step(tmp_path) == (10, None)
    assert not (tmp_path / NEXT_TRACKER).exists() and not (tmp_path / f"{TRACKER}.tmp").exists()


@pytest.mark.parametrize("fails", ["write_file", "rename"])
def test_a_checkpoint_that_cannot_be_replaced_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A full disk while a run that had gone back saves a step again."""
    for step in (2, 4):
        write_checkpoint(tmp_path, step, "old")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    rename = os.rename

    def rename_but_the_new(old: Path, new: Path) -> None:
        return full() if str(old).endswith(WRITING) else rename(old, new)

    if fails == "rename":
        monkeypatch.setattr(os, "rename", rename_but_the_new)
    else:
        monkeypatch.setattr("slime_like.checkpoints.folders.write_file", full)
    with pytest.raises(OSError, match="No space"):
        write_checkpoint(tmp_path, 4, "new")
    monkeypatch.undo()
    remove_folder(writing_folder(tmp_path, 4))
    assert newest_step(tmp_path)[0] == 4 and complete_steps(tmp_path) == [2, 4]


def test_a_checkpoint_that_is_a_link_is_retired_as_a_link(tmp_path: Path) -> None:
    """What it points to belongs to somebody else."""
    root, other = tmp_path / "save", tmp_path / "other"
    for step in (2, 4):
        write_checkpoint(root, step)
    checkpoint_folder(root, 2).rename(other)
    checkpoint_folder(root, 2).symlink_to(other)
    remove_checkpoint(root, 2)
    assert complete_steps(root) == [4] and clean_up(root) == []
    checkpoint_folder(root, 2).with_name("iter_0000002.removed").symlink_to(other)
    assert clean_up(root) == ["iter_0000002.removed removed"]
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000004", TRACKER]
    assert (other / MANIFEST).is_file()


# --- a kill at every instant -----------------------------------------------------------------------------------------


def killed_at(point: int, action: Callable[[], None]) -> bool:
    """Run `action` in a child that SIGKILLs itself just before its `point`th write, sync, rename,
    removal or new folder. Whether it got that far."""
    pid = os.fork()
    if pid == 0:
        seen = 0

        def guarded(real: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **keywords: object) -> object:
                nonlocal seen
                seen += 1
                if seen > point:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **keywords)

            return call

        for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "write"):
            setattr(os, name, guarded(getattr(os, name)))
        files.HashedFile.write = guarded(files.HashedFile.write)  # type: ignore[method-assign,assignment]
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, "the child failed"
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step"])
def test_killed_at_every_write_sync_and_rename(tmp_path: Path, again: bool) -> None:
    """Whatever the instant, the old checkpoint or the new one is whole and newest, after the
    clean-up of the next start."""
    new = 2 if again else 4
    for point in range(200):
        root = tmp_path / str(point)
        root.mkdir()
        write_checkpoint(root, 2, "old")

        def save_and_prune(root: Path = root) -> None:
            clean_up(root)
            write_checkpoint(root, new, "new")
            for step in steps_to_remove(complete_steps(root), new, keep_last=1, keep_every=None):
                remove_checkpoint(root, step)

        killed = killed_at(point, save_and_prune)
        clean_up(root)
        step, warning = newest_step(root)
        found = content_of(root, step)
        assert (step, found.split()[-1]) in ((2, "old"), (new, "new"))
        assert (step, warning) == (max(complete_steps(root)), None), (
            "the tracker neither lags nor leads"
        )
        for full in complete_steps(root):
            content_of(root, full)
        assert {path.name for path in root.iterdir()} <= {TRACKER, "iter_0000002", "iter_0000004"}
        if not killed:
            assert point > 20
            assert found.endswith("new")
            return
    pytest.fail("the child was killed at every point")


# --- retention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "going"),
    [
        (None, None, []),
        (1, None, [2, 4, 6, 8, 10]),
        (3, None, [2, 4, 6]),
        (99, None, []),
        (None, 4, [2, 6, 10]),
        (2, 6, [2, 4, 8]),
    ],
)
def test_what_goes(keep_last: int | None, keep_every: int | None, going: list[int]) -> None:
    """14 is of a run that went another way; 12 has just been written."""
    assert (
        steps_to_remove([2, 4, 6, 8, 10, 12, 14], 12, keep_last=keep_last, keep_every=keep_every)
        == going
    )


# --- manifest --------------------------------------------------------------------------------------------------------


def test_every_damage_is_named(root: Path) -> None:
    folder = checkpoint_folder(root, 4)
    records = read_manifest(folder)
    (folder / "policy" / "b").unlink()
    path = folder / "policy" / "a.distcp"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    (folder / "trainer.json").write_text("short")
    assert damaged_files(folder, records, records, threads=3) == [
        "policy/a.distcp: its SHA-256 is not the one it was written with",
        "policy/b: missing",
        f"trainer.json: 5 bytes, not {records['trainer.json'].size}",
    ]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 2}', '{"format": 1}', '{"format": 1, "files": {"a": 3}}', '{"format": 1, "files": {"../a": {"size": 1, "sha256": ""}}}']
)  # fmt: skip
def test_a_damaged_manifest(root: Path, content: str) -> None:
    folder = checkpoint_folder(root, 4)
    (folder / MANIFEST).write_text(content)
    with pytest.raises(ValueError, match=f"iter_0000004: {MANIFEST} "):
        read_manifest(folder)


def test_a_hashed_file(tmp_path: Path) -> None:
    data = os.urandom(9_000_001)
    with hashed_file(tmp_path / "a") as file:
        for start in range(0, len(data), 1_000_000):
            assert file.tell() == start
            file.write(memoryview(data)[start : start + 1_000_000])
    assert (tmp_path / "a").read_bytes() == data
    assert file.record() == hash_file(tmp_path / "a") == FileRecord(len(data), file.record().sha256)
    import hashlib

    assert file.record().sha256 == hashlib.sha256(data).hexdigest()


def test_readers_get_equal_shares() -> None:
    records = {f"{i}": FileRecord(size, "") for i, size in enumerate([100, 1, 60, 40, 30, 70, 2])}
    shares = split_by_size(records, 3)
    assert sorted(name for share in shares for name in share) == sorted(records)
    assert [sum(records[name].size for name in share) for share in shares] == [
        103,
        100,
        100,
    ] or max(sum(records[name].size for name in share) for share in shares) <= 104  # of 303 bytes
    assert split_by_size({}, 2) == [[], []]


def test_the_manifest_is_readable_by_eye(root: Path) -> None:
    content = json.loads((checkpoint_folder(root, 4) / MANIFEST).read_text())
    assert content["files"]["trainer.json"]["size"] == len("trainer.json 4 ")
