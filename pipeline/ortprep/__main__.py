"""`python -m ortprep` is the `ortprep` command."""

from ortprep.cli import main

if __name__ == "__main__":
    main()
