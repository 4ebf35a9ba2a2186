"""What obstore says of an object store that failed, for those who keep something there."""

from __future__ import annotations

import re


def first_line(error: Exception) -> str:
    """Without obstore's dump of its own structures, and with the code of what S3 has answered."""
    text = str(error).strip()
    line = text.partition("\n")[0].partition(": <?xml")[0]
    code = re.search(r"<Code>(\w{1,80})</Code>", text)
    return line[:500] + (f": {code[1]}" if code else "")
