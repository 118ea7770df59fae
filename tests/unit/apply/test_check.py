"""check on a tree: each edit fits, drifted (and may belong there), or is upstream's own by now."""

from __future__ import annotations

import hashlib
import shutil
import zipfile

import pytest
import yaml

from conftest import COMM, NET, PACKAGE, PATCHES, manifest, snapshot, write_tree
from overlay_apply.borrowed import Modules
from overlay_apply.names import undefined
from overlay_apply.nearest import Tree, nearest
from overlay_apply.patches import load_patch


def rows(answer, outcome):
    return [row for row in answer.data["edits"] if row["outcome"] == outcome]


def set_version(package, version) -> None:
    write_tree(package / "sglang", {"_version.py": f"__version__ = '{version}'\n"})


def test_a_base_fits_itself(run, package):
    answer = run("check", package, "--json")
    assert answer.code == 0 and len(rows(answer, "fits")) == 3
    assert answer.data["best"] == "v0.5.20" and "all of it fits: v0.5.20" in run("check", package).out


def test_the_overlay_in_the_tree_makes_no_difference(run, package):
    before = run("check", package, "--json").data
    assert run("apply", package).code == 0
    assert run("check", package, "--json").data["edits"] == before["edits"]


def test_a_tree_of_another_version_is_tried_on_every_base(run, project, package):
    """The best is the one with the fewest edits that do not fit; its drift counts."""
    data = manifest()
    data["bases"]["v0.5.23"] = {**data["bases"]["v0.5.20"], "version": "0.5.23", "files": {}}
    write_tree(project.root / "patches", {"manifest.yml": yaml.safe_dump(data)})
    shutil.copytree(project.patches / "v0.5.20", project.patches / "v0.5.23")
    moved = PATCHES["net-close"].replace("pattern: self.close(", "pattern: self.shut(")
    write_tree(project.patches / "v0.5.23", {"net-close.yml": moved})
    write_tree(package / "sglang", {"srt/models/net.py": NET.replace("self.close", "self.shut")})
    set_version(package, "0.5.22")
    answer = run("check", package, "--json")
    assert answer.code == 0 and answer.data["best"] == "v0.5.23"
    assert answer.data["evidence"] == {"kind": "_version.py", "found": "0.5.22"}
    assert [(row["base"], row["edit"]) for row in rows(answer, "drifted")] == [("v0.5.20", "net-close#1")]
    shown = run("check", package).out
    assert "v0.5.20: 3 edits: 2 fits, 1 drifted" in shown and "all of it fits: v0.5.23" in shown
    assert run("check", package, "--try-base", "v0.5.20").code == 4


def test_upstream_has_it(run, package):
    """A patch that its own probe retires is no drift."""
    write_tree(package / "sglang", {"srt/layers/comm.py": COMM + "\n\ndef close_all():\n    pass\n"})
    set_version(package, "0.5.21")
    answer = run("check", package, "--json")
    assert answer.code == 0 and [row["edit"] for row in rows(answer, "upstream has it")] == ["net-close#1"]


def test_drift_is_told_with_names_and_places(run, package):
    write_tree(package / "sglang", {"srt/models/net.py": NET.replace("close", "close_it")})
    set_version(package, "0.5.21")
    told = run("check", package)
    assert told.code == 4
    assert "net-close#1 drifted: srt/models/net.py: 0 in place of 1" in told.out
    assert "  gone: close; near it: close_it" in told.out
    assert "best: v0.5.20 (the tree is 0.5.21, by _version.py)" in told.out


def release_of(project, files) -> None:
    """Put a base's own release into build/, as if it had been fetched."""
    project.build.mkdir()
    wheel = project.build / "sglang-0.5.20.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"sglang/{name}", text)
    data = manifest()
    data["bases"]["v0.5.20"]["release"]["sha256"] = hashlib.sha256(wheel.read_bytes()).hexdigest()
    write_tree(project.patches, {"manifest.yml": yaml.safe_dump(data)})


BORROWING = """from sglang.srt.layers.other import OTHER

def run():
    from sglang.srt.layers.comm import Comm, never_there
    import sglang.srt.models.net
    from sglang.sglang_overlay.srt.net import route
"""


def test_names_that_the_overlay_imports_and_the_tree_lost(run, project, package):
    """Compared with the base's release, so that a name for another base only is no loss."""
    write_tree(project.overlay, {"srt/uses.py": BORROWING})
    assert run("check", package, "--json").data["lost"] is None
    assert "not compared: what the overlay imports" in run("check", package).out
    release_of(project, PACKAGE)
    assert run("check", package, "--json").data["lost"] == []
    write_tree(package / "sglang", {"srt/layers/comm.py": COMM.replace("class Comm", "class Kommunikator")})
    (package / "sglang/srt/layers/other.py").unlink()
    set_version(package, "0.5.21")
    answer = run("check", package, "--json")
    assert answer.code == 4 and answer.data["error"]["kind"] == "lost-name"
    assert answer.data["lost"] == [
        {"name": "sglang.srt.layers.comm.Comm", "by": ["srt/uses.py"]},
        {"name": "sglang.srt.layers.other.OTHER", "by": ["srt/uses.py"]},
    ]
    assert "gone, though the overlay imports it: sglang.srt.layers.comm.Comm (in srt/uses.py)" in run("check", package).out


@pytest.mark.parametrize("words", [["--dry-run"], []])
def test_apply_on_a_tried_base_tells_lost_names(run, project, package, words):
    write_tree(project.overlay, {"srt/uses.py": "from sglang.srt.layers.other import OTHER\n"})
    (package / "sglang/srt/layers/other.py").unlink()
    set_version(package, "0.5.21")
    asked = ["apply", package, "--try-base", "v0.5.20", *words]
    assert run(*asked, "--json").data["notes"] == []
    release_of(project, PACKAGE)
    answer = run(*asked)
    assert answer.code == 0
    assert "note: the overlay imports sglang.srt.layers.other.OTHER (in srt/uses.py), which v0.5.20 has and this SGLang has not" in answer.out


def test_apply_on_a_base_itself_compares_nothing(run, project, package):
    release_of(project, {})
    assert run("apply", package, "--json").data["notes"] == []


@pytest.mark.parametrize(
    "source",
    ["NAME = 1", "NAME: int = 1", "def NAME(): ...", "class NAME: ...", "from x import NAME", "import y as NAME", "from x import *",
     "if A:\n    NAME = 1", "try:\n    import NAME\nexcept ImportError:\n    NAME = None", "try:\n    pass\nexcept E:\n    NAME = None",
     "with a:\n    (A, NAME) = 1, 2"],
)  # fmt: skip
def test_names_at_the_top_level_of_a_module(source):
    assert Modules({"srt/a.py": source.encode()}.get).has("sglang.srt.a", "NAME")


def test_a_module_that_cannot_be_read_may_have_any_name():
    assert Modules({"srt/a.py": b"def ("}.get).has("sglang.srt.a", "NAME")


def test_packages_and_modules_as_names():
    modules = Modules({"srt/a/__init__.py": b"", "srt/a/b.py": b"def f():\n    NAME = 1\n"}.get)
    assert modules.has("sglang.srt.a", "b") and modules.has("sglang.srt.a.b", "f") and modules.has("sglang.srt.a", "")
    assert not modules.has("sglang.srt.a.b", "NAME") and not modules.has("sglang.srt.c", "")


def test_a_fix_that_names_what_is_not_there(run, project, package):
    """Every edit finds its place, and the result would raise NameError when it runs: neither check nor apply lets it pass."""
    text = PATCHES["net-close"].replace("fix: closing(self, $$$ARGS)", "fix: closing(self, rest, $$$ARGS)")
    write_tree(project.patches / "v0.5.20", {"net-close.yml": text})
    assert run("check", package).code == 0
    write_tree(package / "sglang", {"srt/models/net.py": NET.replace("*rest", "*others")})
    set_version(package, "0.5.21")
    answer = run("check", package, "--json")
    assert answer.code == 4 and len(rows(answer, "fits")) == 3
    assert answer.data["error"]["message"] == "net-close#1 names what is not defined there: rest"
    assert "names what is not defined there: rest" in run("check", package).err
    before = snapshot(package)
    applied = run("apply", package, "--try-base", "v0.5.20", "--json")
    assert applied.code == 4 and applied.data["error"]["patch"] == "net-close"
    assert snapshot(package) == before


def test_a_fix_that_names_what_is_not_there_is_told_beside_drift_in_another_file(run, project, package):
    text = PATCHES["net-close"].replace("fix: closing(self, $$$ARGS)", "fix: closing(self, rest, $$$ARGS)")
    write_tree(project.patches / "v0.5.20", {"net-close.yml": text})
    moved = {"srt/models/net.py": NET.replace("*rest", "*others"), "srt/layers/comm.py": COMM.replace("variant", "kind")}
    write_tree(package / "sglang", moved)
    set_version(package, "0.5.21")
    problems = run("check", package, "--json").data["problems"]
    assert [(problem["kind"], problem["file"]) for problem in problems] == [("drift", "srt/layers/comm.py"), ("patch-data", "srt/models/net.py")]
    assert "names what is not defined there: rest" in run("check", package).err


def test_drift_in_a_file_hides_what_its_other_edits_would_make_of_it(run, project, package):
    """Half of a file's edits prove nothing about the whole."""
    text = PATCHES["net-close"].replace("fix: closing(self, $$$ARGS)", "fix: closing(self, rest, $$$ARGS)")
    write_tree(project.patches / "v0.5.20", {"net-close.yml": text})
    write_tree(package / "sglang", {"srt/models/net.py": NET.replace("*rest", "*others").replace("experts", "blocks")})
    set_version(package, "0.5.21")
    assert {problem["kind"] for problem in run("check", package, "--json").data["problems"]} == {"drift"}


@pytest.mark.parametrize(
    "source, names",
    [
        ("def f(a):\n    return a + b", {"b"}),
        ("b = 1\ndef f():\n    return b", set()),
        ("def f():\n    global b\n    b = 1\ndef g():\n    return b", set()),
        ("from x import *\ndef f():\n    return b", set()),
        ("def f(b):\n    return lambda: b", set()),
        ("class A:\n    b: int = 1\n    def f(self):\n        return b", {"b"}),
        ("print(len(__name__), __file__)", set()),
        ("x = [y for y in z]", {"z"}),
        ("\ufeffx = y", {"y"}),
    ],
)
def test_undefined_names(source, names):
    assert undefined(source.encode(), "a.py") == names


def test_not_a_tree(run, tmp_path):
    assert run("check", tmp_path, "--json").code == 3


PATCH = """
id: {id}
feature: alpha
reason: reports
why: A test.
upstream: none
edits:
  - file: srt/models/net.py
    matches: 1
    rule: {rule}
    fix: x
"""

IN_NET_FORWARD = (
    "{pattern: self.experts($A), inside: {stopBy: end, kind: function_definition, has: {field: name, regex: ^forward$}, "
    "inside: {stopBy: end, kind: class_definition, has: {field: name, regex: ^Net$}}}}"
)


@pytest.fixture
def edit_of(tmp_path):
    """``rule`` -> the edit of a patch with that rule."""

    def get(rule):
        write_tree(tmp_path, {"one.yml": PATCH.format(id="one", rule=rule)})
        return load_patch(tmp_path / "one.yml").edits[0]

    return get


def tree_of(**files):
    named = {name.replace("__", "/") + ".py": text.encode() for name, text in files.items()}
    return Tree(named.get, sorted(named))


def found(answer):
    return [(place["file"], place["line"], place["scope"], place["how"]) for place in answer["candidates"]]


def test_too_many_places_are_all_named(edit_of):
    answer = nearest(edit_of(IN_NET_FORWARD), tree_of(srt__models__net=NET))
    assert found(answer) == [("srt/models/net.py", 11, "Net.forward", "as it is"), ("srt/models/net.py", 12, "Net.forward", "as it is")]
    assert answer["candidates"][1]["text"] == "self.experts(x)" and answer["names"] == []


def test_a_method_in_another_class(edit_of):
    answer = nearest(edit_of(IN_NET_FORWARD), tree_of(srt__models__net=NET.replace("class Net:", "class NetModel:")))
    assert {place[2:] for place in found(answer)} == {("NetModel.forward", "not inside class definition Net")}
    assert answer["names"] == [{"name": "Net", "near": ["NetModel"], "elsewhere": []}]


def test_a_call_in_another_method(edit_of):
    answer = nearest(edit_of(IN_NET_FORWARD), tree_of(srt__models__net=NET.replace("def forward", "def forward_normal")))
    how = "not inside function definition forward inside class definition Net"
    assert {place[2:] for place in found(answer)} == {("Net.forward_normal", how)}
    assert answer["names"][0]["near"] == ["forward_normal"]


def test_a_file_that_moved(edit_of):
    answer = nearest(edit_of(IN_NET_FORWARD), tree_of(srt__models__net_v2=NET))
    assert {place[0] for place in found(answer)} == {"srt/models/net_v2.py"}
    assert {place[3] for place in found(answer)} == {"as it is, in another file"}
    assert {name["name"]: name["elsewhere"] for name in answer["names"]}["Net"] == ["srt/models/net_v2.py"]


def test_a_method_that_moved_to_another_class_of_another_file(edit_of):
    answer = nearest(edit_of(IN_NET_FORWARD), tree_of(srt__models__net="", srt__parts=NET.replace("class Net:", "class Part:")))
    assert found(answer)[0] == ("srt/parts.py", 11, "Part.forward", "not inside class definition Net, in another file")


def test_a_call_that_is_gone(edit_of):
    answer = nearest(edit_of("{pattern: self.experts_of($A)}"), tree_of(srt__models__net=NET))
    assert answer["candidates"] == [] and answer["names"] == [{"name": "experts_of", "near": ["experts"], "elsewhere": []}]


def test_conditions_that_are_not_surroundings_go_last(edit_of):
    rule = "{pattern: self.experts($A), has: {stopBy: end, pattern: no_such}}"
    answer = nearest(edit_of(rule), tree_of(srt__models__net=NET))
    assert {place[3] for place in found(answer)} == {"anywhere, without its other conditions"}


def test_a_file_that_is_no_text(edit_of):
    tree = Tree({"srt/models/net.py": b"\xff\xfe self.experts"}.get, ["srt/models/net.py"])
    assert nearest(edit_of(IN_NET_FORWARD), tree)["candidates"] == []
