"""Samples of several sampling sessions in one command to the workers: which share one, whose error
it is, and whose answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.engines.base import GenerateOutput
from slime_like.tinker import sglang_sampler
from slime_like.tinker.base_model import BaseModel
from slime_like.tinker.errors import Failed, Refused
from slime_like.tinker.sampler import SampleCommand
from slime_like.tinker.sglang_sampler import SglangSampler
from slime_like.tinker.worker import ModelWorker
from slime_like.tinker.worker_rpc import value_of
from tests.api_in_process import Api, workers

ANY = {"max_tokens": 1}


class Held:
    """Workers that answer nothing until they are let go, and note every sampling command."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.commands: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.bad = ""  # folder of an adapter that fails
        self.gone_after: int | None = None  # sampling commands; then the engine's servers are gone

    async def __call__(self, id: str, command: dict[str, Any]) -> Any:
        await self.go.wait()
        if command["op"] == "sample":
            self.commands.append(command)
            self.ids.append(id)
            if self.gone_after is not None and len(self.commands) > self.gone_after:
                raise Failed("no engine is left", common=True)
            if self.bad and self.bad in command["adapters"]:
                raise Refused(f"the snapshot {self.bad} is gone")
        return await workers(id, command)

    @property
    def adapters(self) -> list[list[str]]:
        return [command["adapters"] for command in self.commands]


@pytest.fixture
def unmerged(tmp_path: Path) -> Iterator[Api]:
    made = Api(tmp_path, max_adapters=2)
    made.open()
    yield made
    made.close()


def samplers_of(api: Api, ranks: list[int], *, first: int = 2) -> list[str]:
    """A sampling session of each new model."""
    found = []
    for number, rank in enumerate(ranks, first):
        model = api.create(number, rank)
        body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": number}
        saved = api.post("retrieve_future", api.post("save_weights_for_sampler", body))
        found.append(str(saved["sampling_session_id"]))
    return found


def hold(api: Api) -> Held:
    """Workers that are busy with something else."""
    held = Held()
    api.service.operations.call = held
    api.post("optim_step", {"model_id": api.bystander, "seq_id": 1, "adam_params": {}})
    return held


def ask(api: Api, sampler: str, seq: int = 1, **changes: Any) -> Any:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    body = {"prompt": prompt, "num_samples": 1, "sampling_params": ANY, **changes}
    return api.post("asample", {**body, "sampling_session_id": sampler, "seq_id": seq})


def answer(api: Api, future: Any) -> Any:
    """JSON of an error; None for samples."""
    body = b'{"request_id": "%s"}' % future["request_id"].encode()
    found = api.send("retrieve_future", body, {"Accept": "application/x-protobuf"})
    return found.json() if "json" in found.headers["content-type"] else None


def folders(api: Api, samplers: list[str]) -> list[str]:
    return [api.service.registry.samplers[sampler].folder for sampler in samplers]


def test_adapters_share_a_command_up_to_their_limit(unmerged: Api) -> None:
    """And with samples of the base model; those with other settings, and of whole weights, do
    not."""
    (whole,) = samplers_of(unmerged, [0])
    samplers = samplers_of(unmerged, [4, 4, 8], first=3)
    body = {"session_id": unmerged.session, "sampling_session_seq_id": 9, "base_model": "m"}
    base = unmerged.post("create_sampling_session", body)["sampling_session_id"]
    held = hold(unmerged)
    futures = [ask(unmerged, sampler) for sampler in (*samplers, base, whole)]
    futures += [ask(unmerged, samplers[0], 2, sampling_params={**ANY, "temperature": 0.5})]
    held.go.set()
    assert [answer(unmerged, future) for future in futures] == [None] * 6
    one, two, three = folders(unmerged, samplers)
    found = sorted((c["folder"], sorted(c["adapters"])) for c in held.commands)
    merged = folders(unmerged, [whole])[0]
    assert found == sorted([("/m", ["", one, two]), ("/m", [three]), ("/m", [one]), (merged, [])])


def test_merged_weights_are_sampled_alone(tmp_path: Path) -> None:
    """But sessions of the same weights together, here of the base model."""
    api = Api(tmp_path)
    api.open()
    samplers = samplers_of(api, [4, 4])
    body = {"session_id": api.session, "base_model": "m"}
    bases = [
        api.post("create_sampling_session", {**body, "sampling_session_seq_id": 7 + i})
        for i in range(2)
    ]
    held = hold(api)
    futures = [ask(api, each) for each in samplers]
    futures += [ask(api, each["sampling_session_id"]) for each in bases]
    held.go.set()
    assert [answer(api, future) for future in futures] == [None] * 4
    found = sorted((c["folder"], len(c["prompts"])) for c in held.commands)
    assert found == sorted([("/m", 2), *((folder, 1) for folder in folders(api, samplers))])
    assert held.adapters == [[]] * 3
    api.close()


def test_an_adapter_that_fails_is_no_error_of_others(unmerged: Api) -> None:
    """Samples have no side effects: they are executed again, each session's alone."""
    good, bad = samplers_of(unmerged, [4, 4])
    held = hold(unmerged)
    (held.bad,) = folders(unmerged, [bad])
    futures = [ask(unmerged, good), ask(unmerged, bad), ask(unmerged, good, 2)]
    held.go.set()
    first, second, third = (answer(unmerged, future) for future in futures)
    assert first is None and third is None
    assert second == {"error": f"the snapshot {held.bad} is gone", "category": "user"}
    assert [len(adapters) for adapters in held.adapters] == [3, 2, 1]


@pytest.mark.parametrize("gone_after", [0, 1, 2])
def test_a_fault_of_the_servers_is_everybodys_at_once(
    unmerged: Api, gone_after: int, caplog: pytest.LogCaptureFixture
) -> None:
    """And is said once: nobody's samples are tried again on servers that are gone, be it while the
    sessions of a batch are executed alone because of another error."""
    samplers = samplers_of(unmerged, [4, 4])
    base = {"session_id": unmerged.session, "sampling_session_seq_id": 9, "base_model": "m"}
    samplers.append(unmerged.post("create_sampling_session", base)["sampling_session_id"])
    held = hold(unmerged)
    held.gone_after = gone_after
    (held.bad,) = folders(
        unmerged, samplers[1:2]
    )  # the batch fails for this, unless for the servers
    futures = [ask(unmerged, sampler) for sampler in samplers]
    with caplog.at_level("WARNING"):
        held.go.set()
        found = [answer(unmerged, future) for future in futures]
    fault = {"error": "no engine is left", "category": "server"}
    assert found.count(fault) == (3, 3, 2)[gone_after]
    assert len(held.commands) == gone_after + 1
    said = [record for record in caplog.records if "no engine is left" in record.message]
    assert len(said) == 1


class ServersOfOne:
    """An engine of servers that samples, except for prompts with a bad adapter."""

    pool = None
    takes_adapter = True
    weight_version = 0

    def __init__(self) -> None:
        self.bad = ""
        self.version = 1  # of its samples
        self.calls = 0

    def check_health(self) -> None:
        pass

    def update_weights(self, shapes: Any, version: int) -> None:
        self.weight_version = version

    def generate(self, requests: Any, sampling: Any) -> list[GenerateOutput]:
        self.calls += 1
        return [
            GenerateOutput(request.sample_id, (), (), "abort", (), failure="status 400: no")
            if request.adapter == self.bad
            else GenerateOutput(request.sample_id, (7,), (-0.5,), "stop", (self.version,))
            for request in requests
        ]

    # of adapters: each has its folder for a name
    def hold(self, folders: list[str]) -> dict[str, str]:
        return {folder: folder for folder in folders}

    def forget(self) -> None:
        pass


@pytest.mark.parametrize("fault", ["one sample", "all versions"])
def test_an_aborted_sample_on_servers_is_no_error_of_others(
    unmerged: Api, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Of `SglangSampler`, by way of the workers' loop. Servers with wrong weights are a fault for
    everybody."""
    monkeypatch.setattr(sglang_sampler, "is_tied", lambda folder: True)
    monkeypatch.setattr(sglang_sampler, "meta_weights", lambda folder: {})
    good, bad = samplers_of(unmerged, [4, 4])
    engine: Any = ServersOfOne()
    sampler = SglangSampler(engine, None, None, "/m", engine)  # type: ignore[arg-type]

    def execute(command: dict[str, Any]) -> Any:
        named = {name: value for name, value in command.items() if name not in ("op", "folder")}
        return sampler.sample(command["folder"], SampleCommand.from_plain(**named))

    layout = SimpleNamespace(rank=0, world_size=1)
    host = SimpleNamespace(execute=execute, stage=0)
    worker = ModelWorker(host, layout)  # type: ignore[arg-type]
    held = hold(unmerged)

    async def call(id: str, command: dict[str, Any]) -> Any:
        if command["op"] != "sample":
            return await held(id, command)
        return value_of(worker.execute(command))

    unmerged.service.operations.call = call
    (engine.bad,) = folders(unmerged, [bad])
    engine.version = 1 if fault == "one sample" else 9
    futures = [ask(unmerged, good), ask(unmerged, bad), ask(unmerged, good, 2)]
    held.go.set()
    first, second, third = (answer(unmerged, future) for future in futures)
    if fault == "one sample":
        assert first is None and third is None
        aborted = "a sample was aborted: status 400: no"
        assert second == {"error": aborted, "category": "server"}
    else:
        assert first == third and "version {9}, not 1" in first["error"]


def test_samples_that_nobody_waits_for_are_not_drawn(unmerged: Api) -> None:
    """A client may cancel its own, as long as they wait; nothing else changes."""
    sampler, other = samplers_of(unmerged, [4, 4])
    held = hold(unmerged)
    futures = [ask(unmerged, sampler), ask(unmerged, other), ask(unmerged, sampler, 2)]
    ids = [{"request_id": future["request_id"]} for future in futures]
    assert unmerged.post("cancel_future", ids[0]) == {}
    step = {"request_id": f"{unmerged.bystander}/1"}  # is being executed
    assert unmerged.post("cancel_future", step) == {}
    unknown = unmerged.send("cancel_future", b'{"request_id": "x/1"}', {})
    assert unknown.status_code == 404
    held.go.set()
    cancelled = {"error": "cancelled by its client", "category": "user"}
    assert [answer(unmerged, future) for future in futures] == [cancelled, None, None]
    assert "metrics" in unmerged.post("retrieve_future", step)
    assert [len(command["prompts"]) for command in held.commands] == [2]
    assert unmerged.post("cancel_future", ids[1]) == {}, "it is done"
    assert answer(unmerged, futures[1]) is None


def test_the_last_answer_before_a_restart_is_of_the_whole_batch(unmerged: Api) -> None:
    """Workers keep it under the command's id for an API process that starts again, whose batches may
    be others that begin with the same request."""
    one, other = samplers_of(unmerged, [4, 4])
    held = hold(unmerged)
    futures = [ask(unmerged, one), ask(unmerged, other), ask(unmerged, one, 2)]
    held.go.set()
    assert [answer(unmerged, future) for future in futures] == [None] * 3
    (id,) = held.ids
    assert sorted(id.split()) == sorted([f"{one}/1", f"{other}/1", f"{one}/2"])


def test_a_checkpoint_remembers_how_it_was_saved(unmerged: Api) -> None:
    """Named sampler checkpoints too; external ones are whole Hugging Face models always."""
    model = unmerged.create(2, 4)
    seen: list[tuple[str, str]] = []

    async def note(id: str, command: dict[str, Any]) -> Any:
        seen.append((command["op"], command.get("folder", "")))
        return await workers(id, command)

    unmerged.service.operations.call = note
    paths = []
    for seq, route in enumerate(("save_weights_for_sampler", "save_weights_external"), 1):
        body = {"model_id": model, "seq_id": seq, "path": f"end{seq}"}
        paths.append(unmerged.post("retrieve_future", unmerged.post(route, body))["path"])
    assert [op for op, _ in seen] == ["export_adapter", "export"]
    checkpoints = [unmerged.service.registry.checkpoints[path] for path in paths]
    assert [checkpoint.adapter for checkpoint in checkpoints] == [True, False]
    body = {"session_id": unmerged.session, "sampling_session_seq_id": 5, "model_path": paths[0]}
    sampler = unmerged.post("create_sampling_session", body)["sampling_session_id"]
    ask_first = ask(unmerged, sampler)
    assert answer(unmerged, ask_first) is None
    assert unmerged.service.registry.samplers[sampler].adapter
    unmerged.service.base = BaseModel("/m", "m", "Arch", no_unmerged="which X")
    body = {"session_id": unmerged.session, "sampling_session_seq_id": 6, "model_path": paths[0]}
    refused = unmerged.send("create_sampling_session", json.dumps(body).encode(), {})
    assert refused.status_code == 422 and "is an adapter which X" in refused.text


def test_whole_weights_that_servers_do_not_take(unmerged: Api) -> None:
    """Refused where they would be saved for sampling; saved as a model of its own they are."""
    unmerged.service.base = BaseModel("/m", "m", "Arch", no_whole="train an adapter")
    body = {"model_id": unmerged.model, "seq_id": 1, "path": "end"}
    refused = unmerged.post("retrieve_future", unmerged.post("save_weights_for_sampler", body))
    assert refused == {"error": "train an adapter", "category": "user"}
    body = {"model_id": unmerged.model, "seq_id": 2, "path": "end"}
    saved = unmerged.post("retrieve_future", unmerged.post("save_weights_external", body))
    assert saved["path"].endswith("end")
