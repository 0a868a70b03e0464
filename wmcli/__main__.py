"""`python -m wmcli` is `wm`."""

from wmcli.cli.main import main

if __name__ == "__main__":
    main()
