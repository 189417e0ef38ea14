"""All mutants, area by area."""

from __future__ import annotations

from mutants import decoder, learning, sampling, stopping, trees

MUTANTS = [*decoder.MUTANTS, *sampling.MUTANTS, *stopping.MUTANTS, *trees.MUTANTS, *learning.MUTANTS]
