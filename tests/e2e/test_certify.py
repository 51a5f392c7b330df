"""Certificates of whole runs: of the command, before rollouts, in several ranks, and with a fault
that a user's function plants in the engine."""

from __future__ import annotations

from pathlib import Path

from slime_like.certify.certificate import verify
from slime_like.report.alerts import alerts
from slime_like.report.read import read_run
from tests.e2e.helpers import Workspace, rows_of
from tests.e2e.programs import TrainServer

# the engine keeps a weight of its first version
STALE = """
from slime_like.engines.local.engine import LocalEngine

load = LocalEngine.update_weights
kept = {}

def update_weights(self, weights, version):
    load(self, weights, version)
    weight = self.model.model.layers[1].mlp.down_proj.weight.data
    weight.copy_(kept.setdefault(id(self), weight.clone()))

def plant(args):
    LocalEngine.update_weights = update_weights
"""


def test_certificates_before_rollouts_and_in_the_report(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    flags = work.flags(
        out, certify_interval=1, save=tmp_path / "save", tensor_model_parallel_size=2
    )
    server.train(flags, tmp_path, ranks=2).ok()
    first, second = (verify(out / f"certificates/rollout_{n}.json") for n in (0, 1))
    assert verify(tmp_path / "save/certificates/rollout_1.json") == second
    assert first["holds"] and second["holds"]
    assert first["reference"] == str(work.model)
    assert second["reference"] == "the trainer's weights"
    assert first["layout"].startswith("TP2") and first["weights"] != second["weights"]
    assert set(first["sites"]["layers.0.attention"]) == {"trainer", "engine"}
    assert set(first["log_probs"]) == {"engine"}
    for row in rows_of(out):
        assert row["certificate/findings"] == 0
        assert 0 < row["certificate/trainer_difference"] < 0.5
    assert [c["holds"] for c in read_run(out).certificates] == [True, True]


def test_a_stale_weight_in_the_engine_is_named(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    hook = tmp_path / "planted.py"
    hook.write_text(STALE)
    out = tmp_path / "out"
    changes = {"custom_megatron_init_path": f"{hook}:plant", "max_train_rollout_diff": 100}
    server.train(work.flags(out, certify_interval=1, **changes), tmp_path).ok()
    assert verify(out / "certificates/rollout_0.json")["holds"]
    (found,) = verify(out / "certificates/rollout_1.json")["findings"]
    assert (found["subject"], found["layer"], found["site"]) == ("engine", 1, "layers.1.mlp")
    assert found["cause"] == "stale weights"
    assert "down_proj.weight has the numbers of weight version 1" in found["evidence"]
    assert rows_of(out)[1]["certificate/findings"] == 1
    assert any("rollout 1: engine: layers.1.mlp" in a["text"] for a in alerts(read_run(out)))


# sampling is slow, and a certificate is refused while a request is in flight
BUSY = """
import time
from slime_like.certify.run import Certifier
from slime_like.engines.local.decoder import Decoder

decode = Decoder.decode
run = Certifier.run
busy = []

def slowly(self, *args, **kw):
    busy.append(1)
    try:
        time.sleep(3)
        yield from decode(self, *args, **kw)
    finally:
        busy.pop()

def check(self, *args):
    assert not busy, "a request is in flight"
    return run(self, *args)

def plant(args):
    Decoder.decode = slowly
    Certifier.run = check
"""


def test_a_certificate_waits_for_the_rollout_that_is_sampled_ahead(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    hook = tmp_path / "busy.py"
    hook.write_text(BUSY)
    ahead = {"async_rollout": "", "tis_ratio_type": "token", "num_rollout": 3}
    flags = work.flags(
        tmp_path, certify_interval=1, custom_megatron_init_path=f"{hook}:plant", **ahead
    )
    server.train(flags, tmp_path).ok()
    assert all(verify(tmp_path / f"certificates/rollout_{n}.json")["holds"] for n in range(3))


def test_the_command_ends_with_a_status(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = server.train(work.flags(out, certify=""), tmp_path).ok()
    assert "trainer, transformers and engine agree" in done.out + done.err
    assert verify(out / "certificates/rollout_0.json")["holds"]
    hook = tmp_path / "planted.py"
    hook.write_text(STALE.replace("weight.clone()", "1.5 * weight"))
    flags = work.flags(out, certify="", custom_megatron_init_path=f"{hook}:plant")
    done = server.train(flags, tmp_path)
    assert done.status == 1 and "is 1.5 times the reference's" in done.out + done.err
