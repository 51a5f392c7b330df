"""Sync the policy's weights to the rollout engine, once per weight version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_like.engines.base import RolloutEngine
from slime_like.errors import RunError
from slime_like.megatron.backend import MegatronBackend
from slime_like.metrics.progress import Progress

if TYPE_CHECKING:
    from slime_like.weight_sync.check import WeightCheck


ATTEMPTS = 4  # each failed attempt loses a server


class WeightSync:
    """Syncs policy weights to the rollout engine. Collective over all ranks."""

    def __init__(
        self,
        backend: MegatronBackend,
        engine: RolloutEngine,
        progress: Progress,
        *,
        check: WeightCheck | None = None,
        check_always: bool = False,
    ) -> None:
        """check: verifies the engine's weights after the first update, or after each with
        check_always."""
        self._backend = backend
        self._engine = engine
        self._progress = progress
        self._check = check
        self._check_always = check_always
        self._checked_once = False
        self._metrics: dict[str, float] = {}

    def sync(self, version: int) -> None:
        """Sync weights of this version, unless the engine has them. Raises RunError if it fails or
        if the check finds other weights."""
        self._engine.check_health()
        if self._engine.weight_version == version:
            return
        with self._progress.phase("sync"):
            for attempt in range(ATTEMPTS):
                if attempt:
                    # if no server is left, waits for one to restart
                    self._engine.check_health()
                self._metrics |= self._backend.sync_weights(self._engine, version)
                if self._engine.weight_version == version:
                    break
            else:
                raise RunError(
                    f"the weights of version {version} did not reach the engines in {ATTEMPTS} "
                    "attempts"
                )
            if self._check is not None and (self._check_always or not self._checked_once):
                checked = self._check.run(version)
                self._metrics |= checked
                self._checked_once = bool(checked)  # empty: no server answered

    def take_metrics(self) -> dict[str, float]:
        """Of updates and checks since the last call."""
        metrics = self._metrics
        self._metrics = {}
        return metrics
