"""A server whose engines run on several machines, as a cluster on Ray."""
