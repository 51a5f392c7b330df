"""What a resumed run must share with the one that saved, what it may change, and evaluations that a
stop left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from slime_like.checkpoints.manifest import MANIFEST, read_identity
from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer

FAULTS = "tests.e2e.faults"


def flags(work: Workspace, out: Path, **changes: Any) -> list[str]:
    evaluated = {
        "eval_prompt_data": f"words {work.prompts}@[0:3]",
        "eval_interval": 1,
        "skip_eval_before_train": "",
    }
    return work.flags(out, **{**evaluated, "eval_temperature": 0, **changes})  # fmt: skip


@pytest.fixture(scope="module")
def full_run(
    server: TrainServer, work: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("identity")
    server.train(flags(work, out, save=out / "checkpoints"), out / "log").ok()
    return out


def scores(out: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k.startswith("eval/")} for row in rows_of(out)]


def other_model(work: Workspace, folder: Path, **config: Any) -> Path:
    shutil.copytree(work.model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.mark.extended
def test_an_evaluation_that_a_signal_left_is_made_up(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    """SIGTERM in the first rollout; the run that resumes evaluates what that one trained."""
    root = tmp_path / "checkpoints"
    argv = flags(work, tmp_path, save=root, load=root)
    done = server.train(argv, tmp_path / "log1", hook=f"{FAULTS}:signal_in_step SIGTERM 1 0")
    assert done.status == 75, done.err
    assert "the evaluation of rollout 1 is left to the run that resumes" in done.out
    assert scores(tmp_path) == [{}]
    done = server.train(argv, tmp_path / "log2").ok()
    assert "evaluation of rollout 1: eval/words/mean" in done.out
    assert scores(tmp_path) == scores(full_run) and all(scores(full_run))
    for name in ("train/loss", "train/grad_norm"):
        assert [row[name] for row in rows_of(tmp_path)] == [row[name] for row in rows_of(full_run)]


@pytest.mark.extended
def test_the_last_evaluation_is_done_although_a_signal_came(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    """After the checkpoint; the same command line then has nothing left to do."""
    root = tmp_path / "checkpoints"
    argv = flags(work, tmp_path, save=root, load=root)
    done = server.train(argv, tmp_path / "log1", hook=f"{FAULTS}:signal_in_step SIGTERM 3 0").ok()
    assert scores(tmp_path) == scores(full_run)
    done = server.train(argv, tmp_path / "log2").ok()
    assert "nothing to do" in done.out and "evaluation of rollout" not in done.out
    kept = rows_of(tmp_path)
    without = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in kept]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in without))
    done = server.train(argv, tmp_path / "log3").ok()  # as if it had been killed before
    assert "evaluation of rollout 2: eval/words/mean" in done.out
    assert scores(tmp_path)[1] == scores(full_run)[1]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_theta": 5e5, "rope_parameters": None}, "rotary_base (rope_theta) 10000.0 (here: 500000.0)"),
        ({"rms_norm_eps": 1e-5}, "layernorm_epsilon (rms_norm_eps) 1e-06 (here: 1e-05)"),
        (
            {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rotary_seq_len_interpolation_factor (rope_scaling: linear, factor) None (here: 2.0)",
        ),
    ],
)  # fmt: skip
def test_a_model_of_the_same_shape_and_another_function_is_refused(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path, config: Any, words: str
) -> None:
    model = other_model(work, tmp_path / "model", **config)
    argv = flags(work, tmp_path, load=full_run / "checkpoints", hf_checkpoint=model)
    error = server.train(argv, tmp_path / "log").error()
    assert "iter_0000002 is of another model: " in error and words in error


def test_another_tokenizer_is_refused(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    """The same tokens under other numbers."""
    model = other_model(work, tmp_path / "model")
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    one, two = list(vocabulary)[5:7]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    path.write_text(json.dumps(content))
    argv = flags(work, tmp_path, load=full_run / "checkpoints", hf_checkpoint=model)
    error = server.train(argv, tmp_path / "log").error()
    assert f"was trained with another tokenizer than that of --hf-checkpoint {model}" in error
    assert "vocabulary " in error


def test_what_changed_is_reported_and_older_checkpoints_load(
    server: TrainServer, work: Workspace, full_run: Path, tmp_path: Path
) -> None:
    argv = flags(
        work,
        tmp_path,
        load=full_run / "checkpoints",
        policy_loss_type="cispo",
        rollout_temperature=0.5,
        eval_temperature=None,
    )
    done = server.train(argv, tmp_path / "log1").ok()
    reported = [line for line in done.out.splitlines() if "changed since checkpoint" in line]
    assert len(reported) == 1
    assert "--rollout-temperature 1.0 -> 0.5" in reported[0]
    assert "--policy-loss-type sapo -> cispo" in reported[0]
    root = tmp_path / "old"  # as an earlier version wrote it
    shutil.copytree(full_run / "checkpoints", root)
    manifest = root / "iter_0000002" / MANIFEST
    assert set(read_identity(manifest.parent)) == {"model", "tokenizer"}
    content = json.loads(manifest.read_text())
    del content["identity"]
    manifest.write_text(json.dumps(content))
    done = server.train(flags(work, tmp_path, load=root), tmp_path / "log2").ok()
    assert "nothing to do" in done.out and "changed since" not in done.out
