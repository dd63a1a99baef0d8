"""Calibrations in files: what is read back, and what is refused with the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.calibration import CalibrationError, decoded, described, encoded, read, schema, usual_path
from tests.plan.calibrations import calibration


def changed(**changes: Any) -> bytes:
    """A calibration with other values; dots in names lead into it."""
    body = json.loads(encoded(calibration()))
    for name, value in changes.items():
        *places, last = name.split("__")
        inner = body
        for place in places:
            inner = inner[place]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
    return json.dumps(body).encode()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_bytes(encoded(calibration()))
    assert read(path) == calibration()


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"{", "is not JSON; make one with `headrace bench calibrate MODEL`"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "is not a calibration"),
        (b'{"knots": []}', "is not a calibration"),
        (changed(version=9), "version 9, of a newer headrace"),
        (
            changed(version=1),
            "version 1, of an older headrace, and this one reads version 2: measure again with `headrace",
        ),
        (changed(model=None), "missing required field `model`"),
        (changed(more=3), "unknown field `more`"),
        (changed(layout__workers="two"), "Expected `int`, got `str` - at `$.layout.workers`"),
        (changed(layout__workers=0), "layout.workers is 0"),
        (changed(steps__decode__knots=[2, 1]), "ascending"),
        (changed(steps__decode__base=[-1.0, 2.0]), "steps.decode.base[0] is -1.0"),
        (changed(model__kv_token_bytes=float("inf")), "is not"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(raw: bytes, problem: str) -> None:
    with pytest.raises(CalibrationError) as raised:
        decoded(raw, "host.json")
    assert problem in str(raised.value)
    assert str(raised.value).startswith("host.json ")
    assert "calibrate" in str(raised.value)


def test_a_missing_file_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="does not exist; make one with"):
        read(tmp_path / "none.json")
    with pytest.raises(CalibrationError, match="cannot be read"):
        read(tmp_path)


def test_the_schema_names_every_field() -> None:
    found = json.loads(schema())
    assert set(found["$defs"]["Calibration"]["properties"]) == set(json.loads(encoded(calibration())))


def test_the_usual_path_is_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    assert usual_path("owner/name") == tmp_path / "calibrations" / "owner--name.json"


def test_it_is_described_for_people() -> None:
    told = described(calibration())
    assert "decode    10.8 ms a token at batch 1" in told
    assert "tokens/s in a prompt of 512" in told
