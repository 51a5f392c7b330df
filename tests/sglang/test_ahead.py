"""train.py that samples ahead on real servers: every token has the version of the weights that
wrote it, and with a bound of 0 nothing changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_like.rollout.recording import load_rollout
from slime_like.types import NOT_SAMPLED, Sample
from tests.e2e.programs import TrainServer
from tests.sglang.conftest import Servers
from tests.sglang.test_real_servers import EXACT, command_line, rows

AHEAD = ("--async-rollout", "--max-staleness")


def samples(out: Path, rollout: int) -> list[Sample]:
    return [
        sample
        for group in load_rollout(str(out / "r_{rollout_id}"), rollout)
        for sample in group.samples
    ]


def test_one_version_behind(
    demo: Path, servers: Servers, programs: TrainServer, tmp_path: Path
) -> None:
    """All weights that were sent are kept, and every token's log-prob is that of the ones that its
    version names."""
    out, kept = tmp_path / "out", tmp_path / "weights"
    line = command_line(
        demo, servers.flags, out, *AHEAD, "1", "--num-rollout", "5", "--rollout-max-response-len", "48", "--tis-ratio-type", "token",
        "--update-weight-transport", "disk", "--update-weight-disk-dir", str(kept), "--update-weight-disk-keep-files",
        "--save-debug-rollout-data", str(out / "r_{rollout_id}"),
    )  # fmt: skip
    programs.train(line, tmp_path / "run", ranks=1, timeout_s=300).ok()
    found = rows(out)
    networks = {
        version: AutoModelForCausalLM.from_pretrained(
            kept / f"version-{version}", dtype=torch.float32
        )
        for version in range(1, 6)
    }
    stale = 0
    for step, row in enumerate(found):
        shares = {
            name: value for name, value in row.items() if name.startswith("rollout/staleness_frac_")
        }
        behind = [
            step + 1 - version
            for sample in samples(out, step)
            for version in sample.weight_versions
        ]
        assert (
            set(behind) <= {0, 1} and row["rollout/failed_frac"] == 0 and row["perf/sampling_s"] > 0
        )
        assert shares == {
            f"rollout/staleness_frac_{n}": pytest.approx(behind.count(n) / len(behind))
            for n in set(behind)
        }
        stale += behind.count(1)
        for sample in samples(out, step):
            assert_versions_tell_the_weights(sample, networks)
    assert stale, "nothing was sampled ahead"


def assert_versions_tell_the_weights(sample: Sample, networks: dict[int, torch.nn.Module]) -> None:
    assert sample.rollout_log_probs is not None
    response = sample.tokens[sample.prompt_length :]
    versions = torch.tensor(sample.weight_versions)
    for version in set(sample.weight_versions) - {NOT_SAMPLED}:
        with torch.no_grad():
            rows_ = (
                networks[version](sample.tokens[None])
                .logits[0, sample.prompt_length - 1 : -1]
                .log_softmax(-1)
            )
        own = rows_.gather(-1, response[:, None])[:, 0]
        assert float((own - sample.rollout_log_probs)[versions == version].abs().max()) < EXACT, (
            sample.sample_id,
            version,
        )


def test_a_bound_of_0_is_the_synchronous_run(
    demo: Path, servers: Servers, programs: TrainServer, tmp_path: Path
) -> None:
    """The likeliest token each time, as a server's draws are its own: the same tokens, and so the
    same updates."""
    outs = [tmp_path / "plain", tmp_path / "ahead"]
    for out, more in zip(outs, ((), (*AHEAD, "0")), strict=True):
        line = command_line(
            demo,
            servers.flags,
            out,
            "--rollout-top-k",
            "1",
            "--save-debug-rollout-data",
            str(out / "r_{rollout_id}"),
            *more,
        )
        programs.train(line, tmp_path / f"run-{out.name}", ranks=1, timeout_s=300).ok()
    plain, ahead = outs
    for step, (one, two) in enumerate(zip(rows(plain), rows(ahead), strict=True)):
        first, second = samples(plain, step), samples(ahead, step)
        assert [s.tokens.tolist() for s in first] == [s.tokens.tolist() for s in second]
        assert [s.weight_versions for s in first] == [s.weight_versions for s in second]
        assert two["rollout/staleness_max"] == 0 and one["train/grad_norm"] > 0
        for name in ("train/loss", "train/grad_norm", "rollout/reward_mean"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
