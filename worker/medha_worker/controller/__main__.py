"""`python -m medha_worker.controller` runs `medha_worker.controller.process`."""

from medha_worker.controller.process import main

main()
