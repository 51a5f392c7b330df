"""Runs of a model that sees images: what is saved, synced to the engine and resumed, with a frozen
and a trained vision tower."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.make_tiny_model import make_tiny_model
from slime_like.checkpoints.folders import complete_steps
from tests.e2e.helpers import Workspace, rows_of, same_numbers, sampled, weights_of
from tests.e2e.programs import TrainServer
from tests.vision import picture

TOWER = "model.visual."
SCHEDULE = dict(lr_decay_style="linear", lr_decay_iters=8, lr_warmup_iters=1, weight_decay=0.1)
# three learning rates
TRAINED = {"train_vision_tower": "", "vision_tower_lr": 2e-3, "decoupled_lr": 5e-4}
COMPUTED_ALIKE = 1e-5  # log-probs of engine and trainer, in float32


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Flags of a run whose prompts have one or two pictures, or none."""
    folder = tmp_path_factory.mktemp("seeing")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    make_tiny_model(
        "Qwen3-VL",
        folder / "model",
        images=True,
        num_hidden_layers=4,
        rope_parameters=rope,
        head_dim=8,
    )
    rows = []
    for number in range(24):
        names = []
        for own in range(number % 3):
            path = folder / f"{number}_{own}.png"
            path.write_bytes(picture(10 * number + own, 16 + 8 * (number % 2), 24))
            names.append(path.name)
        text = "<image>" * len(names) + f"what is number {number}?"
        rows.append({"messages": text, "images": names, "answer": "red"})
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        **{"hf_checkpoint": folder / "model", "prompt_data": data, "micro_batch_size": 8},
        "multimodal_keys": '{"image":"images"}',
    }


def run(
    server: TrainServer, work: Workspace, out: Path, ranks: int = 1, **changes: Any
) -> dict[str, torch.Tensor]:
    """Run; returns the weights that it saves."""
    out.mkdir(exist_ok=True)
    saved = {"save_debug_rollout_data": out / "rollout_{rollout_id}", "save_hf": out / "hf"}
    words = work.flags(out, **{**SCHEDULE, **saved, **changes})
    server.train(words, out / "log", ranks=ranks).ok()
    return weights_of(out / "hf")


def changed(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> set[str]:
    assert found.keys() == expected.keys()
    return {name for name, tensor in expected.items() if not torch.equal(found[name], tensor)}


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_an_interrupted_run_ends_as_one_that_was_not(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path, trained: bool
) -> None:
    """Bit by bit, with a reference model; the engine computes as the trainer."""
    more = {**seeing, **(TRAINED if trained else {}), "use_kl_loss": "", "ref_load": seeing["hf_checkpoint"]}  # fmt: skip
    full = run(server, work, tmp_path / "full", **more, num_rollout=4)
    root = tmp_path / "checkpoints"
    parts = tmp_path / "parts"
    run(server, work, parts, **more, num_rollout=2, save=root)
    resumed = run(server, work, parts, **more, num_rollout=4, load=root)
    assert changed(resumed, full) == set()
    numbers = rows_of(tmp_path / "full")
    assert min(row["train/grad_norm"] for row in numbers) > 1e-3
    assert same_numbers(rows_of(parts)) == same_numbers(numbers)
    for row in numbers:
        assert row["rollout/train_rollout_log_prob_diff_mean"] < COMPUTED_ALIKE
    for rollout in range(4):
        recorded = [
            sampled(d / "rollout_{rollout_id}", rollout) for d in (parts, tmp_path / "full")
        ]
        assert recorded[0] == recorded[1]
    moved = changed(full, weights_of(seeing["hf_checkpoint"]))
    assert moved == {name for name in full if trained or not name.startswith(TOWER)}


KILLS = {
    "in a rollout": "kill_in_phase generate 3 0",
    "in an update": "signal_in_step SIGKILL 6 0",
    "in a save": "kill_in_second_save open 3",
}


@pytest.fixture(scope="module")
def uninterrupted(
    server: TrainServer,
    work: Workspace,
    seeing: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Four rollouts with a trained tower."""
    out = tmp_path_factory.mktemp("uninterrupted")
    run(server, work, out, **{**seeing, **TRAINED}, num_rollout=4)
    return out


@pytest.mark.parametrize("when", KILLS)
def test_a_killed_run_goes_on_bit_by_bit(
    server: TrainServer,
    work: Workspace,
    seeing: dict[str, Any],
    uninterrupted: Path,
    tmp_path: Path,
    when: str,
) -> None:
    """The same command line again, after SIGKILL with a checkpoint of a trained tower behind it."""
    out = tmp_path / "out"
    root = tmp_path / "checkpoints"
    saved = {"save_debug_rollout_data": out / "rollout_{rollout_id}", "save_hf": out / "hf"}
    again = {"save": root, "load": root, "save_interval": 2, "num_rollout": 4}
    words = work.flags(out, **{**SCHEDULE, **saved, **seeing, **TRAINED, **again})
    killed = server.train(words, out / "killed", hook=f"tests.e2e.faults:{KILLS[when]}")
    assert killed.status == -signal.SIGKILL, killed.err
    assert complete_steps(str(root)) == [2]
    server.train(words, out / "log").ok()
    assert changed(weights_of(out / "hf"), weights_of(uninterrupted / "hf")) == set()
    assert same_numbers(rows_of(out)) == same_numbers(rows_of(uninterrupted))
    for rollout in range(4):
        recorded = [sampled(d / "rollout_{rollout_id}", rollout) for d in (out, uninterrupted)]
        assert recorded[0] == recorded[1]


def far(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to a tensor's norm."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - t).norm() / t.norm()) for n, t in expected.items())


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_a_checkpoint_in_another_layout_and_as_a_model(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path, trained: bool
) -> None:
    """Supervised: the answer's numbers depend on no engine."""
    more = {
        **{**seeing, **(TRAINED if trained else {})},
        **{"loss_type": "sft_loss", "custom_rm_path": None, "rm_num_workers": None},
        **{"n_samples_per_prompt": None, "policy_loss_type": None, "num_steps_per_rollout": None},
        **{"rollout_max_response_len": None, "save_debug_rollout_data": None},
        "rollout_batch_size": 8,
    }
    root = tmp_path / "checkpoints"
    full = run(server, work, tmp_path / "full", **more, num_rollout=4, save=root, save_interval=2)
    layout = {
        "tensor_model_parallel_size": 2,
        **{"sequence_parallel": "", "use_distributed_optimizer": ""},
    }
    found = run(
        server, work, tmp_path / "parts", 2, **more, **layout, num_rollout=4, load=root, ckpt_step=2
    )
    assert far(found, full) < 1e-4
    # the last checkpoint as a model, the whole of it
    words = ["--load", root, "--hf-checkpoint", seeing["hf_checkpoint"], "--output"]
    argv = [str(word) for word in (*words, tmp_path / "hf", "--no-progress")]
    server.run("scripts.convert_megatron_to_hf", argv, tmp_path / "convert").ok()
    assert changed(weights_of(tmp_path / "hf"), full) == set()
    # and back, with its tower
    words = ["--hf-checkpoint", tmp_path / "hf", "--save", tmp_path / "back", "--vision-tower"]
    argv = [str(word) for word in (*words, "--no-progress", "--verify", "checksums", "logits")]
    server.run("scripts.convert_hf_to_megatron", argv, tmp_path / "convert").ok()
    rates = {name: 1e-30 for name in ("lr", "vision_tower_lr", "decoupled_lr") if name in more}
    start = {"num_rollout": 1, "load": tmp_path / "back", "finetune": "", "lr": 1e-30}
    again = run(server, work, tmp_path / "again", **more | rates | start)
    assert far(again, full) < 1e-6


def test_a_checkpoint_that_is_of_text_alone_and_one_that_is_not(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path
) -> None:
    """Neither is loaded in the other kind of run: each says what to do, which works."""
    without = {"multimodal_keys": None, "prompt_data": work.prompts}
    for name, more in (("text", without), ("images", {})):
        run(server, work, tmp_path / name, **{**seeing, **more}, num_rollout=1, save=tmp_path / f"ck_{name}")  # fmt: skip
    ends = {
        "text": ({}, "has no vision tower, which a run with --multimodal-keys loads: write"),
        "images": (without, "has a vision tower, which a run of text would lose: add"),
    }
    for name, (more, words) in ends.items():
        for flag in ("load", "ref_load"):
            flags = {**seeing, **more, flag: tmp_path / f"ck_{name}", "num_rollout": 2}
            if flag == "ref_load":
                flags["use_kl_loss"] = ""
            ended = server.train(work.flags(tmp_path / "out", **flags), tmp_path / "log")
            assert words in ended.error(), (name, flag)
        words_of_hf = [
            "--load",
            tmp_path / f"ck_{name}",
            "--hf-checkpoint",
            seeing["hf_checkpoint"],
        ]
        argv = [*words_of_hf, "--output", tmp_path / f"hf_{name}", "--no-progress"]
        server.run("scripts.convert_megatron_to_hf", [*map(str, argv)], tmp_path / "convert").ok()
        more = {**more, "hf_checkpoint": tmp_path / f"hf_{name}"}
        run(server, work, tmp_path / "out", **{**seeing, **more}, num_rollout=1)


def test_an_adapter_of_a_model_with_a_frozen_tower(
    server: TrainServer, work: Workspace, seeing: dict[str, Any], tmp_path: Path
) -> None:
    """It ends the same after a checkpoint, and the reference model, its base, sees images too."""
    more = {**seeing, "lora_rank": 4, "use_kl_loss": "", "ref_load": seeing["hf_checkpoint"]}
    full = run(server, work, tmp_path / "full", **more, num_rollout=2)
    root = tmp_path / "checkpoints"
    run(server, work, tmp_path / "parts", **more, num_rollout=1, save=root)
    resumed = run(server, work, tmp_path / "parts", **more, num_rollout=2, load=root)
    assert changed(resumed, full) == set()
    for row in rows_of(tmp_path / "full"):
        assert row["train/grad_norm"] > 1e-3
        assert row["rollout/train_rollout_log_prob_diff_mean"] < COMPUTED_ALIKE
    moved = changed(full, weights_of(seeing["hf_checkpoint"]))
    assert moved and not any(name.startswith(TOWER) for name in moved)


@pytest.mark.parametrize("critic", [{}, {"critic_lora_rank": 4}], ids=["critic", "adapters"])
def test_a_critic_sees_the_images(
    server: TrainServer,
    work: Workspace,
    seeing: dict[str, Any],
    tmp_path: Path,
    critic: dict[str, Any],
) -> None:
    """Two ranks end as one, with the policy's tower trained."""
    more = {
        **{**seeing, **critic, "advantage_estimator": "ppo", "critic_lr": 1e-3},
        **({"lora_rank": 4} if critic else {"train_vision_tower": ""}),
    }
    one = run(server, work, tmp_path / "one", **more)
    two = run(server, work, tmp_path / "two", 2, **more, pipeline_model_parallel_size=2)
    assert far(two, one) < 1e-4
    numbers = [rows_of(tmp_path / name) for name in ("one", "two")]
    for row, other in zip(*numbers, strict=True):
        assert row["train/value_loss"] == pytest.approx(other["train/value_loss"], rel=1e-4)
