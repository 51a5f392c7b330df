"""The registry of all flags, and lookup by the name as typed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import slime_like.losses  # noqa: F401  (fills the registries)
from arguments import schema
from arguments.flags import Flag, flags_of, normalise
from arguments.megatron import megatron_flags
from arguments.schema.megatron import MegatronSpellings
from arguments.translate.hydra import KEYS
from arguments.translate.names import (
    ALIASES,
    ESTIMATORS_THAT_ARE_LOSSES,
    NAMES_ELSEWHERE,
    NEGATED_ALIASES,
    NOT_IMPLEMENTED,
    not_implemented,
)
from slime_like.advantages.registry import advantage_estimators
from slime_like.config import flag_name
from slime_like.engines.registry import rollout_engines
from slime_like.losses.kl import KL_ESTIMATORS
from slime_like.losses.off_policy_config import OffPolicyConfig
from slime_like.losses.reductions import LOSS_REDUCTIONS
from slime_like.losses.registry import policy_losses
from slime_like.losses.value_loss import ValueLossConfig
from slime_like.metrics.trackers.base import tracker_names, trackers
from slime_like.registry import registrations
from slime_like.rewards.registry import rewards
from slime_like.weight_sync.transports.base import weight_transports

# attribute of RunConfig -> (title in --help, dataclass)
GROUPS: Mapping[str, tuple[str, type]] = {
    "model": ("model", schema.ModelConfig),
    "lora": ("low-rank adapters (LoRA)", schema.LoraConfig),
    "gpt": ("embeddings and positions", schema.GPTModelConfig),
    "parallel": ("parallel", schema.ParallelConfig),
    "data": ("data", schema.DataConfig),
    "eval": ("eval", schema.EvalConfig),
    "rollout": ("rollout", schema.RolloutConfig),
    "scheduling": ("scheduling of rollouts", schema.SchedulingConfig),
    "agents": ("agents", schema.AgentsConfig),
    "hooks": ("functions of your own", schema.HooksConfig),
    "sglang": ("sglang", schema.SglangConfig),
    "vllm": ("vllm", schema.VllmConfig),
    "reward": ("reward", schema.RewardConfig),
    "judge": ("judge", schema.JudgeConfig),
    "algorithm": ("algorithm", schema.AlgorithmConfig),
    "distillation": ("on-policy distillation", schema.DistillationConfig),
    "off_policy": ("off-policy correction", OffPolicyConfig),
    "critic": ("critic", schema.CriticConfig),
    "value_loss": ("critic: value loss", ValueLossConfig),
    "guards": ("guards", schema.GuardConfig),
    "schedule": ("schedule", schema.ScheduleConfig),
    "checkpoint": ("checkpoint", schema.CheckpointConfig),
    "logging": ("logging", schema.LoggingConfig),
    "debug": ("debug", schema.DebugConfig),
    "profiling": ("profiling", schema.ProfilingConfig),
    "preflight": ("preflight", schema.PreflightConfig),
    "server": ("server", schema.ServerConfig),
    "slime": ("slime's launch scripts", schema.SlimeConfig),
    "model_args": ("network, repeated from config.json", schema.ModelArgsConfig),
}
NETWORK = "network (megatron-core)"
RUN_FILE = Flag(
    "config",
    "run file",
    "value",
    "YAML file with flags as keys, with dashes or underscores; the command line takes precedence.",
    ("--config",),
    metavar="RUN.YAML",
)
CUSTOM_ARGUMENTS = Flag(
    "custom_arguments_path",
    "run file",
    "value",
    "module.function or file.py:function that adds custom flags: function(parser), where parser is "
    "an argparse.ArgumentParser. User functions find their values in args.",
    ("--custom-arguments-path",),
    metavar="FILE.PY:FUNCTION",
)
IMPORT_MODULES = Flag(
    "import_modules",
    "run file",
    "list",
    "User modules or files that register policy losses, advantage estimators, rewards, model "
    "families, rollout engines or weight transports; their names and settings become values and "
    'flags. See the guide "Extend it".',
    ("--import-modules", "--external-lib"),
    metavar="FILE.PY|MODULE ...",
)


def loss_flags() -> list[Flag]:
    """Flags for the settings of all registered losses. A setting that several losses share is one
    flag, with a separate default per loss."""
    flags_of_losses: dict[str, dict[str, Flag]] = {}  # field -> loss -> flag
    for name, loss in policy_losses.items():
        for flag in flags_of(loss.config_type, ""):
            flags_of_losses.setdefault(flag.dest, {})[name] = flag
    flags = []
    for dest, by_loss in flags_of_losses.items():
        losses = ", ".join(by_loss)
        first = next(iter(by_loss.values()))
        for flag in by_loss.values():
            for part in ("kind", "item", "choices", "on", "off"):
                assert getattr(flag, part) == getattr(first, part), (
                    f"{dest} differs between the losses {losses}"
                )
        group = f"policy loss: {losses}" if len(by_loss) == 1 else f"policy losses: {losses}"
        text = default_text({name: flag.default for name, flag in by_loss.items()})
        flags.append(replace(first, group=group, default_text=text))
    return flags


def default_text(defaults: Mapping[str, object]) -> str:
    """``0.2``, or ``ppo 0.2, gspo 0.0003`` if losses differ; losses without a default are
    omitted."""
    values = {str(value) for value in defaults.values()}
    if len(values) == 1:
        return "" if values == {"None"} else values.pop()
    return ", ".join(f"{name} {value}" for name, value in defaults.items() if value is not None)


def registry_choices() -> dict[str, list[str]]:
    """Legal values of flags that select a registered name."""
    losses = policy_losses.names(with_aliases=True)
    return {
        "rm_type": rewards.names(),
        "tracker": tracker_names(),
        "rollout_engine": rollout_engines.names(),
        "update_weight_transport": weight_transports.names(),
        "policy_loss_type": losses,
        "advantage_estimator": advantage_estimators.names(with_aliases=True)
        + [n for n in ESTIMATORS_THAT_ARE_LOSSES if n in losses],
        "loss_reduction": list(LOSS_REDUCTIONS),
        "kl_loss_type": list(KL_ESTIMATORS),
    }


def registry_help() -> dict[str, str]:
    """Descriptions of the registered names, for --help."""
    return {
        "policy_loss_type": policy_losses.help(),
        "advantage_estimator": advantage_estimators.help(),
        "rm_type": rewards.help(),
        "tracker": trackers.help(),
        "rollout_engine": rollout_engines.help(),
        "update_weight_transport": weight_transports.help(),
    }


@dataclass(frozen=True, slots=True)
class Spelling:
    """A name that can be typed."""

    flag: Flag
    value: bool | None  # value that a switch gets; None for flags with a value


class FlagTable:
    """Flags by field name (`by_dest`) and by spelling (`spellings`)."""

    def __init__(self, flags: Iterable[Flag]) -> None:
        self.flags = list(flags)
        self.by_dest: dict[str, Flag] = {}
        self.spellings: dict[str, Spelling] = {}
        for flag in self.flags:
            assert flag.dest not in self.by_dest, f"two flags are called {flag.dest}"
            self.by_dest[flag.dest] = flag
            is_switch = flag.kind == "switch"
            names = dict.fromkeys(map(normalise, flag.on), True if is_switch else None)
            names |= dict.fromkeys(map(normalise, flag.off), False if is_switch else None)
            assert len(names) == len(flag.on) + len(flag.off), f"{flag.dest} has a name twice"
            for name, value in names.items():
                assert name not in self.spellings, (
                    f"{name} is both {flag.dest} and {self.spellings[name].flag.dest}"
                )
                self.spellings[name] = Spelling(flag, value)

    def aliases(self) -> dict[str, Spelling]:
        """Further spellings, of other frameworks, that --help does not list."""
        found = {typed: self.spellings[ours] for typed, ours in ALIASES.items()}
        for typed, ours in NEGATED_ALIASES.items():
            spelling = self.spellings[ours]
            found[typed] = replace(spelling, value=not spelling.value)
        return found

    def rejection(self, name: str) -> str | None:
        """Why a known flag cannot be used; None if it can or is unknown."""
        spelling = self.spellings.get(name)
        return not_implemented(name) if spelling is None else spelling.flag.rejection or None

    def with_flags(self, added: Iterable[Flag]) -> FlagTable:
        """This table with additional flags, which may replace ones that are not implemented."""
        added = list(added)
        names = {normalise(name) for flag in added for name in flag.on}
        kept = [f for f in self.flags if not f.rejection or names.isdisjoint(map(normalise, f.on))]
        return FlagTable([*kept, *added])

    def nearest(self, name: str) -> str | None:
        """The supported flag most similar to `name`; also considers names in other programs."""
        if (known := self._known_elsewhere(name)) is not None:
            return known
        supported = {name: name for name, s in self.spellings.items() if not s.flag.rejection}
        supported |= {alias: ours for alias, ours in ALIASES.items() if ours in self.spellings}
        flags = {name.removeprefix("--"): flag for name, flag in supported.items()}
        typed = normalise(name).removeprefix("--")
        if matches := difflib.get_close_matches(typed, flags, n=1, cutoff=0.6):
            return flags[matches[0]]
        partial = [flag for name, flag in flags.items() if _has_words(name, typed)]
        return min(partial, key=len, default=None)

    def _known_elsewhere(self, name: str) -> str | None:
        """The flag for a name in verl, TRL or OpenRLHF; for one of a critic, the critic's if it has
        its own."""
        if (key := KEYS.get(name.removeprefix("--"))) is not None:
            return key.flag
        flag = self._by_last_words(name)
        if flag is not None and "critic" in normalise(name).removeprefix("--").split("-"):
            of_critic = self.spellings.get(flag.replace("--", "--critic-", 1))
            if of_critic is not None and not of_critic.flag.rejection:
                return of_critic.flag.on[0]
        return flag

    def _by_last_words(self, name: str) -> str | None:
        """The flag for the last words of a name, or its last part if that is a flag here."""
        *sections, last = name.removeprefix("--").split(".")
        last = normalise(f"--{last}")
        words = normalise(name).removeprefix("--").split("-")
        # one word alone says too little after others: reward_pretrain is no model to train
        endings = [words, *(words[first:] for first in range(1, len(words) - 1))]
        for ending in ("-".join(words) for words in endings):
            if ending in NAMES_ELSEWHERE:
                return NAMES_ELSEWHERE[ending]
        if not sections:
            return None
        spelling = self.spellings.get(last)
        if spelling is not None and not spelling.flag.rejection:
            return last
        return NAMES_ELSEWHERE.get(last.removeprefix("--"))

    def owner_of(self, value: object, flag: Flag) -> str | None:
        """The only other flag of the same group that has `value`, which `flag` has not."""
        if not flag.choices or value in flag.choices:
            return None
        group = [f for f in self.flags if f.group == flag.group and not f.rejection]
        others = [other.on[0] for other in group if value in (other.choices or ())]
        return others[0] if len(others) == 1 else None

    def rejected_like(self, name: str) -> dict[str, str]:
        """Flags that are not implemented and contain the words of `name`: flag -> reason."""
        rejected = {
            spelled: s.flag.rejection for spelled, s in self.spellings.items() if s.flag.rejection
        }
        rejected |= {n: reason for n, reason in NOT_IMPLEMENTED.items() if n not in self.spellings}
        typed = normalise(name).removeprefix("--")
        return {
            n: rejected[n]
            for n in sorted(rejected, key=len)
            if _has_words(n.removeprefix("--"), typed)
        }

    def hint(self, name: str, *, as_key: bool = False) -> str:
        """Suggestion for an unknown flag, to follow "unknown flag; ". as_key: in the spelling of a
        run file."""
        if (near := self.nearest(name)) is not None:
            near = near.removeprefix("--").replace("-", "_") if as_key else near
            return f"did you mean {near}?"
        if (rejected := self.rejected_like(name)) and len(normalise(name)) > 4:
            flag, reason = next(iter(rejected.items()))
            return f"{flag} is not implemented: {reason}"
        return "see --help for all flags"


def _has_words(name: str, typed: str) -> bool:
    """Whether the words of `typed` are among those of a flag's name."""
    return set(typed.split("-")) <= set(name.split("-"))


def without_clashes(ours: Iterable[Flag], megatron: Sequence[Flag]) -> list[Flag]:
    """Resolve name clashes of megatron-core's flags, since a new release may add any name. A
    rejected flag keeps only spellings that no other flag has; a field's own name takes precedence
    over a borrowed spelling. It is dropped if it loses its own name."""
    supported = [flag for flag in megatron if not flag.rejection]
    taken = {normalise(name) for flag in (*ours, *supported) for name in (*flag.on, *flag.off)}
    dests = {flag.dest for flag in ours}
    own_names = {flag_name(flag.dest): flag.dest for flag in megatron if flag.rejection}
    kept = []
    for flag in megatron:
        if flag.rejection:

            def free(name: str, dest: str = flag.dest) -> bool:
                return name not in taken and own_names.get(name, dest) == dest

            flag = replace(flag, on=tuple(filter(free, flag.on)), off=tuple(filter(free, flag.off)))
            if flag.dest in dests or flag_name(flag.dest) not in flag.on:
                continue
            taken.update(flag.on, flag.off)
        kept.append(flag)
    return kept


def flag_table() -> FlagTable:
    """Every flag, including those of imported user modules."""
    return _flag_table(registrations())


@lru_cache(maxsize=1)
def _flag_table(version: int) -> FlagTable:
    """`flag_table` for one version of the registries, which is the cache key."""
    choices = registry_choices()
    descriptions = registry_help()
    flags = [RUN_FILE, CUSTOM_ARGUMENTS, IMPORT_MODULES]
    for title, config_type in GROUPS.values():
        for flag in flags_of(config_type, title, choices):
            text = f"{flag.help} {descriptions.get(flag.dest, '')}".rstrip()
            flags.append(replace(flag, help=text))
    flags += loss_flags()
    flags += flags_of(MegatronSpellings, NETWORK)
    ours = {flag.dest for flag in flags}
    megatron = [flag for flag in _megatron_flags() if flag.dest not in ours]
    return FlagTable([*flags, *without_clashes(flags, megatron)])


@cache
def _megatron_flags() -> list[Flag]:
    return megatron_flags()
