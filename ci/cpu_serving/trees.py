"""The SGLang trees that are served: the pristine releases, and the same with the overlay applied."""
import json
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
SERVED = BUILD / "serving"
LOGS = SERVED / "logs"  # kept for a look after a failure
BASES = ("0.5.20", "0.5.23")
BASE = BASES[0]  # whose requirements the virtual environment is made from, and which has every feature


class ApplyFailed(RuntimeError):
    """apply.py ended with an error; the message is what it printed."""


def run_apply(*arguments: str) -> dict:
    """Run apply.py with --json and return what it reports; raise ApplyFailed on any error."""
    command = [sys.executable, str(ROOT / "apply.py"), *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ApplyFailed(f"apply.py {' '.join(arguments)} ended with status {done.returncode}: {done.stdout}")
    return json.loads(done.stdout)


def release_wheel(base: str = BASE) -> Path:
    """A pinned release's wheel in build/, fetched and checked by apply.py's own code."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from overlay_apply import bases, fetch, project

    here = project.here()
    return fetch.fetch_wheel(here, bases.load_manifest(here.patches).base(base).release)


def stock_tree(base: str = BASE) -> Path:
    """A pristine release, unpacked; unpacked again if any of its files is not as in the wheel."""
    wheel, tree = release_wheel(base), SERVED / f"stock-{base}"
    if not _is_as_in(wheel, tree):
        shutil.rmtree(tree, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tree)
    return tree


def overlay_tree(tree: Path, base: str = BASE, *features: str) -> Path:
    """A copy of a release at ``tree``, which must not exist yet, with this checkout's overlay applied: all of it, or some features."""
    shutil.copytree(stock_tree(base), tree)
    run_apply("apply", str(tree / "sglang"), *(word for feature in features for word in ("--feature", feature)))
    return tree


def patched_release() -> Path:
    """The pinned release in build/, fetched if it is not there, with the overlay applied; as a user has it."""
    return Path(run_apply("apply", "--base", f"v{BASE}")["target"])


def _is_as_in(wheel: Path, tree: Path) -> bool:
    with zipfile.ZipFile(wheel) as archive:
        files = [entry for entry in archive.infolist() if not entry.is_dir()]
    if any(not (tree / entry.filename).is_file() for entry in files):
        return False
    return all(zlib.crc32((tree / entry.filename).read_bytes()) == entry.CRC for entry in files)
