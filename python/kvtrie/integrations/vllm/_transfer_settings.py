"""The settings of `KvtrieNixlConnector`, among those of the connector that transfers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtrie._nearest import hint, nearest
from kvtrie.integrations._asked import SettingsError
from kvtrie.integrations.vllm._settings import WHERE

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY_FILE: Final = "kvtrie_key_file"
MODEL: Final = "kvtrie_model"

_KNOWN: Final = (KEY_FILE, MODEL)
# Other keys are those of the connector below, which are not known here.
_PREFIX: Final = "kvtrie_"
_CLOSE: Final = 0.85
_LEAST: Final = 16
_MOST: Final = 64


def check_transfer(extra: Mapping[str, object]) -> bytes:
    """Check the settings, and read the deployment's key.

    Raises:
        SettingsError: One of kvtrie's is unknown or invalid, or there is no key.
    """
    for name in extra:
        is_meant = str(name).startswith(_PREFIX) or nearest(str(name), _KNOWN, _CLOSE)
        if name not in _KNOWN and is_meant:
            near = hint(name, _KNOWN)
            msg = f"{WHERE}: unknown key {name!r}{near} (kvtrie's: {', '.join(_KNOWN)})"
            raise SettingsError(msg)
    model = extra.get(MODEL, "")
    if not isinstance(model, str) or (MODEL in extra and not model):
        msg = f"{WHERE}: {MODEL} must be a name, the same for sender and receiver, not {model!r}"
        raise SettingsError(msg)
    path = extra.get(KEY_FILE)
    if not isinstance(path, str) or not path:
        msg = f"{WHERE}: {KEY_FILE} must be the path of a file with the deployment's key, the same "
        msg += f"for sender and receiver, not {path!r}"
        raise SettingsError(msg)
    try:
        key = Path(path).read_bytes()
    except OSError as error:
        msg = f"{WHERE}: {KEY_FILE}: {path}: {error.strerror or error}"
        raise SettingsError(msg) from error
    if not _LEAST <= len(key) <= _MOST:
        msg = f"{WHERE}: {KEY_FILE}: {path} has {len(key)} bytes, a key has {_LEAST} to {_MOST}"
        raise SettingsError(msg)
    return key
