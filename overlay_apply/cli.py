"""The command line."""

from __future__ import annotations

import functools
import io
import os
import sys
from pathlib import Path
from typing import Any, Callable, List, Optional

import typer

from . import __version__, commands, report
from .errors import OverlayError, Refused, UsageFault
from .fs import Fs
from .project import Project, here

INTERRUPTED = 130

# The class of all usage errors, wherever this version of typer has it.
_CLI_ERROR: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")

app = typer.Typer(
    help="Put the overlay on an SGLang tree, look at it, take it out again.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_TARGET = typer.Argument(
    None,
    metavar="[TARGET]",
    help="An SGLang checkout, an installed sglang folder, or the folder above it. "
    "Left out: the pinned release in build/, which apply, diff and check fetch.",
)
_BASE = typer.Option(None, "--base", help="With no TARGET: the base whose release in build/ is meant.")
_TRY_BASE = typer.Option(None, "--try-base", help="Take the TARGET for this base, whatever its version.")
_FEATURE = typer.Option(None, "--feature", help="The features to have in, others are taken out; repeatable. Left out: all.")
_JSON = typer.Option(False, "--json", help="Print one JSON object and nothing else.")


@app.command()
def apply(
    context: typer.Context,
    target: Optional[Path] = _TARGET,
    feature: Optional[List[str]] = _FEATURE,
    base: Optional[str] = _BASE,
    try_base: Optional[str] = _TRY_BASE,
    dry_run: bool = typer.Option(False, "--dry-run", help="Compute everything, write nothing."),
    json: bool = _JSON,
) -> int:
    """Put the overlay on a tree: all of it, or nothing."""
    request = _request(context, target, base, try_base, feature)
    return _show(commands.apply(request, dry_run), report.show_apply, json)


@app.command()
def status(
    context: typer.Context,
    target: Optional[Path] = _TARGET,
    base: Optional[str] = _BASE,
    python: Optional[Path] = typer.Option(
        None, "--python", help="The interpreter SGLang is run with. Left out: that of the TARGET's environment, else this one."
    ),
    json: bool = _JSON,
) -> int:
    """Say which base a tree is, what is in it, and for each feature whether it is active here, or what it lacks."""
    return _show(commands.status(_request(context, target, base), python), report.show_status, json)


@app.command()
def revert(
    context: typer.Context,
    target: Optional[Path] = _TARGET,
    base: Optional[str] = _BASE,
    keep_edited: bool = typer.Option(
        False, "--keep-edited", help="Keep edits made since: take the overlay out around them, or leave the file alone where it cannot; restore all others."
    ),
    json: bool = _JSON,
) -> int:
    """Take the overlay out: byte for byte what it was."""
    result = commands.revert(_request(context, target, base), keep_edited)
    return _show(result, report.show_revert, json)


@app.command()
def diff(
    context: typer.Context,
    target: Optional[Path] = _TARGET,
    feature: Optional[List[str]] = _FEATURE,
    base: Optional[str] = _BASE,
    try_base: Optional[str] = _TRY_BASE,
) -> int:
    """Print the overlay on this tree as a unified diff, which `git apply` takes."""
    text = commands.unified_diff(_request(context, target, base, try_base, feature))
    sys.stdout.flush()
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()
    return 0


@app.command()
def check(
    context: typer.Context,
    target: Optional[Path] = _TARGET,
    base: Optional[str] = _BASE,
    try_base: Optional[str] = _TRY_BASE,
    neighbours: bool = typer.Option(
        False, "--neighbours", help="Also report which edits would fit the releases around the bases."
    ),
    json: bool = _JSON,
) -> int:
    """Try every edit on the pinned releases (or on a TARGET), writing nothing to them."""
    from .check import check as check_patches

    result = check_patches(_request(context, target, base, try_base), neighbours)
    return _show(result, report.show_check, json)


@app.command()
def features(
    context: typer.Context,
    base: Optional[str] = typer.Option(None, "--base", help="This base alone."),
    json: bool = _JSON,
) -> int:
    """Say what each base has of each patch: ours, upstream's own, or neither."""
    from .features import features as features_of_bases

    return _show(features_of_bases(_request(context, None, base)), report.show_features, json)


def _request(
    context: typer.Context,
    target: Optional[Path],
    base: Optional[str],
    try_base: Optional[str] = None,
    features: Optional[List[str]] = None,
) -> commands.Request:
    project, fs = context.obj
    return commands.Request(project, fs, target, base, try_base, tuple(features or ()))


def _show(result: dict, show: Callable[[dict], None], as_json: bool) -> int:
    (report.show_json if as_json else show)(result)
    return result["exit_code"]


@functools.lru_cache(maxsize=None)
def _command():
    """Return the command line, built once."""
    return typer.main.get_command(app)


def run(argv: List[str], project: Optional[Project] = None, fs: Optional[Fs] = None) -> int:
    """Run one command and return its exit code; failures are told, never raised."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may hold letters that the terminal's encoding has not
    if argv == ["--version"]:
        print(__version__)
        return 0
    try:
        context = (project or here(), fs or Fs())
        code = _command().main(args=argv, prog_name="apply.py", obj=context, standalone_mode=False)
    except OverlayError as fault:
        return _tell(fault, argv)
    except _CLI_ERROR as fault:
        if not argv:  # the help was shown
            return fault.exit_code
        return _tell(UsageFault(fault.format_message(), remedy="see apply.py --help"), argv)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as fault:
        refused = Refused(
            f"the file system refused: {fault.strerror or fault}",
            file=str(fault.filename) if fault.filename else None,
            remedy="make it readable and writable for this user, then run again",
        )
        return _tell(refused, argv)
    if code == INTERRUPTED:
        sys.stderr.write("interrupted; if a tree was being changed, `revert` puts it right\n")
    return code


def main() -> int:
    """The installed command: `sglang-overlay`."""
    return run(sys.argv[1:])


def _tell(fault: OverlayError, argv: List[str]) -> int:
    if "--json" in argv:
        report.show_json({"ok": False, "exit_code": fault.exit_code, "error": fault.as_dict()})
    else:
        report.show_error(fault)
    return fault.exit_code
