"""A two-turn task that a model with random weights can learn, and the agent that plays it: say the
digit that is asked for, and repeat it when only a colon follows. Also workers that claim tasks of a
run."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx

AGENT = """
async def play(task):
    messages = [{"role": "user", "content": task.prompt}]
    right = 0
    for turn in range(2):
        answer = await task.chat(messages, max_tokens=1)
        message = answer["choices"][0]["message"]
        right += message["content"] == task.label
        messages += [message, {"role": "user", "content": ":"}]
    return right / 2
"""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write_task(folder: Path) -> None:
    """`model/`, `prompts.jsonl` and `agent.py`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.learning.tasks import make_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"text": f"{digit}:", "answer": digit} for digit in "0123"] * 4
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "agent.py").write_text(AGENT)


class Workers:
    """Programs elsewhere: threads that claim tasks of a run by HTTP until they are stopped. The first
    claim is given up with an error."""

    def __init__(self, port: int, key: str, count: int) -> None:
        self.url, self.key = f"http://127.0.0.1:{port}", key
        self.claimed: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]

    def __enter__(self) -> Workers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                with httpx.Client(base_url=self.url, timeout=600) as client:
                    self._ask(client)
            except httpx.TransportError:  # the gateway listens only while episodes run
                self._stop.wait(0.05)
            except Exception as error:
                self.problems.append(repr(error))
                return

    def _ask(self, client: httpx.Client) -> None:
        bearer = {"authorization": f"Bearer {self.key}"}
        found = client.post("/tasks/claim", json={"wait_s": 1}, headers=bearer)
        if found.status_code == 204:
            return
        task = found.raise_for_status().json()
        self.claimed.append(task)
        client.headers["authorization"] = f"Bearer {task['api_key']}"
        body = {"messages": [{"role": "user", "content": task["prompt"]}], "max_tokens": 5}
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        if task is self.claimed[0]:
            end: dict[str, Any] = {"error": "out of luck"}
        else:
            client.post("/v1/rewards", json={"reward": 0.25}).raise_for_status()
            end = {"reward": answer["usage"]["completion_tokens"] / 10}
        client.post("/tasks/finish", json=end).raise_for_status()
