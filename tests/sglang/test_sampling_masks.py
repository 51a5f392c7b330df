"""Real servers report what top-p and top-k kept: trainer and servers agree over those tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.certify.certificate import verify
from tests.e2e.programs import TrainServer
from tests.sglang.conftest import Servers
from tests.sglang.test_real_servers import command_line, rows


@pytest.mark.parametrize("cut", ["--rollout-top-k 7", "--rollout-top-k 32 --rollout-top-p 0.8"])
def test_log_probs_are_those_among_the_kept_tokens(
    demo: Path, servers: Servers, programs: TrainServer, tmp_path: Path, cut: str
) -> None:
    """After each update; the certificates of the servers say the same."""
    out = tmp_path / "out"
    line = command_line(
        demo, servers.flags, out, *cut.split(), "--renormalize-sampled-log-probs", "--certify-interval", "1",
    )  # fmt: skip
    programs.train(line, tmp_path / "run", ranks=1, timeout_s=300).ok()
    found = rows(out)
    assert len(found) >= 2
    for number, row in enumerate(found):
        assert row["rollout/train_rollout_log_prob_diff_max"] < 1e-5, row
        certificate = verify(out / f"certificates/rollout_{number}.json")
        assert certificate["holds"], [finding["text"] for finding in certificate["findings"]]
        assert len(certificate["log_probs"]) == 2
        assert all(row["largest"] < 1e-5 for row in certificate["log_probs"].values())
