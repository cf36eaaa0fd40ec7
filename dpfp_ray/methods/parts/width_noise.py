"""How much noise rows of a width bear, by formulas alone: `representation: auto` reads these.

Rows are taken to have norm 1 and to be spread evenly over k directions, so the covariance Σ is I/k:
no data are looked at. 1 is as much noise as signal in this picture: a rule, not a measured optimum.
"""

import math


def of_minimum(sigma: float, width: int, records: int) -> float:
    """For heads that minimise a loss whose gradient has noise of deviation σ: `objpert`, DP-SGD.

    The noise b moves the minimum by H⁻¹b, with a Hessian H of about nΣ = nI/k, and so a score by
    σk/n: noise grows with the width itself.
    """
    return sigma * width / records


def of_second_moment(sigma: float, share: float, width: int, records: int) -> float:
    """For heads that invert a noisy second moment: `moments`.

    Its noise has the spectral radius 2τ√k, τ = σ/√(2·share) in an entry (Wigner's semicircle law),
    where the n records' own is n/k in every direction: noise grows with the width to the power 3/2.
    """
    return 2 * sigma / math.sqrt(2 * share) * width**1.5 / records
