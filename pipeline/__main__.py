"""`python -m pipeline` is the `ortprep` command."""

from pipeline.cli import main

if __name__ == "__main__":
    main()
