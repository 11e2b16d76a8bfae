"""Bins of histograms: powers of two of either sign, the same everywhere, so that the counts of several ranks add up."""

MIN_EXPONENT, MAX_EXPONENT = -32, 16
SIDE = MAX_EXPONENT - MIN_EXPONENT + 1
"""Number of bins of one sign. A value of the binary exponent e, from 2**(e-1) to below 2**e, is in bin e; greater ones
are in the last bin."""
BINS = 2 * SIDE + 1
"""Number of all bins. The middle one counts zero and values close to it. Counts of non-finite values follow."""
_SIZES = [2.0**exponent for exponent in range(MIN_EXPONENT - 1, MAX_EXPONENT + 1)]
EDGES = (*(-size for size in reversed(_SIZES)), *_SIZES)
