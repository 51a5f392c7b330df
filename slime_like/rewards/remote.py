"""A reward server: ``POST --rm-url {"prompt", "response", "label"}`` returns a number, or an object
with --reward-key.

Equivalent to slime's ``remote_rm``. Runs in a worker's event loop (`worker.py`), which handles many
samples concurrently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_like.rewards.reward_server import RewardServer, certificates

if TYPE_CHECKING:
    from slime_like.rewards.custom import RewardArgs
    from slime_like.samples.slime_sample import SlimeSample


class RemoteReward:
    """Client of the server. Raises ValueError without --rm-url."""

    def __init__(self, args: RewardArgs) -> None:
        self._server = RewardServer(require_url(args, "remote_rm"), args.rm_timeout_s)
        certificates()

    async def score(self, args: RewardArgs, sample: SlimeSample) -> object:
        """The server's answer, see `RewardServer.post`."""
        return await self._server.post(
            {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        )


def require_url(args: RewardArgs, name: str) -> str:
    """--rm-url. Raises ValueError if it is missing, as where a row's metadata alone names the
    reward."""
    if args.rm_url is None:
        raise ValueError(f"the reward {name} requires --rm-url")
    return args.rm_url
