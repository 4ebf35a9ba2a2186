"""Options that several commands have, with one name, meaning and bound in all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of text and tables.")
]
BlockSize = Annotated[int, typer.Option(min=1, max=4096, help="Tokens per block.")]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write a page, complete in one file.")
]
MinRun = Annotated[
    int, typer.Option(min=8, max=65_535, help="Tokens of the shortest run that is moved.")
]
