"""The certificate's file: content, signatures and what is told of a changed one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from slime_like.certify.certificate import KEY_VARIABLE, Certificate, verify, write
from slime_like.certify.compare import Finding

FINDING = Finding(
    "engine", "layers.3.attention", 3, "attention", 1, None, "rope base", "the base is 5", 0.1, 1e-6
)


def certificate(*findings: Finding) -> Certificate:
    return Certificate(
        2, 3, {"torch": "2"}, "model", "TP1", "float32", "local", "the trainer's weights", 256,
        {"layers.0": {"trainer": [1e-7, 1e-6]}}, {"engine": {"largest": float("inf")}}, {}, findings, {"a": "12"},
    )  # fmt: skip


def test_it_lies_in_every_folder_and_is_valid(tmp_path: Path) -> None:
    path = write(certificate(FINDING), [tmp_path / "out", tmp_path / "save"])
    assert path == tmp_path / "out/certificates/rollout_2.json"
    other = tmp_path / "save/certificates/rollout_2.json"
    assert path.read_text() == other.read_text()
    data = verify(path)
    assert data["holds"] is False
    assert data["findings"][0]["text"] == (
        "engine: layers.3.attention, from position 1: rope base: the base is 5 (difference 0.1, "
        "rounding 1e-06)"
    )
    assert verify(write(certificate(), [tmp_path]))["holds"] is True


@pytest.mark.parametrize("change", ["holds", "findings", "weights"])
def test_a_changed_certificate_is_refused(change: str, tmp_path: Path) -> None:
    path = write(certificate(FINDING), [tmp_path])
    data = json.loads(path.read_text())
    data[change] = {"holds": True, "findings": [], "weights": {"a": "13"}}[change]
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="sha256 does not fit its content: it was changed"):
        verify(path)


def test_a_foreign_signature_is_told_as_such(tmp_path: Path) -> None:
    path = write(certificate(), [tmp_path])
    data = json.loads(path.read_text())
    data["signature"]["sha256"] = "ü"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="it was changed"):
        verify(path)


def test_a_difference_that_is_no_number_is_the_largest() -> None:
    sites = {
        "embedding": {"trainer": [1e-7, 1e-6]},
        "layers.0": {"trainer": [float("nan"), 1e-6]},
        "layers.1": {"trainer": [1e-7, 1e-6]},
    }
    assert replace(certificate(), sites=sites).metrics["certificate/trainer_difference"] == math.inf


def test_numbers_that_are_none_are_texts_and_paths_stay(tmp_path: Path) -> None:
    odd = replace(
        certificate(replace(FINDING, gap=float("nan"))),
        model="/models/Infinity-3B",
        log_probs={"engine": {"largest": float("inf"), "by_depth": ((3, float("-inf")),)}},
    )
    path = write(odd, [tmp_path])
    data = verify(path)
    assert data["model"] == "/models/Infinity-3B"
    assert data["log_probs"] == {"engine": {"largest": "inf", "by_depth": [[3, "-inf"]]}}
    assert data["findings"][0]["gap"] == "nan"

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)


def test_with_a_key_it_has_a_signature_that_others_cannot_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write(certificate(), [tmp_path / "plain"])
    with pytest.raises(ValueError, match="hmac_sha256 does not fit"):
        verify(plain, "secret")
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    signed = write(certificate(), [tmp_path / "signed"])
    assert verify(signed, "secret")["holds"] and verify(signed)["holds"]
    with pytest.raises(ValueError, match="hmac_sha256 does not fit"):
        verify(signed, "other")


def test_something_else_is_no_certificate(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="is no certificate"):
        verify(path)
