"""An OpenAI-compatible server: `create_app` over a started `Worker`, or `run` for all of it."""

from .app import create_app
from .choices import Engine
from .serving import bind, run
from .settings import Settings
from .worker import Worker

__all__ = ["Engine", "Settings", "Worker", "bind", "create_app", "run"]
