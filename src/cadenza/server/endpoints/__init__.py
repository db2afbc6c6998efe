"""The endpoints, a module each or for a few of one kind: bodies, handlers, answers and routes.

Each is an object that owns what is its own; what they share is in `server`. Never compares the
endpoint's name. Invariant: an endpoint is added by a module of its own and a line in `routes`.
"""
