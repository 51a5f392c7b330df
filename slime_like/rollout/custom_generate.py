"""Functions of the user's that make responses (--custom-generate-function-path), in either of two
conventions.

Ours: ``async function(model: Model, episode: Episode)``, see `episode.py`. slime's: ``async
function(args, sample, sampling_params)``, perhaps with ``evaluation``, which returns the sample; it
reaches the engine through `slime_api.post`. A first parameter called ``args`` tells which.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import slime_like
from slime_like.compat.slime.requests import call_slime_function
from slime_like.compat.slime.samples import SlimeArgs
from slime_like.import_utils import load_function
from slime_like.rollout.engines.base import GenerationClient, SamplingParams
from slime_like.rollout.episode import Aborted, Model, episode_of, sample_of
from slime_like.types import Sample, SampleStatus

PACKAGE = Path(slime_like.__file__).parent
FLAG = "--custom-generate-function-path"
SeedOf = Callable[[int, int], int]


class CustomGenerate:
    """Runs the function for many samples at once, in an event loop. A function that raises or takes
    too long loses its sample, with the reason in its metadata; one that returns something else than
    a sample ends the run. timeout_s: for each sample."""

    def __init__(self, path: str, args: SlimeArgs, *, timeout_s: float) -> None:
        self.path = path
        self.args = args
        self.timeout_s = timeout_s
        self.function = load_function(path, FLAG)
        self.is_slime = takes_args(self.function)

    def run(
        self,
        samples: Sequence[Sample],
        engine: GenerationClient,
        tokenizer: Any,
        sampling: SamplingParams,
        seed_of: SeedOf,
        *,
        evaluation: bool,
    ) -> list[Sample]:
        """The samples with their responses, in the same order. Not from within an event loop."""
        model = Model(engine, tokenizer, sampling, seed_of)

        async def every() -> list[Sample]:
            return list(
                await asyncio.gather(
                    *(self.make(s, model, engine, seed_of, evaluation=evaluation) for s in samples)
                )
            )

        return asyncio.run(every())

    async def make(
        self,
        sample: Sample,
        model: Model,
        engine: GenerationClient,
        seed_of: SeedOf,
        *,
        evaluation: bool,
    ) -> Sample:
        """One sample with its response."""
        try:
            return await asyncio.wait_for(
                self._one(sample, model, engine, seed_of, evaluation=evaluation), self.timeout_s
            )
        except TimeoutError:
            return lost(
                sample,
                f"{FLAG} {self.path} took longer than --custom-generate-timeout-s {self.timeout_s:g}",
            )
        except Exception as error:
            if isinstance(error, ValueError) and raised_by_us(error):
                raise
            return lost(sample, f"{FLAG} {self.path} raised {type(error).__name__}: {error}"[:500])

    async def _one(
        self,
        sample: Sample,
        model: Model,
        engine: GenerationClient,
        seed_of: SeedOf,
        *,
        evaluation: bool,
    ) -> Sample:
        if self.is_slime:
            return await call_slime_function(
                self.function, self.args, sample, model, engine, seed_of, evaluation=evaluation
            )
        episode = episode_of(sample, model.sampling, model.tokenizer, evaluation=evaluation)
        with contextlib.suppress(Aborted):
            await self.function(model, episode)
        return sample_of(episode, sample, model.tokenizer)


def takes_args(function: Callable[..., Any]) -> bool:
    """Whether the function has slime's convention."""
    names = list(inspect.signature(function).parameters)
    return names[0] == "args" if names else False


def raised_by_us(error: Exception) -> bool:
    """Whether this package raised it, as it does where the function asks for or returns something
    that cannot be; a ValueError of the function's own, or of a library that it calls, is a failure
    of one sample."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and Path(trace.tb_frame.f_code.co_filename).is_relative_to(PACKAGE)


def lost(sample: Sample, reason: str) -> Sample:
    return replace(
        sample, status=SampleStatus.ABORTED, metadata={**sample.metadata, "failure": reason}
    )
