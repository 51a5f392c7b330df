"""Rules about vLLM servers. `rules/sglang.py` has those that servers of both kinds share."""

from __future__ import annotations

import importlib.util

from arguments.hf.quantization import has_quantized_weights
from arguments.rules.base import Rule, Settings, problem
from arguments.rules.sglang import gpus_of_servers, unknown_settings
from arguments.sglang_install import folder_of, interpreter
from arguments.vllm_install import engine_fields
from slime_like.config import Problem
from slime_like.extras import pip_install

# Server settings that the run sets itself.
OWN_SETTINGS = (
    "model",
    "host",
    "port",
    "tensor_parallel_size",
    "data_parallel_size",
    "nnodes",
    "node_rank",
    "dtype",
    "logprobs_mode",
    "worker_extension_cls",
    "enable_scale_out",
    "skip_tokenizer_init",
    "tokens_only",
)


def uses_vllm(s: Settings) -> bool:
    return s.rollout.rollout_engine == "vllm"


def check_vllm_limits(s: Settings) -> list[Problem]:
    """What vLLM servers are not asked for."""
    if not uses_vllm(s):
        return []
    problems = []
    if s.rollout.rollout_top_p < 1 or s.rollout.rollout_top_k > 0:
        name = "rollout_top_p" if s.rollout.rollout_top_p < 1 else "rollout_top_k"
        message = (
            "not supported with --rollout-engine vllm, whose log-probs are normalised over the "
            "tokens that it keeps; leave it out, or use --rollout-engine sglang or local"
        )
        problems += problem(name, getattr(s.rollout, name), message)
    if s.rollout.use_rollout_routing_replay:
        message = "not supported with --rollout-engine vllm; use sglang or local"
        problems += problem("use_rollout_routing_replay", None, message)
    if s.data.multimodal_keys is not None:
        message = "not supported with --rollout-engine vllm; use sglang or local"
        problems += problem("multimodal_keys", None, message)
    if has_quantized_weights(s.model.hf_checkpoint):
        message = (
            "is quantised, and weight updates of --rollout-engine vllm are not; use sglang or a "
            "folder in bf16"
        )
        problems += problem("hf_checkpoint", s.model.hf_checkpoint, message)
    if s.sglang.rollout_num_gpus_per_engine > 1 and not s.machine.cuda:
        message = "must be 1 without a GPU: a server on a CPU has one rank"
        problems += problem(
            "rollout_num_gpus_per_engine", s.sglang.rollout_num_gpus_per_engine, message
        )
    return problems


def check_vllm_installation(s: Settings) -> list[Problem]:
    """vLLM is installed if the run starts it, and has the flags that are passed on."""
    if not uses_vllm(s) or s.preflight.preflight:  # preflight: only the job's machines need it
        return []
    if importlib.util.find_spec("httpx") is None:
        return problem("rollout_engine", "vllm", f"requires httpx: {pip_install('sglang')}")
    gpus = gpus_of_servers(s)
    if gpus is None or s.sglang.rollout_external_engine_addrs is not None or s.sglang.colocate:
        return []  # the latter two are reported with other rules
    python = interpreter(s.vllm.vllm_python)
    try:
        vllm = folder_of(python, "vllm")
    except (OSError, ValueError) as error:
        return problem("vllm_python", s.vllm.vllm_python, f"cannot be run: {error}")
    if vllm is None:
        message = f"requires vLLM, which {python} does not have; set --vllm-python"
        return problem("rollout_num_gpus", gpus, message)
    return unknown_settings("--vllm-", s.vllm.vllm_server_flags, engine_fields(vllm), OWN_SETTINGS)


VLLM_RULES: tuple[Rule, ...] = (check_vllm_limits, check_vllm_installation)
