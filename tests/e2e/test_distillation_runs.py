"""On-policy distillation through train.py: the policy moves towards a teacher of another shape,
with rewards that are all 0."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.e2e.helpers import Workspace, rows_of, same_numbers, save_other_model
from tests.e2e.programs import TrainServer
from tests.fake_sglang import FakeServer, status


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another network than the policy, larger and with opinions: its logits are far from equal."""
    return save_other_model(
        tmp_path_factory.mktemp("teacher"), seed=7, std=0.12, hidden_size=64, num_layers=4
    )


def flags(work: Workspace, out: Path, teacher: Path, **changes: Any) -> list[str]:
    settings = dict(
        use_opd="", opd_type="megatron", opd_teacher_load=teacher, rm_type="zero", custom_rm_path=None, n_samples_per_prompt=2,
        rollout_batch_size=16, policy_loss_type="importance_sampling", loss_reduction="token_mean", micro_batch_size=8, lr=5e-3, normalize_advantages="",
    )  # fmt: skip
    return work.flags(out, **(settings | changes))


@pytest.mark.extended
def test_the_policy_moves_towards_the_teacher(
    server: TrainServer, work: Workspace, teacher: Path, tmp_path: Path
) -> None:
    server.train(flags(work, tmp_path, teacher, num_rollout=16), tmp_path / "log").ok()
    rows = rows_of(tmp_path)
    gaps = [row["rollout/opd_reverse_kl"] for row in rows]
    assert all(row["rollout/reward_mean"] == 0 for row in rows) and gaps[0] > 0
    assert sum(gaps[-2:]) / 2 < 0.7 * gaps[0], gaps


@pytest.mark.extended
def test_a_teacher_may_be_a_checkpoint(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Of the policy's shape: the numbers are those of the same weights as a Hugging Face model."""
    saved = {"num_rollout": 1, "save": tmp_path / "ck", "save_hf": tmp_path / "hf", "lr": 1e-2}
    server.train(work.flags(tmp_path / "trained", **saved), tmp_path / "log").ok()
    found = []
    for name in ("ck", "hf"):
        out = tmp_path / f"of-{name}"
        argv = flags(work, out, tmp_path / name, num_rollout=1)
        server.train(argv, out / "log").ok()
        (row,) = rows_of(out)
        found.append((same_numbers([row]), row["rollout/opd_reverse_kl"]))
    assert found[0] == found[1] and found[0][1] > 0


@pytest.fixture(scope="module")
def alone(
    server: TrainServer, work: Workspace, teacher: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, float]]:
    """The rows of a run of one process."""
    out = tmp_path_factory.mktemp("alone")
    server.train(flags(work, out, teacher, num_rollout=2), out / "log").ok()
    return rows_of(out)


LAYOUTS = {
    "TP2": "--tensor-model-parallel-size 2",
    "PP2": "--pipeline-model-parallel-size 2",
    "DP2": "",
}


@pytest.mark.extended
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.slow if name == "TP2" else ()) for name in LAYOUTS],
)
def test_every_layout_sees_the_same_teacher(
    server: TrainServer,
    work: Workspace,
    teacher: Path,
    alone: list[dict[str, float]],
    tmp_path: Path,
    layout: str,
) -> None:
    server.train(
        [*flags(work, tmp_path, teacher, num_rollout=2), *LAYOUTS[layout].split()],
        tmp_path / "log",
        ranks=2,
    ).ok()
    for one, two in zip(alone, rows_of(tmp_path), strict=True):
        for name in ("rollout/opd_reverse_kl", "train/loss", "train/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=2e-4, abs=1e-6), name


@pytest.fixture
def served(work: Workspace, teacher: Path) -> Iterator[FakeServer]:
    """The teacher behind a server."""
    with FakeServer(str(teacher)) as fake:
        fake.engine.update_weights(iter(load_file(teacher / "model.safetensors").items()), 1)
        fake.tokenizer = AutoTokenizer.from_pretrained(work.model)
        yield fake


SERVED: dict[str, Any] = {"opd_type": "sglang", "opd_teacher_load": None}


@pytest.mark.extended
@pytest.mark.parametrize(
    "more", [{}, {"async_rollout": "", "max_staleness": 0}], ids=["between", "ahead"]
)
def test_a_served_teacher_says_what_one_on_megatron_does(
    server: TrainServer,
    work: Workspace,
    teacher: Path,
    served: FakeServer,
    alone: list[dict[str, float]],
    tmp_path: Path,
    more: dict[str, Any],
) -> None:
    """As slime spells its address. Two data-parallel ranks, of which the first asks for both."""
    line = flags(
        work, tmp_path, teacher, num_rollout=2, **SERVED, rm_url=f"{served.url}/generate", **more
    )
    server.train(line, tmp_path / "log", ranks=2).ok()
    for one, two in zip(alone, rows_of(tmp_path), strict=True):
        for name in ("rollout/opd_reverse_kl", "train/loss", "train/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=2e-4, abs=1e-6), name
        assert two["rollout/opd_dropped"] == 0


def test_a_teacher_that_fails_loses_samples_and_then_the_run(
    server: TrainServer, work: Workspace, teacher: Path, served: FakeServer, tmp_path: Path
) -> None:
    served.faults = [status(400, "no")] * 2 + [None] * 30 + [status(403, "no more")] * 32
    line = flags(work, tmp_path, teacher, num_rollout=3, **SERVED, opd_teacher_url=served.url)
    done = server.train(line, tmp_path / "log", ranks=1)
    words = rf"rollout 2: 100\.0% of the samples have no usable response or reward.*the teacher: {served.url}/generate: status 403: no more"
    assert re.search(words, done.error()), done.error()
    (row,) = rows_of(tmp_path)
    assert (
        row["rollout/opd_dropped"] == 2
        and row["rollout/failed_frac"] == 2 / 32
        and row["train/grad_norm"] > 0
    )
