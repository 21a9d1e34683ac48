"""Plans for other trainers, and from their files: `flux plan export`, and `--plan FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flux.plan.options import READERS

if TYPE_CHECKING:
    from flux.plan.files import FilePlan


def _read(file: Path, gpus: int | None, model: str | None) -> FilePlan | None:
    from flux.trainers.files import imported  # few commands read files

    return imported(file, gpus, model)


READERS.append(_read)
