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

from arguments.parse import SERVER, parse_args
from slime_like.engines.base import GenerateRequest, SamplingParams
from slime_like.engines.local.engine import LocalEngine
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.errors import RunError
from slime_like.servers.http import Deadlines, Retries
from slime_like.servers.requests import RequestSettings
from slime_like.servers.server_pool import HealthSettings, ServerPool
from slime_like.sglang.api import SglangApi
from slime_like.tinker.errors import Refused
from slime_like.tinker.factory import make_model_host
from slime_like.tinker.sampler import SampleCommand, seed_of
from slime_like.tinker.sglang_sampler import SglangSampler, snapshot_transport, snapshot_updater
from tests.fake_sglang import FakeServer, changed, fake_servers, make_served_model, status
from tests.quantized_models import fp8_config, fp8_matrix, write_model

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


def sampler_of(base: str, servers: list[FakeServer]) -> SglangSampler:
    pool = ServerPool(
        [s.url for s in servers],
        [],
        None,
        HealthSettings(0.05, 5.0, 10.0, 2),
        1.0,
        api=SglangApi(),
    )
    pool.start()
    updater = snapshot_updater(pool, base, Path(base), 5.0)
    settings = RequestSettings(Deadlines(5.0, 10.0, 10.0), Retries(2, 0.01, 0.02), 64)
    return SglangSampler(
        SglangEngine(pool, updater, settings, base, check_updates=False),
        snapshot_transport(updater),
        settings,
        base,
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


def assert_of(answers: list[dict[str, Any]], folder: str) -> None:
    """They are what the weights in the folder give: tokens, log-probs, ends, and log-probs of the
    prompts."""
    engine = LocalEngine(folder, None)
    engine.update_weights(iter(load_file(Path(folder) / "model.safetensors").items()), 1)
    params = SamplingParams(**{**SAMPLING, "stop": (), "stop_token_ids": (4,)})
    for prompt, count, seed, answer in zip(PROMPTS, (2, 1), (5, 6), answers, strict=True):
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
