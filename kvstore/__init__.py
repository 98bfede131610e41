"""Pages, tags, the guard, layouts, digests, quantized formats, the prefix index and the transfer engines."""
