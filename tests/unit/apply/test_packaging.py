"""The project's own files: dependencies in one place, pinned checks, and what an overlay on others' software says of its license."""

from __future__ import annotations

import re
import tomllib

import yaml

from conftest import REPOSITORY
from overlay_apply import __version__

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def text_of(file: str) -> str:
    return (REPOSITORY / file).read_text("utf-8")


def test_dependencies_are_written_once():
    assert "dependencies" in PYPROJECT["project"]["dynamic"] and "dependencies" not in PYPROJECT["project"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["dependencies"] == {"file": ["requirements.txt"]}


def test_all_that_ci_installs_is_pinned():
    pinned = set(re.findall(r"^([\w.-]+)==", text_of("ci/constraints.txt"), re.MULTILINE))
    for file in ("ci/requirements-test.txt", "ci/requirements-serve.txt", "ci/requirements-release.txt", "requirements.txt"):
        names = set(re.findall(r"^([A-Za-z][\w.-]*)", text_of(file), re.MULTILINE))
        assert names and names <= pinned, (file, names - pinned)


def test_ci_runs_the_quick_checks_before_the_tests():
    run = text_of(".ci/run")
    assert 0 < run.index("lint.sh") < run.index("test.sh")
    assert "ruff" in text_of("ci/lint.sh") and "mypy" in text_of("ci/lint.sh")


def test_the_version_has_a_heading_in_the_changelog():
    assert re.search(rf"^## {re.escape(__version__)}\b", text_of("CHANGELOG.md"), re.MULTILINE)


def test_license_and_notice():
    assert PYPROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License" in text_of("LICENSE") and "Version 2.0, January 2004" in text_of("LICENSE")
    assert "SGLang" in text_of("NOTICE") and "LICENSE" in text_of("NOTICE")


def test_the_issue_template_asks_for_what_status_says():
    assert "status TARGET --json" in text_of(".github/ISSUE_TEMPLATE/report.md")


def test_hooks_run_the_same_commands():
    hooks = {hook["id"]: hook["entry"] for hook in yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"][0]["hooks"]}
    assert hooks["ruff"].startswith(".venv/bin/ruff check") and hooks["mypy"] == ".venv/bin/mypy"
    assert hooks["patches"] == ".venv/bin/python apply.py check"


def test_links_between_pages_lead_somewhere():
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), REPOSITORY / "patches/README.md"]
    for page in pages:
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text("utf-8")):
            assert (page.parent / link).exists(), f"{page.relative_to(REPOSITORY)} links to {link}, which is not there"
