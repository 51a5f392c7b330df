"""Whole runs with a data source of the user's (--data-source-path), as slime keeps one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_like.rollout.recording import load_rollout
from tests.e2e.helpers import Workspace, rows_of, same_numbers, sampled
from tests.e2e.programs import TrainServer

SOURCES = """
import json
from pathlib import Path
from slime_like.compat.slime.api import RolloutDataSourceWithBuffer, Sample

class Inherited(RolloutDataSourceWithBuffer):
    def get_samples(self, num_samples):
        self.metadata["drawn"] = self.metadata.get("drawn", 0) + num_samples
        return super().get_samples(num_samples)

class Counting:
    # prompts that it makes up; groups that come back are asked again, from their first token
    def __init__(self, args):
        self.args, self.next, self.back = args, 0, []

    def get_samples(self, num_samples):
        numbers, self.back = self.back[:num_samples], self.back[num_samples:]
        while len(numbers) < num_samples:
            numbers.append(self.next)
            self.next += 1
        n = self.args.n_samples_per_prompt
        return [[Sample(index=i * n + j, prompt=f"spell {i}", label=str(i)) for j in range(n)] for i in numbers]

    def add_samples(self, samples):
        self.back += [group[0].index // self.args.n_samples_per_prompt for group in samples]

    def _path(self, folder, rollout_id):
        return Path(folder) / f"count_{rollout_id}"

    def save(self, rollout_id):
        self._path(self.args.save, rollout_id).write_text(json.dumps([self.next, self.back]))

    def load(self, rollout_id=None):
        self.next, self.back = json.loads(self._path(self.args.load, rollout_id).read_text())

    def __len__(self):
        return 8

class Short(Counting):
    def get_samples(self, num_samples):
        return super().get_samples(num_samples)[1:]

class Unsaved(Counting):
    def save(self, rollout_id):
        raise OSError("the disk is full")

class Unfinished:
    def __init__(self, args):
        pass
"""
# draws more groups than it trains on, and gives the others back
CARRYING: dict[str, Any] = {
    "rollout_function_path": "examples/own_rollout/widest_groups.py:generate_rollout",
    "token_tis_ratio_clip_high": 2.0,
    "tis_ratio_type": "token",
}
WITHOUT_ROWS = dict.fromkeys(("prompt_data", "label_key", "apply_chat_template", "rollout_shuffle"))


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    file = tmp_path / "sources.py"
    file.write_text(SOURCES)
    return file


@pytest.mark.extended
def test_slimes_own_source_draws_what_a_run_without_one_draws(
    server: TrainServer, work: Workspace, tmp_path: Path, sources: Path
) -> None:
    """Bit by bit, on one rank; the same samples on two."""
    own: dict[str, Any] = {"data_source_path": f"{sources}:Inherited"}
    runs: dict[str, tuple[dict[str, Any], int]] = {
        "plain": ({}, 1),
        "own": (own, 1),
        "two": ({**own, "pipeline_model_parallel_size": 2}, 2),
    }
    for name, (more, ranks) in runs.items():
        out = tmp_path / name
        argv = work.flags(out, **more, save_debug_rollout_data=out / "r_{rollout_id}")
        server.train(argv, out / "log", ranks=ranks).ok()
    assert same_numbers(rows_of(tmp_path / "own")) == same_numbers(rows_of(tmp_path / "plain"))
    expected = sampled(tmp_path / "plain" / "r_{rollout_id}", 0)
    for name in ("own", "two"):
        assert sampled(tmp_path / name / "r_{rollout_id}", 0) == expected


@pytest.mark.parametrize("name", ["Inherited", "Counting"])
def test_a_resumed_run_draws_what_an_unbroken_one_draws(
    name: str, server: TrainServer, work: Workspace, tmp_path: Path, sources: Path
) -> None:
    """slime's own with groups that came back with their tokens, so that they are trained on a
    rollout after the one that sampled them; and one that reads no file."""
    more = CARRYING if name == "Inherited" else WITHOUT_ROWS
    flags = {**more, "data_source_path": f"{sources}:{name}", "num_rollout": 3}
    full_run, parts = tmp_path / "whole", tmp_path / "parts"
    recorded = full_run / "r_{rollout_id}"
    server.train(
        work.flags(full_run, **flags, save_debug_rollout_data=recorded), full_run / "log"
    ).ok()
    first = work.flags(parts, **flags | {"num_rollout": 1}, save=parts / "c")
    server.train(first, parts / "log").ok()
    resumed = work.flags(parts, **flags, load=parts / "c", save=parts / "c")
    server.train(resumed, parts / "log2").ok()
    assert same_numbers(rows_of(parts)) == same_numbers(rows_of(full_run))
    if name == "Counting":
        ids = {group.group_id for group in load_rollout(str(recorded), 1)}
        assert ids == {16, 20, 24, 28}  # of each group its first sample's
        assert json.loads((parts / "c" / "count_2").read_text()) == [12, []]
        return
    assert max(row["rollout/staleness_max"] for row in rows_of(full_run)) == 1
    (parts / "c" / "rollout" / "global_dataset_state_dict_2.json").unlink()
    fourth = flags | {"num_rollout": 4, "load": parts / "c"}
    error = server.train(work.flags(parts, **fourth), tmp_path / "log3").error()
    assert "global_dataset_state_dict_2.json: no such file" in error
    error = server.train(
        work.flags(parts, **fourth | {"data_source_path": None}), tmp_path / "log4"
    ).error()
    assert "the checkpoint's run drew its prompts from --data-source-path" in error


@pytest.mark.extended
def test_rollouts_that_were_sampled_ahead_resume_or_are_lost(
    server: TrainServer, work: Workspace, tmp_path: Path, sources: Path
) -> None:
    """The source was saved behind them: a run that may not train on them continues from there."""
    flags: dict[str, Any] = {"data_source_path": f"{sources}:Inherited", "num_rollout": 3}
    ahead = {"async_rollout": "", "use_tis": "", "save_interval": 2}
    first_ids = {}
    for name, more in {
        "whole": {**ahead, "save": tmp_path / "c"},
        "resumed": {**ahead, "load": tmp_path / "c", "ckpt_step": 2, "save": tmp_path / "d"},
        "lost": {"load": tmp_path / "c", "ckpt_step": 2},
    }.items():
        out = tmp_path / name
        recorded = out / "r_{rollout_id}"
        argv = work.flags(out, **flags, **more, save_debug_rollout_data=recorded)
        server.train(argv, out / "log").ok()
        first_ids[name] = min(sampled(recorded, 2))
    assert first_ids == {"whole": 32, "resumed": 32, "lost": 48}


WRONG = {
    "Short": ("data_source.get_samples(4) returned 3 groups of [4] samples", {}),
    "Unsaved": ("Unsaved: save raised OSError: the disk is full", {"save": "checkpoints"}),
    "Unfinished": ("Unfinished has no get_samples; a data source needs get_samples", {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_source_is_reported(
    name: str, server: TrainServer, work: Workspace, tmp_path: Path, sources: Path
) -> None:
    words, more = WRONG[name]
    flags: dict[str, Any] = {flag: tmp_path / value for flag, value in more.items()}
    argv = work.flags(
        tmp_path / "out", **flags, data_source_path=f"{sources}:{name}", num_rollout=1
    )
    error = server.train(argv, tmp_path / "log").error()
    assert f"--data-source-path {sources}:{name}" in error and words in error
