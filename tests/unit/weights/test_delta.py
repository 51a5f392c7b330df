"""Weight updates of what changed: they give the bytes of a full one, whatever fails in between."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slime_like.checkpoints.files import replace_file
from slime_like.engines.sglang.engine import SglangEngine
from slime_like.errors import RunError
from slime_like.weights import delta, delta_follow
from slime_like.weights.buckets import as_buckets, as_bytes
from slime_like.weights.delta_follow import COPIES, CopyStatus, copy_for, follow
from slime_like.weights.delta_local import LocalCheckpoint
from slime_like.weights.delta_updates import (
    Publication,
    Update,
    changes_path,
    forget,
    full_path,
    remove_update,
    updates_in,
)
from slime_like.weights.safetensors_reader import WeightFiles
from tests.fake_sglang import FakeServer, engine_of, make_served_model, weights_of

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_served_model(tmp_path_factory.mktemp("model"), seed=0)


def in_bf16(model: str) -> Weights:
    return {name: tensor.bfloat16() for name, tensor in weights_of(model)}


def stepped(weights: Weights, generator: torch.Generator, share: float = 0.02) -> Weights:
    """A few elements of each at the next numbers, as after an optimizer step."""
    found = {}
    for name, tensor in weights.items():
        bits = tensor.clone().view(torch.int16)
        moved = torch.rand(bits.shape, generator=generator) < share
        bits[moved] += torch.randint(-2, 3, bits.shape, generator=generator).short()[moved]
        found[name] = bits.view(torch.bfloat16)
    return found


def same(found: Weights, wanted: Weights) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype
        and torch.equal(as_bytes(found[name]), as_bytes(wanted[name]))
        for name in wanted
    )


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
def test_a_change_gives_the_new_bytes(
    monkeypatch: pytest.MonkeyPatch, itemsize: int, share: float
) -> None:
    monkeypatch.setattr(delta, "PIECE", 1000)
    generator = torch.Generator().manual_seed(0)
    for count in (0, 1, 999, 1000, 1001, 5003):
        before = torch.randint(0, 256, (count * itemsize,), generator=generator).byte()
        after = before.clone()
        moved = torch.rand(count, generator=generator) < share
        moved[-1:] |= share > 0
        after.view(-1, itemsize)[moved, 0] += 1
        change = delta.encode(before, after, itemsize)
        assert (change is None) == torch.equal(before, after)
        if change is not None:
            with pytest.raises(ValueError):
                delta.apply(change[: len(change) // 2], before.clone(), itemsize)
            with pytest.raises(ValueError):
                delta.apply(b"no" + change, before.clone(), itemsize)
            delta.apply(change, before, itemsize)
        assert torch.equal(before, after)


class Trainer:
    """One that writes updates, of which each changes a few weights."""

    def __init__(self, model: str, root: Path, run: str = "run") -> None:
        self.model, self.root, self.run = model, str(root), run
        self.weights = in_bf16(model)
        self.generator = torch.Generator().manual_seed(1)
        forget(self.root)

    def send(self, number: int, *, fresh: bool = False, full: bool = False) -> Update:
        self.weights = stepped(self.weights, self.generator)
        order = Publication(
            self.root, self.model, self.run, number, 10 * number, fresh, fresh or full
        )
        return order.write_alone(as_buckets(iter(self.weights.items()), 2**14))


def stored(folder: Path) -> Weights:
    with WeightFiles(str(folder)) as files:
        return {name: files.read_stored(name) for name in files.stored}


def test_a_copy_follows_by_changes_and_starts_anew_where_it_cannot(
    model: str, tmp_path: Path
) -> None:
    root, folder = tmp_path / "updates", tmp_path / "copy"
    trainer, copy = Trainer(model, root), LocalCheckpoint(root, folder)
    trainer.send(1, fresh=True)
    first = trainer.weights
    trainer.send(2)
    trainer.send(3)
    assert copy.update_to(3).version == 30 and same(stored(folder), trainer.weights)
    inode = (folder / "model.safetensors").stat().st_ino
    trainer.send(4)
    copy.update_to(4)
    assert same(stored(folder), trainer.weights)
    assert (folder / "model.safetensors").stat().st_ino == inode  # written in place
    LocalCheckpoint(root, tmp_path / "other").update_to(1)
    assert same(stored(tmp_path / "other"), first)
    trainer.send(5, full=True)
    for number in (1, 2, 3, 4):
        remove_update(root, number)
    late = LocalCheckpoint(root, tmp_path / "late")
    late.update_to(5)
    copy.update_to(5)
    assert same(stored(tmp_path / "late"), trainer.weights)
    assert (folder / "model.safetensors").stat().st_ino == inode
    trainer.send(6)
    shutil.rmtree(full_path(root, 5))
    with pytest.raises(RunError, match="update 6"):  # it is behind, with nothing to start from
        LocalCheckpoint(root, tmp_path / "other").update_to(6)
    copy.update_to(6)
    assert same(stored(folder), trainer.weights)


def test_a_copy_that_was_left_half_written_or_was_changed_is_made_anew(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, folder = tmp_path / "updates", tmp_path / "copy"
    trainer, copy = Trainer(model, root), LocalCheckpoint(root, folder)
    trainer.send(1, fresh=True)
    copy.update_to(1)
    trainer.send(2)
    applied: list[bytes] = []

    def killed(change: bytes, tensor: Tensor, itemsize: int) -> None:
        if len(applied) == 3:
            raise KeyboardInterrupt
        applied.append(change)
        delta.apply(change, tensor, itemsize)

    with monkeypatch.context() as patched:
        patched.setattr("slime_like.weights.delta_local.apply", killed)
        with pytest.raises(KeyboardInterrupt):
            copy.update_to(2)
    assert not same(stored(folder), trainer.weights)
    copy.update_to(2)
    assert same(stored(folder), trainer.weights)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    trainer.send(3)
    copy.update_to(3)
    assert same(stored(folder), trainer.weights)


def test_what_is_damaged_or_half_written_is_never_used(model: str, tmp_path: Path) -> None:
    root, folder = tmp_path / "updates", tmp_path / "copy"
    trainer, copy = Trainer(model, root), LocalCheckpoint(root, folder)
    trainer.send(1, fresh=True)
    trainer.send(2)
    (root / "update-00000002.json").rename(tmp_path / "record")
    assert updates_in(root) == [1]  # its files are there, and not yet its record
    (tmp_path / "record").rename(root / "update-00000002.json")
    (path,) = changes_path(root, 2).iterdir()
    full_one = path.read_bytes()
    path.write_bytes(full_one[:-9])
    with pytest.raises(RunError, match="update 2"):
        copy.update_to(2)
    path.write_bytes(full_one[:-9] + bytes(9))
    with pytest.raises(RunError, match="update 2"):
        copy.update_to(2)
    path.write_bytes(full_one)
    copy.update_to(2)
    assert same(stored(folder), trainer.weights)
    with pytest.raises(RunError, match="is not a copy of weights"):
        LocalCheckpoint(root, model).update_to(2)


def test_another_run_in_the_same_folders(model: str, tmp_path: Path) -> None:
    root, folder = tmp_path / "updates", tmp_path / "copy"
    Trainer(model, root).send(1, fresh=True)
    LocalCheckpoint(root, folder).update_to(1)
    remove_update(root, 1)
    other = Trainer(model, root, run="other")
    other.send(1, fresh=True)
    other.send(2)
    LocalCheckpoint(root, folder).update_to(2)
    assert same(stored(folder), other.weights)


class Received:
    """What a server was given last."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.weights: Weights = {}
        server.spoil = self._take

    def _take(self, weights: Weights) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights.items()}


def updated(engine: SglangEngine, weights: Weights, version: int) -> None:
    for _ in range(4):
        engine.check_health()
        if engine.weight_version != version:
            engine.update_weights(iter(weights.items()), version)
    assert engine.weight_version == version


def wait_for(is_so: object, what: str) -> None:
    for _ in range(600):
        if is_so():  # type: ignore[operator]
            return
        threading.Event().wait(0.05)
    raise AssertionError(what)


@pytest.mark.extended
def test_hundred_updates_with_servers_that_are_killed_and_come_late(
    model: str, tmp_path: Path
) -> None:
    """One server on this host, killed twice and started again; one on another node, whose program
    comes late and is killed too."""
    root, near = tmp_path / "updates", tmp_path / "near"
    settings = {"disk_dir": str(root), "full_interval": 8}
    generator, weights = torch.Generator().manual_seed(2), in_bf16(model)
    stop = threading.Event()

    def follower(server: FakeServer, folder: Path) -> threading.Thread:
        thread = threading.Thread(
            target=follow, args=(LocalCheckpoint(root, folder), [server.url], stop)
        )
        thread.start()
        return thread

    here, kept = FakeServer(model).__enter__(), FakeServer(model).__enter__()
    far = FakeServer(model, host="127.0.0.2").__enter__()
    servers = [here, kept, far]
    received = {server.url: Received(server) for server in servers}
    running: list[threading.Thread] = []
    try:
        with engine_of(
            model, servers, synced=False, update_timeout_s=30.0, delta={**settings, "local_dir": str(near)}
        ) as engine:  # fmt: skip
            pool = engine.pool
            assert pool is not None
            running.append(follower(far, tmp_path / "far"))
            for version in range(1, 101):
                weights = stepped(weights, generator)
                if version in (20, 60):
                    port = int(here.url.rsplit(":", 1)[1])
                    here.stop()
                    updated(engine, weights, version)
                    here = FakeServer(model, port).__enter__()
                    received[here.url] = Received(here)
                if version == 40:  # its node is lost, and another disk comes with it
                    far.hung = True
                    stop.set()
                    running.pop().join()
                    wait_for(lambda: far.url not in [w.url for w in pool.alive()], "out")
                if version == 75:
                    stop.clear()
                    running.append(follower(far, tmp_path / "far2"))
                    far.hung = False
                if version in (22, 62, 76):
                    count = 2 if version == 62 else 3
                    wait_for(lambda count=count: len(pool.ready()) == count, "all back")
                updated(engine, weights, version)
                for worker in pool.ready():
                    assert same(received[worker.url].weights, weights), (version, worker.url)
                assert len(updates_in(root)) <= 8
                assert len(list(root.glob("full-*"))) == 1
            assert len(pool.ready()) == 3
            found = copy_for(root, far.url, ("", 0))
            assert found is not None and same(stored(Path(found.folder)), weights)
            assert same(stored(near), weights)
            assert 0 < engine.take_metrics()["engine/weight_update_gb"] < 0.2 * sum(
                tensor.nbytes for tensor in weights.values()
            ) / 1e9  # fmt: skip
    finally:
        stop.set()
        for thread in running:
            thread.join()
        for server in (here, kept, far):
            server.hung = False
            server.stop()
    assert not updates_in(root) and not list(root.glob("full-*"))


def test_a_copy_follows_a_new_run_with_the_same_number(model: str, tmp_path: Path) -> None:
    root, folder, engine = tmp_path / "updates", tmp_path / "copy", "http://far:1"
    stop = threading.Event()
    thread = threading.Thread(
        target=follow, args=(LocalCheckpoint(root, folder), [engine], stop), daemon=True
    )
    thread.start()
    try:
        for run in ("first", "second"):
            trainer = Trainer(model, root, run)
            trainer.send(1, fresh=True)
            wanted = (run, 1)
            wait_for(lambda wanted=wanted: status_of(root, engine).update == wanted, run)
            assert same(stored(folder), trainer.weights)
            remove_update(root, 1)  # as at the end of a run
    finally:
        stop.set()
        thread.join()
    status = status_of(root, engine)
    assert status.update == ("second", 1) and not status.error


def test_a_status_that_cannot_be_written_is_tried_again(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a busy loop; what is in the way is in the log, once."""
    root, engine = tmp_path / "updates", "http://far:1"
    root.mkdir()
    (root / COPIES).write_text("in the way")
    monkeypatch.setattr(delta_follow.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(delta_follow.logger, "propagate", False)
    caplog.set_level("INFO", delta_follow.logger.name)
    looks: list[None] = []
    looked = delta_follow._newest
    monkeypatch.setattr(delta_follow, "LOOK_S", 0.05)
    monkeypatch.setattr(
        delta_follow, "_newest", lambda source: looks.append(None) or looked(source)
    )
    stop = threading.Event()
    thread = threading.Thread(
        target=follow, args=(LocalCheckpoint(root, tmp_path / "copy"), [engine], stop), daemon=True
    )
    thread.start()
    try:
        stop.wait(0.5)
        assert 2 <= len(looks) <= 11
        (message,) = caplog.messages
        assert f"its status {root / COPIES}" in message and "File exists" in message
        (root / COPIES).unlink()
        wait_for(lambda: bool(status_of(root, engine).engines), "the status")
        fails = [OSError(28, "No space left on device")]

        def full_once(path: Path, text: str) -> None:
            if fails:
                raise fails.pop()
            replace_file(path, text)

        monkeypatch.setattr(delta_follow, "replace_file", full_once)
        Trainer(model, root, "run").send(1, fresh=True)
        wait_for(lambda: status_of(root, engine).update == ("run", 1), "the second attempt")
        assert not fails and any("No space left" in text for text in caplog.messages)
    finally:
        stop.set()
        thread.join()


def status_of(root: Path, engine: str) -> CopyStatus:
    return copy_for(root, engine, ("", 0)) or CopyStatus((), "")


def test_an_earlier_status_of_the_same_node_does_not_count(tmp_path: Path) -> None:
    """`pull-weights` was started again with one server more; the folder of its statuses has any
    order."""
    (tmp_path / COPIES).mkdir()
    old = CopyStatus(("http://a:1",), "/copy", "run", 5)
    new = CopyStatus(("http://a:1", "http://a:2"), "/copy", "run", 6)
    other = CopyStatus(("http://a:2",), "/copy", "run", 7)
    for names in ("xyz", "zyx", "yzx"):
        for written, (name, status) in enumerate(zip(names, (old, new, other), strict=True)):
            path = tmp_path / COPIES / f"{name}.json"
            path.write_text(json.dumps(dataclasses.asdict(status)))
            os.utime(path, (written, written))
        assert status_of(tmp_path, "http://a:1").number == 6, "the one written last"
        found = copy_for(tmp_path, "http://a:1", ("run", 5))
        assert found is not None and found.number == 5
        assert status_of(tmp_path, "http://a:3").number == 0


def test_a_server_on_a_node_without_a_copy_holds_nobody_up(model: str, tmp_path: Path) -> None:
    with FakeServer(model) as here, FakeServer(model, host="127.0.0.2") as far, engine_of(
        model, [here, far], synced=False, update_timeout_s=1.0, delta={"disk_dir": str(tmp_path)}
    ) as engine:  # fmt: skip
        engine.update_weights(iter(in_bf16(model).items()), 1)
        assert engine.weight_version == 1
        assert engine.pool is not None
        assert [worker.url for worker in engine.pool.ready()] == [here.url]
