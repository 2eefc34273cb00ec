"""`python -m aquifer`."""

from aquifer.cli import main

if __name__ == "__main__":
    main()
