"""Requests to a model, answered together."""
