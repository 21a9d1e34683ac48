"""`python -m flux`: the same as the `flux` command."""

from flux.cli.app import main

if __name__ == "__main__":
    main()
