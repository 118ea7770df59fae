"""Rules, fixes, imports: what becomes of one file."""

from __future__ import annotations

import pytest

from overlay_apply.errors import PatchFault
from overlay_apply.patches import Edit, Rule
from overlay_apply.rewrite import Source


def edit(rule: dict, fix: str, imports: tuple = (), patch: str = "a-patch", **config) -> Edit:
    return Edit(patch, 1, Rule("net.py", {"rule": rule, **config}), 1, fix, imports)


def rewrite(text: str, *edits: Edit) -> str:
    source = Source(text.encode(), "net.py")
    splices = []
    for one in edits:
        splices += [source.splice(node, one) for node in source.find(one.where, one.name)]
        if one.imports:
            splices.append(source.import_splice(list(one.imports), one.name))
    return source.render(splices).decode()


def test_a_single_and_a_multiple_metavariable():
    one = edit({"pattern": "f($A, $$$REST)"}, "g($$$REST, $A)")
    assert rewrite("f(1, *b,  c)\n", one) == "g(*b,  c, 1)\n"


def test_captures_are_verbatim_over_several_lines():
    one = edit({"pattern": "f($$$ALL)"}, "g($$$ALL)")
    assert rewrite("f(\n  1,  # one\n  2,\n)\n", one) == "g(1,  # one\n  2,)\n"


def test_an_empty_multiple_capture():
    assert rewrite("f()\n", edit({"pattern": "f($$$ALL)"}, "g($$$ALL)")) == "g()\n"


def test_a_capture_that_holds_something_like_a_metavariable():
    one = edit({"pattern": "f($A)"}, "g($A, $A)")
    assert rewrite("f('$A')\n", one) == "g('$A', '$A')\n"


def test_a_fix_that_names_what_is_not_captured():
    with pytest.raises(PatchFault, match=r"\$B"):
        rewrite("f(1)\n", edit({"pattern": "f($A)"}, "g($B)"))


def test_constraints_choose_among_places():
    one = edit({"pattern": "f($A)"}, "g($A)", constraints={"A": {"regex": "^x$"}})
    assert rewrite("f(x)\nf(y)\n", one) == "g(x)\nf(y)\n"


def test_utils_are_passed_on():
    one = edit({"matches": "call-f"}, "g", utils={"call-f": {"pattern": "f"}})
    assert rewrite("f(x)\n", one) == "g(x)\n"


def test_later_lines_of_a_fix_get_the_indent_of_the_line():
    text = "class A:\n\tdef f(self):\n\t\tx = f(1)\n"
    one = edit({"pattern": "f(1)"}, "g(\n  1,\n\n)")
    assert rewrite(text, one) == "class A:\n\tdef f(self):\n\t\tx = g(\n\t\t  1,\n\n\t\t)\n"


@pytest.mark.parametrize(
    "head",
    [
        "",
        '"""Doc."""\n',
        "'''Doc\nmore.'''\n",
        "# comment\n",
        '"""Doc."""\nfrom __future__ import annotations\n',
        "from __future__ import (\n    annotations,\n)\n\n",
    ],
)
@pytest.mark.parametrize("first", ["import os\n", "from os import path\n", "from . import x\n"])
def test_imports_go_before_the_first_ordinary_import(head, first):
    one = edit({"pattern": "f"}, "g", ("from a import g",))
    assert rewrite(f"{head}{first}f\n", one) == f"{head}from a import g\n{first}g\n"


@pytest.mark.parametrize("head", ["", '"""Doc."""\n', '"""Doc."""\nfrom __future__ import annotations\n'])
def test_imports_of_a_file_that_has_none(head):
    one = edit({"pattern": "f"}, "g", ("from a import g",))
    assert rewrite(f"{head}f\n", one) == f"{head}from a import g\ng\n"


def test_imports_after_a_last_line_without_end():
    source = Source(b"from __future__ import annotations", "net.py")
    assert source.render([source.import_splice(["import a"], "x")]) == (
        b"from __future__ import annotations\nimport a\n"
    )


def test_an_import_that_is_there_already_is_not_doubled():
    one = edit({"pattern": "f"}, "g", ("import os", "import re"))
    assert rewrite("import os\nf\n", one) == "import re\nimport os\ng\n"


def test_an_indented_import_is_not_the_first_one():
    text = "try:\n    import x\nexcept ImportError:\n    x = None\nimport os\nf\n"
    result = rewrite(text, edit({"pattern": "f"}, "g", ("import a",)))
    assert "import a\nimport os\n" in result and result.startswith("try:\n    import x\n")


def test_edits_that_overlap_name_both():
    outer = edit({"pattern": "f($A)"}, "g($A)", patch="outer")
    inner = edit({"pattern": "x.y"}, "z", patch="inner")
    with pytest.raises(PatchFault, match="outer#1 and inner#1") as fault:
        rewrite("f(x.y)\n", outer, inner)
    assert "line 1" in fault.value.message


def test_edits_that_touch_do_not_overlap():
    left, right = edit({"pattern": "f"}, "g", patch="left"), edit({"pattern": "x"}, "z", patch="right")
    assert rewrite("f+x\n", left, right) == "g+z\n"


def test_rules_see_the_file_before_any_patch():
    first = edit({"pattern": "f"}, "g", patch="first")
    second = edit({"pattern": "g"}, "h", patch="second")
    assert rewrite("f + g\n", first, second) == "g + h\n"


@pytest.mark.parametrize("rule", [{"pattern_": "x"}, {"kind": "no_such_kind"}, {"regex": "("}])
def test_a_rule_that_ast_grep_does_not_take(rule):
    with pytest.raises(PatchFault, match="ast-grep") as fault:
        rewrite("f\n", edit(rule, "g"))
    assert fault.value.patch == "a-patch" and "Stack" not in fault.value.message


def test_a_pattern_over_several_lines_matches_crlf_too():
    one = edit({"pattern": "if a:\n    b"}, "c")
    assert rewrite("if a:\r\n    b\r\n", one) == "c\r\n"
