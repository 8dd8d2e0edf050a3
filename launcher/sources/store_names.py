"""Names of files in object stores and on web servers: `scheme://bucket/key`."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from launcher.errors import RecipeError, closest
from launcher.libraries.extras import missing_extra

_MODULES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "https": "aiohttp",
    "http": "aiohttp",
    "hf": "huggingface_hub",
}
"""What reads the names of a scheme."""
SCHEMES = ", ".join(f"{scheme}://" for scheme in _MODULES)
WEB = ("https", "http")
_HUB_PAGE = r"(?:huggingface\.co|hf\.co)/(?:datasets/)?([^/]+/[^/]+)"
"""A page of a model or data set, whose files have `/resolve/` in their addresses."""
_SECRETS = {
    *("x-amz-signature", "x-amz-credential", "x-amz-security-token", "x-goog-signature"),
    *("x-goog-credential", "awsaccesskeyid", "signature", "sig", "token", "access_token", "key"),
    *("api_key", "apikey", "auth", "authorization", "password", "secret"),
}
"""Parameters of an address that let whoever has the address read the file."""
CREDENTIALS = {
    "s3": "AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws, or a role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or a service account",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or `az login`",
    "hf": "HF_TOKEN, or `hf auth login`",
}
"""Where credentials are looked for."""
READ_ONLY = (*WEB, "hf")
"""Schemes of what is only read: a web server takes no files, and the hub makes a commit of each."""


def scheme_of(name: str) -> str | None:
    """What stands before `://`; None: the name is that of a local file."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", name)
    return found[1].lower() if found else None


def problem_of(name: str) -> str | None:
    """What is wrong with a name that has a scheme, without a secret in it; None: nothing."""
    scheme, shown = scheme_of(name), without_secrets(name)
    if scheme == "file":
        return f"{shown}: write the path alone, without file://"
    if scheme not in _MODULES:
        near = closest(str(scheme), _MODULES, similar=0.5)
        meant = f"; did you mean {near}://?" if near else ""
        return f"{shown}: unknown scheme {scheme}://{meant}; known are paths and {SCHEMES}"
    if shown != name or _has_password(name):
        what = "the run records it, so it may hold no secret"
        if scheme in WEB:
            what += "; download the file, or read it as s3://, gs:// or az:// with credentials"
        elif scheme in CREDENTIALS:
            what += f"; credentials come from {CREDENTIALS[scheme]}"
        return f"{shown}: {what}"
    if name != f"{scheme}://{rest_of(name)}" or not rest_of(name).strip("/"):
        return f"{shown}: must be {scheme}://BUCKET/KEY, in small letters before ://"
    if scheme in WEB and (page := re.match(_HUB_PAGE, rest_of(name))) and "/resolve/" not in name:
        return f"no such file: {shown}: that is an address of the hub; write {page[1]}"
    if scheme in WEB and is_pattern(urlsplit(name).path):
        return f"{shown}: a web server lists no files; name each one"
    return None


def _has_password(name: str) -> bool:
    authority = rest_of(name).partition("/")[0]
    return ":" in authority.rpartition("@")[0]


def rest_of(name: str) -> str:
    """What stands behind `://`."""
    return name.partition("://")[2]


def without_secrets(text: str) -> str:
    """A text with stars in place of passwords and signatures of addresses."""
    if "://" not in text:
        return text
    text = re.sub(r"(://)[^/\s@'\"]*:[^/\s@'\"]*@", r"\1***@", text)
    names = "|".join(map(re.escape, sorted(_SECRETS)))
    return re.sub(
        rf"([?&;](?:{names})=)(?!\*\*\*)[^&\s'\"\],;]+", r"\1***", text, flags=re.IGNORECASE
    )


def path_of(name: str) -> str:
    """The part of a name that ends in the suffix of the file: without the parameters of an address."""
    return urlsplit(name).path if scheme_of(name) in WEB else name


def refusal(name: str) -> str | None:
    """What is wrong with a name that has a scheme, or what must be installed to read it; None: nothing."""
    if (problem := problem_of(name)) is not None:
        return problem
    missing = missing_extra(_MODULES[str(scheme_of(name))])
    return None if missing is None else f"{name}: {missing}"


def require_store(name: str) -> None:
    """Raises RecipeError if the name cannot be read (`refusal`)."""
    if (problem := refusal(name)) is not None:
        raise RecipeError(problem)


def is_pattern(text: str) -> bool:
    """Whether a text may stand for several names."""
    return any(mark in text for mark in "*?[")
