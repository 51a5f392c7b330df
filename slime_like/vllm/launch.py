"""How a vLLM server is started, by a run or by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from arguments.vllm_install import LORA_RANKS
from slime_like.servers.processes import command_line_of

EXTENSION = "slime_like_vllm.WeightUpdates"
EXTENSION_FOLDER = Path(__file__).with_name("worker")
LOG_PROBS = "processed_logprobs"  # of the temperature that is sampled at
# Variables that a server needs: the endpoints that a trainer calls, and the worker extension.
SERVER_VARIABLES: Mapping[str, str] = {
    "VLLM_SERVER_DEV_MODE": "1",
    "PYTHONPATH": str(EXTENSION_FOLDER),
}
# Settings that a server needs.
SERVER_SETTINGS: Mapping[str, object] = {
    "logprobs_mode": LOG_PROBS,
    "worker_extension_cls": EXTENSION,
    "enable_scale_out": True,  # /inference/v1/generate
}
# With adapters: the endpoints that load them.
ADAPTER_VARIABLES: Mapping[str, str] = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
# Defaults on a machine without a GPU; the user's flags and variables override them.
CPU_SETTINGS: Mapping[str, object] = {"enforce_eager": True, "max_num_seqs": 64}
_CPU_VARIABLES: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers share the cores
}


def server_command(
    python: str,
    *,
    model: str,
    host: str,
    port: int,
    gpus: int,
    dtype: str,
    cuda: bool,
    overrides: Mapping[str, object],
    lora_rank: int = 0,
) -> tuple[str, ...]:
    """
    Args:
        overrides: The user's --vllm flags, which override ours.
        lora_rank: Of adapters that the server gets; 0: it gets none.
    """
    settings: dict[str, object] = {
        "model": model,
        "host": host,
        "port": port,
        "tensor_parallel_size": gpus,
        "dtype": dtype,
        "disable_uvicorn_access_log": True,
    }
    settings |= {} if cuda else dict(CPU_SETTINGS)
    settings |= adapter_settings(lora_rank) | dict(overrides) | dict(SERVER_SETTINGS)
    module = "vllm.entrypoints.openai.api_server"
    return (python, "-m", module, *command_line_of(settings))


def cpu_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The defaults that `environment` does not set."""
    return {name: value for name, value in _CPU_VARIABLES.items() if name not in environment}


def adapter_settings(rank: int) -> dict[str, object]:
    """Settings of a server that gets adapters of this rank: two at once, since requests keep theirs
    over an update. 0: it gets none."""
    if not rank:
        return {}
    largest = min(legal for legal in LORA_RANKS if legal >= rank)
    return {"enable_lora": True, "max_lora_rank": largest, "max_loras": 2, "max_cpu_loras": 4}


def by_hand(dtype: str, lora_rank: int = 0) -> str:
    """The start of a command line for a server of one's own."""
    needed = {**SERVER_VARIABLES, **(ADAPTER_VARIABLES if lora_rank else {})}
    variables = " ".join(f"{name}={value}" for name, value in needed.items())
    settings = {"dtype": dtype, **SERVER_SETTINGS, **adapter_settings(lora_rank)}
    flags = " ".join(command_line_of(settings))
    return f"{variables} vllm serve FOLDER {flags}"
