"""A command line written for slime."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.helpers import Workspace, rows_of, same_numbers, save_other_model
from tests.e2e.programs import TrainServer


def test_the_policy_starts_from_ref_load(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Without --load, as from the same folder as --load. Other command lines start from
    --hf-checkpoint."""
    other = save_other_model(tmp_path / "other", seed=3, std=0.5)
    launch = dict(actor_num_nodes=1, actor_num_gpus_per_node=1, rollout_engine="local", no_bf16="")
    rows = {}
    for name, flags in {
        "ref": dict(ref_load=other, **launch),
        "load": dict(ref_load=other, load=other, **launch),
        "base": dict(ref_load=work.model, **launch),
        "ours": dict(ref_load=other, lr_decay_style="linear", use_distributed_optimizer=""),
    }.items():
        done = server.train(work.flags(tmp_path / name, **flags), tmp_path / f"{name}_log").ok()
        assert ("the policy starts from --ref-load" in done.out + done.err) == (name == "ref")
        rows[name] = same_numbers(rows_of(tmp_path / name))
    assert rows["ref"] == rows["load"] != rows["base"] == rows["ours"]
