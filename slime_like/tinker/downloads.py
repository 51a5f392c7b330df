"""Downloads of external checkpoints over HTTP, through signed links that expire."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from pathlib import Path
from urllib.parse import quote

from slime_like.tinker.errors import HttpError
from slime_like.tinker.model_registry import Checkpoint, ModelRegistry
from slime_like.tinker.serializers import iso_time

LINKS_S = 3600


class Downloads:
    """Creates and resolves download links. A link is valid for LINKS_S seconds and only in this
    process, because the signing secret is drawn at startup."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry
        self._secret = secrets.token_bytes(32)

    def links(self, checkpoint: Checkpoint, base_url: str) -> dict[str, object]:
        """Links for every file, in the format of the SDK's `get_external_weights_urls`.

        Args:
            checkpoint: A checkpoint of kind external.
            base_url: URL of /api/v1/downloads/ at the address that the client used.

        Returns:
            `urls`, by file name, and `expires`, an ISO 8601 time.

        Raises:
            HttpError: 422 for a checkpoint that is not external.
        """
        if checkpoint.kind != "external":
            raise HttpError(
                422,
                f"checkpoint {checkpoint.path} is of kind {checkpoint.kind}; only checkpoints of "
                "save_weights_external can be downloaded",
            )
        expires = int(time.time()) + LINKS_S
        urls = {}
        for name in files_of(checkpoint):
            path = f"{checkpoint.path.removeprefix('tinker://')}/{name}"
            urls[name] = f"{base_url}{expires}/{self._sign(expires, path)}/{quote(path)}"
        return {"urls": urls, "expires": iso_time(expires)}

    def file(self, expires: int, signature: str, path: str) -> Path:
        """The file behind a link.

        Args:
            expires: Unix time in seconds, from the link.
            signature: Signature of `expires` and `path`, hexadecimal.
            path: run/kind/name/file.

        Returns:
            A file inside a checkpoint's folder.

        Raises:
            HttpError: 403 for a link that has expired or was not signed by this process, 404 if the
                checkpoint or file does not exist any more.
        """
        if not hmac.compare_digest(self._sign(expires, path).encode(), signature.encode()):
            raise HttpError(403, "invalid link")
        if expires < time.time():
            raise HttpError(403, "the link has expired; request another one")
        run, kind, name, file = path.split("/", 3)
        checkpoint = self._registry.checkpoints.get(f"tinker://{run}/{kind}/{name}")
        if checkpoint is None or (local := files_of(checkpoint).get(file)) is None:
            raise HttpError(404, f"{path} does not exist any more")
        return local

    def _sign(self, expires: int, path: str) -> str:
        return hmac.new(self._secret, f"{expires}/{path}".encode(), hashlib.sha256).hexdigest()


def files_of(checkpoint: Checkpoint) -> dict[str, Path]:
    """Regular files by their path relative to the checkpoint; symbolic links are excluded."""
    root = Path(checkpoint.folder)
    return {
        str(path.relative_to(root)): path
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
