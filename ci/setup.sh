#!/usr/bin/env bash
# Makes .venv in the repository root: the pinned SGLang release, what it imports on a CPU, the tool's own
# requirements and the test runner. Quick when nothing changed. PYTHON names another Python 3.11 command.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
stamp="$venv/installed-requirements"
inputs=("$root/ci/constraints.txt" "$root/ci/requirements-release.txt" "$root/ci/requirements-serve.txt"
        "$root/ci/requirements-test.txt" "$root/requirements.txt")

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

find_python() {
    local command="${PYTHON:-python3.11}" version
    version="$("$command" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" ||
        fail "needs Python 3.11, but '$command' does not run. Install it, or name the command: PYTHON=/path/to/python3.11"
    [[ "$version" == 3.11 ]] ||
        fail "needs Python 3.11, but '$command' is Python $version. Name another command: PYTHON=/path/to/python3.11"
    "$command" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "'$command' cannot make virtual environments (its venv or ensurepip module is missing)"
    printf '%s\n' "$command"
}

# The place counts too: scripts of a moved virtual environment still name the old one.
wanted_stamp() { { printf '%s\n' "$root"; cat "${inputs[@]}"; } | sha256sum | cut -d' ' -f1; }

is_ready() {
    [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]] && "$venv/bin/python" -c '' 2>/dev/null
}

pip_install() {
    "$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check -c "$root/ci/constraints.txt" "$@" \
        2>"$log" || { cat "$log" >&2; fail "pip could not install: $*"; }
}

# torch first and alone: asked for together with the rest, pip may settle on a CUDA build of several GB.
install_all() {
    say "installing torch"
    pip_install "$(grep '^torch==' "$root/ci/constraints.txt")"
    say "installing the SGLang release"
    pip_install --no-deps -r "$root/ci/requirements-release.txt"
    say "installing what it imports, and the test runner"
    pip_install -r "$root/ci/requirements-serve.txt" -r "$root/ci/requirements-test.txt" -r "$root/requirements.txt"
}

for file in "${inputs[@]}"; do
    [[ -f "$file" ]] || fail "missing file: $file"
done
mkdir -p "$root/build"
exec 9>"$root/build/setup.lock"
flock 9

wanted="$(wanted_stamp)"
if is_ready; then
    exit 0
fi
python="$(find_python)"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
say "making .venv (a few minutes, once)"
rm -f "$stamp"
"$python" -m venv --clear "$venv"
install_all
printf '%s\n' "$wanted" >"$stamp"  # last: whoever is cut short before this starts over
say "ready"
