"""SGLang servers as the server's sampler: which snapshot answers, what is exchanged when, and what
goes wrong."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from arguments.hf.peft_adapter import adapter_config
from arguments.parse import SERVER, parse_args
from scripts.make_tiny_model import make_tiny_model
from slime_like.engines.base import GenerateRequest, SamplingParams
from slime_like.engines.local.engine import LocalEngine
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.errors import RunError
from slime_like.images.encoded import EncodedImage
from slime_like.megatron.lora.peft import BASE_DIGEST
from slime_like.servers.http import Deadlines, Retries
from slime_like.servers.requests import RequestSettings
from slime_like.servers.server_pool import HealthSettings, ServerPool
from slime_like.sglang.api import SglangApi
from slime_like.tinker.errors import Refused
from slime_like.tinker.factory import make_model_host
from slime_like.tinker.sampler import SampleCommand, seed_of
from slime_like.tinker.sglang_adapters import KeptBaseTransport, ServedAdapters
from slime_like.tinker.sglang_sampler import SglangSampler
from slime_like.tinker.sglang_snapshots import (
    SnapshotTransport,
    snapshot_transport,
    snapshot_updater,
)
from slime_like.weights.safetensors_reader import weights_digest
from tests.fake_sglang import (
    FakeServer,
    changed,
    fake_servers,
    make_served_model,
    status,
    weights_of,
)
from tests.quantized_models import fp8_config, fp8_matrix, write_model
from tests.vision import picture

pytestmark = pytest.mark.extended

PROMPTS = [(7, 8, 9), (11, 5)]
SAMPLING: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 20,
    "max_new_tokens": 6,
    "stop": [],
    "stop_token_ids": [4],
    "ignore_end_tokens": False,
}


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a base model, and of two others of its shape."""
    root = tmp_path_factory.mktemp("snapshots")
    return [make_served_model(root / str(number), seed=number) for number in range(3)]


def sampler_of(
    base: str, servers: list[FakeServer], max_adapters: int | None = None
) -> SglangSampler:
    """max_adapters: servers keep the base model, and hold as many adapters; None: whole weights."""
    pool = ServerPool(
        [s.url for s in servers],
        [],
        None,
        HealthSettings(0.05, 5.0, 10.0, 2),
        1.0,
        api=SglangApi(),
    )
    pool.start()
    unmerged = max_adapters is not None
    transport = KeptBaseTransport if unmerged else SnapshotTransport
    updater = snapshot_updater(pool, base, Path(base), 5.0, transport)
    adapters = None
    if max_adapters is not None:
        adapters = ServedAdapters(pool, base, max_adapters=max_adapters, timeout_s=5.0)
    limits = Deadlines(5.0, 10.0, 10.0), Retries(2, 0.01, 0.02)
    settings = RequestSettings(*limits, 64, servers[0].images)
    return SglangSampler(
        SglangEngine(pool, updater, settings, base, check_updates=False, takes_adapter=unmerged),
        snapshot_transport(updater),
        settings,
        base,
        adapters,
    )


@pytest.fixture
def pair(snapshots: list[str], alone: Any) -> Iterator[SimpleNamespace]:
    """A sampler of one server."""
    with fake_servers(snapshots[0], 1) as (server,):
        sampler = sampler_of(snapshots[0], [server])
        yield SimpleNamespace(sampler=sampler, server=server)
        sampler.close()


def ask(sampler: SglangSampler, folder: str, **changes: Any) -> list[dict[str, Any]]:
    prompts = [np.array(prompt, dtype="<i4").tobytes() for prompt in PROMPTS]
    request = {
        "sampling": SAMPLING,
        "prompts": prompts,
        "counts": [2, 1],
        "seeds": [5, 6],
        "prompt_log_probs": True,
        "seeded": True,
    }
    return sampler.sample(folder, SampleCommand.from_plain(**{**request, **changes}))


def assert_of(answers: list[dict[str, Any]], folder: str, first: int = 0) -> None:
    """They are what the weights in the folder give: tokens, log-probs, ends, and log-probs of the
    prompts. first: the prompt of the first answer."""
    engine = LocalEngine(folder, None)
    engine.update_weights(iter(load_file(Path(folder) / "model.safetensors").items()), 1)
    params = SamplingParams(**{**SAMPLING, "stop": (), "stop_token_ids": (4,)})
    asked = list(zip(PROMPTS, (2, 1), (5, 6), strict=True))[first : first + len(answers)]
    for (prompt, count, seed), answer in zip(asked, answers, strict=True):
        outputs = engine.generate(
            [GenerateRequest(j, prompt, seed_of(seed, j)) for j in range(count)], params
        )
        for output, sequence in zip(outputs, answer["sequences"], strict=True):
            assert np.frombuffer(sequence["tokens"], "<i4").tolist() == list(output.tokens)
            assert np.frombuffer(sequence["log_probs"], "<f4") == pytest.approx(
                np.array(output.log_probs), abs=1e-5
            )
            assert sequence["stopped"] == (output.finish_reason == "stop")
        scores = np.frombuffer(answer["prompt_log_probs"], "<f4")
        assert np.isnan(scores[0]) and scores[1:] == pytest.approx(
            np.array(engine.prompt_log_probs([prompt])[0]), abs=1e-5
        )


def test_every_snapshot_answers_for_itself(pair: SimpleNamespace, snapshots: list[str]) -> None:
    """Samplers in turns: weights are exchanged when another snapshot is asked for, and only then."""
    for folder in (snapshots[0], snapshots[1], snapshots[1], snapshots[2], snapshots[1]):
        assert_of(ask(pair.sampler, folder), folder)
    loaded = [
        body["model_path"] for path, body in pair.server.seen if path == "/update_weights_from_disk"
    ]
    assert loaded == [snapshots[i] for i in (0, 1, 2, 1)]


def export(base: str, folder: Path, seed: int) -> str:
    """An adapter as a snapshot has it; its folder."""
    hidden, ffn = 32, 48
    generator = torch.Generator().manual_seed(seed)
    layer = "base_model.model.model.layers.0.mlp.down_proj"
    factors = {
        f"{layer}.lora_A.weight": torch.randn(2, ffn, generator=generator),
        f"{layer}.lora_B.weight": torch.randn(hidden, 2, generator=generator),
    }
    folder.mkdir()
    metadata = {"format": "pt", BASE_DIGEST: weights_digest(base)}
    save_file(factors, folder / "adapter_model.safetensors", metadata)
    config = adapter_config(rank=2, alpha=32.0, modules=["down_proj"], base_model=base)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def merged(base: str, adapter: str, folder: Path) -> str:
    """The whole model."""
    shutil.copytree(base, folder)
    factors = load_file(Path(adapter) / "adapter_model.safetensors")
    a, b = (
        factors[f"base_model.model.model.layers.0.mlp.down_proj.lora_{half}.weight"]
        for half in "AB"
    )
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] += 16 * b @ a
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.fixture
def unmerged(snapshots: list[str], alone: Any) -> Iterator[SimpleNamespace]:
    """A sampler of two servers that keep the base model and hold two adapters."""
    with fake_servers(snapshots[0], 2) as servers:
        for server in servers:  # as those that are started with the model
            server.engine.update_weights(weights_of(snapshots[0]), 1)
        sampler = sampler_of(snapshots[0], servers, max_adapters=2)
        yield SimpleNamespace(sampler=sampler, servers=servers, base=snapshots[0])
        sampler.close()


def calls(server: FakeServer, path: str) -> list[Any]:
    return [body for seen, body in server.seen if seen == path]


def test_adapters_of_several_sessions_in_one_command(
    unmerged: SimpleNamespace, tmp_path: Path
) -> None:
    """Each prompt has its own, or the base model; servers load each once, and keep their weights."""
    base = unmerged.base
    adapters = [export(base, tmp_path / name, seed) for seed, name in enumerate("abc")]
    whole = [base, *(merged(base, a, tmp_path / f"whole{i}") for i, a in enumerate(adapters))]
    for used in ([1, 2], [0, 1], [0, 0], [3, 0], [1, 3]):
        folders = [adapters[i - 1] if i else "" for i in used]
        answers = ask(unmerged.sampler, base, adapters=folders)
        for i, place in enumerate(used):
            assert_of([answers[i]], whole[place], first=i)
    for server in unmerged.servers:
        loaded = [Path(body["lora_path"]).name for body in calls(server, "/load_lora_adapter")]
        assert loaded == ["a", "b", "c"], "the second made room, the first was used meanwhile"
        assert len(calls(server, "/unload_lora_adapter")) == 1 and len(server.adapters) == 2
        assert calls(server, "/update_weights_from_disk") == []


def test_a_server_that_lost_its_adapters_gets_them_again(
    unmerged: SimpleNamespace, tmp_path: Path
) -> None:
    """Nobody noticed its restart; and a command whose adapter is gone is the client's error."""
    base = unmerged.base
    adapter = export(base, tmp_path / "a", 1)
    first = ask(unmerged.sampler, base, adapters=[adapter, ""])
    for server in unmerged.servers:
        server.adapters.clear()
    assert ask(unmerged.sampler, base, adapters=[adapter, ""]) == first
    with pytest.raises(ValueError, match=r"the snapshot .*none is gone"):
        ask(unmerged.sampler, base, adapters=[str(tmp_path / "none"), ""])
    assert ask(unmerged.sampler, base, adapters=[adapter, ""]) == first


def test_an_adapter_that_a_server_does_not_take(unmerged: SimpleNamespace, tmp_path: Path) -> None:
    """It is its client's error, and the servers go on."""
    base = unmerged.base
    good, bad = (export(base, tmp_path / name, seed) for seed, name in enumerate("ab"))
    first, second = unmerged.servers
    first.refused["/load_lora_adapter"] = (400, "its modules are not loaded")
    with pytest.raises(ValueError, match=r"does not take the adapter: .*its modules are not"):
        ask(unmerged.sampler, base, adapters=[bad, ""])
    first.refused.clear()
    answers = ask(unmerged.sampler, base, adapters=[good, ""])
    assert_of([answers[0]], merged(base, good, tmp_path / "whole"))
    assert calls(first, "/generate") and calls(second, "/generate")


NEEDED = {
    "enable_lora": True,
    "lora_strict_loading": True,
    "max_lora_rank": 32,
    "lora_target_modules": [
        "qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens",
    ],
}  # fmt: skip


def host_of(base: str, server: FakeServer, folder: Path, layout: Any) -> Any:
    words = f"--hf-checkpoint {base} --server-dir {folder} --rollout-engine sglang"
    words += f" --no-sglang-router --rollout-external-engine-addrs {server.address}"
    words += " --lora-sync adapter --max-adapter-rank 32 --max-sampler-adapters 2"
    return make_model_host(parse_args(words.split(), 1, SERVER), layout)


def test_adapters_on_servers_that_others_started(
    snapshots: list[str], alone: Any, tmp_path: Path
) -> None:
    """With the flags for it, and the base model; they are left as they were."""
    base = snapshots[0]
    with fake_servers(base, 1) as (server,):
        server.engine.update_weights(weights_of(base), 1)
        server.info |= {**NEEDED, "model_path": base}
        host = host_of(base, server, tmp_path / "server", alone)
        adapter = export(base, tmp_path / "a", 1)
        prompts = [np.array(prompt, dtype="<i4").tobytes() for prompt in PROMPTS]
        answers = host.do_sample(
            folder=base, prompts=prompts, adapters=[adapter, ""], counts=[2, 1], seeds=[5, 6],
            sampling=SAMPLING, prompt_log_probs=True,
        )  # fmt: skip
        assert_of([answers[0]], merged(base, adapter, tmp_path / "whole"))
        assert_of([answers[1]], base, first=1)
        assert len(server.adapters) == 1 and server.version != "default"
        host.close()
        assert server.adapters == {} and server.version == "default"
        host_of(base, server, tmp_path / "server", alone).close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_lora": False}, "rank 32; start it with --enable-lora --lora-strict-loading"),
        ({"lora_strict_loading": None}, "rank 32; start it with --enable-lora --lora-strict-loadi"),
        ({"max_lora_rank": 16}, "--max-lora-rank 32"),
        (
            {"lora_target_modules": ["qkv_proj", "o_proj"]},
            "on down_proj, gate_proj, lm_head, up_pr",
        ),
        ({"model_path": "/other"}, "has the model /other; start it with --model-path"),
        ({"dp_size": 2}, "data parallelism"),
        ({"version": "7"}, "version 7, as after an update; start it anew"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_servers_of_others_that_take_no_adapters(
    snapshots: list[str], alone: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    base = snapshots[0]
    with fake_servers(base, 1) as (server,):
        server.info |= {**NEEDED, "model_path": base, **changes}
        server.version = changes.get("version", "default")
        with pytest.raises(RunError, match=message):
            host_of(base, server, tmp_path / "server", alone)


def test_images_of_prompts(alone: Any, tmp_path: Path) -> None:
    """The server makes its own pixels of the files, and answers what the local engine does."""
    make_tiny_model("Qwen3-VL", tmp_path / "model", images=True)
    base = str(tmp_path / "model")
    files = [EncodedImage(picture(0, 16, 24)), EncodedImage(picture(1, 37, 50, "JPEG"))]
    with fake_servers(base, 1) as (server,):
        assert server.images is not None
        tokens = [
            server.images.expand(
                [7, server.images.rule.image_token, 9 + i], server.images.token_counts([file])
            )
            for i, file in enumerate(files)
        ]
        sampler = sampler_of(base, [server])
        command = SampleCommand.from_plain(
            {**SAMPLING, "top_p": 1.0, "top_k": -1, "temperature": 0.0},
            [np.array(prompt, "<i4").tobytes() for prompt in tokens],
            counts=[1, 1],
            seeds=[1, 2],
            images=[[file.data] for file in files],
        )
        answers = sampler.sample(base, command)
        sampler.close()
        engine = LocalEngine(base, None, images=server.images)
    engine.update_weights(iter(load_file(Path(base) / "model.safetensors").items()), 1)
    requests = [
        GenerateRequest(i, tuple(prompt), 0, (file,))
        for i, (prompt, file) in enumerate(zip(tokens, files, strict=True))
    ]
    for output, answer in zip(engine.generate(requests, command.params), answers, strict=True):
        (sequence,) = answer["sequences"]
        assert np.frombuffer(sequence["tokens"], "<i4").tolist() == list(output.tokens)
        assert np.frombuffer(sequence["log_probs"], "<f4") == pytest.approx(
            np.array(output.log_probs), abs=1e-5
        )
    bodies = calls(server, "/generate")
    assert len(bodies) == 2 and all(len(body["image_data"]) == 1 for body in bodies)


def test_seeds_that_would_not_count_are_refused(snapshots: list[str], alone: Any) -> None:
    with fake_servers(snapshots[0], 1) as (server,):
        server.info["enable_deterministic_inference"] = False
        sampler = sampler_of(snapshots[0], [server])
        with pytest.raises(Refused, match="sglang-enable-deterministic-inference"):
            ask(sampler, snapshots[1])
        assert len(ask(sampler, snapshots[1], seeded=False)[0]["sequences"]) == 2
        sampler.close()


@pytest.mark.parametrize("part", ["top_k_prompt", "top_k_sample"])
def test_top_k_log_probs_are_refused(
    pair: SimpleNamespace, snapshots: list[str], part: str
) -> None:
    """And the next request without them is served."""
    with pytest.raises(Refused, match="--rollout-engine local"):
        ask(pair.sampler, snapshots[0], **{part: 2})
    assert_of(ask(pair.sampler, snapshots[0]), snapshots[0])


def test_a_fault_is_an_error_and_the_next_request_is_served(
    pair: SimpleNamespace, snapshots: list[str]
) -> None:
    pair.server.faults = [status(500, "out of memory")] * 6
    with pytest.raises(RunError, match="out of memory"):
        ask(pair.sampler, snapshots[1])
    pair.server.faults = [
        changed(
            lambda answer: answer["meta_info"].update(
                weight_versions=[{"version": "7", "start": 0, "end": 6}]
            )
        )
    ]
    with pytest.raises(RunError, match="version"):
        ask(
            pair.sampler,
            snapshots[1],
            counts=[1, 0],
            sampling={**SAMPLING, "stop_token_ids": [], "ignore_end_tokens": True},
        )
    assert_of(ask(pair.sampler, snapshots[1]), snapshots[1])


def test_weights_that_cannot_be_loaded(
    pair: SimpleNamespace, snapshots: list[str], tmp_path: Path
) -> None:
    """A folder that is gone, one of another shape, a server that refuses: errors with words, and
    the snapshot before is not taken for it."""
    assert_of(ask(pair.sampler, snapshots[1]), snapshots[1])
    with pytest.raises(ValueError, match="is gone"):
        ask(pair.sampler, str(tmp_path / "none"))
    assert_of(ask(pair.sampler, snapshots[1]), snapshots[1])
    weights = load_file(Path(snapshots[1]) / "model.safetensors")
    (tmp_path / "other").mkdir()
    shutil.copy(Path(snapshots[1]) / "config.json", tmp_path / "other")
    save_file({**weights, "more": torch.zeros(3)}, tmp_path / "other" / "model.safetensors")
    with pytest.raises(RunError, match=r"more|every engine"):
        ask(pair.sampler, str(tmp_path / "other"))


def test_a_snapshot_that_is_untied_is_refused(
    pair: SimpleNamespace, snapshots: list[str], tmp_path: Path
) -> None:
    """The servers' output layer is the embedding: they would leave the snapshot's own one out."""
    folder = shutil.copytree(snapshots[1], tmp_path / "untied")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(Refused, match="untied output layer"):
        ask(pair.sampler, str(folder))
    assert_of(ask(pair.sampler, snapshots[1]), snapshots[1])


def test_a_server_that_dies_is_an_error_in_bounded_time(snapshots: list[str], alone: Any) -> None:
    """With another server left the samples come from there; with none the caller hears of it."""
    with fake_servers(snapshots[0], 2) as (first, second):
        sampler = sampler_of(snapshots[0], [first, second])
        assert_of(ask(sampler, snapshots[1]), snapshots[1])
        first.stop()
        assert_of(ask(sampler, snapshots[2]), snapshots[2])
        second.stop()
        started = time.monotonic()
        with pytest.raises(RunError, match=r"engine"):
            ask(sampler, snapshots[1])
        assert time.monotonic() - started < 30
        sampler.close()


def test_a_model_in_fp8_and_its_servers(tmp_path: Path, alone: Any) -> None:
    """A snapshot is written as the base model is stored, since the servers need it so, and sampled
    from."""
    plain = make_served_model(tmp_path / "source", seed=0)
    base, _ = write_model(plain, tmp_path, fp8_config((8, 8)), fp8_matrix, lambda n: "_proj" in n)
    with fake_servers(base, 1) as (server,):
        words = f"--hf-checkpoint {base} --server-dir {tmp_path / 'server'} --rollout-engine sglang --no-sglang-router "
        words += f"--rollout-external-engine-addrs {server.address}"
        host = make_model_host(parse_args(words.split(), 1, SERVER), alone)
        host.do_create(model="m", role="policy", policy=None, lora=None)
        host.do_export(model="m", folder=str(tmp_path / "snapshot"))
        written, source = (
            load_file(Path(folder) / "model.safetensors")
            for folder in (tmp_path / "snapshot", base)
        )
        tied = {"lm_head.weight"}
        assert written.keys() - tied == source.keys() - tied
        assert all(tensor.dtype == source[name].dtype for name, tensor in written.items())
        request = {
            "sampling": SAMPLING,
            "counts": [2, 1],
            "seeds": [5, 6],
            "prompt_log_probs": True,
        }
        prompts = [np.array(prompt, dtype="<i4").tobytes() for prompt in PROMPTS]
        answers = host.do_sample(folder=str(tmp_path / "snapshot"), prompts=prompts, **request)
        assert [len(answer["sequences"]) for answer in answers] == [2, 1]
        host.close()
