"""Flags of agents: what cannot be combined with them is named."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from arguments.parse import parse_args
from arguments.schema.agents import TOOL_FORMATS
from slime_like.advantages import advantage_estimators
from slime_like.agents.tool_calls import FORMATS
from slime_like.config import ConfigError
from slime_like.losses.registry import policy_losses
from tests.paths import ROOT
from tests.unit.command_lines import assert_refused, complete, problems_of, refused

BASE = "--agent-function-path asyncio.sleep --use-dynamic-batch-size --max-tokens-per-gpu 512"
COMMAND = "--use-dynamic-batch-size --max-tokens-per-gpu 512 --agent-command"
# name of the rule, flags that are added, the flag that is named, words of the message
CASES = [
    ("check_agent_settings",
     "--agent-function-path json.dumps --use-dynamic-batch-size --max-tokens-per-gpu 512",
     "--agent-function-path", "must be an async function"),
    ("check_agent_settings",
     "--agent-function-path json.nothing --use-dynamic-batch-size --max-tokens-per-gpu 512",
     "--agent-function-path", "has no 'nothing'"),
    ("check_agent_settings", "--loss-type sft_loss --agent-command x", "--agent-command",
     "samples no rollouts"),
    ("check_agent_settings", f"{COMMAND} \"'\"", "--agent-command", "not a valid command line"),
    ("check_agent_settings", f"{COMMAND} ''", "--agent-command", "must name a program"),
    ("check_agent_settings",
     "--agent-worker-keys {keys} --use-dynamic-batch-size --max-tokens-per-gpu 512", "--agent-port",
     "--agent-worker-keys"),
    ("check_agent_settings",
     "--agent-worker-keys none --agent-port 4000 --use-dynamic-batch-size --max-tokens-per-gpu 512",
     "--agent-worker-keys", "cannot be read"),
    ("check_agent_settings",
     "--agent-environment gymnasium:Nothing-v1 --use-dynamic-batch-size --max-tokens-per-gpu 512",
     "--agent-environment", "Nothing"),
    ("check_agent_settings",
     "--agent-environment json.nothing --use-dynamic-batch-size --max-tokens-per-gpu 512",
     "--agent-environment", "has no 'nothing'"),
    ("check_agent_settings", "--loss-type sft_loss --agent-environment single_turn",
     "--agent-environment", "samples no rollouts"),
    ("", f"{BASE} --agent-environment single_turn", "--agent-environment", "--agent-function-path"),
    ("", f"{BASE} --agent-worker-keys {{keys}} --agent-port 4000", "--agent-worker-keys",
     "--agent-function-path"),
    ("check_turn_estimator", "--advantage-estimator grpo_turn", "--advantage-estimator",
     "--agent-function-path"),
    ("", "--observation-loss-coef 0.1", "--observation-loss-coef", "has no effect without"),
    ("check_agent_compatibility", "--agent-command x --micro-batch-size 4",
     "--use-dynamic-batch-size", "any number of sequences"),
    ("check_agent_compatibility", f"{BASE} --apply-chat-template", "--apply-chat-template",
     "cannot be combined with agents"),
    ("check_agent_compatibility",
     f"{BASE} --partial-rollout --rollout-time-limit-s 9 --rollout-engine sglang "
     "--rollout-external-engine-addrs 127.0.0.1:1 --no-sglang-router",
     "--rollout-time-limit-s", "--partial-rollout"),
    ("check_agent_compatibility", f"{BASE} --partial-rollout --mask-offpolicy-in-partial-rollout",
     "--mask-offpolicy-in-partial-rollout", "as a whole"),
    ("check_agent_compatibility", f"{BASE} --partial-rollout --buffer-filter-path json.loads",
     "--buffer-filter-path", "--partial-rollout"),
    ("check_agent_compatibility",
     "--agent-worker-keys {keys} --agent-port 4000 --use-dynamic-batch-size --max-tokens-per-gpu "
     "512 --partial-rollout", "--agent-worker-keys", "--partial-rollout"),
    ("check_agent_compatibility", f"{BASE} --rollout-slice-len 4 --over-sampling-batch-size 64",
     "--rollout-slice-len", "without --partial-rollout"),
    ("check_agent_compatibility", f"{BASE} --policy-loss-type gspo", "--policy-loss-type",
     "how an episode is split"),
    ("check_agent_compatibility", f"{BASE} --policy-loss-type gmpo", "--policy-loss-type",
     "how an episode is split"),
    ("check_agent_compatibility", f"{BASE} --policy-loss-type sapo --sapo-ratio-level sequence",
     "--sapo-ratio-level", "how an episode is split"),
    ("check_agent_compatibility", f"{BASE} --outlier-token-is-threshold-low 1e-4",
     "--outlier-token-is-threshold-low", "masks whole sequences"),
    ("check_agent_compatibility", f"{BASE} --outlier-token-is-threshold-high 100",
     "--outlier-token-is-threshold-high", "masks whole sequences"),
    ("check_agent_compatibility", f"{BASE} --opd-prefix-gamma 0.5 --use-opd --opd-type megatron "
     "--opd-teacher-load {folder}/hf", "--opd-prefix-gamma",
     "how an episode is split"),
    ("check_agent_compatibility", f"{BASE} --advantage-estimator otb", "--advantage-estimator",
     "an episode share one"),
    *(
        ("", f"{BASE} {penalty} 0.1 {flags}", penalty, "whose rewards it would not reach")
        for penalty in ("--agent-turn-penalty", "--agent-token-penalty")
        for flags in (
            "--custom-reward-post-process-path json.dumps",
            "--custom-convert-samples-to-train-data-path json.dumps",
            "--advantage-estimator gdpo --reward-key a --gdpo-reward-keys a b",
        )
    ),
    ("", f"{BASE} --custom-generate-function-path asyncio.sleep", "--agent-function-path",
     "--custom-generate-function-path"),
    ("", "--agent-timeout-s 3", "--agent-timeout-s", "has no effect without"),
]  # fmt: skip

NEEDED = {
    "reinforce_plus_plus": ["--normalize-advantages"],
    "reinforce_plus_plus_baseline": ["--normalize-advantages"],
    "dro": ["--dro-beta", "0.1"],
}


@refused(CASES)
def test_a_broken_rule(tmp_path: Path, row: tuple[str, str, str, str]) -> None:
    (tmp_path / "keys").write_text("a-key-of-a-worker-0123456789abcdef\n")
    flags = row[1].replace("{keys}", str(tmp_path / "keys")).replace("{folder}", str(tmp_path))
    assert_refused(problems_of(complete(tmp_path, *shlex.split(flags))), row)


def test_agents_by_function_and_by_command(tmp_path: Path) -> None:
    config = parse_args(complete(tmp_path, *BASE.split()), 1)
    assert config.agents.given and config.agents.agent_host == "127.0.0.1"
    config = parse_args(complete(tmp_path, *COMMAND.split(), "python agent.py"), 1)
    assert config.agents.agent_command == "python agent.py"
    assert not parse_args(complete(tmp_path), 1).agents.given


def test_sglangs_parsers_need_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = complete(tmp_path, *BASE.split(), "--agent-tool-format", "sglang:qwen25")
    monkeypatch.setattr("arguments.rules.agents.find_spec", lambda name: None)
    (found,) = problems_of(line, 1)
    assert found.flag == "--agent-tool-format" and "requires the package sglang" in str(found)
    monkeypatch.setattr("arguments.rules.agents.find_spec", lambda name: object())
    assert parse_args(line, 1).agents.agent_tool_format == "sglang:qwen25"


def test_formats_of_the_flag_are_those_that_are_read() -> None:
    assert set(TOOL_FORMATS) == {"none", *FORMATS}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_documents_name_what_goes_with_agents(tmp_path: Path, language: str) -> None:
    """What the table lists is registered and in the right column. (docs/flags.md has every name.)"""
    lines = (ROOT / f"docs/{language}/agents.md").read_text().splitlines()
    table = next(
        i for i, line in enumerate(lines) if line.startswith(("| estimators |", "| 估计器 |"))
    )
    names = {
        "advantage_estimator": {name for name, _ in advantage_estimators.items()},
        "policy_loss_type": {name for name, _ in policy_losses.items()},
    }
    for (flag, every), line in zip(names.items(), lines[table:], strict=False):
        taken, refused = (set(re.findall(r"`([a-z_]+)`", cell)) for cell in line.split("|")[2:4])
        assert taken and refused and taken | refused <= every
        for name in sorted(taken | refused):
            words = [*BASE.split(), f"--{flag.replace('_', '-')}", name, *NEEDED.get(name, [])]
            line = complete(tmp_path, *words)
            if name in taken:
                assert parse_args(line, 1), name
            else:
                with pytest.raises(ConfigError):
                    parse_args(line, 1)
