"""--lora-sync adapter on real servers: they keep the base model, and every update is an adapter."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from scripts.make_tiny_model import make_tiny_model
from slime_like.engines.sglang.factory import AdapterNeeds, adapter_settings
from slime_like.servers.processes import ServerProcess, free_ports
from slime_like.weight_sync.settings import AdapterSettings
from tests.e2e.programs import TrainServer
from tests.real_servers import assert_versions_tell_the_weights, in_background, wait_until
from tests.sglang.conftest import Servers, running, server_launch, slowed, wait_for
from tests.sglang.test_engine import GREEDY, REQUESTS, SAMPLING, engine_of
from tests.sglang.test_real_servers import command_line, rows

RANK = 4
ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
DENSE = tuple(sorted((*ATTENTION, "down_proj", "gate_proj", "up_proj")))


@dataclass(frozen=True, slots=True)
class Kind:
    """A model, and the adapters that its server takes."""

    like: str | None  # None: the model of `expert_demo`
    dtype: str
    flags: str  # of the trainer
    modules: tuple[str, ...]
    tied: bool = False
    # largest difference of a log-prob, and of their mean: with float32 in the order of sums, with
    # bfloat16 in the rounding of activations, of which each side has its own
    largest: float = 1e-5
    mean: float = 1e-6


KINDS = {
    "dense": Kind("Qwen3-", "float32", "all-linear", DENSE),
    "tied output layer": Kind(
        "Qwen3-", "float32", "all-linear unembed", (*DENSE, "lm_head"), tied=True
    ),
    "experts": Kind(None, "float32", "attn", ATTENTION),
    "bfloat16": Kind("Qwen3-", "bfloat16", "all-linear", DENSE, largest=0.1, mean=0.01),
}


@dataclass(frozen=True, slots=True)
class Served:
    """A server with adapters."""

    kind: Kind
    demo: Path
    servers: Servers

    @property
    def model(self) -> str:
        return str(self.demo / "model")


@contextlib.contextmanager
def served(kind: Kind, demo: Path, folder: Path) -> Iterator[Served]:
    (folder / "train.jsonl").symlink_to(demo / "train.jsonl")
    sizes: dict[str, Any] = dict(
        hidden_size=64, intermediate_size=64, tie_word_embeddings=kind.tied
    )
    if kind.like is None:
        (folder / "model").symlink_to(demo / "model")
    else:
        make_tiny_model(kind.like, folder / "model", **sizes)
    (port,) = free_ports(1)
    settings: dict[str, Any] = {
        "dtype": kind.dtype,
        **adapter_settings(AdapterNeeds(RANK, kind.modules), cuda=False),
    }
    process = ServerProcess(
        server_launch(folder / "model", port, folder / "server.log", **settings)
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield Served(kind, folder, Servers((f"127.0.0.1:{port}",), ""))
    finally:
        process.end()


@pytest.fixture(scope="module")
def dense(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(KINDS["dense"], demo, tmp_path_factory.mktemp("dense")) as found:
        yield found


def factors(model: str, version: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(version)
    for name, weight in AutoModelForCausalLM.from_pretrained(model).named_parameters():
        if name.split(".")[-2] in DENSE:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            for half, shape in (("A", (RANK, weight.shape[1])), ("B", (weight.shape[0], RANK))):
                yield f"{module}.lora_{half}.weight", torch.randn(shape, generator=generator) * 0.05


def merged(model: str, version: int) -> torch.nn.Module:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapter = dict(factors(model, version))
    with torch.no_grad():
        for name, weight in network.named_parameters():
            module = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" in adapter:
                a, b = (adapter[f"{module}.lora_{half}.weight"] for half in "AB")
                weight += 2.0 * (b @ a)
    return network


@pytest.mark.parametrize("transport", ["tensor", "disk"])
def test_requests_keep_their_adapter_over_an_update(dense: Served, transport: str) -> None:
    """Which neither waits for them nor stops them. Every token has the log-prob of its version."""
    model = dense.model
    adapter = AdapterSettings(RANK, 2.0 * RANK)
    (url,) = dense.servers.urls
    networks = {version: merged(model, version) for version in (1, 2, 3)}
    with (
        engine_of(model, [url], transport, adapter=adapter, takes_adapter=True) as engine,
        slowed(dense.servers, 0.02),
    ):
        engine.update_weights(factors(model, 1), 1)
        with in_background(engine, REQUESTS, SAMPLING) as outputs:
            wait_until(lambda: running(url) == len(REQUESTS), "all requests at the server")
            start = time.monotonic()
            engine.update_weights(factors(model, 2), 2)
            print(f"an update under {len(REQUESTS)} requests: {time.monotonic() - start:.2f} s")
            assert not outputs
        assert {v for o in outputs for v in o.weight_versions} == {1}
        assert_versions_tell_the_weights(REQUESTS, outputs, networks)
        for version in (2, 3):
            if version == 3:
                engine.update_weights(factors(model, 3), 3)
            outputs = engine.generate(REQUESTS, GREEDY)
            assert {v for o in outputs for v in o.weight_versions} == {version}
            assert_versions_tell_the_weights(REQUESTS, outputs, networks)
        assert engine.pool is not None and not engine.pool.evictions


@pytest.mark.parametrize("name", KINDS)
def test_trainer_and_server_agree_after_every_update(
    name: str, demo: Path, programs: TrainServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With the trainer over two tensor-parallel ranks; evaluations and two updates of each rollout
    come with it."""
    kind = KINDS[name]
    with contextlib.ExitStack() as stack:
        if name == "dense":
            found = request.getfixturevalue("dense")
        else:
            if kind.like is None:
                demo = request.getfixturevalue("expert_demo")
            found = stack.enter_context(served(kind, demo, tmp_path))
        line = command_line(
            found.demo, found.servers.flags_without_router, tmp_path / "out", "--lora-rank", str(RANK), "--lora-sync", "adapter",
            "--lora-target-modules", *kind.flags.split(), "--check-weight-update-equal", "--tensor-model-parallel-size", "2", "--sequence-parallel",
            "--max-train-rollout-diff", str(kind.largest), *(["--bf16"] if kind.dtype == "bfloat16" else []),
        )  # fmt: skip
        programs.train(line, tmp_path / "run", ranks=2, timeout_s=400).ok()
    rollouts = rows(tmp_path / "out")
    assert [row["rollout/weight_version_min"] for row in rollouts] == [1, 2, 3]
    for row in rollouts:
        print(name, row["rollout/train_rollout_log_prob_diff_max"])
        assert row["rollout/failed_frac"] == 0 and row["engine/evictions"] == 0
        assert row["rollout/train_rollout_log_prob_diff_max"] < kind.largest
        assert row["rollout/train_rollout_log_prob_diff_mean"] < kind.mean
        assert row["engine/weight_check_log_prob_diff"] < kind.mean
    assert rollouts[0]["train/grad_norm"] > 0  # so that the second adapter is another
