"""Rules about SGLang servers."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Collection, Mapping

from arguments.flags import PASSED_ON
from arguments.rules.base import Rule, Settings, problem
from arguments.schema import SglangConfig, VllmConfig
from arguments.sglang_install import interpreter, nearest, packages_of, router_fields, server_fields
from slime_like.config import Problem
from slime_like.extras import pip_install
from slime_like.weight_sync.transports.base import transport_traits

_ADDRESS = re.compile(r"(https?://)?(\[[0-9a-fA-F:]+\]|[\w.\-]+):(\d{1,5})/?")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
# Server settings that the run sets itself.
OWN_SERVER_SETTINGS = (
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
# Settings without a counterpart in vLLM servers
SGLANG_ONLY = (
    "colocate",
    "offload_train",
    "offload_rollout",
    "sglang_python",
    "sglang_router_ip",
    "sglang_router_port",
    "no_sglang_router",
    "sglang_server_flags",
    "sglang_router_flags",
)
OWN_ROUTER_SETTINGS = ("host", "port", "worker_urls", "prometheus_port", "prometheus_host")


def address_parts(address: str) -> tuple[str, int] | None:
    """Parse "127.0.0.1:30000" or "http://127.0.0.1:30000" to ("127.0.0.1", 30000); None for
    anything else."""
    match = _ADDRESS.fullmatch(address)
    return None if match is None or not 0 < int(match[3]) < 65536 else (match[2], int(match[3]))


def engine_url(address: str) -> str:
    parts = address_parts(address)
    assert parts is not None, "checked by the rules"
    scheme = "https" if address.startswith("https://") else "http"
    return f"{scheme}://{parts[0]}:{parts[1]}"


def uses_sglang(s: Settings) -> bool:
    return s.rollout.rollout_engine == "sglang"


def uses_servers(s: Settings) -> bool:
    """Whether an engine of ours with servers samples: SGLang or vLLM."""
    return s.rollout.rollout_engine in ("sglang", "vllm")


def gpus_of_servers(s: Settings) -> int | None:
    """Number of GPUs for servers that the run starts; with --colocate by default all GPUs of the
    trainer. None if it starts none."""
    if s.sglang.rollout_num_gpus is None and s.sglang.colocate:
        return s.world_size
    return s.sglang.rollout_num_gpus


def check_unused_sglang_flags(s: Settings) -> list[Problem]:
    groups: list[tuple[SglangConfig | VllmConfig, str]] = []
    engine = s.rollout.rollout_engine
    if engine != "sglang":
        groups.append((s.sglang, "sglang"))
    if engine != "vllm":
        groups.append((s.vllm, "vllm"))
    unused = [
        (group, field, legal)
        for group, legal in groups
        for field in dataclasses.fields(group)
        if field.name in s.given and not (engine == "vllm" and field.name not in SGLANG_ONLY)
    ]
    problems = []
    for group, field, legal in unused:
        value = getattr(group, field.name)
        message = (
            f"has no effect with --rollout-engine {engine}; remove it or add --rollout-engine "
            f"{legal}"
        )
        problems += _of_server_setting(field.name, value, message)
    return problems


def _of_server_setting(field: str, value: object, message: str) -> list[Problem]:
    """The problem of a setting; of every flag that is passed on, if it collects those."""
    if not isinstance(value, dict):
        return problem(field, value, message)
    prefix = next(p for p, collector in PASSED_ON.items() if collector == field)
    return [Problem(_passed_on_flag(prefix, key), text, message) for key, text in value.items()]


def _passed_on_flag(prefix: str, setting: str) -> str:
    return prefix + setting.replace("_", "-")


def check_server_addresses(s: Settings) -> list[Problem]:
    g = s.sglang
    field = "rollout_external_engine_addrs"
    if not uses_servers(s):
        return []
    starts = gpus_of_servers(s) is not None
    addresses = g.rollout_external_engine_addrs or []
    if g.rollout_external_engine_addrs is not None and starts:
        message = "cannot be combined with --rollout-external-engine-addrs; set only one of them"
        name = "colocate" if g.rollout_num_gpus is None else "rollout_num_gpus"
        return problem(name, g.rollout_num_gpus, message)
    if g.rollout_external_engine_addrs is None and not starts and g.sglang_router_ip is None:
        message = (
            "requires servers: --rollout-num-gpus to start them, --rollout-external-engine-addrs "
            "host:port for running ones"
        )
        message += ", or --sglang-router-ip" if uses_sglang(s) else ""
        return problem("rollout_engine", s.rollout.rollout_engine, message)
    problems = []
    for address in addresses:
        if address_parts(address) is None:
            problems += problem(field, address, "must be host:port, or http://host:port")
    if len(set(addresses)) < len(addresses):
        problems += problem(field, " ".join(addresses), "has a server twice; remove one of them")
    return problems


def check_started_servers(s: Settings) -> list[Problem]:
    g = s.sglang
    if not uses_servers(s):
        return []
    gpus = gpus_of_servers(s)
    problems = []
    if gpus is None:
        started: dict[str, object] = {"rollout_num_gpus_per_engine": g.rollout_num_gpus_per_engine}
        if uses_sglang(s):
            started["sglang_server_flags"] = g.sglang_server_flags
        else:
            started["vllm_server_flags"] = s.vllm.vllm_server_flags
        for name, value in started.items():
            if name in s.given:
                message = "has no effect on external servers; remove it or add --rollout-num-gpus"
                problems += _of_server_setting(name, value, message)
        return problems
    if gpus % g.rollout_num_gpus_per_engine:
        message = (
            f"must be a multiple of --rollout-num-gpus-per-engine {g.rollout_num_gpus_per_engine}"
        )
        return problem("rollout_num_gpus", gpus, message)
    return []


def starts_router(s: Settings) -> bool:
    """Whether the run starts a router, for servers that it starts or that run already."""
    g = s.sglang
    has_servers = gpus_of_servers(s) is not None or g.rollout_external_engine_addrs is not None
    return has_servers and not g.no_sglang_router and g.sglang_router_ip is None


def check_sglang_installation(s: Settings) -> list[Problem]:
    """SGLang and the router are installed if the run starts them, and support the flags that are
    passed on."""
    g = s.sglang
    if not uses_sglang(s) or s.preflight.preflight:  # preflight: only the job's machines need it
        return []
    if importlib.util.find_spec("httpx") is None:
        return problem("rollout_engine", "sglang", f"requires httpx: {pip_install('sglang')}")
    problems = []
    python = interpreter(g.sglang_python)
    try:
        sglang, router = packages_of(python)
    except (OSError, ValueError) as error:
        return problem("sglang_python", g.sglang_python, f"cannot be run: {error}")
    starts = gpus_of_servers(s) is not None and g.rollout_external_engine_addrs is None
    if starts and sglang is None:  # an environment that has it may have the router, too
        message = f"requires SGLang, which {python} does not have; set --sglang-python"
        name = "colocate" if g.rollout_num_gpus is None else "rollout_num_gpus"
        return problem(name, g.rollout_num_gpus, message)
    if starts and sglang is not None:
        problems += unknown_settings(
            "--sglang-", g.sglang_server_flags, server_fields(sglang), OWN_SERVER_SETTINGS
        )
    if not starts_router(s):
        return problems
    router = router or packages_of(interpreter(None))[1]
    if router is None:
        message = f"requires sglang_router: {pip_install('sglang')}; or add --no-sglang-router"
        return problems + problem("rollout_engine", "sglang", message)
    return problems + unknown_settings(
        "--router-", g.sglang_router_flags, router_fields(router), OWN_ROUTER_SETTINGS
    )


def unknown_settings(
    prefix: str,
    settings: Mapping[str, object] | None,
    known: set[str],
    own: Collection[str],
) -> list[Problem]:
    """Problems of flags that are passed on. own: settings that the run sets itself."""
    problems = []
    for name, value in (settings or {}).items():
        if name in own:
            message = "is set by the run; remove it"
        elif name not in known:
            message = "the installed server has no such setting"
            if (near := nearest(name, known)) is not None:
                message += f"; did you mean {_passed_on_flag(prefix, near)}?"
        else:
            continue
        problems.append(Problem(_passed_on_flag(prefix, name), value, message))
    return problems


def warn_few_servers(s: Settings) -> str | None:
    """Servers on a part of the GPUs that they share with the trainer."""
    gpus = s.sglang.rollout_num_gpus
    if not (uses_sglang(s) and s.sglang.colocate and s.generates and gpus):
        return None
    if gpus >= s.world_size:
        return None
    return (
        f"--rollout-num-gpus {gpus} with --colocate: servers on {gpus} of the trainer's "
        f"{s.world_size} GPUs, the others wait while responses are generated; leave it out for "
        "servers on all of them"
    )


def check_weight_transport(s: Settings) -> list[Problem]:
    g = s.sglang
    transport = s.sglang.update_weight_transport
    if not uses_servers(s):
        return []
    problems = []
    if uses_sglang(s) and g.colocate and (g.rollout_num_gpus or 0) > s.world_size:
        message = (
            f"with --colocate servers share the trainer's GPUs, of which there are {s.world_size}; "
            "leave it out for servers on all of them"
        )
        problems += problem("rollout_num_gpus", g.rollout_num_gpus, message)
    traits = transport_traits(transport)
    if traits.same_gpu and not g.colocate:
        message = "requires --colocate: memory handles are valid on the same GPU only"
        problems += problem("update_weight_transport", transport, message)
    if g.update_weight_mode == "delta" and not traits.sends_deltas:
        message = "requires --update-weight-transport disk; add it"
        problems += problem("update_weight_mode", "delta", message)
    if g.no_update_weight_copy and (
        g.colocate or (transport is not None and not traits.keeps_copy)
    ):
        message = "only valid with --update-weight-transport broadcast; remove it"
        problems += problem("no_update_weight_copy", None, message)
    return problems + (_check_disk_folder(s) if traits.uses_folder else _check_replicas(s))


def check_sampling_masks(s: Settings) -> list[Problem]:
    """SGLang reports masks of a number of tokens that is known before."""
    if not (uses_sglang(s) and s.rollout.renormalize_sampled_log_probs):
        return []
    if s.rollout.rollout_top_k > 0:
        return []
    message = (
        "required with --renormalize-sampled-log-probs: SGLang reports sampling masks only of a "
        "bounded length; add e.g. --rollout-top-k 128"
    )
    return problem("rollout_top_k", s.rollout.rollout_top_k, message)


def _check_disk_folder(s: Settings) -> list[Problem]:
    """Servers on other hosts need a folder for weights that they share with the trainer."""
    if s.sglang.update_weight_disk_dir is not None:
        return []
    for address in s.sglang.rollout_external_engine_addrs or []:
        parts = address_parts(address)
        if parts is not None and parts[0] not in LOOPBACK:
            message = f"required: a folder that {address} sees under the same path"
            return problem("update_weight_disk_dir", None, message)
    return []


def _check_replicas(s: Settings) -> list[Problem]:
    """Servers with several replicas or pipeline stages only load weights from disk."""
    flags = s.sglang.sglang_server_flags or {}
    # with data-parallel attention a server still has tp_size ranks
    names = ("pp_size",) if flags.get("enable_dp_attention") else ("dp_size", "pp_size")
    for name in names:
        if str(flags.get(name, 1)) != "1":
            message = "requires --update-weight-transport disk"
            return [Problem(_passed_on_flag("--sglang-", name), flags[name], message)]
    return []


def check_indexer_replay(s: Settings) -> list[Problem]:
    """SGLang reports the positions of single keys, and only where each GPU of a server has the
    attention of its own requests."""
    if not (uses_sglang(s) and s.rollout.use_rollout_indexer_replay):
        return []
    name = "use_rollout_indexer_replay"
    if s.core.get("index_pool", 1) > 1 or not s.core.get("multi_latent_attention"):
        message = (
            "not supported with --rollout-engine sglang for this model: servers report keys of "
            "DeepSeek-V3.2, GLM-5, 5.1 and 5.2; use --rollout-engine local, or remove it"
        )
        return problem(name, None, message)
    gpus = s.sglang.rollout_num_gpus_per_engine
    flags = s.sglang.sglang_server_flags or {}
    alone = flags.get("enable_dp_attention") and str(flags.get("dp_size", 1)) == str(gpus)
    if gpus_of_servers(s) is None or gpus == 1 or alone:
        return []
    message = (
        f"requires --sglang-enable-dp-attention --sglang-dp-size {gpus}: a server reports selected "
        "keys only where each GPU has the attention of its own requests"
    )
    return problem(name, None, message)


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
    check_unused_sglang_flags,
    check_server_addresses,
    check_started_servers,
    check_sglang_installation,
    check_weight_transport,
    check_sampling_masks,
    check_indexer_replay,
)
