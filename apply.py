#!/usr/bin/env python3
"""Apply, inspect and revert the SGLang overlay; see README.md and `apply.py --help`."""

import importlib.util
import json
import sys

# Import name -> name in requirements.txt.
NEEDS = {
    "ast_grep_py": "ast-grep-py",
    "packaging": "packaging",
    "rich": "rich",
    "typer": "typer",
    "yaml": "PyYAML",
}


def unmet_needs():
    """Say in one line what this Python lacks to run the tool, or return None."""
    if sys.version_info < (3, 10):
        return "apply.py needs Python 3.10 or newer, this is %d.%d" % sys.version_info[:2]
    missing = [name for module, name in NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        return "missing: %s; install with: %s -m pip install -r requirements.txt" % (
            ", ".join(missing),
            sys.executable or "python",
        )
    return None


def main(argv):
    """Run one command and return its exit code."""
    problem = unmet_needs()
    if problem is None:
        from overlay_apply import cli

        return cli.run(argv)
    if "--json" in argv:
        error = {"kind": "missing-dependency", "message": problem}
        print(json.dumps({"ok": False, "exit_code": 2, "error": error}))
    else:
        sys.stderr.write("apply.py: %s\n" % problem)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
