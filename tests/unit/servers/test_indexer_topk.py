"""The keys of sparse attention that servers report for every token: read as they are, and nothing
that cannot be right is passed on."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arguments.parse import parse_args
from scripts.make_tiny_model import make_tiny_model
from slime_like.checked_json import InvalidResponse
from slime_like.engines.base import GenerateOutput, GenerateRequest, SamplingParams
from slime_like.engines.local.engine import LocalEngine
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.engines.sglang.factory import SglangKind, require_indexer_topk
from slime_like.errors import RunError
from slime_like.servers.indexer_topk import IndexerFormat, read_indexer_topk
from slime_like.servers.launches import engine_launches
from slime_like.servers.nodes import find_nodes
from tests.fake_sglang import FakeServer, changed, engine_of, fake_servers, weights_of
from tests.unit.command_lines import complete

SAMPLING = SamplingParams(max_new_tokens=6, report_indexer_topk=True, ignore_end_tokens=True)
# shorter and longer than the 4 keys that a query attends to
REQUESTS = [GenerateRequest(i, tuple(range(5, 7 + 3 * i)), seed=100 + i) for i in range(3)]
# three layers, of which the second takes the choice of the first
FORMAT = IndexerFormat((True, False, True), topk=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model("GLM-5.2", folder, index_topk_freq=2, index_skip_topk_offset=1)
    return str(folder)


@pytest.fixture(scope="module")
def one(model: str) -> Iterator[tuple[FakeServer, SglangEngine]]:
    with (
        fake_servers(model, 1) as (server,),
        engine_of(model, [server], indexer_topk=FORMAT) as engine,
    ):
        yield server, engine


def test_keys_of_servers_are_those_of_the_local_engine(
    one: tuple[FakeServer, SglangEngine], model: str
) -> None:
    server, engine = one
    local = LocalEngine(model, None)
    local.update_weights(weights_of(model), 1)
    for request, output, right in zip(
        REQUESTS,
        engine.generate(REQUESTS, SAMPLING),
        local.generate(REQUESTS, SAMPLING),
        strict=True,
    ):
        assert output.tokens == right.tokens and output.failure is None
        found, expected = output.indexer_topk, right.indexer_topk
        assert found is not None and expected is not None
        assert found.dtype == expected.dtype and found.equal(expected)
        assert found.shape == (len(request.prompt_tokens) + 6 - 4, 2, 4)
        assert bool((found[-1] == -1).all()) and int(found[:-1].min()) == 0
        assert all(len({*keys}) == 4 for row in found[:-1].tolist() for keys in row)
    assert server.seen[-1][1]["return_indexer_topk"] is True


def test_they_are_asked_for_where_they_are_wanted(
    one: tuple[FakeServer, SglangEngine], model: str
) -> None:
    server, engine = one
    (output,) = engine.generate(REQUESTS[:1], SamplingParams(max_new_tokens=2))
    assert output.indexer_topk is None and "return_indexer_topk" not in server.seen[-1][1]
    with (
        engine_of(model, [server]) as dense,
        pytest.raises(ValueError, match="the network has no indexers"),
    ):
        dense.generate(REQUESTS[:1], SAMPLING)


def test_servers_that_are_started_report_positions(tmp_path: Path) -> None:
    config = parse_args(complete(tmp_path), 1)
    config = replace(
        config, sglang=replace(config.sglang, rollout_num_gpus=2, sglang_python="python")
    )
    cpu = torch.device("cpu")
    for wanted in (False, True):
        asked = replace(config, rollout=replace(config.rollout, use_rollout_indexer_replay=wanted))
        program = SglangKind().program(asked, cpu)
        servers = engine_launches(asked.sglang, program, find_nodes(2, cpu), logs=tmp_path)
        for (part,) in servers:
            assert ("--enable-return-indexer-topk" in part.launch.command) == wanted
            assert part.launch.environment.get("SGLANG_DSA_FUSE_TOPK") == ("0" if wanted else None)


def altered(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict], None]:
    """Of the numbers [tokens - 1, 3, 4] int32."""

    def alter(answer: dict) -> None:
        meta = answer["meta_info"]
        numbers = np.frombuffer(base64.b64decode(meta["indexer_topk"]), dtype=np.int32)
        numbers = change(numbers.reshape(-1, 3, 4).copy())
        meta["indexer_topk"] = base64.b64encode(numbers.tobytes()).decode()

    return alter


def put(value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(numbers: np.ndarray) -> np.ndarray:
        numbers[5, 2, 0] = value
        return numbers

    return change


def repeated(numbers: np.ndarray) -> np.ndarray:
    numbers[6, 0, 1] = numbers[6, 0, 3]
    return numbers


# What comes back in place of right keys -> words of the rejection.
PLACES = "SGLANG_DSA_FUSE_TOPK=0 in its environment"
WRONG: dict[str, tuple[Callable[[dict], object], str]] = {
    "none": (
        lambda a: a["meta_info"].pop("indexer_topk"),
        "start it with --enable-return-indexer-topk",
    ),
    "a list": (
        lambda a: a["meta_info"].update(indexer_topk=[1, 2]),
        "meta_info.indexer_topk is [1, 2]",
    ),
    "no base64": (
        lambda a: a["meta_info"].update(indexer_topk="%%%"),
        "indexer_topk is not base64",
    ),
    "half a number": (
        lambda a: a["meta_info"].update(indexer_topk="AAAA"),
        "is not base64 of int32",
    ),
    "one token less": (altered(lambda n: n[:-1]), "(tokens - 1, layers, index_topk) = (13, 3, 4)"),
    "layers with indexers only": (altered(lambda n: n[:, ::2]), "expected"),
    "8-byte numbers": (altered(lambda n: n.astype(np.int64)), "expected"),
    "places in the cache": (altered(lambda n: n + 64), PLACES),
    "a key that is later": (altered(put(6)), PLACES),
    "no key": (altered(put(-1)), PLACES),
    "never written": (altered(lambda n: n * 0), "the same key twice"),
    "a key twice": (altered(repeated), "the same key twice"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_keys_are_a_rejected_sample(one: tuple[FakeServer, SglangEngine], name: str) -> None:
    server, engine = one
    spoil, words = WRONG[name]
    server.faults, before = [changed(spoil)], server.count("/generate")
    (output,) = engine.generate(REQUESTS[2:], SAMPLING)
    assert (output.tokens, output.finish_reason, output.indexer_topk) == ((), "abort", None)
    assert output.failure is not None and words in output.failure
    assert server.count("/generate") == before + 1
    assert engine.take_metrics()["engine/rejected"] == 1


def test_queries_without_a_choice_say_nothing() -> None:
    """Of a sequence that is as long as a query reaches, whatever the server's buffer had."""
    request = GenerateRequest(0, (5, 6, 7), 0)
    output = GenerateOutput(0, (8, 9), (-1.0, -1.0), "length", (1, 1))
    junk = base64.b64encode(np.full((4, 3, 4), 9999, dtype="<i4").tobytes()).decode()
    keys = read_indexer_topk(junk, request, output, FORMAT)
    assert keys.shape == (1, 2, 4) and keys.unique().tolist() == [-1]  # of the last token


def test_an_aborted_request_may_have_none() -> None:
    request = GenerateRequest(0, (5, 6, 7, 8), 0)
    output = GenerateOutput(0, (7,), (-1.0,), "abort", (1,))
    assert read_indexer_topk(None, request, output, FORMAT).tolist() == [[[-1] * 4] * 2]
    ended = replace(output, finish_reason="stop")
    with pytest.raises(InvalidResponse, match="reports no selected keys"):
        read_indexer_topk(None, request, ended, FORMAT)


def test_a_server_that_reports_none_is_named_before_the_run(
    one: tuple[FakeServer, SglangEngine],
) -> None:
    server, engine = one
    infos: list[dict[str, Any]] = [{}, {"enable_return_indexer_topk": False}]
    kept = server.info
    for info in infos:
        server.info = {**kept, **info}
        with pytest.raises(
            RunError, match=f"{server.url} does not report .*SGLANG_DSA_FUSE_TOPK=0"
        ):
            require_indexer_topk(engine.pool)
    server.info = {**kept, "enable_return_indexer_topk": True}
    require_indexer_topk(engine.pool)
