"""``python -m flux.integrations.symm_mem MODULE ARGS``: run a module with the ops enabled."""

from __future__ import annotations

from flux.integrations.symm_mem.run import main

if __name__ == "__main__":
    main()
