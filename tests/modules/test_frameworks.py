"""`ficco doctor --frameworks`: releases of frameworks, and the names that ficco needs of them."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from ficco.cli import findings
from ficco.core.private.frameworks import FRAMEWORKS, Framework, why_unusable


@pytest.mark.parametrize(
    ("release", "names", "said"),
    [
        ("2.1.0", ("toy.parts:Layer", "toy.parts:Layer.forward"), ""),
        ("2.1.0+local", (), ""),
        ("1.9", ("toy.parts:Layer",), "'1.9' is not known; 2.1 or newer is needed"),
        ("2.2", ("toy.parts:Layer", "toy.parts:Gone", "toy.none:Gone"), "has no toy.parts:Gone"),
        ("", (), "not installed"),
    ],
)
def test_what_is_wrong_is_named(
    release: str, names: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both by the doctor and by a plugin, which then leaves the framework unchanged."""
    package, parts = ModuleType("toy"), ModuleType("toy.parts")
    package.__path__ = []  # so it is a package
    package.__version__ = release  # type: ignore[attr-defined]
    parts.Layer = type("Layer", (), {"forward": None})  # type: ignore[attr-defined]
    if release:
        monkeypatch.setitem(sys.modules, "toy", package)
        monkeypatch.setitem(sys.modules, "toy.parts", parts)
        package.parts = parts  # type: ignore[attr-defined]
    toy = Framework("Toy", "toy", "toy", (2, 1), "2.1.0", "TOY=1", names)
    monkeypatch.setattr(findings, "FRAMEWORKS", (toy,))
    monkeypatch.setattr(findings, "installed", lambda distribution: release or None)
    imported = list[str]()
    (found,) = findings.framework_findings(imported.append)
    assert found.ok == (not said) and said in found.found, found
    assert bool(imported) == (bool(names) and release != "1.9")
    why = why_unusable(toy)
    assert said in why and bool(why) == bool(said), why


def test_an_import_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(framework: Framework) -> None:
        raise RuntimeError("libcuda.so.1 is missing")

    monkeypatch.setattr(findings, "FRAMEWORKS", FRAMEWORKS[1:2])
    monkeypatch.setattr(findings, "installed", lambda distribution: "0.3.0")
    monkeypatch.setattr(findings, "objects_of", failing)
    (found,) = findings.framework_findings(lambda text: None)
    assert not found.ok and "RuntimeError: libcuda.so.1 is missing" in found.found
