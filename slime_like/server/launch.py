"""From a checked command line to workers that serve: patches, process groups, the loop."""

from __future__ import annotations

import signal
import sys
from typing import Any

import megatron_patches
from arguments.run_config import RunConfig
from slime_like.errors import RunError
from slime_like.launcher import FAILED, INTERRUPTED, die_with_the_launcher, is_first_to_fail, quiet_dependencies, tell
from slime_like.lost_ranks import explain, leave_address, say_failed


def run(config: RunConfig, rank: int) -> int:
    """Returns the exit status."""
    die_with_the_launcher()
    quiet_dependencies()
    report = megatron_patches.apply()
    if rank == 0:
        for text in config.warnings:
            print(f"warning: {text}", flush=True)
        if config.debug.print_megatron_patches:
            print(report, flush=True)
    # megatron-core reads its globals on import, so this comes after the patches
    from slime_like.megatron_backend.init import process_groups
    from slime_like.server.worker import Terminated, serve

    def stop(*_: Any) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        with process_groups(config.parallel, virtual_stages=config.virtual_stages, seed=config.model.seed) as layout:
            leave_address(layout.rank)
            try:
                serve(config, layout, lambda text: print(text, flush=True) if rank == 0 else None)
            except KeyboardInterrupt:
                return INTERRUPTED
            except Exception as error:
                say_failed(layout.rank)
                if is_first_to_fail():
                    tell(explain(error, layout.world_size))
                return FAILED
    except RunError as error:  # the ranks could not meet: each tells what it saw
        print(f"error: {error}", file=sys.stderr, flush=True)
        return FAILED
    return 0
