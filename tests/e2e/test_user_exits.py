"""``sys.exit(0)`` in code of the user's, when it is called: the run fails with a sentence that names
the module, or the sample does. It never ends as if all were well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.helpers import Workspace
from tests.e2e.programs import TrainServer

LEAVING = """
import sys

def leave(*positional, **named):
    sys.exit(0)

async def leave_later(args, sample, sampling_params):
    sys.exit(0)

async def play(model, episode):
    sys.exit(0)

async def agent(task):
    sys.exit(0)

class Source:
    def __init__(self, args):
        pass

    def get_samples(self, count):
        sys.exit(0)

    add_samples = save = load = __len__ = get_samples

class Room:
    def reset(self, *positional, **named):
        sys.exit(0)

    def step(self, *positional, **named):
        sys.exit(0)
"""
DYNAMIC = {
    "prompt_data": "QUESTIONS",
    "apply_chat_template": None,
    "use_dynamic_batch_size": "",
    "max_tokens_per_gpu": 512,
    "micro_batch_size": None,
}
# flag, with underscores -> what is there in place of "leave", other flags
RUN_FAILS: dict[str, tuple[str, dict[str, Any]]] = {
    "custom_arguments_path": ("leave", {}),
    "custom_megatron_init_path": ("leave", {}),
    "custom_model_provider_path": ("leave", {}),
    "custom_megatron_before_log_prob_hook_path": (
        "leave",
        {"use_kl_loss": "", "kl_loss_coef": 0.1, "ref_load": "MODEL"},
    ),
    "custom_megatron_before_train_step_hook_path": ("leave", {}),
    "custom_advantage_function_path": ("leave", {}),
    "custom_convert_samples_to_train_data_path": ("leave", {}),
    "custom_pg_loss_reducer_function_path": ("leave", {}),
    "rollout_data_postprocess_path": ("leave", {}),
    "custom_loss_function_path": ("leave", {"policy_loss_type": None}),
    "custom_tis_function_path": ("leave", {"use_tis": ""}),
    "custom_rollout_log_function_path": ("leave", {}),
    "custom_reward_post_process_path": ("leave", {}),
    "dynamic_sampling_filter_path": ("leave", {}),
    "rollout_sample_filter_path": ("leave", {}),
    "rollout_sample_hook_path": ("leave", {}),
    "rollout_function_path": ("leave", {}),
    "eval_function_path": ("leave", {"eval_interval": 1, "eval_prompt_data": "few PROMPTS"}),
    "data_source_path": ("Source", {}),
}
SAMPLES_FAIL: dict[str, tuple[str, dict[str, Any]]] = {
    "custom_rm_path": ("leave", {}),
    "custom_generate_function_path": ("leave_later", {}),
    "custom_generate_function_path, an episode": ("play", {}),
    "agent_function_path": ("agent", DYNAMIC),
    "agent_environment": ("Room", DYNAMIC),
}


def failing(
    server: TrainServer, work: Workspace, folder: Path, flag: str, name: str, more: dict[str, Any]
) -> str:
    """What the run says, which does not end well."""
    file = folder / "leaving.py"
    file.write_text(LEAVING)
    questions = folder / "questions.jsonl"
    questions.write_text('{"messages": "who?", "answer": "I"}\n' * 8)
    places = {"MODEL": work.model, "PROMPTS": f"{work.prompts}@[0:3]", "QUESTIONS": questions}
    for word, place in places.items():
        more = {
            k: v.replace(word, str(place)) if isinstance(v, str) else v for k, v in more.items()
        }
    changes = {flag.split(",")[0]: f"{file}:{name}", "num_rollout": 1, **more}
    done = server.train(work.flags(folder / "out", **changes), folder / "log")
    assert done.status not in (0, None), done.out[-2000:]
    assert "Traceback" not in done.err, done.err
    assert "leaving.py" in done.err, done.err
    return done.err


@pytest.mark.extended
@pytest.mark.parametrize("flag", RUN_FAILS)
def test_a_function_that_exits_fails_the_run(
    server: TrainServer, work: Workspace, tmp_path: Path, flag: str
) -> None:
    message = failing(server, work, tmp_path, flag, *RUN_FAILS[flag])
    assert "sys.exit(0) was called" in message


@pytest.mark.extended
@pytest.mark.parametrize("flag", SAMPLES_FAIL)
def test_a_function_that_exits_fails_its_samples(
    server: TrainServer, work: Workspace, tmp_path: Path, flag: str
) -> None:
    message = failing(server, work, tmp_path, flag, *SAMPLES_FAIL[flag])
    assert "sys.exit(0) was called" in message or "SystemExit: 0" in message
