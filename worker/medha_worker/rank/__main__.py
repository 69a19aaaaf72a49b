"""`python -m medha_worker.rank` runs `medha_worker.rank.process`."""

from medha_worker.rank.process import main

main()
