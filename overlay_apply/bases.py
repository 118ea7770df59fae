"""The releases there are patch sets for, and how to know which one a tree is."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Callable, Iterable, Mapping, Optional

from packaging.version import InvalidVersion, Version

from .errors import PatchFault, Unsupported, UsageFault
from .fs import read_file, sha256
from .needs import FeatureNeeds, parse_feature
from .patches import load_yaml
from .target import Target

Reader = Callable[[str], Optional[bytes]]
"""Returns a file's bytes by its path below the package, or None."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_DESCRIBED = re.compile(r"(?P<tag>.+)-(?P<distance>\d+)-g[0-9a-f]+")


@dataclass(frozen=True)
class Release:
    """A released wheel of one project on the package index, pinned."""

    version: str
    file: str
    sha256: str
    python: str
    platform: str
    project: str = "sglang"


@dataclass(frozen=True)
class Base:
    """A release that a folder of patches is for."""

    name: str
    version: str
    release: Release
    files: dict
    """SHA-256 (with LF line ends) of each file its patches edit, by path below the package."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """The versions that the release itself asks for of the packages that matter here."""


@dataclass(frozen=True)
class Manifest:
    """All bases, oldest first, the releases `check` compares with, and what each feature needs."""

    bases: tuple
    neighbours: tuple
    features: Mapping[str, FeatureNeeds] = field(default_factory=dict)

    def base(self, name: Optional[str]) -> Base:
        """Return a base by name, or the newest. Raises UsageFault naming the known ones."""
        if name is None:
            return self.bases[-1]
        for base in self.bases:
            if name in (base.name, base.version):
                return base
        known = [base.name for base in self.bases]
        raise UsageFault(
            f"no patch set is for {name}",
            expected=known,
            found=name,
            remedy=f"choose from: {', '.join(known)}",
        )


@dataclass(frozen=True)
class Evidence:
    """How a base was known, or what stood against it."""

    kind: str
    found: str

    def to_dict(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.kind}: {self.found}"


def load_manifest(folder: Path) -> Manifest:
    """Read patches/manifest.yml. Raises PatchFault naming what is wrong with it."""
    path = folder / "manifest.yml"
    data = load_yaml(path)
    try:
        bases = [_base(name, row) for name, row in data["bases"].items()]
        neighbours = [_release(name, row) for name, row in (data.get("neighbours") or {}).items()]
        features = {name: parse_feature(row) for name, row in (data.get("features") or {}).items()}
        bases.sort(key=lambda base: Version(base.version))
        if not bases:
            raise ValueError("no bases")
    except (KeyError, TypeError, AttributeError, ValueError) as fault:
        raise PatchFault(
            f"the manifest is malformed: {fault!r}",
            file=str(path),
            remedy="correct it (patches/README.md shows the form)",
        ) from None
    return Manifest(tuple(bases), tuple(neighbours), features)


def _base(name: str, row: dict) -> Base:
    version, files = str(row["version"]), row.get("files") or {}
    for file, digest in files.items():
        if not _SHA256.fullmatch(str(digest)):
            raise ValueError(f"{file}: not a SHA-256: {digest}")
    return Base(name, version, _release(version, row["release"]), files, row.get("pins") or {})


def _release(version: object, row: dict) -> Release:
    return Release(str(version), row["file"], row["sha256"], str(row["python"]), row["platform"])


def digest_lf(data: bytes) -> str:
    """Return the SHA-256 of a text as it is with LF line ends."""
    return sha256(data.replace(b"\r\n", b"\n"))


def detect(target: Target, manifest: Manifest, read: Reader) -> tuple:
    """Return (base, evidence) of a tree; `read` gives its files as they were before any patch.

    The first kind of evidence there is decides: contents, git tag, version file, metadata.
    Raises Unsupported (exit 3) naming what was found.
    """
    by_content = _by_content(target, manifest, read)
    if by_content:
        return by_content
    for find in (_git_tag, _version_file, _metadata):
        evidence = find(target)
        if evidence is not None:
            return _base_of(evidence, manifest), evidence
    raise _unsupported(Evidence("no evidence", "no known contents, tag, _version.py or metadata"), manifest)


def _by_content(target: Target, manifest: Manifest, read: Reader) -> Optional[tuple]:
    """Know a base by the files its patches edit: as they are, or as the checked-out commit has them."""
    base, kind = _known(manifest, read), "sha256"
    if base is None:
        # A user's edit that is not committed does not hide which release it was made on.
        names = {name for base in manifest.bases for name in base.files}
        base, kind = _known(manifest, read_head(target, sorted(names)).get), "sha256 at HEAD"
    return (base, Evidence(kind, f"{len(base.files)} files of {base.name}")) if base else None


def _known(manifest: Manifest, read: Reader) -> Optional[Base]:
    """Return the newest base all of whose pinned files have their pinned contents."""
    for base in reversed(manifest.bases):
        if base.files and all(_matches(read(file), digest) for file, digest in base.files.items()):
            return base
    return None


def _matches(data: Optional[bytes], digest: str) -> bool:
    return data is not None and digest_lf(data) == digest


def git(target: Target, *arguments: str, stdin: bytes = b"") -> Optional[bytes]:
    """Run a git command that only reads, on a checkout; return its output, or None if it fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment.update(GIT_OPTIONAL_LOCKS="0", GIT_NO_LAZY_FETCH="1", LC_ALL="C")
    try:
        result = subprocess.run(
            ["git", "-C", str(target.root), *arguments],
            input=stdin,
            capture_output=True,
            env=environment,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout


def is_git_checkout(target: Target) -> bool:
    """Tell whether git's own top level is this very tree, and not a repository around it."""
    if not target.is_checkout or not (target.root / ".git").exists():
        return False
    top = git(target, "rev-parse", "--show-toplevel")
    return top is not None and os.path.realpath(os.fsdecode(top.rstrip(b"\n"))) == str(target.root)


def read_head(target: Target, files: Iterable) -> dict:
    """Return the contents of package files in the checked-out commit, by path; missing ones are left out."""
    if not is_git_checkout(target):
        return {}
    names = list(files)
    asked = "".join(f"HEAD:{target.in_package(name)}\n" for name in names).encode()
    stream, contents = git(target, "cat-file", "--batch", stdin=asked) or b"", {}
    for name in names:
        header, _, stream = stream.partition(b"\n")
        fields = header.split()
        if len(fields) == 3 and fields[1] == b"blob":
            size = int(fields[2])
            contents[name], stream = stream[:size], stream[size + 1 :]
    return contents


def _git_tag(target: Target) -> Optional[Evidence]:
    """The nearest tag, with the number of commits since; none in a shallow clone without tags."""
    if not is_git_checkout(target):
        return None
    described = git(target, "describe", "--tags", "--long", "--match", "v[0-9]*")
    match = _DESCRIBED.fullmatch((described or b"").decode().strip())
    if match is None:
        return None
    tag, distance = match["tag"], int(match["distance"])
    return Evidence("git tag", tag if distance == 0 else f"{tag} and {distance} commits since")


def _version_file(target: Target) -> Optional[Evidence]:
    """What _version.py assigns, read without running it."""
    found = read_file(target.package / "_version.py")
    if found is None:
        return None
    try:
        assigned = dict(assignments(ast.parse(found[0])))
    except (SyntaxError, ValueError):
        return Evidence("_version.py", "(not readable)")
    return Evidence("_version.py", str(assigned.get("__version__", assigned.get("version", "(none)"))))


def assignments(tree: ast.Module) -> Iterable:
    """Yield (name, value) of the top-level assignments of constants."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant):
            yield from ((name.id, value.value) for name in targets if isinstance(name, ast.Name))


def _metadata(target: Target) -> Optional[Evidence]:
    """What the package's installed metadata beside it says."""
    versions = set()
    for path in target.package.parent.glob("sglang-*.dist-info/METADATA"):
        headers = path.read_text("utf-8", errors="replace").split("\n\n", 1)[0]
        versions.update(re.findall(r"^Version:[ \t]*(\S*)", headers, re.MULTILINE)[:1] or [""])
    if not versions:
        return None
    return Evidence("package metadata", " and ".join(sorted(versions)))


def _base_of(evidence: Evidence, manifest: Manifest) -> Base:
    """Return the base that a version is. Raises Unsupported if it is none.

    A local part (+cu130) is a build of the release; rc, post and dev versions are other releases.
    """
    try:
        public = Version(evidence.found).public
    except InvalidVersion:
        raise _unsupported(evidence, manifest) from None
    for base in manifest.bases:
        if Version(base.version) == Version(public):
            return base
    raise _unsupported(evidence, manifest)


def _unsupported(evidence: Evidence, manifest: Manifest) -> Unsupported:
    known = [base.name for base in manifest.bases]
    shown = evidence.found or "an empty version"
    return Unsupported(
        f"no patch set is for this SGLang: found {shown} (by {evidence.kind})",
        expected=known,
        found=evidence.to_dict(),
        remedy=f"use one of {', '.join(known)}, or see which fits best by `apply.py check TARGET`, and try it with --try-base {' or '.join(known)}",
    )
