"""Serve one resources server of NeMo Gym, without ray and the head server that `ng_run` starts.

Runs in NeMo Gym's own Python environment:

    python nemo_gym_server.py resources_servers.mcqa.app:MCQAResourcesServer --port 8001
"""

from __future__ import annotations

import argparse
import importlib
import json
import typing
from unittest.mock import MagicMock

import uvicorn


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve one resources server of NeMo Gym.")
    parser.add_argument("server", help="module:Class")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--settings", type=json.loads, default={}, help="a JSON object")
    arguments = parser.parse_args()
    module, _, name = arguments.server.partition(":")
    kind = getattr(importlib.import_module(module), name)
    config_type = typing.get_type_hints(kind)["config"]
    config = config_type(
        host=arguments.host, port=arguments.port, entrypoint="", name=module, **arguments.settings
    )
    # the client for other servers of NeMo Gym, of which there are none
    from nemo_gym.server_utils import ServerClient

    server = kind(config=config, server_client=MagicMock(spec=ServerClient))
    uvicorn.run(
        server.setup_webserver(), host=arguments.host, port=arguments.port, log_level="warning"
    )


if __name__ == "__main__":
    main()
