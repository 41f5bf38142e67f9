"""Gradients that are divided in every micro-step, in a rank."""

from __future__ import annotations

from ladder.trial.techniques import RankTechnique


class DividedGradients(RankTechnique):
    divides_gradients = True


TECHNIQUE = DividedGradients()
