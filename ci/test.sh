#!/usr/bin/env bash
# Sets up .venv and runs the tests. Arguments go to pytest: -m gpu on a GPU machine, -m "not serving" for the quick ones.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/ci/setup.sh"
cd "$root"
exec "$root/.venv/bin/python" -m pytest "$@"
