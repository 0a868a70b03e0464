"""`wm play --browser`: walk in the real environment and in dreams of it, side by side. Knows no sockets."""
