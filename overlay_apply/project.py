"""Where this repository keeps its parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import OVERLAY_NAME


@dataclass(frozen=True)
class Project:
    """The folders of one overlay repository."""

    root: Path

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def overlay(self) -> Path:
        return self.root / OVERLAY_NAME

    @property
    def registered(self) -> Path:
        return self.root / "tests" / "registered"

    @property
    def build(self) -> Path:
        return self.root / "build"

    def release_tree(self, version: str) -> Path:
        """Return where a release is (or would be) unpacked."""
        return self.build / f"sglang-{version}"


def here() -> Project:
    """Return the project this engine belongs to."""
    return Project(Path(__file__).resolve().parent.parent)
