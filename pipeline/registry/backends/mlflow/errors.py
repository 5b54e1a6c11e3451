"""What MLflow's client and the stores behind it raise, told in the words of every registry."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.errors import (
    AccessDeniedError,
    MissingExtraError,
    NotPublishedError,
    RegistryError,
    RegistryUnavailableError,
)

# What artifact stores and databases raise that MLflow talks to without its server; looked up among the
# modules that were imported, because nothing else can have raised one of theirs.
_STORE_FAMILIES = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("boto3.exceptions", "Boto3Error"),
    ("google.api_core.exceptions", "GoogleAPIError"),
    ("azure.core.exceptions", "AzureError"),
    ("sqlalchemy.exc", "SQLAlchemyError"),
)

_HINT_CREDENTIALS = (
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, for that server; "
    "or its --allowed-hosts lacks the name it is called by"
)
_USER_PART = re.compile(r"//[^/\s@]*@")
_QUERY = re.compile(r"\?[^\s'\")]*")
_LONGEST_QUOTE = 200
_NOT_FOUND = (404, 410)
_TRANSIENT = (408, 425, 429)


def import_client() -> Any:
    """Returns the module `mlflow`.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        import mlflow
    except ImportError as error:
        raise MissingExtraError(
            "registry needs a missing package: mlflow-skinny\n  expected it to be installed",
            hint="pip install 'ortprep[mlflow]'",
        ) from error
    return mlflow


def quote_answer(text: str) -> str:
    """Returns the first line of what a server said, short, and without users and queries of URLs."""
    line = next(iter(text.strip().splitlines()), "")
    return _QUERY.sub("", _USER_PART.sub("//", line))[:_LONGEST_QUOTE]


def error_of_status(doing: str, status: int, *, said: str = "", retry_after: str = "") -> RegistryError:
    """Returns the error that an HTTP status stands for.

    Args:
        doing: What failed, and which one.
        status: Of the answer.
        said: The server's words, if any.
        retry_after: Its header of that name.
    """
    got = f"HTTP {status}"
    if status in (401, 403):
        return AccessDeniedError(
            f"MLflow denies access: cannot {doing}\n  expected to be let in, got {got}",
            hint=_HINT_CREDENTIALS,
        )
    quoted = quote_answer(said)
    got = f"{got}: {quoted}" if quoted else got
    if status in _NOT_FOUND:
        return NotPublishedError(f"not in MLflow: cannot {doing}\n  expected to find it, got {got}")
    if status in _TRANSIENT or (status >= 500 and status != 501):
        error = RegistryUnavailableError(
            f"MLflow is not available: cannot {doing}\n  expected an answer, got {got}"
        )
        error.retry_after_s = float(retry_after) if re.fullmatch(r"[0-9]{1,6}", retry_after) else 0.0
        return error
    return RegistryError(f"MLflow refused: cannot {doing}\n  expected success, got {got}")


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raises what the client raises as the error of ours that fits.

    Args:
        doing: What is being done, and to which one.

    Raises:
        RegistryUnavailableError: There was no answer, or one that says to ask again later.
        AccessDeniedError: The server wants other credentials.
        NotPublishedError: It has no such thing.
        RegistryError: It refused for another reason.
    """
    import requests
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        # Not chained: the client's own text quotes whole URLs.
        raise _error_of_client(doing, error) from None
    except requests.RequestException as error:
        raise _unreachable(doing, error) from None
    except OSError as error:
        shown = error.strerror or type(error).__name__
        raise RegistryError(f"MLflow's store failed: cannot {doing}\n  got {shown}") from error
    except _store_families() as error:
        raise _unreachable(doing, error) from None


def _store_families() -> tuple[type[Exception], ...]:
    found = [getattr(sys.modules.get(module), name, None) for module, name in _STORE_FAMILIES]
    return tuple(kind for kind in found if kind is not None)


def _error_of_client(doing: str, error: Any) -> RegistryError:
    import requests
    from mlflow.exceptions import InvalidUrlException, RestException

    cause = error.__cause__ or error.__context__
    if isinstance(error, InvalidUrlException):
        return RegistryError(f"bad address of MLflow: cannot {doing}\n  expected http://HOST:PORT")
    if isinstance(cause, requests.HTTPError) and cause.response is not None:
        return error_of_status(doing, int(cause.response.status_code))
    if isinstance(cause, requests.RequestException | OSError):
        return _unreachable(doing, cause)
    if error.error_code == "INTERNAL_ERROR" and not isinstance(error, RestException):
        return _error_of_odd_answer(doing, error.message)
    if error.error_code == "ENDPOINT_NOT_FOUND":
        return RegistryError(f"no MLflow server there: cannot {doing}\n  expected its REST API, got HTTP 404")
    return error_of_status(doing, int(error.get_http_status_code()), said=error.message)


def _error_of_odd_answer(doing: str, message: str) -> RegistryError:
    status = re.search(r"failed with error code ([0-9]{3})", message)
    if status is not None:
        return error_of_status(doing, int(status[1]))
    if "not in a valid JSON format" in message.replace("\n", " "):
        return RegistryError(f"no MLflow server there: cannot {doing}\n  expected JSON, got something else")
    return RegistryError(f"MLflow's client failed: cannot {doing}\n  got {quote_answer(message)}")


def _unreachable(doing: str, error: BaseException) -> RegistryUnavailableError:
    return RegistryUnavailableError(
        f"MLflow cannot be reached: cannot {doing}\n  expected an answer, got {type(error).__name__}",
        hint="is the server running, and its address right? (curl SERVER/health)",
    )
