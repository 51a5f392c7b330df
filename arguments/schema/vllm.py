"""vLLM servers for rollouts. Their number, addresses, time limits and weight updates have the
settings of SGLang's (`SglangConfig`)."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import CheckedSettings, arg


@dataclass(frozen=True, slots=True)
class VllmConfig(CheckedSettings):
    vllm_python: str | None = arg(
        None,
        "Python interpreter with vLLM, for servers that this run starts. Default: the trainer's.",
    )
    vllm_server_flags: dict[str, object] | None = arg(
        None,
        "vLLM's engine arguments for servers that this run starts, each as its own flag, e.g. "
        "--vllm-gpu-memory-utilization 0.8.",
    )
