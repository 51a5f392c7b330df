"""Answers of engines: whatever comes, it is a sample that can be trained on, or one sentence."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic_core import from_json

from slime_like.checked_json import LOWEST_LOG_PROB, InvalidResponse, read
from slime_like.engines.base import GenerateRequest, SamplingParams
from slime_like.servers.control_answers import Checksums, ModelInfo, RouterWorkers, ServerInfo
from slime_like.servers.routed_experts import RoutesFormat
from slime_like.servers.server_api import Legal, RefusedByServer
from slime_like.sglang.protocol import (
    read_generation,
    read_input_tokens,
    read_scores,
)
from slime_like.text import printable

REQUEST = GenerateRequest(7, (3, 5), seed=0)
SAMPLING = SamplingParams(max_new_tokens=4, report_routed_experts=True)
LEGAL = Legal(64, {3, 4}, RoutesFormat((True, False), topk=1, experts=4))
RID = "run-7-0"
VALID: dict[str, Any] = {
    "text": "ab",
    "output_ids": [9, 0, 63],
    "meta_info": {
        "id": RID,
        "finish_reason": {"type": "stop", "matched": 63},
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "weight_version": "4",
        "weight_versions": [
            {"version": "3", "start": 0, "end": 1},
            {"version": "4", "start": 1, "end": 3},
        ],
        "output_token_logprobs": [[-0.5, 9, None], [0.0, 0, None], [-12, 63, "x"]],
        "input_token_logprobs": [[None, 3, None], [-1.5, 5, None]],
        "routed_experts": "AAAAAAAAAAABAAAAAAAAAAIAAAAAAAAAAwAAAAAAAAA=",
    },
}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-5, 70)
    | st.floats()
    | st.text(st.characters(categories=None), max_size=8)
    | st.sampled_from([2**70, -(10**400), 10**13, 1e308, -1e300, math.inf, "abc", "1", "999", "-7"])
)
KEYS = st.sampled_from(
    [*VALID, *VALID["meta_info"], "type", "status_code", "message", "version", "start", "end"]
) | st.text(max_size=4)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of every place in a JSON value."""
    found = [path]
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, item in items:
        found += paths_of(item, (*path, key))
    return found


def places_in(value: Any, draw: st.DrawFn) -> Iterator[tuple[Any, Any]]:
    """Up to three places of a JSON value, each a container with a key of it as they are by then."""
    for _ in range(draw(st.integers(0, 3))):
        paths = [path for path in paths_of(value) if path]
        if not paths:
            break
        *way, key = draw(st.sampled_from(paths))
        place = value
        for step in way:
            place = place[step]
        yield place, key


@st.composite
def mutated(draw: st.DrawFn, valid: Any) -> Any:
    """A valid answer with up to three places replaced, removed or repeated."""
    answer = copy.deepcopy(valid)
    for place, key in places_in(answer, draw):
        change = draw(st.sampled_from(["replace", "remove", "repeat"]))
        if change == "remove":
            del place[key]
        elif change == "repeat" and isinstance(place, list):
            place.insert(key, copy.deepcopy(place[key]))
        else:
            place[key] = draw(JSON)
    return answer


def as_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


def sentence_of(read: Callable[[], Any]) -> str | None:
    """The sentence of what is refused, None where something was read. Anything else is raised."""
    try:
        read()
    except (InvalidResponse, RefusedByServer) as refusal:
        words = str(refusal)
        assert words and printable(words) == words and "\n" not in words and len(words) < 2000, (
            words
        )
        return words
    return None


@given(mutated(VALID) | JSON)
def test_generate_is_a_valid_sample_or_a_sentence(answer: Any) -> None:
    def read() -> None:
        output = read_generation(as_bytes(answer), REQUEST, SAMPLING, RID, LEGAL)
        routed_experts = output.routed_experts
        assert routed_experts is not None
        count = len(output.tokens)
        assert count == len(output.log_probs) == len(output.weight_versions) <= 4
        assert count or output.finish_reason == "abort"
        assert all(type(t) is int and 0 <= t < 64 for t in output.tokens)
        assert all(LOWEST_LOG_PROB <= p <= 1e-3 for p in output.log_probs)
        assert all(type(p) is float and math.isfinite(p) for p in output.log_probs)
        assert set(output.weight_versions) <= {3, 4}
        assert list(output.weight_versions) == sorted(output.weight_versions)
        assert routed_experts.shape == (2 + count, 1, 1) and int(routed_experts.max()) < 4

    sentence_of(read)


@given(mutated(VALID) | JSON)
def test_scores_are_log_probs_or_a_sentence(answer: Any) -> None:
    def read() -> None:
        scores = read_scores(as_bytes(answer), (3, 5), RID)
        assert len(scores) == 1 and LOWEST_LOG_PROB <= scores[0] <= 1e-3

    def tokens() -> None:
        assert all(type(t) is int for t in read_input_tokens(as_bytes(answer), RID))

    sentence_of(read)
    sentence_of(tokens)


CONTROL: dict[str, tuple[type[BaseModel], Any]] = {
    "/model_info": (ModelInfo, {"weight_version": "3"}),
    "/server_info": (ServerInfo, {"tp_size": 2, "pp_size": 1, "dp_size": 1}),
    "/weights_checker": (
        Checksums,
        {"success": True, "ranks": [{"checksums": {"a": "1f", "b": "2e"}}]},
    ),
    "/workers": (
        RouterWorkers,
        {"workers": [{"url": "http://127.0.0.1:30000", "id": "a1", "is_healthy": True}]},
    ),
}


@pytest.mark.parametrize("path", CONTROL)
@given(data=st.data())
def test_control_answers_are_read_or_a_sentence(path: str, data: st.DataObject) -> None:
    model, valid = CONTROL[path]
    assert sentence_of(lambda: read(model, valid)) is None
    answer = data.draw(mutated(valid) | st.dictionaries(KEYS, JSON, max_size=4))
    sentence_of(lambda: read(model, as_bytes(answer)))
    # as `ControlClient` parses it
    with contextlib.suppress(ValueError):
        parsed = from_json(as_bytes(answer))
        sentence_of(lambda: read(model, parsed))


@given(st.binary(max_size=200) | JSON.map(as_bytes) | st.integers(0, 2000).map(lambda n: b"[" * n))
def test_bytes_are_json_within_limits_or_a_sentence(data: bytes) -> None:
    sentence_of(lambda: read(ModelInfo, data))


def test_the_valid_answer_is_read() -> None:
    output = read_generation(as_bytes(VALID), REQUEST, SAMPLING, RID, LEGAL)
    assert output.tokens == (9, 0, 63) and output.weight_versions == (3, 4, 4)
    assert output.routed_experts is not None
    assert output.routed_experts.flatten().tolist() == [0, 1, 2, 3, -1]
