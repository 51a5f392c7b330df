"""--lora-sync adapter on a real vLLM server: it keeps the base model, and every update is an
adapter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.programs import TrainServer
from tests.sglang.test_real_servers import rows
from tests.vllm.conftest import servers_of
from tests.vllm.test_runs import command_line, external

RANK = 4
EXACT = 1e-5  # largest difference of a log-prob


@pytest.fixture(scope="module")
def found(
    wide_demo: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, list[str]]]:
    """The demo's folder and its server."""
    logs = tmp_path_factory.mktemp("adapters")
    with servers_of(
        "VLLM_ADAPTER_SERVER", wide_demo / "model", logs, 1, lora_rank=RANK
    ) as addresses:
        yield wide_demo, addresses


def test_trainer_and_server_agree_after_every_update(
    found: tuple[Path, list[str]], programs: TrainServer, tmp_path: Path
) -> None:
    """With the trainer over two tensor-parallel ranks."""
    folder, addresses = found
    line = command_line(
        folder, external(addresses), tmp_path / "out", "--lora-rank", str(RANK), "--lora-sync", "adapter",
        "--update-weight-transport", "disk", "--tensor-model-parallel-size", "2", "--sequence-parallel", "--check-weight-update-equal",
    )  # fmt: skip
    programs.train(line, tmp_path / "run", ranks=2, timeout_s=400).ok()
    rollouts = rows(tmp_path / "out")
    assert [row["rollout/weight_version_min"] for row in rollouts] == [1, 2, 3]
    for row in rollouts:
        print(row["rollout/train_rollout_log_prob_diff_max"])
        assert row["rollout/failed_frac"] == 0 and row["engine/evictions"] == 0
        assert row["rollout/train_rollout_log_prob_diff_max"] < EXACT
        assert row["engine/weight_check_log_prob_diff"] < EXACT
    assert rollouts[0]["train/grad_norm"] > 0  # so that the second adapter is another
