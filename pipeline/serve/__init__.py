"""A pipeline that one process holds, and trainers in other processes of this machine use: ``serve`` and ``connect``."""

from pipeline.serve.client import Client as Client
from pipeline.serve.client import connect as connect
from pipeline.serve.server import Serving as Serving
