"""Every public method of the SDK's clients, called once against the server: what works, and what is
refused with which message. A method that a new SDK brings is in neither, and fails."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import tinker
import torch
from tinker import types

from tests.e2e.api_server import KEY, ApiServer, batch, policy
from tests.e2e.helpers import Workspace
from tests.paths import ROOT

pytestmark = pytest.mark.extended

PARAMS = types.SamplingParams(max_tokens=2, seed=1)
PROMPT = types.ModelInput.from_ints([10, 20, 30])
UNSUPPORTED = "is not supported"


class Calls:
    """Clients of all kinds, and a call of each of their methods by its name.

    `works`: what the call must return, as a predicate; `refused`: the message of its error.
    """

    def __init__(self, api: ApiServer) -> None:
        self.url = api.url
        self.log = api.folder / "server" / "server.log"
        self.service = api.client()
        self.training = policy(self.service, api)
        self.rest = self.service.create_rest_client()
        self.admin = tinker.AdminClient(base_url=api.url, api_key=KEY)
        self.state = self.training.save_state("state").result().path
        self.external = self.training.save_weights_external("external").result().path
        self.sampler_path = self.training.save_weights_for_sampler("sampler").result().path
        self.sampling = self.service.create_sampling_client(base_model=str(api.model)).result()
        self.handle = self.sampling.get_sampler_handle()
        self.session = self.service.holder.get_session_id()
        self.model = str(api.model)

    def with_project(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=KEY, project_id="project")

    def named(self, name: str) -> str:
        """The path of a new checkpoint."""
        return str(self.training.save_state(name).result().path)

    @property
    def sampler_id(self) -> str:
        return str(self.rest.get_session(self.session).result().sampler_ids[0])


def loss(logprobs: torch.Tensor, weights: torch.Tensor) -> Any:
    return -(logprobs * weights).sum(), {}


def client_loss(data: Any, logprobs: Any) -> Any:
    return -torch.cat(logprobs).sum(), {}


SERVICE: dict[str, Callable[[Calls], object]] = {
    "get_console_url": lambda c: c.service.get_console_url(),
    "get_server_capabilities": lambda c: c.service.get_server_capabilities().supported_models,
    "create_lora_training_client": lambda c: c.service.create_lora_training_client(c.model, rank=4).result(),
    "create_training_client_from_state": lambda c: c.service.create_training_client_from_state(c.state).result(),
    "create_training_client_from_state_with_optimizer": lambda c: (
        c.service.create_training_client_from_state_with_optimizer(c.state).result()
    ),
    "create_sampling_client": lambda c: c.service.create_sampling_client(c.sampler_path).result(),
    "create_custom_loss": lambda c: c.service.create_custom_loss(loss, {"logprobs": 1, "weights": 1}).result(),
    "create_rest_client": lambda c: c.service.create_rest_client(),
    "get_telemetry": lambda c: c.service.get_telemetry() or "off",
    "close": lambda c: c.with_project().close("success").result() or "closed",
}  # fmt: skip
TRAINING: dict[str, Callable[[Calls], object]] = {
    "get_console_url": lambda c: c.training.get_console_url(),
    "forward": lambda c: c.training.forward(batch(2), "cross_entropy").result(),
    "forward_backward": lambda c: c.training.forward_backward(batch(2), "cross_entropy").result(),
    "forward_backward_custom": lambda c: c.training.forward_backward_custom(batch(2), client_loss).result(),
    "optim_step": lambda c: c.training.optim_step(types.AdamParams()).result(),
    "save_state": lambda c: c.named("of_save_state"),
    "load_state": lambda c: c.training.load_state(c.state).result(),
    "load_state_with_optimizer": lambda c: c.training.load_state_with_optimizer(c.state).result(),
    "save_weights_for_sampler": lambda c: c.training.save_weights_for_sampler("of_sampler").result().path,
    "save_weights_external": lambda c: c.training.save_weights_external("of_external").result().path,
    "get_info": lambda c: c.training.get_info().model_data,
    "get_tokenizer": lambda c: c.training.get_tokenizer(),
    "create_sampling_client": lambda c: c.training.create_sampling_client(c.sampler_path).result(),
    "save_weights_and_get_sampling_client": lambda c: c.training.save_weights_and_get_sampling_client().result(),
    "get_telemetry": lambda c: c.training.get_telemetry() or "off",
}  # fmt: skip
SAMPLING: dict[str, Callable[[Calls], object]] = {
    "sample": lambda c: c.sampling.sample(PROMPT, 1, PARAMS).result().sequences,
    "compute_logprobs": lambda c: c.sampling.compute_logprobs(PROMPT).result(),
    "get_tokenizer": lambda c: c.sampling.get_tokenizer(),
    "get_base_model": lambda c: c.sampling.get_base_model(),
    "get_telemetry": lambda c: c.sampling.get_telemetry() or "off",
    "get_sampler_handle": lambda c: c.sampling.get_sampler_handle(),
    "from_sampler_handle": lambda c: (
        tinker.SamplingClient.from_sampler_handle(c.handle, api_key=KEY).sample(PROMPT, 1, PARAMS).result()
    ),
    "create": lambda c: tinker.SamplingClient.create,  # internal: of the SDK's own holder
    "on_queue_state_change": lambda c: c.sampling.on_queue_state_change,  # the SDK calls it itself
}  # fmt: skip
REST: dict[str, Callable[[Calls], object]] = {
    "get_telemetry": lambda c: c.rest.get_telemetry() or "off",
    "get_server_capabilities": lambda c: c.rest.get_server_capabilities().result().supported_models,
    "get_training_run": lambda c: c.rest.get_training_run(c.training.model_id).result(),
    "get_training_run_by_tinker_path": lambda c: c.rest.get_training_run_by_tinker_path(c.state).result(),
    "get_weights_info_by_tinker_path": lambda c: c.rest.get_weights_info_by_tinker_path(c.state).result(),
    "list_training_runs": lambda c: c.rest.list_training_runs().result().training_runs,
    "list_checkpoints": lambda c: c.rest.list_checkpoints(c.training.model_id).result().checkpoints,
    "get_external_weights_urls": lambda c: c.rest.get_external_weights_urls(c.external).result(),
    "delete_checkpoint": lambda c: str(c.rest.delete_checkpoint(
        c.training.model_id, c.named("deleted").split("/", 3)[3]
    ).result()),
    "delete_checkpoint_from_tinker_path": lambda c: str(
        c.rest.delete_checkpoint_from_tinker_path(c.named("deleted")).result()
    ),
    "set_checkpoint_ttl_from_tinker_path": lambda c: str(
        c.rest.set_checkpoint_ttl_from_tinker_path(c.state, 3600).result()
    ),
    "list_user_checkpoints": lambda c: c.rest.list_user_checkpoints().result().checkpoints,
    "get_session": lambda c: c.rest.get_session(c.session).result().training_run_ids,
    "list_sessions": lambda c: c.rest.list_sessions().result().sessions,
    "get_sampler": lambda c: c.rest.get_sampler(c.sampler_id).result().base_model,
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[Calls], object], str]] = {
    "ServiceClient.copy_weights": (
        lambda c: c.with_project().copy_weights(c.state).result(),
        "POST /api/v1/copy_weights is not supported",
    ),
    "RestClient.copy_weights": (
        lambda c: c.rest.copy_weights(c.state, "project").result(),
        "POST /api/v1/copy_weights is not supported",
    ),
    "RestClient.publish_checkpoint_from_tinker_path": (
        lambda c: c.rest.publish_checkpoint_from_tinker_path(c.state).result(),
        "/publish is not supported",
    ),
    "RestClient.unpublish_checkpoint_from_tinker_path": (
        lambda c: c.rest.unpublish_checkpoint_from_tinker_path(c.state).result(),
        "checkpoints cannot be published",
    ),
    "RestClient.assign_session_project": (
        lambda c: c.rest.assign_session_project(c.session, "project").result(),
        "/project is not supported",
    ),
    "RestClient.export_session_trace": (
        lambda c: c.rest.export_session_trace(c.session).result(),
        "/trace_export is not supported",
    ),
    "RestClient.whoami": (lambda c: c.rest.whoami().result(), "requires JWT auth"),
    "RestClient.search_sessions": (
        lambda c: c.rest.search_sessions(types.SessionSearchRequest()).result(),
        "POST /api/v1/sessions/search is not supported",
    ),
    "AdminClient.get_audit_log": (
        lambda c: c.admin.get_audit_log().result(),
        "GET /api/v1/audit is not supported",
    ),
    "AdminClient.get_billing_usage": (
        lambda c: c.admin.get_billing_usage("2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z").result(),
        "GET /api/v1/billing/usage/events is not supported",
    ),
    "AdminClient.get_current_checkpoint_storage_usage": (
        lambda c: c.admin.get_current_checkpoint_storage_usage().result(),
        "GET /api/v1/billing/usage/checkpoints/current is not supported",
    ),
}  # fmt: skip
WORKS = {
    f"{client}.{name}": call
    for client, calls in (
        ("ServiceClient", SERVICE),
        ("TrainingClient", TRAINING),
        ("SamplingClient", SAMPLING),
        ("RestClient", REST),
        ("AdminClient", {"get_telemetry": lambda c: c.admin.get_telemetry() or "off"}),
    )
    for name, call in calls.items()
}
# deprecated in favour of `AdminClient`'s, which they call
MOVED = {
    f"RestClient.{name}"
    for name in ("get_audit_log", "get_billing_usage", "get_current_checkpoint_storage_usage")
}
IMAGE = types.ImageChunk(data=b"png", format="png", expected_tokens=4)
POINTER = types.ImageAssetPointerChunk(format="png", location="a.png", expected_tokens=4)


def seen(chunk: Any) -> types.ModelInput:
    return types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[5]), chunk])


def image_datum() -> types.Datum:
    return types.Datum(model_input=seen(IMAGE), loss_fn_inputs={"target_tokens": [1] * 5})


# what the SDK's types offer and the server does not
REFUSED_INPUTS: dict[str, tuple[Callable[[Calls], object], str]] = {
    "Dimuon's step": (
        lambda c: c.training.optim_step(types.DimuonParams(learning_rate=0.1)).result(),
        "optimizer 'dimuon' is not supported, must be adamw",
    ),
    "Dimuon's model": (
        lambda c: c.service.create_lora_training_client(
            c.model, optimizer=types.DimuonOptimizerConfig()
        ).result(),
        "dimuon",
    ),
    "an image in a datum": (
        lambda c: c.training.forward_backward([image_datum()], "cross_entropy").result(),
        "datum 0: a chunk of kind image; only encoded_text is supported; images need a server with --serve-images",
    ),
    "an image in a prompt": (
        lambda c: c.sampling.sample(seen(IMAGE), 1, PARAMS).result(),
        "prompt: a chunk of kind image; only encoded_text is supported; images need a server with --serve-images",
    ),
    "an image by its address": (
        lambda c: c.sampling.sample(seen(POINTER), 1, PARAMS).result(),
        "prompt: a chunk of kind image_asset_pointer; only encoded_text is supported",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def calls(work: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calls]:
    with ApiServer(work.model, tmp_path_factory.mktemp("sdk"), "--max-models", "20") as api:
        yield Calls(api)


def test_every_method_of_the_sdk_is_here() -> None:
    clients = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient, tinker.AdminClient)  # fmt: skip
    methods = {
        f"{client.__name__}.{name.removesuffix('_async')}"
        for client in clients
        for name, member in inspect.getmembers(client, callable)
        if not name.startswith("_")
    }
    assert methods == WORKS.keys() | REFUSED.keys() | MOVED


@pytest.mark.parametrize("method", WORKS)
def test_it_works(calls: Calls, method: str) -> None:
    assert WORKS[method](calls)


@pytest.mark.parametrize("method", REFUSED)
def test_it_is_refused_by_name(calls: Calls, method: str) -> None:
    call, message = REFUSED[method]
    with pytest.raises((tinker.APIStatusError, RuntimeError), match=message):
        call(calls)


@pytest.mark.parametrize("what", REFUSED_INPUTS)
def test_an_input_is_refused_by_name(calls: Calls, what: str) -> None:
    """And the clients go on."""
    call, message = REFUSED_INPUTS[what]
    with pytest.raises(tinker.RequestFailedError, match=message):
        call(calls)
    calls.training.forward_backward(batch(1), "cross_entropy").result(timeout=60)


def test_an_abandoned_sample_is_not_drawn(calls: Calls) -> None:
    """Where it waits behind others: the SDK tells the server."""

    def settings(tokens: int, temperature: float) -> types.SamplingParams:
        return types.SamplingParams(max_tokens=tokens, temperature=temperature, stop=[])

    def accepted() -> int:
        """Samples but for those that are being drawn."""
        text = httpx.get(f"{calls.url}/metrics", headers={"X-API-Key": KEY}).text
        done = re.findall(r'slime_like_tinker_requests_total{op="sample",.*} (.*)', text)
        waiting = re.findall(r"slime_like_tinker_waiting_requests ([0-9].*)", text)
        return int(sum(map(float, done + waiting)))

    before = accepted()
    busy = [calls.sampling.sample(PROMPT, 200, settings(300, 1 + t / 8)) for t in range(4)]
    wait_for(lambda: accepted() == before + 3)
    abandoned = calls.sampling.sample(PROMPT, 1, settings(3, 0.5)).future()
    wait_for(lambda: accepted() == before + 4)
    failed = calls.log.read_text().count("failed (user)")
    assert abandoned.cancel()
    wait_for(lambda: calls.log.read_text().count("failed (user)") > failed)
    assert [len(each.result().sequences) for each in busy] == [200] * 4
    assert calls.sampling.sample(PROMPT, 1, settings(3, 0.5)).result().sequences


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_page_has_every_method() -> None:
    pages = [(ROOT / "docs" / language / "server.md").read_text() for language in ("en", "zh")]
    for method in REFUSED:
        name = method.partition(".")[2]
        assert all(f"`{name}`" in page for page in pages), name
