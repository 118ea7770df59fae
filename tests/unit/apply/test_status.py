"""status: how each feature stands at a tree, in the environment and on the machine that are there."""

from __future__ import annotations

import json
import sys
from unittest.mock import ANY

import pytest
import yaml

from conftest import NET, PATCHES, REPOSITORY, manifest, write_tree
from overlay_apply import environment as environments
from overlay_apply.bases import load_manifest
from overlay_apply.environment import Environment, Gpu, environment_of, find_gpus
from overlay_apply.errors import PatchFault
from overlay_apply.flags import load_table, read_flags
from overlay_apply.needs import Needs, gpu_unmet, in_range, package_unmet, parse_feature
from overlay_apply.patches import features_of, load_patches
from overlay_apply.project import Project
from overlay_apply.target import locate

H200S = Gpu(2, ("NVIDIA H200",), "9.0", "580.1", "NV18")

FEATURES = {
    "alpha": {
        "flags": {"SGLANG_OVERLAY_TEST_FLAG": {"off_by": ["0"], "says": {"auto": "where it pays"}, "asks_for": {"fast": "quick way"}}},
        "packages": {"torch": ">=2.11,<3"},
        "parts": {
            "quick way": {"gpu": {"arch": ">=9.0", "count": ">=2", "link": "NV"}, "packages": {"kernels": {"v0.5.20": "==1.2"}}},
            "slow way": {},
            "another base's": {"bases": ["v0.5.99"]},
        },
    },
    "beta": {"packages": {"torch": ">=3"}},
    "gamma": {},
}


def set_features(project, features) -> None:
    data = {**manifest(), "features": features}
    data["bases"]["v0.5.20"]["pins"] = {"torch": "==2.13.0", "nothing": "==1"}
    write_tree(project.root / "patches", {"manifest.yml": yaml.safe_dump(data)})


def install(site, **versions) -> None:
    for name, version in versions.items():
        write_tree(site, {f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"})


@pytest.fixture
def machine(monkeypatch):
    """Set what nvidia-smi would say."""

    def set_gpus(gpu: Gpu) -> None:
        monkeypatch.setattr(environments, "find_gpus", lambda: gpu)

    set_gpus(Gpu(absent="nvidia-smi is not on PATH"))
    return set_gpus


@pytest.fixture
def ready(project, package, machine, monkeypatch):
    """A project whose manifest states needs, and a site-packages folder with a torch of its own."""
    set_features(project, FEATURES)
    install(package, torch="2.13.0+cu130", kernels="1.2")
    monkeypatch.delenv("SGLANG_OVERLAY_TEST_FLAG", raising=False)
    return package


def standing(answer, feature):
    return next(each for each in answer.data["standings"] if each["feature"] == feature)


def test_each_feature_says_whether_it_is_active_or_what_it_lacks(ready, run):
    assert standing(run("status", ready, "--json"), "alpha")["state"] == "not in"
    assert run("apply", ready).code == 0
    answer = run("status", ready, "--json")
    alpha, beta, gamma = (standing(answer, name) for name in ("alpha", "beta", "gamma"))
    assert (alpha["state"], alpha["why"]) == ("active", "SGLANG_OVERLAY_TEST_FLAG unset: where it pays")
    assert (beta["state"], beta["missing"]) == ("lacks", ["torch >=3 is needed, 2.13.0+cu130 is installed"])
    assert gamma["state"] == "not here"


def test_parts_say_what_they_lack(ready, run, machine):
    def lacks():
        return {part["part"]: part["missing"] for part in standing(run("status", ready, "--json"), "alpha")["parts"]}

    assert lacks() == {
        "quick way": ["an NVIDIA GPU is needed, nvidia-smi is not on PATH"],
        "slow way": [],
        "another base's": ["not on v0.5.20"],
    }
    machine(H200S)
    assert lacks()["quick way"] == []


@pytest.mark.parametrize(
    "value, state, why",
    [
        ("0", "off", "by SGLANG_OVERLAY_TEST_FLAG=0"),
        ("fast", "lacks", "SGLANG_OVERLAY_TEST_FLAG=fast: an NVIDIA GPU is needed, nvidia-smi is not on PATH"),
        (" FAST ", "lacks", "SGLANG_OVERLAY_TEST_FLAG= FAST : an NVIDIA GPU is needed, nvidia-smi is not on PATH"),
        ("", "active", "SGLANG_OVERLAY_TEST_FLAG unset: where it pays"),
        ("1", "active", "SGLANG_OVERLAY_TEST_FLAG=1"),
    ],
)
def test_a_flag_switches_off_or_asks_for_a_part(ready, run, monkeypatch, value, state, why):
    monkeypatch.setenv("SGLANG_OVERLAY_TEST_FLAG", value)
    assert run("apply", ready).code == 0
    alpha = standing(run("status", ready, "--json"), "alpha")
    assert (alpha["state"], alpha["why"]) == (state, why)


def test_a_value_that_a_flag_does_not_take(monkeypatch):
    monkeypatch.setenv("SGLANG_MOE_TRITON_UE8M0", "maybe")
    refused = {flag["name"]: flag["refused"] for flag in read_flags(load_table(REPOSITORY / "sglang_overlay"))}
    assert "valid values are" in refused.pop("SGLANG_MOE_TRITON_UE8M0") and set(refused.values()) == {None}


def test_a_refused_flag_is_the_features_state(ready, run, project, monkeypatch):
    flags = "class FlagError(ValueError):\n    pass\n\n\ndef parse(environ):\n    raise FlagError('not that')\n"
    write_tree(project.overlay, {"srt/environ.py": (project.overlay / "srt/environ.py").read_text() + "\n\n" + flags})
    assert run("apply", ready).code == 0
    monkeypatch.setenv("SGLANG_OVERLAY_TEST_FLAG", "x")
    alpha = standing(run("status", ready, "--json"), "alpha")
    assert (alpha["state"], alpha["why"]) == ("refused", "the server stops at start-up: not that")


def test_any_refused_flag_refuses_every_feature(ready, run, project, monkeypatch):
    """The overlay parses all of its flags at once."""
    environ = project.overlay / "srt/environ.py"
    flags = "class FlagError(ValueError):\n    pass\n\n\ndef parse(environ):\n    raise FlagError('not that')\n"
    write_tree(project.overlay, {"srt/environ.py": environ.read_text() + "\n\n" + flags})
    assert run("apply", ready).code == 0
    monkeypatch.setenv("SGLANG_OVERLAY_TEST_FLAG", "x")
    assert [standing(run("status", ready, "--json"), name)["state"] for name in ("alpha", "beta")] == ["refused"] * 2


def test_a_number_is_off_however_it_is_written(ready, run, monkeypatch):
    assert run("apply", ready).code == 0
    monkeypatch.setenv("SGLANG_OVERLAY_TEST_FLAG", "00")
    assert standing(run("status", ready, "--json"), "alpha")["state"] == "off"


def test_parts_need_what_the_feature_needs(ready, run, project):
    set_features(project, {"alpha": {"packages": {"torch": ">=3"}, "parts": {"any": {}}}})
    assert run("apply", ready).code == 0
    alpha = standing(run("status", ready, "--json"), "alpha")
    assert alpha["parts"] == [{"part": "any", "missing": ["torch >=3 is needed, 2.13.0+cu130 is installed"]}]


def test_off_by_default_says_so(ready, run, project):
    set_features(project, {"alpha": {"flags": {"SGLANG_OVERLAY_TEST_FLAG": {"off_by": ["auto"]}}}})
    assert run("apply", ready).code == 0
    assert standing(run("status", ready, "--json"), "alpha")["why"] == "as SGLANG_OVERLAY_TEST_FLAG unset means auto"


@pytest.mark.parametrize("value, refused", [("/no/such.json", True), ("built-in", False), ("text", True), ("table", False)])
def test_a_file_of_measurements_must_be_one(monkeypatch, tmp_path, value, refused):
    (tmp_path / "text").write_text("not JSON")
    (tmp_path / "table").write_text("{}")
    value = str(tmp_path / value) if value in ("text", "table") else value
    found = list(flags_of_overlay(monkeypatch, "SGLANG_MOE_FINALIZE_POLICY", value))
    assert [f"SGLANG_MOE_FINALIZE_POLICY={value}: no JSON file" in each for each in found] == [True] * refused


def test_a_file_that_is_not_read_is_not_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_MOE_DEFERRED_FINALIZE", "0")
    assert flags_of_overlay(monkeypatch, "SGLANG_MOE_FINALIZE_POLICY", "/no/such.json") == []


def flags_of_overlay(monkeypatch, name, value):
    """What is refused of the overlay's own flags, with one of them set."""
    monkeypatch.setenv(name, value)
    return [flag["refused"] for flag in read_flags(load_table(REPOSITORY / "sglang_overlay")) if flag["refused"]]


def test_upstream_has_a_feature(ready, run):
    """By its patches' own probes, on a clean tree as on an applied one."""
    comm = ready / "sglang/srt/layers/comm.py"
    comm.write_text(comm.read_text() + "\n\ndef close_all():\n    pass\n")
    write_tree(ready / "sglang", {"_version.py": "__version__ = '0.5.20'\n"})
    assert standing(run("status", ready, "--json"), "beta")["state"] == "upstream has it"
    assert run("apply", ready).code == 0
    answer = run("status", ready, "--json")
    assert standing(answer, "beta")["state"] == "upstream has it" and standing(answer, "alpha")["state"] == "active"


def test_a_feature_left_out(ready, run):
    assert run("apply", ready, "--feature", "beta").code == 0
    answer = run("status", ready, "--json")
    assert [standing(answer, name)["state"] for name in ("alpha", "beta")] == ["not in", "lacks"]


def test_a_tree_that_lost_a_part_is_told_how_to_get_back_what_it_had(ready, run):
    assert run("apply", ready, "--feature", "beta").code == 0
    (ready / "sglang/sglang_overlay/srt/net.py").unlink()
    assert "`apply --feature beta` puts the overlay in again" in run("status", ready, "--json").data["notes"][0]


@pytest.mark.parametrize("lost", ["sglang_overlay/srt/net.py", "srt/models/net.py"])
def test_a_tree_that_lost_a_part_has_no_active_feature(ready, run, lost):
    original = (ready / "sglang/srt/models/net.py").read_text()
    assert run("apply", ready).code == 0
    file = ready / "sglang" / lost
    file.write_text(original) if lost.startswith("srt") else file.unlink()
    answer = run("status", ready, "--json")
    assert (answer.code, answer.data["state"]) == (5, "modified since") and "`apply` puts the overlay in again" in answer.data["notes"][0]
    assert {standing(answer, name)["state"] for name in ("alpha", "beta")} == {"partly in"}
    assert run("apply", ready).code == 0 and standing(run("status", ready, "--json"), "alpha")["state"] == "active"


def test_a_partly_applied_tree_has_no_active_feature(ready, run):
    write_tree(ready / "sglang", {"sglang_overlay/__init__.py": ""})
    answer = run("status", ready, "--json")
    assert answer.code == 5
    assert {each["feature"]: each["state"] for each in answer.data["standings"]} == {"alpha": "partly in", "beta": "partly in", "gamma": "not here"}


def test_people_get_one_line_for_each_feature(ready, run, machine):
    machine(H200S)
    assert run("apply", ready).code == 0
    shown = run("status", ready).out.splitlines()
    assert ["alpha", "active"] in [line.split()[:2] for line in shown] and ["beta", "lacks"] in [line.split()[:2] for line in shown]
    assert "  NVIDIA GPUs: 2 x NVIDIA H200, compute capability 9.0, driver 580.1, linked by NV18" in shown
    assert any(line.split()[:3] == ["torch", "2.13.0+cu130", "==2.13.0"] for line in shown)
    assert any(line.split()[:3] == ["nothing", "-", "==1"] for line in shown)


def test_an_unsupported_tree_still_tells_its_environment(ready, run):
    (ready / "sglang/srt/models/net.py").write_text(NET + "# other\n")
    answer = run("status", ready, "--json")
    assert answer.code == 3 and answer.data["standings"] == [] and answer.data["gpu"]["absent"]
    found = {row["package"]: row["found"] for row in answer.data["environment"]["packages"]}
    assert found == {"torch": "2.13.0+cu130", "kernels": "1.2"}
    assert run("status", ready).code == 3


def test_where_versions_are_read(ready, checkout, tmp_path):
    assert environment_of(locate(ready)).version("torch") == "2.13.0+cu130"
    assert environment_of(locate(checkout)).source.startswith("this Python")
    install(checkout / ".venv/lib/python3.11/site-packages", torch="1.0")
    found = environment_of(locate(checkout))
    assert (found.source, found.version("torch"), found.version("nothing")) == (".venv in the checkout", "1.0", None)
    asked = environment_of(locate(checkout), sys.executable)
    assert asked.source == sys.executable and asked.version("pytest") == pytest.__version__


def test_a_python_that_does_not_run(ready, run, tmp_path):
    answer = run("status", ready, "--python", tmp_path / "nothing", "--json")
    assert answer.code == 2 and answer.data["error"]["file"] == str(tmp_path / "nothing")
    assert run("status", ready, "--python", sys.executable).code == 0


def test_commands_are_looked_for_in_the_environment_and_in_cudas_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    for place in ("venv/bin/only-there", "cuda/bin/only-cuda"):
        write_tree(tmp_path, {place: "#!/bin/sh\n"})
        (tmp_path / place).chmod(0o755)
    environment = Environment("a test", (), (tmp_path / "venv/bin",))
    assert environment.has_command("only-there") and environment.has_command("only-cuda") and not environment.has_command("no-such")
    assert Needs(commands=("only-there", "no-such")).unmet("v0.5.20", environment) == ["no-such is not on PATH"]


@pytest.mark.parametrize(
    "wanted, found, fits",
    [("==2.13.0", "2.13.0+cu130", True), (">=2.13", "2.13.0rc1", False), (">=2.12", "2.13.0rc1", True), (">=1", None, False), (">=1", "dev", False)],
)
def test_versions_against_ranges(wanted, found, fits):
    assert in_range(wanted, found) is fits
    assert bool(package_unmet("x", wanted, found)) is not fits


@pytest.mark.parametrize(
    "gpu, lacks",
    [
        (H200S, []),
        (Gpu(2, ("A100",), "8.0", "1", "NV12"), ["compute capability >=9.0 is needed, this machine's is 8.0"]),
        (Gpu(1, ("H200",), "9.0", "1"), [">=2 GPUs are needed, there are 1"]),
        (Gpu(2, ("H200",), "9.0", "1", "NV18, SYS"), ["NV links between all GPUs are needed, there are NV18, SYS"]),
        (Gpu(2, ("H200",), "9.0", "1"), ["NV links between all GPUs are needed, there are none known"]),
        (Gpu(2, ("B300",), "10.3", "1", "NV18"), []),
    ],
)
def test_gpus_against_needs(gpu, lacks):
    assert gpu_unmet({"arch": ">=9.0", "count": ">=2", "link": "NV"}, gpu) == lacks


MATRIX = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tNODE\t0-47\t0\nGPU1\tNV18\t X \tSYS\t0-47\t0\nNIC0\tNODE\tSYS\t X \t\t\n\nLegend:\n  X = Self\n"
)


def fake_nvidia_smi(folder, monkeypatch, gpus: str, matrix: str, code: int = 0) -> None:
    """A command of that name, first on PATH."""
    text = f"#!{sys.executable}\nimport sys\nprint({matrix!r} if 'topo' in sys.argv else {gpus!r})\nsys.exit({code})\n"
    write_tree(folder, {"nvidia-smi": text})
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_gpus_by_nvidia_smi(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch, "NVIDIA H200, 9.0, 580.1\nNVIDIA H200, 9.0, 580.1", MATRIX)
    assert find_gpus() == H200S
    fake_nvidia_smi(tmp_path, monkeypatch, "NVIDIA H200, 9.0, 580.1\nNVIDIA B300, 10.3, 580.1", "")
    assert (find_gpus().names, find_gpus().arch, find_gpus().link) == (("NVIDIA H200", "NVIDIA B300"), "9.0", None)


@pytest.mark.parametrize("gpus, code", [("No devices were found", 6), ("No devices were found", 0), ("", 0), ("H200, [N/A], 1", 0)])
def test_no_gpus_by_nvidia_smi(tmp_path, monkeypatch, gpus, code):
    fake_nvidia_smi(tmp_path, monkeypatch, gpus, "", code)
    assert find_gpus() == Gpu(absent="nvidia-smi names none")


def test_no_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus().absent == "nvidia-smi is not on PATH"


@pytest.mark.parametrize(
    "row, named",
    [
        ({"package": {}}, "unknown key 'package'"),
        ({"packages": {"torch": "2.13"}}, "not a range of versions: '2.13'"),
        ({"parts": {"a": {"gpu": {"cores": 1}}}}, "unknown key 'cores'"),
        ({"parts": {"a": {"packages": {"x": {"v0.5.20": "?"}}}}}, "not a range of versions: '?'"),
        # YAML reads a bare `off:` as False.
        ({"flags": {"A": {False: ["0"]}}}, "unknown key False"),
    ],
)
def test_a_malformed_need_is_named(project, row, named):
    with pytest.raises(ValueError, match="unknown key|not a range"):
        parse_feature(row)
    set_features(project, {"alpha": row})
    with pytest.raises(PatchFault) as fault:
        load_manifest(project.patches)
    assert named in fault.value.message and fault.value.file.endswith("manifest.yml")


def test_no_needs_stated_is_no_failure(package, run):
    assert run("apply", package).code == 0
    assert {each["state"] for each in run("status", package, "--json").data["standings"]} == {"active"}


REAL = Project(REPOSITORY)
MANIFEST = load_manifest(REAL.patches)


def test_every_feature_states_its_needs():
    features = {name for base in MANIFEST.bases for name in features_of(load_patches(REAL.patches, base.name))}
    assert features == set(MANIFEST.features), "patches/manifest.yml, features: one row for each feature"


def test_needs_name_bases_flags_and_parts_that_there_are():
    bases = {base.name for base in MANIFEST.bases}
    flags = {flag["name"]: flag["feature"] for flag in read_flags(load_table(REAL.overlay))}
    for name, needs in MANIFEST.features.items():
        for each in (needs.needs, *needs.parts.values()):
            by_base = [asked for asked in each.packages.values() if isinstance(asked, dict)]
            assert set(each.bases).union(*by_base) <= bases
        for flag, meanings in needs.flags.items():
            assert flags[flag] == name
            assert set((meanings.get("asks_for") or {}).values()) <= set(needs.parts)


def test_what_unset_says_follows_the_table_of_measurements():
    table = json.loads((REAL.overlay / "srt/layers/moe/boundary/policy_table.json").read_text())
    says = MANIFEST.features["deferred-finalize"].flags["SGLANG_ENABLE_MOE_DEFERRED_FINALIZE"]["says"]["auto"]
    assert {(entry["arch"], entry["world_size"]) for entry in table["entries"]} == {("sm90", 1), ("sm90", 2)}, "correct the manifest's words"

    def sizes(ranks):
        *all_but_last, last = sorted(entry["hidden"] for entry in table["entries"] if entry["world_size"] == ranks)
        return f"{', '.join(map(str, all_but_last))} and {last}"

    assert says.endswith(f"knows one GPU of SM90 at hidden sizes {sizes(1)}, and two at {sizes(2)}"), "correct the manifest's words"


@pytest.mark.parametrize("gpu, one, several", [
    (Gpu(1, ("NVIDIA H200",), "9.0", "580.1"), [], [">=2 GPUs are needed, there are 1"]),
    (H200S, [], []),
    (Gpu(2, ("NVIDIA H200",), "9.0", "580.1", "SYS"), [], ["NV links between all GPUs are needed, there are SYS"]),
    (Gpu(1, ("NVIDIA A100",), "8.0", "580.1"), ["compute capability >=9.0 is needed, this machine's is 8.0"], ANY),
])
def test_the_fused_way_asks_for_links_on_several_gpus_alone(gpu, one, several):
    parts = MANIFEST.features["deferred-finalize"].parts
    assert gpu_unmet(parts["taken by fused"].gpu, gpu) == one
    assert gpu_unmet(parts["taken by fused on several GPUs"].gpu, gpu) == several


def test_the_tests_own_patches_have_the_features_they_use():
    assert {yaml.safe_load(text)["feature"] for text in PATCHES.values()} == {"alpha", "beta"}
