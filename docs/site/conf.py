"""The documents as a site: `make docs` builds it into build/site, with warnings as errors.

Sphinx, because it reads the Markdown that GitHub shows as well (MyST), makes the reference from the
docstrings, and will be kept up: mkdocs-material, which was tried first, ends in May 2027.
"""

import inspect
import re
from typing import Any

from sphinx.application import Sphinx

project = "dpfp-ray"
author = "The dpfp-ray maintainers"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "index"
exclude_patterns = ["cluster/*", "site/*", "README.md"]
html_theme = "furo"
html_title = "dpfp-ray"
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
default_role = "code"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
# Links out of docs/ lead into the repository; tests/docs/test_links.py checks them.
suppress_warnings = ["myst.xref_missing", "myst.header"]

ARGUMENT = re.compile(r"^(\*{0,2}\w+(?:, \w+)*) +(\S.*)$")


def list_arguments(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """The arguments in our docstrings, `name   what it is` a line, as fields that Sphinx shows."""
    if what not in ("function", "class"):
        return
    names = set(inspect.signature(obj).parameters)
    written: list[str] = []
    inside = False
    for line in lines:
        match = ARGUMENT.match(line)
        if match and set(match[1].split(", ")) <= names and (inside or "   " in line):
            written += ([] if inside else [""]) + [f":param {match[1]}: {match[2].strip()}"]
            inside = True
        elif inside and line.startswith(" "):
            written.append(f"    {line.strip()}")
        else:
            written += ([""] if inside and line else []) + [line]
            inside = False
    lines[:] = written


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", list_arguments)
