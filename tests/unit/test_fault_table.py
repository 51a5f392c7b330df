"""Every fault that a run has to survive, or to end by name over: where it is made to happen."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS, TRAIN = "tests/e2e/test_checkpoint_faults.py", "tests/e2e/test_train.py"
WATCHDOG, RESUME, LAYOUTS = (
    "tests/e2e/test_watchdog.py",
    "tests/e2e/test_resume.py",
    "tests/e2e/test_resume_layouts.py",
)
ENGINES, RUNS, REAL = (
    "tests/unit/test_sglang_faults.py",
    "tests/e2e/test_engine_faults.py",
    "tests/sglang/test_real_servers.py",
)
LATE = "tests/sglang/test_late_servers.py"
GRADER, REMOTE, ADVANTAGES = (
    "tests/unit/test_rewards_grader.py",
    "tests/unit/test_rewards_remote.py",
    "tests/unit/test_advantages.py",
)
DATA, PROMPTS = "tests/unit/test_data_source.py", "tests/unit/test_data_prompts.py"
FOLDERS = "tests/unit/test_checkpoint_folders.py"
# fault -> "file: test test ..." with the names after test_
TESTS = {
    "killed during a save": [f"{CHECKPOINTS}: killed_at_a_write_sync_or_rename killed_at_10_random_instants sigterm_saves_and_ends_with_a_status_of_its_own"],
    "tracker empty, garbage or dangling": [f"{RESUME}: a_damaged_tracker", f"{FOLDERS}: a_bad_tracker_falls_back_to_the_newest", f"{CHECKPOINTS}: a_bad_tracker_and_nothing_complete_is_an_error"],
    "disk full": [f"{CHECKPOINTS}: a_disk_that_fills_up_during_the_second_save a_real_small_disk going_on_after_a_failed_save"],
    "damaged checkpoint": [f"{CHECKPOINTS}: every_damaged_file_is_named bits_that_change_after_they_were_read_stop_the_run"],
    "death during an asynchronous save": [f"{CHECKPOINTS}: killed_at_a_write_sync_or_rename killed_at_10_random_instants"],
    "interrupted run": [f"{LAYOUTS}: three_a_kill_and_three_are_six into_another_layout", "tests/e2e/test_scheduling.py: partial_rollouts_resume_exactly"],
    "missing data state, another model": [f"{RESUME}: what_cannot_be_loaded a_checkpoint_of_another_model_is_one_error"],
    "death of a rank": [f"{WATCHDOG}: a_killed_rank_ends_the_run", f"{CHECKPOINTS}: a_rank_that_is_killed_is_named_and_the_run_taken_up", f"{TRAIN}: signals_leave_no_process_behind"],
    "death of a node": ["tests/e2e/test_elastic.py: a_lost_node_costs_a_restart a_killed_run_goes_on_from_memory", "tests/unit/test_replicas.py: half_a_checkpoint_is_none any_one_node_may_be_lost", "tests/unit/test_launch_scripts.py: slurm_starts_the_trainer_again_on_the_nodes_that_are_left"],
    "hung rank": [f"{WATCHDOG}: a_stopped_rank_ends_the_run a_slow_rank_is_named_and_waited_for a_stuck_rank_is_named_when_the_collectives_time_out"],
    "suspended job, rank 0 killed without torchrun": [f"{WATCHDOG}: a_run_that_is_suspended_as_a_whole_goes_on rank_0_killed_without_torchrun", "tests/unit/test_signed_store.py: a_job_that_is_suspended_as_a_whole_blames_nobody"],
    "strangers in the store of the ranks": ["tests/unit/test_signed_store.py: watchdogs_ignore_what_others_write values_of_the_job_are_read_and_others_are_absent", "tests/unit/test_rendezvous.py: garbage_in_the_store_ends_no_rank the_store_listens_on_the_address_of_the_master_alone"],
    "signals, stdout without a reader": ["tests/unit/test_stopping.py: a_signal_that_comes_again_at_once_is_the_same a_run_goes_on_without_the_reader_of_its_output a_run_goes_on_without_any_reader", f"{TRAIN}: signals_leave_no_process_behind"],
    "engine: status 500": [f"{ENGINES}: a_passing_fault_costs_time_only a_lasting_fault_is_tried_a_few_times_and_dropped", f"{RUNS}: passing_faults_cost_time_and_wrong_answers_their_samples"],
    "engine: drop quota": [f"{RUNS}: a_quota_of_dropped_samples_stops_the_run a_run_without_servers_ends"],
    "engine: status 403, another 4xx, 429": [f"{ENGINES}: a_refused_request_is_not_sent_again a_passing_fault_costs_time_only", f"{RUNS}: a_quota_of_dropped_samples_stops_the_run"],
    "engine: hang, slow drip, death in the middle of an answer": [f"{ENGINES}: a_passing_fault_costs_time_only samples_of_a_server_that_dies_go_elsewhere samples_of_a_server_that_hangs_go_elsewhere", f"{RUNS}: passing_faults_cost_time_and_wrong_answers_their_samples", f"{REAL}: servers_that_the_run_starts_and_one_that_is_killed"],
    "engine: garbage, HTML with status 200": [f"{ENGINES}: a_wrong_answer_is_a_rejected_sample", f"{RUNS}: passing_faults_cost_time_and_wrong_answers_their_samples"],
    "engine: wrong tokens, log-probs or routes": [f"{ENGINES}: a_wrong_answer_is_a_rejected_sample", "tests/unit/test_sglang_routes.py: wrong_routes_are_a_rejected_sample"],
    "engine: weights refused, not the run's, half updated": [f"{ENGINES}: a_server_that_refuses_an_update_is_out an_update_that_all_refuse_stops_the_run a_refused_broadcast_ends_in_bounded_time another_version_than_was_sent_stops_the_run", f"{REAL}: a_wrong_weight_is_caught"],
    "engine: comes back, is started again, joins late": [f"{ENGINES}: a_server_that_comes_back_gets_the_weights_before_requests a_server_that_is_added_to_the_router_gets_weights_or_no_requests", f"{LATE}: one_that_comes_back one_that_is_added_to_the_router the_only_one_is_killed_and_started_again", f"{REAL}: servers_that_the_run_starts_and_one_that_is_killed"],
    "engine: responses that take too long": ["tests/e2e/test_stragglers.py: stragglers_are_aborted_and_go_on_in_the_next_rollout a_rollout_out_of_time_takes_what_there_is", "tests/sglang/test_stragglers.py: stragglers_are_aborted_at_the_servers_and_go_on_in_the_next_rollout a_rollout_out_of_time_ends_its_responses_at_the_servers"],
    "reward raises, hangs or ignores signals": [f"{GRADER}: a_hanging_reward_is_killed_with_its_children values_that_leave_the_baseline_and_samples_that_fail workers_die_with_the_program", f"{TRAIN}: failed_samples_below_the_limit_are_left_out failed_samples_above_the_limit_stop_both_ranks", f"{REMOTE}: a_server_that_stays_broken_or_hangs_costs_its_deadline"],
    "reward NaN, inf, None, of another type, too large": [f"{GRADER}: values_that_leave_the_baseline_and_samples_that_fail values_that_are_errors", f"{ADVANTAGES}: a_bad_reward_leaves_its_group_unharmed", f"{TRAIN}: a_failure_of_one_rank_alone_is_told_once", f"{REMOTE}: a_function_of_groups_that_returns_something_else"],
    "odd groups": [f"{ADVANTAGES}: advantages_are_the_formula a_group_of_one equal_rewards_give_exactly_zero"],
    "gradient that is not finite": ["tests/dist/test_backend.py: a_poisoned_gradient_of_one_rank_makes_all_skip", "tests/unit/test_gates.py: skipped_steps_in_a_row"],
    "logits of -inf": ["tests/unit/test_lean_head.py: banned_tokens_leave_everything_finite a_row_with_one_token_left", "tests/unit/test_vocab_parallel.py: banned_tokens_leave_everything_finite"],
    "data: BOM, CRLF": [f"{DATA}: harmless_forms_keep_every_row"],
    "data: rows that are none, an empty file": [f"{DATA}: a_bad_row_is_refused_by_its_place one_bad_line_in_ten_thousand more_bad_rows_than_allowed empty_file a_row_of_ten_megabytes", f"{PROMPTS}: wrong_key_names_file_line_and_keys"],
    "bad configuration": ["tests/e2e/test_wrong_command_lines.py: a_wrong_command_line train_py torchrun_prints_once"],
}  # fmt: skip


def functions_of(path: str) -> set[str]:
    return {
        node.name
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("fault", TESTS)
def test_its_tests_are_there(fault: str) -> None:
    named = [
        (path, f"test_{name}")
        for entry in TESTS[fault]
        for path, names in [entry.split(": ")]
        for name in names.split()
    ]
    assert named and [(path, name) for path, name in named if name not in functions_of(path)] == []
