"""The demo task: movie review sentences with human ratings, fetched once from PyPI.

The source distribution of vaderSentiment 3.3.2 (MIT; Hutto & Gilbert 2014) carries 10,605 sentences
of movie reviews with the mean of 20 people's ratings; the label is the sign of the mean. The
reviews are those SST-2 was made from: 680 of the sentences are in SST-2's dev set. Never mix the
two, and do not report SST-2 scores of a model that was trained on the demo.
"""

import hashlib
import io
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dpfp_ray.system.cache import cache_dir, pip_download, sha256_of
from dpfp_ray.system.errors import UserError
from dpfp_ray.system.whole_files import PRIVATE, private_folder, whole_file

REQUIREMENT = "vaderSentiment==3.3.2"
SDIST = "vaderSentiment-3.3.2.tar.gz"
SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
MEMBER = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"

DEMO_LABELS = ("negative", "positive")
DEMO_COUNTS = (5_326, 5_242)
MADE_UP = "made_up"  # the user column of persons that do not exist
DEMO_PERSONS = 2_640  # four rows each on average
DEMO_DEV_SHARE = 0.0976  # of these 10,568 rows: 1,000 for dev, and D = 9,568


def demo_rows() -> tuple[list[str], npt.NDArray[np.int64]]:
    """All 10,568 texts and labels (0 negative, 1 positive); the 37 rated exactly 0 are dropped."""
    texts: list[str] = []
    labels: list[int] = []
    for line in _member(demo_archive()).decode("utf-8").split("\n"):
        _, rating, text = line.rstrip("\r").split("\t")
        if float(rating) != 0:
            texts.append(text)
            labels.append(int(float(rating) > 0))
    counts = tuple(np.bincount(labels, minlength=2).tolist())
    if counts != DEMO_COUNTS:
        raise RuntimeError(f"demo data: {counts} rows by class, expected {DEMO_COUNTS}")
    return texts, np.array(labels, dtype=np.int64)


def made_up_persons(texts: list[str]) -> list[str]:
    """A person for each row, by a hash of its text: half have 2 to 5 rows, one has 57.

    The demo's sentences have no authors. These are for tests and for a first try of a user column;
    real people's records are more alike than rows that chance puts together.
    """
    names = []
    for text in texts:
        digest = hashlib.blake2b(text.strip().encode(), digest_size=8, key=b"made-up persons")
        share = int.from_bytes(digest.digest(), "little") / 2**64
        names.append(f"person {int(DEMO_PERSONS * share**1.5)}")
    return names


def demo_archive() -> Path:
    """The checked source distribution in the cache, downloaded if it is not there.

    It is opened only after its hash was found right, and it gets its name in the cache only then:
    an interrupted download leaves nothing behind that could be taken for the file.
    """
    archive = cache_dir() / "demo" / SDIST
    if sha256_of(archive) == SHA256:
        return archive
    fix = f"connect to a package index, or put {SDIST} into {archive.parent}"
    try:
        private_folder(archive.parent)
        with tempfile.TemporaryDirectory(prefix="dpfp-demo-") as folder:
            source = ("--no-binary", "vaderSentiment")
            fetched = pip_download(REQUIREMENT, SHA256, Path(folder), "demo data", *source, fix=fix)
            with whole_file(archive, PRIVATE) as file:
                file.write(fetched.read_bytes())
    except OSError as error:
        raise UserError(
            f"demo data: cannot write to {archive.parent} ({error.strerror or error}); "
            f"set DPFP_CACHE to a folder with room"
        ) from error
    return archive


def _member(archive: Path) -> bytes:
    """The ratings file, out of the archive inside the archive; nothing is unpacked to disk."""
    content = archive.read_bytes()
    for name in (INNER, MEMBER):
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            member = tar.extractfile(name)
            if member is None:
                raise RuntimeError(f"demo data: {name} is not a file")
            content = member.read()
    return content
