"""Pages for a browser on this machine: the server, and what the pages are made of."""
