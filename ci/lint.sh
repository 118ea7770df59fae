#!/usr/bin/env bash
# Sets up .venv, then lints (ruff) and checks types (mypy); what both look at is in pyproject.toml.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/ci/setup.sh"
cd "$root"
"$root/.venv/bin/ruff" check .
"$root/.venv/bin/mypy"
