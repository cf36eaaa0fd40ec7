"""The one glossary (docs/glossary.md, installed with the package), for pages and people."""

import re
from dataclasses import dataclass

from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import shipped

TERM = re.compile(r"^(?:- )?\*\*(?P<name>.+?)\*\*(?P<more>[^:]*): (?P<text>.+)$")
LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


@dataclass(frozen=True)
class Term:
    """A word and what it means, without the marks of Markdown."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """What it may be looked up by: "ε (epsilon)" by both, "B, M, E" by each."""
        return [word for word in re.split(r"[^\w./:]+", self.name.lower()) if word]


def glossary(*words: str) -> list[Term]:
    """What these words mean; without any, all terms in the order of the document."""
    terms: list[Term] = []
    for word in words:
        matches = look_up(word)
        if not matches:
            raise UserError(f"the glossary does not know {word!r}; dpfp glossary shows all words")
        terms += [term for term in matches if term not in terms]
    return terms if words else _all_terms()


def _all_terms() -> list[Term]:
    source = (shipped("docs") / "glossary.md").read_text(encoding="utf-8")
    terms: list[Term] = []
    for block in re.split(r"\n\n|\n(?=- )", source):
        match = TERM.match(" ".join(block.split()))
        if match:
            terms.append(Term(_plain(match["name"] + match["more"]), _plain(match["text"])))
    return terms


def look_up(word: str) -> list[Term]:
    """The terms that `word` names; where none does, those that speak of it."""
    asked = word.lower().replace("_", "-").strip()
    terms = _all_terms()
    named = [t for t in terms if asked in t.words or asked == t.name.lower()]
    parts = [t for t in terms if asked in t.name.lower().replace("_", "-")]
    return named or parts or [t for t in terms if asked in t.text.lower().replace("_", "-")]


def _plain(text: str) -> str:
    return LINK.sub(r"\1", text).replace("`", "").replace("**", "").strip()
