"""A request that is answered with 422 takes its place in its model's order: its client has counted
it, and what comes next would wait behind a gap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from slime_like.tinker.errors import Failed, Refused
from tests.api_in_process import Api, workers

ADAM = {"learning_rate": 1e-3}
LONG = {"ttl_seconds": 1}


def refuse(api: Api, path: str, body: dict[str, Any], status: int = 422) -> str:
    answer = api.send(path, json.dumps(body).encode(), {})
    assert answer.status_code == status, answer.text
    return str(answer.json()["detail"])


def step(api: Api, seq: int) -> dict[str, Any]:
    """Answers at once, or only when the gap before it has lasted too long."""
    body = {"model_id": api.model, "seq_id": seq, "adam_params": ADAM}
    answer: dict[str, Any] = api.post("retrieve_future", api.post("optim_step", body))
    return answer


def send_pass(
    api: Api, seq: int, *, loss: str = "cross_entropy", forward_only: bool = False
) -> dict[str, Any]:
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [2, 3]}
    )
    body = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=[datum], loss_fn=loss),  # type: ignore[arg-type]
        model_id=api.model,
        seq_id=seq,
    )
    message = forward_backward_request_to_proto(body)
    message.forward_only = forward_only
    answer = api.send("forward_backward", message.SerializeToString(), {})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def run_pass(api: Api, seq: int, **settings: Any) -> str:
    """The result as text: a protobuf, or an error in JSON."""
    future = json.dumps(send_pass(api, seq, **settings)).encode()
    return api.send("retrieve_future", future, {"accept": "application/x-protobuf"}).text


@pytest.mark.parametrize(
    ("path", "body", "reported"),
    [
        ("optim_step", {"adam_params": {"eps": 0.0}}, "OptimStep: adam_params.eps"),
        ("optim_step", {"adam_params": {"learning_rate": 1e4}}, "adam_params.learning_rate"),
        ("optim_step", {"adam_params": {"beta1": 1.0}}, "adam_params.beta1"),
        ("optim_step", {"new_field": 1}, "new_field"),
        ("save_weights", {"path": "a/b"}, "SaveWeights: path"),
        ("save_weights", {"path": "a", **LONG}, "ttl_seconds"),
        ("save_weights_for_sampler", {"path": ".."}, "path"),
        ("save_weights_for_sampler", {}, "give path for a checkpoint"),
        ("save_weights_for_sampler", {"path": "a", "kind": "other"}, "kind"),
        ("save_weights_external", {"path": "a b"}, "path"),
        ("load_weights", {"path": "weights/1", "optimizer": True}, "LoadWeights: path"),
        ("load_weights", {"path": "tinker://a", "optimizer": True, "session_id": "s"}, "give session_id"),
    ],
)  # fmt: skip
def test_the_next_request_does_not_wait(
    api: Api, path: str, body: dict[str, Any], reported: str
) -> None:
    sent = {"model_id": api.model, "seq_id": 1, **body}
    assert reported in refuse(api, path, sent)
    assert "metrics" in step(api, 2)
    assert reported in refuse(api, path, sent), "and the same one is refused again"
    assert "metrics" in step(api, 3)


def test_it_takes_its_turn_behind_requests_that_come_late(api: Api) -> None:
    """The client sends 1, 2 and 3 at once, and 2 arrives first."""
    bad = {"model_id": api.model, "seq_id": 2, "path": "a/b"}
    assert "path" in refuse(api, "save_weights", bad)
    assert "metrics" in step(api, 1)
    assert "metrics" in step(api, 3)
    used = {"model_id": api.model, "seq_id": 2, "path": "a"}
    assert "used by another request" in refuse(api, "save_weights", used)


def test_what_names_no_turn_changes_nothing(api: Api) -> None:
    for body in (
        {"model_id": "other", "seq_id": 1},
        {"model_id": api.model, "seq_id": 0},
        {"model_id": api.model, "seq_id": "1"},
        {"seq_id": 1},
        {"model_id": [], "seq_id": 1},
    ):
        refuse(api, "save_weights", body)
    assert "metrics" in step(api, 1)
    refuse(api, "save_weights", {"model_id": api.model, "seq_id": 1, "path": "a/b"})
    assert "metrics" in step(api, 2), "a number that is taken stays taken"


@pytest.mark.parametrize("missing", [[1], [1, 2, 3]])
def test_what_the_sdk_gave_up_does_not_hold_the_next_request(api: Api, missing: list[int]) -> None:
    """The SDK sends a request once the one before it was answered or given up: one that was refused
    before the server knew its number (a body that is too large, an unknown key), that the SDK has
    retried for 300 s (429, 500), or that failed in the client."""
    api.open("0.38.0")
    assert "loss:sum" in run_pass(api, missing[-1] + 1)
    assert "never came" in step(api, missing[-1] + 2)["error"], "nor is a part of a batch applied"
    assert "metrics" in step(api, missing[-1] + 3)
    late = {"model_id": api.model, "seq_id": missing[-1], "adam_params": ADAM}
    assert "is too low" in refuse(api, "optim_step", late)


@pytest.mark.parametrize("version", ["0.38.0", None])
def test_any_number_of_requests_may_be_missing(api: Api, version: str | None) -> None:
    """What the server says of them has a bounded size: else one request would hold all others."""
    if version is not None:
        api.open(version)
    last = 2**31 - 3
    answer = run_pass(api, last)
    assert ("loss:sum" in answer) == (version is not None)
    assert f"requests 1 to {last - 1} never came" in step(api, last + 1)["error"]


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("fate", ["lost", "refused", "damaged", "failed"])
def test_a_part_of_a_batch_is_not_applied(api: Api, chunk: int, fate: str) -> None:
    """Three chunks and the step, sent without waiting for a result, as the SDK's documentation
    does. Whichever of them never comes, is refused before it reaches the workers (a loss), fails
    there before it has changed anything (an image) or breaks: the step is refused, once."""

    async def fail(id: str, command: dict[str, Any]) -> Any:
        if id.endswith(f"/{chunk}") and fate in ("damaged", "failed"):
            raise {"damaged": Refused, "failed": Failed}[fate]("datum 0: image: damaged")
        return await workers(id, command)

    api.open("0.38.0")
    api.service.operations.call = fail
    for seq in (1, 2, 3):
        if fate != "lost" or seq != chunk:
            send_pass(
                api, seq, loss="nonsense" if (fate, seq) == ("refused", chunk) else "cross_entropy"
            )
    error = step(api, 4)["error"]
    reason = "never came" if fate == "lost" else "failed: "
    assert f"optim_step rejected: request {chunk} {reason}" in error
    assert "loss:sum" in run_pass(api, 5) and "metrics" in step(api, 6)


def test_a_forward_pass_that_fails_leaves_the_batch_whole(api: Api) -> None:
    assert "loss:sum" in run_pass(api, 1)
    assert "nonsense" in run_pass(api, 2, loss="nonsense", forward_only=True)
    assert "metrics" in step(api, 3)


def test_a_step_with_other_settings_does_not_forget(api: Api) -> None:
    """One that is refused for its own settings has discarded nothing; a load has."""
    assert "nonsense" in run_pass(api, 1, loss="nonsense")
    refuse(api, "optim_step", {"model_id": api.model, "seq_id": 2, "adam_params": {"eps": 0.0}})
    sent = {"model_id": api.model, "seq_id": 3, "path": "a"}
    path = api.post("retrieve_future", api.post("save_weights", sent))["path"]
    assert "unknown loss_fn 'nonsense'" in step(api, 4)["error"]
    assert "nonsense" in run_pass(api, 5, loss="nonsense")
    load = {"model_id": api.model, "seq_id": 6, "path": path, "optimizer": True}
    assert "path" in api.post("retrieve_future", api.post("load_weights", load))
    assert "metrics" in step(api, 7)


def test_requests_of_other_clients_may_arrive_in_any_order(api: Api) -> None:
    """They fail behind a number that never comes: their client may count on it."""
    assert "loss:sum" in run_pass(api, 1)
    error = step(api, 3)["error"]
    assert error == f"request 2 of {api.model}, which precedes this one, never came"
    assert "request 2 never came" in step(api, 4)["error"], "which may have been of the batch"
    assert "metrics" in step(api, 5)


def test_inflight_weights_have_no_name(api: Api) -> None:
    sent = {"model_id": api.model, "seq_id": 1, "path": "a", "kind": "inflight"}
    answer = api.post("retrieve_future", api.post("save_weights_for_sampler", sent))
    assert "a path names a snapshot" in answer["error"]
    assert "metrics" in step(api, 2)


def test_a_shared_snapshot_stays_until_its_last_session(api: Api) -> None:
    """Two inflight sessions of a model use one folder."""
    folders = []
    for seq in (1, 2):
        sent = {"model_id": api.model, "seq_id": seq, "sampling_session_seq_id": seq, "kind": "inflight"}  # fmt: skip
        answer = api.post("retrieve_future", api.post("save_weights_for_sampler", sent))
        folders.append(Path(api.service.registry.samplers[answer["sampling_session_id"]].folder))
    samplers = list(api.service.registry.samplers.values())
    assert {Path(s.folder) for s in samplers} == {folders[1]} and not folders[0].exists()
    api.service.operations.drop_sampler(samplers[1])
    assert folders[1].exists()
    api.service.operations.drop_sampler(samplers[0])
    assert not folders[1].exists()
