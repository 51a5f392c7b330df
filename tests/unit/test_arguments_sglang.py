"""Settings of SGLang servers: what is passed on to them, checked against an installation, and every
rule broken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from arguments import get_parser
from arguments.parse import parse_args
from arguments.rules.sglang import SGLANG_RULES, address_parts
from tests.unit.command_lines import complete, problems_of

SERVER = "class Serving:\n    mem_fraction_static: float = 0.9\n    log_level: str = 'info'\n    dp_size: int = 1\n    max_running_requests: int = 1\n"
ROUTER = "class RouterArgs:\n    policy: str = 'cache_aware'\n    port: int = 30000\n"


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter that has an SGLang of a few settings."""
    for file, source in {
        "sglang/__init__.py": "",
        "sglang/srt/server_args.py": "class ServerArgs:\n    pass\n",
        "sglang/srt/arg_groups/fields/serving.py": SERVER,
        "sglang_router/__init__.py": "",
        "sglang_router/router_args.py": ROUTER,
    }.items():
        path = tmp_path / "site" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


SGLANG = "--rollout-engine sglang --sglang-python {python} "
HERE = SGLANG + "--rollout-external-engine-addrs 127.0.0.1:30000 "
STARTED = SGLANG + "--rollout-num-gpus 2 "
# rule; flags; the flag that is named; words
REFUSED = [
    ("idle_sglang_settings", "--rollout-num-gpus 2 --rollout-engine local", "--rollout-num-gpus", "--rollout-engine local"),
    ("idle_sglang_settings", "--sglang-mem-fraction-static 0.7", "--sglang-mem-fraction-static", "--rollout-engine local"),
    ("engines_are_named", SGLANG, "--rollout-engine", "--rollout-external-engine-addrs host:port"),
    ("engines_are_named", HERE + "--sglang-router-ip 127.0.0.1", "--sglang-router-port", "go together"),
    ("engines_are_named", HERE + "--rollout-num-gpus 2", "--rollout-num-gpus", "excludes"),
    ("engines_are_named", SGLANG + "--rollout-external-engine-addrs 30000", "--rollout-external-engine-addrs", "host:port"),
    ("engines_are_named", SGLANG + "--rollout-external-engine-addrs a:1 a:1", "--rollout-external-engine-addrs", "twice"),
    ("engines_are_named", SGLANG + "--sglang-router-ip h --sglang-router-port 1 --no-sglang-router", "--no-sglang-router", "--sglang-router-ip"),
    ("engines_that_are_started", STARTED + "--rollout-num-gpus-per-engine 3", "--rollout-num-gpus", "no multiple"),
    ("engines_that_are_started", HERE + "--rollout-num-gpus-per-engine 2", "--rollout-num-gpus-per-engine", "add --rollout-num-gpus"),
    ("sglang_is_installed", STARTED + "--sglang-mem-fraction-statik 0.7", "--sglang-mem-fraction-statik", "did you mean --sglang-mem-fraction-static?"),
    ("sglang_is_installed", STARTED + "--sglang-port 1", "--sglang-port", "follows from"),
    ("sglang_is_installed", STARTED + "--router-polycy x", "--router-polycy", "did you mean --router-policy?"),
    ("sglang_is_installed", "--rollout-engine sglang --rollout-num-gpus 1 --sglang-python /no/python", "--sglang-python", "cannot be run"),
    ("weight_transport_fits", HERE + "--update-weight-transport cuda_ipc", "--update-weight-transport", "needs --colocate"),
    ("engines_are_named", HERE + "--colocate", "--colocate", "excludes"),
    ("weight_transport_fits", STARTED + "--colocate", "--rollout-num-gpus", "more than the 1 of the trainer"),
    ("weight_transport_fits", HERE + "--update-weight-disk-dir {folder}", "--update-weight-disk-dir", "--update-weight-transport disk"),
    ("weight_transport_fits", HERE + "--update-weight-disk-keep-files", "--update-weight-disk-keep-files", "--update-weight-disk-dir"),
    ("weight_transport_fits", SGLANG + "--rollout-external-engine-addrs node7:1 --update-weight-transport disk", "--update-weight-disk-dir", "node7:1"),
    ("weight_transport_fits", STARTED + "--sglang-dp-size 2", "--sglang-dp-size", "--update-weight-transport disk"),
    ("", HERE + "--renormalize-sampled-log-probs --rollout-top-k 5", "--renormalize-sampled-log-probs", "--rollout-engine sglang"),
]  # fmt: skip
NEEDS_MORE = {"checkpoint_of_the_servers"}  # --hf-checkpoint is a folder, by another rule


@pytest.mark.parametrize(
    ("rule", "flags", "flag", "said"), REFUSED, ids=[f"{c[0]}-{i}" for i, c in enumerate(REFUSED)]
)
def test_refused(tmp_path: Path, python: str, rule: str, flags: str, flag: str, said: str) -> None:
    words = flags.replace("{python}", python).replace("{folder}", str(tmp_path)).split()
    found = problems_of(complete(tmp_path, *words))
    assert [p.flag for p in found] == [flag] and said in str(found[0]), "\n".join(map(str, found))


def test_every_rule_is_broken_somewhere() -> None:
    assert {rule.__name__ for rule in SGLANG_RULES} == {
        case[0] for case in REFUSED if case[0]
    } | NEEDS_MORE


def test_flags_that_are_passed_on(tmp_path: Path, python: str) -> None:
    words = STARTED.replace("{python}", python).split()
    more = [
        "--sglang-mem-fraction-static",
        "0.7",
        "--sglang_log_level=warning",
        "--router-policy",
        "round_robin",
    ]
    run = parse_args(complete(tmp_path, *words, *more), 1)
    assert run.sglang.sglang_server_flags == {"mem_fraction_static": "0.7", "log_level": "warning"}
    assert run.sglang.sglang_router_flags == {"policy": "round_robin"}
    assert run.sglang.update_weight_transport == "broadcast"


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
    [("h:1", ("h", 1)), ("http://10.0.0.1:30000/", ("10.0.0.1", 30000)), ("[::1]:9", ("[::1]", 9)), ("h", None), ("h:0", None), ("h:70000", None),
     ("ftp://h:1", None), ("h:1/x", None)],
)  # fmt: skip
def test_addresses(address: str, parts: tuple[str, int] | None) -> None:
    assert address_parts(address) == parts
