"""Make the files beside this one, with the published code of LLaDA (configuration_llada.py and
modeling_llada.py of GSAI-ML/LLaDA-8B-Base), which needs transformers 4 and so an environment of its own:

    python make.py FOLDER_OF_THE_CODE OUT

where config.json, which is only read, says what the small model is.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

code, out = map(Path, sys.argv[1:])
sys.path.insert(0, str(code))
from configuration_llada import LLaDAConfig  # noqa: E402
from modeling_llada import LLaDAModelLM  # noqa: E402

shape = json.loads(Path(__file__).with_name("config.json").read_text())
torch.manual_seed(0)
model = LLaDAModelLM(LLaDAConfig(**{k: v for k, v in shape.items() if k != "model_type"})).eval()
with torch.no_grad():
    for parameter in model.parameters():  # as they begin, attention is all but even
        parameter.add_(0.15 * torch.randn_like(parameter))
    tokens = torch.randint(0, shape["vocab_size"], (2, 41))
    tokens[:, ::3] = shape["mask_token_id"]
    far = torch.randint(0, shape["vocab_size"], (1, 1500))  # where rotary angles are large
    outputs = {
        "tokens": tokens.int(),
        "logits": model(tokens).logits,
        "far": far.int(),
        "far_logits": model(far).logits[:, -3:].contiguous(),
    }
weights = {name: value.contiguous() for name, value in model.state_dict().items()}
save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
save_file(outputs, out / "outputs.safetensors")
