"""The `flux` command."""
