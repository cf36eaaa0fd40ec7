"""A linear head from words for the classes: what encoder and class names know by themselves.

m_c is the mean of the vectors of a few phrases for class c ("a great movie"), scaled to norm 1, and

    logit_c(x) = κ ⟨u(x), m_c − m⟩,     m the mean of all m_c,

with u(x) = h(x)/C the bounded vector of a text. No record is read, so this head θ₀ is public: the
method `public` gives it as it is, and other heads may start from it (`start: words`).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpfp_ray.data import Split
from dpfp_ray.methods.parts.one_release import LinearHead
from dpfp_ray.system.errors import UserError

# κ. At 60 a head on 600 records is nowhere worse than the words alone, at 20 one on 9,568 records
SHARPNESS = 40.0
BETWEEN = "|"  # the phrases of a class
# Of tasks whose class names alone say too little. They are words of ours: no record was looked at.
PHRASES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("negative", "positive"): (
        "a terrible movie|a boring film|bad acting and a dull story|i hated it|a waste of time",
        "a great movie|a wonderful film|good acting and a gripping story|i loved it|a pleasure",
    )
}


def phrases_of(label_words: Sequence[str] | None, label_names: Sequence[str]) -> Split:
    """The phrases as records, labelled by the class that they stand for.

    `label_words` has one entry a class, its phrases separated by "|"; without any, class names are
    the phrases, but for tasks of which `PHRASES` knows more.
    """
    names = tuple(name.lower() for name in label_names)
    entries = label_words or PHRASES.get(names) or tuple(n.replace("_", " ") for n in names)
    if len(entries) != len(names):
        raise UserError(
            f"label_words has {len(entries)} entries for {len(names)} classes "
            f"({', '.join(label_names)}); give one for each class, in this order"
        )
    texts, labels = [], []
    for label, entry in enumerate(entries):
        phrases = [phrase.strip() for phrase in entry.split(BETWEEN)]
        if not all(phrases):
            raise UserError(f"label_words has an empty phrase in {entry!r}; write words there")
        texts += phrases
        labels += [label] * len(phrases)
    return Split(texts, None, np.array(labels, dtype=np.int64))


def head_of_words(u: NDArray[np.float64], labels: NDArray[np.int64], classes: int) -> LinearHead:
    """θ₀ from the bounded vectors `u` of the phrases and the classes that they stand for."""
    means = np.stack([u[labels == c].mean(0) for c in range(classes)])
    means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    weight = SHARPNESS * (means - means.mean(0))
    return LinearHead(weight, np.zeros(classes))
