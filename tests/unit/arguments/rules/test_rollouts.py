"""Rules about drawing, keeping and carrying over groups: each is broken once, alone, and names its
flag and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from arguments.eval_sets import EvalSet
from arguments.parse import parse_args
from slime_like.config import ConfigError
from tests.unit.command_lines import (
    assert_refused,
    complete,
    parse_flags,
    problems_of,
    problems_of_flags,
    refused,
)

NONZERO = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
JUDGE = "--rm-type judge --judge-url http://h/v1 --judge-model m"
# name of the rule, flags that are added, the flag that is named, words of the message
CASES = [
    ("check_sampling_settings", "--loss-type sft_loss --partial-rollout", "--partial-rollout",
     "samples no rollouts"),
    ("", "--over-sampling-batch-size 3", "--over-sampling-batch-size",
     "at least --rollout-batch-size 4"),
    ("", "--mask-offpolicy-in-partial-rollout",
     "--mask-offpolicy-in-partial-rollout", "without --partial-rollout"),
    ("", "--buffer-filter-path json.dumps", "--buffer-filter-path",
     "without --partial-rollout"),
    ("", "--rollout-slice-len 4", "--rollout-slice-len",
     "without --partial-rollout"),
    ("", "--rollout-slice-len 4 --over-sampling-batch-size 4",
     "--rollout-slice-len", "above --rollout-batch-size"),
    ("", "--max-num-gen-batches 4", "--max-num-gen-batches",
     "without --dynamic-sampling-filter-path"),
    ("check_scheduling_functions", "--dynamic-sampling-filter-path json.nothing",
     "--dynamic-sampling-filter-path", "has no 'nothing'"),
    ("check_filter_of_groups",
     f"--dynamic-sampling-filter-path {NONZERO} --n-samples-per-prompt 1",
     "--dynamic-sampling-filter-path", "compares the samples of a prompt"),
    ("check_custom_generate", "--custom-generate-function-path json.dumps",
     "--custom-generate-function-path", "must be an async function"),
    ("check_custom_generate",
     "--partial-rollout --custom-generate-function-path examples.calculator.calculator.generate",
     "--partial-rollout", "cannot be combined with --custom-generate-function-path"),
    ("check_custom_generate", "--custom-generate-function-path "
                              "examples.guessing_game.game.generate "
                              "--renormalize-sampled-log-probs --rollout-top-k 5",
     "--renormalize-sampled-log-probs", "in slime's convention"),
    ("check_rollout_functions", "--rollout-function-path examples.calculator.calculator.generate",
     "--rollout-function-path", "must not be async"),
    ("", "--eval-function-path json.dumps", "--eval-function-path", "without --eval-interval"),
    ("check_rollout_functions", "--rollout-function-timeout-s 5", "--rollout-function-timeout-s",
     "without --rollout-function-path"),
    ("check_rollout_functions", "--rollout-function-path json.dumps --advantage-estimator remax",
     "--advantage-estimator", "--rollout-function-path"),
    ("check_rollout_functions", "--rollout-function-path json.dumps --rollout-slice-len 4 "
                                "--over-sampling-batch-size 8", "--rollout-slice-len",
     "--rollout-function-path"),
    ("check_rollout_functions", "--data-source-path json.dumps --advantage-estimator remax",
     "--advantage-estimator", "cannot be combined with --data-source-path"),
    ("check_scheduling_functions", "--data-source-path json.nothing", "--data-source-path",
     "has no 'nothing'"),
    ("check_sampling_settings", "--loss-type sft_loss --data-source-path json.dumps",
     "--data-source-path", "samples no rollouts"),
    ("check_scheduling_functions", "--rollout-function-path json.nothing",
     "--rollout-function-path", "has no 'nothing'"),
    ("check_sampling_settings", "--loss-type sft_loss --rollout-function-path json.dumps",
     "--rollout-function-path", "samples no rollouts"),
    ("check_rollout_time_limit", "--rollout-time-limit-s 5", "--rollout-time-limit-s",
     "requires --rollout-engine sglang"),
    ("check_hooks", "--custom-megatron-init-path json.nothing", "--custom-megatron-init-path",
     "has no 'nothing'"),
    ("check_hooks", "--rollout-sample-hook-path json.dumps json.nothing",
     "--rollout-sample-hook-path", "has no 'nothing'"),
    ("check_hooks", "--custom-pg-loss-reducer-function-path json.dumps --policy-loss-type kl_cov",
     "--custom-pg-loss-reducer-function-path", "--policy-loss-type kl_cov"),
    ("",
     "--custom-convert-samples-to-train-data-path json.dumps --kl-coef 0.1 --ref-load {folder}/hf",
     "--kl-coef", "use --use-kl-loss"),
    ("check_hooks", "--custom-reward-post-process-path json.nothing",
     "--custom-reward-post-process-path", "has no 'nothing'"),
    ("",
     "--custom-reward-post-process-path json.dumps --kl-coef 0.1 --ref-load {folder}/hf",
     "--kl-coef", "use --use-kl-loss"),
    ("", "--max-staleness 1", "--max-staleness", "without --async-rollout"),
    ("", "--fully-async", "--fully-async", "without --async-rollout"),
    ("", "--async-rollout --num-parallel-generation-workers 9",
     "--num-parallel-generation-workers", "without --fully-async"),
    ("", "--async-rollout --stale-tokens mask", "--stale-tokens", "without --fully-async"),
    ("", "--async-rollout --fully-async --rollout-function-path json.dumps", "--fully-async",
     "--rollout-function-path"),
    ("check_fully_async", "--async-rollout --fully-async --max-staleness 0", "--max-staleness",
     "at least 1 with --fully-async"),
    ("check_fully_async", "--async-rollout --fully-async --over-sampling-batch-size 8",
     "--over-sampling-batch-size", "use --num-parallel-generation-workers"),
    ("check_fully_async", "--async-rollout --fully-async --advantage-estimator remax",
     "--advantage-estimator", "cannot be combined with --fully-async"),
    ("", "--async-rollout --fully-async-single-samples", "--fully-async-single-samples",
     "without --fully-async"),
    ("check_single_samples", "--async-rollout --fully-async --fully-async-single-samples",
     "--advantage-estimator", "takes groups apart; take batch_mean"),
    ("check_single_samples",
     "--async-rollout --fully-async --fully-async-single-samples --advantage-estimator batch_mean "
     "--loss-reduction prompt_mean", "--loss-reduction", "averages over the samples of a prompt"),
    ("",
     "--async-rollout --fully-async --fully-async-single-samples --advantage-estimator batch_mean "
     "--dynamic-sampling-filter-path json.dumps", "--fully-async-single-samples",
     "--dynamic-sampling-filter-path"),
    ("", "--async-rollout --partial-rollout", "--async-rollout",
     "cannot be combined with --partial-rollout"),
    ("", "--group-rm", "--group-rm", "--custom-rm-path"),
    ("check_reward_server", "--rm-type remote_rm", "--rm-url", "required"),
    ("check_reward_server", "--rm-type remote_rm --rm-url example.org", "--rm-url",
     "must start with http"),
    ("check_reward_server", "--rm-url http://example.org", "--rm-url",
     "without --rm-type remote_rm or reward_model"),
    ("check_reward_server", "--rm-type reward_model", "--rm-url", "required"),
    ("check_judge", "--rm-type judge", "--judge-url", "required"),
    ("check_judge", "--rm-type judge --judge-url http://h/v1", "--judge-model", "required"),
    ("check_judge", "--judge-url http://h/v1 --judge-model m", "--judge-url",
     "without --rm-type judge"),
    ("check_judge", "--rm-type judge --judge-url h/v1 --judge-model m", "--judge-url",
     "must start with http"),
    ("check_judge", f"{JUDGE} --judge-prompt nowhere.txt", "--judge-prompt", "cannot be read"),
    ("check_judge", f"{JUDGE} --judge-score-pattern a(b)(c)", "--judge-score-pattern",
     "has 2 groups"),
    ("check_judge", f"{JUDGE} --judge-score-pattern a(", "--judge-score-pattern",
     "no regular expression"),
    ("check_judge", f"{JUDGE} --judge-score-range 5", "--judge-score-range", "two numbers"),
    ("check_judge", f"{JUDGE} --judge-score-range 5 1", "--judge-score-range", "a higher one"),
    ("check_judge", JUDGE + ' --judge-verdicts {"A":"x"}', "--judge-verdicts",
     "words with numbers"),
    ("check_judge", JUDGE + ' --judge-verdicts {"A":NaN}', "--judge-verdicts", "must be finite"),
    ("check_judge", JUDGE + ' --judge-verdicts {"A":-Infinity}', "--judge-verdicts",
     "must be finite"),
    ("check_judge", JUDGE + f' --judge-verdicts {{"A":{10**400}}}', "--judge-verdicts",
     "must be finite"),
    ("check_judge", JUDGE + ' --judge-parameters {"stream":true}', "--judge-parameters",
     "must not have 'stream'"),
    ("check_judge", JUDGE + ' --judge-parameters {"n":2}', "--judge-parameters",
     "must not have 'n'"),
    ("check_judge", JUDGE + ' --judge-parameters {"model":"x"}', "--judge-parameters",
     "use --judge-model"),
    ("check_judge", JUDGE + ' --judge-parameters {"messages":[]}', "--judge-parameters",
     "must not have 'messages'"),
    ("check_judge", JUDGE + ' --judge-verdicts {"A":1} --judge-score-range 0 1',
     "--judge-verdicts", "cannot be combined with --judge-score-range"),
    ("check_judge", "--judge-model m", "--judge-model", "--judge-url"),
    ("check_scheduling_functions", "--custom-generate-function-path json.nothing",
     "--custom-generate-function-path", "has no 'nothing'"),
    ("check_scheduling_functions", "--rollout-sample-filter-path nowhere.f",
     "--rollout-sample-filter-path", "cannot import"),
]  # fmt: skip


def test_hooks_of_samples_add_up(tmp_path: Path) -> None:
    """As slime gives them, one with each flag, or several with one."""
    flag = "--rollout-sample-hook-path"
    for words in (f"{flag} json.dumps {flag} json.loads", f"{flag} json.dumps json.loads"):
        found = parse_flags(tmp_path, words).hooks.rollout_sample_hook_path
        assert found == ["json.dumps", "json.loads"]


@refused(CASES)
def test_a_broken_rule(tmp_path: Path, row: tuple[str, str, str, str]) -> None:
    assert_refused(problems_of_flags(tmp_path, row[1]), row)


def test_slimes_filters_are_built_in(tmp_path: Path) -> None:
    config = parse_args(complete(tmp_path, "--dynamic-sampling-filter-path", NONZERO), 1)
    assert config.scheduling.dynamic_sampling_filter_path == NONZERO


def read_sets(folder: Path, text: str, *flags: str) -> tuple[EvalSet, ...]:
    (folder / "eval.yaml").write_text(text.replace("{folder}", str(folder)))
    return parse_args(
        complete(
            folder, "--eval-interval", "1", "--eval-config", str(folder / "eval.yaml"), *flags
        ),
        1,
    ).eval_sets


def test_slimes_own_rollout_functions(tmp_path: Path) -> None:
    """The default is built in; the others name what there is in their place, and nothing is
    imported."""
    own = "slime.rollout.sglang_rollout.generate_rollout"
    config = parse_args(complete(tmp_path, "--rollout-function-path", own), 1)
    assert config.scheduling.rollout_function_path == own
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    config = parse_args(complete(tmp_path, "--rollout-function-path", path), 1)
    assert config.scheduling.async_rollout and config.scheduling.rollout_function_path is None
    assert config.scheduling.fully_async and config.scheduling.staleness == 4
    words = ("--rollout-function-path", path, "--no-fully-async")
    assert not parse_args(complete(tmp_path, *words), 1).scheduling.fully_async


def test_evaluation_sets_of_a_file(tmp_path: Path) -> None:
    text = """
eval:
  defaults: {temperature: 0.5, n_samples_per_eval_prompt: 4}
  datasets:
    - {name: a, path: "{folder}/prompts.jsonl"}
    - {name: b, path: "{folder}/prompts.jsonl", temperature: 0, top_k: 5, stop: "x", rm_type: zero,
       metadata_overrides: {k: 1}}
"""
    a, b = read_sets(tmp_path, text, "--eval-top-p", "0.9", "--eval-temperature", "2")
    assert (a.temperature, a.top_p, a.n_samples_per_eval_prompt, a.top_k, a.metadata) == (
        0.5,
        0.9,
        4,
        None,
        {},
    )
    assert (b.temperature, b.top_k, b.stop, b.n_samples_per_eval_prompt, b.metadata) == (
        0,
        5,
        ("x",),
        4,
        {"rm_type": "zero", "k": 1},
    )
    (by_name,) = read_sets(
        tmp_path, "datasets: {c: {path: '{folder}/prompts.jsonl', prompt_key: input}}"
    )
    assert (by_name.name, by_name.input_key, by_name.temperature) == ("c", "input", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasets: []", "must have 'datasets'"),
        ("sets: [1]\ndatasets: [1]", "unknown key 'sets'"),
        ("datasets: [{path: x}]", "set 0 has no 'name'"),
        ("datasets: [{name: a, path: x, temprature: 1}]",
         "set a has the unknown key 'temprature'; did you mean temperature"),
        ("datasets: [{name: a, path: x, temperature: -1}]",
         "set a: temperature is -1, must be 0 (greedy) or >= 1e-06"),
        ("datasets: [{name: a, path: x, top_k: many}]", "set a: top_k is 'many', must be a int"),
        ("datasets: [{name: a, path: x}, {name: a, path: x}]", "two sets named 'a'"),
        ("defaults: {name: a}\ndatasets: [{name: a, path: x}]",
         "defaults has the unknown key 'name'"),
        ("datasets: [{name: a, path: none.jsonl}]", "no such file"),
        ("datasets: [{name: a, path: '{folder}/prompts.jsonl', rm_type: maths}]",
         "set a: rm_type is 'maths'; legal values: choice, code"),
        ("datasets: [{name: a, path: '{folder}/prompts.jsonl', custom_rm_path: json.nothing}]",
         "set a: custom_rm_path 'json.nothing'"),
        ("datasets: [{name: a, path: '{folder}/prompts.jsonl', max_response_len: 600}]",
         "exceeds the 512 positions"),
        ("datasets: [{name: a, path: '{folder}/prompts.jsonl', max_prompt_len: 505}]",
         "set a: max_prompt_len 505 and a response of 128 exceed the 512 positions"),
        ("{", "cannot be read"),
    ],
)  # fmt: skip
def test_a_wrong_file_of_evaluation_sets(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_sets(tmp_path, text)
    assert [p.flag for p in error.value.problems] == ["--eval-config"], error.value
    assert message in str(error.value)


def test_two_ways_to_name_evaluation_sets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be combined with --eval-prompt-data"):
        read_sets(
            tmp_path,
            "datasets: [{name: a, path: '{folder}/prompts.jsonl'}]",
            "--eval-prompt-data",
            "b",
            str(tmp_path / "prompts.jsonl"),
        )


def test_a_data_source_takes_the_place_of_prompt_data(tmp_path: Path) -> None:
    """Prompts, labels and the passes over them are its own; slime's default is ours."""
    words = complete(tmp_path, without=("--prompt-data", "--label-key"))
    assert "--prompt-data" in {problem.flag for problem in problems_of(words, 1)}
    found = parse_args([*words, "--data-source-path", "json.dumps"], 1)
    assert found.scheduling.data_source_path == "json.dumps" and found.data.prompt_data is None
    own = "slime.rollout.data_source.RolloutDataSourceWithBuffer"
    default = parse_flags(tmp_path, f"--data-source-path {own}")
    assert default.scheduling.data_source_path is None
