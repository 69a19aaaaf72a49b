import sys

from medha_router.main import main

sys.exit(main(sys.argv[1:]))
