"""The rollout engine of a run, and the policy's weights to it: again where a server failed in the
middle, and checked where servers got them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arguments.run_config import RunConfig
from slime_like.errors import RunError
from slime_like.megatron.backend import MegatronBackend
from slime_like.metrics.progress import Progress
from slime_like.rollout.engines.base import RolloutEngine
from slime_like.rollout.engines.engine_registry import EngineContext, rollout_engines

if TYPE_CHECKING:
    from slime_like.trainer.weight_check import WeightCheck

ATTEMPTS = 4  # each one less costs a server


class WeightSync:
    """A collective over all ranks."""

    def __init__(
        self,
        backend: MegatronBackend,
        engine: RolloutEngine,
        progress: Progress,
        *,
        check: WeightCheck | None = None,
        check_always: bool = False,
    ) -> None:
        """check: of what the engine has after its first update, or with check_always after each."""
        self._backend = backend
        self._engine = engine
        self._progress = progress
        self._check = check
        self._check_always = check_always
        self._checked_once = False
        self.metrics: dict[str, float] = {}  # of the latest check

    def sync(self, version: int) -> None:
        """Unless the engine has them. Raises RunError when it cannot get them, or has others after
        it."""
        self._engine.check_health()
        if self._engine.weight_version == version:
            return
        with self._progress.phase("sync"):
            for attempt in range(ATTEMPTS):
                if attempt:
                    # waits for a server that is started again, where none is left
                    self._engine.check_health()
                self._backend.sync_weights(self._engine, version)
                if self._engine.weight_version == version:
                    break
            else:
                raise RunError(
                    f"the weights of version {version} did not reach the engines in {ATTEMPTS} attempts"
                )
            if self._check is not None and (self._check_always or not self._checked_once):
                self.metrics |= self._check.run(version)
                self._checked_once = True


def make_engine(
    run: RunConfig,
    device: torch.device,
    tokenizer: Any,
    output_dir: Path,
) -> RolloutEngine:
    """The engine of --rollout-engine; a collective."""
    make = rollout_engines.get(run.rollout.rollout_engine)
    return make(EngineContext(run, tokenizer, device, output_dir))
