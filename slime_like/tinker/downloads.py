"""Download of external checkpoints over HTTP, through signed links that expire."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from pathlib import Path
from urllib.parse import quote

from slime_like.tinker.errors import HttpError
from slime_like.tinker.model_registry import Checkpoint, Registry
from slime_like.tinker.serializers import moment

LINKS_S = 3600


class Downloads:
    """Makes links and resolves them. A link is valid for LINKS_S seconds, and no longer than this
    process: the secret of the signatures is drawn when it starts."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._secret = secrets.token_bytes(32)

    def links(self, checkpoint: Checkpoint, base_url: str) -> dict[str, object]:
        """A link for every file, in the form that `get_external_weights_urls` of the SDK reads.

        Args:
            checkpoint: An external one.
            base_url: Of /api/v1/downloads/, at the address that the client used.

        Returns:
            `urls`, by file name, and `expires`, a time in ISO 8601.

        Raises:
            HttpError: 422 for a checkpoint that is not external.
        """
        if checkpoint.kind != "external":
            words = "only those of save_weights_external can be downloaded"
            raise HttpError(
                422, f"checkpoint {checkpoint.path} is of kind {checkpoint.kind}; {words}"
            )
        expires = int(time.time()) + LINKS_S
        urls = {}
        for name in files_of(checkpoint):
            path = f"{checkpoint.path.removeprefix('tinker://')}/{name}"
            urls[name] = f"{base_url}{expires}/{self._sign(expires, path)}/{quote(path)}"
        return {"urls": urls, "expires": moment(expires)}

    def file(self, expires: int, signature: str, path: str) -> Path:
        """The file behind a link.

        Args:
            expires: Unix time, in seconds, from the link.
            signature: Of `expires` and `path`, in hexadecimal digits.
            path: run/kind/name/file.

        Returns:
            A file inside a checkpoint's folder.

        Raises:
            HttpError: 403 for a link that this process did not sign or that has expired, 404 for a
                checkpoint or file that is gone.
        """
        if not hmac.compare_digest(self._sign(expires, path).encode(), signature.encode()):
            raise HttpError(403, "this link was not made by this server")
        if expires < time.time():
            raise HttpError(403, "this link has expired; ask for another")
        run, kind, name, file = path.split("/", 3)
        checkpoint = self._registry.checkpoints.get(f"tinker://{run}/{kind}/{name}")
        found = None if checkpoint is None else files_of(checkpoint).get(file)
        if found is None:
            raise HttpError(404, f"{path} is gone")
        return found

    def _sign(self, expires: int, path: str) -> str:
        return hmac.new(self._secret, f"{expires}/{path}".encode(), hashlib.sha256).hexdigest()


def files_of(checkpoint: Checkpoint) -> dict[str, Path]:
    """Regular files by their names relative to the checkpoint; symbolic links are left out."""
    root = Path(checkpoint.folder)
    return {
        str(path.relative_to(root)): path
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
