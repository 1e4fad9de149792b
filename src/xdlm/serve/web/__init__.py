"""The HTTP side. Its modules import fastapi at their top, and are themselves imported late."""
