"""Whether a vLLM server, perhaps started by hand, has the settings that a trainer needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime_like.checked_json import InvalidResponse, read
from slime_like.errors import RunError
from slime_like.servers.http import CONTROL_S, RequestFailed
from slime_like.servers.server_pool import ServerPool, Worker
from slime_like.vllm.api import ServerInfo, VllmApi
from slime_like.vllm.launch import ADAPTER_VARIABLES, EXTENSION, LOG_PROBS, by_hand

STATUS_NOT_FOUND = "status_404"


@dataclass(frozen=True, slots=True)
class Needs:
    """What differs between runs."""

    dtype: str  # e.g. bfloat16
    length: int  # tokens of the longest prompt and response that the run asks for
    lora_rank: int = 0  # of adapters that it gets


def check_server(pool: ServerPool, worker: Worker, needs: Needs) -> None:
    """Raise RunError naming every setting that is missing, and how to start a server."""
    problems = _problems(pool, worker, needs)
    if problems:
        raise RunError(
            f"the engine {worker.url} lacks settings of --rollout-engine vllm: "
            f"{'; '.join(problems)}. Start it with: {by_hand(needs.dtype, needs.lora_rank)}"
        )


def _problems(pool: ServerPool, worker: Worker, needs: Needs) -> list[str]:
    path = VllmApi.info_path
    try:
        # its answer describes the whole machine
        answer = pool.call(worker, path, timeout_s=2 * CONTROL_S, method="GET")
        info = read(ServerInfo, answer).vllm_config
    except RequestFailed as failure:
        if failure.kind == STATUS_NOT_FOUND:
            return ["it has no /server_info (VLLM_SERVER_DEV_MODE=1)"]
        raise RunError(str(failure)) from None
    except InvalidResponse as bad:
        raise RunError(f"{worker.url}{path}: {bad}; is it a vLLM server?") from None
    problems = []
    served = info.served
    if served.logprobs_mode != LOG_PROBS:
        problems.append(f"--logprobs-mode is {served.logprobs_mode}, must be {LOG_PROBS}")
    if served.dtype.removeprefix("torch.") != needs.dtype:
        problems.append(f"--dtype is {served.dtype.removeprefix('torch.')}, must be {needs.dtype}")
    if served.max_model_len < needs.length:
        problems.append(
            f"--max-model-len is {served.max_model_len}, must be at least {needs.length}"
        )
    if info.parallel_config.worker_extension_cls != EXTENSION:
        problems.append(f"--worker-extension-cls must be {EXTENSION}")
    if not _has(pool, worker, VllmApi.generate_path):
        problems.append("it has no /inference/v1/generate (--enable-scale-out)")
    if needs.lora_rank:
        largest = 0 if info.lora_config is None else info.lora_config.max_lora_rank
        if largest < needs.lora_rank:
            problems.append(
                f"--lora-sync adapter: --max-lora-rank is {largest}, must be at least "
                f"{needs.lora_rank} (with --enable-lora)"
            )
        load = VllmApi().adapter_folder("", Path()).path
        if not _has(pool, worker, load):
            ((variable, value),) = ADAPTER_VARIABLES.items()
            problems.append(f"--lora-sync adapter: it has no {load} ({variable}={value})")
    return problems


def _has(pool: ServerPool, worker: Worker, path: str) -> bool:
    """Whether the path of a POST exists: then a GET is refused as the wrong method."""
    try:
        pool.call(worker, path, timeout_s=CONTROL_S, method="GET")
    except RequestFailed as failure:
        return failure.kind != STATUS_NOT_FOUND
    return True
