"""``python -m flux.cli``, the same as ``python -m flux``."""

from flux.cli.app import main

if __name__ == "__main__":
    main()
