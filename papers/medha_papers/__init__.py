"""The study of the papers' claims: its runs, figures and verdicts. Not installed with Medha."""
