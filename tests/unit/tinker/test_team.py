"""What a team needs of a server: metrics, a log, who holds what, downloads, memory that is freed."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from arguments.rules.server import valid_keys
from slime_like.tinker.access import KeyRing
from slime_like.tinker.errors import Failed
from slime_like.tinker.model_registry import ModelRegistry, Quota
from tests.api_in_process import Api

FIRST, SECOND, OPERATOR = "tml-first-key-000", "tml-second-key-00", "tml-operator-key"


def test_metrics_count_what_is_executed(api: Api) -> None:
    api.still_executes()
    lines = api.get("http://127.0.0.1/metrics").text.splitlines()
    assert 'slime_like_tinker_requests_total{op="create_model",outcome="ok"} 2.0' in lines
    assert 'slime_like_tinker_requests_total{op="optim_step",outcome="ok"} 1.0' in lines
    assert 'slime_like_tinker_execution_seconds_count{op="optim_step"} 1.0' in lines
    assert "slime_like_tinker_models 2.0" in lines and "slime_like_tinker_healthy 1.0" in lines


def test_a_line_for_each_request_session_and_model(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="slime_like.tinker"):
        session = api.post("create_session", {})["session_id"]
        api.still_executes()
        api.post(f"sessions/{api.session}/finish", {})
    assert f"session {session} of local: created" in caplog.text
    assert f"request {api.bystander}/1 (optim_step) of local: done, waited" in caplog.text
    assert f"session {api.session} of local: finished by its client" in caplog.text
    assert f"model {api.model} of local: ended: model" in caplog.text


def test_unload_frees_a_model_and_a_session_that_ended_is_not_corrupted(api: Api) -> None:
    future = api.post("unload_model", {"model_id": api.model})
    result = api.post("retrieve_future", future)
    assert result == {"model_id": api.model, "type": "unload_model"}
    assert [m.id for m in api.service.registry.live_models()] == [api.bystander]
    assert (
        api.send("unload_model", b'{"model_id": "%s"}' % api.model.encode(), {}).status_code == 410
    )
    assert api.get(f"training_runs/{api.model}").json()["corrupted"] is False
    api.still_executes()


def test_a_request_that_the_workers_die_with_names_the_newest_checkpoint(api: Api) -> None:
    """Which the API process answers at once, without a restart."""
    body = {"model_id": api.bystander, "seq_id": 1, "path": "good"}
    path = api.post("retrieve_future", api.post("save_weights", body))["path"]

    async def die(id: str, command: dict[str, Any]) -> Any:
        api.service.sessions.workers_ended("the connection was closed")
        raise Failed("the workers have ended (the connection was closed)")

    api.service.operations.call = die
    step = {"model_id": api.bystander, "seq_id": 2, "adam_params": {}}
    answer = api.post("retrieve_future", api.post("optim_step", step))
    assert answer["category"] == "server" and path in answer["error"], answer
    assert f"model {api.bystander} is lost" in answer["error"]


def test_an_external_checkpoint_is_downloaded(api: Api) -> None:
    """By links without a key, that nobody can change."""
    body = {"model_id": api.bystander, "seq_id": 1, "path": "end"}
    path = api.post("retrieve_future", api.post("save_weights_external", body))["path"]
    run, rest = path.removeprefix("tinker://").split("/", 1)
    answer = api.get(f"training_runs/{run}/checkpoints/{rest}/external_weights_urls").json()
    (url,) = answer["urls"].values()
    assert list(answer["urls"]) == ["model.safetensors"] and answer["expires"]
    assert api.get(url).content == b"weights"
    assert api.get(url.replace("/end/", "/other/")).status_code == 403
    expires = url.split("/downloads/")[1].split("/")[0]
    assert api.get(url.replace(expires, str(int(expires) + 9))).status_code == 403
    state = {"model_id": api.bystander, "seq_id": 2, "path": "state"}
    saved = api.post("retrieve_future", api.post("save_weights", state))["path"]
    refused = api.get(
        f"training_runs/{run}/checkpoints/{saved.split('/', 3)[3]}/external_weights_urls"
    )
    assert refused.status_code == 422 and "save_weights_external" in refused.text


def test_an_operator_sees_who_holds_what_and_others_do_not(tmp_path: Path) -> None:
    for name, keys in (("keys", f"{FIRST}\n{SECOND}\n"), ("operators", OPERATOR)):
        (tmp_path / name).write_text(keys)
        (tmp_path / name).chmod(0o600)
    rings = [KeyRing(str(tmp_path / name), valid_keys) for name in ("keys", "operators")]
    api = Api(tmp_path / "server", keys=rings[0], operators=rings[1])
    session = api.post("create_session", {}, **{"X-API-Key": FIRST})["session_id"]
    for key, status in ((FIRST, 403), (OPERATOR, 200), ("tml-nobody", 401)):
        assert api.get("operator/sessions", **{"X-API-Key": key}).status_code == status
    (held,) = api.get("operator/sessions", **{"Authorization": f"Bearer {OPERATOR}"}).json()[
        "sessions"
    ]
    assert held["session_id"] == session and held["owner"].startswith("key-")
    assert (
        api.send(f"operator/sessions/{session}/finish", b"{}", {"X-API-Key": SECOND}).status_code
        == 403
    )
    api.post(f"operator/sessions/{session}/finish", {}, **{"X-API-Key": OPERATOR})
    assert api.get("operator/sessions", **{"X-API-Key": OPERATOR}).json()["sessions"] == []
    gone = api.get("samplers/session-of-another:sample:0", **{"X-API-Key": SECOND})
    assert gone.status_code == 404 and "make room" not in gone.text
    api.close()


def test_room_is_made_by_silent_sessions_that_hold_it(tmp_path: Path) -> None:
    """And by no other: not by those of other keys where the limit is of one key, nor by those
    without models where it is of models."""
    path = tmp_path / "keys"
    path.write_text(f"{FIRST}\n{SECOND}\n")
    path.chmod(0o600)
    api = Api(tmp_path / "server", keys=KeyRing(str(path), valid_keys))
    manager, sessions = api.service.sessions, api.service.registry.sessions
    manager.keys = lambda: 2
    manager.sessions_quota = Quota("sessions", 64, 2)

    def create(key: str) -> str:
        return str(api.post("create_session", {}, **{"X-API-Key": key})["session_id"])

    other, first, second = create(SECOND), create(FIRST), create(FIRST)
    sessions[other].seen -= 80
    refused = api.send("create_session", b"{}", {"X-API-Key": FIRST})
    assert refused.status_code == 403 and "--max-sessions-per-key" in refused.text
    assert not sessions[other].finished, "the room that it would make is not for this key"
    sessions[second].seen -= 70
    third = create(FIRST)
    ended = {id for id, session in sessions.items() if session.finished}
    assert ended == {second}
    manager.models_quota = Quota("models", 1, 1)
    for number, session in enumerate((first, third)):
        body = {"session_id": session, "model_seq_id": 0, "base_model": "m"}
        api.post("create_model", body, **{"X-API-Key": FIRST})
        sessions[first].seen -= 70
        assert sessions[first].finished == bool(number)
    assert not sessions[other].finished, "it is silent for longer, without a model"
    api.close()


def test_a_silent_session_ends_with_its_models_and_samplers(api: Api) -> None:
    """After --session-timeout-s without a heartbeat; one that is heard of stays."""
    silent, model = api.session, api.model
    sent = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 1}
    sampler = api.post("retrieve_future", api.post("save_weights_for_sampler", sent))
    folder = Path(api.service.registry.samplers[sampler["sampling_session_id"]].folder)
    api.open()
    timeout_s = api.service.config.session_timeout_s
    later = time.time() + timeout_s + 1
    api.service.sessions.end_silent_sessions(later - 2)
    assert folder.exists() and not api.service.registry.sessions[silent].finished
    api.service.registry.sessions[api.session].seen = later
    api.service.sessions.end_silent_sessions(later)
    assert api.send("session_heartbeat", b'{"session_id": "%s"}' % silent.encode(), {}).status_code == 410  # fmt: skip
    api.post("session_heartbeat", {"session_id": api.session})
    step = {"model_id": model, "seq_id": 2, "adam_params": {}}
    error = api.post("retrieve_future", api.post("optim_step", step))["error"]
    assert error == f"model {model} was unloaded: its session has finished"
    assert api.get(f"samplers/{sampler['sampling_session_id']}").status_code == 404
    assert not folder.exists()
    api.still_executes()


def test_a_session_that_is_heard_of_outlives_a_restart(api: Api) -> None:
    """The journal does not know of heartbeats: clients may send theirs to the new API process."""
    session = api.service.registry.sessions[api.session]
    session.seen -= 2 * api.service.config.session_timeout_s
    api.service.registry.keep(session)
    api.post("session_heartbeat", {"session_id": api.session})
    again = ModelRegistry(api.service.registry.journal)  # of a new API process
    api.service.registry = api.service.sessions.registry = again
    api.service.sessions.end_silent_sessions()
    assert not again.sessions[api.session].finished and len(again.live_models()) == 2


def test_older_sdks_are_told_to_do_what_the_newest_does(api: Api) -> None:
    """SDK 0.24, which SkyRL pins, has switches for it; without them it sends passes as JSON."""
    config = api.post("client/config", {"sdk_version": "0.24.1"})
    for switch in ("proto_write_fwdbwd", "fwd_via_fwdbwd", "create_model_via_load_weights"):
        assert config[switch] is True


def test_a_checkpoint_is_deleted_by_kind_and_name(api: Api) -> None:
    """204, as SkyRL's server; 400 for a name alone, which checkpoints of two kinds may have."""

    def delete(checkpoint: str) -> httpx.Response:
        path = f"training_runs/{api.model}/checkpoints/{checkpoint}"
        return api.loop.run_until_complete(api.http.delete(path))

    sent = {"model_id": api.model, "seq_id": 1, "path": "a"}
    api.post("retrieve_future", api.post("save_weights", sent))
    refused = delete("a")
    assert refused.status_code == 400 and "weights/a, sampler_weights/a" in refused.text
    assert len(api.get(f"training_runs/{api.model}/checkpoints").json()["checkpoints"]) == 1
    deleted = delete("weights/a")
    assert deleted.status_code == 204 and deleted.content == b""
    assert delete("weights/a").status_code == 404


def test_a_web_page_of_another_site_is_refused(api: Api) -> None:
    for header in ({"Host": "rebound.example"}, {"Origin": "https://site.example"}):
        assert api.send("create_session", b"{}", header).status_code == 403
    path = "training_runs/r/checkpoints/weights/a/publish"
    assert "cannot be published" in api.loop.run_until_complete(api.http.delete(path)).text
