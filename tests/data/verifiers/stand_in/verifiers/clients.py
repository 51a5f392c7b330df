from __future__ import annotations

from typing import Any


def OpenAIChatCompletionsClient(client: Any) -> Any:
    return client
