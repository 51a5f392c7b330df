"""argv and YAML -> `RunConfig`, or one error with everything that is wrong."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from arguments.config_groups import ConfigGroups
from arguments.critic_layout import build_critic
from arguments.eval_sets import eval_sets_of
from arguments.flag_registry import GROUPS, FlagTable, flag_table, normalise
from arguments.help import SERVER_USAGE, TRAIN_USAGE
from arguments.hf.model import HfModel, UnsupportedNetwork, read_hf_model
from arguments.hf.restated import restated_problems, same_network
from arguments.megatron import NOT_COMPARED, disagreements, merge_network, network_of_flags
from arguments.megatron_configs import Machine, build_megatron_configs, resolve_transformer_impl
from arguments.parser import HelpRequested, LauncherParser
from arguments.resolve_loss import choose_loss, resolve_aliases
from arguments.rules.algorithm import completed_critic, has_critic
from arguments.rules.base import Rule, Settings
from arguments.rules.data import completed_distillation
from arguments.rules.declared import declared_warnings
from arguments.rules.layout import default_micro_batches, global_batch_of
from arguments.rules.network import MOE_WARNINGS
from arguments.rules.pipeline import virtual_stages_of
from arguments.rules.run import RULES, WARNINGS, Warn, notes_of, settings_of_other_losses
from arguments.rules.server import OF_EVERY_STEP, OF_THE_SERVER, SERVER_RULES, of_the_trainer
from arguments.rules.sglang import completed_sglang
from arguments.run_config import RunConfig
from arguments.run_file import read_run_file
from arguments.schema import ModelConfig, PreflightConfig
from arguments.schema.data import learns_conversations
from arguments.slime_launch import settle_slime_launch, slime_world_size
from arguments.teacher import build_teacher
from arguments.values import ParsedArgs, merge
from slime_like.advantages.registry import advantage_estimators
from slime_like.config import ConfigError, Problem, flag_name
from slime_like.import_utils import load_module
from slime_like.losses.off_policy_config import OffPolicyConfig
from slime_like.losses.registry import PolicyLoss
from slime_like.registry import registrations

CONFIG_EXIT_STATUS = 2
IMPORT_FLAG = "--import-modules"
UNTIED = "untie_embeddings_and_output_weights"  # a critic has no output weights
# Rank 0 prints; when another rank ends first, torchrun would end rank 0 before it has.
_WAIT_FOR_RANK_0_S = 5.0
SUPERVISED_DEFAULTS = {"n_samples_per_prompt": 1, "loss_reduction": "token_mean"}
PAIR_DEFAULTS = {"n_samples_per_prompt": 2, "loss_reduction": "sequence_mean"}


@dataclass(frozen=True, slots=True)
class Program:
    """Whose command line it is. usage, hidden: of --help, see there. values: of settings that it
    does not have, where others look at them."""

    rules: tuple[Rule, ...]
    warnings: tuple[Warn, ...]
    usage: str
    hidden: frozenset[str]
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    default_micro_batches: bool = False  # whether it has them


TRAIN = Program(RULES, WARNINGS, TRAIN_USAGE, OF_THE_SERVER, default_micro_batches=True)
SERVER = Program(
    SERVER_RULES,
    MOE_WARNINGS,
    SERVER_USAGE,
    frozenset(of_the_trainer()).union(OF_EVERY_STEP),
    {"lr": 1e-4, "clip_grad": 0.0},
)


def launcher_parser(program: Program = TRAIN) -> LauncherParser:
    """A parser of its own for the caller, who may add flags to it."""
    return LauncherParser(flag_table(), program.usage, program.hidden)


def _parser_of(program: Program) -> LauncherParser:
    """A parser that is shared, with the entries that the registries have now."""
    return _shared_parser(program.usage, program.hidden, registrations())


@lru_cache(maxsize=4)
def _shared_parser(usage: str, hidden: frozenset[str], version: int) -> LauncherParser:
    return LauncherParser(flag_table(), usage, hidden)


def parse_args(argv: Sequence[str], world_size: int, program: Program = TRAIN) -> RunConfig:
    """The settings of a run of train.py, or of the server.

    argv: without the program's name. world_size: number of processes. Raises ConfigError with every
    problem, and `HelpRequested`. Only what megatron-core itself refuses comes second, once nothing
    else is wrong. Needs no process group.
    """
    given, table = _read(argv, program)
    loss, policy_loss = choose_loss(given, table)
    checkpoint = _read_checkpoint(given)
    preflight = _make(PreflightConfig, given.values)
    planned = slime_world_size(given.values) if preflight.preflight else None
    world_size = preflight.world_size or planned or world_size
    draft = _draft(given, loss, policy_loss, checkpoint, world_size, program)
    problems = given.problems + [p for p in draft.problems if not _about_unread(p, given, table)]
    if problems:
        raise ConfigError(_in_order(problems, table))
    words = [text for warn in program.warnings if (text := warn(draft.settings)) is not None]
    return _finish(
        draft,
        table,
        argv,
        [
            *given.warnings,
            *words,
            *declared_warnings(draft.settings),
            *settings_of_other_losses(draft.settings, table.by_dest),
        ],
        given.custom,
    )


def parse_or_exit(
    argv: Sequence[str], world_size: int, rank: int, program: Program = TRAIN
) -> RunConfig:
    """`parse_args` for a launcher: on a ConfigError rank 0 prints it to stderr, once for all ranks,
    and every rank exits with status 2.

    --help and --version print to stdout and exit with 0. Raises SystemExit.
    """
    complete_words(program)
    try:
        return parse_args(argv, world_size, program)
    except ConfigError as error:
        if rank == 0:
            print(error, file=sys.stderr, flush=True)
        else:
            time.sleep(_WAIT_FOR_RANK_0_S)
        raise SystemExit(CONFIG_EXIT_STATUS) from None
    except HelpRequested as wanted:
        if rank == 0:
            _print_to_pipe(str(wanted))
        raise SystemExit(0) from None


def _print_to_pipe(text: str) -> None:
    """To stdout, whose reader may be `head` and hang up."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # Python would try to write the rest at its end, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complete_words(program: Program = TRAIN) -> None:
    """Shell completion, where the shell asks for it and argcomplete is installed."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(launcher_parser(program))


def _read(argv: Sequence[str], program: Program) -> tuple[ParsedArgs, FlagTable]:
    """The run file and, over it, the command line; and all flags, the user's own included."""
    first = _first_look(argv, program)
    import_modules(first.values.get("import_modules", []))
    problems: list[Problem] = []
    parser, path = _parser_of(program), first.values.get("custom_arguments_path")
    if path is not None:
        own = launcher_parser(program)
        try:
            own.add_custom(path)
            parser = own
        except ConfigError as error:
            problems += error.problems
    given, run_file = _sources(argv, parser)
    custom = parser.custom_values(run_file, argv)
    both = merge(run_file, given)
    both.custom, both.problems = custom, problems + both.problems
    resolve_aliases(both)
    _own_icepop(both)
    _kl_in_the_reward(both)
    settle_slime_launch(both)
    return both, parser.table


def _first_look(argv: Sequence[str], program: Program) -> ParsedArgs:
    """What can be read before the user's modules are imported, also of a line that asks for help:
    it shows their flags too."""
    parser = _parser_of(program)
    given, run_file = _sources(_without_help(argv), parser)
    return merge(run_file, given)


def _without_help(argv: Sequence[str]) -> list[str]:
    """argv without what asks for help, and the words that say about what."""
    words, helping = [], False
    for word in argv:
        asks = word in ("--help", "-h", "--version")
        helping = asks or (helping and not word.startswith("-"))
        if not helping:
            words.append(word)
    return words


def import_modules(modules: Sequence[str]) -> None:
    """Import the modules of --import-modules, which register what they have.

    Raises:
        ConfigError: for those that cannot be imported. What follows from their names would be told
        wrongly, so this comes alone.
    """
    problems = []
    for path in modules:
        try:
            load_module(path, IMPORT_FLAG)
        except ValueError as error:
            message = str(error).removeprefix(f"{IMPORT_FLAG} {path!r}: ")
            problems.append(Problem(IMPORT_FLAG, path, message))
    if problems:
        raise ConfigError(problems)


def _sources(argv: Sequence[str], parser: LauncherParser) -> tuple[ParsedArgs, ParsedArgs]:
    """The command line, and the run file that it names."""
    given, run_file = parser.read(argv), ParsedArgs()
    if "config" in given.values:
        try:
            run_file = read_run_file(given.values["config"], parser)
        except ConfigError as error:
            given.problems += error.problems
    return given, run_file


def _own_icepop(given: ParsedArgs) -> None:
    """slime's icepop_function: a token mask and truncated importance sampling with the same bounds."""
    values = given.values
    path = str(values.get("custom_tis_function_path", ""))
    if not path.endswith("icepop_function"):
        return
    del values["custom_tis_function_path"]
    if values.get("tis_ratio_type") != "token":
        given.problems.append(
            Problem("--custom-tis-function-path", path, "has no effect without --use-tis; add it")
        )
    for side in ("low", "high"):
        bound = values.get(
            f"token_tis_ratio_clip_{side}",
            getattr(OffPolicyConfig(), f"token_tis_ratio_clip_{side}"),
        )
        name = f"token_mask_is_threshold_{side}"
        if values.setdefault(name, bound) != bound:
            message = f"contradicts --tis-clip{'-low' if side == 'low' else ''} {bound:g}, which is IcePop's bound; leave it out"
            given.problems.append(Problem(flag_name(name), values[name], message))


def _kl_in_the_reward(given: ParsedArgs) -> None:
    """SkyRL's use_kl_in_reward: its kl_loss_coef is then our kl_coef."""
    values = given.values
    if values.pop("use_kl_in_reward", None) and "kl_coef" not in values:
        if "kl_loss_coef" in values:
            values["kl_coef"] = values.pop("kl_loss_coef")
        else:
            given.problems.append(
                Problem(
                    "--use-kl-in-reward",
                    None,
                    "needs the weight of the KL; use --kl-coef in its place",
                )
            )


def _read_checkpoint(given: ParsedArgs) -> HfModel | None:
    """What --hf-checkpoint's config.json says; None, with its problems noted, when it cannot be
    used."""
    folder = given.values.get("hf_checkpoint")
    if folder is None:
        return None
    try:
        return read_hf_model(folder)
    except UnsupportedNetwork:
        raise
    except ConfigError as error:
        given.problems += error.problems
        return None


@dataclass(slots=True)
class _Draft:
    """The settings before megatron-core has seen them, and what is wrong with them."""

    settings: Settings
    problems: list[Problem]
    checkpoint: HfModel | None  # of the policy, as read


def _room_for_conversations(configs: Mapping[str, Any], checkpoint: HfModel) -> Any:
    """Conversations to learn from are cut where the model's positions end, unless the user says
    otherwise."""
    data, rollout = configs["data"], configs["rollout"]
    positions = checkpoint.gpt.get("max_position_embeddings")
    if positions is None or not learns_conversations(configs["algorithm"].loss_type, data):
        return rollout
    longest = positions - (data.rollout_max_prompt_len or 1)
    return dataclasses.replace(rollout, rollout_max_response_len=max(1, longest))


def _draft(
    given: ParsedArgs,
    loss: PolicyLoss,
    policy_loss: Any,
    checkpoint: HfModel | None,
    world_size: int,
    program: Program = TRAIN,
) -> _Draft:
    values: Mapping[str, Any] = {**program.values, **given.values}
    supervised = values.get("loss_type") == "sft_loss"
    if supervised:
        values = {**SUPERVISED_DEFAULTS, **(PAIR_DEFAULTS if loss.pairs else {}), **values}
    if program.default_micro_batches:
        values = {**values, **default_micro_batches(values)}
    if loss.pairs:
        values = {"micro_batch_size": 2, **values}
    configs = {name: _make(config_type, values) for name, (_, config_type) in GROUPS.items()}
    if checkpoint is not None and "rollout_max_response_len" not in values:
        configs["rollout"] = _room_for_conversations(configs, checkpoint)
    configs["algorithm"] = dataclasses.replace(
        configs["algorithm"],
        policy_loss_type=loss.name,
        advantage_estimator=advantage_estimators.canonical(
            configs["algorithm"].advantage_estimator
        ),
    )
    explicit, problems = network_of_flags(values)
    if checkpoint is not None:
        said = {name: values[name] for name in checkpoint.gpt if name in values}
        explicit = same_network(explicit, checkpoint.transformer, values)
        problems += disagreements(explicit, checkpoint.transformer, values)
        problems += disagreements(said, checkpoint.gpt, {})
        configs["gpt"] = dataclasses.replace(configs["gpt"], **{**checkpoint.gpt, **said})
        problems += _shape_differences(
            "--ref-load", configs["model"].ref_load, configs["model"], checkpoint
        )
        problems += _shape_differences(
            "--critic-load",
            configs["critic"].critic_load,
            configs["model"],
            checkpoint,
            value_head=True,
        )
    if checkpoint is not None or "hf_checkpoint" not in values:
        problems += restated_problems(configs["restated"], checkpoint, frozenset(values))
    core = merge_network(explicit, checkpoint.transformer if checkpoint is not None else {}, values)
    eval_sets, wrong = eval_sets_of(configs["eval"])
    problems += wrong
    settings = Settings(
        **configs,
        eval_sets=eval_sets,
        loss=loss,
        policy_loss=policy_loss,
        core=core,
        given=frozenset(given.values),
        world_size=world_size,
        machine=Machine.with_gpus()
        if configs["preflight"].preflight and configs["preflight"].preflight_machine == "gpu"
        else Machine.here(),
    )
    problems += [found for rule in program.rules for found in rule(settings)]
    return _Draft(settings, problems, checkpoint)


def _shape_differences(
    flag: str, folder: str | None, model: ModelConfig, policy: HfModel, *, value_head: bool = False
) -> list[Problem]:
    """Reference and critic are built as the policy is, so they must have the same shape."""
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
    said, policy = {**other.transformer, **other.gpt}, {**checkpoint.transformer, **checkpoint.gpt}
    different = [
        name
        for name in said
        if name not in (*NOT_COMPARED, *ignored) and said[name] != policy.get(name)
    ]
    if not different:
        return []
    words = ", ".join(f"{name} {said[name]} (there: {policy.get(name)})" for name in different)
    return [Problem(flag, folder, f"is shaped otherwise than --hf-checkpoint: {words}")]


def _make(config_type: type, values: Mapping[str, Any]) -> Any:
    return config_type(
        **{f.name: values[f.name] for f in dataclasses.fields(config_type) if f.name in values}
    )


def _about_unread(problem: Problem, given: ParsedArgs, table: FlagTable) -> bool:
    """Whether a rule speaks of a flag whose value could not be read: that has been told already."""
    spelling = table.spellings.get(normalise(problem.flag))
    return spelling is not None and spelling.flag.dest in given.bad


def _in_order(problems: list[Problem], table: FlagTable) -> list[Problem]:
    """Each once, in the order in which they were found, flags with a value under their first name."""
    named = []
    for problem in problems:
        spelling = table.spellings.get(problem.flag)
        other_name = spelling is not None and spelling.flag.kind != "switch"
        named.append(
            dataclasses.replace(problem, flag=spelling.flag.name)
            if spelling is not None and other_name
            else problem
        )
    return list({str(problem): problem for problem in named}.values())


def _finish(
    draft: _Draft,
    table: FlagTable,
    argv: Sequence[str],
    warnings: list[str],
    custom: Mapping[str, Any],
) -> RunConfig:
    """The settings with all that follows from them filled in, and megatron-core's objects."""
    s = draft.settings
    stages = virtual_stages_of(s.parallel, s.core)
    megatron, problems = build_megatron_configs(
        s.core, model=s.model, parallel=s.parallel, virtual_stages=stages, machine=s.machine
    )
    if megatron is None:
        raise ConfigError(_in_order(problems, table))
    teacher, problems = build_teacher(s, draft.checkpoint, stages)
    critic, more = build_critic(s) if has_critic(s) else (None, [])
    if problems + more:
        raise ConfigError(_in_order(problems + more, table))
    size = global_batch_of(s) or s.samples_per_rollout
    balance = (
        s.algorithm.use_dynamic_batch_size
        if s.algorithm.balance_data is None
        else s.algorithm.balance_data
    )
    algorithm = dataclasses.replace(
        s.algorithm,
        global_batch_size=size,
        num_steps_per_rollout=s.samples_per_rollout // size,
        balance_data=balance,
    )
    completed = dict(
        model=dataclasses.replace(
            s.model, transformer_impl=resolve_transformer_impl(s.model, s.machine)
        ),
        parallel=dataclasses.replace(s.parallel, num_virtual_stages_per_pipeline_rank=stages),
        sglang=completed_sglang(s),
        algorithm=algorithm,
        distillation=completed_distillation(s),
        critic=completed_critic(s),
    )
    given = {field.name: getattr(s, field.name) for field in dataclasses.fields(ConfigGroups)}
    return RunConfig(
        **{**given, **completed},
        megatron=megatron,
        teacher=teacher,
        critic_model=critic,
        custom=MappingProxyType(custom),
        argv=tuple(argv),
        warnings=tuple(warnings),
        notes=tuple(notes_of(s)),
    )
