"""`python -m ds4`: the same as the command `ds4`."""

from ds4.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
