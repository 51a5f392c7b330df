"""Agents that talk to the run over OpenAI's or Anthropic's API."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, CheckedSettings, arg

TOOL_FORMATS = (
    "none", "hermes", "qwen3_coder", "glm", "deepseek", "kimi", "harmony", "mistral", "mistral_list", "command", "phi", "granite", "python",
    "llama3",
)  # fmt: skip
SGLANG_PARSERS = (  # names of SGLang's --tool-call-parser, of which tests/unit/test_answer_parsers.py has texts
    "qwen25", "qwen3_coder", "hermes", "llama3", "mistral", "deepseekv3", "deepseekv31", "kimi_k2", "glm45", "pythonic", "gemma4", "minimax-m2",
    "lfm2",
)  # fmt: skip
_AGENT = "agent_function_path|agent_command|agent_environment|agent_worker_keys"


@dataclass(frozen=True, slots=True)
class AgentsConfig(CheckedSettings):
    agent_function_path: str | None = arg(
        None,
        "module.function or file.py:function that plays an episode: async function(task), which asks at task.base_url (or with task.chat) and "
        "returns its reward, or None for the run's reward function.",
        excludes=("agent_command", "custom_generate_function_path", "rollout_function_path"),
    )
    agent_command: str | None = arg(
        None,
        "Program that plays an episode, a process for each, in its own folder with task.json; OPENAI_BASE_URL, ANTHROPIC_BASE_URL and the "
        "keys are in its environment. Its reward is the number in the file reward, or the run's reward function's.",
        excludes=("custom_generate_function_path", "rollout_function_path"),
    )
    agent_environment: str | None = arg(
        None,
        "Text environment that the model plays: gymnasium:<id>?<option>=<value>, module.Class or file.py:Class with reset and step, single_turn.",
        metavar="ENVIRONMENT",
        excludes=(
            "agent_function_path",
            "agent_command",
            "custom_generate_function_path",
            "rollout_function_path",
        ),
    )
    agent_worker_keys: str | None = arg(
        None,
        "File with a key in each line: agents elsewhere play, which ask the gateway for tasks with one of them (POST /tasks/claim).",
        excludes=(
            "agent_function_path",
            "agent_command",
            "agent_environment",
            "custom_generate_function_path",
            "rollout_function_path",
        ),
    )
    agent_heartbeat_s: float = arg(
        60.0,
        "Seconds without a heartbeat after which a worker's task is given to another.",
        legal=POSITIVE,
        needs="agent_worker_keys",
    )
    agent_retries: int = arg(
        2,
        "Further workers that a task is given to when one is lost; then its sample is.",
        legal=NON_NEGATIVE,
        needs="agent_worker_keys",
    )
    agent_timeout_s: float = arg(
        600.0,
        "Seconds after which an episode is ended, with all processes of its agent; its sample is lost.",
        legal=POSITIVE,
        needs=_AGENT,
    )
    agent_episodes: int = arg(
        64, "Episodes that run at a time on a rank.", legal=AT_LEAST_ONE, needs=_AGENT
    )
    agent_max_turns: int = arg(
        256, "Answers that an episode may ask for.", legal=AT_LEAST_ONE, needs=_AGENT
    )
    agent_max_answer_tokens: int | None = arg(
        None,
        "Most tokens of an answer, whatever a client asks for; default: as --rollout-max-response-len leaves room.",
        legal=POSITIVE,
        needs=_AGENT,
    )
    agent_concurrency: int = arg(
        8,
        "Requests of an episode that are answered at a time; 32 more may wait.",
        legal=AT_LEAST_ONE,
        needs=_AGENT,
    )
    agent_max_body_mb: float = arg(
        8.0, "Largest body of a request, in MiB.", legal=POSITIVE, needs=_AGENT
    )
    agent_host: str = arg(
        "127.0.0.1",
        "Address that the gateway listens on while episodes run; another one than loopback lets other machines ask, who need a key.",
        needs=_AGENT,
    )
    agent_port: int = arg(
        0,
        "Port of the gateway on rank 0; rank r has port + r. 0: a free one.",
        legal=NON_NEGATIVE,
        needs=_AGENT,
    )
    agent_tool_format: str | None = arg(
        None,
        "How the model writes calls of tools, or which library reads them; default: the tokenizer's response template, else as its chat template shows.",
        choices=(*TOOL_FORMATS, "transformers", *(f"sglang:{name}" for name in SGLANG_PARSERS)),
        needs=_AGENT,
    )

    agent_turn_penalty: float = arg(
        0.0,
        "Taken off an episode's reward for each answer, in training alone.",
        legal=NON_NEGATIVE,
        needs=_AGENT,
    )
    agent_token_penalty: float = arg(
        0.0,
        "Taken off an episode's reward for each token that the model wrote, in training alone.",
        legal=NON_NEGATIVE,
        needs=_AGENT,
    )

    @property
    def given(self) -> bool:
        given = (
            self.agent_function_path,
            self.agent_command,
            self.agent_environment,
            self.agent_worker_keys,
        )
        return any(value is not None for value in given)
