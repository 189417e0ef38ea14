"""All mutants, area by area."""

from __future__ import annotations

from mutants import decoder, eagle3, evaluation, learning, models, rows, sampling, schedule, stopping, trees

MUTANTS = [*decoder.MUTANTS, *eagle3.MUTANTS, *evaluation.MUTANTS, *learning.MUTANTS, *models.MUTANTS, *rows.MUTANTS,
           *sampling.MUTANTS, *schedule.MUTANTS, *stopping.MUTANTS, *trees.MUTANTS]  # fmt: skip
