"""The card of a published model: what it is and how to use it, with the header that hubs read."""

from __future__ import annotations

from xdlm.models import LladaConfig, PretrainedConfig
from xdlm.tokens import TextTokenizer
from xdlm.training.note import Note

_HEADER = """---
library_name: xdlm
pipeline_tag: text-generation
tags: [discrete-diffusion, masked-diffusion]
---
"""
_OURS = """
    from xdlm import load

    model = load("this-folder")
    print(model.sample(1, steps=32).text[0])
"""
_AUTO = """
With transformers, for the logits alone:

    import xdlm.auto
    from transformers import AutoModel

    model = AutoModel.from_pretrained("this-folder")
"""
_WRAPPED = """
transformers reads the weights too, but its own class may look at earlier tokens alone: this model was made
to look both ways, as `xdlm` runs it{shift}.
"""


_ADAPTERS = """---
library_name: peft
base_model: {base}
tags: [discrete-diffusion, lora]
---

{about}
Adapters (LoRA) alone, to stand beside the weights of {base}:

    import xdlm.auto
    from peft import PeftModel
    from transformers import AutoModel

    model = PeftModel.from_pretrained(AutoModel.from_pretrained("{base}"), "this-folder")
"""


def model_card(note: Note, tokenizer: TextTokenizer) -> str:
    """For the README.md beside the weights."""
    model, about = note.config.model, _about(note, tokenizer)
    if isinstance(model, PretrainedConfig):
        shift = ", and its state at a position is of the token after it" if model.shift else ""
        return f"{_HEADER}\n{about}{_OURS}{_WRAPPED.format(shift=shift)}"
    layout = "\nNames and layout are LLaDA's own.\n" if isinstance(model, LladaConfig) else ""
    return f"{_HEADER}\n{about}{_OURS}{_AUTO}{layout}"


def adapter_card(note: Note, tokenizer: TextTokenizer, base: str) -> str:
    """For the README.md beside adapters."""
    return _ADAPTERS.format(base=base, about=_about(note, tokenizer))


def _about(note: Note, tokenizer: TextTokenizer) -> str:
    config = note.config
    process, model = config.process, config.model
    settings = {"k": process.k, "p_uniform": process.p_uniform, "schedule": process.schedule}
    said = ", ".join(f"{name} = {value}" for name, value in settings.items() if value is not None)
    vocab = config.vocab(tokenizer.size)
    mask = "no mask" if vocab.mask_id is None else f"the mask is {vocab.mask_id}"
    what = model.kind
    if isinstance(model, PretrainedConfig):
        what = f"{model.shape['model_type']} of transformers"
    return (
        f"A discrete diffusion language model ({what}) of {process.kind} noise"
        f"{f' ({said})' if said else ''}: {note.weights} weights of step {note.step}, rows of "
        f"{config.data.length} tokens, a vocabulary of {vocab.size} states ({mask}).\n"
    )
