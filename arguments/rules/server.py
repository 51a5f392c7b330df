"""Rules about the server's command line, and a rule that rejects its settings in train.py."""

from __future__ import annotations

import dataclasses
import importlib.util
import ipaddress
from pathlib import Path

from arguments.flag_registry import GROUPS
from arguments.hf.lora_modules import MERGED, unserved_beside_base, without_attention
from arguments.hf.model import read_hf_model
from arguments.rules.base import Rule, Settings, Warn, problem, reject
from arguments.rules.declared import declared_problems, flags_without
from arguments.rules.images import IMAGE_NETWORK_RULES
from arguments.rules.layout import PARALLEL_RULES
from arguments.rules.moe import MOE_RULES
from arguments.rules.network import NETWORK_RULES
from arguments.rules.sglang import (
    check_server_addresses,
    check_sglang_installation,
    check_started_servers,
    check_unused_sglang_flags,
    uses_sglang,
)
from arguments.rules.training import OFFLOAD, OPTIMIZER_RULES, PRECISE
from arguments.schema import ServerConfig
from slime_like.config import ConfigError, Problem, flag_name
from slime_like.extras import pip_install
from slime_like.losses.registry import policy_losses

SERVER_FIELDS = frozenset(field.name for field in dataclasses.fields(ServerConfig))
# Settings of the server from groups that otherwise belong to train.py
SHARED_FIELDS = {
    "max_tokens_per_gpu",
    "log_probs_chunk_size",
    "rollout_local_batch_size",
    "print_megatron_patches",
    "no_verify_checkpoint",
    "config",
    "rollout_engine",
    "lora_sync",
}
TRAINER_GROUPS = [
    "data",
    "eval",
    "rollout",
    "scheduling",
    "agents",
    "reward",
    "algorithm",
    "lora",
    "distillation",
    "off_policy",
    "critic",
    "value_loss",
    "guards",
    "schedule",
    "checkpoint",
    "logging",
    "debug",
    "profiling",
    "preflight",
]
TRAINER_MODEL_FIELDS = {"ref_load", "ref_ckpt_step", "ref_offload", "mtp_num_layers"}
OPTIM_STEP_FIELDS = (
    "lr",
    "min_lr",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
)
# Without use for the server's SGLang, which loads snapshots
OF_WEIGHT_SYNC = (
    "update_weight_transport",
    "update_weight_buffer_size",
    "update_weight_disk_dir",
    "update_weight_disk_keep_files",
    "colocate",
    "update_weight_mode",
    "offload_train",
    "offload_rollout",
)
KEY_PREFIX = "tml-"
MIN_KEY_LENGTH = 12


def reject_server_flags(s: Settings) -> list[Problem]:
    """Settings of the server are rejected by train.py."""
    message = "is a flag of python -m slime_like.tinker; remove it"
    names = sorted(s.given & SERVER_FIELDS)
    return [Problem(flag_name(name), getattr(s.server, name), message) for name in names]


def trainer_fields() -> set[str]:
    """Fields of the settings that train.py has and the server does not."""
    types = [GROUPS[group][1] for group in TRAINER_GROUPS]
    types += [loss.config_type for _, loss in policy_losses.items()]
    fields = {field.name for config_type in types for field in dataclasses.fields(config_type)}
    return (fields | TRAINER_MODEL_FIELDS) - SHARED_FIELDS


def reject_trainer_flags(s: Settings) -> list[Problem]:
    message = "is a flag of train.py and has no effect here; remove it"
    problems = [Problem(flag_name(n), None, message) for n in sorted(s.given & trainer_fields())]
    for name in OPTIM_STEP_FIELDS:
        if name in s.given:
            message = "is set by the client with every optimizer step; remove it"
            problems += problem(name, s.core[name], message)
    return problems


def check_declared_rules_of_server(s: Settings) -> list[Problem]:
    """The declared rules, except those about settings of the trainer."""
    # lora_sync needs a rank in a run; here clients bring theirs
    hidden = trainer_fields() | {"use_dynamic_batch_size", "lora_sync", *OF_WEIGHT_SYNC}
    return declared_problems(s, flags_without(frozenset(hidden)))


def check_gradient_overlap(s: Settings) -> list[Problem]:
    """Overlapped reduction is incompatible with the server, where several calls accumulate
    gradients that are reduced at the optimizer step."""
    names = ("overlap_grad_reduce", "overlap_param_gather")
    message = "not supported by the server, which reduces gradients at the optimizer step"
    return reject({name: s.core.get(name) for name in names}, f"{message}; remove it")


def check_server_optimizer(s: Settings) -> list[Problem]:
    name = s.core.get("optimizer", "adam")
    if name == "adam":
        return []
    return problem("optimizer", name, "must be adam: the API supports AdamW only")


def check_optimizer_swapping(s: Settings) -> list[Problem]:
    """The server swaps models tensor by tensor, which is supported for the state of torch's Adam
    only."""
    settings = {name: s.core.get(name) for name in (PRECISE, OFFLOAD)}
    return reject(settings, "not supported by the server, which swaps models; remove it")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_server_sglang(s: Settings) -> list[Problem]:
    """Settings without use for SGLang servers of the Tinker server, which load sampling snapshots
    from --server-dir, one at a time."""
    if s.rollout.rollout_engine == "vllm":
        message = "not supported by the server; legal values: local, sglang"
        return problem("rollout_engine", "vllm", message)
    if not uses_sglang(s):
        return []
    problems = []
    for name in OF_WEIGHT_SYNC:
        if name in s.given:
            message = "has no effect: SGLang servers load snapshots from --server-dir; remove it"
            problems += problem(name, None, message)
    if "max_sampler_engines" in s.given:
        message = "only valid with --rollout-engine local: SGLang servers hold one snapshot"
        problems += problem("max_sampler_engines", s.server.max_sampler_engines, message)
    if "rollout_local_batch_size" in s.given:
        message = "only valid with --rollout-engine local; use --sglang-server-concurrency"
        problems += problem("rollout_local_batch_size", s.rollout.rollout_local_batch_size, message)
    return problems


def check_server_adapters(s: Settings) -> list[Problem]:
    """The sampler can hold clients' adapters beside the base model."""
    served = s.lora.lora_sync == "adapter" and uses_sglang(s)
    problems = []
    if uses_sglang(s) and not served and "max_sampler_adapters" in s.given:
        message = "has no effect without --lora-sync adapter; add it or remove this flag"
        problems += problem("max_sampler_adapters", s.server.max_sampler_adapters, message)
    if "max_adapter_rank" in s.given and not served:
        message = "only valid with --rollout-engine sglang and --lora-sync adapter; remove it"
        problems += problem("max_adapter_rank", s.server.max_adapter_rank, message)
    if s.lora.lora_sync != "adapter":
        return problems
    found = s.sglang.rollout_external_engine_addrs is not None
    if served and s.sglang.rollout_num_gpus is None and not found:
        message = (
            "requires SGLang servers that the server starts itself (--rollout-num-gpus) or that "
            "are named (--rollout-external-engine-addrs): what a router finds later cannot be "
            "checked; add one of these, or use --lora-sync merged"
        )
        problems += problem("lora_sync", "adapter", message)
    if served and str((s.sglang.sglang_server_flags or {}).get("dp_size", 1)) != "1":
        message = "requires servers without data parallelism; remove --sglang-dp-size"
        problems += problem("lora_sync", "adapter", message)
    reasons = _no_adapters_beside(s)
    return problems + [p for words in reasons for p in problem("lora_sync", "adapter", words)]


def _no_adapters_beside(s: Settings) -> list[str]:
    """Why the sampler holds no adapters beside this base model."""
    if s.model.hf_checkpoint is None:
        return []
    try:
        model = read_hf_model(s.model.hf_checkpoint)
    except ConfigError:  # reported where the model is read
        return []
    reason = without_attention(model.transformer)
    reasons = [reason] if reason else unserved_beside_base(s.model.hf_checkpoint, model)
    if uses_sglang(s) and model.transformer.get("multi_latent_attention"):
        reasons.append(f"servers apply no adapters to multi-latent attention{MERGED}")
    return reasons


def warn_rounded_adapters(s: Settings) -> str | None:
    """Warn of merging by default where it loses small updates."""
    dtypes = [name for name in ("bf16", "fp16") if s.core.get(name)]
    if not dtypes or "lora_sync" in s.given or _no_adapters_beside(s):
        return None
    return (
        f"samples of adapters are drawn from copies of the model rounded to {dtypes[0]}, in which "
        "small updates are lost: --lora-sync adapter serves adapters as they are (--lora-sync "
        "merged says that copies are meant)"
    )


def check_server_address(s: Settings) -> list[Problem]:
    if s.server.api_key_file is not None or is_loopback(s.server.host):
        return []
    message = "requires --api-key-file, because other machines can reach it; or use 127.0.0.1"
    return problem("host", s.server.host, message)


def check_key_files(s: Settings) -> list[Problem]:
    problems: list[Problem] = []
    for name in ("api_key_file", "operator_key_file"):
        path = getattr(s.server, name)
        try:
            if path is not None:
                valid_keys(path)
        except (UnicodeDecodeError, OSError) as error:
            problems += problem(name, path, f"cannot be read: {error}")
        except ValueError as error:
            problems += problem(name, path, str(error))
    return problems


def valid_keys(path: str) -> list[str]:
    """Read API keys from a file, one per line. Raises OSError or ValueError."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ValueError("has no keys; write one per line")
    for number, key in enumerate(keys, 1):
        if not key.startswith(KEY_PREFIX) or len(key) < MIN_KEY_LENGTH:
            raise ValueError(
                f"key {number} must begin with {KEY_PREFIX}, as clients require, and have at least "
                f"{MIN_KEY_LENGTH} characters"
            )
    return keys


def check_server_packages(s: Settings) -> list[Problem]:
    missing = [name for name in ("fastapi", "uvicorn", "google.protobuf") if not _installed(name)]
    if not missing:
        return []
    message = f"requires {', '.join(missing)}: {pip_install('server')}"
    return problem("port", None, message)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def check_max_sequence_length(s: Settings) -> list[Problem]:
    longest = s.server.max_sequence_length
    positions = s.gpt.max_position_embeddings
    if longest is None or positions is None or longest <= positions:
        return []
    message = f"exceeds the {positions} positions of the network (--max-position-embeddings)"
    return problem("max_sequence_length", longest, message)


def check_server_dir(s: Settings) -> list[Problem]:
    path = Path(s.server.server_dir)
    if path.exists() and not path.is_dir():
        return problem("server_dir", s.server.server_dir, "is a file; must be a folder")
    return []


SERVER_RULES: tuple[Rule, ...] = (
    check_declared_rules_of_server,
    *PARALLEL_RULES,
    *NETWORK_RULES,
    *MOE_RULES,
    reject_trainer_flags,
    check_gradient_overlap,
    check_server_optimizer,
    check_optimizer_swapping,
    *OPTIMIZER_RULES,
    *IMAGE_NETWORK_RULES,
    check_server_address,
    check_key_files,
    check_server_packages,
    check_server_sglang,
    check_server_adapters,
    check_unused_sglang_flags,
    check_server_addresses,
    check_started_servers,
    check_sglang_installation,
    check_max_sequence_length,
    check_server_dir,
)

SERVER_WARNINGS: tuple[Warn, ...] = (warn_rounded_adapters,)
