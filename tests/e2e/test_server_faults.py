"""What becomes of a server whose processes, disk or memory fail, as its clients see it."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from tinker.proto import tinker_public_pb2 as pb

from tests.e2e.api_server import ApiServer, batch, datum
from tests.e2e.test_server_order import Raw
from tests.paths import ROOT


def health(server: ApiServer) -> tuple[int, str]:
    answer = httpx.get(f"{server.url}/api/v1/healthz", timeout=300)
    return answer.status_code, answer.text


def wait_for(raw: Raw, id: str) -> Any:
    """The result of a request, however often one has to ask."""
    while isinstance(result := raw.wait(id), dict) and result.get("type") == "try_again":
        pass
    return result


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_processes_and_folder(work: Any, tmp_path: Path) -> None:
    """A locked journal is waited for and health says so; a second server on the folder is refused;
    when both processes were killed waiting requests name the checkpoint; a server that is started
    with another command line is not the old one."""
    with ApiServer(work.model, tmp_path) as server:
        raw = Raw(server)
        model = raw.create(0)
        saved = raw.post("save_weights", {"model_id": model, "seq_id": 1, "path": "good"})
        path = wait_for(raw, saved["request_id"])["path"]
        assert health(server)[0] == 200

        second = subprocess.run(
            [*server.process.args, "--server-dir", str(tmp_path / "server"), "--port", "1"],  # type: ignore[misc,index]
            capture_output=True, text=True, timeout=600, cwd=ROOT,
        )  # fmt: skip
        assert second.returncode == 1 and "in use by process" in second.stderr

        other = sqlite3.connect(tmp_path / "server" / "journal.sqlite", isolation_level=None)
        other.execute("begin immediate")
        body = raw.pass_body(model, 2, batch(2))
        refused = raw.http.post("forward_backward", content=body)
        assert refused.status_code == 503 and "journal" in refused.json()["detail"]
        assert health(server)[0] == 503 and "locked" in health(server)[1]
        other.execute("rollback")
        other.close()
        deadline = time.monotonic() + 300
        while raw.http.post("forward_backward", content=body).status_code != 200:
            assert time.monotonic() < deadline, health(server)
            time.sleep(0.1)
        assert wait_for(raw, f"{model}/2").metrics["loss:sum"] and health(server)[0] == 200

        server.process.send_signal(signal.SIGSTOP)  # the request is not answered any more
        assert (
            raw.http.post("forward_backward", content=raw.pass_body(model, 3, batch(2))).status_code
            == 200
        )
        api = psutil.Process(server.api_pid)
        api.kill()  # first, so that nobody answers the request before the restart
        server.process.kill()
        server.process.wait(timeout=300)
        api.wait(timeout=300)  # a child of the stopped process until now
        server.start()
        raw.http = server.http()
        failure = wait_for(raw, f"{model}/3")
        assert failure["category"] == "server" and path in failure["error"], failure
        assert "KeyError" not in failure["error"]

        before = server.api_pid
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(timeout=300)
        (tmp_path / "keys").write_text("tml-a-key-of-the-tests\n")
        server.flags = ("--api-key-file", str(tmp_path / "keys"))
        server.start()
        assert server.api_pid != before, "the old command line is served"
        assert raw.http.get("sessions").status_code == 401
        assert "Traceback" not in server.log(), server.log()


def exhausted(server: ApiServer, raw: Raw, model: str, seq: int, *, forward_only: bool) -> Any:
    """The answer to a large batch while the workers may not have any more memory."""
    pid = server.process.pid
    rows = [datum(200, seed, weights=np.ones(200)) for seed in range(80)]
    message = pb.ForwardBackwardRequest.FromString(raw.pass_body(model, seq, rows))
    message.forward_only = forward_only
    limit = psutil.Process(pid).memory_info().vms + 8 * 2**20
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        return wait_for(raw, raw.send_pass(message.SerializeToString()))
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_and_numbers(work: Any, tmp_path: Path) -> None:
    """Out of memory costs the request, at most the gradients since the last step, and no weights;
    numbers that overflow float32 are refused, by themselves or together."""
    with ApiServer(work.model, tmp_path) as server:
        raw = Raw(server)
        model, plain = raw.create(0), raw.create(1)
        for one in (model, plain):
            raw.send_pass(raw.pass_body(one, 1, batch(3)))
        failure = exhausted(server, raw, model, 2, forward_only=True)
        assert failure["category"] == "server" and "out of memory" in failure["error"], failure
        for one, seq in ((model, 3), (plain, 2)):
            assert "metrics" in wait_for(raw, raw.step(one, seq))
        losses = [
            wait_for(raw, raw.send_pass(raw.pass_body(one, seq, batch(2)))).metrics["loss:sum"]
            for one, seq in ((model, 4), (plain, 3))
        ]
        assert losses[0] == losses[1], "a forward pass that failed has changed the gradients"

        failure = exhausted(server, raw, model, 5, forward_only=False)
        assert "out of memory" in failure["error"], failure
        assert "send the batches again" in raw.refused(raw.step(model, 6))
        for one, first in ((model, 7), (plain, 4)):
            raw.send_pass(raw.pass_body(one, first, batch(2)))
        raw.step(model, 8)
        assert "metrics" in wait_for(raw, f"{model}/8")

        unfit: list[dict[str, float]] = [
            {"learning_rate": 1e38},
            {"eps": 0.0},
            {"weight_decay": 1e30},
        ]
        for seq, adam in enumerate(unfit, start=9):
            body = {"model_id": model, "seq_id": seq, "adam_params": adam}
            assert raw.http.post("optim_step", json=body).status_code == 422
        huge = [datum(4, 1, weights=np.full(4, 1e17))]
        wait_for(raw, raw.send_pass(raw.pass_body(model, 12, huge)))
        overflows = raw.refused(
            raw.step(model, 13, learning_rate=1e3, eps=1e-18, beta1=0.0, beta2=0.0)
        )
        assert "a weight may overflow" in overflows
        saved = raw.post("save_weights", {"model_id": model, "seq_id": 14, "path": "good"})
        assert "path" in wait_for(raw, saved["request_id"]), "and is as it was"
