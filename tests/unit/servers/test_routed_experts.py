"""The experts that servers report for every token: read as they are, and nothing that cannot be right
is passed on."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from arguments.parse import parse_args
from slime_like.checked_json import InvalidResponse
from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.engines.local.engine import LocalEngine
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.engines.sglang.factory import (
    SglangKind,
    require_deterministic,
    require_routed_experts,
)
from slime_like.errors import RunError
from slime_like.servers.launches import engine_launches
from slime_like.servers.nodes import find_nodes
from slime_like.servers.routed_experts import RoutesFormat, read_routed_experts
from slime_like.servers.router import Router
from tests.fake_sglang import FakeServer, changed, engine_of, fake_servers, weights_of
from tests.unit.command_lines import complete

SAMPLING = SamplingParams(max_new_tokens=6, report_routed_experts=True)
REQUESTS = [GenerateRequest(10 + i, tuple(range(3, 6 + i)), seed=100 + i) for i in range(3)]
FORMAT = RoutesFormat((True, True), topk=2, experts=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, max_position_embeddings=64, initializer_range=0.3, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def one(model: str) -> Iterator[tuple[FakeServer, SglangEngine]]:
    with (
        fake_servers(model, 1) as (server,),
        engine_of(model, [server], routed_experts=FORMAT) as engine,
    ):
        yield server, engine


def test_routes_of_servers_are_those_of_the_local_engine(
    one: tuple[FakeServer, SglangEngine], model: str
) -> None:
    server, engine = one
    local = LocalEngine(model, None)
    local.update_weights(weights_of(model), 1)
    for output, right in zip(
        engine.generate(REQUESTS, SAMPLING), local.generate(REQUESTS, SAMPLING), strict=True
    ):
        assert output.tokens == right.tokens and output.failure is None
        assert output.routed_experts is not None and right.routed_experts is not None
        assert output.routed_experts.dtype == right.routed_experts.dtype and torch.equal(
            output.routed_experts, right.routed_experts
        )
        assert output.routed_experts.unique().tolist() == [-1, 0, 1, 2, 3]
    assert server.seen[-1][1]["return_routed_experts"] is True


def test_they_are_asked_for_where_they_are_wanted(
    one: tuple[FakeServer, SglangEngine], model: str
) -> None:
    server, engine = one
    (output,) = engine.generate(REQUESTS[:1], SamplingParams(max_new_tokens=2))
    assert output.routed_experts is None and "return_routed_experts" not in server.seen[-1][1]
    with (
        engine_of(model, [server]) as dense,
        pytest.raises(ValueError, match="the network has no experts"),
    ):
        dense.generate(REQUESTS[:1], SAMPLING)


def test_a_router_is_passed_by(
    one: tuple[FakeServer, SglangEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang_router would leave out of a request that it asks for routed_experts."""
    server, engine = one
    assert engine.pool is not None
    with FakeServer(server.model) as router:  # of a version that was never given weights
        monkeypatch.setattr(engine.pool, "router", Router(router.url, None, 1.0))
        (output,) = engine.generate(REQUESTS[:1], SAMPLING)
        assert output.routed_experts is not None and router.count("/generate") == 0
        engine.generate(REQUESTS[:1], SamplingParams(max_new_tokens=2))
        assert router.count("/generate") > 0


def test_servers_that_are_started_report_routes(tmp_path: Path) -> None:
    config = parse_args(complete(tmp_path), 1)
    config = replace(
        config, sglang=replace(config.sglang, rollout_num_gpus=2, sglang_python="python")
    )
    cpu = torch.device("cpu")
    for wanted in (False, True):
        asked = replace(config, rollout=replace(config.rollout, use_rollout_routing_replay=wanted))
        program = SglangKind().program(asked, cpu)
        servers = engine_launches(asked.sglang, program, find_nodes(2, cpu), logs=tmp_path)
        tells = ["--enable-return-routed-experts" in part.launch.command for (part,) in servers]
        assert tells == [wanted] * 2


def altered(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict], None]:
    """Of the numbers [tokens - 1, 2, 2] int32."""

    def alter(answer: dict) -> None:
        meta = answer["meta_info"]
        numbers = (
            np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
            .reshape(-1, 2, 2)
            .copy()
        )
        meta["routed_experts"] = base64.b64encode(change(numbers).tobytes()).decode()

    return alter


def put(value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(numbers: np.ndarray) -> np.ndarray:
        numbers[3, 1, 0] = value
        return numbers

    return change


# What comes back in place of right routed experts -> words of the rejection.
WRONG: dict[str, tuple[Callable[[dict], object], str]] = {
    "none": (
        lambda a: a["meta_info"].pop("routed_experts"),
        "start it with --enable-return-routed-experts",
    ),
    "null": (
        lambda a: a["meta_info"].update(routed_experts=None),
        "the server reports no routed experts",
    ),
    "a list": (
        lambda a: a["meta_info"].update(routed_experts=[1, 2]),
        "meta_info.routed_experts is [1, 2]",
    ),
    "no base64": (lambda a: a["meta_info"].update(routed_experts="%%%"), "is not base64"),
    "half a number": (
        lambda a: a["meta_info"].update(routed_experts="AAAA"),
        "is not base64 of int32",
    ),
    "one token less": (altered(lambda n: n[:-1]), r"expected"),
    "a layer more": (altered(lambda n: np.concatenate([n, n[:, :1]], axis=1)), r"expected"),
    "8-byte numbers": (altered(lambda n: n.astype(np.int64)), r"expected"),
    "an expert that is not there": (altered(put(4)), "to 4, expected 0 to 3"),
    "a negative one": (altered(put(-1)), "from -1 to 3"),
    "never written": (
        altered(lambda n: n * (np.arange(n.shape[0]) != 2)[:, None, None].astype(np.int32)),
        "the same expert twice",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_routes_are_a_rejected_sample(
    one: tuple[FakeServer, SglangEngine], name: str
) -> None:
    server, engine = one
    spoil, words = WRONG[name]
    server.faults, before = [changed(spoil)], server.count("/generate")
    (output,) = engine.generate(REQUESTS[:1], SAMPLING)
    assert (output.tokens, output.finish_reason, output.routed_experts) == ((), "abort", None)
    assert (
        output.failure is not None
        and words in output.failure
        and server.seen[-1][1]["rid"] in output.failure
    )
    assert server.count("/generate") == before + 1
    assert engine.take_metrics()["engine/rejected"] == 1


def test_layers_without_experts_are_left_out() -> None:
    """A server has a place for every layer of the network."""
    request, output = (
        GenerateRequest(0, (5, 6), 0),
        GenerateOutput(0, (7, 8), (-1.0, -1.0), "length", (1, 1)),
    )
    numbers = np.zeros((3, 3, 1), dtype="<i4")
    numbers[:, 1, 0], numbers[:, 2, 0] = (1, 2, 3), (3, 2, 1)
    encoded = base64.b64encode(numbers.tobytes()).decode()
    routed_experts = read_routed_experts(
        encoded, request, output, RoutesFormat((False, True, True), topk=1, experts=4)
    )
    assert routed_experts.tolist() == [[[1], [3]], [[2], [2]], [[3], [1]], [[-1], [-1]]]


def test_an_aborted_request_may_have_none() -> None:
    """A server keeps none of a request that it aborts in its queue, where a pause had put it back;
    one that ended has them."""
    request, output = GenerateRequest(0, (5, 6), 0), GenerateOutput(0, (7,), (-1.0,), "abort", (1,))
    assert read_routed_experts(None, request, output, FORMAT).tolist() == [[[-1, -1], [-1, -1]]] * 3
    ended = GenerateOutput(0, (7,), (-1.0,), "stop", (1,))
    with pytest.raises(InvalidResponse, match="reports no routed experts"):
        read_routed_experts(None, request, ended, FORMAT)


def test_a_server_that_reports_none_is_named_before_the_run(
    one: tuple[FakeServer, SglangEngine],
) -> None:
    server, engine = one
    with pytest.raises(RunError, match="/server_info has no enable_return_routed_experts"):
        require_routed_experts(engine.pool)
    server.info = {**server.info, "enable_return_routed_experts": True}
    require_routed_experts(engine.pool)
    server.info = {**server.info, "enable_return_routed_experts": False}
    with pytest.raises(
        RunError,
        match=f"the engine {server.url} does not report routed experts.*--enable-return-routed-experts",
    ):
        require_routed_experts(engine.pool)


def test_a_server_that_is_not_deterministic_is_named_before_the_run(
    one: tuple[FakeServer, SglangEngine],
) -> None:
    server, engine = one
    require_deterministic(engine.pool)
    for info in ({"enable_deterministic_inference": False}, {"tp_size": 1}):
        server.info, kept = info, server.info
        with pytest.raises(RunError, match=f"the engine {server.url} is not deterministic"):
            require_deterministic(engine.pool)
        server.info = kept
