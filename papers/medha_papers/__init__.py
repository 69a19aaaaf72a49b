"""The study of the papers' claims: which runs, which figures, which verdicts. Not installed with Medha."""
