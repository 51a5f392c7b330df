"""Merge parsed flags and the checkpoint's config.json into settings and problems, before
megatron-core is imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from arguments.eval_sets import eval_sets_of
from arguments.flag_registry import GROUPS
from arguments.hf.model import HfModel, read_hf_model
from arguments.hf.model_args import model_args_problems, same_network
from arguments.hf.vision import read_vision
from arguments.megatron import NOT_COMPARED, disagreements, merge_network, network_of_flags
from arguments.megatron_configs import Machine
from arguments.prompt_mix import mix_eval_sets, prompt_sources_of
from arguments.rules.base import Rule, Settings, Warn
from arguments.rules.layout import default_micro_batches
from arguments.schema import DataConfig, ModelConfig, RolloutConfig
from arguments.schema.data import learns_conversations
from arguments.untested import read_untested
from arguments.values import ParsedArgs
from slime_like.advantages.registry import advantage_estimators
from slime_like.config import ConfigError, Problem
from slime_like.images.settings import VisionSettings
from slime_like.losses.registry import PolicyLoss

Config = TypeVar("Config")
UNTIED = "untie_embeddings_and_output_weights"  # not compared for a critic: it has no output layer
SUPERVISED_DEFAULTS = {"n_samples_per_prompt": 1, "loss_reduction": "token_mean"}
PAIR_DEFAULTS = {"n_samples_per_prompt": 2, "loss_reduction": "sequence_mean"}


@dataclass(frozen=True, slots=True)
class Program:
    """The program whose command line is parsed."""

    rules: tuple[Rule, ...]
    warnings: tuple[Warn, ...]
    usage: str  # for --help
    hidden: frozenset[str]  # for --help
    # values of settings that the program does not have but rules read
    values: Mapping[str, object] = dataclasses.field(default_factory=dict)
    default_micro_batches: bool = False  # whether to use a token budget by default


@dataclass(slots=True)
class Draft:
    """Settings and problems before megatron-core's own checks."""

    settings: Settings
    problems: list[Problem]
    checkpoint: HfModel | None  # the policy's


def _fit_conversations(
    rollout: RolloutConfig, data: DataConfig, loss_type: str, checkpoint: HfModel
) -> RolloutConfig:
    """Set the maximum length of training conversations to the model's number of positions."""
    positions = checkpoint.gpt.get("max_position_embeddings")
    if positions is None or not learns_conversations(loss_type, data):
        return rollout
    longest = positions - (data.rollout_max_prompt_len or 1)
    return dataclasses.replace(rollout, rollout_max_response_len=max(1, longest))


def _with_defaults(parsed: ParsedArgs, loss: PolicyLoss, program: Program) -> dict[str, Any]:
    """The given values, on top of the defaults of the program and of the kind of run."""
    values = {**program.values, **parsed.values}
    if values.get("loss_type") == "sft_loss":
        pairs = PAIR_DEFAULTS if loss.pairs or loss.mismatched else {}
        values = {**SUPERVISED_DEFAULTS, **pairs, **values}
    if program.default_micro_batches:
        values = {**values, **default_micro_batches(values)}
    return {"micro_batch_size": 2, **values} if loss.pairs or loss.mismatched else values


def make_draft(
    parsed: ParsedArgs,
    loss: PolicyLoss,
    policy_loss: object,
    checkpoint: HfModel | None,
    world_size: int,
    program: Program,
) -> Draft:
    values = _with_defaults(parsed, loss, program)
    configs: dict[str, Any] = {
        name: settings_of(config_type, values) for name, (_, config_type) in GROUPS.items()
    }
    if checkpoint is not None and "rollout_max_response_len" not in values:
        configs["rollout"] = _fit_conversations(
            configs["rollout"], configs["data"], configs["algorithm"].loss_type, checkpoint
        )
    estimator = advantage_estimators.canonical(configs["algorithm"].advantage_estimator)
    configs["algorithm"] = dataclasses.replace(
        configs["algorithm"], policy_loss_type=loss.name, advantage_estimator=estimator
    )
    explicit, problems = network_of_flags(values)
    untested, untested_problems = read_untested(configs["model"].allow_untested or [])
    problems += untested_problems
    if checkpoint is not None:
        given_gpt = {name: values[name] for name in checkpoint.gpt if name in values}
        if given_gpt.get("position_embedding_type") == "rope" and _has_yarn(checkpoint):
            del given_gpt["position_embedding_type"]  # YaRN scales rotary embeddings
        explicit = same_network(explicit, checkpoint.transformer, values)
        problems += disagreements(explicit, checkpoint.transformer, values)
        problems += disagreements(given_gpt, checkpoint.gpt, {})
        configs["gpt"] = dataclasses.replace(configs["gpt"], **{**checkpoint.gpt, **given_gpt})
        model = configs["model"]
        serves_images = configs["server"].serve_images
        if configs["data"].multimodal_keys is not None or serves_images:
            flag = "--serve-images" if serves_images else "--multimodal-keys"
            vision, vision_problems = _vision_of(model, checkpoint, flag)
            configs["gpt"] = dataclasses.replace(configs["gpt"], vision=vision)
            problems += vision_problems
        critic_load = configs["critic"].critic_load
        problems += _shape_differences("--ref-load", model.ref_load, model, checkpoint)
        problems += _shape_differences(
            "--critic-load", critic_load, model, checkpoint, value_head=True
        )
    if checkpoint is not None or "hf_checkpoint" not in values:
        problems += model_args_problems(configs["model_args"], checkpoint, frozenset(values))
    core = merge_network(explicit, checkpoint.transformer if checkpoint is not None else {}, values)
    core |= untested
    vision = configs["gpt"].vision
    if vision is not None and vision.sections:
        core.setdefault("apply_rope_fusion", False)  # its kernel takes one position per row
    eval_sets, eval_problems = eval_sets_of(configs["eval"])
    problems += eval_problems
    prompt_sources, mix_problems = prompt_sources_of(configs["data"])
    problems += mix_problems
    plans_gpus = configs["preflight"].preflight and configs["preflight"].preflight_machine == "gpu"
    settings = Settings(
        **configs,
        prompt_sources=prompt_sources,
        eval_sets=(*eval_sets, *mix_eval_sets(prompt_sources, configs["eval"])),
        loss=loss,
        policy_loss=policy_loss,
        core=core,
        given=frozenset(parsed.values),
        world_size=world_size,
        machine=Machine.with_gpus() if plans_gpus else Machine.here(),
    )
    for rule in program.rules:
        problems += rule(settings)
    return Draft(settings, problems, checkpoint)


def _vision_of(
    model: ModelConfig, checkpoint: HfModel, flag: str
) -> tuple[VisionSettings | None, list[Problem]]:
    """The vision tower of --hf-checkpoint, as the run trains it. flag: which asks for images."""
    assert model.hf_checkpoint is not None
    try:
        vision = read_vision(model.hf_checkpoint, checkpoint, asked_by=flag)
    except ConfigError as error:
        return None, [dataclasses.replace(each, flag=flag) for each in error.problems]
    return dataclasses.replace(
        vision, trained=model.train_vision_tower, learning_rate=model.vision_tower_lr
    ), []


def _has_yarn(checkpoint: HfModel) -> bool:
    return checkpoint.gpt.get("position_embedding_type") == "yarn"


def _shape_differences(
    flag: str, folder: str | None, model: ModelConfig, policy: HfModel, *, value_head: bool = False
) -> list[Problem]:
    """Problems if a reference model or critic has another shape than the policy, since it is built
    with the policy's config."""
    if (
        folder is None
        or folder == model.hf_checkpoint
        or not (Path(folder) / "config.json").is_file()
    ):
        return []
    try:
        other = read_hf_model(folder, value_head=value_head)
    except ConfigError as error:
        return [dataclasses.replace(problem, flag=flag) for problem in error.problems]
    return _compared(flag, folder, other, policy, ignored={UNTIED} if value_head else set())


def _compared(
    flag: str, folder: str, other: HfModel, checkpoint: HfModel, ignored: Collection[str]
) -> list[Problem]:
    shape = {**other.transformer, **other.gpt}
    policy = {**checkpoint.transformer, **checkpoint.gpt}
    differences = [
        f"{name} {value} (expected: {policy.get(name)})"
        for name, value in shape.items()
        if name not in (*NOT_COMPARED, *ignored) and value != policy.get(name)
    ]
    if not differences:
        return []
    message = f"has another shape than --hf-checkpoint: {', '.join(differences)}"
    return [Problem(flag, folder, message)]


def settings_of(config_type: type[Config], values: Mapping[str, object]) -> Config:
    fields = [f.name for f in dataclasses.fields(config_type)]  # type: ignore[arg-type]
    return config_type(**{name: values[name] for name in fields if name in values})
