#!/usr/bin/env bash
# From nothing to a patched SGLang that answers on this machine's CPU; see ci/cpu_serving/demo.py.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/ci/setup.sh"
export PYTHONPATH="$root/ci"
exec "$root/.venv/bin/python" -m cpu_serving.demo "$@"
