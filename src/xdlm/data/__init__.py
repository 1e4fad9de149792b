"""Documents, packing and the order of training."""

from xdlm.data.documents import EMBEDDED, read_documents
from xdlm.data.order import ShuffledOrder
from xdlm.data.packing import Rows, pack

__all__ = ["EMBEDDED", "Rows", "ShuffledOrder", "pack", "read_documents"]
