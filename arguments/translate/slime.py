"""Compatibility with slime's command lines: its defaults, and its flags with another name here.

A command line with --actor-num-nodes or --actor-num-gpus-per-node was written for slime. For it,
slime's defaults apply, and flags that slime accepts but ignores are dropped with a warning. All
other command lines are parsed strictly.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from arguments.loss_settings import CUSTOM, is_supervised
from arguments.translate.names import ESTIMATORS_THAT_ARE_LOSSES
from arguments.unique_keys import load_yaml
from arguments.values import ParsedArgs
from slime_like.checkpoints.folders import has_model
from slime_like.config import flag_name

LAUNCH = ("actor_num_nodes", "actor_num_gpus_per_node")
SLIME_GPUS_PER_NODE = 8  # slime's default of --actor-num-gpus-per-node
SERVERS = ("colocate", "rollout_num_gpus", "rollout_num_gpus_per_engine")
# slime's defaults that differ from ours.
DEFAULTS: Mapping[str, object] = {
    "bf16": True,
    "use_distributed_optimizer": True,
    "n_samples_per_prompt": 1,
    "lr": 1e-6,
    "lr_decay_style": "linear",
}
# slime's default that is not set here, because log-probs of one policy would differ between passes
DROPOUT = ("hidden_dropout", "attention_dropout")
SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
OWN_SOURCE = "slime.rollout.data_source.RolloutDataSourceWithBuffer"
ASYNC_ROLLOUT = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
OPD_REWARD = "slime.rollout.on_policy_distillation.reward_func"
OPD_POST_PROCESS = "slime.rollout.on_policy_distillation.post_process_rewards"


def set_loss_defaults(parsed: ParsedArgs) -> None:
    """slime's defaults of losses, for a command line written for slime: one clip range for all
    losses that --advantage-estimator selects, one KL estimator, and the critic's whole error."""
    values = parsed.values
    if not any(name in values for name in LAUNCH) or is_supervised(values):
        return
    defaults: dict[str, object] = {}
    estimator = values.get("advantage_estimator")
    ours = {CUSTOM, "policy_loss_type", "cispo_eps_clip_low", "cispo_eps_clip_high"}
    if estimator in ESTIMATORS_THAT_ARE_LOSSES and not ours & values.keys():
        defaults["eps_clip"] = 0.2
    if values.get("use_kl_loss"):
        defaults["kl_loss_type"] = "k1"
    if estimator == "ppo":
        defaults["value_loss_scale"] = 1.0
    for name, value in defaults.items():
        if name not in parsed.invalid and name not in values:
            values[name] = value
            parsed.warnings.append(f"{flag_name(name)} {value} is slime's default, and used here")


def translate_launch(parsed: ParsedArgs) -> None:
    """Translate a command line written for slime; records problems and warnings."""
    values = parsed.values
    is_slime = any(name in values for name in LAUNCH)
    asks_for_servers = SERVERS if is_slime else ("rollout_num_gpus",)
    if _samples(values) and any(values.get(name) for name in asks_for_servers):
        values.setdefault("rollout_engine", "sglang")
    _resolve_dispatcher(parsed)
    _resolve_distillation(parsed)
    _resolve_precedence(parsed)
    _resolve_async_rollout(parsed)
    if values.get("rollout_max_context_len", 0) > 1:
        values.setdefault("rollout_max_prompt_len", values["rollout_max_context_len"] - 1)
    if "custom_config_path" in values:
        _read_custom_config(parsed, values["custom_config_path"])
    if is_slime:
        _set_defaults(parsed)
        _drop_unused(parsed)
        _resolve_supervised(parsed)


def planned_world_size(values: Mapping[str, Any]) -> int | None:
    """Number of processes that a command line written for slime asks for; None for other command
    lines."""
    if not any(name in values for name in LAUNCH):
        return None
    nodes = int(values.get("actor_num_nodes", 1))
    return nodes * int(values.get("actor_num_gpus_per_node", SLIME_GPUS_PER_NODE))


def _samples(values: Mapping[str, object]) -> bool:
    return not (
        is_supervised(values)
        or values.get("debug_train_only")
        or values.get("load_debug_rollout_data")
    )


def _set_defaults(parsed: ParsedArgs) -> None:
    values = parsed.values
    is_adam = values.get("optimizer", "adam") == "adam"  # only its state can be sharded
    for name, value in DEFAULTS.items():
        if name not in parsed.invalid and (is_adam or name != "use_distributed_optimizer"):
            values.setdefault(name, value)
    for name in DROPOUT:
        if name not in values and name not in parsed.invalid:
            values[name] = 0.0
            parsed.warnings.append(f"{flag_name(name)} is 0 here, where slime's default is 0.1")
    load = values.get("load")
    is_new = load not in (None, values.get("save")) and "ckpt_step" not in values
    starts_from_reference = "ref_load" in values and not values.get("lora_rank")
    if is_new and starts_from_reference and not has_model(str(load)):
        _drop(parsed, "load", "it has no checkpoint, and the policy starts from --ref-load")
    rollouts = values.get("num_rollout")
    critic_only = values.get("num_critic_only_steps", 0)
    if rollouts is not None and critic_only > rollouts:
        values["num_critic_only_steps"] = rollouts
        parsed.warnings.append(
            f"--num-critic-only-steps {critic_only} is read as {rollouts}, --num-rollout: only the "
            "critic is trained"
        )
    gpus = planned_world_size(values)
    if values.get("colocate") and values.get("rollout_num_gpus", gpus) != gpus:
        _drop(parsed, "rollout_num_gpus", "with --colocate servers get all GPUs of the trainer")


def _drop(parsed: ParsedArgs, dest: str, why: str) -> None:
    typed = parsed.typed.pop(dest, flag_name(dest))
    del parsed.values[dest]
    parsed.warnings.append(f"{typed} is ignored: {why}")


def _drop_unused(parsed: ParsedArgs) -> None:
    """Drop flags that slime accepts but ignores, and fill in what slime assumes about rewards and
    evaluation sets."""
    values = parsed.values
    if values.get("sequence_parallel") and values.get("tensor_model_parallel_size", 1) == 1:
        _drop(parsed, "sequence_parallel", "--tensor-model-parallel-size is 1")
    if "kl_loss_type" in values and not (values.get("use_kl_loss") or values.get("kl_coef")):
        _drop(parsed, "kl_loss_type", "neither --use-kl-loss nor --kl-coef is set")
    if values.get("use_dynamic_batch_size") and "micro_batch_size" in values:
        _drop(parsed, "micro_batch_size", "--use-dynamic-batch-size fills micro-batches by tokens")
    sets = values.get("eval_prompt_data")
    if sets is not None and len(sets) == 1:
        values["eval_prompt_data"] = ["aime", *sets]  # slime's default name of a set
    if sets is not None and "eval_interval" not in values:
        _drop(parsed, "eval_prompt_data", "--eval-interval is not set")
    no_reward = "rm_type" not in values and "custom_rm_path" not in values
    if no_reward and "custom_generate_function_path" in values and _samples(values):
        values["rm_type"] = "zero"
        parsed.warnings.append(
            "neither --rm-type nor --custom-rm-path is set: samples without a reward from "
            "--custom-generate-function-path have reward 0"
        )
    graded = values.get("rm_type", "zero") != "zero"
    if values.get("use_opd") and graded and "label_key" not in values:
        _drop(parsed, "rm_type", "without --label-key every reward is 0")
        values["rm_type"] = "zero"


def _resolve_supervised(parsed: ParsedArgs) -> None:
    values = parsed.values
    if not is_supervised(values):
        return
    values.pop("n_samples_per_prompt", None)
    if "label_key" in values:
        _drop(
            parsed, "label_key", "--loss-type sft_loss trains on the conversations of --input-key"
        )
    values.setdefault("loss_mask_type", "qwen")
    if values.get("rollout_function_path") == SFT_ROLLOUT:
        del values["rollout_function_path"]  # built into --loss-type sft_loss
    if values.get("debug_train_only"):
        _drop(parsed, "debug_train_only", "--loss-type sft_loss starts no servers anyway")


def _resolve_async_rollout(parsed: ParsedArgs) -> None:
    if parsed.values.get("data_source_path") == OWN_SOURCE:
        del parsed.values["data_source_path"]  # the default
    if parsed.values.get("rollout_function_path") == ASYNC_ROLLOUT:
        del parsed.values["rollout_function_path"]
        parsed.values["async_rollout"] = True
        # its worker keeps episodes in flight across rollouts, and a rollout takes what has ended
        parsed.values.setdefault("fully_async", True)


def _resolve_distillation(parsed: ParsedArgs) -> None:
    """slime queries the teacher in a reward function and parses its response in another; replace
    both by our settings."""
    values = parsed.values
    if values.get("opd_type") != "sglang" or values.get("custom_rm_path") != OPD_REWARD:
        return
    del values["custom_rm_path"]
    values["rm_type"] = "zero"
    if values.get("custom_reward_post_process_path") == OPD_POST_PROCESS:
        del values["custom_reward_post_process_path"]


def _resolve_precedence(parsed: ParsedArgs) -> None:
    """Of two flags for one thing, use the one that slime uses."""
    for used, other in (("custom_rm_path", "rm_type"), ("num_rollout", "num_epoch")):
        if used in parsed.values and other in parsed.values:
            _drop(parsed, other, f"{flag_name(used)} takes precedence")


def _resolve_dispatcher(parsed: ParsedArgs) -> None:
    """Use DeepEP if it is installed, otherwise all-to-all, with the same results."""
    values = parsed.values
    wanted = values.pop("moe_enable_deepep", False)
    flex = values.get("moe_token_dispatcher_type") == "flex"
    if not wanted and not flex:
        return
    if wanted and flex and importlib.util.find_spec("deep_ep") is not None:
        values["moe_enable_deepep"] = True
        return
    values["moe_token_dispatcher_type"] = "alltoall"
    parsed.warnings.append(
        "--moe-token-dispatcher-type flex needs --moe-enable-deepep and the package deep_ep; "
        "the all-to-all dispatcher is used, with the same results"
    )


def _read_custom_config(parsed: ParsedArgs, path: str) -> None:
    try:
        content = load_yaml(Path(path).read_text(encoding="utf-8")) or {}
        if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
            raise ValueError("must be a mapping with strings as keys")
    except (OSError, ValueError, yaml.YAMLError) as error:
        message = f"cannot be read: {' '.join(str(error).split())}"
        parsed.add_problem("--custom-config-path", path, message)
        return
    parsed.custom = {**parsed.custom, **content}
