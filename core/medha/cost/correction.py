"""Corrects predicted step times by measured ones: a factor for decodes and a factor for prefills.

One factor for all steps cannot correct a profile that is wrong for decodes in another way than for prefills. So
each part of a step has its own. A step that holds both moves each factor by that part's share of its time.

Decodes that verify guesses compute more rows than others, and a profile may be wrong for these in a third way. They have a
factor beside that of decodes. A step that verifies moves it alone, so that what decodes take without guesses is not
blurred by those with guesses. It returns to 1 while nothing is verified, because it is then worth another attempt.

A machine that others use too sometimes lets a step wait for long. The factors therefore follow the *logarithm*
of observed over predicted time, and no step counts for more than `_LARGEST_ERROR`. Half of the steps then take
less than predicted, however long the others take. Old steps are forgotten: each new one has the same weight,
except that the first ones have more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, inf, log

_WEIGHT = 0.15  # of one step: about 7 steps of a kind to follow a change
_LARGEST_ERROR = 0.5  # of log(observed / predicted): a step that takes 1.65 times as long counts in full
_SMALLEST_ERROR = 1e-9  # below it: rounding, since two sums of one step's parts may differ in the last digit
_FORGETTING = 1 / 512
"""Share of the logarithm of the factor of verified rows that each step of decodes forgets which verifies none."""
_SMALLEST, _LARGEST = 0.25, 4.0  # factors: beyond them the profile is wrong, and no factor helps


@dataclass(slots=True)  # not frozen, for speed: every step makes two
class PartedSeconds:
    """The predicted time of a step before correction, in seconds."""

    whole: float = 0.0
    decodes: float = 0.0  # of its decodes alone, without guesses; what the prefills add is the rest
    verified: float = 0.0  # that the guesses add which it verifies


@dataclass(frozen=True, slots=True)
class Correction:
    """The factors, and how much of each kind has been measured. Immutable: `after` returns the next one."""

    decode: float = 1.0
    prefill: float = 1.0
    decodes_seen: float = 0.0  # in steps; a step with both kinds counts for each by its share
    prefills_seen: float = 0.0
    verified: float = 1.0  # of rows of guesses, times `decode`

    def seconds(self, predicted: PartedSeconds) -> float:
        """Return the corrected time; exactly `predicted.whole` while all three factors are 1."""
        seconds = self.of(predicted.whole, predicted.decodes)
        if predicted.verified:
            seconds += (self.decode * self.verified - self.prefill) * predicted.verified
        return seconds

    def of(self, whole: float, decodes: float) -> float:
        """Return `seconds` of a step without guesses, from its parts: the packer asks dozens of times for each step."""
        return self.prefill * whole + (self.decode - self.prefill) * decodes

    def after(self, predicted: PartedSeconds, observed_seconds: float) -> Correction:
        """Return the correction after a step that took `observed_seconds`; the same if that is no time."""
        expected_seconds = self.seconds(predicted)
        if expected_seconds <= 0 or observed_seconds <= 0:
            return self
        error = log(observed_seconds / expected_seconds)
        if abs(error) < _SMALLEST_ERROR:
            error = 0.0
        error = min(_LARGEST_ERROR, max(-_LARGEST_ERROR, error))
        if predicted.verified:
            share = min(1.0, self.decode * self.verified * predicted.verified / expected_seconds)
            return replace(self, verified=_moved(self.verified, error * share, inf))
        decode_share = min(1.0, self.decode * predicted.decodes / expected_seconds)
        decodes_seen = self.decodes_seen + decode_share
        prefills_seen = self.prefills_seen + (1 - decode_share)
        return Correction(
            _moved(self.decode, error * decode_share, decodes_seen),
            _moved(self.prefill, error * (1 - decode_share), prefills_seen),
            decodes_seen,
            prefills_seen,
            self.verified if self.verified == 1.0 else self.verified ** (1 - _FORGETTING * decode_share),
        )


def _moved(factor: float, error: float, seen: float) -> float:
    """Return a factor after a step with this share of its error; `seen` counts the step."""
    if error == 0:
        return factor
    weight = max(_WEIGHT, 1 / max(seen, 1.0))
    return min(_LARGEST, max(_SMALLEST, factor * exp(weight * error)))
