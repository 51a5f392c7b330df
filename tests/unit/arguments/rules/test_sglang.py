"""Settings of SGLang servers: what is passed on to them, checked against an installation, and every
rule broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from arguments import get_parser
from arguments.parse import parse_args
from arguments.rules.sglang import address_parts
from slime_like.weight_sync.transports.base import (
    TransportTraits,
    WeightTransport,
    register_weight_transport,
    weight_transports,
)
from tests.unit.command_lines import (
    assert_refused,
    complete,
    interpreter_with,
    problems_of,
    problems_of_flags,
    refused,
)

SERVER = (
    "class Serving:\n    mem_fraction_static: float = 0.9\n    log_level: str = 'info'\n    "
    "dp_size: int = 1\n    max_running_requests: int = 1\n"
)
ROUTER = "class RouterArgs:\n    policy: str = 'cache_aware'\n    port: int = 30000\n"


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that has an SGLang of a few settings."""
    files = {
        "sglang/__init__.py": "",
        "sglang/srt/server_args.py": "class ServerArgs:\n    pass\n",
        "sglang/srt/arg_groups/fields/serving.py": SERVER,
        "sglang_router/__init__.py": "",
        "sglang_router/router_args.py": ROUTER,
    }
    return interpreter_with(tmp_path, files)


SGLANG = "--rollout-engine sglang --sglang-python {python} "
HERE = SGLANG + "--rollout-external-engine-addrs 127.0.0.1:30000 "
STARTED = SGLANG + "--rollout-num-gpus 2 "
# rule; flags; the flag that is named; words
REFUSED = [
    ("check_unused_sglang_flags", "--rollout-num-gpus 2 --rollout-engine local",
     "--rollout-num-gpus", "--rollout-engine local"),
    ("check_unused_sglang_flags", "--sglang-mem-fraction-static 0.7",
     "--sglang-mem-fraction-static", "--rollout-engine local"),
    ("check_server_addresses", SGLANG, "--rollout-engine",
     "--rollout-external-engine-addrs host:port"),
    ("check_server_addresses", HERE + "--sglang-router-ip 127.0.0.1", "--sglang-router-port",
     "required with --sglang-router-ip"),
    ("check_server_addresses", HERE + "--rollout-num-gpus 2", "--rollout-num-gpus",
     "cannot be combined with"),
    ("check_server_addresses", SGLANG + "--rollout-external-engine-addrs 30000",
     "--rollout-external-engine-addrs", "host:port"),
    ("check_server_addresses", SGLANG + "--rollout-external-engine-addrs a:1 a:1",
     "--rollout-external-engine-addrs", "twice"),
    ("check_server_addresses",
     SGLANG + "--sglang-router-ip h --sglang-router-port 1 --no-sglang-router",
     "--no-sglang-router", "--sglang-router-ip"),
    ("", STARTED + "--sglang-router-port 1 --no-sglang-router", "--no-sglang-router",
     "--sglang-router-port"),
    ("check_started_servers", STARTED + "--rollout-num-gpus-per-engine 3", "--rollout-num-gpus",
     "multiple of --rollout-num-gpus-per-engine 3"),
    ("check_started_servers", HERE + "--rollout-num-gpus-per-engine 2",
     "--rollout-num-gpus-per-engine", "add --rollout-num-gpus"),
    ("check_sglang_installation", STARTED + "--sglang-mem-fraction-statik 0.7",
     "--sglang-mem-fraction-statik", "did you mean --sglang-mem-fraction-static?"),
    ("check_sglang_installation", STARTED + "--sglang-port 1", "--sglang-port",
     "is set by the run"),
    ("check_sglang_installation", STARTED + "--router-polycy x", "--router-polycy",
     "did you mean --router-policy?"),
    ("check_sglang_installation",
     "--rollout-engine sglang --rollout-num-gpus 1 --sglang-python /no/python", "--sglang-python",
     "cannot be run"),
    ("check_weight_transport", HERE + "--update-weight-transport cuda_ipc",
     "--update-weight-transport", "requires --colocate"),
    ("check_server_addresses", HERE + "--colocate", "--colocate", "cannot be combined with"),
    ("check_weight_transport", STARTED + "--colocate", "--rollout-num-gpus", "--colocate"),
    ("check_weight_transport", HERE + "--update-weight-disk-dir {folder}",
     "--update-weight-disk-dir", "--update-weight-transport disk"),
    ("check_weight_transport", HERE + "--update-weight-disk-keep-files",
     "--update-weight-disk-keep-files", "--update-weight-disk-dir"),
    ("check_weight_transport",
     SGLANG + "--rollout-external-engine-addrs node7:1 --update-weight-transport disk",
     "--update-weight-disk-dir", "node7:1"),
    ("check_weight_transport", STARTED + "--sglang-dp-size 2", "--sglang-dp-size",
     "--update-weight-transport disk"),
    ("check_sampling_masks", HERE + "--renormalize-sampled-log-probs --rollout-top-p 0.9",
     "--rollout-top-k", "only of a bounded length; add e.g. --rollout-top-k 128"),
]  # fmt: skip


@refused(REFUSED)
def test_refused(tmp_path: Path, python: str, row: tuple[str, str, str, str]) -> None:
    assert_refused(problems_of_flags(tmp_path, row[1].replace("{python}", python)), row)


def test_flags_that_are_passed_on(tmp_path: Path, python: str) -> None:
    words = STARTED.replace("{python}", python).split()
    more = [
        "--sglang-mem-fraction-static",
        "0.7",
        "--sglang_log_level=warning",
        "--router-policy",
        "round_robin",
    ]
    config = parse_args(complete(tmp_path, *words, *more), 1)
    assert config.sglang.sglang_server_flags == {
        "mem_fraction_static": "0.7",
        "log_level": "warning",
    }
    assert config.sglang.sglang_router_flags == {"policy": "round_robin"}
    assert config.sglang.update_weight_transport == "broadcast"


def test_a_shared_machine_without_a_gpu(tmp_path: Path, python: str) -> None:
    words = SGLANG.replace("{python}", python).split()
    config = parse_args(complete(tmp_path, *words, "--colocate"), 2).sglang
    assert config.rollout_num_gpus == 2 and config.update_weight_transport == "tensor"
    assert config.offload_train and config.offload_rollout


def test_a_switch_that_is_passed_on_is_true() -> None:
    given = get_parser().read(["--sglang-disable-radix-cache", "--lr", "1"])
    assert (
        given.values == {"sglang_server_flags": {"disable_radix_cache": True}, "lr": 1.0}
        and not given.problems
    )


@pytest.mark.parametrize(
    ("address", "parts"),
    [("h:1", ("h", 1)), ("http://10.0.0.1:30000/", ("10.0.0.1", 30000)), ("[::1]:9", ("[::1]", 9)),
     ("h", None), ("h:0", None), ("h:70000", None),
     ("ftp://h:1", None), ("h:1/x", None)],
)  # fmt: skip
def test_addresses(address: str, parts: tuple[str, int] | None) -> None:
    assert address_parts(address) == parts


def test_a_registered_transport_is_what_its_traits_say(tmp_path: Path, python: str) -> None:
    """It may have the folder of --update-weight-disk-dir, and is not replaced by that of deltas."""

    @register_weight_transport("shelf", traits=TransportTraits(uses_folder=True))
    class Shelf(WeightTransport):
        pass

    try:
        here = HERE.replace("{python}", python).split()
        folder = ("--update-weight-disk-dir", str(tmp_path / "updates"))
        line = complete(tmp_path, *here, "--update-weight-transport", "shelf", *folder)
        assert parse_args(line, 1).sglang.update_weight_transport == "shelf"
        (found,) = problems_of([*line, "--update-weight-mode", "delta"], 1)
        assert found.flag == "--update-weight-mode"
        assert "requires --update-weight-transport disk" in found.message
    finally:
        weight_transports.remove("shelf")
