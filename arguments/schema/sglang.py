"""SGLang servers for rollouts: placement, requests, health checks and weight sync."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import AT_LEAST_ONE, POSITIVE, CheckedSettings, arg


@dataclass(frozen=True, slots=True)
class SglangConfig(CheckedSettings):
    rollout_external_engine_addrs: list[str] | None = arg(
        None,
        "External servers, host:port each. The run syncs its weights to them, so no one else may "
        "use them.",
        nargs="+",
    )
    rollout_num_gpus: int | None = arg(
        None,
        "GPUs for servers that this run starts on its nodes, after the trainer's GPUs there. "
        "Without a GPU: number of server processes. Default with --colocate: all GPUs of the "
        "trainer.",
        legal=AT_LEAST_ONE,
    )
    rollout_num_gpus_per_engine: int = arg(
        1, "GPUs of each of these servers: its tensor-parallel size.", legal=AT_LEAST_ONE
    )
    colocate: bool = arg(
        False,
        "Servers share the GPUs of the trainer; each side releases its memory while the other "
        "works.",
        excludes="async_rollout, which samples while the trainer works",
    )
    offload_train: bool | None = arg(
        None,
        "Offload weights, gradient buffers and optimizer state of the trained models to host "
        "memory while servers generate. Default: on with --colocate.",
        excludes="async_rollout",
    )
    offload_rollout: bool | None = arg(
        None,
        "Servers release the memory of weights and KV cache while the trainer works. Default: on "
        "with --colocate.",
        excludes="async_rollout",
    )
    sglang_python: str | None = arg(
        None,
        "Python interpreter (or a wrapper) with SGLang, for servers that this run starts. Default: "
        "the trainer's.",
    )
    sglang_router_ip: str | None = arg(
        None,
        "Host of an external sglang_router. Its workers are the servers, unless addresses are "
        "given.",
    )
    sglang_router_port: int | None = arg(
        None,
        "Port of the external sglang_router; without --sglang-router-ip, of the one that this run "
        "starts. Default: a free port.",
        legal=POSITIVE,
        required_with=("sglang_router_ip", "rollout_engine=sglang"),
    )
    no_sglang_router: bool = arg(
        False,
        "Do not start an sglang_router; send each request to the server with the fewest requests "
        "in flight.",
        excludes=("sglang_router_ip", "sglang_router_port"),
    )
    sglang_server_concurrency: int = arg(512, "Concurrent requests per server.", legal=AT_LEAST_ONE)
    rollout_connect_timeout_s: float = arg(
        10.0, "Connect timeout of a request, in seconds.", legal=POSITIVE
    )
    rollout_read_timeout_s: float = arg(
        900.0,
        "Read timeout of a request in seconds, after which it is retried. Responses are not "
        "streamed, so this bounds the whole generation.",
        legal=POSITIVE,
    )
    rollout_request_timeout_s: float = arg(
        1800.0, "Total timeout of a request, in seconds.", legal=POSITIVE
    )
    rollout_request_attempts: int = arg(
        6, "Attempts per request before its sample is dropped.", legal=AT_LEAST_ONE
    )
    rollout_health_check_interval: float = arg(
        10.0, "Seconds between health probes of a server.", legal=POSITIVE
    )
    rollout_health_check_timeout: float = arg(
        10.0,
        "Timeout of a health probe in seconds; a server is evicted after three consecutive failed "
        "probes.",
        legal=POSITIVE,
    )
    rollout_health_check_first_wait: float = arg(
        600.0, "Time limit for servers to start, in seconds.", legal=POSITIVE
    )
    update_weight_transport: str | None = arg(
        None,
        "How weights reach the servers; default: with --colocate cuda_ipc (without a GPU: "
        "tensor), else broadcast.",
    )
    update_weight_mode: str = arg(
        "full",
        "full: send all weights. delta: send only the bits that changed since the last update, "
        "which each node applies to its own checkpoint; lossless, needs --update-weight-transport "
        "disk.",
        choices=("full", "delta"),
    )
    update_weight_local_checkpoint_dir: str | None = arg(
        None,
        "With --update-weight-mode delta: folder of this node's copy of the weights, which its "
        "servers load. Default: a temporary folder.",
        only_with="update_weight_mode=delta",
    )
    update_weight_full_interval: int = arg(
        20,
        "With --update-weight-mode delta: write a full update every N updates, from which late "
        "nodes start; earlier updates are then removed.",
        legal=AT_LEAST_ONE,
        only_with="update_weight_mode=delta",
    )
    update_weight_buffer_size: int = arg(
        512 * 2**20,
        "Bucket size of weight updates in bytes: of one message, and of one collective that "
        "gathers weights.",
        legal=AT_LEAST_ONE,
    )
    update_weight_timeout_s: float = arg(
        300.0,
        "Time limit of one weight bucket, or of a load from disk, in seconds.",
        legal=POSITIVE,
    )
    update_weight_disk_dir: str | None = arg(
        None,
        "With --update-weight-transport disk: a folder at the same path for trainer and servers. "
        "Default: a temporary folder on this host.",
        only_with="@weight_folder",
    )
    update_weight_disk_keep_files: bool = arg(
        False,
        "Keep the weights written to --update-weight-disk-dir.",
        needs="update_weight_disk_dir",
    )
    no_update_weight_copy: bool = arg(
        False,
        "With --update-weight-transport broadcast: keep no copy of the weights in rank 0's host "
        "memory; every rank then sends its own weights. A restarted or late server gets no "
        "requests until the next update.",
    )
    check_weight_update_equal: bool = arg(
        False,
        "Check every weight update, not only the first: servers must have equal checksums, and "
        "trainer and servers equal log-probs of freshly sampled tokens. Before the first update "
        "the servers' weights are overwritten with noise, so that a missing weight is detected.",
    )
    sglang_server_flags: dict[str, object] | None = arg(
        None,
        "SGLang ServerArgs for servers that this run starts, each as its own flag, e.g. "
        "--sglang-mem-fraction-static 0.7.",
    )
    sglang_router_flags: dict[str, object] | None = arg(
        None,
        "Arguments of the sglang_router that this run starts, each as its own flag, e.g. "
        "--router-policy round_robin.",
    )
