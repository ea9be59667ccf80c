"""`python -m windlass`, and `accelerate launch … -m windlass`: the same as the `windlass` command."""

from windlass.cli import main

if __name__ == "__main__":
    main()
