"""Rules of --true-on-policy-mode."""

from __future__ import annotations

from arguments.rules.base import Rule, Settings, problem
from arguments.rules.sglang import gpus_of_servers
from arguments.sglang_install import deterministic_backends, interpreter, packages_of
from slime_like.config import Problem

FLAG = "true_on_policy_mode"
# settings of SGLang servers
DETERMINISTIC = "enable_deterministic_inference"
BACKEND = "attention_backend"


def check_trainer(s: Settings) -> list[Problem]:
    """What the trainer cannot repeat bit for bit, with any engine."""
    if not s.guards.true_on_policy_mode:
        return []
    problems = []
    for name in ("attention_dropout", "hidden_dropout"):
        if s.core.get(name):
            message = "must be 0 with --true-on-policy-mode: the sampler drops nothing"
            problems += problem(name, s.core[name], message)
    if s.algorithm.observation_loss_coef:
        message = (
            "must be 0 with --true-on-policy-mode: rows of observations change the size of the "
            "trainer's matrix products"
        )
        problems += problem("observation_loss_coef", s.algorithm.observation_loss_coef, message)
    return problems


def check_local_engine(s: Settings) -> list[Problem]:
    """What the trainer cannot draw by itself, sample by sample."""
    if not s.guards.true_on_policy_mode or s.rollout.rollout_engine != "local":
        return []
    problems = []
    parallel = s.parallel
    split = {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
    }
    for name, size in split.items():
        if size > 1:
            message = (
                "must be 1 with --true-on-policy-mode and the local engine: each rank draws its "
                "own samples with the whole model; use data parallelism"
            )
            problems += problem(name, size, message)
    whole: dict[str, object] = {
        "custom_generate_function_path": s.scheduling.custom_generate_function_path,
        "rollout_function_path": s.scheduling.rollout_function_path,
        "data_source_path": s.scheduling.data_source_path,
        "rollout_slice_len": s.scheduling.rollout_slice_len,
        "agent_function_path": s.agents.agent_function_path,
        "agent_command": s.agents.agent_command,
        "agent_environment": s.agents.agent_environment,
        "agent_worker_keys": s.agents.agent_worker_keys,
        "multimodal_keys": s.data.multimodal_keys,
        "use_rollout_routing_replay": s.rollout.use_rollout_routing_replay,
        "use_rollout_indexer_replay": s.rollout.use_rollout_indexer_replay,
    }
    for name, value in whole.items():
        if value:
            message = (
                "not supported by --true-on-policy-mode with the local engine, which draws "
                "responses of one turn, each as a whole; remove it"
            )
            problems += problem(name, None, message)
    return problems


def check_servers(s: Settings) -> list[Problem]:
    """SGLang's deterministic kernels: for GPUs, with some of its attention backends."""
    if not s.guards.true_on_policy_mode or s.rollout.rollout_engine != "sglang":
        return []
    if (
        s.preflight.preflight or gpus_of_servers(s) is None
    ):  # others' servers are asked at the start
        return []
    if not s.machine.cuda:
        message = (
            "requires a GPU with --rollout-engine sglang: its deterministic kernels have no CPU "
            "version; use --rollout-engine local, or remove it"
        )
        return problem(FLAG, None, message)
    flags = s.sglang.sglang_server_flags or {}
    if flags.get(DETERMINISTIC, True) is not True:
        message = "must be on with --true-on-policy-mode; remove it"
        return [Problem("--sglang-enable-deterministic-inference", flags[DETERMINISTIC], message)]
    sglang, _ = packages_of(interpreter(s.sglang.sglang_python))
    if sglang is None or BACKEND not in flags:
        return []
    legal = deterministic_backends(sglang)
    if legal and flags[BACKEND] not in legal:
        message = (
            f"is not deterministic; with --true-on-policy-mode use {', '.join(sorted(legal))}, or "
            "leave it out"
        )
        return [Problem("--sglang-attention-backend", flags[BACKEND], message)]
    return []


ON_POLICY_RULES: tuple[Rule, ...] = (check_trainer, check_local_engine, check_servers)
