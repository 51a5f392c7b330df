"""Hydra keys of SkyRL and verl, for `slime-like translate`: those whose value means the same here,
or whose values have names here. The tables of docs/en/coming_from_others.md have the same keys, and
those that take more than a name.

train.py takes none of them: it only suggests our flag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from arguments.flags import normalise
from arguments.translate.flags import is_foreign
from arguments.translate.names import ALIASES, NEGATED_ALIASES
from arguments.translate.words import hydra_pair, values_marked, without_skyrl_prefix
from arguments.values import read_switch


@dataclass(frozen=True, slots=True)
class Key:
    """Our flag for a key of theirs."""

    flag: str
    values: Mapping[str, str] = field(default_factory=dict)  # theirs -> ours
    nothing: tuple[str, ...] = ()  # values that ask for nothing
    negated: bool = False  # the switch means the opposite
    several: bool = False  # theirs is a list
    named: bool = False  # each of ours follows a name


_SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
)


def _sizes(section: str) -> dict[str, Key]:
    return {f"{section}.{size}": Key(normalise(f"--{size}")) for size in _SIZES}


_FILES = Key("--prompt-data")
_HELD_OUT = Key("--eval-prompt-data", several=True, named=True)
_TRACKER = Key("--tracker", nothing=("console", "null"), several=True)
SKYRL: Mapping[str, Key] = {
    "trainer.policy.model.path": Key("--hf-checkpoint"),
    "trainer.ref.model.path": Key("--ref-load"),
    "data.train_data": _FILES,
    "data.val_data": _HELD_OUT,
    "trainer.train_batch_size": Key("--rollout-batch-size"),
    "generator.n_samples_per_prompt": Key("--n-samples-per-prompt"),
    "trainer.micro_train_batch_size_per_gpu": Key("--micro-batch-size"),
    **_sizes("trainer.policy.megatron_config"),
    "trainer.policy.optimizer_config.lr": Key("--lr"),
    "generator.sampling_params.max_generate_length": Key("--rollout-max-response-len"),
    "generator.sampling_params.temperature": Key("--rollout-temperature"),
    "generator.sampling_params.top_p": Key("--rollout-top-p"),
    "trainer.epochs": Key("--num-epoch"),
    "trainer.ckpt_path": Key("--save"),
    "trainer.ckpt_interval": Key("--save-interval", nothing=("-1",)),
    "trainer.eval_interval": Key("--eval-interval", nothing=("-1",)),
    "trainer.logger": _TRACKER,
}
_ACTOR = "actor_rollout_ref.actor"
_LOSS = f"{_ACTOR}.policy_loss.loss_mode"
_CLIP, _CLIP_LOW, _CLIP_HIGH = (f"{_ACTOR}.clip_ratio{side}" for side in ("", "_low", "_high"))
_ROLLOUT = "actor_rollout_ref.rollout"
VERL: Mapping[str, Key] = {
    "actor_rollout_ref.model.path": Key("--hf-checkpoint"),
    "data.train_files": _FILES,
    "data.val_files": _HELD_OUT,
    "data.prompt_key": Key("--input-key"),
    "data.train_batch_size": Key("--rollout-batch-size"),
    "data.max_prompt_length": Key("--rollout-max-prompt-len"),
    "data.max_response_length": Key("--rollout-max-response-len"),
    f"{_ROLLOUT}.n": Key("--n-samples-per-prompt"),
    f"{_ROLLOUT}.temperature": Key("--rollout-temperature"),
    f"{_ROLLOUT}.top_p": Key("--rollout-top-p"),
    f"{_ROLLOUT}.name": Key("--rollout-engine", {"hf": "local"}),
    f"{_ROLLOUT}.tensor_model_parallel_size": Key("--rollout-num-gpus-per-engine"),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": Key("--micro-batch-size"),
    f"{_ACTOR}.use_dynamic_bsz": Key("--use-dynamic-batch-size"),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": Key("--max-tokens-per-gpu"),
    "algorithm.adv_estimator": Key("--advantage-estimator", {"gae": "ppo"}),
    "algorithm.norm_adv_by_std_in_grpo": Key("--disable-grpo-std-normalization", negated=True),
    "algorithm.gamma": Key("--gamma"),
    "algorithm.lam": Key("--lambd"),
    _LOSS: Key("--policy-loss-type", {"vanilla": "ppo"}),
    f"{_ACTOR}.loss_agg_mode": Key(
        "--loss-reduction",
        {
            "token-mean": "token_mean",
            "seq-mean-token-mean": "sequence_mean",
            "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
        },
    ),
    _CLIP: Key("--eps-clip"),
    _CLIP_LOW: Key("--eps-clip", nothing=("null",)),
    _CLIP_HIGH: Key("--eps-clip-high", nothing=("null",)),
    f"{_ACTOR}.clip_ratio_c": Key("--eps-clip-c"),
    f"{_ACTOR}.use_kl_loss": Key("--use-kl-loss"),
    f"{_ACTOR}.kl_loss_coef": Key("--kl-loss-coef"),
    f"{_ACTOR}.kl_loss_type": Key("--kl-loss-type"),
    "algorithm.kl_ctrl.kl_coef": Key("--kl-coef"),
    f"{_ACTOR}.entropy_coeff": Key("--entropy-coef"),
    f"{_ACTOR}.optim.lr": Key("--lr"),
    f"{_ACTOR}.optim.lr_warmup_steps": Key("--lr-warmup-iters", nothing=("-1",)),
    **_sizes(f"{_ACTOR}.megatron"),
    "critic.optim.lr": Key("--critic-lr"),
    "trainer.critic_warmup": Key("--num-critic-only-steps"),
    "trainer.total_epochs": Key("--num-epoch"),
    "trainer.total_training_steps": Key("--num-rollout", nothing=("null",)),
    "trainer.save_freq": Key("--save-interval", nothing=("-1",)),
    "trainer.test_freq": Key("--eval-interval", nothing=("-1",)),
    "trainer.default_local_dir": Key("--save"),
    "trainer.logger": _TRACKER,
    "trainer.project_name": Key("--tracker-project"),
    "trainer.experiment_name": Key("--tracker-run-name"),
}
KEYS = {**SKYRL, **VERL}
# with verl's cispo, whose bounds are those of its other losses
_CISPO = {
    _CLIP: Key("--cispo-eps-clip-low"),
    _CLIP_LOW: Key("--cispo-eps-clip-low", nothing=("null",)),
    _CLIP_HIGH: Key("--cispo-eps-clip-high", nothing=("null",)),
}
# verl's function of a reward, two keys that are one flag here
REWARD_FILE = "custom_reward_function.path"
REWARD_NAME = "custom_reward_function.name"
# in the tables of the page, with more to it than a name
OTHER_MEANING: Mapping[str, str] = {
    "trainer.policy_mini_batch_size": "--num-steps-per-rollout, or --global-batch-size in samples",
    f"{_ACTOR}.ppo_mini_batch_size": "--global-batch-size in samples, or --num-steps-per-rollout",
    "trainer.resume_mode": "--load, the same folder as --save",
    "critic.ppo_epochs": "--critic-steps-per-policy-step",
    "algorithm.filter_groups": "--dynamic-sampling-filter-path, --max-num-gen-batches",
    "algorithm.rollout_correction": "--tis-ratio-type and its siblings",
    "async_training": "--async-rollout --fully-async",
    "trainer.fully_async": "--async-rollout --fully-async",
}
_ALIASES = {**ALIASES, **NEGATED_ALIASES}
NOT_TRANSLATED = "not translated: "
_MODULE = re.compile(r"(verl|skyrl|skyrl_train)(\..+)?")


def translate_hydra(
    argv: Sequence[str], spellings: Container[str], num_values: Callable[[str], float]
) -> tuple[list[str], list[str]]:
    """A command line of SkyRL or verl with our flags for the keys above.

    Args:
        spellings: Of our flags.
        num_values: How many of the words after a flag belong to it at most.

    Returns:
        (the words, without the program before them; a note per key that was left out, which begins
        with `NOT_TRANSLATED`)
    """
    words: list[str] = []
    notes: list[str] = []
    reward: dict[str, str] = {}
    argv = _without_program(argv)
    theirs = dict(
        pair
        for word, is_value in values_marked(argv, num_values)
        if not is_value and (pair := hydra_pair(word)) is not None
    )
    is_cispo = theirs.get(_LOSS) == "cispo"
    keys = {**KEYS, **_CISPO} if is_cispo else KEYS
    for word, is_value in values_marked(argv, num_values):
        pair = hydra_pair(word)
        if pair is None or is_value:
            words.append(word)
            continue
        key, value = pair
        if "${" in value:
            notes.append(f"{NOT_TRANSLATED}{word}: it refers to another setting; write its value")
            continue
        name = without_skyrl_prefix(normalise(f"--{key}"), ())
        if key in (REWARD_FILE, REWARD_NAME):
            reward[key] = value
        elif key == "algorithm.kl_ctrl.kl_coef" and not _is_on(
            theirs, "algorithm.use_kl_in_reward"
        ):
            notes.append(f"{NOT_TRANSLATED}{word}: verl uses it with use_kl_in_reward only")
        elif key == _CLIP and theirs.get(_CLIP_LOW, "null") != "null":
            notes.append(f"{word}: verl uses clip_ratio_low in its place")
        elif key in keys:
            try:
                words += _words(keys[key], value)
            except ValueError as error:
                notes.append(f"{NOT_TRANSLATED}{word}: {keys[key].flag} {error}")
            if key == _CLIP and is_cispo and theirs.get(_CLIP_HIGH, "null") == "null":
                words += _words(keys[_CLIP_HIGH], value)
        elif "." not in key or name in spellings or name in _ALIASES or is_foreign(name):
            words.append(word)
        else:
            notes.append(NOT_TRANSLATED + word + _advice(key))
    file = reward.get(REWARD_FILE, "")
    if file in ("", "null", "None"):
        if REWARD_NAME in reward:
            notes.append(f"{NOT_TRANSLATED}{REWARD_NAME}={reward[REWARD_NAME]}: without its file")
    else:
        function = reward.get(REWARD_NAME, "compute_score")
        words += ["--custom-rm-path", f"{file}:{function}"]
        notes.append(
            "--custom-rm-path: here a function takes (args, sample); verl's takes (data_source, "
            "solution_str, ground_truth, extra_info)"
        )
    return words, notes


def _without_program(argv: Sequence[str]) -> list[str]:
    """Without ``python3 -m verl.trainer.main_ppo``, ``uv run ... -m skyrl...`` or a script."""
    for index, word in enumerate(argv):
        if index and argv[index - 1] == "-m" and _MODULE.fullmatch(word):
            return list(argv[index + 1 :])
    is_python = bool(argv) and re.fullmatch(r"python[\d.]*", Path(argv[0]).name)
    if is_python and len(argv) > 1 and argv[1].endswith(".py"):
        return list(argv[2:])
    return list(argv)


def _words(key: Key, value: str) -> list[str]:
    """Our words for a value of theirs, empty if it asks for nothing. Raises ValueError for one that
    ours does not take."""
    items = [value]
    if value.startswith("[") and value.endswith("]"):
        items = [item.strip().strip("'\"") for item in value[1:-1].split(",")]
    items = [key.values.get(item, item) for item in items if item and item not in key.nothing]
    if not items:
        return []
    if key.negated:
        return [] if read_switch(items[0]) else [key.flag]
    if len(items) > 1 and not key.several:
        raise ValueError("takes one value")
    if key.named:
        items = [word for i, item in enumerate(items, start=1) for word in (f"val{i}", item)]
    return [key.flag, *items]


def _is_on(theirs: Mapping[str, str], key: str) -> bool:
    return theirs.get(key, "False").lower() == "true"


def _advice(key: str) -> str:
    for known, flags in OTHER_MEANING.items():
        if key == known or key.startswith(f"{known}."):
            return f"; see {flags}"
    return ""
