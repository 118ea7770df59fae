"""The failures a user can meet. Each carries its exit code, where it happened and what to do."""

from __future__ import annotations

from typing import Any, Optional


class OverlayError(Exception):
    """A failure with an exit code and the facts a user needs to act on it."""

    exit_code = 1
    kind = "error"

    def __init__(
        self,
        message: str,
        *,
        patch: Optional[str] = None,
        file: Optional[str] = None,
        expected: Any = None,
        found: Any = None,
        remedy: Optional[str] = None,
        details: Optional[list] = None,
    ):
        super().__init__(message)
        self.message = message
        self.patch = patch
        self.file = file
        self.expected = expected
        self.found = found
        self.remedy = remedy
        self.details = details or []

    def as_dict(self) -> dict:
        """Return the facts that are known, in the form `--json` prints."""
        facts = {
            "kind": self.kind,
            "message": self.message,
            "patch": self.patch,
            "file": self.file,
            "expected": self.expected,
            "found": self.found,
            "remedy": self.remedy,
            "details": self.details,
        }
        return {name: value for name, value in facts.items() if value not in (None, [])}


class UsageFault(OverlayError):
    """The command line asks for something that does not exist."""

    exit_code = 2
    kind = "usage"


class Unsupported(OverlayError):
    """Not an SGLang tree, or a version no patch set is for."""

    exit_code = 3
    kind = "unsupported"


class Drift(OverlayError):
    """An edit matched another number of places than it states."""

    exit_code = 4
    kind = "drift"


class PatchFault(OverlayError):
    """The patch data itself is wrong (not the target)."""

    exit_code = 4
    kind = "patch-data"


class Interfered(OverlayError):
    """The tree is partly applied, or was changed since."""

    exit_code = 5
    kind = "changed-since"


class Refused(OverlayError):
    """The file system (or the download) said no."""

    exit_code = 6
    kind = "refused"
