"""What the user points at: a git checkout, an installed package folder, or the folder above it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from . import OVERLAY_NAME, STATE_NAME
from .errors import Refused, Unsupported
from .fs import WRITE_BITS

CHECKOUT_PREFIX = "python/sglang"
REGISTERED = "test/registered"


@dataclass(frozen=True)
class Target:
    """An SGLang tree. Paths in plans, receipts and diffs are relative to `root`."""

    root: Path
    prefix: str
    """The package folder below `root`: python/sglang in a checkout, sglang elsewhere."""

    @property
    def is_checkout(self) -> bool:
        return self.prefix == CHECKOUT_PREFIX

    @property
    def package(self) -> Path:
        return self.root / self.prefix

    @property
    def state(self) -> Path:
        return self.package / STATE_NAME

    @property
    def overlay(self) -> Path:
        return self.package / OVERLAY_NAME

    def in_package(self, path: str) -> str:
        """Turn a path below the package into one below the root."""
        return f"{self.prefix}/{path}"

    def real(self, path: str) -> str:
        """Follow symlinks inside the tree and return the path of the file they lead to.

        Raises Refused if they lead out of the tree (for an installed package: out of it).
        """
        fence = self.root if self.is_checkout else self.package
        resolved = Path(os.path.realpath(self.root / path))
        if not resolved.is_relative_to(fence):
            raise Refused(
                f"a symbolic link leads out of the tree, to {resolved}; nothing was written",
                file=path,
                expected=f"a file below {fence}",
                found=str(resolved),
                remedy="replace the link by a copy of the file, or install the package with copied files",
            )
        return resolved.relative_to(self.root).as_posix()

    def check_writable(self, path: str) -> None:
        """Raise Refused if a file may not be replaced: no write bit on it, or none on its folder.

        The bits are looked at themselves, since the superuser is never refused.
        """
        file = self.root / path
        folder = file.parent
        while not folder.exists():
            folder = folder.parent
        for place in [file, folder] if file.exists() else [folder]:
            if not place.stat().st_mode & WRITE_BITS or not os.access(place, os.W_OK):
                what = "folder" if place == folder else "file"
                raise Refused(
                    f"the {what} is read-only; nothing was written",
                    file=place.relative_to(self.root).as_posix(),
                    expected=f"a writable {what}",
                    found=f"mode {place.stat().st_mode & 0o7777:04o}",
                    remedy=f"chmod u+w '{place}' and run again",
                )


def _is_package(path: Path) -> bool:
    return path.name == "sglang" and (path / "__init__.py").is_file()


def _is_checkout(path: Path) -> bool:
    return _is_package(path / CHECKOUT_PREFIX)


def locate(path: Path) -> Target:
    """Find the SGLang tree at a path.

    Raises Unsupported (exit 3) if there is none.
    """
    place = Path(os.path.realpath(path))
    if _is_checkout(place):
        return Target(place, CHECKOUT_PREFIX)
    package = place if _is_package(place) else place / "sglang"
    if not _is_package(package):
        _refuse_leftovers(place / CHECKOUT_PREFIX, package, place)
        raise Unsupported(
            f"not an SGLang tree: {path}",
            expected="a checkout holding python/sglang, a sglang package folder, or the folder above it",
            found="nothing at that path" if not place.exists() else "no sglang/__init__.py",
            remedy="give the checkout's folder, or the folder that `pip show -f sglang` calls Location",
        )
    package = Path(os.path.realpath(package))
    checkout = package.parent.parent
    if _is_checkout(checkout) and _looks_like_repository(checkout):
        return Target(checkout, CHECKOUT_PREFIX)
    return Target(package.parent, package.name)


def _refuse_leftovers(*folders: Path) -> None:
    """Raise Unsupported for a package folder whose SGLang was uninstalled with the overlay in it."""
    for folder in folders:
        names = {path.name for path in folder.iterdir()} if folder.name == "sglang" and folder.is_dir() else set()
        only_ours = names <= {OVERLAY_NAME, STATE_NAME, "__pycache__"}
        if STATE_NAME in names or (OVERLAY_NAME in names and only_ours):
            ours = [folder] if only_ours else [folder / name for name in (OVERLAY_NAME, STATE_NAME) if name in names]
            raise Unsupported(
                "the SGLang that the overlay was put into is gone (uninstalled?), and these are leftovers of the overlay",
                file=str(folder),
                expected="sglang/__init__.py and the rest of SGLang",
                found=sorted(names),
                remedy=f"delete {' and '.join(map(str, ours))}; or reinstall the same version of sglang, and revert",
            )


def _looks_like_repository(path: Path) -> bool:
    """Tell python/sglang in a checkout from an install folder that happens to be called `python`."""
    return (path / ".git").exists() or (path / "python" / "pyproject.toml").exists()
