"""How long does each worker need? A line per worker, ``t(b) = α + β·b``, fitted while training runs.

A worker whose memory holds no more than ``micro`` samples makes several passes, and α is the fixed part of each:
``t(b) = α·⌈b/micro⌉ + β·b``.

Recursive least squares on relative errors, all workers at once. Old data fade (FORGET); what is never excited again
keeps its estimate and only loses certainty, down to a floor (stabilised forgetting). A measurement far outside what
the line and its uncertainty allow is set aside as an outlier; a second one like it in a row is a real change of
speed: the line is scaled to it and the past forgotten at once. So it is when smaller errors all go one way: too many
for noise. Knows nothing of plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from omnilearn.control.problem import Floats, Ints
from omnilearn.errors import InfeasibleError

FORGET = 0.99
"""Weight of the past per measurement: a window of about 100. A plain change of speed does not wait for it (GATE)."""
PRIOR = 0.01
"""Information about α before anything is known, in measurements: α lies within half the step time of 0, noise is
some 5%, and (5% / 50%)² = 0.01."""
NOISE_FLOOR, NOISE_START = 0.02, 0.05
GATE = 4.0
"""An outlier is further away than so many standard deviations…"""
GATE_FLOOR = 0.25
"""… and further than this fraction of the step time."""
LEAP = 2.0
"""A batch that is so many times the one last measured."""
SAME_CHANGE = 1.5
"""Two outliers that differ by no more than this factor show the same change of speed; others are two outliers."""
RECENT = 0.6
"""Weight of the past in the average of recent errors, whose own standard deviation is then half that of one error."""
DRIFT, DRIFT_FLOOR = 1.25, 0.04
"""Errors go one way when their average is further from 0 than so many standard deviations of one, and than this…"""
KNOWN = 12
"""… of a line with so many measurements behind it: a newer one moves quickly enough without that."""
SHAPE = 0.1
"""After such a small change, what is still known of how α and β compare, in measurements: it may be a false alarm."""
SURE = 0.25
"""A predicted time may be off by this fraction (one standard deviation) to be told to the user."""
ALIKE = 2.0
"""Workers whose times differ by less than so many standard deviations are taken for equals…"""
FAR = 0.15
"""… and by less than this fraction, however little is known of them just after a change…"""
SHAPELY, GUESS = 0.25, 0.25
"""A line's shape is known when its fixed part is, to this fraction of the step time (one standard deviation). One that
is guessed from the others' may be off by this fraction of it."""
MANY = 256
"""… where there are no more than this: it takes a look at each."""
FLAT = 1e-3
"""β·b is at least this fraction of the step time: a line never falls and is never quite flat."""


def passes(batches: Floats, micro: Ints | None) -> Floats | float:
    """How many times the fixed part has to be paid.

    >>> passes(np.array([8.0, 9.0, 0.0]), np.array([4, 4, 4])).tolist()
    [2.0, 3.0, 1.0]
    """
    return 1.0 if micro is None else np.maximum(np.ceil(batches / micro), 1.0)


@dataclass(frozen=True)
class Curves:
    """One fitted line per worker. Arrays, never changed in place; ``observe`` returns new curves."""

    alpha: Floats
    beta: Floats
    info: Floats  # the 2×2 information matrices: rows αα, αβ, ββ
    noise: Floats  # relative standard deviation of one measurement
    suspect: Floats  # last measurement over its prediction if it was an outlier, else 1
    bias: Floats  # average of the recent relative errors
    seen: Ints  # measurements taken in; 0: the line is a guess from the worker's nominal speed
    changes: Ints  # how often the worker's speed changed
    at: Floats  # the batch last measured
    micro: Ints | None = None  # the problem's

    @staticmethod
    def guess(speeds: npt.ArrayLike) -> Curves:
        """Lines before the first measurement: proportional to the batch, in the ratio of nominal speeds."""
        speed = np.asarray(speeds, dtype=np.float64)
        n = len(speed)
        return Curves(
            alpha=np.zeros(n),
            beta=1 / speed,
            info=np.zeros((3, n)),
            noise=np.full(n, NOISE_START),
            suspect=np.ones(n),
            bias=np.zeros(n),
            seen=np.zeros(n, dtype=np.int64),
            changes=np.zeros(n, dtype=np.int64),
            at=np.zeros(n),
        )

    def times(self, batches: npt.ArrayLike) -> Floats:
        """Predicted seconds for these batches (for a batch of 0, the fixed part)."""
        b = np.asarray(batches, dtype=np.float64)
        return self.alpha * passes(b, self.micro) + self.beta * b

    def alpha_uncertainty(self, batches: npt.ArrayLike) -> Floats:
        """Standard deviation of α as a fraction of the step time at these batches (infinite: never measured)."""
        aa, ab, bb = self.info
        determinant = aa * bb - ab * ab
        variance = np.divide(bb, determinant, out=np.full_like(bb, np.inf), where=determinant > 0)
        return np.asarray(self.noise * np.sqrt(variance) / np.maximum(self.times(batches), 1e-300))

    def equal_shares(self, batch: int) -> float | None:
        """Seconds the slowest needs for an equal share of ``batch``; None where a line is not SURE there yet."""
        share = np.full(len(self.alpha), batch / len(self.alpha))
        times = self.times(share)
        return float(times.max()) if np.all(self.uncertainty(share) <= SURE * times) else None

    def uncertainty(self, batches: npt.ArrayLike) -> Floats:
        """Standard deviation of the predicted seconds, the more the further from what was measured (inf: never)."""
        b, (aa, ab, bb) = np.asarray(batches, dtype=np.float64), self.info
        fixed, determinant = passes(b, self.micro), aa * bb - ab * ab
        variance = np.divide(
            bb * fixed**2 - 2 * ab * fixed * b + aa * b**2,
            determinant,
            out=np.full_like(bb, np.inf),
            where=determinant > 0,
        )
        return np.asarray(np.maximum(self.noise, NOISE_START) * np.sqrt(np.maximum(variance, 0.0)))

    def doubt(self, batches: npt.ArrayLike) -> float:
        """The largest standard deviation of a predicted time at these batches, as a fraction of it."""
        on = np.asarray(batches) > 0
        return float((self.uncertainty(batches)[on] / self.times(batches)[on]).max())

    def pooled(self, batches: npt.ArrayLike) -> Curves:
        """Workers that cannot be told apart by what was measured at these batches get the mean of their lines.

        So noise does not move samples between equals, and each of them is known as well as all of them together.
        """
        b = np.asarray(batches, dtype=np.float64)
        on = np.flatnonzero((b > 0) & (self.seen > 0))
        if not 1 < len(on) <= MANY:
            return self
        times = self.times(b)
        pace, doubt = times[on] / b[on], np.maximum(self.uncertainty(b)[on] / times[on], 1e-9)
        lines = np.stack([np.ones(len(b)), b, self.alpha, self.beta])
        group: list[int] = []
        sums = np.zeros(4)  # over the group: of certainty, and weighted with it, of batch, α and β
        mean = lines.copy()
        for i in np.lexsort((b[on], pace)):
            k = on[i]
            own = lines[:, k] / doubt[i] ** 2
            if group:
                at = (sums + own)[1] / (sums + own)[0]
                theirs = (sums[2] + sums[3] * at) / sums[0]
                apart = abs((self.alpha[k] + self.beta[k] * at) / theirs - 1)
                # Far from what was measured lines meet by chance: equals have similar batches.
                far = min(ALIKE * np.sqrt(doubt[i] ** 2 + 1 / sums[0]), FAR)
                if apart > far or not 0.5 < b[k] / b[group[0]] < 2:
                    group, sums = [], np.zeros(4)
            group.append(k)
            sums = sums + own
            mean[:, group] = (sums / sums[0])[:, None]
        # A trace of their own is left: who gets the odd sample is decided by merit, not by position.
        _, _, alpha, beta = mean + 1e-6 * (lines - mean)
        return replace(self, alpha=alpha, beta=beta)

    def shaped(self) -> Curves:
        """Of a worker that was measured at about one batch only nobody knows how its time there splits into a fixed
        part and one that grows with the batch. The others' lines say what is likely; its time there stays."""
        at = np.maximum(self.at, 1.0)
        times, doubt = self.times(at), self.alpha_uncertainty(at)
        known = doubt < SHAPELY
        k = np.flatnonzero((self.seen > 0) & ~known)
        if not k.size or not known.any():
            return self
        weight = np.where(known, 1 / np.maximum(doubt, 1e-3) ** 2, 0.0)
        # So many samples take as long as the fixed part of those who know theirs.
        shape = weight @ (self.alpha / times) / (weight @ (self.beta / times))
        # The fixed part is slower or faster with the rest, or it is the same for all: what is less.
        often = np.broadcast_to(passes(at, self.micro), at.shape)[k]
        at, times, unsure = at[k], times[k], np.minimum(doubt[k], 1e9) * times[k]
        likely = np.minimum(times * shape / (shape * often + at), weight @ self.alpha / weight.sum())
        alpha, beta = self.alpha.copy(), self.beta.copy()
        alpha[k] += unsure**2 / (unsure**2 + (GUESS * likely) ** 2) * (likely - alpha[k])
        beta[k] = np.maximum(times - alpha[k] * often, FLAT * times) / at
        return replace(self, alpha=alpha, beta=beta)

    def scaled(self, factor: npt.ArrayLike) -> Curves:
        """Every time multiplied by ``factor`` (per worker), with what was known of the line's shape kept."""
        f = np.asarray(factor, dtype=np.float64)
        return replace(self, alpha=self.alpha * f, beta=self.beta * f, info=self.info / f**2)

    def observe(self, batches: npt.ArrayLike, seconds: npt.ArrayLike, *, leap: float = LEAP) -> Curves:
        """Take in one measurement per worker; a batch of 0 means there is none for that worker.

        With a batch ``leap`` times as large as before, that it took longer than expected is no change of speed.
        """
        b, t = np.asarray(batches, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
        measured = b > 0
        if b.shape != self.alpha.shape or t.shape != self.alpha.shape:
            raise InfeasibleError(f"{len(self.alpha)} workers need as many measurements, got {b.size} and {t.size}")
        if np.any(b < 0) or not np.all(np.isfinite(t[measured]) & (t[measured] > 0)):
            k = int(np.argmax((b < 0) | (measured & ~(np.isfinite(t) & (t > 0)))))
            raise InfeasibleError(
                f"worker {k}: a measurement needs a positive, finite time, got {t[k]} s for a batch of {b[k]:g}: "
                f"leave it out by giving batch 0"
            )
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            return self._fit(b, t, measured, leap)

    def _fit(self, b: Floats, t: Floats, measured: npt.NDArray[np.bool_], far: float) -> Curves:
        # Arrays are small, and what numpy is called for counts: what happens rarely is computed only when it does.
        first = measured & (self.seen == 0)
        if not measured.all():  # the rest is computed too, and left out below
            b, t = np.where(measured, b, 1.0), np.where(measured, t, 1.0)
        alpha, beta, beginning = self.alpha, self.beta, bool(first.any())
        if beginning:  # a first measurement sets the line: through it, and proportional to b
            alpha = np.where(first, 0.0, alpha)
            beta = np.where(first, t / np.maximum(b, 1), beta)
        fixed = passes(b, self.micro)
        predicted = alpha * fixed + beta * b
        one, x = fixed / predicted, b / predicted  # the regressors, on the scale of relative errors
        error = t / predicted - 1

        floor = PRIOR * one * one
        aa, ab, bb = np.where(first, np.stack([floor, 0 * floor, 0 * floor]), self.info) if beginning else self.info
        spread = (bb * one * one - 2 * ab * one * x + aa * x * x) / (aa * bb - ab * ab)
        spread = np.where(first | ~np.isfinite(spread), 0.0, np.maximum(spread, 0.0))
        deviation = self.noise * np.sqrt(1 + spread)
        # Slower than expected with a batch that is so many times as large as before: the line was too flat.
        leap = (b >= far * self.at) & (error > 0)
        outlier = measured & ~first & ~leap & (np.abs(error) > np.maximum(GATE * deviation, GATE_FLOOR))
        ratio = np.where(measured, t / predicted, 1.0)
        changed, inlier = outlier, measured
        if outlier.any():
            again = ratio / self.suspect
            alike = (again < SAME_CHANGE) & (again > 1 / SAME_CHANGE)
            changed = outlier & (self.suspect != 1) & ((ratio > 1) == (self.suspect > 1)) & alike
            inlier = measured & ~outlier

        # Ordinary measurements: recursive least squares with a floor under the information on α.
        aa = np.where(inlier, FORGET * aa + (1 - FORGET) * floor + one * one, aa)
        ab = np.where(inlier, FORGET * ab + one * x, ab)
        bb = np.where(inlier, FORGET * bb + x * x, bb)
        determinant = aa * bb - ab * ab
        step = np.where(inlier & ~first & (determinant > 0), error / determinant, 0.0)
        alpha = alpha + step * (bb * one - ab * x)
        beta = beta + step * (aa * x - ab * one)
        # Back inside α ≥ 0, β > 0 along the direction the data cares least about.
        least = FLAT * np.where(inlier, t, predicted) / np.maximum(b, 1)
        if (low := inlier & (alpha < 0)).any():
            beta = np.where(low, beta + ab * alpha / bb, beta)
            alpha = np.where(low, 0.0, alpha)
        if (flat := inlier & (beta < least)).any():
            alpha = np.where(flat, np.maximum(alpha + ab * (beta - least) / aa, 0.0), alpha)
            beta = np.where(flat, least, beta)

        # Errors that all go one way: a change too small to stand out from the noise at once.
        # At another batch than before it is the line's slope that is wrong, and least squares put that right.
        past = np.where(b == self.at, self.bias, 0.0)
        bias = np.where(inlier & ~first, RECENT * past + (1 - RECENT) * np.where(leap, 0.0, error), self.bias)
        drifted = inlier & (self.seen >= KNOWN) & (np.abs(bias) > np.maximum(DRIFT * deviation, DRIFT_FLOOR))
        info = np.stack([aa, ab, bb])
        changed = changed | drifted
        if changed.any():
            # The line scaled to the measurements that showed it, and as uncertain as after the first.
            shift = np.where(drifted, 1 + bias, np.where(changed, np.sqrt(ratio * self.suspect), 1.0))
            alpha = np.where(drifted, self.alpha, alpha) * shift
            beta = np.where(drifted, self.beta, beta) * shift
            now, prior = predicted * shift, np.where(drifted, SHAPE, PRIOR)
            # One measurement, and a little about the line's shape: it was scaled, α and β alike.
            one, x = fixed / now, b / now
            u, v = alpha * one, beta * x
            own = [(1 + prior * v * v) * one * one, (1 - prior * u * v) * one * x, (1 + prior * u * u) * x * x]
            info = np.where(changed, np.stack(own), info)
            bias = np.where(changed, 0.0, bias)
        calm = np.minimum(np.abs(error) / np.sqrt(1 + spread), GATE_FLOOR)
        noise = np.where(inlier & ~first, 0.9 * self.noise + 0.1 * 1.25 * calm, self.noise)
        return Curves(
            alpha=alpha,
            beta=beta,
            info=np.where(measured, info, self.info),
            noise=np.maximum(noise, NOISE_FLOOR),
            suspect=np.where(outlier & ~changed, ratio, np.where(measured, 1.0, self.suspect)),
            bias=bias,
            seen=self.seen + (inlier | changed),
            changes=self.changes + changed,
            at=np.where(inlier | changed, b, self.at),
            micro=self.micro,
        )

    def state_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name).tolist() for f in fields(self) if f.name != "micro"}

    @staticmethod
    def from_state(state: dict[str, Sequence[float]]) -> Curves:
        arrays: dict[str, Any] = {
            k: np.asarray(v, np.int64 if k in ("seen", "changes") else np.float64) for k, v in state.items()
        }
        return Curves(**arrays)
