"""How a vLLM server is started, by a run or by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

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
) -> tuple[str, ...]:
    """overrides: the user's --vllm flags, which override ours."""
    settings: dict[str, object] = {
        "model": model,
        "host": host,
        "port": port,
        "tensor_parallel_size": gpus,
        "dtype": dtype,
        "disable_uvicorn_access_log": True,
    }
    settings |= {} if cuda else dict(CPU_SETTINGS)
    settings |= dict(overrides) | dict(SERVER_SETTINGS)
    module = "vllm.entrypoints.openai.api_server"
    return (python, "-m", module, *command_line_of(settings))


def cpu_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The defaults that `environment` does not set."""
    return {name: value for name, value in _CPU_VARIABLES.items() if name not in environment}


def by_hand(dtype: str) -> str:
    """The start of a command line for a server of one's own."""
    variables = " ".join(f"{name}={value}" for name, value in SERVER_VARIABLES.items())
    flags = " ".join(command_line_of({"dtype": dtype, **SERVER_SETTINGS}))
    return f"{variables} vllm serve FOLDER {flags}"
