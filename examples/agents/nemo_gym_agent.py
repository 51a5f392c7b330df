"""An agent that plays rows of NeMo Gym against its resources servers.

A resources server has the tools and the verifier of an environment. This agent takes the place of
NeMo Gym's simple agent and model server: each episode calls the policy at the run's gateway, under
its own key, and the tools and the verifier at the resources server. It needs neither NeMo Gym nor
its dependencies, which run in their own Python environment (`ng_run`, or nemo_gym_server.py):

    python nemo_gym_agent.py rows example.jsonl --server http://127.0.0.1:8001 > rows.jsonl

    python train.py ... --prompt-data rows.jsonl --input-key prompt --label-key label \
        --metadata-key metadata --rm-type zero --use-dynamic-batch-size --max-tokens-per-gpu 4096 \
        --agent-function-path examples/agents/nemo_gym_agent.py:play

The reward is the verifier's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

ROW = "nemo_gym"  # of a row's metadata
TIMEOUT_S = 600.0  # of a request; the episode has its own limit
CUT = "context_length_exceeded"


async def play(task: Any) -> float:
    """Play one row. Raises RuntimeError if a server fails."""
    found = task.metadata[ROW]
    row, tools = found["row"], tool_names(found["row"])
    policy = httpx.AsyncClient(
        base_url=task.base_url,
        headers={"authorization": f"Bearer {task.api_key}"},
        timeout=None,
        trust_env=False,
    )
    # of its own, for the session is in its cookies
    server = httpx.AsyncClient(base_url=found["server"], timeout=TIMEOUT_S, trust_env=False)
    async with policy, server:
        await post(server, "/seed_session", row)
        response = await converse(policy, server, row, tools, found["max_steps"])
        verified = await post(server, "/verify", {**row, "response": response})
    return float(verified["reward"])


async def converse(
    policy: httpx.AsyncClient,
    server: httpx.AsyncClient,
    row: Mapping[str, Any],
    tools: frozenset[str],
    max_steps: int | None,
) -> dict[str, Any]:
    """The last response, with the outputs of the whole conversation."""
    parameters = dict(row["responses_create_params"])
    parameters.pop("parallel_tool_calls", None)  # of the policy's own text; nothing restricts it
    given = parameters["input"]
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    outputs: list[dict[str, Any]] = []
    response: dict[str, Any] | None = None
    step = 0
    while True:
        body = {**parameters, "model": "policy", "input": [*messages, *outputs]}
        answer = await policy.post("/responses", json=body)
        if response is not None and is_end(answer):  # the conversation is as it is
            break
        response = checked(answer, "the gateway")
        outputs += response["output"]
        step += 1
        calls = [each for each in response["output"] if each["type"] == "function_call"]
        if response.get("incomplete_details") or not calls or step == max_steps:
            break
        for call in calls:
            text = await tool_output(server, call, tools)
            outputs.append(
                {"type": "function_call_output", "call_id": call["call_id"], "output": text}
            )
    return {**response, "output": outputs}


async def tool_output(
    server: httpx.AsyncClient, call: Mapping[str, Any], tools: frozenset[str]
) -> str:
    """What a tool says; the model is told of its mistakes."""
    if call["name"] not in tools:  # the path of another endpoint, such as the verifier's
        return json.dumps({"error": f"there is no tool {call['name']!r}"})
    try:
        arguments = json.loads(call["arguments"])
    except ValueError as error:
        return json.dumps({"error": f"Invalid tool call arguments: {error}"})
    return (await server.post(f"/{call['name']}", json=arguments)).text


async def post(server: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return checked(await server.post(path, json=body), f"{server.base_url}{path}")


def checked(answer: httpx.Response, place: str) -> dict[str, Any]:
    if answer.is_error:
        raise RuntimeError(f"{place} answered {answer.status_code}: {answer.text:.300}")
    found: dict[str, Any] = answer.json()
    return found


def is_end(answer: httpx.Response) -> bool:
    """Whether the conversation is at the limit of its length, or of its turns."""
    return answer.status_code == 429 or (answer.status_code == 400 and CUT in answer.text)


def tool_names(row: Mapping[str, Any]) -> frozenset[str]:
    tools = row["responses_create_params"].get("tools") or ()
    return frozenset(tool["name"] for tool in tools)


def rows(path: Path, server: str, max_steps: int | None) -> Iterator[dict[str, Any]]:
    """Lines of --prompt-data. The agent sends all of NeMo Gym's row; the prompt is to be read.
    Raises ValueError for a line that is no such row."""
    # str.splitlines also splits within JSON's strings
    with path.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                given = row["responses_create_params"]["input"]
                last = given if isinstance(given, str) else given[-1]["content"]
            except (ValueError, TypeError, LookupError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise ValueError(f"{path}, line {number}: no row of NeMo Gym: {reason}") from None
            prompt = last if isinstance(last, str) else json.dumps(last)
            metadata = {ROW: {"server": server, "max_steps": max_steps, "row": row}}
            yield {"prompt": prompt or "-", "label": "", "metadata": metadata}


def main() -> None:
    parser = argparse.ArgumentParser(description="Print rows of NeMo Gym for --prompt-data.")
    parser.add_argument("command", choices=["rows"])
    parser.add_argument("file", type=Path, help="NeMo Gym's JSONL")
    parser.add_argument("--server", required=True, help="its resources server, http://host:port")
    parser.add_argument("--max-steps", type=int, help="most answers of an episode")
    arguments = parser.parse_args()
    try:
        for row in rows(arguments.file, arguments.server.rstrip("/"), arguments.max_steps):
            sys.stdout.write(json.dumps(row) + "\n")
    except (OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
