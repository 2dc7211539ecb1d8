"""Where attempts run."""

from pipeline.engines.local import LocalEngine as LocalEngine
