"""pass@k: how often at least one of k programs passes, from n >= k programs of each problem."""

from __future__ import annotations

import math
from collections.abc import Sequence

from xdlm.errors import UserError
from xdlm.evaluation.generation import Mean, mean


def pass_at_k(passed: Sequence[int], n: int, k: int) -> Mean:
    """The mean over problems of `1 - C(n - c, k)/C(n, k)`, where c of a problem's n programs passed.

    That is the share of all sets of k among the n that hold one which passed, so it is unbiased for any
    n >= k (`1 - (1 - c/n)^k` is too low). The standard error is that of a mean over problems: it covers the
    draws of the programs too, since problems are drawn independently.
    """
    if not 1 <= k <= n:
        raise UserError(f"pass@{k} needs at least {k} programs of a problem, and there are {n}")
    if not passed or not all(0 <= c <= n for c in passed):
        raise UserError(f"pass@k needs problems with 0 to {n} passed programs each")
    shares = [1 - math.comb(n - c, k) / math.comb(n, k) for c in passed]
    return mean(shares)
