"""Rules about the server's command line, and a rule that rejects its settings in train.py."""

from __future__ import annotations

import dataclasses
import importlib.util
import ipaddress
from pathlib import Path

from arguments.flag_registry import GROUPS
from arguments.rules.base import Rule, Settings, problem
from arguments.rules.layout import PARALLEL_RULES
from arguments.rules.moe import MOE_RULES
from arguments.rules.network import NETWORK_RULES
from arguments.rules.sglang import (
    checkpoint_of_the_servers,
    engines_are_named,
    engines_that_are_started,
    idle_sglang_settings,
    sglang_is_installed,
    uses_sglang,
)
from arguments.rules.training import OFFLOAD, OPTIMIZER_RULES, PRECISE
from arguments.schema import ServerConfig
from slime_like.config import Problem, flag_name
from slime_like.losses.registry import policy_losses

OF_THE_SERVER = frozenset(field.name for field in dataclasses.fields(ServerConfig))
# Settings of the server from groups that otherwise belong to train.py
ALSO_SERVED = {
    "max_tokens_per_gpu", "log_probs_chunk_size", "rollout_local_batch_size", "print_megatron_patches", "no_verify_checkpoint", "config", "rollout_engine",
}  # fmt: skip
TRAINERS_GROUPS = (
    "data", "eval", "rollout", "scheduling", "agents", "reward", "algorithm", "lora", "distillation", "off_policy", "critic", "value_loss", "gates", "schedule", "checkpoint",
    "logging", "debug", "profiling", "preflight",
)  # fmt: skip
OF_EVERY_STEP = (
    "lr",
    "min_lr",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
)
KEY_PREFIX = "tml-"


def only_the_server_has_these(s: Settings) -> list[Problem]:
    """Settings of the server are rejected by train.py."""
    return [
        Problem(
            flag_name(name),
            getattr(s.server, name),
            "is a setting of python -m slime_like.tinker; leave it out",
        )
        for name in sorted(s.given & OF_THE_SERVER)
    ]


def of_the_trainer() -> set[str]:
    """Fields of the settings that train.py has and the server does not."""
    fields = {
        field.name for group in TRAINERS_GROUPS for field in dataclasses.fields(GROUPS[group][1])
    }
    fields |= {
        field.name
        for _, loss in policy_losses.items()
        for field in dataclasses.fields(loss.config_type)
    }
    return (fields | {"ref_load", "ref_ckpt_step", "ref_offload", "mtp_num_layers"}) - ALSO_SERVED


def nothing_of_the_trainer(s: Settings) -> list[Problem]:
    found = [
        Problem(flag_name(n), None, "is a setting of train.py and has no effect here; leave it out")
        for n in sorted(s.given & of_the_trainer())
    ]
    words = "is told by the client with every optimizer step; leave it out"
    return found + [
        Problem(flag_name(name), s.core[name], words) for name in OF_EVERY_STEP if name in s.given
    ]


def gradients_wait_for_the_step(s: Settings) -> list[Problem]:
    """Overlapped reduction is incompatible with the server, where several calls accumulate
    gradients that are reduced at the optimizer step."""
    words = "does not go with the server, where gradients are reduced at the optimizer step; leave it out"
    return [
        p
        for name in ("overlap_grad_reduce", "overlap_param_gather")
        if s.core.get(name)
        for p in problem(name, None, words)
    ]


def optimizer_is_adam(s: Settings) -> list[Problem]:
    name = s.core.get("optimizer", "adam")
    return (
        []
        if name == "adam"
        else problem("optimizer", name, "the API has AdamW alone; the only legal value is adam")
    )


def optimizer_state_is_swapped(s: Settings) -> list[Problem]:
    """The server swaps models tensor by tensor, which is supported for the state of torch's Adam
    only."""
    message = "does not go with the server, which changes models in and out; leave it out"
    return [
        p for name in (PRECISE, OFFLOAD) if s.core.get(name) for p in problem(name, None, message)
    ]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def snapshots_are_folders(s: Settings) -> list[Problem]:
    """Settings without use for SGLang servers of the Tinker server, which load sampling snapshots
    from --server-dir, one at a time."""
    if not uses_sglang(s):
        return []
    others = (
        "update_weight_transport", "update_weight_buffer_size", "update_weight_disk_dir", "update_weight_disk_keep_files", "colocate",
        "update_weight_mode", "offload_train", "offload_rollout",
    )  # fmt: skip
    found = [
        p
        for name in others
        if name in s.given
        for p in problem(
            name,
            None,
            "does not go with the server, whose SGLang servers load snapshots from --server-dir; leave it out",
        )
    ]
    if "max_sampler_engines" in s.given:
        words = "is of --rollout-engine local: SGLang servers hold one snapshot, and exchange it; leave it out"
        found += problem("max_sampler_engines", s.server.max_sampler_engines, words)
    if "rollout_local_batch_size" in s.given:
        words = "is of --rollout-engine local; --sglang-server-concurrency bounds what SGLang servers are asked at a time"
        found += problem("rollout_local_batch_size", s.rollout.rollout_local_batch_size, words)
    return found


def address_needs_a_key(s: Settings) -> list[Problem]:
    if s.server.api_key_file is None and not is_loopback(s.server.host):
        words = (
            "can be reached from other machines, so --api-key-file is needed; 127.0.0.1 needs none"
        )
        return problem("host", s.server.host, words)
    return []


def keys_are_usable(s: Settings) -> list[Problem]:
    found: list[Problem] = []
    for name in ("api_key_file", "operator_key_file"):
        path = getattr(s.server, name)
        try:
            if path is not None:
                valid_keys(path)
        except UnicodeDecodeError as error:
            found += problem(name, path, f"cannot be read: {error}")
        except ValueError as error:
            found += problem(name, path, str(error))
        except OSError as error:
            found += problem(name, path, f"cannot be read: {error}")
    return found


def valid_keys(path: str) -> list[str]:
    """Read API keys from a file, one per line. Raises OSError or ValueError."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ValueError("holds no key; write one a line")
    for number, key in enumerate(keys, 1):
        if not key.startswith(KEY_PREFIX) or len(key) < 12:
            raise ValueError(
                f"key {number} does not begin with {KEY_PREFIX}, as clients demand, or is shorter than 12 characters"
            )
    return keys


def libraries_are_there(s: Settings) -> list[Problem]:
    missing = [name for name in ("fastapi", "uvicorn", "google.protobuf") if not _installed(name)]
    if not missing:
        return []
    return problem(
        "port",
        None,
        f"cannot be opened without {', '.join(missing)}; install them with: pip install 'slime_like[server]'",
    )


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def sequences_fit_the_model(s: Settings) -> list[Problem]:
    longest, positions = s.server.max_sequence_length, s.gpt.max_position_embeddings
    if longest is not None and positions is not None and longest > positions:
        return problem(
            "max_sequence_length",
            longest,
            f"exceeds the {positions} positions of the network (--max-position-embeddings)",
        )
    return []


def folder_can_be_written(s: Settings) -> list[Problem]:
    path = Path(s.server.server_dir)
    if path.exists() and not path.is_dir():
        return problem("server_dir", s.server.server_dir, "is a file; name a folder")
    return []


SERVER_RULES: tuple[Rule, ...] = (
    *PARALLEL_RULES, *NETWORK_RULES, *MOE_RULES, nothing_of_the_trainer, gradients_wait_for_the_step, optimizer_is_adam, optimizer_state_is_swapped, *OPTIMIZER_RULES, address_needs_a_key,
    keys_are_usable, libraries_are_there, snapshots_are_folders, idle_sglang_settings, engines_are_named, engines_that_are_started,
    sglang_is_installed, checkpoint_of_the_servers, sequences_fit_the_model, folder_can_be_written,
)  # fmt: skip
