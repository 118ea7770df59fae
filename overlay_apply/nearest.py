"""Where an edit that drifted may belong now: the nearest places in a tree, and what became of the names it anchors on."""

from __future__ import annotations

import copy
import difflib
import keyword
import re
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Iterable, Iterator, List, Optional

from .errors import Drift
from .patches import Edit, Rule
from .rewrite import Source

MOST = 5  # candidates, or names, that are shown of each kind
_CLOSE = 0.6  # difflib's measure, from 0 to 1
_ONE_NAME = re.compile(r"\^\(?([A-Za-z_][\w|]*)\)?\$")
_IDENTIFIER = re.compile(r"(?<![\w$])[A-Za-z_]\w+")
_DEFINITIONS = {"rule": {"any": [{"kind": "class_definition"}, {"kind": "function_definition"}]}}
_CORE = {"pattern", "kind", "regex"}


@dataclass
class Tree:
    """A tree's original sources, each parsed at most once."""

    read: Callable[[str], Optional[bytes]]
    files: List[str]
    """All Python files, by path below the package."""
    _sources: dict = field(default_factory=dict)

    def source(self, file: str) -> Optional[Source]:
        """Return a file, or None if it is not there or no text."""
        if file not in self._sources:
            data = self.read(file)
            try:
                self._sources[file] = None if data is None else Source(data, file)
            except Drift:
                self._sources[file] = None
        return self._sources[file]

    def holding(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the files that hold all of some words."""
        wanted = [re.compile(rf"\b{re.escape(name)}\b".encode()) for name in names]
        for file in self.files if wanted else ():
            data = self.read(file) or b""
            if all(word.search(data) for word in wanted):
                yield file


def nearest(edit: Edit, tree: Tree) -> dict:
    """Return {candidates, names} for an edit that does not fit.

    A candidate is {file, line, scope, text, how}: a place that the rule matches once it is loosened as `how` says. A name is
    {name, near, elsewhere}: one that the rule anchors on and the file has no longer, names like it, and files that define it.
    """
    candidates = list(_candidates(edit, tree))
    return {"candidates": candidates[:MOST], "names": _names(edit, tree)}


def _candidates(edit: Edit, tree: Tree) -> Iterator[dict]:
    """Yield the places that the rule matches, loosened no more than it takes to match any; the edit's own file first."""
    own = edit.where.file
    rule = edit.where.config["rule"]
    others = [file for file in tree.holding(_words(rule) or _defined_names(rule)) if file != own]
    for how, loosened, wherever in _loosened(edit.where):
        found = [
            _place(node, file, how if file == own else f"{how}, in another file")
            for file in [own, *(others if wherever else ())]
            for node in _matches(replace(loosened, file=file), edit, tree)
        ]
        if found:
            yield from found
            return


def _matches(rule: Rule, edit: Edit, tree: Tree) -> list:
    source = tree.source(rule.file)
    return source.find(rule, edit.name) if source else []


def _loosened(where: Rule) -> Iterator[tuple]:
    """Yield (how, rule, whether it still says enough to look in other files): the rule itself, then with ever fewer
    conditions, those on the farthest surroundings first."""
    yield "as it is", where, True
    config = copy.deepcopy(where.config)
    dropped: List[str] = []
    while "inside" in config["rule"]:
        holder = config["rule"]
        while "inside" in holder["inside"]:
            holder = holder["inside"]
        dropped.insert(0, _described(holder.pop("inside")))
        says_enough = bool(_defined_names(config["rule"]))
        yield f"not inside {' inside '.join(dropped)}", Rule(where.file, copy.deepcopy(config)), says_enough
    core = {key: value for key, value in config["rule"].items() if key in _CORE}
    if core and core != config["rule"]:
        yield "anywhere, without its other conditions", Rule(where.file, {**config, "rule": core}), False


def _described(condition: Any) -> str:
    """Name a condition on the surroundings in a few words: its kind, and the names in it."""
    kind = str(condition.get("kind", "what it was in")).replace("_", " ")
    names = [*_defined_names({key: value for key, value in condition.items() if key != "inside"})]
    return " ".join([kind, *names])


def _place(node: Any, file: str, how: str) -> dict:
    text = node.text().splitlines()[0].strip()
    return {"file": file, "line": node.range().start.line + 1, "scope": _scope(node), "text": text[:100], "how": how}


def _scope(node: Any) -> str:
    """Return the names of the definitions around a node, outermost first; <module> for none."""
    around = [each for each in node.ancestors() if each.kind() in ("class_definition", "function_definition")]
    return ".".join(each.field("name").text() for each in reversed(around)) or "<module>"


def _names(edit: Edit, tree: Tree) -> list:
    """Return what became of the names that the rule anchors on, those that its file has no longer."""
    source, rule = tree.source(edit.where.file), edit.where.config["rule"]
    text = source.text if source else ""
    defined = [node.field("name").text() for node in source.find(Rule(edit.where.file, _DEFINITIONS), edit.name)] if source else []
    words = sorted(set(_IDENTIFIER.findall(text)))
    rows = [_name(name, defined, tree) for name in _defined_names(rule) if name not in defined]
    told = {row["name"] for row in rows}
    rows += [_name(word, words, tree) for word in _words(rule) if word not in told and word not in words]
    return rows[:MOST]


def _name(name: str, there: List[str], tree: Tree) -> dict:
    close = difflib.get_close_matches(name, dict.fromkeys(there), MOST, _CLOSE)
    near = list(dict.fromkeys([*close, *(other for other in there if name.lower() in other.lower())]))[:MOST]
    definition = re.compile(rf"^\s*(?:class|(?:async )?def) {re.escape(name)}\b".encode(), re.MULTILINE)
    elsewhere = [file for file in tree.files if definition.search(tree.read(file) or b"")]
    return {"name": name, "near": near, "elsewhere": elsewhere[:MOST]}


def _defined_names(rule: Any) -> List[str]:
    """Return the names of definitions that a rule asks for by `has: {field: name, regex: ^NAME$}`."""
    names: List[str] = []
    for condition in _conditions(rule):
        match = _ONE_NAME.fullmatch(str(condition.get("regex", ""))) if condition.get("field") == "name" else None
        names += match[1].split("|") if match else []
    return list(dict.fromkeys(names))


def _words(rule: Any) -> List[str]:
    """Return the identifiers in a rule's patterns, without metavariables and keywords."""
    patterns = [condition.get("pattern", "") for condition in _conditions(rule)]
    texts = [pattern.get("context", "") if isinstance(pattern, dict) else pattern for pattern in patterns]
    words = (word for text in texts for word in _IDENTIFIER.findall(text))
    return [word for word in dict.fromkeys(words) if not keyword.iskeyword(word) and word != "self"]


def _conditions(rule: Any) -> Iterator[dict]:
    """Yield every mapping in a rule, outermost first."""
    if isinstance(rule, dict):
        yield rule
    for part in rule.values() if isinstance(rule, dict) else rule if isinstance(rule, list) else ():
        yield from _conditions(part)
