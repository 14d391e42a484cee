"""An audit in one run: canaries that are in the data or not, and what their scores tell, against a privacy profile.

Each canary changes one coordinate. Its score is the sum of this coordinate over all releases. A mechanism with profile
delta(eps) has P(in a set | in) <= exp(eps) * P(in the set | out) + delta(eps), and the same with in and out exchanged.
"""

import math

import numpy as np
import torch
from scipy.special import betaincinv, ndtr
from torch import nn

from torchzero_clip import ConstantFlatClipper, PrivateGradientClipper

EPSILONS = np.linspace(-4, 8, 121)
MISTAKE = 1e-3  # the most often that a right mechanism may be called wrong


def gaussian_profile(noise_multiplier):
    """The deltas of one release of all samples, for add or remove one: Balle and Wang, 2018."""
    half, slope = 1 / (2 * noise_multiplier), EPSILONS * noise_multiplier
    return ndtr(half - slope) - np.exp(EPSILONS) * ndtr(-half - slope)


def scores(seed, *, canaries=3000, noise_multiplier=1.0, rate=1.0, steps=1, told=1.0, twice=False):
    """The scores of canaries inside and outside of the data.

    Args:
        seed: Of the draws and of the noise.
        canaries: How many.
        noise_multiplier: Of the profile.
        rate: The probability that a canary is drawn, if it is inside.
        steps: The number of releases.
        told: The noise is smaller than the profile says by this factor.
        twice: Pass each sample twice.
    """
    generator = torch.Generator().manual_seed(seed)
    inside = torch.rand(canaries, generator=generator) < 0.5
    model = nn.Linear(canaries, 1, bias=False)
    nn.init.zeros_(model.weight)
    clipper = PrivateGradientClipper(
        model,
        ConstantFlatClipper(1.0),
        noise_multiplier=noise_multiplier / told,
        expected_batch_size=1.0,
        generator=torch.Generator().manual_seed(seed + 1_000_000),
    )
    found = torch.zeros(canaries)
    for _ in range(steps):
        drawn = (inside & (torch.rand(canaries, generator=generator) < rate)).nonzero()[:, 0]
        x = torch.zeros(len(drawn), canaries)
        x[torch.arange(len(drawn)), drawn] = 100.0
        for _ in range(1 + twice):
            clipper.backward(model(x)[:, 0])
        clipper.pre_step()
        found += model.weight.grad[0]
    return found[inside].numpy(), found[~inside].numpy()


def alarm(inside, outside, deltas):
    """True if the scores are impossible for a mechanism with these deltas, but for one mistake in a thousand runs."""
    thresholds = np.quantile(np.concatenate([inside, outside]), np.linspace(0.02, 0.98, 25))
    tests = [(inside > t, outside > t) for t in thresholds] + [(inside <= t, outside <= t) for t in thresholds]
    tests += [(other, one) for one, other in tests]
    each = MISTAKE / (2 * len(tests))
    return any((_lower(one, each) - np.exp(EPSILONS) * _upper(other, each) - deltas).max() > 0 for one, other in tests)


def _lower(hits, mistake):
    """The bound of Clopper and Pearson for a probability, from below."""
    return betaincinv(hits.sum(), len(hits) - hits.sum() + 1, mistake) if hits.any() else 0.0


def _upper(hits, mistake):
    return 1.0 if hits.all() else betaincinv(hits.sum() + 1, len(hits) - hits.sum(), 1 - mistake)


def accounted_profile(noise_multiplier, rate, steps):
    """The deltas of releases of samples drawn at a rate, by an accountant with privacy loss distributions."""
    from dp_accounting import dp_event
    from dp_accounting.pld import pld_privacy_accountant

    accountant = pld_privacy_accountant.PLDAccountant()
    release = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise_multiplier))
    accountant.compose(dp_event.SelfComposedDpEvent(release, steps))
    # for add or remove one, the profile at -eps follows from that at eps
    positive = {eps: accountant.get_delta(eps) for eps in np.abs(EPSILONS)}
    return np.array(
        [positive[eps] if eps >= 0 else 1 - math.exp(eps) * (1 - positive[-eps]) for eps in EPSILONS.tolist()]
    )
