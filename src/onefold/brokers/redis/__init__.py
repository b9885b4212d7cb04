"""Redis streams, in and out; needs the ``redis`` extra."""

try:
    from onefold.brokers.redis.transport import RedisTransport
except ModuleNotFoundError as error:
    if error.name != "redis":
        raise
    raise ModuleNotFoundError("RedisTransport needs its driver: pip install 'onefold[redis]'", name="redis") from error

__all__ = ["RedisTransport"]
