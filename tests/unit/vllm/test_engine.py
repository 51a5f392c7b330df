"""vLLM servers as a rollout engine, against servers that answer as vLLM does and fail on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_like.engines.base import GenerateOutput, SamplingParams
from slime_like.engines.local.engine import LocalEngine
from slime_like.engines.served import ServedEngine
from slime_like.engines.vllm.factory import VllmProgram
from slime_like.errors import RunError
from slime_like.servers.launches import Slot
from slime_like.servers.server_pool import HealthSettings, ServerPool
from slime_like.vllm.api import VllmApi
from slime_like.vllm.launch import EXTENSION_FOLDER
from slime_like.vllm.server_check import Needs, check_server
from tests.fake_sglang import (
    REQUESTS,
    SAMPLING,
    Answer,
    Fault,
    changed,
    death,
    death_in_the_middle,
    make_served_model,
    status,
    text,
    weights_of,
)
from tests.fake_vllm import GENERATE, FakeVllm, of_method, vllm_engine_of, vllm_servers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_served_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def one(model: str) -> Iterator[tuple[FakeVllm, ServedEngine]]:
    with vllm_servers(model, 1) as (server,), vllm_engine_of(model, [server]) as engine:
        yield server, engine


def grown(model: str) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor * 1.1) for name, tensor in weights_of(model))


def sampled(weights: Iterator[tuple[str, torch.Tensor]], model: str) -> list[GenerateOutput]:
    engine = LocalEngine(model, None)
    engine.update_weights(weights, 1)
    return engine.generate(REQUESTS, SAMPLING)


def assert_right(
    outputs: list[GenerateOutput], right: list[GenerateOutput], version: int = 1
) -> None:
    for output, expected in zip(outputs, right, strict=True):
        assert (output.sample_id, output.tokens, output.finish_reason) == (
            expected.sample_id, expected.tokens, expected.finish_reason,
        ), output.failure  # fmt: skip
        assert set(output.weight_versions) == {version}
        assert output.log_probs == pytest.approx(expected.log_probs, abs=1e-5)


@pytest.mark.parametrize("transport", ["broadcast", "disk", "tensor", "delta"])
def test_two_servers_sample_as_the_local_engine_after_each_update(
    model: str, transport: str
) -> None:
    delta: Any = {} if transport == "delta" else None
    kind = "disk" if transport == "delta" else transport
    with (
        vllm_servers(model, 2) as servers,
        vllm_engine_of(model, servers, transport=kind, buffer_bytes=4096, delta=delta) as engine,
    ):
        assert_right(engine.generate(REQUESTS, SAMPLING), sampled(weights_of(model), model))
        assert all(server.count(GENERATE) for server in servers)
        engine.update_weights(grown(model), 2)
        assert_right(engine.generate(REQUESTS, SAMPLING), sampled(grown(model), model), version=2)
        for server in servers:
            assert not server.paused and server.version == "2"
            assert server.forgotten == 2, "what was computed with other weights is forgotten"


def test_the_words_of_a_request(one: tuple[FakeVllm, ServedEngine]) -> None:
    server, engine = one
    sampling = SamplingParams(0.5, max_new_tokens=4, stop=("ab",), stop_token_ids=(9,))
    engine.generate(REQUESTS[:1], sampling)
    body = server.seen[-1][1]
    assert body["token_ids"] == [3, 5, 7]
    words = body["sampling_params"]
    assert words["max_tokens"] == 4 and words["logprobs"] == 0 and words["seed"] == 100
    assert words["stop"] == ["ab"] and words["include_stop_str_in_output"] is True
    assert words["stop_token_ids"] == [9] and words["temperature"] == 0.5


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (SamplingParams(report_sampling_mask=True), "sampling masks are not asked for"),
        (SamplingParams(report_routed_experts=True), "the network has no experts"),
    ],
)
def test_what_is_not_asked_for(
    one: tuple[FakeVllm, ServedEngine], sampling: SamplingParams, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        one[1].generate(REQUESTS[:1], sampling)


PASSING: dict[str, tuple[Fault, str]] = {
    "status 500": (status(500), "status_500"),
    "death in the middle of the body": (death_in_the_middle, "connection_lost"),
    "an error inside": (changed(lambda a: a["choices"][0].update(finish_reason="error")), "refused_500"),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSING)
def test_a_passing_fault_costs_time_only(
    one: tuple[FakeVllm, ServedEngine], model: str, name: str
) -> None:
    server, engine = one
    fault, counted = PASSING[name]
    engine.take_metrics()
    server.faults = [fault]
    assert_right(engine.generate(REQUESTS, SAMPLING), sampled(weights_of(model), model))
    metrics = engine.take_metrics()
    assert metrics[f"engine/{counted}"] == metrics["engine/retries"] == 1


def choice(change: Callable[[Any], object]) -> Fault:
    return changed(lambda answer: change(answer["choices"][0]) and None)


def entries(change: Callable[[list[Any]], list[Any]]) -> Fault:
    def alter(answer: Answer) -> None:
        log_probs = answer["choices"][0]["logprobs"]
        log_probs["content"] = change(log_probs["content"])

    return changed(alter)


WRONG: dict[str, tuple[Fault, str]] = {
    "html": (text("<html>502 Bad Gateway</html>"), "invalid JSON"),
    "no choices": (changed(lambda a: a.update(choices=[])), "choices"),
    "two choices": (changed(lambda a: a.update(choices=a["choices"] * 2)), "choices"),
    "fewer log-probs": (entries(lambda p: p[:-1]), "7 log-probs for 8 tokens"),
    "no log-probs": (choice(lambda c: c.update(logprobs=None)), "0 log-probs for 8 tokens"),
    "a log-prob of nothing": (entries(lambda p: [{**p[0], "logprob": None}, *p[1:]]), "is None"),
    "of another token": (entries(lambda p: [{**p[0], "token_id": p[0]["token_id"] + 1}, *p[1:]]), "and the token there is"),
    "too many tokens": (choice(lambda c: c.update(token_ids=[9] * 9)), "expected 1 to 8"),
    "no tokens": (choice(lambda c: c.update(token_ids=[])), "0 tokens"),
    "a token of another vocabulary": (choice(lambda c: c.update(token_ids=[64] * 8)), "not a token id from 0 to 63"),
    "no versions": (choice(lambda c: c.update(weight_versions=None)), "no weight versions"),
    "the version of another run": (choice(lambda c: c.update(weight_versions=[{"version": "default", "start": 0, "end": 8}])), "was never sent"),
    "versions with a hole": (choice(lambda c: c.update(weight_versions=[{"version": "1", "start": 1, "end": 8}])), "weight versions of tokens 1 to 8 after 0"),
    "an answer to another request": (changed(lambda a: a.update(request_id="generate-tokens-9")), "the response is to request"),
    "another prompt": (changed(lambda a: a.update(usage={"prompt_tokens": 4})), "the server read 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_a_rejected_sample(model: str, name: str) -> None:
    fault, words = WRONG[name]
    with vllm_servers(model, 1) as (server,), vllm_engine_of(model, [server]) as engine:
        server.faults = [fault]
        (output,) = engine.generate(REQUESTS[:1], SAMPLING)
        assert (output.tokens, output.finish_reason) == ((), "abort")
        assert output.failure is not None and words in output.failure
        assert engine.take_metrics()["engine/rejected"] == 1


@pytest.mark.parametrize(("transport", "method"), [("tensor", "load_bytes"), ("broadcast", "receive"), ("disk", "load_folder"), ("tensor", "end")])  # fmt: skip
def test_a_server_that_dies_in_an_update_is_left_out(
    model: str, transport: str, method: str
) -> None:
    """The others have the weights, at the second attempt where the first took them all down."""
    with (
        vllm_servers(model, 2) as servers,
        vllm_engine_of(model, servers, transport=transport) as engine,
    ):
        servers[0].dies_at = method
        engine.update_weights(grown(model), 2)
        if engine.weight_version != 2:
            engine.update_weights(grown(model), 2)
        assert engine.weight_version == 2
        asked = servers[0].count(GENERATE)
        assert_right(engine.generate(REQUESTS, SAMPLING), sampled(grown(model), model), version=2)
        assert servers[0].count(GENERATE) == asked
        assert engine.take_metrics()["engine/evictions"] >= 1


def test_a_server_that_dies_over_a_request_is_replaced_by_the_other(model: str) -> None:
    with vllm_servers(model, 2) as servers, vllm_engine_of(model, servers) as engine:
        servers[0].faults = [death]
        assert_right(engine.generate(REQUESTS, SAMPLING), sampled(weights_of(model), model))


def test_the_last_server_that_fails_ends_the_run(model: str) -> None:
    with (
        vllm_servers(model, 1) as (server,),
        vllm_engine_of(model, [server], transport="tensor") as engine,
    ):
        server.refused[of_method("begin")] = (500, "no")
        with pytest.raises(RunError, match="beginning a weight update failed on every engine"):
            engine.update_weights(grown(model), 2)


def test_an_abort_returns_what_there_is(model: str) -> None:
    async def abort(server: FakeVllm, engine: ServedEngine) -> tuple[GenerateOutput, float]:
        task = asyncio.ensure_future(engine.generate_one(REQUESTS[0], SAMPLING))
        while not server.count(GENERATE):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        start = time.monotonic()
        await engine.abort([REQUESTS[0].sample_id])
        output = await task
        await engine.leave_loop()
        return output, time.monotonic() - start

    with vllm_servers(model, 1) as (server,), vllm_engine_of(model, [server]) as engine:
        server.pace_s = lambda body: 1.0
        output, seconds = asyncio.run(abort(server, engine))
        assert output.finish_reason == "abort" and output.failure is None and output.tokens
        assert len(output.tokens) < 8 and seconds < 4


def test_a_paused_engine_leaves_its_servers_paused_after_an_update(model: str) -> None:
    with vllm_servers(model, 1) as (server,), vllm_engine_of(model, [server]) as engine:
        engine.pause()
        assert server.paused and server.seen[-1][0] == "/pause?mode=keep"
        engine.update_weights(grown(model), 2)
        assert server.paused
        order = [path.partition("?")[0] for path, _ in server.seen if not path.startswith("/coll")]
        assert order[-2:] == ["/reset_prefix_cache", "/update_weight_version"]
        engine.resume()
        assert not server.paused


SETTINGS: dict[str, tuple[Callable[[FakeVllm], object], str]] = {
    "log-probs": (lambda s: s.settings["model_config"].update(logprobs_mode="raw_logprobs"), "--logprobs-mode is raw_logprobs, must be processed_logprobs"),
    "dtype": (lambda s: s.settings["model_config"].update(dtype="torch.bfloat16"), "--dtype is bfloat16, must be float32"),
    "length": (lambda s: s.settings["model_config"].update(max_model_len=40), "--max-model-len is 40, must be at least 48"),
    "extension": (lambda s: s.settings["parallel_config"].update(worker_extension_cls=""), "--worker-extension-cls must be slime_like_vllm.WeightUpdates"),
    "no /inference/v1/generate": (lambda s: s.refused.update({GENERATE: (404, "no")}), "--enable-scale-out"),
    "no development mode": (lambda s: s.refused.update({"/server_info?config_format=json": (404, "no")}), "VLLM_SERVER_DEV_MODE=1"),
}  # fmt: skip


@contextlib.contextmanager
def pool_of(server: FakeVllm) -> Iterator[ServerPool]:
    pool = ServerPool([server.url], [], None, HealthSettings(), 1.0, api=VllmApi())
    try:
        pool.start()
        yield pool
    finally:
        pool.close()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_server_that_was_started_otherwise_is_refused(model: str, name: str) -> None:
    change, words = SETTINGS[name]
    needs = Needs("float32", 48)
    with FakeVllm(model) as server, pool_of(server) as pool:
        (worker,) = pool.alive()
        check_server(pool, worker, needs)
        change(server)
        with pytest.raises(RunError) as refused:
            check_server(pool, worker, needs)
    message = str(refused.value)
    assert words in message and server.url in message
    assert "vllm serve FOLDER --dtype float32 --logprobs-mode processed_logprobs" in message


def test_the_command_line_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = Slot("127.0.0.1", 4000, gpus=2, first_gpu=2)
    overrides = {"max_num_seqs": 8, "logprobs_mode": "raw_logprobs"}
    program = VllmProgram("python", "folder", "bfloat16", cuda=True, overrides=overrides)
    command = " ".join(program.command(slot))
    assert "--tensor-parallel-size 2" in command and "--max-num-seqs 8" in command
    assert "--logprobs-mode processed_logprobs" in command
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    variables = program.environment(slot)
    assert variables["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert variables["PYTHONPATH"] == str(EXTENSION_FOLDER)
    assert (EXTENSION_FOLDER / "slime_like_vllm.py").is_file()
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    on_cpu = VllmProgram("python", "folder", "float32", cuda=False)
    assert "VLLM_CPU_KVCACHE_SPACE" not in on_cpu.environment(slot), "the user's own stays"
    assert "--enforce-eager" in on_cpu.command(slot)


def test_the_worker_extension_needs_nothing_of_ours() -> None:
    """vLLM imports it in its own environment."""
    source = Path(EXTENSION_FOLDER / "slime_like_vllm.py").read_text(encoding="utf-8")
    assert "from slime_like" not in source and "import slime_like" not in source
    assert json.dumps({"method": "slime_like_begin"}) == json.dumps(dict(VllmApi.begin.body))
