"""A mix of prompt sources in whole runs: per-source rewards, limits, templates, metrics and
evaluation, and the same stream after SIGKILL in mid-epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_like.rollout.recording import load_rollout
from slime_like.types import PROMPT_SOURCE, Sample
from tests.e2e.helpers import Workspace, rows_of, same_numbers, weights_of
from tests.e2e.programs import TrainServer
from tests.e2e.test_stragglers import served
from tests.fake_sglang import FakeServer

ROLLOUTS = 5
STOPS = " ".join(str(token) for token in range(40, 60))  # half of all tokens end a response
MIX = """
defaults: {label_key: answer, input_key: messages}
sources:
  short: {path: "PROMPTS@[0:5]", weight: 2, max_response_len: 4, pass_rate: [0.1, 0.95], pass_reward: 0.1, pass_window: 3}
  plain: {path: "PROMPTS@[5:8]", rm_type: f1, max_epochs: 2, eval_path: "PROMPTS@[0:3]"}
  later: {path: "PROMPTS@[8:15]", after: {short: 0.2}, weight: {0: 1, 3: 3}, apply_chat_template_kwargs: {enable_thinking: true}}
"""
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "ahead": dict(async_rollout="", max_staleness=1, tis_ratio_type="token"),
    "fully_async": dict(async_rollout="", fully_async="", max_staleness=3, rollout_slice_len=2, tis_ratio_type="token"),
    "filtered": dict(dynamic_sampling_filter_path="slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std", partial_rollout="", rollout_slice_len=3,
                     over_sampling_batch_size=6, tis_ratio_type="token"),
}  # fmt: skip


def flags(work: Workspace, out: Path, mode: str, **changes: Any) -> list[str]:
    mix = out / "mix.yaml"
    out.mkdir(parents=True, exist_ok=True)
    mix.write_text(MIX.replace("PROMPTS", str(work.prompts)))
    values = dict(prompt_data=mix, label_key=None, rollout_max_response_len=12, rollout_stop_token_ids=STOPS, n_samples_per_prompt=2,
                  num_steps_per_rollout=1, micro_batch_size=2, num_rollout=ROLLOUTS, save=out / "c", load=out / "c", save_interval=1,
                  save_hf=out / "hf", save_debug_rollout_data=out / "r_{rollout_id}", eval_interval=2,
                  skip_eval_before_train="", eval_top_k=20)  # fmt: skip
    return work.flags(out, **values | MODES[mode] | changes)


def trained(out: Path) -> list[list[Sample]]:
    return [
        [s for group in load_rollout(str(out / "r_{rollout_id}"), j) for s in group.samples]
        for j in range(ROLLOUTS)
    ]


def source_numbers(out: Path) -> list[dict[str, float]]:
    names = ("rollout/short/", "rollout/plain/", "rollout/later/", "eval/plain/")
    return [{k: v for k, v in row.items() if k.startswith(names)} for row in rows_of(out)]


def check_same(straight: Path, killed: Path) -> None:
    assert same_numbers(rows_of(killed)) == same_numbers(rows_of(straight))
    assert source_numbers(killed) == source_numbers(straight)
    for a, b in zip(trained(straight), trained(killed), strict=True):
        assert [s.sample_id for s in a] == [s.sample_id for s in b]
        assert [s.metadata[PROMPT_SOURCE] for s in a] == [s.metadata[PROMPT_SOURCE] for s in b]
        assert all(x.tokens.equal(y.tokens) for x, y in zip(a, b))
        assert [s.reward for s in a] == [s.reward for s in b]
    expected, found = weights_of(straight / "hf"), weights_of(killed / "hf")
    assert [name for name in expected if not expected[name].equal(found[name])] == []


EXTENDED = [pytest.param(mode, marks=pytest.mark.extended) for mode in ("ahead", "filtered")]


@pytest.mark.parametrize("mode", ["synchronous", "fully_async", *EXTENDED])
def test_killed_in_mid_epoch_it_draws_what_the_whole_run_draws(
    server: TrainServer, work: Workspace, tmp_path: Path, mode: str
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    server.train(flags(work, whole, mode), whole / "log").ok()
    hook = "tests.e2e.faults:signal_in_step SIGKILL 3 0"
    assert server.train(flags(work, killed, mode), killed / "log", hook=hook).status != 0
    server.train(flags(work, killed, mode), killed / "log2").ok()
    check_same(whole, killed)
    rows = rows_of(whole)
    samples = [s for rollout in trained(whole) for s in rollout]
    of = {name: [s for s in samples if s.metadata[PROMPT_SOURCE]["name"] == name]
          for name in ("short", "plain", "later")}  # fmt: skip
    assert max(s.response_length for s in of["short"]) == 4
    assert max(s.response_length for s in (*of["plain"], *of["later"])) > 4
    assert len({s.sample_id // 2 for s in of["plain"]}) <= 6, "two epochs of three rows"
    assert of["later"], "another source has been passed"
    for row, rollout in zip(rows, trained(whole), strict=True):
        for name in of:
            mine = [s for s in rollout if s.metadata[PROMPT_SOURCE]["name"] == name]
            assert row[f"rollout/{name}/groups"] == len(mine) / 2
            if mine:
                mean = sum(s.reward or 0.0 for s in mine) / len(mine)
                assert row[f"rollout/{name}/reward_mean"] == pytest.approx(mean)
    assert {s.reward for s in of["plain"]} <= {0.0, 1.0}, "f1 of a single word"
    assert any(s.reward and s.reward not in (0.0, 1.0) for s in of["short"]), "the run's function"
    assert [("eval/plain/mean" in row) for row in rows].count(True) >= 2
    assert 0 < rows[-1]["rollout/short/epoch"] % 1 < 1, "it was killed, and ends, in mid-epoch"


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.extended), 2])
def test_with_servers_every_rank_knows_the_position(
    server: TrainServer, work: Workspace, tmp_path: Path, ranks: int
) -> None:
    """Rank 0 draws, in a thread; after a kill no prompt is lost, and the shares hold."""
    with FakeServer(str(work.model)) as fake:
        argv = served(work, fake, tmp_path, num_rollout=5, save=tmp_path / "c", load=tmp_path / "c", save_interval=1,
                      num_steps_per_rollout=1, label_key=None, rollout_max_response_len=12,
                      **MODES["fully_async"] | dict(rollout_slice_len=None, prompt_data=tmp_path / "mix.yaml"))  # fmt: skip
        (tmp_path / "mix.yaml").write_text(
            f"defaults: {{label_key: answer, input_key: messages}}\n"
            f"sources: {{a: {{path: '{work.prompts}@[0:7]', weight: 3, pass_rate: [0, 0.9], max_response_len: 5}}, "
            f"b: {{path: '{work.prompts}', rm_type: f1}}}}"
        )
        hook = "tests.e2e.faults:signal_in_step SIGKILL 3 0"
        assert server.train(argv, tmp_path / "log", ranks=ranks, hook=hook).status != 0
        server.train(argv, tmp_path / "log2", ranks=ranks).ok()
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    samples = [s for rollout in trained(tmp_path) for s in rollout]
    ids = [s.sample_id for s in samples]
    assert len(set(ids)) == len(ids) == 5 * 8
    for s in samples:
        is_first = s.sample_id // 2 % 4 != 2  # 3:1 is drawn a a b a
        assert s.metadata[PROMPT_SOURCE]["name"] == ("a" if is_first else "b"), s.sample_id
        assert s.response_length <= (5 if is_first else 12)


@pytest.mark.extended
@pytest.mark.parametrize("mode", ["synchronous", "fully_async"])
def test_two_ranks_draw_the_same(
    server: TrainServer, work: Workspace, tmp_path: Path, mode: str
) -> None:
    outs = [tmp_path / "one", tmp_path / "two"]
    for ranks, out in enumerate(outs, start=1):
        server.train(flags(work, out, mode), out / "log", ranks=ranks).ok()
    one, two = (
        [[s.metadata[PROMPT_SOURCE] for s in rollout] for rollout in trained(out)[:1]]
        for out in outs
    )
    assert one == two


def test_supervised_mixes(server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    mix = tmp_path / "mix.yaml"
    mix.write_text(
        f"sources: {{a: {{path: '{work.prompts}@[0:9]', weight: 3}}, b: {{path: '{work.prompts}'}}}}"
    )
    argv = work.flags(tmp_path, prompt_data=mix, loss_type="sft_loss", policy_loss_type=None, custom_rm_path=None, rm_num_workers=None,
                      n_samples_per_prompt=None, num_steps_per_rollout=1)  # fmt: skip
    server.train(argv, tmp_path / "log").ok()
    for row in rows_of(tmp_path):
        assert (row["rollout/a/groups"], row["rollout/b/groups"]) == (3, 1)
    assert rows_of(tmp_path)[-1]["rollout/a/epoch"] == pytest.approx(6 / 9)


def test_too_few_epochs_are_one_error(server: TrainServer, work: Workspace, tmp_path: Path) -> None:
    mix = tmp_path / "mix.yaml"
    mix.write_text(f"sources: {{a: {{path: '{work.prompts}@[0:3]', max_epochs: 2}}}}")
    argv = work.flags(tmp_path / "out", prompt_data=mix)
    error = server.train(argv, tmp_path / "log").error()
    assert "every source with a weight has max_epochs" in error
    assert "8 of the run's 8 prompts" in error
