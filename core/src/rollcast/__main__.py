"""``python -m rollcast``: the command line."""

from rollcast.cli.app import main

if __name__ == "__main__":
    main()
