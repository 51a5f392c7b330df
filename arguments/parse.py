"""Parse argv and YAML into a `RunConfig`, or raise one error that lists all problems."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NoReturn

from arguments.config_groups import ConfigGroups
from arguments.critic_layout import build_critic
from arguments.draft import Draft, Program, make_draft, settings_of
from arguments.flag_registry import FlagTable, flag_table
from arguments.flags import normalise
from arguments.from_python import as_words, read_settings
from arguments.help import SERVER_USAGE, TRAIN_USAGE
from arguments.hf.model import HfModel, UnsupportedNetwork, read_hf_model
from arguments.loss_settings import choose_loss, resolve_loss
from arguments.megatron_configs import build_megatron_configs, resolve_transformer_impl
from arguments.parser import CUSTOM_GROUP, HelpRequested, LauncherParser
from arguments.rules.algorithm import completed_critic, has_critic
from arguments.rules.declared import declared_warnings
from arguments.rules.distillation import completed_distillation
from arguments.rules.layout import global_batch_of
from arguments.rules.moe import MOE_WARNINGS
from arguments.rules.pipeline import virtual_stages_of
from arguments.rules.run import RULES, WARNINGS, notes_of, unused_loss_settings
from arguments.rules.server import (
    OPTIM_STEP_FIELDS,
    SERVER_FIELDS,
    SERVER_RULES,
    SERVER_WARNINGS,
    trainer_fields,
)
from arguments.rules.sglang import completed_sglang
from arguments.run_config import RunConfig
from arguments.run_file import read_run_file
from arguments.schema import PreflightConfig
from arguments.surroundings import require_surroundings
from arguments.teacher import build_teacher
from arguments.translate.hydra import translate_hydra
from arguments.translate.settings import planned_world_size, translate_settings
from arguments.values import ParsedArgs, merge, merge_settings
from slime_like.config import ConfigError, Problem
from slime_like.distributed.signals import LAUNCHER_STATUS_FILE
from slime_like.errors import RunError
from slime_like.import_utils import load_module
from slime_like.registry import registrations

CONFIG_EXIT_STATUS = 2
IMPORT_FLAG = "--import-modules"
# Rank 0 prints. If another rank exited first, torchrun would kill rank 0 before it has printed.
_WAIT_FOR_RANK_0_S = 5.0
_BY_TORCHRUN = (
    "What torchrun prints below says no more; python -m slime_like.torchrun, with the same words, "
    "leaves it out."
)
_ANSWERED = frozenset(["--help", "-h", "--version"])  # without a run


TRAIN = Program(RULES, WARNINGS, TRAIN_USAGE, SERVER_FIELDS, default_micro_batches=True)
SERVER = Program(
    SERVER_RULES,
    (*MOE_WARNINGS, *SERVER_WARNINGS),
    SERVER_USAGE,
    frozenset(trainer_fields()).union(OPTIM_STEP_FIELDS),
    {"lr": 1e-4, "clip_grad": 0.0},
)


def launcher_parser(program: Program = TRAIN) -> LauncherParser:
    """A new parser, to which the caller may add flags."""
    return LauncherParser(flag_table(), program.usage, program.hidden)


def _parser_of(program: Program) -> LauncherParser:
    """A shared parser with the current content of the registries."""
    return _shared_parser(program.usage, program.hidden, registrations())


@lru_cache(maxsize=4)
def _shared_parser(usage: str, hidden: frozenset[str], version: int) -> LauncherParser:
    return LauncherParser(flag_table(), usage, hidden)


def parse_args(argv: Sequence[str], world_size: int, program: Program = TRAIN) -> RunConfig:
    """Parse a command line of train.py or the server. Needs no process group.

    Raises `HelpRequested`, and ConfigError with every problem; megatron-core's own objections are
    only reported if there are no others.

    Args:
        argv: Without the program's name.
        world_size: Number of processes.
    """
    parsed, table = _read_command_line(argv, program)
    return _resolve(parsed, table, argv, world_size, program)


def translate(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line of train.py or of another program in our own flags, its run file included, and
    notes about what is read in another way than it was written, or left out. Rules are not
    checked. Raises as `parse_args`."""
    words, left_out = translate_hydra(argv, flag_table().spellings, _parser_of(TRAIN).num_values)
    parsed, table = _read_command_line(words, TRAIN)
    if parsed.problems:
        raise ConfigError(_deduplicated(parsed.problems, table))
    parsed.values.pop("config", None)
    for flag in table.flags:
        value = parsed.custom.get(flag.dest)
        if flag.group == CUSTOM_GROUP and value != flag.default:
            parsed.values[flag.dest] = value
    return as_words(parsed, table), [*left_out, *parsed.warnings]


def make_config(
    settings: Mapping[str, object] | None = None, /, *, world_size: int = 1, **flags: object
) -> RunConfig:
    """The configuration of a training run from Python values, without a command line. Needs no
    process group.

        make_config(hf_checkpoint=folder, prompt_data="rows.jsonl", rm_type="math", num_rollout=10)

    Args:
        settings: By name of their flags, with dashes or underscores; groups of docs/flags.md may be
            nested mappings, as in a run file. A `config` in it names a run file, over which the
            settings take precedence.
        world_size: Number of processes.
        flags: Further settings, which take precedence over `settings` however these are written, as
            a command line does over a run file.

    Raises:
        ConfigError: With every problem.
    """
    words: list[str] = []

    def read(parser: LauncherParser) -> Sources:
        parsed = merge_settings(read_settings(settings or {}, parser), read_settings(flags, parser))
        words[:] = as_words(parsed, parser.table)
        return _with_run_file(parsed, parser, words)

    parsed, table = _read(read, read, TRAIN)
    return _resolve(parsed, table, words, world_size, TRAIN)


def _resolve(
    parsed: ParsedArgs, table: FlagTable, argv: Sequence[str], world_size: int, program: Program
) -> RunConfig:
    """Apply all rules. argv: the command line that has these settings."""
    loss, policy_loss = choose_loss(parsed, table)
    checkpoint = _read_checkpoint(parsed)
    preflight = settings_of(PreflightConfig, parsed.values)
    planned = planned_world_size(parsed.values) if preflight.preflight else None
    world_size = preflight.world_size or planned or world_size
    draft = make_draft(parsed, loss, policy_loss, checkpoint, world_size, program)
    problems = parsed.problems + [
        p for p in draft.problems if not _is_about_invalid_value(p, parsed, table)
    ]
    if problems:
        raise ConfigError(_deduplicated(problems, table))
    warnings = [*parsed.warnings]
    warnings += [text for warn in program.warnings if (text := warn(draft.settings)) is not None]
    warnings += declared_warnings(draft.settings)
    warnings += unused_loss_settings(draft.settings, table.by_dest)
    return _finish(draft, table, argv, warnings, parsed.custom)


def parse_or_exit(
    argv: Sequence[str], world_size: int, rank: int, program: Program = TRAIN
) -> RunConfig:
    """`parse_args` for a launcher: on a ConfigError rank 0 prints it to stderr, once for all ranks,
    and every rank exits with status 2.

    --help and --version print to stdout and exit with 0. Raises SystemExit.
    """
    complete_shell(program)
    try:
        if not _ANSWERED.intersection(argv):
            require_surroundings()
        return parse_args(argv, world_size, program)
    except (ConfigError, RunError) as error:
        _refuse(str(error), rank)
    except HelpRequested as request:
        if rank == 0:
            _print_to_pipe(str(request))
        raise SystemExit(0) from None


def _refuse(message: str, rank: int) -> NoReturn:
    """Exit with the status of a wrong command line, after rank 0 has said why, once for all."""
    if rank == 0:
        print(message, file=sys.stderr, flush=True)
        if "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHER_STATUS_FILE not in os.environ:
            print(_BY_TORCHRUN, file=sys.stderr, flush=True)
    else:
        time.sleep(_WAIT_FOR_RANK_0_S)
    raise SystemExit(CONFIG_EXIT_STATUS)


def _print_to_pipe(text: str) -> None:
    """Print to stdout, which may be a closed pipe (`| head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # otherwise Python flushes the rest at exit and fails again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complete_shell(program: Program = TRAIN) -> None:
    """Shell completion, if the shell asks for it and argcomplete is installed."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(launcher_parser(program))


def _read(
    read_first: Callable[[LauncherParser], Sources],
    read: Callable[[LauncherParser], Sources],
    program: Program,
) -> tuple[ParsedArgs, FlagTable]:
    """Read the run file and the settings over it. Also returns all flags, including user-defined
    ones. read_first: as `read`, before user modules add flags and entries of registries."""
    early = read_first(_parser_of(program))
    first = merge(early.run_file, early.settings)
    import_modules(first.values.get("import_modules", []))
    problems: list[Problem] = []
    parser = _parser_of(program)
    path = first.values.get("custom_arguments_path")
    if path is not None:
        extended = launcher_parser(program)
        try:
            extended.add_custom(path)
            parser = extended
        except ConfigError as error:
            problems += error.problems
    sources = read(parser)
    custom = parser.custom_values(sources.run_file, sources.words)
    merged = merge(sources.run_file, sources.settings)
    merged.custom = custom
    merged.problems = problems + merged.problems
    translate_settings(merged)
    resolve_loss(merged)
    return merged, parser.table


def _read_command_line(argv: Sequence[str], program: Program) -> tuple[ParsedArgs, FlagTable]:
    # --help shows the flags of user modules too, which are imported first
    without_help = _without_help(argv)
    return _read(
        lambda parser: _sources(without_help, parser),
        lambda parser: _sources(argv, parser),
        program,
    )


def _without_help(argv: Sequence[str]) -> list[str]:
    """argv without --help and --version and their arguments."""
    args = []
    skips = False
    for word in argv:
        is_help = word in ("--help", "-h", "--version")
        skips = is_help or (skips and not word.startswith("-"))
        if not skips:
            args.append(word)
    return args


def import_modules(modules: Sequence[str]) -> None:
    """Import the modules of --import-modules, which add entries to the registries.

    Raises:
        ConfigError: For those that cannot be imported; reported alone, because further problems
            would be wrong without their registrations.
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


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """Settings, and the run file that they name."""

    settings: ParsedArgs
    run_file: ParsedArgs
    words: Sequence[str]  # the settings as a command line


def _sources(argv: Sequence[str], parser: LauncherParser) -> Sources:
    """Parse the command line and the run file that it names."""
    return _with_run_file(parser.read(argv), parser, argv)


def _with_run_file(parsed: ParsedArgs, parser: LauncherParser, words: Sequence[str]) -> Sources:
    """Add the run file. Raises ConfigError if it cannot be read; reported alone, because what else
    is wrong or missing depends on its settings."""
    path = parsed.values.get("config")
    run_file = ParsedArgs() if path is None else read_run_file(path, parser)
    return Sources(parsed, run_file, words)


def _read_checkpoint(parsed: ParsedArgs) -> HfModel | None:
    """Read config.json of --hf-checkpoint; None, and problems are recorded, if it cannot be
    used."""
    folder = parsed.values.get("hf_checkpoint")
    if folder is None:
        return None
    try:
        return read_hf_model(folder)
    except UnsupportedNetwork:
        raise
    except ConfigError as error:
        parsed.problems += error.problems
        return None


def _is_about_invalid_value(problem: Problem, parsed: ParsedArgs, table: FlagTable) -> bool:
    """Whether a problem is about a flag with an unreadable value, which is already reported."""
    spelling = table.spellings.get(normalise(problem.flag))
    return spelling is not None and spelling.flag.dest in parsed.invalid


def _deduplicated(problems: list[Problem], table: FlagTable) -> list[Problem]:
    """Remove duplicates, keep the order, and name flags with a value by their first spelling."""
    unique = {}
    for problem in problems:
        spelling = table.spellings.get(problem.flag)
        if spelling is not None and spelling.flag.kind != "switch":
            problem = dataclasses.replace(problem, flag=spelling.flag.name)
        unique[str(problem)] = problem
    return list(unique.values())


def _finish(
    draft: Draft,
    table: FlagTable,
    argv: Sequence[str],
    warnings: list[str],
    custom: Mapping[str, object],
) -> RunConfig:
    """Complete the settings with derived values and megatron-core's config objects."""
    s = draft.settings
    stages = virtual_stages_of(s.parallel, s.core)
    megatron, problems = build_megatron_configs(
        s.core, model=s.model, parallel=s.parallel, virtual_stages=stages, machine=s.machine
    )
    if megatron is None:
        raise ConfigError(_deduplicated(problems, table))
    teacher, problems = build_teacher(s, draft.checkpoint, stages)
    critic, critic_problems = build_critic(s) if has_critic(s) else (None, [])
    if problems or critic_problems:
        raise ConfigError(_deduplicated(problems + critic_problems, table))
    size = global_batch_of(s) or s.samples_per_rollout
    balance = s.algorithm.balance_data
    groups = {field.name: getattr(s, field.name) for field in dataclasses.fields(ConfigGroups)}
    groups |= dict(
        model=dataclasses.replace(
            s.model, transformer_impl=resolve_transformer_impl(s.model, s.machine)
        ),
        parallel=dataclasses.replace(s.parallel, num_virtual_stages_per_pipeline_rank=stages),
        sglang=completed_sglang(s),
        algorithm=dataclasses.replace(
            s.algorithm,
            global_batch_size=size,
            num_steps_per_rollout=s.samples_per_rollout // size,
            balance_data=s.algorithm.use_dynamic_batch_size if balance is None else balance,
        ),
        distillation=completed_distillation(s),
        critic=completed_critic(s),
    )
    return RunConfig(
        **groups,
        megatron=megatron,
        teacher=teacher,
        critic_model=critic,
        custom=MappingProxyType(custom),
        argv=tuple(argv),
        warnings=tuple(warnings),
        notes=tuple(notes_of(s)),
    )
