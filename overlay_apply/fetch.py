"""Get a pinned release: one wheel, by its SHA-256, kept in build/."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Optional

from .bases import Release
from .errors import Refused
from .fs import read_file, sha256
from .project import Project


def fetch_tree(project: Project, release: Release) -> Path:
    """Return the folder with an unpacked release, fetching it if it is not there.

    Raises Refused if it cannot be had, is not the pinned one, or cannot be unpacked.
    """
    place = project.release_tree(release.version)
    if place.exists():
        return place
    wheel = fetch_wheel(project, release)
    try:
        with tempfile.TemporaryDirectory(dir=project.build, prefix=".unpack-") as passing:
            unpacked = Path(passing) / "tree"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
            os.rename(unpacked, place)
    except (OSError, zipfile.BadZipFile) as fault:
        raise Refused(
            f"cannot unpack the release: {fault}",
            file=str(place),
            remedy=f"see that {project.build} can be written and has room, then run again",
        ) from fault
    return place


def fetch_wheel(project: Project, release: Release) -> Path:
    """Return the path of a pinned wheel; one that is kept and still has its hash is not fetched again.

    Raises Refused if it cannot be had or is not the pinned one.
    """
    kept = project.build / release.file
    if _is_pinned(kept, release):
        return kept
    print(f"fetching {release.project} {release.version} ...", file=sys.stderr)
    try:
        project.build.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=project.build, prefix=".fetch-") as passing:
            wheel = _download(Path(passing), release)
            if not _is_pinned(wheel, release):
                raise _not_to_be_had(release, "the download is not the pinned file")
            os.replace(wheel, kept)
    except OSError as fault:
        raise _not_to_be_had(release, str(fault)) from fault
    return kept


def _is_pinned(path: Path, release: Release) -> bool:
    found = read_file(path)
    return found is not None and sha256(found[0]) == release.sha256


def _download(folder: Path, release: Release) -> Path:
    """Download a wheel with pip, from wherever pip is set up to look."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{release.project}=={release.version} --hash=sha256:{release.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--implementation", "cp"]
    command += ["--python-version", release.python, "--platform", release.platform]
    command += ["--require-hashes", "--dest", str(folder), "--requirement", str(requirement)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise _not_to_be_had(release, _last_error(result.stderr))
    return folder / release.file


def _last_error(output: str) -> str:
    """Return the line of pip's output that says what went wrong."""
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip failed"])[-1]


def _not_to_be_had(release: Release, why: str) -> Refused:
    return Refused(
        f"cannot fetch {release.project} {release.version}: {why}",
        file=release.file,
        expected=f"sha256 {release.sha256}",
        remedy="see that `python -m pip` works and reaches a package index, or give a TARGET of your own",
    )


def wheel_reader(wheel: Path):
    """Return a function that reads a file of a wheel by its path below the package, or returns None."""
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())

    def read(file: str) -> Optional[bytes]:
        name = f"sglang/{file}"
        return archive.read(name) if name in names else None

    return read


def kept_reader(project: Project, release: Release):
    """Return a reader of a release that was fetched before, or None; never fetches."""
    wheel = project.build / release.file
    return wheel_reader(wheel) if _is_pinned(wheel, release) else None


