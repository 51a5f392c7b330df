"""What a certificate is made of: which implementations, and who waits for it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.parity.steps import parallel
from scripts.make_tiny_model import make_tiny_model
from slime_like.certify.compare import Reference
from slime_like.certify.run import Certifier, SettingSearch, file_model
from slime_like.engines.local.engine import LocalEngine
from slime_like.errors import RunError
from slime_like.megatron.lora.network import LoraNetwork
from tests.quantized_models import compressed_config, packed_weight, write_model
from tests.unit.certify.worlds import World, make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with parallel() as layout:
        folder = tmp_path_factory.mktemp("certify") / "model"
        yield make_world("Qwen3ForCausalLM", folder, "", layout=layout)
    dist.destroy_process_group()


def certifier(world: World, engine: Any) -> Certifier:
    return Certifier(world.backend, engine, world.certifier._settings)


@pytest.mark.parametrize("has_engine", [True, False])
def test_only_what_was_compared_agrees(
    has_engine: bool, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    made = certifier(world, world.engine if has_engine else None)
    with caplog.at_level(logging.INFO):
        assert made.run(0, 1, None).holds
    names = "trainer, transformers and engine" if has_engine else "trainer and transformers"
    assert caplog.messages[-1].endswith(f": {names} agree"), caplog.messages


def test_states_that_cannot_be_compared_do_not_agree(world: World) -> None:
    reference = world.reference
    wide = {site: torch.cat([each, each], dim=1) for site, each in reference.states.items()}
    examination = reference.examine("engine", wide, {})
    assert [finding.cause for finding in examination.findings] == ["not compared"]
    assert examination.skipped.keys() == wide.keys() and not examination.gaps
    one = {**reference.states, "layers.1": wide["layers.1"]}
    examination = reference.examine("engine", one, {})
    assert not examination.findings and list(examination.skipped) == ["layers.1"]


def test_what_overflows_differs(world: World) -> None:
    """Also from a reference that overflows in the dtype of the run, as float16 does."""
    folder = world.certifier._settings.folder
    rounded = file_model(folder, torch.float32, False)
    with torch.no_grad():
        rounded.layers[1].mlp.down_proj.weight[0] = torch.inf
    sequences = world.reference.sequences
    overflowing = Reference(
        file_model(folder, torch.float64, False), rounded, sequences, world.reference.inputs
    )
    states = dict(world.reference.states)
    states["layers.1.mlp"] = torch.full_like(states["layers.1.mlp"], torch.inf)
    found = overflowing.examine("trainer", states, {}).findings
    assert [finding.site for finding in found] == ["layers.1.mlp"]


def test_an_adapter_beside_the_weights_agrees_when_it_is_trained(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--lora-sync adapter: the engine's own weights stay the base model's."""
    folder = world.certifier._settings.folder
    flags = "--lora-rank 4 --lora-alpha 8"
    made = make_world("Qwen3ForCausalLM", Path(folder), flags, layout=world.backend.policy.layout)
    engine = LocalEngine(folder, None, lora_scale=2.0)
    own = Certifier(made.backend, engine, replace(made.certifier._settings, outputs=(tmp_path,)))
    made.backend.sync_weights(engine, 1)
    assert own.run(1, 1, None).holds  # lora_B is 0
    generator = torch.Generator().manual_seed(5)
    assert isinstance(made.backend.policy, LoraNetwork)
    for adapter in made.backend.policy.adapters:
        for factor in adapter.parameters():
            factor.data += 0.1 * torch.randn(factor.shape, generator=generator)
    made.backend.sync_weights(engine, 2)
    trained = own.run(2, 2, None)
    assert trained.holds, [finding.text for finding in trained.findings]
    engine._lora_scale = 1.0
    made.backend.sync_weights(engine, 3)
    searches: list[object] = []  # of a cause of the log-probs, which the layers' explain
    monkeypatch.setattr(SettingSearch, "find", lambda *args: searches.append(args))
    wrong = own.run(3, 3, None)
    assert {finding.subject for finding in wrong.findings} == {"engine"} and not searches


class NoServers(LocalEngine):
    """An engine whose servers are all gone."""

    is_remote = True

    def probe(self, requests: Any, sampling: Any) -> list[Any]:
        return []


def test_servers_that_are_gone_do_not_agree(world: World) -> None:
    folder = world.certifier._settings.folder
    with pytest.raises(RunError, match="certificate of local: no server answered"):
        certifier(world, NoServers(folder, None)).run(0, 1, None)


def test_the_other_ranks_are_told_that_rank_zero_is_at_work(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes longer than --distributed-timeout-minutes runs beside the main thread, in which
    the ranks tell each other that they are there."""
    threads = {}
    examine = Certifier._examine
    generate = LocalEngine.generate

    def seen(self: Certifier, *args: Any) -> Any:
        threads["examine"] = threading.current_thread()
        return examine(self, *args)

    def asked(self: LocalEngine, *args: Any) -> Any:
        threads["generate"] = threading.current_thread()
        return generate(self, *args)

    monkeypatch.setattr(Certifier, "_examine", seen)
    monkeypatch.setattr(LocalEngine, "generate", asked)
    assert certifier(world, world.engine).run(0, 1, None).holds
    assert threads.keys() == {"examine", "generate"}
    assert threading.main_thread() not in threads.values()


def test_a_quantised_folder_is_read_with_plain_weights(tmp_path: Path) -> None:
    made = tmp_path / "made"
    make_tiny_model("Qwen3ForCausalLM", made, seed=1, num_hidden_layers=2)
    quantized, plain = write_model(
        str(made),
        tmp_path / "both",
        compressed_config("pack-quantized", group_size=4),
        lambda shape, draw: packed_weight(shape, 4, 4, draw),
        lambda name: "_proj" in name,
    )
    assert "quantization_config" in json.loads(Path(quantized, "config.json").read_text())
    found = file_model(quantized, torch.float64, False)
    expected = file_model(plain, torch.float64, False)
    assert found.dtype == torch.float64
    assert found.weights().keys() == expected.weights().keys()
    for name, weight in expected.weights().items():
        torch.testing.assert_close(found.weights()[name], weight, rtol=1e-6, atol=0)
    tokens = [torch.arange(20)]
    torch.testing.assert_close(found.run(tokens)["logits"], expected.run(tokens)["logits"])
