"""Checkpoints in the memory of nodes: which files make a whole one, who copies to whom, and whose
folders go."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from slime_like.checkpoints.files import write_file
from slime_like.checkpoints.manifest import MANIFEST, write_manifest
from slime_like.checkpoints.replicas import (
    ID,
    NodeFiles,
    copy_file,
    intact_files,
    node_folder,
    run_id,
)
from slime_like.megatron.checkpoint.replicate import Nodes, assign_files

FILES = {f"policy/__{rank}_0.distcp": bytes([rank]) * 1000 for rank in range(4)}


def checkpoint(folder: Path) -> Path:
    (folder / "policy").mkdir(parents=True)
    write_manifest(folder, {name: write_file(folder / name, text) for name, text in FILES.items()})
    return folder


def held(names: str, manifest: str = "a") -> NodeFiles:
    return NodeFiles(manifest, 4, list(names))


def test_a_part_is_what_was_written_and_nothing_else(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "iter_0000003")
    assert intact_files(folder).files == sorted(FILES) and intact_files(folder).total == 4
    first, second, third, last = sorted(FILES)
    (folder / first).unlink()
    (folder / second).write_bytes(FILES[second][:-1])
    (folder / third).write_bytes(FILES[third][:-1] + b"x")
    assert intact_files(folder).files == [last]
    (folder / MANIFEST).unlink()
    with pytest.raises(ValueError, match="missing or damaged"):
        intact_files(folder)


def test_each_file_is_copied_once_by_nodes_in_turn() -> None:
    assert assign_files([held("abcd"), held("abcd")]) == [["a", "c"], ["b", "d"]]
    assert assign_files([held("ab"), None, held("bcd")]) == [["a", "b"], [], ["c", "d"]]


def test_half_a_checkpoint_is_none() -> None:
    assert assign_files([held("abc"), held("bc"), None]) is None
    assert assign_files([held("ab", "one"), held("cd", "another")]) is None, "of two attempts"
    assert assign_files([held("ab", "one"), held("abcd", "another")]) == [[], list("abcd")]


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2, 2), (3, 1, 2), (4,)])
def test_any_one_node_may_be_lost(sizes: tuple[int, ...]) -> None:
    ranks = itertools.count()
    nodes = Nodes(tuple(tuple(next(ranks) for _ in range(size)) for size in sizes))
    world = sum(sizes)
    assert sum(nodes.is_leader(rank) for rank in range(world)) == len(sizes)
    for rank in range(world):
        to = nodes.target_of(rank)
        if len(sizes) == 1:
            assert to is None
        else:
            assert to is not None and nodes.node_of(to) == (nodes.node_of(rank) + 1) % len(sizes)
            assert rank in nodes.sources_of(to)


def test_folders_of_runs_that_are_gone_are_removed(tmp_path: Path) -> None:
    base, kept, gone = str(tmp_path / "memory"), tmp_path / "kept", tmp_path / "gone"
    local, other = (node_folder(base, run_id(save), save) for save in (kept, gone))
    assert local != other and run_id(kept) == local.name
    checkpoint(other / "iter_0000001")
    (gone / ID).unlink()  # a user has removed the checkpoints and starts over
    again = node_folder(base, run_id(gone), gone)
    assert sorted(path.name for path in Path(base).iterdir()) == sorted([local.name, again.name])
    assert not list(again.glob("iter_*"))


@pytest.mark.parametrize("name", ["photos", "0123456789abcdef" * 2])
def test_a_folder_of_others_is_never_removed(tmp_path: Path, name: str) -> None:
    """Although it has a `save.txt`, and a name like ours."""
    base = tmp_path / "memory"
    foreign = base / name
    foreign.mkdir(parents=True)
    (foreign / "save.txt").write_text("a game")
    (foreign / "thesis.tex").write_text("years of work")
    link = base / ("f" * 32)
    link.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "save.txt").write_text("nowhere")
    save = tmp_path / "save"
    local = node_folder(str(base), run_id(save), save)
    node_folder(str(base), run_id(save), save)
    assert {path.name for path in base.iterdir()} == {name, link.name, local.name}
    assert (foreign / "thesis.tex").read_text() == "years of work"
    assert (tmp_path / "elsewhere" / "save.txt").is_file()


def test_a_file_is_copied_byte_by_byte(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5_000_000)
    copy_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()
