"""One Python source file: find what rules match, put replacements in, keep everything else byte for byte."""

from __future__ import annotations

import bisect
import codecs
import re
import warnings
from dataclasses import dataclass
from typing import Any, List

from .errors import Drift, Interfered, PatchFault
from .names import undefined
from .patches import Edit, Rule

_WORD = re.compile(r"[A-Za-z_]\w*")
_METAVARIABLE = re.compile(r"\$(\$\$|\$)?([A-Z_][A-Z0-9_]*)")


@dataclass(frozen=True)
class Splice:
    """Text that replaces the characters from start to end. `owner` names the edit."""

    start: int
    end: int
    text: str
    owner: str


class Source:
    """A source file as it was before any patch.

    Rules see the text with LF line ends and without a byte order mark, so that they match alike
    whatever the file's line ends are; positions are mapped back to the file's own text.
    """

    def __init__(self, data: bytes, file: str):
        """Decode a file. Raises Drift if it is not UTF-8."""
        self.file = file
        self._mark = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
        try:
            self.text = data[len(self._mark) :].decode("utf-8")
        except UnicodeDecodeError as fault:
            raise Drift(
                f"not UTF-8: {fault}",
                file=file,
                expected="UTF-8 source",
                found="other bytes",
                remedy="restore the file; nothing was written",
            ) from None
        self._plain = self.text.replace("\r\n", "\n")
        self._crlf = _crlf_positions(self.text)
        self._parsed = None

    @property
    def _root(self) -> Any:
        if self._parsed is None:
            from ast_grep_py import SgRoot

            self._parsed = SgRoot(self._plain, "python").root()
        return self._parsed

    def find(self, rule: Rule, owner: str) -> list:
        """Return the nodes a rule matches. Raises PatchFault if it is not a valid rule."""
        try:
            return self._root.find_all(dict(rule.config))
        except Exception as fault:  # the binding raises bare Exception and RuntimeError
            raise PatchFault(
                f"ast-grep does not take the rule: {str(fault).split('Stack backtrace')[0].strip()}",
                patch=owner.split("#")[0],
                file=rule.file,
                remedy="correct the rule",
            ) from None

    def splice(self, node: Any, edit: Edit) -> Splice:
        """Return the replacement of a matched node by an edit's fix."""
        start, end = self._span(node, node)
        line_start = self.text.rfind("\n", 0, start) + 1
        line = self.text[line_start:start]
        indent = line[: len(line) - len(line.lstrip())]
        first, *rest = edit.fix.split("\n")
        lines = [first] + [indent + line if line.strip() else "" for line in rest]
        template = self._line_end(start).join(lines)
        text = _METAVARIABLE.sub(lambda name: self._captured(node, name, edit), template)
        return Splice(start, end, text, edit.name)

    def import_splice(self, lines: list, owner: str) -> Splice:
        """Return the insertion of import lines before the first import that is not from __future__."""
        at = self._before_first_import()
        end = self._line_end(at)
        present = set(self._plain.split("\n"))
        text = "".join(line + end for line in lines if line not in present)
        if text and at > 0 and self.text[at - 1] != "\n":  # after a last line without a line end
            text = end + text
        return Splice(at, at, text, owner)

    def render(self, splices: list) -> bytes:
        """Return the file with replacements put in, compiled as a check.

        Raises PatchFault if two edits overlap or the result is not valid Python, Interfered if the file was not before either.
        """
        ordered = sorted(splices, key=lambda splice: (splice.start, splice.end))
        for left, right in zip(ordered, ordered[1:]):
            if right.start < left.end:
                self._overlap(left, right)
        pieces, position = [], 0
        for splice in ordered:
            pieces += [self.text[position : splice.start], splice.text]
            position = splice.end
        data = self._mark + "".join(pieces + [self.text[position:]]).encode("utf-8")
        try:
            check_compiles(data, self.file, sorted({splice.owner for splice in splices}))
        except PatchFault:
            self._check_compiled_before()
            raise
        return data

    def _check_compiled_before(self) -> None:
        try:
            check_compiles(self._mark + self.text.encode("utf-8"), self.file, [])
        except PatchFault as fault:
            raise Interfered(
                "a file to patch is not valid Python as it is; nothing was written",
                file=self.file,
                expected="source that compiles",
                found=fault.found,
                remedy="mend it (or `git checkout` it), then run again",
            ) from None

    def check_names(self, data: bytes, splices: list) -> None:
        """Raise PatchFault if the rendered file names what the original's surroundings do not have.

        Python itself would find out when it runs.
        """
        new = {name for splice in splices for name in _WORD.findall(splice.text)}
        if not new:
            return
        unknown = sorted(undefined(data, self.file) - undefined(self._mark + self.text.encode("utf-8"), self.file))
        if unknown:
            owner = next((splice.owner for splice in splices if unknown[0] in _WORD.findall(splice.text)), splices[0].owner)
            raise PatchFault(
                f"{owner} names what is not defined there: {', '.join(unknown)}",
                patch=owner.split("#")[0],
                file=self.file,
                expected="names that the place has",
                found=", ".join(unknown),
                remedy="write the fix for what this place has; nothing was written",
            )

    def _span(self, first: Any, last: Any) -> tuple:
        return self._own(first.range().start.index), self._own(last.range().end.index)

    def _own(self, position: int) -> int:
        """Map a position in the LF text to one in the file's own text."""
        return position + bisect.bisect_left(self._crlf, position)

    def _line_end(self, position: int) -> str:
        """Return the line end of the line at a position (or of the last line that has one)."""
        newline = self.text.find("\n", position)
        if newline < 0:
            newline = self.text.rfind("\n", 0, position)
        return "\r\n" if newline > 0 and self.text[newline - 1] == "\r" else "\n"

    def _captured(self, node: Any, name: re.Match, edit: Edit) -> str:
        """Return the source text a metavariable of a fix stands for. Raises PatchFault."""
        many = name[1] == "$$"
        nodes = node.get_multiple_matches(name[2]) if many else [node.get_match(name[2])]
        if nodes and nodes[0] is None:
            raise PatchFault(
                f"the fix names {name[0]}, which the rule does not capture",
                patch=edit.patch,
                file=self.file,
                remedy="capture it in the rule, or take it out of the fix",
            )
        if not nodes:
            return ""
        start, end = self._span(nodes[0], nodes[-1])
        return self.text[start:end]

    def _before_first_import(self) -> int:
        """Return where imports go: before the first ordinary one, else after docstring and __future__."""
        after = 0
        for node in self._root.children():
            kind = node.kind()
            if kind in ("import_statement", "import_from_statement"):
                return self._own(node.range().start.index)
            docstring = kind == "expression_statement" and node.text().endswith(('"', "'"))
            if kind == "future_import_statement" or (docstring and after == 0):
                end = self._plain.find("\n", node.range().end.index)
                after = len(self.text) if end < 0 else self._own(end + 1)
        return after

    def _overlap(self, left: Splice, right: Splice) -> None:
        line = self.text.count("\n", 0, right.start) + 1
        raise PatchFault(
            f"two edits overlap at line {line}: {left.owner} and {right.owner}",
            patch=right.owner.split("#")[0],
            file=self.file,
            expected="edits that replace different text",
            found=f"{left.owner} and {right.owner}",
            remedy="replace a smaller node in one of them",
        )


def check_compiles(data: bytes, file: str, owners: list) -> None:
    """Raise PatchFault unless some bytes are valid Python. `owners` are the edits that made them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as fault:
        raise PatchFault(
            f"the result is not valid Python: {fault}",
            patch=", ".join(owners) or None,
            file=file,
            expected="source that compiles",
            found=str(fault),
            remedy="correct the fix; nothing was written",
        ) from None


def _crlf_positions(text: str) -> list:
    """Return where, in the text with LF line ends, the line ends are that were CRLF."""
    positions: List[int] = []
    found = text.find("\r\n")
    while found >= 0:
        positions.append(found - len(positions))
        found = text.find("\r\n", found + 2)
    return positions
