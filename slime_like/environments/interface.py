"""Interface of text environments."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Protocol, TypeAlias

# a text, or, in a run with --multimodal-keys, texts and pictures in order: images of PIL, and bytes
# or pathlib paths of files
Observation: TypeAlias = str | Sequence[object]
# observation, reward of the action (None: use the run's reward function), whether it is done
Step: TypeAlias = tuple[Observation, float | None, bool]


class TextEnvironment(Protocol):
    """One episode: `reset` once, then `step` until done. Both may be async; sync methods run in a
    thread per episode. `close` is called at the end, if defined."""

    def reset(
        self, *, seed: int, row: Mapping[str, object]
    ) -> Observation | Awaitable[Observation]:
        """The first observation.

        Args:
            seed: Equal for all samples of a prompt, from 0 to 2**31 - 1.
            row: ``prompt``, ``label``, ``metadata``, ``evaluation``, ``messages`` (the row's, as
                OpenAI's clients send them) and ``images`` (the bytes of their files). Additions to
                its metadata are visible to the reward function.
        """
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Process a model turn, without reasoning and the token that ended it.

        Returns:
            The observation, the reward of the action (None, of the last one: use the run's reward
            function), and whether the episode is over.
        """
        ...
