"""The commands. Each returns a dict, which `--json` prints and report.py shows to people."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

from . import __version__, diff
from .bases import Base, Evidence, Manifest, load_manifest
from .bytecode import hiding
from .environment import Environment, environment_of
from .errors import Interfered, Unsupported, UsageFault
from .flags import load_table, misspelt_notes, read_flags
from .fs import FileState, Fs, read_file, sha256
from .merge import taken_out
from .patches import choose, features_of, load_patches
from .plan import Plan, foreign, make_plan, new_dirs
from .project import Project
from .situation import (
    APPLIED,
    CALL,
    CLEAN,
    MODIFIED,
    NO_RECEIPT,
    PARTLY,
    UNSUPPORTED,
    Situation,
    base_by_name,
    current,
    edited_fault,
    look,
    way_on,
)
from .standing import Standings, packages
from .state import BYTECODE, PATCHED, Change, FileChange, Receipt, Store, locked
from .target import Target, locate
from .transaction import commit, edited_since, is_left, recover

NOTHING = "nothing to do"


@dataclass(frozen=True)
class Request:
    """What a command is asked to work on."""

    project: Project
    fs: Fs
    path: Optional[Path] = None
    base: Optional[str] = None
    try_base: Optional[str] = None
    features: tuple = ()


def apply(request: Request, dry_run: bool = False) -> dict:
    """Put the overlay on a tree: all of it or nothing.

    Raises an OverlayError of exit code 2 to 6; see the error classes.
    """
    manifest = load_manifest(request.project.patches)
    target = _target(request, manifest, fetching=True)
    if not dry_run:
        _clean_up(request, target)
    situation = look(target, request.project, manifest)
    situation.insist_on_whole()
    plan, receipt = _planned(request, manifest, situation)
    change, contents = _step(situation, plan, receipt)
    notes = _notes_on_lost(request, situation, base_by_name(manifest, receipt.base))
    if _is_nothing(change):
        outcome = NOTHING
    elif dry_run:
        _check_writable(target, change)
        outcome = "would apply"
    else:
        _commit(request, target, change, contents)
        outcome = "applied"
    return {
        **_head("apply", target),
        "outcome": outcome,
        "base": receipt.base,
        "evidence": receipt.evidence,
        "features": _features(receipt.features, plan.patches),
        "patches": plan.patches,
        "edits": [edit.to_dict() for edit in plan.edits],
        "files": [{"file": file.path, "kind": file.kind} for file in change.files],
        "tried": request.try_base is not None,
        "notes": notes,
    }


def status(request: Request, python: Optional[Path] = None) -> dict:
    """Say what is at a tree, and what of each feature's needs its environment (or that of `python`) has.

    Raises Unsupported if it is no SGLang tree, Interfered if its receipt is damaged, UsageFault if `python` cannot be run.
    """
    manifest = load_manifest(request.project.patches)
    target = _target(request, manifest, fetching=False)
    situation = look(target, request.project, manifest)
    state = situation.state
    facts = _head("status", target)
    try:
        facts.update(_known_base(situation, manifest, request))
    except Unsupported as fault:
        state = UNSUPPORTED if state == CLEAN else state
        facts.update(base=None, evidence=fault.found, features={"in": [], "out": []}, error=fault.as_dict())
    exit_code = {CLEAN: 0, APPLIED: 0, NO_RECEIPT: 0, UNSUPPORTED: 3}.get(state, 5)
    table = load_table(request.project.overlay)
    flags = read_flags(table)
    base = base_by_name(manifest, facts["base"]) if facts["base"] else None
    environment = environment_of(target, python)
    return {
        **facts,
        **_machine(manifest, base, environment),
        "standings": Standings(situation, request.project, manifest, base, environment, flags).rows() if base else [],
        "ok": exit_code == 0,
        "exit_code": exit_code,
        "state": state,
        "changed": situation.changed(),
        "flags": flags,
        "notes": [*_notes(situation, state), *misspelt_notes(table, _names_of_sglang(situation))],
    }


def _names_of_sglang(situation: Situation) -> str:
    """Return the text in which a tree's SGLang names its own environment variables."""
    return (situation.read_original("srt/environ.py") or b"").decode("utf-8", "replace")


def revert(request: Request, keep_edited: bool = False) -> dict:
    """Take the overlay out, byte for byte.

    Raises Interfered if a patched file was edited, or SGLang replaced, since (unless `keep_edited`),
    Refused if the file system says no.
    """
    manifest = load_manifest(request.project.patches)
    target = _target(request, manifest, fetching=False)
    if not target.state.exists() and look(target, request.project, manifest).state == CLEAN:
        return {**_head("revert", target), "outcome": NOTHING, "files": [], "left": []}
    with locked(target, request.fs) as store:
        left = _edited_in_journal(store) if keep_edited else []
        recovered = recover(store, frozenset(left))
        situation = look(target, request.project, manifest, store)
        # What an edit that is kept still calls is no surprise.
        if situation.state == PARTLY and not (left and set(situation.callers) <= set(left)):
            situation.insist_on_whole()
        edited = situation.edited()
        if edited and not keep_edited:
            raise situation.fault_since()
        replaced_by = situation.replaced_by()
        merged = {} if replaced_by else _without_ours(situation, edited)
        edited = [path for path in edited if path not in merged]
        files = []
        if situation.receipt:
            change, contents = _way_back(situation, set(edited), merged)
            _check_writable(target, change)
            commit(store, change, contents)
            files = change.files
        store.tidy()
    return {
        **_head("revert", target),
        "outcome": "reverted" if files or recovered else NOTHING,
        "files": [{"file": file.path, "kind": file.kind} for file in files],
        **_not_put_back(situation, {*left, *edited}, replaced_by),
        "merged": sorted(merged),
        "left_dirs": _left_dirs(situation),
    }


def unified_diff(request: Request) -> bytes:
    """Return what apply would do to a tree, or did, as a diff that `git apply` takes."""
    manifest = load_manifest(request.project.patches)
    target = _target(request, manifest, fetching=True)
    situation = look(target, request.project, manifest)
    situation.insist_on_whole()
    if situation.receipt and not request.features:
        contents = dict(situation.contents)
        for file in situation.receipt.files:
            current(target, file.path, contents)
            if file.before:
                contents[file.before.sha256] = situation.bytes_of(file.before.sha256)
        changed = situation.changed()
        if changed:
            raise edited_fault([entry["file"] for entry in changed])
        return diff.render(situation.receipt.files, contents)
    plan, _ = _planned(request, manifest, situation)
    return diff.render(plan.files, plan.contents)


def _target(request: Request, manifest: Manifest, fetching: bool) -> Target:
    """Return the tree that is asked for, or the pinned release in build/."""
    if request.path is not None:
        if request.base is not None:
            raise UsageFault(
                "--base chooses the release to fetch, and there is a TARGET",
                remedy="leave out one of them; --try-base makes a TARGET count as a base",
            )
        return locate(request.path)
    release = manifest.base(request.base).release
    if fetching:
        from .fetch import fetch_tree  # status must start fast, and needs none of it

        return locate(fetch_tree(request.project, release))
    place = request.project.release_tree(release.version)
    if not place.exists():
        raise Unsupported(
            "no TARGET given, and no release was fetched yet",
            file=str(place),
            remedy="give a TARGET, or run `apply.py apply` to fetch the pinned release",
        )
    return locate(place)


def _clean_up(request: Request, target: Target) -> None:
    """Undo a command that was cut short, before anything else."""
    if Store(target).exists():
        with locked(target, request.fs) as store:
            recover(store)
            store.tidy()


def _planned(request: Request, manifest: Manifest, situation: Situation) -> tuple:
    """Return (plan, receipt) of putting the asked-for features on the original files."""
    base, evidence = situation.base(manifest, request.try_base)
    patches = load_patches(request.project.patches, base.name)
    features = choose(patches, list(request.features), base.name)
    plan = make_plan(situation.target, request.project, patches, features, situation.original)
    fault = foreign(plan)
    if fault:
        raise fault
    return plan, _new_receipt(situation, plan, base, evidence, features)


def _new_receipt(
    situation: Situation, plan: Plan, base: Base, evidence: Evidence, features: list
) -> Receipt:
    old = situation.receipt
    files = list(plan.files)
    if old is not None:
        # Compiled files that an earlier apply took away are no longer there to be planned for.
        planned = {file.path for file in files}
        files += [f for f in old.files if f.kind == BYTECODE and f.path not in planned]
    return Receipt(
        tool=__version__,
        prefix=situation.target.prefix,
        base=base.name,
        evidence=evidence.to_dict(),
        features=features,
        patches=plan.patches,
        files=files,
        dirs=new_dirs(situation.target, plan.files, old.dirs if old else []),
    )


def _step(situation: Situation, plan: Plan, receipt: Receipt) -> tuple:
    """Return (change, contents) from what is there now to the plan."""
    target, contents = situation.target, dict(plan.contents)
    old = situation.receipt
    wanted = {file.path: file for file in receipt.files}
    dropped = [file.inverse() for file in (old.files if old else []) if file.path not in wanted]
    files = []
    for file in [*receipt.files, *dropped]:
        now = current(target, file.path, contents)
        if (now and now.sha256) != (file.after and file.after.sha256):
            files.append(FileChange(file.path, file.kind, now, file.after))
        for state in (file.before, file.after):
            if state and state.sha256 not in contents:
                contents[state.sha256] = situation.bytes_of(state.sha256)
    after = receipt if receipt.files else None
    before = situation.receipt_on_disk()
    if before and after and replace(after, evidence=before.evidence, tool=before.tool) == before:
        after = before
    change = Change(
        files=files,
        mkdirs=[path for path in receipt.dirs if not (target.root / path).exists()],
        rmdirs=[path for path in reversed(old.dirs if old else []) if path not in receipt.dirs],
        receipt_before=before,
        receipt_after=after,
    )
    return change, contents


def _notes_on_lost(request: Request, situation: Situation, base: Base) -> list:
    """Say which names the overlay imports that a tree taken for a base has not, where that base's release was fetched before."""
    if request.try_base is None:
        return []
    from .borrowed import lost_of  # only a tried base needs it

    lost = lost_of(request.project, base, situation.read_original)
    notes = [f"the overlay imports {row['name']} (in {', '.join(row['by'])}), which {base.name} has and this SGLang has not" for row in lost or ()]
    return [*notes, "what needs these names fails when it is imported or run; `revert` takes the overlay out"] if notes else []


def _is_nothing(change: Change) -> bool:
    return not change.files and change.receipt_before == change.receipt_after


def _way_back(situation: Situation, leave: set, merged: dict) -> tuple:
    """Return (change, contents) from what is there now to the original files, or to those `merged`.

    Those in `leave` stay, and nothing that was compiled since hides any of them.
    """
    contents = {sha256(data): data for data in merged.values()}
    files, texts = [], dict.fromkeys(leave)
    for file in reversed(situation.receipt.files):
        if is_left(file, leave) or (file.kind == BYTECODE and is_left(file, merged)):
            continue
        back = file.before
        if file.path in merged:
            back = FileState(sha256(merged[file.path]), file.before.mode)
        elif back:
            contents[back.sha256] = situation.bytes_of(back.sha256)
        now = current(situation.target, file.path, contents)
        if (now and now.sha256) != (back and back.sha256):
            files.append(FileChange(file.path, file.kind, now, back))
        if file.kind == PATCHED:
            texts[file.path] = contents[back.sha256]
    settled = {file.path for file in files}
    for path in (path for source in sorted(texts) for path in hiding(situation.target.root, source, texts[source])):
        if path not in settled:
            files.append(FileChange(path, BYTECODE, current(situation.target, path, contents), None))
    dirs = situation.receipt.dirs[::-1]
    return Change(files, [], dirs, situation.receipt_on_disk(), None), contents


def _without_ours(situation: Situation, edited: list) -> dict:
    """Return the edited files, by path, out of which the overlay's changes can be taken: with the edits, and without those."""
    patched = [file for file in (situation.receipt.files if situation.receipt else ()) if file.kind == PATCHED and file.path in edited]
    results = {file.path: _merged(situation, file) for file in patched}
    return {path: data for path, data in results.items() if data is not None}


def _merged(situation: Situation, file: FileChange) -> Optional[bytes]:
    """Return an edited file without the overlay's changes; None if it is gone, or they cannot be told from the edits."""
    now = read_file(situation.target.root / file.path)
    if now is None:
        return None
    try:
        ours, original = (situation.bytes_of(state.sha256) for state in (file.after, file.before))
    except Interfered:  # an older version did not keep what it wrote
        return None
    result = taken_out(ours, original, now[0])
    return None if result is None or CALL in result else result


def _edited_in_journal(store: Store) -> list:
    journal = store.journal()
    return edited_since(store, journal.files) if journal else []


def _commit(request: Request, target: Target, change: Change, contents: dict) -> None:
    _check_writable(target, change)
    with locked(target, request.fs) as store:
        commit(store, change, contents)


def _check_writable(target: Target, change: Change) -> None:
    for file in change.files:
        target.check_writable(file.path)


def _not_put_back(situation: Situation, paths: set, replaced_by: Optional[str]) -> dict:
    """Tell the files that a revert left: with somebody's edits, removed by somebody, or another SGLang's."""
    if replaced_by:
        paths = paths - {file.path for file in situation.receipt.files if file.kind == PATCHED}
    gone = sorted(path for path in paths if not (situation.target.root / path).exists())
    notes = [f"not put back, since it was removed: {path}; reinstall sglang (or `git checkout` it) to have it again" for path in gone]
    if replaced_by:
        notes.append(f"SGLang was replaced by {replaced_by} since the overlay was put in: its files are as they were; `apply` puts it in again")
    return {"left": sorted(paths.difference(gone)), "gone": gone, "replaced_by": replaced_by, "notes": notes}


def _left_dirs(situation: Situation) -> list:
    """Return the overlay's directories that stay because somebody else's files are in them."""
    dirs = situation.receipt.dirs if situation.receipt else []
    return [path for path in dirs if (situation.target.root / path).exists()]


def _known_base(situation: Situation, manifest: Manifest, request: Request) -> dict:
    """Return the base, its evidence and its features. Raises Unsupported."""
    journal = situation.journal
    receipt = situation.receipt
    if receipt is None and journal:
        receipt = journal.receipt_after or journal.receipt_before
    if receipt is not None:
        base = base_by_name(manifest, receipt.base)
        patches = load_patches(request.project.patches, base.name) if base else []
        known = [{"feature": name} for name in features_of(patches)]
        return {
            "base": receipt.base,
            "evidence": receipt.evidence,
            "features": _features(receipt.features, receipt.patches + known),
            "patches": receipt.patches,
        }
    base, evidence = situation.base(manifest, request.try_base)
    patches = load_patches(request.project.patches, base.name)
    return {
        "base": base.name,
        "evidence": evidence.to_dict(),
        "features": {"in": [], "out": features_of(patches)},
        "patches": [],
    }


def _machine(manifest: Manifest, base: Optional[Base], environment: Environment) -> dict:
    """Return the environment's versions and GPUs, for status."""
    return {
        "environment": {"source": environment.source, "packages": packages(manifest, base, environment)},
        "gpu": environment.gpu.to_dict(),
    }


def _features(chosen: list, patches: list) -> dict:
    known = dict.fromkeys(patch["feature"] for patch in patches)
    return {"in": chosen, "out": [name for name in known if name not in chosen]}


def _same_apply(receipt: Receipt) -> str:
    """Return the command that puts in what a receipt has, and no more."""
    chosen = receipt.features if _features(receipt.features, receipt.patches)["out"] else []
    return " ".join(["apply", *(f"--feature {name}" for name in chosen)])


def _notes(situation: Situation, state: str) -> list:
    """Say what to do next, where it is not plain."""
    if state == PARTLY:
        return [situation.way_back()]
    version = situation.replaced_by() if state == MODIFIED else None
    if version:
        return [f"SGLang was replaced by {version} since the overlay was put in: {way_on(version)}"]
    if state == MODIFIED and not situation.edited():
        again = _same_apply(situation.receipt)
        return [f"the files named hold nothing of anybody's: `{again}` puts the overlay in again, `revert` takes the rest of it out"]
    if state == APPLIED and situation.receipt.evidence["kind"] == "--try-base":
        return [f"put in by --try-base {situation.receipt.base}, on another SGLang: `check` names what the overlay asks of it and it has not"]
    if state == NO_RECEIPT:
        return ["`apply` writes the receipt; `revert` works as it is"]
    if state == CLEAN and situation.store.exists():
        return ["a command was cut short before it changed anything; `revert` or `apply` tidies up"]
    return []


def _head(command: str, target: Target) -> dict:
    return {
        "ok": True,
        "exit_code": 0,
        "command": command,
        "target": str(target.root),
        "kind": "checkout" if target.is_checkout else "package",
    }
