"""What formats have in common: streams of rows and of records, out of runs and into new ones."""
