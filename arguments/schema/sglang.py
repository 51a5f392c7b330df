"""SGLang servers that generate: where they are, how they are asked, and how they get weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_like.config import AT_LEAST_ONE, POSITIVE, CheckedSettings, arg


@dataclass(frozen=True, slots=True)
class SglangConfig(CheckedSettings):
    rollout_external_engine_addrs: list[str] | None = arg(
        None,
        "Servers that run already, host:port each. This run hands them its weights, so nobody else may use them.",
        nargs="+",
    )
    rollout_num_gpus: int | None = arg(
        None, "GPUs for servers that this run starts on its nodes, behind the trainer's own GPUs there. Without a GPU: server processes. "
        "Default: with --colocate as many as the trainer has.",
        legal=AT_LEAST_ONE,
    )  # fmt: skip
    rollout_num_gpus_per_engine: int = arg(
        1, "GPUs of each of these servers: its tensor-parallel size.", legal=AT_LEAST_ONE
    )
    colocate: bool = arg(
        False,
        "Servers on every node share the trainer's GPUs; each side's memory is released while the other one works.",
    )
    offload_train: bool | None = arg(
        None,
        "While servers generate, the trained networks' weights, gradient buffers and optimizer state are in host memory. Default: with --colocate.",
        excludes="async_rollout",
    )
    offload_rollout: bool | None = arg(
        None,
        "While the trainer works, the servers give up the memory of weights and KV cache. Default: with --colocate.",
        excludes="async_rollout",
    )
    sglang_python: str | None = arg(
        None,
        "Interpreter (or a wrapper of one) that has SGLang, for servers that this run starts. Default: the one that runs the trainer.",
    )
    sglang_router_ip: str | None = arg(
        None,
        "Host of an sglang_router that runs already. Its workers are the servers unless addresses are given.",
    )
    sglang_router_port: int | None = arg(None, "Port of that router.", legal=POSITIVE)
    no_sglang_router: bool = arg(
        False,
        "Send each request to the server that has the fewest of ours, in place of starting an sglang_router.",
        excludes="sglang_router_ip",
    )
    sglang_server_concurrency: int = arg(
        512, "Requests that wait for one server at a time.", legal=AT_LEAST_ONE
    )
    rollout_connect_timeout_s: float = arg(
        10.0, "Seconds for a server to let a request in.", legal=POSITIVE
    )
    rollout_read_timeout_s: float = arg(
        900.0,
        "Seconds without a byte after which a request is sent again. An answer comes whole, at its end.",
        legal=POSITIVE,
    )
    rollout_request_timeout_s: float = arg(
        1800.0, "Seconds for one answer in all, however slowly it comes.", legal=POSITIVE
    )
    rollout_request_attempts: int = arg(
        6, "Times that a request is sent before its sample is dropped.", legal=AT_LEAST_ONE
    )
    rollout_health_check_interval: float = arg(
        10.0, "Seconds between two health probes of a server.", legal=POSITIVE
    )
    rollout_health_check_timeout: float = arg(
        10.0,
        "Seconds for a probe; three without an answer, one after the other, and the server is out.",
        legal=POSITIVE,
    )
    rollout_health_check_first_wait: float = arg(
        600.0, "Seconds for the servers to start.", legal=POSITIVE
    )
    update_weight_transport: str | None = arg(
        None,
        "How weights reach the servers; default: with --colocate cuda_ipc (without a GPU: tensor), else broadcast.",
    )
    update_weight_mode: str = arg(
        "full",
        "What reaches the servers' nodes: all weights, or the bits that changed since the last update, which each node applies to its own checkpoint; "
        "that is lossless, and needs --update-weight-transport disk.",
        choices=("full", "delta"),
    )
    update_weight_local_checkpoint_dir: str | None = arg(
        None,
        "With --update-weight-mode delta: this node's own copy of the weights, from which its servers load. Default: a temporary folder.",
        only_with="update_weight_mode=delta",
    )
    update_weight_full_interval: int = arg(
        20,
        "With --update-weight-mode delta: every so many updates all weights are written too, from which a late node starts; older ones are removed then.",
        legal=AT_LEAST_ONE,
        only_with="update_weight_mode=delta",
    )
    update_weight_buffer_size: int = arg(
        512 * 2**20,
        "Bytes of one message with weights, and of one collective that gathers them.",
        legal=AT_LEAST_ONE,
    )
    update_weight_timeout_s: float = arg(
        300.0, "Seconds for one message with weights, or for a load from disk.", legal=POSITIVE
    )
    update_weight_disk_dir: str | None = arg(
        None,
        "With --update-weight-transport disk: a folder that trainer and servers see under one name. Default: a temporary one of this host.",
        only_with="update_weight_transport=disk",
    )
    update_weight_disk_keep_files: bool = arg(
        False, "Keep what is written to --update-weight-disk-dir.", needs="update_weight_disk_dir"
    )
    no_update_weight_copy: bool = arg(
        False,
        "With --update-weight-transport broadcast: do not keep the weights in rank 0's memory; every rank that has weights then sends them itself. "
        "A server that is started again, or comes late, gets no requests before the next update.",
    )
    check_weight_update_equal: bool = arg(
        False,
        "After every weight update, not only the first: the servers' checksums are equal, and the trainer's log-probs of freshly sampled tokens are "
        "theirs. Before the first one the servers' weights are overwritten with noise, so that a weight that is not sent shows.",
    )
    sglang_server_flags: dict[str, Any] | None = arg(
        None,
        "Settings of SGLang's ServerArgs for servers that this run starts; --sglang-mem-fraction-static 0.7 is an entry of it.",
    )
    sglang_router_flags: dict[str, Any] | None = arg(
        None,
        "Settings of the sglang_router that this run starts; --router-policy round_robin is an entry of it.",
    )
