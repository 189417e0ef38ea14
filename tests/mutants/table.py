"""All mutants, area by area."""

from __future__ import annotations

from mutants import decoder, eagle3, learning, models, sampling, schedule, stopping, trees

MUTANTS = [*decoder.MUTANTS, *sampling.MUTANTS, *stopping.MUTANTS, *trees.MUTANTS, *eagle3.MUTANTS,
           *learning.MUTANTS, *models.MUTANTS, *schedule.MUTANTS]  # fmt: skip
