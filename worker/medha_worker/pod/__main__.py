"""`python -m medha_worker.pod` runs `medha_worker.pod.process`."""

from medha_worker.pod.process import main

main()
