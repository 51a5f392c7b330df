"""Names of metrics that several packages read or write."""

from __future__ import annotations

TRUNCATED_FRACTION = "rollout/truncated_frac"


# fraction of trained tokens with an unknown weight version
UNKNOWN_VERSIONS = "rollout/unknown_version_frac"
