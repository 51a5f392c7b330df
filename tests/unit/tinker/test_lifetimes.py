"""Models and samplers whose session ends, or whose creation fails, while the workers are busy with
them: they neither stay on the workers nor come back to life."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from slime_like.tinker.errors import Refused
from tests.api_in_process import Api, workers


class Held:
    """Workers that begin one kind of command and finish it when they are released."""

    def __init__(self, api: Api, op: str) -> None:
        self.api = api
        self.op = op
        self.seen: list[tuple[str, str]] = []  # kind and model
        self.begun = asyncio.Event()
        self.released = asyncio.Event()
        api.service.operations.call = self

    async def __call__(self, id: str, command: dict[str, Any]) -> Any:
        self.seen.append((command["op"], command["model"]))
        if command["op"] == self.op:
            self.begun.set()
            await self.released.wait()
        return await workers(id, command)

    def begin(self, path: str, body: dict[str, Any]) -> Any:
        """Send a request; returns its future when the workers have begun."""
        future = self.api.post(path, body)
        self.api.loop.run_until_complete(asyncio.wait_for(self.begun.wait(), 5))
        return future

    def finish(self, future: Any) -> str:
        """The error of the request."""
        self.released.set()
        return str(self.api.post("retrieve_future", future)["error"])


def unloaded(api: Api, seen: list[tuple[str, str]], model: str) -> bool:
    """Whether the workers have unloaded the model in the end."""

    async def idle() -> None:
        while api.dispatcher.waiting or api.dispatcher._executing:
            await asyncio.sleep(0.01)

    api.loop.run_until_complete(asyncio.wait_for(idle(), 5))
    return ("unload", model) in seen


def save(api: Api) -> str:
    body = {"model_id": api.model, "seq_id": 1, "path": "a"}
    return str(api.post("retrieve_future", api.post("save_weights", body))["path"])


def test_a_model_whose_state_is_refused_leaves_the_workers(api: Api) -> None:
    path = save(api)
    seen = []

    async def damaged(id: str, command: dict[str, Any]) -> Any:
        seen.append((command["op"], command["model"]))
        if command["op"] == "load":
            raise Refused("the checkpoint is damaged")

    api.service.operations.call = damaged
    body = {"session_id": api.session, "model_seq_id": 5, "path": path, "optimizer": True}
    answer = api.post("retrieve_future", api.post("load_weights", body))
    assert answer["error"] == "the checkpoint is damaged"
    model = f"{api.session}:train:5"
    assert unloaded(api, seen, model) and api.service.registry.models[model].state == "ended"


@pytest.mark.parametrize("op", ["create", "load"])
def test_a_session_that_ends_takes_the_model_that_is_being_created(api: Api, op: str) -> None:
    path, body = "create_model", {"session_id": api.session, "model_seq_id": 5}
    if op == "load":
        path, body = "load_weights", {**body, "path": save(api), "optimizer": True}
    held = Held(api, op)
    future = held.begin(path, {**body, "base_model": "m"})
    api.post(f"sessions/{api.session}/finish", {})
    assert "its session has finished" in held.finish(future)
    assert unloaded(api, held.seen, f"{api.session}:train:5")
    assert api.service.registry.live_models() == []


def test_a_model_that_ended_before_a_restart_leaves_the_workers(api: Api) -> None:
    """An earlier API process did not live to hear that it was created."""
    held = Held(api, "create")
    model = api.service.registry.models[api.model]
    model.state = "ended"
    api.service.sessions.workers_connected({"facts": {"models": [api.model, api.bystander]}})
    assert unloaded(api, held.seen, api.model)
    assert held.seen == [("unload", api.model)]
    api.still_executes()


def test_a_model_that_is_unloaded_while_it_loads_stays_unloaded(api: Api) -> None:
    path = save(api)
    held = Held(api, "load")
    body = {"model_id": api.model, "seq_id": 2, "path": path, "optimizer": True}
    future = held.begin("load_weights", body)
    api.post("unload_model", {"model_id": api.model})
    assert "was unloaded by its client" in held.finish(future)
    assert unloaded(api, held.seen, api.model)
    assert [each.id for each in api.service.registry.live_models()] == [api.bystander]


def test_a_session_that_ends_takes_the_sampler_that_is_being_saved(
    api: Api, tmp_path: Path
) -> None:
    held = Held(api, "export")
    body = {"model_id": api.model, "seq_id": 1, "sampling_session_seq_id": 0}
    future = held.begin("save_weights_for_sampler", body)
    api.post(f"sessions/{api.session}/finish", {})
    assert "its session has finished" in held.finish(future)
    assert not api.service.registry.samplers and not list((tmp_path / "snapshots").iterdir())


@pytest.mark.parametrize("path", ["create_model", "load_weights"])
def test_a_new_model_that_finds_no_room_in_the_queue_is_sent_again(
    api: Api, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As clients do after 429."""
    body: dict[str, Any] = {"session_id": api.session, "model_seq_id": 5, "base_model": "m"}
    if path == "load_weights":
        body |= {"path": save(api), "optimizer": True}
    with monkeypatch.context() as full:
        full.setattr(api.dispatcher, "_max_waiting", 0)
        for _ in range(2):
            answer = api.send(path, json.dumps(body).encode(), {})
            assert answer.status_code == 429, answer.text
        assert len(api.service.registry.live_models()) == 2
    answer = api.post("retrieve_future", api.post(path, body))
    assert "error" not in answer and len(api.service.registry.live_models()) == 3
