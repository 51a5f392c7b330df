"""A remote agent worker without dependencies: it claims tasks of a run, and plays them.

    python worker.py http://127.0.0.1:5000 KEY_FILE

    python train.py ... --agent-worker-keys KEY_FILE --agent-port 5000 --rm-type zero

Replace `play`. Several of these make a pool; each keeps its imports for all its episodes.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

_OPENER = build_opener(ProxyHandler({}))  # the gateway is reached without proxies


def post(url: str, key: str, **body: Any) -> Any:
    """The answer as JSON, None if it is empty. Raises OSError, also for a status of an error."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with _OPENER.open(Request(url, json.dumps(body).encode(), headers), timeout=600) as answer:
        return json.loads(answer.read() or "null")


def play(task: dict[str, Any]) -> float:
    """One episode: ask the model, and grade its answer."""
    messages = [{"role": "user", "content": task["prompt"]}]
    url = f"{task['base_url']}/chat/completions"
    done = post(url, task["api_key"], model="policy", messages=messages)["choices"][0]
    if done["finish_reason"] == "length":  # cut: JSON and tool calls in it are incomplete
        return 0.0
    return float(done["message"]["content"].strip() == str(task["label"]))


def run_episode(gateway: str, task: dict[str, Any]) -> None:
    key = task["api_key"]
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(task["heartbeat_s"] / 3):
            try:
                post(f"{gateway}/tasks/heartbeat", key)
            except OSError:
                return  # the episode went to another worker

    threading.Thread(target=beat, daemon=True).start()
    try:
        outcome: dict[str, Any] = {"reward": play(task)}
    except Exception as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
    finally:
        ended.set()
    post(f"{gateway}/tasks/finish", key, **outcome)


def work(gateway: str, key: str) -> None:
    while True:
        try:
            if (task := post(f"{gateway}/tasks/claim", key, wait_s=20)) is not None:
                run_episode(gateway, task)
        except OSError:  # nobody listens between rollouts, or the episode was lost
            time.sleep(0.5)


if __name__ == "__main__":
    work(sys.argv[1].rstrip("/"), Path(sys.argv[2]).read_text().split()[0])
