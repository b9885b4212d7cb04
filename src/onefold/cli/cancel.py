"""``onefold cancel``: cancel a message."""

from __future__ import annotations

from onefold.cli.console import Actor, AppOrUrl, AsJson, Reason, Url, UrlFile, actor_name, find_app, run_on, say
from onefold.cli.dead import MessageId
from onefold.errors import ConfigurationError


def cancel(
    message: MessageId,
    app: AppOrUrl = None,
    url: Url = None,
    url_file: UrlFile = None,
    *,
    actor: Actor = None,
    reason: Reason,
    as_json: AsJson = False,
) -> None:
    """Cancel a message; one that runs can no longer commit.

    Changes: the message ends as cancelled, or, if it is a saga, is undone; callers of result() get an error.

    Example: onefold cancel MESSAGE shop.tasks:app --reason 'ordered twice'
    """
    if not run_on(
        find_app(app, url, url_file), lambda opened: opened.cancel(message, actor=actor_name(actor), reason=reason)
    ):
        raise ConfigurationError(f"message {message} has ended or does not exist; nothing was done")
    say({"message": message, "cancelled": True}, as_json, f"{message} was cancelled")
