"""Requests over HTTP that save a run, or save and stop it: the same for pipelines and for buffers.

``desk.py`` holds the requests, ``http.py`` reads and writes messages, ``server.py`` listens on a thread of its own, and
``place.py`` is the small file that says where. What saves asks the desk, and tells it how a save has ended.
"""

from pipeline.control.desk import Desk as Desk
from pipeline.control.desk import Ticket as Ticket
from pipeline.control.place import Place as Place
from pipeline.control.place import find_places as find_places
from pipeline.control.server import ControlServer as ControlServer
