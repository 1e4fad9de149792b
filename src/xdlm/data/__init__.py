"""Text and images: where they are, how they read, how they are cut, and the order of training."""

from xdlm.data.ahead import Ahead
from xdlm.data.coded import CodedManifest, is_coded, prepare_codes
from xdlm.data.crops import Views
from xdlm.data.documents import EMBEDDED, Source, data_root, open_source, read_documents
from xdlm.data.image_folder import ImageFolder
from xdlm.data.image_rows import ImageRows, load_images
from xdlm.data.loading import load_rows
from xdlm.data.order import ShuffledOrder
from xdlm.data.packing import Rows, TokensInMemory, TokenStream, pack
from xdlm.data.pairs import PairRows, load_pairs
from xdlm.data.prepare import Rules, prepare
from xdlm.data.shards import Manifest, ShardedTokens, is_prepared
from xdlm.data.specs import SPECS, ZERO_SHOT

__all__ = [
    "EMBEDDED",
    "SPECS",
    "ZERO_SHOT",
    "Ahead",
    "CodedManifest",
    "ImageFolder",
    "ImageRows",
    "Manifest",
    "PairRows",
    "Rows",
    "Rules",
    "ShardedTokens",
    "ShuffledOrder",
    "Source",
    "TokenStream",
    "TokensInMemory",
    "Views",
    "data_root",
    "is_coded",
    "is_prepared",
    "load_images",
    "load_pairs",
    "load_rows",
    "open_source",
    "pack",
    "prepare",
    "prepare_codes",
    "read_documents",
]
