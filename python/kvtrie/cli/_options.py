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

# Prompts, and where in a snapshot they are looked for.
Tokenizer = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Directory with tokenizer.json: encodes and decodes text."),
]
AsText = Annotated[
    bool, typer.Option("--text", help="Read prompts as text, even if they look like ids.")
]
Model = Annotated[str | None, typer.Option(help="Namespace in the snapshot: model and revision.")]
KvDtype = Annotated[str | None, typer.Option(help="Namespace: element type.")]
Rope = Annotated[str | None, typer.Option(help="Namespace: how positions rotate K.")]
Adapter = Annotated[str | None, typer.Option(help="Namespace: content id of the adapter.")]
Salt = Annotated[str | None, typer.Option(help="Namespace: the tenant's salt.")]
