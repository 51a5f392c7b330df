"""A folder that is replaced by one written next to it, after kills at every point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.checkpoints.lock import this_process
from slime_like.checkpoints.replacement import (
    OWNER,
    discard,
    new_folder,
    replace_folder,
    replacing,
)


def left_by_the_dead(folder: Path, *names: str) -> Path:
    """A work folder of an ended process of this process's number, as in a new container."""
    work = new_folder(folder).parent
    for name in names:
        (work / name).mkdir(exist_ok=True)
        (work / name / "weights").write_text(name)
    (work / OWNER).write_text(json.dumps({**this_process(), "start_ticks": 1}))
    return work


def fail_to_replace(folder: Path) -> None:
    with replacing(folder) as new:
        (new / "weights").write_text("third")
        raise OSError(28, "full")


def only(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir())


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for text in ("first", "second"):
        with replacing(folder) as new:
            (new / "weights").write_text(text)
        assert (folder / "weights").read_text() == text and only(folder) == ["out"]
    with pytest.raises(OSError, match="full"):
        fail_to_replace(folder)
    assert (folder / "weights").read_text() == "second" and only(folder) == ["out"]
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "missing", folder)
    assert (folder / "weights").read_text() == "second" and only(folder) == ["out"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "out[1]"
    left_by_the_dead(folder, "new")
    folder.mkdir()
    left_by_the_dead(folder, "new", "old")
    with replacing(folder) as new:
        (new / "weights").write_text("mine")
    assert (folder / "weights").read_text() == "mine" and only(folder) == ["out[1]"]


def test_what_living_processes_write_stays(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    code = (
        "import sys; from pathlib import Path\n"
        "from slime_like.checkpoints.replacement import new_folder\n"
        f"print(new_folder(Path({str(folder)!r})), flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        other = Path(process.stdout.readline().strip())
        with replacing(folder) as new:
            assert new != other
        assert other.is_dir() and folder.is_dir()
        process.communicate()
    discard(new_folder(folder))
    assert only(folder) == ["out"]


def test_a_folder_that_was_moved_away_comes_back(tmp_path: Path) -> None:
    folder, other = tmp_path / "out", tmp_path / "out.2"
    left_by_the_dead(folder, "new", "old")
    of_other = left_by_the_dead(other, "new", "old")
    (of_other / "old" / "weights").write_text("another")
    discard(new_folder(folder))
    assert (folder / "weights").read_text() == "old"
    assert only(folder) == [of_other.name, "out"]
    discard(new_folder(other))
    assert (other / "weights").read_text() == "another" and only(folder) == ["out", "out.2"]


@pytest.mark.parametrize("killed", [False, True])
def test_a_link_stays_a_link(tmp_path: Path, killed: bool) -> None:
    """Its folder is on another disk, where there is room."""
    big, link = tmp_path / "big" / "out", tmp_path / "out"
    big.mkdir(parents=True)
    link.symlink_to(big)
    if killed:
        left_by_the_dead(big, "new", "old")
        big.rmdir()
    with replacing(link) as new:
        assert new.parent.parent == big.parent
        (new / "weights").write_text("mine")
    assert os.readlink(link) == str(big) and (big / "weights").read_text() == "mine"
    assert only(link) == ["big", "out"] and only(big) == ["out"]


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    link = tmp_path / "out"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(
        ValueError, match=r"out is a symbolic link to .*nowhere, which is no folder"
    ):
        new_folder(link)
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(ValueError, match="which is no folder"):
        new_folder(link)
    assert only(link) == ["out"]
