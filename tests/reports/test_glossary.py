"""One glossary: for the command line, for pages, and installed with the package."""

import pytest

from dpfp_ray.cli.main import main
from dpfp_ray.reports.glossary import glossary, look_up


@pytest.mark.parametrize("word", ["nominal", "carriers", "zero_out", "ε", "epsilon", "pld", "M"])
def test_a_word_is_found_by_what_people_type(word: str) -> None:
    assert 1 <= len(look_up(word)) <= 2


def test_a_word_that_is_only_spoken_of_leads_to_where() -> None:
    assert "Scope" in [term.name for term in look_up("lora")]


def test_terms_have_no_marks_of_markdown() -> None:
    terms = glossary()
    assert len(terms) > 30
    assert not [term for term in terms if "**" in term.text or "](" in term.text]


def test_every_help_names_the_glossary(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["train", "--help"], ["results", "--help"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "dpfp glossary [WORD]" in capsys.readouterr().out


def test_an_unknown_word_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["glossary", "zebra"]) == 2
    assert "does not know 'zebra'" in capsys.readouterr().err
