from medha_router.process import main

main()
