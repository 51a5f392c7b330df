"""A run with experts, from sampling to the saved model, on two ranks that share the experts;
interrupted and resumed."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from slime_like.rollout.recording import load_rollout, save_rollout
from slime_like.samples.episodes import complete
from slime_like.samples.groups import SampleGroup
from tests.e2e.helpers import Workspace, rows_of, same_numbers, weights_of
from tests.e2e.programs import TrainServer
from tests.fake_sglang import fake_servers

EXPERTS = (
    "--expert-model-parallel-size 2 --use-distributed-optimizer --use-routing-replay --moe-aux-loss-coeff 0.01 --moe-router-dtype fp32 "
    "--use-dynamic-batch-size --max-tokens-per-gpu 48"
)


@pytest.fixture
def model(work: Workspace) -> Path:
    return work.expert_model


def flags(
    work: Workspace, model: Path, out: Path, **changes: str | int | float | Path | None
) -> list[str]:
    return [
        *work.flags(
            out, hf_checkpoint=model, save_hf=out / "hf", lr=5e-3, micro_batch_size=None, **changes
        ),
        *EXPERTS.split(),
    ]


@pytest.mark.slow
def test_two_and_two_are_four(
    server: TrainServer, work: Workspace, model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    full_run, parts, root = tmp_path / "whole", tmp_path / "parts", tmp_path / "checkpoints"
    server.train(
        flags(work, model, full_run, num_rollout=4, save=root, save_interval=2),
        tmp_path / "log1",
        ranks=2,
    ).ok()
    again = flags(work, model, parts, num_rollout=4, load=root, ckpt_step=2)
    server.train(again, tmp_path / "log2", ranks=2).ok()

    rows = rows_of(full_run)
    assert len(rows) == 4
    for row in rows:
        assert row["rollout/train_rollout_log_prob_diff_mean"] < 1e-5, (
            "the engine has other weights or other experts"
        )
        assert row["train/grad_norm"] > 1e-3
        assert 0.5 < row["train/moe_aux_loss"] < 3 and row["train/moe_load_max"] >= 1
        assert 0 <= row["train/moe_replay_disagreement"] < 1 and math.isfinite(row["train/loss"])
    assert any(row["train/moe_replay_disagreement"] > 0 for row in rows), (
        "the second step's own choice is never another"
    )
    assert same_numbers(rows_of(parts)) == same_numbers(rows[2:])
    before, after, resumed = (
        weights_of(folder) for folder in (model, full_run / "hf", parts / "hf")
    )
    assert before.keys() == after.keys() == resumed.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert [name for name in after if not torch.equal(after[name], resumed[name])] == []
    AutoModelForCausalLM.from_pretrained(full_run / "hf")

    # the weights, without the optimizer, in a run that does not share the experts; steps this small
    # change nothing
    alone = tmp_path / "alone"
    argv = work.flags(
        alone,
        hf_checkpoint=model,
        save_hf=alone / "hf",
        lr=1e-30,
        num_rollout=1,
        load=root,
        finetune="",
    )
    server.train(argv, tmp_path / "log3").ok()
    moved = weights_of(alone / "hf")
    assert [name for name in after if not torch.equal(after[name], moved[name])] == []


@pytest.mark.extended
def test_the_samplers_routes_are_replayed(
    server: TrainServer, work: Workspace, model: Path, tmp_path: Path
) -> None:
    """At the same weights the trainer chooses what the sampler chose, token by token; a recorded
    rollout with other routed experts is trained on those."""
    full_run, again, record = (
        tmp_path / "whole",
        tmp_path / "again",
        str(tmp_path / "rollout_{rollout_id}"),
    )
    changes = {"use_rollout_routing_replay": "", "num_rollout": 2, "num_steps_per_rollout": 2}
    server.train(
        flags(work, model, full_run, save_debug_rollout_data=record, **changes),
        tmp_path / "log1",
        ranks=2,
    ).ok()
    for row in rows_of(full_run):
        assert (
            row["rollout/moe_routing_disagreement"] == 0
            and row["rollout/train_rollout_log_prob_diff_mean"] < 1e-5
        )
    assert any(row["train/moe_replay_disagreement"] > 0 for row in rows_of(full_run)), (
        "no update changed what a router would choose"
    )

    groups = load_rollout(record, 0)
    other = [
        SampleGroup(
            g.group_id,
            tuple(
                dataclasses.replace(
                    s,
                    routed_experts=(3 - s.routed_experts).where(
                        s.routed_experts >= 0, s.routed_experts
                    ),
                )
                for s in complete(g.samples)
            ),
        )
        for g in groups
        if all(s.routed_experts is not None for s in g.samples)
    ]
    assert len(other) == len(groups)
    save_rollout(record, 0, other)
    changes |= {"num_rollout": 1, "load_debug_rollout_data": record, "debug_train_only": ""}
    server.train(flags(work, model, again, **changes), tmp_path / "log2", ranks=2).ok()
    (row,) = rows_of(again)
    assert (
        row["rollout/moe_routing_disagreement"] > 0.3
        and row["rollout/train_rollout_log_prob_diff_mean"] > 1e-3
    )


@pytest.mark.extended
def test_the_routes_of_servers_are_replayed(
    server: TrainServer, work: Workspace, model: Path, tmp_path: Path
) -> None:
    """They come with the answers, whose experts the trainer's two ranks share."""
    changes = {
        "use_rollout_routing_replay": "", "rollout_engine": "sglang", "no_sglang_router": "", "update_weight_transport": "tensor",
        "update_weight_buffer_size": 10000,
    }  # fmt: skip
    with fake_servers(str(model), 1) as (fake,):
        fake.info["enable_return_routed_experts"] = True
        argv = flags(work, model, tmp_path, **changes, rollout_external_engine_addrs=fake.address)
        server.train(argv, tmp_path / "log", ranks=2).ok()
        assert fake.count("/update_weights_from_tensor") > 10
    for row in rows_of(tmp_path):
        assert (
            row["rollout/moe_routing_disagreement"] == 0
            and row["rollout/train_rollout_log_prob_diff_max"] < 1e-4
        )
    assert any(row["train/moe_replay_disagreement"] > 0 for row in rows_of(tmp_path)), (
        "no update changed what a router would choose"
    )
