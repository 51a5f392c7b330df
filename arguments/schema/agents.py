"""Agents that talk to the run over OpenAI's or Anthropic's API."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.config import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, CheckedSettings, arg

TOOL_FORMATS = [
    "none",
    "hermes",
    "qwen3_coder",
    "glm",
    "deepseek",
    "kimi",
    "harmony",
    "mistral",
    "mistral_list",
    "command",
    "phi",
    "granite",
    "python",
    "llama3",
]
# Values of SGLang's --tool-call-parser that tests/unit/agents/test_answer_parsers.py covers
SGLANG_PARSERS = [
    "qwen25",
    "qwen3_coder",
    "hermes",
    "llama3",
    "mistral",
    "deepseekv3",
    "deepseekv31",
    "kimi_k2",
    "glm45",
    "pythonic",
    "gemma4",
    "minimax-m2",
    "lfm2",
]
_NOT_REACHED = "whose rewards it would not reach; subtract it there"
_UNPENALISED = (
    f"custom_reward_post_process_path, {_NOT_REACHED}",
    f"custom_convert_samples_to_train_data_path, {_NOT_REACHED}",
    f"gdpo_reward_keys, {_NOT_REACHED}",
)
_AGENT = "agent_function_path|agent_command|agent_environment|agent_worker_keys"


@dataclass(frozen=True, slots=True)
class AgentsConfig(CheckedSettings):
    agent_function_path: str | None = arg(
        None,
        "module.function or file.py:function that runs an episode: async function(task). It calls "
        "the model at task.base_url (or with task.chat) and returns its reward, or None to use the "
        "run's reward function.",
        excludes=("agent_command", "custom_generate_function_path", "rollout_function_path"),
    )
    agent_function_isolation: bool = arg(
        False,
        "Run each episode of --agent-function-path in a process of its own, forked from one that "
        "has imported the function, and separated from the others as programs of --agent-command "
        "are. Otherwise all episodes of a rank share its process.",
        needs="agent_function_path",
    )
    agent_command: str | None = arg(
        None,
        "Program that runs an episode, one process per episode, in its own folder with task.json; "
        "OPENAI_BASE_URL, ANTHROPIC_BASE_URL and the keys are in its environment. The reward is "
        "the number in the file reward, otherwise that of the run's reward function.",
        excludes=("custom_generate_function_path", "rollout_function_path"),
    )
    agent_isolation: bool = arg(
        True,
        "With --agent-command or --agent-function-isolation: separate the programs of episodes "
        "from each other by user, process and mount namespaces, where this host can. Programs that "
        "need rights of root over files of other users need --no-agent-isolation.",
        idle_without="agent_command|agent_function_isolation",
    )
    agent_preload: list[str] | None = arg(
        None,
        "Modules that the Python program of --agent-command imports: they are imported once per "
        "rank, and each episode is forked from that process in place of starting Python and "
        "importing them again.",
        nargs="+",
        metavar="MODULE",
        needs="agent_command",
    )
    agent_environment: str | None = arg(
        None,
        "Text environment that the model interacts with: gymnasium:<id>?<option>=<value>, "
        "openenv:<url>, module.Class or file.py:Class with reset and step, single_turn.",
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
        "File with one key per line, for remote agent workers: they claim tasks from the gateway "
        "(POST /tasks/claim) with one of these keys.",
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
        "Seconds without a heartbeat after which a worker's task is reassigned.",
        legal=POSITIVE,
        needs="agent_worker_keys",
    )
    agent_retries: int = arg(
        2,
        "How often a task is reassigned after a worker is lost, before its sample is dropped.",
        legal=NON_NEGATIVE,
        needs="agent_worker_keys",
    )
    agent_timeout_s: float = arg(
        600.0,
        "Time limit of an episode in seconds. After it all processes of the agent are killed and "
        "its sample is dropped.",
        legal=POSITIVE,
        needs=_AGENT,
    )
    agent_episodes: int = arg(64, "Concurrent episodes per rank.", legal=AT_LEAST_ONE, needs=_AGENT)
    agent_max_turns: int = arg(
        256, "Maximum number of completions per episode.", legal=AT_LEAST_ONE, needs=_AGENT
    )
    agent_max_answer_tokens: int | None = arg(
        None,
        "Maximum tokens of one completion, an upper bound on what clients request; default: what "
        "--rollout-max-response-len leaves.",
        legal=POSITIVE,
        needs=_AGENT,
    )
    agent_concurrency: int = arg(
        8,
        "Concurrent requests per episode; 32 more may queue.",
        legal=AT_LEAST_ONE,
        needs=_AGENT,
    )
    agent_max_body_mb: float = arg(
        8.0, "Maximum size of a request body, in MiB.", legal=POSITIVE, needs=_AGENT
    )
    agent_host: str = arg(
        "127.0.0.1",
        "Address that the gateway listens on while episodes run. Addresses other than loopback "
        "accept requests from other machines, which need a key.",
        needs=_AGENT,
    )
    agent_port: int = arg(
        0,
        "Port of the gateway on rank 0; rank r uses port + r. 0: any free port.",
        legal=NON_NEGATIVE,
        needs=_AGENT,
    )
    agent_tool_format: str | None = arg(
        None,
        "Parser of the model's tool calls; default: the tokenizer's response template, otherwise "
        "detected from its chat template.",
        choices=(*TOOL_FORMATS, "transformers", *(f"sglang:{name}" for name in SGLANG_PARSERS)),
        needs=_AGENT,
    )

    agent_turn_penalty: float = arg(
        0.0,
        "Penalty subtracted from an episode's reward per completion, in training only.",
        legal=NON_NEGATIVE,
        excludes=_UNPENALISED,
        needs=_AGENT,
    )
    agent_token_penalty: float = arg(
        0.0,
        "Penalty subtracted from an episode's reward per generated token, in training only.",
        legal=NON_NEGATIVE,
        excludes=_UNPENALISED,
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
