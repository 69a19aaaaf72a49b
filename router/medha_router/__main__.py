from medha_router.main import main

main()
