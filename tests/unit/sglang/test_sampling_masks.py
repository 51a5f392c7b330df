"""The sampling masks that servers report: read as they are, with log-probs among their tokens, and
nothing that cannot be right is passed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from arguments.parse import parse_args
from slime_like.engines.base import GenerateRequest, SamplingParams
from slime_like.engines.local.engine import LocalEngine
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.engines.sglang.factory import SglangKind, require_sampling_masks
from slime_like.errors import RunError
from slime_like.servers.launches import engine_launches
from slime_like.servers.nodes import find_nodes
from slime_like.servers.router import Router
from tests.fake_sglang import FakeServer, changed, engine_of, fake_servers, weights_of
from tests.unit.command_lines import complete

SAMPLING = SamplingParams(
    max_new_tokens=6, temperature=0.8, top_p=0.9, top_k=12, report_sampling_mask=True
)
REQUESTS = [GenerateRequest(10 + i, tuple(range(3, 6 + i)), seed=100 + i) for i in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, max_position_embeddings=64, initializer_range=0.3, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def one(model: str) -> Iterator[tuple[FakeServer, SglangEngine]]:
    with fake_servers(model, 1) as (server,), engine_of(model, [server]) as engine:
        yield server, engine


def test_masks_of_servers_are_those_of_the_local_engine(
    one: tuple[FakeServer, SglangEngine], model: str
) -> None:
    _, engine = one
    local = LocalEngine(model, None)
    local.update_weights(weights_of(model), 1)
    for output, right in zip(
        engine.generate(REQUESTS, SAMPLING), local.generate(REQUESTS, SAMPLING), strict=True
    ):
        assert output.failure is None and output.tokens == right.tokens
        assert output.log_probs == pytest.approx(right.log_probs, abs=1e-5)
        assert output.sampling_mask is not None and right.sampling_mask is not None
        for mask, other, token in zip(
            output.sampling_mask, right.sampling_mask, output.tokens, strict=True
        ):
            assert mask.dtype == torch.int32 and torch.equal(mask, other.sort().values)
            assert token in mask and len(mask) <= 12


def test_greedy_sampling_asks_for_none(one: tuple[FakeServer, SglangEngine]) -> None:
    _, engine = one
    for output in engine.generate(REQUESTS, replace(SAMPLING, temperature=0.0)):
        assert output.failure is None and output.sampling_mask is None


def without(meta: dict[str, Any]) -> None:
    del meta["output_token_sampling_mask"]


def fewer(meta: dict[str, Any]) -> None:
    meta["output_token_sampling_mask"].pop()


def lacks_the_token(meta: dict[str, Any]) -> None:
    token = meta["output_token_logprobs"][0][1]
    meta["output_token_sampling_mask"][0] = [t for t in range(9) if t != token]


def twice(meta: dict[str, Any]) -> None:
    meta["output_token_sampling_mask"][1] *= 2


def outside(meta: dict[str, Any]) -> None:
    meta["output_token_sampling_mask"][1].append(64)


def not_a_number(meta: dict[str, Any]) -> None:
    meta["output_token_sampling_logprobs"][0] = 0.5


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without, "the server reports no sampling masks; SGLang 0.5.23 or newer does"),
        (fewer, "sampling masks and"),
        (lacks_the_token, "which its sampling mask lacks"),
        (twice, "the sampling mask of token 1 has a token twice"),
        (outside, "not a token id from 0 to 63"),
        (not_a_number, "output_token_sampling_logprobs"),
    ],
)
def test_an_answer_that_cannot_be_right_is_rejected(
    spoil: Callable[[dict[str, Any]], None], words: str, one: tuple[FakeServer, SglangEngine]
) -> None:
    server, engine = one
    server.faults = [changed(lambda answer: spoil(answer["meta_info"]))]
    (output,) = engine.generate(REQUESTS[:1], SAMPLING)
    assert output.failure is not None and words in output.failure
    assert output.tokens == ()


def test_a_run_needs_a_bound_of_the_masks(tmp_path: Path) -> None:
    line = [*complete(tmp_path), "--rollout-engine", "sglang", "--renormalize-sampled-log-probs"]
    with pytest.raises(ValueError, match="reports sampling masks only of a bounded length"):
        parse_args([*line, "--rollout-top-p", "0.9"], 1)


def test_servers_that_are_started_report_masks_of_that_length(tmp_path: Path) -> None:
    config = parse_args(complete(tmp_path), 1)
    config = replace(
        config, sglang=replace(config.sglang, rollout_num_gpus=1, sglang_python="python")
    )
    cpu = torch.device("cpu")
    for wanted in (False, True):
        settings = {"renormalize_sampled_log_probs": wanted, "rollout_top_k": 300}
        asked = replace(config, rollout=replace(config.rollout, **settings))
        program = SglangKind().program(asked, cpu)
        ((part,),) = engine_launches(asked.sglang, program, find_nodes(1, cpu), logs=tmp_path)
        words = " ".join(map(str, part.launch.command))
        assert ("--sampling-mask-max-tokens 300" in words) == wanted


def test_a_server_with_shorter_masks_is_refused_at_the_start(
    one: tuple[FakeServer, SglangEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = one
    assert engine.pool is not None
    monkeypatch.setattr(engine.pool, "call", lambda *args, **kw: {"sampling_mask_max_tokens": 128})
    require_sampling_masks(engine.pool, 128)
    with pytest.raises(RunError, match="at most 128 tokens; start it with --sampling-mask-max-"):
        require_sampling_masks(engine.pool, 129)
    monkeypatch.setattr(engine.pool, "call", lambda *args, **kw: {})
    with pytest.raises(RunError, match="reports no sampling masks: its /server_info has no"):
        require_sampling_masks(engine.pool, 1)


def test_a_router_is_passed_by(
    one: tuple[FakeServer, SglangEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, engine = one
    assert engine.pool is not None
    with FakeServer(server.model) as router:
        monkeypatch.setattr(engine.pool, "router", Router(router.url, None, 1.0))
        (output,) = engine.generate(REQUESTS[:1], SAMPLING)
        assert output.sampling_mask is not None and router.count("/generate") == 0
