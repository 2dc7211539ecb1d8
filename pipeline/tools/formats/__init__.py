"""One module for each format: it writes a stream into a folder, or reads one out of what somebody wrote, or both."""
