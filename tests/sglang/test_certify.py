"""Certificates of real servers: a layer of a server that dumps its tensors is named, and of one
that does not, the setting of the whole model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_like.certify.certificate import verify
from slime_like.servers.processes import ServerProcess, free_ports
from tests.e2e.programs import TrainServer
from tests.sglang.conftest import server_launch, wait_for
from tests.sglang.test_real_servers import command_line


def changed_model(model: Path, folder: Path, **changes: Any) -> Path:
    """The same weights with other keys in config.json."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    if "rope_theta" in changes:
        config["rope_parameters"]["rope_theta"] = changes["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def certified(
    demo: Path,
    models: Sequence[tuple[Path, Mapping[str, Any]]],
    programs: TrainServer,
    folder: Path,
) -> tuple[list[str], dict[str, Any]]:
    """Addresses of servers of these models, with these settings, and the certificate, which finds
    that some differ."""
    ports = free_ports(len(models))
    two_ranks = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    processes = [
        ServerProcess(
            server_launch(
                model, port, folder / f"{port}.log", two_ranks if "tp_size" in more else {}, **more
            )
        )
        for port, (model, more) in zip(ports, models, strict=True)
    ]
    try:
        for port, process in zip(ports, processes, strict=True):
            wait_for(f"http://127.0.0.1:{port}/health", process)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        flags = ["--rollout-external-engine-addrs", *addresses, "--no-sglang-router"]
        out = folder / "out"
        line = command_line(demo, flags, out, "--certify")
        done = programs.train(line, folder / "run", ranks=1, timeout_s=300)
    finally:
        for process in processes:
            process.end()
    assert done.status == 1 and (out / "certificates").exists(), done.out + done.err
    certificate = verify(out / "certificates/rollout_0.json")
    return [f"http://{address}" for address in addresses], certificate


def test_a_layer_of_a_server_and_a_setting_of_another_are_named(
    demo: Path, programs: TrainServer, tmp_path: Path
) -> None:
    """Three servers: one right and one with another epsilon, which dump; one with another rope."""
    model = demo / "model"
    dumps = tmp_path / "dumps"  # one folder for both
    dumping = {"debug_tensor_dump_output_folder": str(dumps)}
    models = (
        (model, dumping),
        (changed_model(model, tmp_path / "epsilon", rms_norm_eps=1e-2), dumping),
        (changed_model(model, tmp_path / "rope", rope_theta=123.0), {}),
    )
    (right, epsilon, rope), certificate = certified(demo, models, programs, tmp_path)
    sites = certificate["sites"]
    for url in (right, epsilon):
        assert {site for site in sites if url in sites[site]} >= {
            *("embedding", "layers.0.norm", "layers.0.attention", "layers.0.mlp_norm"),
            *("layers.0.mlp", "layers.0", "norm"),
        }
    assert max(row[right][0] / row[right][1] for row in sites.values() if right in row) < 0.5
    found = certificate["findings"]
    assert {f["subject"] for f in found} == {epsilon, rope}, [f["text"] for f in found]
    first = next(f for f in found if f["subject"] == epsilon)
    assert (first["site"], first["cause"]) == ("layers.0.norm", "norm epsilon"), first
    assert "0.01" in first["evidence"]
    (last,) = (f for f in found if f["subject"] == rope)
    assert (last["site"], last["cause"]) == ("log-probs", "rope base"), last
    assert "the rope base is 123, in all layers" in last["evidence"]


def test_a_router_and_a_tensor_parallel_server(
    expert_demo: Path, programs: TrainServer, tmp_path: Path
) -> None:
    """Two servers with experts: the ranks of one have shares of attention, the other does not
    normalise the weights of experts as the model's config says."""
    model = expert_demo / "model"
    normalises = json.loads((model / "config.json").read_text())["norm_topk_prob"]
    other = changed_model(model, tmp_path / "router", norm_topk_prob=not normalises)
    dumping = {"debug_tensor_dump_output_folder": str(tmp_path / "dumps")}
    models = ((model, dumping | {"tp_size": 2}), (other, dumping))
    (right, wrong), certificate = certified(expert_demo, models, programs, tmp_path)
    sites = certificate["sites"]
    for url in (right, wrong):
        assert {site for site in sites if url in sites[site]} >= {
            *("embedding", "layers.0.norm", "layers.0.attention", "layers.0.mlp_norm"),
            *("layers.0.router", "layers.0", "norm"),
        }
    assert max(row[right][0] / row[right][1] for row in sites.values() if right in row) < 0.5
    (found,) = certificate["findings"]
    assert (found["subject"], found["site"]) == (wrong, "layers.0.router"), found
    assert found["cause"] == "router normalisation", found
