"""Models of the server that wait in host memory: they hold nothing on the device, and continue bit by
bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_patches
from slime_like.tinker.factory import make_model_host

megatron_patches.apply()

from arguments.parse import SERVER, parse_args  # noqa: E402
from benchmarks.bench_server import ADAM, command_of, message_of  # noqa: E402
from slime_like.cli.tiny_model import save_model  # noqa: E402
from slime_like.megatron.checkpoint import save  # noqa: E402
from slime_like.megatron.init import process_groups  # noqa: E402
from slime_like.megatron.offload import storages_of  # noqa: E402
from slime_like.tinker.worker import ModelWorker  # noqa: E402
from slime_like.tinker.worker_backend import ModelHost  # noqa: E402
from tests.dist.lora_critic_worker import critic_command  # noqa: E402

pytestmark = pytest.mark.extended

ADAPTER = {"rank": 4, "train_attn": True, "train_mlp": True, "train_unembed": False}
MODELS = {
    "first": ADAPTER,
    "second": {**ADAPTER, "rank": 2},
    "critic": {**ADAPTER, "rank": 3},
    "whole": None,
    "other": None,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, hidden_size=32, num_layers=2)
    return folder


ADAPTERS = [name for name, lora in MODELS.items() if lora is not None]


def held(host: ModelHost, name: str) -> int:
    """Bytes that an adapter has on the device."""
    adapter = host.models[name].adapter
    assert adapter is not None
    return sum(storage.nbytes() for storage in storages_of(adapter))


def trained(model: Path, *flags: str) -> dict[str, Any]:
    """Five models in turns, one of them a critic: a pass of each, a second pass of each, a step of
    each, twice; then their weights and moments, and what the adapters held in between."""
    config = parse_args(["--hf-checkpoint", str(model), *flags], 1, SERVER)
    seen: dict[str, Any] = {"norms": [], "held": []}
    with process_groups(config.parallel, virtual_stages=None, seed=config.model.seed) as layout:
        host = make_model_host(config, layout)
        for number, (name, lora) in enumerate(MODELS.items()):
            wanted = None if lora is None else {**lora, "seed": number}
            role = "critic" if name == "critic" else "policy"
            host.execute(
                {"op": "create", "model": name, "role": role, "policy": None, "lora": wanted}
            )
        for step in range(2):
            for part in range(2):
                for name in MODELS:
                    seed = 2 * step + part
                    command = (
                        critic_command(seed)
                        if name == "critic"
                        else command_of(message_of(3, 9, seed=seed))
                    )
                    host.execute({"op": "forward_backward", "model": name, **command})
                    seen["held"].append(tuple(held(host, adapter) for adapter in ADAPTERS))
            for name in MODELS:
                seen["norms"].append(
                    host.execute(
                        {"op": "optim_step", "model": name, "adam": {**ADAM, "learning_rate": 1e-2}}
                    )["grad_norm"]
                )
        seen["tensors"] = [t.clone() for name in MODELS for t in host.pool.network(name).tensors()]
    return seen


@pytest.mark.parametrize(
    "precision", [(), ("--bf16", "--use-distributed-optimizer")], ids=["fp32", "bf16-distributed"]
)
def test_models_that_wait_hold_nothing_and_continue_bit_by_bit(
    model: Path, precision: tuple[str, ...]
) -> None:
    """Gradients that wait for a step, moments and weights go to host memory and come back; an
    adapter that waits has no storage left."""
    all_inside = trained(model, *precision)
    in_turns = trained(
        model, *precision, "--max-resident-adapters", "1", "--max-resident-models", "1"
    )
    assert in_turns["norms"] == all_inside["norms"] and all(norm > 0 for norm in in_turns["norms"])
    assert len(in_turns["tensors"]) == len(all_inside["tensors"])
    assert all(
        torch.equal(a, b) for a, b in zip(in_turns["tensors"], all_inside["tensors"], strict=True)
    )
    full = all_inside["held"][0]
    assert min(full) > 10_000 and set(all_inside["held"]) == {full}, (
        "bytes of adapters with gradients and moments"
    )
    last_used = {
        tuple(size if i == used else 0 for i, size in enumerate(full)) for used in range(len(full))
    }
    assert set(in_turns["held"]) == last_used, (
        "the one that was used last, and nothing of the others"
    )


@pytest.mark.parametrize("lora", [ADAPTER, None], ids=["adapters", "all weights"])
def test_models_that_were_saved_and_loaded_wait_too(
    model: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    """One is saved, a second one is loaded from that, a third one takes the place of the first,
    which takes that of the second: an optimizer that was loaded does not hold its tensors in the
    order of a new one."""
    config = parse_args(
        [
            "--hf-checkpoint",
            str(model),
            "--max-resident-adapters",
            "1",
            "--max-resident-models",
            "2",
        ],
        1,
        SERVER,
    )
    with process_groups(config.parallel, virtual_stages=None, seed=config.model.seed) as layout:
        host = make_model_host(config, layout)

        def step(name: str, seed: int) -> float:
            host.execute(
                {"op": "forward_backward", "model": name, **command_of(message_of(3, 9, seed=seed))}
            )
            return float(
                host.execute(
                    {"op": "optim_step", "model": name, "adam": {**ADAM, "learning_rate": 1e-2}}
                )["grad_norm"]
            )

        for number, name in enumerate(("saved", "loaded", "third")):
            wanted = None if lora is None else {**lora, "seed": number}
            host.execute(
                {"op": "create", "model": name, "role": "policy", "policy": None, "lora": wanted}
            )
            if name == "saved":
                step(name, 0)
                host.execute({"op": "save", "model": name, "folder": str(tmp_path / "state")})
            if name == "loaded":
                host.execute(
                    {
                        "op": "load",
                        "model": name,
                        "folder": str(tmp_path / "state"),
                        "optimizer": True,
                    }
                )
        norms = [[step(name, seed) for seed in (1, 2)] for name in ("saved", "loaded")]
        ends = [
            [t.clone() for t in host.pool.network(name).tensors()] for name in ("saved", "loaded")
        ]
    assert norms[0] == norms[1] and norms[0][1] > 0
    assert [i for i, (a, b) in enumerate(zip(*ends, strict=True)) if not torch.equal(a, b)] == []


def damage(folder: Path) -> None:
    """The last bytes of the largest file: its size is right, and what is read first too."""
    file = max(folder.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    file.write_bytes(content)


@pytest.mark.parametrize("flags", [(), ("--no-verify-checkpoint",)], ids=["verified", "unverified"])
def test_a_model_is_lost_by_a_load_only_if_something_was_read_into_it(
    model: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """A damaged checkpoint that is found out before is refused, and the model trains on."""
    config = parse_args(["--hf-checkpoint", str(model), *flags], 1, SERVER)
    with process_groups(config.parallel, virtual_stages=None, seed=config.model.seed) as layout:
        host = make_model_host(config, layout)
        loop = ModelWorker(host, layout)
        made = {"model": "m", "role": "policy", "policy": None, "lora": None}
        assert loop.execute({"op": "create", **made})["ok"]
        assert loop.execute({"op": "save", "model": "m", "folder": str(tmp_path)})["ok"]
        damage(tmp_path)
        before = [t.clone() for t in host.pool.network("m").tensors()]
        load = {"op": "load", "model": "m", "folder": str(tmp_path), "optimizer": True}
        answer = loop.execute(load)
        assert not answer["ok"] and "is damaged" in answer["error"], answer
        lost = bool(flags)
        assert (answer["broken"], answer["category"]) == (lost, "server" if lost else "user")
        assert ("m" not in host.models) == lost
        if not lost:
            after = host.pool.network("m").tensors()
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            assert loop.execute(
                {"op": "forward_backward", "model": "m", **command_of(message_of(3, 9))}
            )["ok"]


def test_a_full_disk_is_reported_in_the_words_of_the_server(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has no --save; the model stays."""
    monkeypatch.setattr(save, "TRAINER_BYTES", 2**62)  # more than any disk has
    config = parse_args(["--hf-checkpoint", str(model)], 1, SERVER)
    with process_groups(config.parallel, virtual_stages=None, seed=config.model.seed) as layout:
        host = make_model_host(config, layout)
        loop = ModelWorker(host, layout)
        made = {"model": "m", "role": "policy", "policy": None, "lora": None}
        assert loop.execute({"op": "create", **made})["ok"]
        answer = loop.execute({"op": "save", "model": "m", "folder": str(tmp_path)})
        assert "m" in host.models
    assert "--server-dir on a larger disk" in answer["error"] and "--save" not in answer["error"]
    assert not answer["broken"]
