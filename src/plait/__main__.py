"""`python -m plait`."""

from plait.cli import main

if __name__ == "__main__":
    main()
