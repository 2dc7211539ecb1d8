"""Where attempts run: in this process, or in worker processes, which load this package too and want little of it."""
