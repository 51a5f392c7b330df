"""train.py with adapters: it learns, resumes bit by bit, in other layouts too, and gives what PEFT
and the engine understand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_like.checkpoints.folders import checkpoint_folder
from slime_like.megatron.checkpoint.tensors import CheckpointTensors
from tests.e2e.helpers import Workspace, make_workspace, rows_of, same_numbers, weights_of
from tests.e2e.programs import TrainServer

LORA = dict(
    lora_rank=4,
    lr=1e-2,
    num_steps_per_rollout=1,
    use_kl_loss="",
    kl_loss_coef=0.01,
    lora_target_modules="all-linear unembed",
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def server() -> Iterator[TrainServer]:
    with TrainServer() as server:
        yield server


@pytest.mark.extended
def test_a_run_learns_saves_and_resumes(
    work: Workspace, server: TrainServer, tmp_path: Path
) -> None:
    """Three rollouts at once, and two and one of them: the same numbers, adapter and merged weights
    bit by bit. The base is not saved."""
    full_run, first, second = (tmp_path / name for name in ("whole", "first", "second"))
    ends = dict(lora_save_path=tmp_path / "adapter", save_hf=tmp_path / "merged")
    server.train(work.flags(full_run, num_rollout=3, **LORA, **ends), full_run).ok()
    rows = rows_of(full_run)
    assert rows[0]["train/kl_k3"] == 0.0, (
        "the reference is the base, and the adapter starts as nothing"
    )
    assert rows[-1]["train/kl_k3"] > 1e-5 and len({row["train/loss"] for row in rows}) == 3
    assert all(row["rollout/train_rollout_log_prob_diff_mean"] < 1e-4 for row in rows), (
        "the engine has the merged weights"
    )

    saved = dict(save=tmp_path / "saved", lr_decay_iters=6)
    server.train(work.flags(first, num_rollout=2, **LORA, **saved), first).ok()
    resumed = dict(
        **saved,
        load=tmp_path / "saved",
        lora_save_path=tmp_path / "adapter2",
        save_hf=tmp_path / "merged2",
    )
    server.train(work.flags(second, num_rollout=3, **LORA, **resumed), second).ok()
    assert same_numbers(rows_of(first) + rows_of(second)) == same_numbers(rows)
    for name, file in (("adapter", "adapter_model.safetensors"), ("merged", "model.safetensors")):
        a, b = load_file(tmp_path / name / file), load_file(tmp_path / f"{name}2" / file)
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), name

    base, merged = weights_of(work.model), weights_of(tmp_path / "merged")
    moved = {name for name in base if not torch.equal(base[name], merged[name])}
    assert moved == {name for name in base if "_proj" in name}
    assert set(merged) - set(base) == {"lm_head.weight"}, (
        "the output layer of a tied model is one of its own now"
    )
    names = CheckpointTensors(
        checkpoint_folder(str(tmp_path / "saved"), 2) / "policy"
    ).tensor_names()
    assert len(names) == 3 * 30 and all("lora_" in name for name in names), (
        "factors and the two moments of each, nothing of the base"
    )


@pytest.mark.slow
def test_two_ranks_continue_from_one(work: Workspace, server: TrainServer, tmp_path: Path) -> None:
    one, two, more = (tmp_path / name for name in ("one", "two", "more"))
    common = dict(**LORA, lr_decay_iters=4)
    server.train(work.flags(one, num_rollout=2, save=tmp_path / "saved", **common), one).ok()
    words = (
        "--load",
        tmp_path / "saved",
        "--hf-checkpoint",
        work.model,
        "--output",
        tmp_path / "no",
    )
    done = server.run("scripts.convert_megatron_to_hf", words, tmp_path / "refused")
    assert done.status == 2 and "holds the adapters of a LoRA run, not a model" in done.err
    assert "--save-hf" in done.err and "--lora-save-path" in done.err
    server.train(
        work.flags(
            more, num_rollout=3, load=tmp_path / "saved", lora_save_path=more / "adapter", **common
        ),
        more,
    ).ok()
    parallel = dict(tensor_model_parallel_size=2, sequence_parallel="", no_load_rng="")
    flags = work.flags(
        two,
        num_rollout=3,
        load=tmp_path / "saved",
        lora_save_path=two / "adapter",
        **common,
        **parallel,
    )
    server.train(flags, two, ranks=2).ok()
    a, b = (load_file(out / "adapter" / "adapter_model.safetensors") for out in (more, two))
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_run_starts_from_an_adapter(work: Workspace, server: TrainServer, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    server.train(
        work.flags(first, num_rollout=1, lora_save_path=tmp_path / "adapter", **LORA), first
    ).ok()
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["base_model_name_or_path"] == str(work.model)
    server.train(
        work.flags(second, num_rollout=1, lora_adapter_path=tmp_path / "adapter", **LORA), second
    ).ok()
    assert rows_of(second)[0]["train/kl_k3"] > 1e-6, "it is not the base that it starts from"


@pytest.mark.extended
def test_checkpoints_of_another_adapter_or_base_are_refused(
    work: Workspace, server: TrainServer, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    server.train(work.flags(tmp_path / "a", num_rollout=1, save=saved, **LORA), tmp_path / "a").ok()
    other = make_workspace(tmp_path / "other")
    weights = weights_of(other.model)
    weights["model.norm.weight"][0] += 1
    save_file(weights, other.model / "model.safetensors", metadata={"format": "pt"})
    for changes, words in (
        (dict(LORA, lora_rank=8), "lora_rank 4 (here: 8)"),
        (dict(LORA, hf_checkpoint=other.model), "base_model_digest"),
        ({}, "lora_rank 4 (here: 0)"),
    ):
        out = tmp_path / "refused"
        assert (
            words
            in server.train(work.flags(out, num_rollout=2, load=saved, **changes), out).error()
        )


@pytest.mark.extended
def test_a_critic_of_adapters_learns_saves_and_resumes(
    work: Workspace, server: TrainServer, tmp_path: Path
) -> None:
    """On the policy's base: two rollouts at once, and one and one of them, the same numbers. A
    critic of all weights next to a policy with adapters starts from the same base, and is another
    model in a checkpoint."""
    full_run, first, second, full = (
        tmp_path / name for name in ("whole", "first", "second", "full")
    )
    ppo = dict(
        LORA,
        advantage_estimator="ppo",
        policy_loss_type="ppo",
        normalize_advantages="",
        critic_lr=1e-2,
        lr_decay_iters=4,
    )
    adapters = dict(ppo, critic_lora_rank=2)
    server.train(work.flags(full_run, num_rollout=2, **adapters), full_run).ok()
    rows = rows_of(full_run)
    assert rows[0]["rollout/values_mean"] == 0 != rows[1]["rollout/values_mean"], (
        "a head of zeros, which learns"
    )
    assert all(
        row["train/critic_grad_norm"] > 1e-3 and row["train/grad_norm"] > 1e-3 for row in rows
    )

    server.train(work.flags(first, num_rollout=1, save=tmp_path / "saved", **adapters), first).ok()
    server.train(
        work.flags(second, num_rollout=2, load=tmp_path / "saved", **adapters), second
    ).ok()
    assert same_numbers(rows_of(first) + rows_of(second)) == same_numbers(rows)
    names = CheckpointTensors(
        checkpoint_folder(str(tmp_path / "saved"), 1) / "critic"
    ).tensor_names()
    head = {name for name in names if "lora_" not in name}
    assert (
        len(names) == 3 * 30 and len(head) == 3 * 2 and all("value_head." in name for name in head)
    )

    server.train(work.flags(full, num_rollout=1, **ppo), full).ok()
    (row,) = rows_of(full)
    assert row["train/value_loss"] == pytest.approx(rows[0]["train/value_loss"], rel=1e-5)
    refused = server.train(
        work.flags(full, num_rollout=2, load=tmp_path / "saved", **ppo), full
    ).error()
    assert "critic_lora_rank 2 (here: 0)" in refused


@pytest.mark.slow
def test_a_critic_of_adapters_on_two_ranks(
    work: Workspace, server: TrainServer, tmp_path: Path
) -> None:
    ppo = dict(
        LORA,
        advantage_estimator="ppo",
        policy_loss_type="ppo",
        critic_lr=1e-2,
        lr_decay_iters=4,
        critic_lora_rank=2,
        num_rollout=1,
    )
    one, two = tmp_path / "one", tmp_path / "two"
    ppo |= dict(num_steps_per_rollout=2)
    server.train(
        work.flags(one, save_debug_rollout_data=tmp_path / "rollout_{rollout_id}", **ppo), one
    ).ok()
    replayed = dict(debug_train_only="", load_debug_rollout_data=tmp_path / "rollout_{rollout_id}")
    for name, layout in (
        ("TP2", dict(tensor_model_parallel_size=2, sequence_parallel="")),
        ("DP2", dict(use_distributed_optimizer="")),
    ):
        server.train(work.flags(two / name, **ppo, **replayed, **layout), two / name, ranks=2).ok()
        for row, other in zip(rows_of(one), rows_of(two / name), strict=True):
            for metric in ("train/value_loss", "train/critic_grad_norm", "train/grad_norm"):
                assert other[metric] == pytest.approx(row[metric], rel=1e-3), (name, metric)


@pytest.mark.extended
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_engine_applies_the_adapter_that_is_trained(
    work: Workspace, server: TrainServer, tmp_path: Path, ranks: int
) -> None:
    """--lora-sync adapter with the local engine; the output layer is tied to the embedding."""
    parallel = dict(tensor_model_parallel_size=2, sequence_parallel="") if ranks == 2 else {}
    flags = work.flags(tmp_path, num_rollout=3, **LORA, **parallel, lora_sync="adapter")
    server.train(flags, tmp_path, ranks=ranks).ok()
    rows = rows_of(tmp_path)
    assert len({row["train/loss"] for row in rows}) == 3
    assert all(row["rollout/train_rollout_log_prob_diff_max"] < 1e-5 for row in rows)
    assert not any(name.startswith("lora/merged") for row in rows for name in row)


@pytest.mark.extended
def test_merged_updates_in_bfloat16_say_what_rounding_leaves(
    work: Workspace, server: TrainServer, tmp_path: Path
) -> None:
    settings = LORA | dict(lr=1e-4, lora_target_modules="all-linear", lora_rounding_interval=2)
    server.train(work.flags(tmp_path, num_rollout=4, **settings, bf16=""), tmp_path).ok()
    rows = rows_of(tmp_path)
    assert "lora/merged_changed_frac" not in rows[0], "there is nothing before the first version"
    assert "lora/merged_changed_frac" not in rows[2], "every second is measured"
    for row in rows[1::2]:
        assert 0 < row["lora/merged_changed_frac"] < 1 and row["lora/merged_update_error"] > 0.1
