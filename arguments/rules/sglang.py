"""Rules about SGLang servers."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from arguments.aliases import PASSED_ON
from arguments.rules.base import Rule, Settings, problem
from arguments.schema import SglangConfig
from arguments.sglang_install import interpreter, nearest, packages_of, router_fields, server_fields
from slime_like.config import Problem

_ADDRESS = re.compile(r"(https?://)?(\[[0-9a-fA-F:]+\]|[\w.\-]+):(\d{1,5})/?")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
# Server settings that the run sets itself.
OURS = (
    "model_path",
    "host",
    "port",
    "tp_size",
    "base_gpu_id",
    "nnodes",
    "node_rank",
    "dist_init_addr",
    "skip_tokenizer_init",
    "weight_version",
)
ROUTER_OURS = ("host", "port", "worker_urls", "prometheus_port", "prometheus_host")


def address_parts(address: str) -> tuple[str, int] | None:
    """Parse "127.0.0.1:30000" or "http://127.0.0.1:30000" to ("127.0.0.1", 30000); None for
    anything else."""
    found = _ADDRESS.fullmatch(address)
    return None if found is None or not 0 < int(found[3]) < 65536 else (found[2], int(found[3]))


def engine_url(address: str) -> str:
    parts = address_parts(address)
    assert parts is not None, "checked by the rules"
    scheme = "https" if address.startswith("https://") else "http"
    return f"{scheme}://{parts[0]}:{parts[1]}"


def uses_sglang(s: Settings) -> bool:
    return s.rollout.rollout_engine == "sglang"


def gpus_of_servers(s: Settings) -> int | None:
    """Number of GPUs for servers that the run starts; with --colocate by default all GPUs of the
    trainer. None if it starts none."""
    g = s.sglang
    if g.rollout_num_gpus is None and g.colocate:
        return s.world_size
    return g.rollout_num_gpus


def idle_sglang_settings(s: Settings) -> list[Problem]:
    if uses_sglang(s):
        return []
    idle = [f.name for f in dataclasses.fields(SglangConfig) if f.name in s.given]
    words = (
        "has no effect with --rollout-engine local; add --rollout-engine sglang, or leave it out"
    )
    found = []
    for name in idle:
        value = getattr(s.sglang, name)
        if isinstance(value, dict):  # flags that are passed on, as typed
            prefix = next(prefix for prefix, field in PASSED_ON.items() if field == name)
            found += [
                Problem(prefix + key.replace("_", "-"), text, words) for key, text in value.items()
            ]
        else:
            found += problem(name, None if value is True else value, words)
    return found


def engines_are_named(s: Settings) -> list[Problem]:
    g = s.sglang
    if not uses_sglang(s):
        return []
    if (g.sglang_router_ip is None) != (g.sglang_router_port is None):
        missing = "sglang_router_ip" if g.sglang_router_ip is None else "sglang_router_port"
        return problem(
            missing, None, "is missing: --sglang-router-ip and --sglang-router-port go together"
        )
    starts = gpus_of_servers(s) is not None
    if g.rollout_external_engine_addrs is not None and starts:
        return problem(
            "colocate" if g.rollout_num_gpus is None else "rollout_num_gpus",
            g.rollout_num_gpus,
            "excludes --rollout-external-engine-addrs; give one of them",
        )
    if g.rollout_external_engine_addrs is None and not starts and g.sglang_router_ip is None:
        return problem(
            "rollout_engine", "sglang",
            "needs servers: --rollout-num-gpus to start some, --rollout-external-engine-addrs host:port for some that run, or --sglang-router-ip",
        )  # fmt: skip
    found = []
    for address in g.rollout_external_engine_addrs or []:
        if address_parts(address) is None:
            found += problem(
                "rollout_external_engine_addrs", address, "must be host:port, or http://host:port"
            )
    if len(set(g.rollout_external_engine_addrs or [])) < len(g.rollout_external_engine_addrs or []):
        found += problem(
            "rollout_external_engine_addrs",
            " ".join(g.rollout_external_engine_addrs or []),
            "names a server twice",
        )
    return found


def engines_that_are_started(s: Settings) -> list[Problem]:
    g = s.sglang
    if not uses_sglang(s):
        return []
    gpus = gpus_of_servers(s)
    if gpus is None:
        idle = [n for n in ("rollout_num_gpus_per_engine", "sglang_server_flags") if n in s.given]
        return [
            p
            for n in idle
            for p in problem(
                n,
                getattr(g, n),
                "is for servers that this run starts; add --rollout-num-gpus, or leave it out",
            )
        ]
    if gpus % g.rollout_num_gpus_per_engine:
        return problem(
            "rollout_num_gpus",
            gpus,
            f"is no multiple of --rollout-num-gpus-per-engine {g.rollout_num_gpus_per_engine}; change one",
        )
    return []


def starts_router(s: Settings) -> bool:
    return not s.sglang.no_sglang_router and s.sglang.sglang_router_ip is None


def sglang_is_installed(s: Settings) -> list[Problem]:
    """SGLang and the router are installed if the run starts them, and support the flags that are
    passed on."""
    g = s.sglang
    if not uses_sglang(s) or s.preflight.preflight:  # preflight: only the job's machines need it
        return []
    if importlib.util.find_spec("httpx") is None:
        return problem(
            "rollout_engine",
            "sglang",
            "needs httpx; install it with: pip install 'slime_like[sglang]'",
        )
    found = []
    python = interpreter(g.sglang_python)
    try:
        sglang, router = packages_of(python)
    except (OSError, ValueError) as error:
        return problem("sglang_python", g.sglang_python, f"cannot be run: {error}")
    gpus = gpus_of_servers(s)
    if gpus is not None:
        if sglang is None:
            message = f"needs SGLang, which {python} does not have; name an interpreter that has it with --sglang-python"
            found += problem("rollout_num_gpus", gpus, message)
        else:
            found += unknown_settings(
                "--sglang-", g.sglang_server_flags, server_fields(sglang), OURS
            )
    if starts_router(s):
        router = router or packages_of(interpreter(None))[1]
        if router is None:
            message = "needs sglang_router; install it with: pip install 'slime_like[sglang]', or add --no-sglang-router"
            found += problem("rollout_engine", "sglang", message)
        else:
            found += unknown_settings(
                "--router-", g.sglang_router_flags, router_fields(router), ROUTER_OURS
            )
    return found


def unknown_settings(
    prefix: str, given: Mapping[str, object] | None, known: set[str], ours: tuple[str, ...]
) -> list[Problem]:
    found = []
    for name, value in (given or {}).items():
        flag = prefix + name.replace("_", "-")
        if name in ours:
            found.append(
                Problem(flag, value, "follows from the run's other settings; leave it out")
            )
        elif name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {prefix}{near.replace('_', '-')}?" if near else ""
            found.append(Problem(flag, value, f"the installed server has no such setting{hint}"))
    return found


def weight_transport_fits(s: Settings) -> list[Problem]:
    g = s.sglang
    if not uses_sglang(s):
        return []
    found = []
    if g.colocate and (g.rollout_num_gpus or 0) > s.world_size:
        found += problem(
            "rollout_num_gpus",
            g.rollout_num_gpus,
            f"is more than the {s.world_size} of the trainer, which --colocate shares",
        )
    if g.colocate and s.scheduling.async_rollout:
        found += problem(
            "colocate",
            None,
            "releases the servers' memory while the trainer works, and --async-rollout samples then; give one",
        )
    if g.update_weight_transport == "cuda_ipc" and not g.colocate:
        found += problem(
            "update_weight_transport",
            "cuda_ipc",
            "needs --colocate: handles of GPU memory are of use on the same GPU only",
        )
    disk = g.update_weight_transport == "disk"
    if g.update_weight_mode == "delta" and not disk:
        found += problem(
            "update_weight_mode", "delta", "needs --update-weight-transport disk; add it"
        )
    if g.no_update_weight_copy and (disk or g.colocate):
        found += problem(
            "no_update_weight_copy",
            None,
            "is for --update-weight-transport broadcast, which alone keeps a copy; leave it out",
        )
    far = [
        a
        for a in g.rollout_external_engine_addrs or []
        if (parts := address_parts(a)) is not None and parts[0] not in LOOPBACK
    ]
    if disk and far and g.update_weight_disk_dir is None:
        found += problem(
            "update_weight_disk_dir",
            None,
            f"is missing: a folder that {far[0]} sees too, under the same name",
        )
    flags = g.sglang_server_flags or {}
    # with data-parallel attention a server still has tp_size ranks
    replicas = ("pp_size",) if flags.get("enable_dp_attention") else ("dp_size", "pp_size")
    parallel = [name for name in replicas if str(flags.get(name, 1)) != "1"]
    if parallel and not disk:
        name = parallel[0].replace("_", "-")
        found.append(
            Problem(
                f"--sglang-{name}",
                flags[parallel[0]],
                "needs --update-weight-transport disk",
            )
        )
    return found


def checkpoint_of_the_servers(s: Settings) -> list[Problem]:
    if (
        uses_sglang(s)
        and s.model.hf_checkpoint is not None
        and not Path(s.model.hf_checkpoint).is_dir()
    ):
        return problem(
            "hf_checkpoint",
            s.model.hf_checkpoint,
            "must be a folder: servers read its config.json and tokenizer",
        )
    return []


def completed_sglang(s: Settings) -> SglangConfig:
    g = s.sglang
    shared = "cuda_ipc" if s.machine.cuda else "tensor"
    transport = g.update_weight_transport or (shared if g.colocate else "broadcast")
    return dataclasses.replace(
        g,
        rollout_num_gpus=gpus_of_servers(s),
        update_weight_transport=transport,
        offload_train=g.colocate if g.offload_train is None else g.offload_train,
        offload_rollout=g.colocate if g.offload_rollout is None else g.offload_rollout,
    )


SGLANG_RULES: tuple[Rule, ...] = (
    idle_sglang_settings, engines_are_named, engines_that_are_started, sglang_is_installed, weight_transport_fits, checkpoint_of_the_servers,
)  # fmt: skip
