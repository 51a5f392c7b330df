"""Whole programs on the pretend GPU: train.py with the settings that leave the CPU's paths, resumed
runs, weights to a server, the Tinker server, preflight and the rehearsal of gpu_check."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.make_tiny_model import make_tiny_model
from slime_like.cli.tiny_model import make_model, make_tokenizer
from tests.e2e.helpers import Workspace, rows_of, same_numbers, weights_of
from tests.e2e.nodes import python_with_servers
from tests.e2e.programs import ENVIRONMENT, ROOT, TrainServer
from tests.fake_sglang import FakeServer
from tests.vision import picture

MIXED: dict[str, Any] = dict(bf16="", use_distributed_optimizer="")
PIPELINE, TENSOR = (
    dict(pipeline_model_parallel_size=2),
    dict(tensor_model_parallel_size=2, sequence_parallel=""),
)
HOST_ADAM = dict(use_precision_aware_optimizer="", optimizer_cpu_offload="")
RECOMPUTED = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "float32, recomputed": (1, RECOMPUTED),
    "dropout": (1, dict(bf16="", hidden_dropout=0.1, attention_dropout=0.1)),
    "critic": (1, MIXED | dict(advantage_estimator="ppo")),
    "async, token budget": (1, MIXED | dict(async_rollout="", use_dynamic_batch_size="", max_tokens_per_gpu=64, micro_batch_size=None)),
    "adapters": (1, dict(bf16="", lora_rank=4)),
    "optimizer on the host": (1, MIXED | HOST_ADAM),
    "PP2, reference on the host": (2, MIXED | PIPELINE),
    "TP2, async": (2, MIXED | TENSOR | dict(async_rollout="")),
    "DP2, overlapped": (2, MIXED | dict(overlap_grad_reduce="", overlap_param_gather="", distributed_backend="nccl")),
}  # fmt: skip
FOUR_LAYERS = "Qwen3 of four layers"
# architecture of a tiny model, ranks, flags
FAMILIES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "experts, EP2": ("Qwen3MoeForCausalLM", 2, MIXED | dict(expert_model_parallel_size=2, moe_aux_loss_coeff=0.01)),
    "latent attention, PP2": ("DeepseekV3ForCausalLM", 2, MIXED | PIPELINE | dict(decoder_last_pipeline_num_layers=1)),
    "PP2 VP2": (FOUR_LAYERS, 2, MIXED | PIPELINE | dict(num_virtual_stages_per_pipeline_rank=2)),
    "delta nets, prediction, CP2": ("Qwen3NextForCausalLM", 2, MIXED | dict(context_parallel_size=2, mtp_num_layers=1, mtp_loss_scaling_factor=0.1)),
    "sparse attention": ("GlmMoeDsaForCausalLM", 1, MIXED),
    "Kimi delta attention": ("KimiLinearForCausalLM", 1, MIXED),
    "residual streams, pooled keys": ("Glm5NextForConditionalGeneration", 1, MIXED),
    "gated streams, pooled keys, CP2": ("Qwen4ExpForConditionalGeneration", 2, MIXED | dict(context_parallel_size=2)),
    "Mamba-2, CP2": ("NemotronHForCausalLM", 2, MIXED | dict(context_parallel_size=2)),
}  # fmt: skip


def of_reference(work: Workspace) -> dict[str, Any]:
    return dict(use_kl_loss="", kl_loss_coef=0.1, ref_load=work.model, ref_offload="")


def check(out: Path, rollouts: int) -> None:
    (record,) = out.glob("run*.json")
    assert "H100" in record.read_text()
    rows = rows_of(out)
    assert [row["step"] for row in rows] == list(range(1, rollouts + 1))
    for row in rows:
        assert all(math.isfinite(value) for value in row.values()), row
        assert row["train/grad_norm"] > 0 or row["train/loss"] == 0


@pytest.mark.parametrize("name", RUNS)
def test_train(name: str, server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    ranks, flags = RUNS[name]
    words = work.flags(
        tmp_path,
        save_hf=tmp_path / "hf",
        **(of_reference(work) if "reference" in name else {}),
        **flags,
    )
    server.train(words, tmp_path / "log", ranks=ranks).ok()
    check(tmp_path, 2)
    assert all(tensor.isfinite().all() for tensor in weights_of(tmp_path / "hf").values())


@pytest.mark.parametrize("name", FAMILIES)
def test_train_other_layers(
    name: str, server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    architecture, ranks, flags = FAMILIES[name]
    if architecture == FOUR_LAYERS:
        tokenizer = make_tokenizer()
        model = make_model(tokenizer, hidden_size=32, num_layers=4, seed=1)
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
    else:
        make_tiny_model(architecture, tmp_path / "model")
    out = tmp_path / "out"
    words = work.flags(out, hf_checkpoint=tmp_path / "model", save_hf=out / "hf", **flags)
    server.train([*words, "--max-train-rollout-diff", "1"], tmp_path / "log", ranks=ranks).ok()
    check(out, 2)
    before, after = (weights_of(folder) for folder in (tmp_path / "model", out / "hf"))
    assert before.keys() == after.keys()
    assert all(tensor.isfinite().all() for tensor in after.values())


# model, ranks, flags; the device has no gradient of the convolution in three dimensions with which
# Qwen's towers begin, so that only Gemma's is trained
SEEING: dict[str, tuple[str, int, dict[str, Any]]] = {
    "float32": ("Qwen3-VL", 1, {}),
    "experts, TP2": ("Qwen3-VL-30B-A3B", 2, MIXED | TENSOR),
    "CP2": ("Qwen2.5-VL", 2, MIXED | dict(context_parallel_size=2)),
    "delta nets, PP2": ("Qwen3.5", 2, MIXED | PIPELINE | dict(decoder_last_pipeline_num_layers=1)),
    "trained, recomputed": ("gemma-3-4b", 1, MIXED | RECOMPUTED | dict(train_vision_tower="", vision_tower_lr=1e-3, transformer_impl="local")),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEING)
def test_train_on_images(name: str, server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    """Pixels are made on the host, and go to the device when the tower takes them."""
    model, ranks, flags = SEEING[name]
    make_tiny_model(model, tmp_path / "model", images=True)
    rows = []
    for number in range(12):
        names = [f"{number}_{own}.png" for own in range(number % 3)]
        for own, file in enumerate(names):
            (tmp_path / file).write_bytes(picture(10 * number + own, 16 + 8 * own, 24))
        text = "<image>" * len(names) + f"what is {number}?"
        rows.append({"messages": text, "images": names, "answer": "a"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    words = work.flags(
        out, hf_checkpoint=tmp_path / "model", prompt_data=tmp_path / "rows.jsonl", multimodal_keys='{"image":"images"}', save_hf=out / "hf",
        max_train_rollout_diff=1, **flags,
    )  # fmt: skip
    server.train(words, tmp_path / "log", ranks=ranks).ok()
    check(out, 2)
    assert all(tensor.isfinite().all() for tensor in weights_of(out / "hf").values())


def test_a_run_on_the_cpu_is_the_same_in_float32(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """Sampling does not depend on the device: the same samples, losses to rounding."""
    with TrainServer() as cpu:
        for where, name in ((cpu, "cpu"), (server, "gpu")):
            out = tmp_path / name
            where.train(work.flags(out, num_rollout=1), out / "log").ok()
    (expected,), (found,) = (same_numbers(rows_of(tmp_path / name)) for name in ("cpu", "gpu"))
    assert found["rollout/reward_mean"] == expected["rollout/reward_mean"]
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_gives_the_same_bits(
    ranks: int, server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    full_run, parts, saved = (tmp_path / name for name in ("whole", "parts", "saved"))
    flags: dict[str, Any] = MIXED | of_reference(work) | dict(lr_decay_iters=6)
    server.train(
        work.flags(full_run, save_hf=full_run / "hf", num_rollout=3, **flags),
        full_run / "log",
        ranks=ranks,
    ).ok()
    for rollouts in (2, 3):
        words = work.flags(
            parts, num_rollout=rollouts, save=saved, load=saved, save_hf=parts / "hf", **flags
        )
        server.train(words, parts / f"log{rollouts}", ranks=ranks).ok()
    assert same_numbers(rows_of(parts)) == same_numbers(rows_of(full_run))
    expected, found = weights_of(full_run / "hf"), weights_of(parts / "hf")
    assert all(tensor.equal(found[name]) for name, tensor in expected.items())


def test_a_killed_run_resumes_to_the_same_bits(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """SIGKILL of one of two ranks in the third rollout, after the second checkpoint."""
    flags: dict[str, Any] = MIXED | TENSOR | dict(num_rollout=3, lr_decay_iters=6)
    full_run, killed, saved = (tmp_path / name for name in ("whole", "killed", "saved"))
    server.train(
        work.flags(full_run, save_hf=full_run / "hf", **flags), full_run / "log", ranks=2
    ).ok()
    words = work.flags(
        killed, save=saved, load=saved, save_interval=1, save_hf=killed / "hf", **flags
    )
    hook = "tests.e2e.faults:kill_in_phase train 3 1"
    ended = server.train(words, killed / "log", ranks=2, hook=hook)
    assert ended.status != 0
    done = server.train(words, killed / "again", ranks=2).ok()
    assert "rollout 3/3" in done.out and "rollout 2/3" not in done.out
    assert same_numbers(rows_of(killed)) == same_numbers(rows_of(full_run))
    expected = weights_of(full_run / "hf")
    found = weights_of(killed / "hf")
    assert all(tensor.equal(found[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("transport", ["disk", "tensor", "broadcast"])
def test_weights_reach_a_server(
    transport: str, server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """With the trainer's memory given away while the server samples."""
    with FakeServer(str(work.model)) as fake:
        flags: dict[str, Any] = dict(
            rollout_engine="sglang", rollout_external_engine_addrs=fake.address, no_sglang_router="",
            update_weight_transport=transport, offload="", n_samples_per_prompt=2, micro_batch_size=2,
            update_weight_buffer_size=2**16,  # several buckets: the next is made while one is sent
        )  # fmt: skip
        server.train(work.flags(tmp_path, **flags, **MIXED), tmp_path / "log").ok()
        assert fake.count("/release_memory_occupation") > 1
    check(tmp_path, 2)
    for row in rows_of(tmp_path):
        assert row["perf/offloaded_gb"] > 0
        assert row["rollout/train_rollout_log_prob_diff_mean"] < 0.05, "bf16 here, float32 there"


def test_without_handles_of_memory_weights_go_as_bytes(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    """--colocate's default is cuda_ipc, and this device has no handles: it is found out when the
    run starts, and reported once."""
    flags: dict[str, Any] = dict(
        rollout_engine="sglang", no_sglang_router="", colocate="", n_samples_per_prompt=2,
        micro_batch_size=2, sglang_python=python_with_servers(tmp_path),
    )  # fmt: skip
    words = work.flags(tmp_path / "out", **flags, **MIXED)
    done = server.train(words, tmp_path / "log", ranks=2).ok()
    check(tmp_path / "out", 2)
    reported = "--update-weight-transport cuda_ipc: another process cannot open memory of cuda:0"
    assert (done.out + done.err).count(reported) == 1, done.err[-2000:]


def test_models_of_the_tinker_server_take_over_each_others_slots(
    environment: dict[str, str], work: Workspace, tmp_path: Path
) -> None:
    """Three models in one slot, each trained as if it were alone."""
    from tinker import types

    from tests.e2e.api_server import ApiServer, batch, policy

    flags = ("--max-models", "9", "--max-resident-models", "1")
    with ApiServer(work.model, tmp_path, *flags, environment={**ENVIRONMENT, **environment}) as api:
        client = api.client()
        models = [policy(client, api) for _ in range(3)]
        losses: list[list[float]] = [[] for _ in models]
        for step in range(3):
            for model, seen in zip(models, losses, strict=True):
                result = model.forward_backward(batch(4, seed=step), "cross_entropy").result()
                seen.append(result.metrics["loss:sum"])
                model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        assert losses[0] == losses[1] == losses[2]
        assert len(set(losses[0])) == 3
        # which looks for NaN in moments, on the device, and in step counts, on the host
        assert models[0].save_state("end").result().path


def test_preflight_predicts_the_device(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    done = server.train([*work.flags(tmp_path, **MIXED), "--preflight"], tmp_path / "log").ok()
    assert re.search(r"memory", done.out, re.IGNORECASE)


def test_gpu_check_rehearses(environment: dict[str, str], tmp_path: Path) -> None:
    """The checks that need no more than a device, against the CPU of the same sizes."""
    checks = (
        "device",
        "world",
        "train_fp32",
        "train_bf16",
        "attention",
        "head",
        "offload",
        "mfu_0.6b_8k",
    )
    command = [sys.executable, "benchmarks/gpu_check/run.py", "--rehearse", "--only", *checks]
    done = subprocess.run(
        [*command, "--output-dir", str(tmp_path)], cwd=ROOT, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {c["name"]: c["error"] for c in found["checks"] if c["status"] != "rehearsed"} == {}
    assert done.returncode == 0, done.stderr[-3000:]
    figures = {check["name"]: check["figures"] for check in found["checks"]}
    assert figures["train_fp32"]["loss_difference"] < 1e-4
    assert figures["train_bf16"]["norm_difference"] < 0.05
