"""Bodies of the Tinker API: whatever they hold, answers are 2xx or 4xx, and execution continues.

The API runs in this process, see tests/api_in_process.py.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker import types

from tests.api_in_process import Api
from tests.e2e.api_server import datum
from tests.e2e.test_server_hostile import BODIES, PATHS, bytes_of
from tests.e2e.test_server_order import PROTOBUF, Raw

Sent = tuple[str, bytes, dict[str, str]]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


class HostileApi(Api):
    """With what `bytes_of` needs."""

    pass_body = Raw.pass_body


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileApi]:
    made = HostileApi(tmp_path_factory.mktemp("api"))
    made.open()
    yield made
    made.close()


@st.composite
def json_bodies(draw: st.DrawFn) -> tuple[str, str]:
    """A path and a body in which one place is something else."""
    path = draw(st.sampled_from(PATHS))
    body = copy.deepcopy(BODIES.get(path, {"session_id": "S"}))
    at: Any = body
    while True:
        key = draw(st.sampled_from(sorted(at)) if isinstance(at, dict) else st.just(0))
        inner = at[key] if isinstance(at, dict) or at else None
        if not isinstance(inner, dict | list) or not inner or draw(st.booleans()):
            break
        at = inner
    if draw(st.booleans()) and isinstance(at, dict):
        at[draw(st.text(max_size=8))] = draw(JSON)
    else:
        at[key] = draw(JSON)
    return path, json.dumps(body)


@st.composite
def pass_bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Tensors, loss and settings of a forward_backward."""
    numbers = st.floats(width=32) | st.sampled_from([0.0, 1.0])
    length = draw(st.integers(1, 5))
    names = st.sampled_from(["weights", "logprobs", "advantages", "mask", "values", "returns"])
    tensors = draw(st.dictionaries(names, st.lists(numbers, min_size=length, max_size=length)))
    losses = ["cross_entropy", "ppo", "cispo", "dro", "gspo", "ppo_critic", "sapo", "gmpo", "dppo"]
    keys = ["clip_high_threshold", "beta", "value_clip", "sapo_tau_pos", "entropy_coef", "eps_clip"]
    config = draw(st.dictionaries(st.sampled_from(keys), st.floats(), max_size=2))
    return {
        "length": length,
        "tensors": tensors,
        "loss": draw(st.sampled_from(losses)),
        "config": config,
    }


def harmless(api: HostileApi, path: str, content: bytes, headers: dict[str, str]) -> None:
    """The answer is no fault of the server's, and neither is the result."""
    answer = api.send(path, content, headers)
    assert 200 <= answer.status_code < 500, (path, content, answer.text)
    if answer.status_code >= 400:
        assert answer.json()["detail"]
    api.still_executes()


@given(given=json_bodies())
def test_json(api: HostileApi, given: tuple[str, str]) -> None:
    path, text = given
    text = text.replace('"M', f'"{api.model}').replace('"S', f'"{api.session}')
    harmless(api, path, text.encode(), {"Content-Type": "application/json"})


@given(content=st.binary(max_size=200), path=st.sampled_from(PATHS))
def test_bytes(api: HostileApi, path: str, content: bytes) -> None:
    harmless(api, path, content, {})


@given(seed=st.integers(0, 2**32))
def test_bent_protobuf(api: HostileApi, seed: int) -> None:
    path, content, headers = bytes_of(random.Random(seed), api, api.model)  # type: ignore[arg-type]  # session and pass_body are all it needs
    harmless(api, path, content, headers)


@given(given=pass_bodies(), number=st.integers(1, 2**20))
def test_passes(api: HostileApi, given: dict[str, Any], number: int) -> None:
    """Results that are there are results, or failures of the client's."""
    rows: list[types.Datum] = [datum(given["length"], number, **given["tensors"])]
    api.seq += 1
    body = api.pass_body(api.bystander, api.seq, rows, given["loss"], **given["config"])  # type: ignore[misc, arg-type]
    answer = api.send("forward_backward", body, PROTOBUF)
    assert answer.status_code == 200, answer.text
    result = api.send("retrieve_future", answer.content, PROTOBUF)
    assert result.status_code == 200
    if result.headers["content-type"] == "application/json":
        assert result.json()["category"] == "user", result.text
