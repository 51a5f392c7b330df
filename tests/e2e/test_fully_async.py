"""A pool of episodes that never empties: with the local engine bit by bit the same after a kill,
with servers no sample lost and none trained on twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slime_like.rollout.recording import load_rollout
from slime_like.types import NOT_SAMPLED, Sample
from tests.e2e.helpers import Workspace, rows_of, same_numbers, weights_of
from tests.e2e.programs import TrainServer
from tests.e2e.test_agent_pauses import AGENT
from tests.e2e.test_agents import SIZES, prompts
from tests.e2e.test_stragglers import served
from tests.fake_sglang import FakeServer

ROLLOUTS = 5
# half of the tokens end a response: a few are many times longer than most
STOPS = " ".join(str(token) for token in range(40, 60))


def flags(work: Workspace, out: Path, **changes: Any) -> list[str]:
    """4 groups of 2 samples a rollout, in slices of 2 of at most 24 tokens."""
    pool = dict(async_rollout="", fully_async="", max_staleness=3, rollout_slice_len=2, rollout_max_response_len=24, rollout_stop_token_ids=STOPS,
                n_samples_per_prompt=2, num_steps_per_rollout=1, micro_batch_size=2, num_rollout=ROLLOUTS, tis_ratio_type="token",
                save=out / "c", load=out / "c", save_interval=1, save_hf=out / "hf", save_debug_rollout_data=out / "r_{rollout_id}",
                eval_interval=2, eval_prompt_data=f"few {work.prompts}@[0:4]", skip_eval_before_train="")  # fmt: skip
    return work.flags(out, **pool | changes)


def trained(out: Path, rollouts: Sequence[int] = range(ROLLOUTS)) -> list[list[Sample]]:
    """The samples of each rollout."""
    return [
        [s for group in load_rollout(str(out / "r_{rollout_id}"), j) for s in group.samples]
        for j in rollouts
    ]


def check_same(straight: Path, killed: Path) -> None:
    assert same_numbers(rows_of(killed)) == same_numbers(rows_of(straight))
    for a, b in zip(trained(straight), trained(killed), strict=True):
        assert [s.sample_id for s in a] == [s.sample_id for s in b]
        assert [s.weight_versions for s in a] == [s.weight_versions for s in b]
        assert all(x.tokens.equal(y.tokens) for x, y in zip(a, b))
        assert all(x.loss_mask.equal(y.loss_mask) for x, y in zip(a, b))
    expected, found = weights_of(straight / "hf"), weights_of(killed / "hf")
    assert [name for name in expected if not expected[name].equal(found[name])] == []


@pytest.fixture(scope="module")
def straight(
    server: TrainServer, work: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run that is not interrupted."""
    out = tmp_path_factory.mktemp("straight")
    server.train(flags(work, out), out / "log").ok()
    return out


def test_what_is_ready_is_trained_on(straight: Path) -> None:
    rows = rows_of(straight)
    assert len(rows) == ROLLOUTS
    assert max(row["rollout/staleness_max"] for row in rows) in (2, 3), "and never more"
    assert all(row["rollout/pool_in_flight"] > 0 for row in rows[:2]), "the pool is full"
    samples = [s for rollout in trained(straight) for s in rollout]
    ids = [s.sample_id for s in samples]
    assert len(set(ids)) == len(ids) == 8 * ROLLOUTS
    for j, rollout in enumerate(trained(straight)):
        versions = {v for s in rollout for v in s.weight_versions}
        assert max(versions) <= j + 1 and min(versions) >= j + 1 - 3
    assert any(len(set(s.weight_versions)) > 1 for s in samples), "weights came in mid-answer"
    lengths = [s.response_length for s in samples]
    assert max(lengths) >= 10 * min(lengths)
    diffs = [row.get("rollout/train_rollout_log_prob_diff_max") for row in rows]
    assert any(diffs) and all(diff is None or diff < 1e-4 for diff in diffs)


SELDOM = pytest.mark.extended
INSTANTS = [
    "kill_in_round 6",
    "signal_in_step SIGKILL 3 0",
    *(pytest.param(f"kill_in_round {n}", marks=SELDOM) for n in (2, 3, 4, 5, 7, 8, 9, 10)),
    *(pytest.param(f"signal_in_step SIGKILL {n} 0", marks=SELDOM) for n in (1, 2, 4, 5)),
    *(pytest.param(f"kill_in_second_save {point}", marks=SELDOM) for point in
      ("open 0", "open 3", "fsync 2", "rename 0")),
    pytest.param("kill_in_phase eval 1 0", marks=SELDOM),
    pytest.param("kill_in_phase sync 4 0", marks=SELDOM),
]  # fmt: skip


@pytest.mark.parametrize("instant", INSTANTS)
def test_killed_with_a_full_pool_it_is_the_run_that_was_not(
    server: TrainServer, work: Workspace, straight: Path, tmp_path: Path, instant: str
) -> None:
    argv = flags(work, tmp_path)
    killed = server.train(argv, tmp_path / "log", hook=f"tests.e2e.faults:{instant}")
    assert killed.status != 0
    server.train(argv, tmp_path / "log2").ok()
    check_same(straight, tmp_path)


SINGLE = dict(fully_async_single_samples="", advantage_estimator="batch_mean")


@pytest.mark.extended
@pytest.mark.parametrize("unit", ["groups", "samples"])
@pytest.mark.parametrize("mode", ["wait", "mask"])
def test_two_ranks_stopped_and_resumed(
    server: TrainServer, work: Workspace, tmp_path: Path, mode: str, unit: str
) -> None:
    outs = [tmp_path / "straight", tmp_path / "stopped"]
    more = dict(stale_tokens=mode, max_staleness=2, rollout_slice_len=1)
    more |= SINGLE if unit == "samples" else {}
    for out in outs:
        argv = flags(work, out, **more)
        if out is outs[1]:
            server.train([*argv, "--exit-interval", "2"], out / "log", ranks=2).ok()
        server.train(argv, out / "log2", ranks=2).ok()
    check_same(*outs)
    oldest = [
        j + 1 - v
        for j, rollout in enumerate(trained(outs[0]))
        for s in rollout
        for v, used in zip(s.weight_versions, s.loss_mask.tolist())
        if used
    ]
    assert max(oldest) == 2
    masked = sum(row["rollout/stale_masked_tokens"] for row in rows_of(outs[0]))
    assert (masked > 0) == (mode == "mask")


def test_single_samples_are_repeated_by_a_resume_and_by_their_record(
    server: TrainServer, work: Workspace, tmp_path: Path
) -> None:
    straight, killed, recorded = (tmp_path / name for name in ("straight", "killed", "recorded"))
    server.train(flags(work, straight, **SINGLE), straight / "log").ok()
    argv = flags(work, killed, **SINGLE)
    hook = "tests.e2e.faults:signal_in_step SIGKILL 3 0"
    assert server.train(argv, killed / "log", hook=hook).status != 0
    server.train(argv, killed / "log2").ok()
    check_same(straight, killed)
    again = dict(debug_train_only="", load_debug_rollout_data=straight / "r_{rollout_id}", eval_interval=None, eval_prompt_data=None,
                 skip_eval_before_train=None, save_debug_rollout_data=None, async_rollout=None, fully_async=None, max_staleness=None,
                 fully_async_single_samples=None, rollout_slice_len=None)  # fmt: skip
    server.train(flags(work, recorded, **SINGLE | again), recorded / "log").ok()
    expected, found = weights_of(straight / "hf"), weights_of(recorded / "hf")
    assert [name for name in expected if not expected[name].equal(found[name])] == []
    rollouts = trained(straight)
    ids = [s.sample_id for rollout in rollouts for s in rollout]
    assert [len(rollout) for rollout in rollouts] == [8] * ROLLOUTS
    assert sorted(ids) == list(range(8 * ROLLOUTS)), "none is lost, none is trained on twice"
    apart = [len({s.group_id for s in rollout}) for rollout in rollouts]
    assert max(apart) > 4, "samples are taken without the others of their prompt"


@pytest.mark.extended
@pytest.mark.parametrize("unit", [{}, SINGLE], ids=["groups", "samples"])
def test_a_run_without_a_pool_samples_its_episodes_again(
    server: TrainServer, work: Workspace, tmp_path: Path, unit: dict[str, Any]
) -> None:
    argv = flags(work, tmp_path, **unit)
    server.train([*argv, "--exit-interval", "2"], tmp_path / "log").ok()
    plain = dict(async_rollout=None, fully_async=None, max_staleness=None, rollout_slice_len=None)
    plain |= dict(fully_async_single_samples=None)
    done = server.train(flags(work, tmp_path, **plain), tmp_path / "log2").ok()
    assert "had --fully-async, or another --n-samples-per-prompt" in done.out
    for before in (range(2), range(2, ROLLOUTS)):  # parts of a group are sampled again with it
        ids = [s.sample_id for rollout in trained(tmp_path, before) for s in rollout]
        assert len(set(ids)) == len(ids) == 8 * len(before)
    if not unit:
        ids = [s.sample_id for rollout in trained(tmp_path) for s in rollout]
        assert len(set(ids)) == len(ids) == 8 * ROLLOUTS
    assert all(row["rollout/staleness_max"] == 0 for row in rows_of(tmp_path)[2:])


def tenth_slow(slow_s: float) -> Callable[[Any], float]:
    """Seconds of a token: of every tenth prompt many times as long."""
    seen: dict[tuple[int, ...], int] = {}

    def pace(body: Any) -> float:
        number = seen.setdefault(tuple(body["input_ids"][:12]), len(seen))
        return slow_s if number % 10 == 3 else slow_s / 20

    return pace


def served_pool(work: Workspace, fake: FakeServer, out: Path, **changes: Any) -> list[str]:
    pool = dict(async_rollout="", fully_async="", max_staleness=4, tis_ratio_type="token", num_rollout=6,
                token_tis_ratio_clip_high=2.0, num_steps_per_rollout=1, save=out / "c", load=out / "c", save_interval=1,
                eval_interval=2, eval_prompt_data=f"few {work.prompts}@[0:4]", skip_eval_before_train="")  # fmt: skip
    return served(work, fake, out, **pool | changes)


@pytest.mark.parametrize(
    ("ranks", "unit"),
    [(1, {}), pytest.param(2, {}, marks=SELDOM), pytest.param(2, SINGLE, marks=SELDOM)],
    ids=["one_rank", "two_ranks", "samples"],
)
def test_servers_go_on_while_the_run_trains_evaluates_and_is_killed(
    server: TrainServer, work: Workspace, tmp_path: Path, ranks: int, unit: dict[str, Any]
) -> None:
    with FakeServer(str(work.model)) as fake:
        fake.pace_s = tenth_slow(0.4)
        argv = served_pool(work, fake, tmp_path, **unit)
        killed = server.train(
            argv, tmp_path / "log", ranks=ranks, hook="tests.e2e.faults:signal_in_step SIGKILL 4 0"
        )
        assert killed.status != 0
        server.train(argv, tmp_path / "log2", ranks=ranks).ok()
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    samples = [s for rollout in trained(tmp_path, range(6)) for s in rollout]
    ids = [s.sample_id for s in samples]
    assert len(set(ids)) == len(ids) == 6 * 8, "none is trained on twice"
    assert set(range(2 * 12)) <= set(ids), "and none of the first groups is lost"
    assert max(row["rollout/staleness_max"] for row in rows) <= 4
    assert max(row["rollout/group_age_max"] for row in rows) >= 2
    assert any(len(set(s.weight_versions)) > 1 for s in samples), "some were paused and continued"
    assert all(s.reward is not None and s.response_length for s in samples)
    assert sum(row["rollout/failed_frac"] for row in rows) == 0
    assert "eval/few/mean" in rows[1]


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["local", "sglang"])
def test_agents_play_across_rollouts(
    server: TrainServer, work: Workspace, tmp_path: Path, engine: str
) -> None:
    (tmp_path / "agent.py").write_text(AGENT.format(log=str(tmp_path / "begun")))
    source = prompts(tmp_path)
    more: dict[str, Any] = SIZES | dict(
        prompt_data=source, apply_chat_template=None, custom_rm_path=None, rm_type="zero", n_samples_per_prompt=2, rollout_batch_size=2,
        num_rollout=4, rollout_max_response_len=200, max_tokens_per_gpu=2048, async_rollout="", fully_async="", max_staleness=3,
        tis_ratio_type="token", token_tis_ratio_clip_high=2.0, agent_function_path=f"{tmp_path}/agent.py:play",
        eval_interval=2, skip_eval_before_train="", eval_prompt_data=f"texts {source}@[0:2]", save_debug_rollout_data=tmp_path / "r_{rollout_id}",
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        if engine == "local":
            argv = work.flags(tmp_path / "out", **more | dict(rollout_slice_len=8))
        else:
            fake = stack.enter_context(FakeServer(str(work.model)))
            fake.pace_s = tenth_slow(0.1)
            argv = served(
                work, fake, tmp_path / "out", **more | dict(rollout_local_batch_size=None)
            )
        server.train(argv, tmp_path / "log").ok()
    rows = rows_of(tmp_path / "out")
    ids = {s.sample_id for rollout in trained(tmp_path, range(4)) for s in rollout}
    assert len(ids) == 16 and all(row["agent/lost"] == 0 for row in rows)
    assert max(row["rollout/group_age_max"] for row in rows) >= 1
    for j, rollout in enumerate(trained(tmp_path, range(4))):
        versions = {v for s in rollout for v in s.weight_versions} - {NOT_SAMPLED}
        assert j + 1 - 3 <= min(versions) <= max(versions) <= j + 1
    assert "eval/texts/mean" in rows[-1]


@pytest.mark.extended
@pytest.mark.parametrize(
    "more",
    [
        dict(advantage_estimator="ppo", critic_lr=1e-3, num_critic_only_steps=2),
        dict(dynamic_sampling_filter_path="slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"),
        dict(num_parallel_generation_workers=3),
        SINGLE | dict(num_parallel_generation_workers=3),
        dict(custom_generate_function_path="examples/guessing_game/game.py:generate", rollout_slice_len=None,
             rollout_stop_token_ids=None, custom_rm_path=None, rollout_max_response_len=90, input_key=None, label_key=None,
             apply_chat_template=None, prompt_data="reasoning_gym:chain_sum?size=100", eval_prompt_data="few reasoning_gym:chain_sum?size=4"),
    ],
    ids=["critic", "filter", "few_workers", "few_samples", "turns"],
)  # fmt: skip
def test_with_the_rest_of_a_run(
    server: TrainServer, work: Workspace, tmp_path: Path, more: dict[str, Any]
) -> None:
    server.train(flags(work, tmp_path, **more), tmp_path / "log").ok()
    rows = rows_of(tmp_path)
    assert len(rows) == ROLLOUTS and all(row["rollout/staleness_max"] <= 3 for row in rows)
    ids = [s.sample_id for rollout in trained(tmp_path) for s in rollout]
    assert len(set(ids)) == len(ids) == 8 * ROLLOUTS
    if workers := more.get("num_parallel_generation_workers"):
        size = 2 if "fully_async_single_samples" in more else 1
        assert all(row["rollout/pool_in_flight"] <= workers * size for row in rows)
