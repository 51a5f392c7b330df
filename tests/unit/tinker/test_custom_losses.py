"""Creating custom losses: by session, once, and kept over a restart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slime_like.tinker import session_manager
from slime_like.tinker.model_registry import ModelRegistry
from tests.api_in_process import Api

NODES = [
    {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
    {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "logprobs"}]},
    {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "sum_1"}, {"dict": {}}]}]},
]  # fmt: skip


def body(session: str, seq: int, name: str = "total") -> dict[str, Any]:
    inputs = [{"name": "logprobs", "rank": 1}]
    graph = {"format": 1, "nodes": NODES}
    return {"session_id": session, "custom_loss_seq_id": seq, "name": name, "inputs": inputs, "graph": graph}  # fmt: skip


def create(api: Api, session: str, seq: int) -> dict[str, Any]:
    answer: dict[str, Any] = api.post(
        "retrieve_future", api.post("create_custom_loss", body(session, seq))
    )
    return answer


def test_a_loss_is_created_once(api: Api) -> None:
    """A retry gets the same future; another loss by the same number is refused; order is free."""
    second = create(api, api.session, 1)
    first = create(api, api.session, 0)
    assert (first["type"], first["loss_id"]) == ("create_custom_loss", f"{api.session}:loss:0")
    assert create(api, api.session, 1) == second != first
    answer = api.send("create_custom_loss", json.dumps(body(api.session, 0, "other")).encode(), {})
    assert answer.status_code == 422 and "was used by another request" in answer.text
    assert set(api.service.registry.graphs) == {first["loss_id"], second["loss_id"]}


def test_losses_outlive_a_restart_and_end_with_their_session(api: Api) -> None:
    loss = create(api, api.session, 0)["loss_id"]
    registry = api.service.registry
    again = ModelRegistry(registry.journal)
    assert again.graphs == registry.graphs
    assert again.graph(loss, registry.models[api.model]).nodes[1]["target"] == "sum"
    api.post(f"sessions/{api.session}/finish", {})
    assert not registry.graphs and not ModelRegistry(registry.journal).graphs
    answer = api.send("create_custom_loss", json.dumps(body(api.session, 1)).encode(), {})
    assert answer.status_code == 410


def test_a_session_has_a_limited_number(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_manager, "MAX_LOSSES", 1)
    create(api, api.session, 0)
    assert "has 1 custom losses, its maximum" in create(api, api.session, 1)["error"]


def test_a_body_of_another_form_is_refused_at_once(api: Api) -> None:
    for change in (
        {"graph": {"format": 2, "nodes": NODES}},
        {"inputs": [{"name": "a", "rank": 3}]},
    ):
        sent = json.dumps(body(api.session, 0) | change).encode()
        assert api.send("create_custom_loss", sent, {}).status_code == 422
    bad = body(api.session, 0)
    bad["graph"]["nodes"] = NODES[:-1]
    answer = api.post("retrieve_future", api.post("create_custom_loss", bad))
    assert "must be the output" in answer["error"] and answer["category"] == "user"
