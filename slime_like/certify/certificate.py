"""The certificate: the result of a comparison as JSON with a signature."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slime_like.certify.compare import Finding

FOLDER = "certificates"  # in the output folder, where the report looks, and in --save
KEY_VARIABLE = "SLIME_LIKE_CERTIFY_KEY"  # if set, certificates have an HMAC with it, too
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was compared and found."""

    rollout: int  # finished rollouts
    weight_version: int
    versions: Mapping[str, str]  # of packages
    model: str
    layout: str
    dtype: str
    engine: str
    reference: str  # where the reference's weights are from
    tokens: int
    # site: {"trainer": [largest difference, limit], "engine": ...}, in the order of computation
    sites: Mapping[str, Mapping[str, Sequence[float]]]
    # by engine: largest difference in nats, limit, and means by depth and by position
    log_probs: Mapping[str, Mapping[str, Any]]
    skipped: Mapping[str, str]  # sites that are not compared, with the reason
    findings: Sequence[Finding]
    weights: Mapping[str, str]  # SHA-256 of the trainer's weights, by name

    @property
    def holds(self) -> bool:
        return not self.findings

    @property
    def metrics(self) -> dict[str, float]:
        """For the metrics of a run."""
        shares: dict[str, float] = {}
        for gaps in self.sites.values():
            for name, (largest, limit) in gaps.items():
                who = "trainer" if name == "trainer" else "engine"  # or the address of a server
                key = f"certificate/{who}_difference"
                share = largest / limit
                # max() of NaN and a number is either, and a NaN is the largest difference of all
                shares[key] = max(shares.get(key, 0.0), math.inf if math.isnan(share) else share)
        return {"certificate/findings": float(len(self.findings)), **shares}

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        for finding, row in zip(self.findings, data["findings"], strict=True):
            row["text"] = finding.text
        return {"format": FORMAT, "holds": self.holds, **data}


def canonical(data: Mapping[str, Any]) -> bytes:
    """The bytes that are signed: all but the signature, with sorted keys."""
    content = {key: value for key, value in data.items() if key != "signature"}
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def signature(data: Mapping[str, Any], key: str | None) -> dict[str, str]:
    content = canonical(data)
    signed = {"sha256": hashlib.sha256(content).hexdigest()}
    if key:
        signed["hmac_sha256"] = hmac.new(key.encode(), content, hashlib.sha256).hexdigest()
    return signed


def finite(value: Any) -> Any:
    """Plain JSON, with "inf", "-inf" and "nan" for the numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value


def write(certificate: Certificate, folders: Sequence[Path]) -> Path:
    """Write it into each folder's `certificates`; returns the first file."""
    data = finite(certificate.to_json())
    data["signature"] = signature(data, os.environ.get(KEY_VARIABLE))
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    paths = [folder / FOLDER / f"rollout_{certificate.rollout}.json" for folder in folders]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    return paths[0]


def verify(path: Path, key: str | None = None) -> dict[str, Any]:
    """Read a certificate. Raises ValueError if its content is not what was signed, with a key also
    if it was not signed with it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        signed = dict(data["signature"])
        expected = signature(data, key)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is no certificate ({error})") from error
    for name, value in expected.items():
        if not hmac.compare_digest(str(signed.get(name, "")).encode(), value.encode()):
            raise ValueError(f"{path}: its {name} does not fit its content: it was changed")
    return dict(data)
